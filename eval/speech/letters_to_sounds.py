"""How words are spoken that no dictionary has: endings of known words, and the network of the package g2p-en."""

from __future__ import annotations

import string
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

LETTERS = ("<pad>", "<unk>", "</s>", *string.ascii_lowercase)
VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
OTHERS = {"B", "CH", "D", "DH", "F", "G", "HH", "JH", "K", "L", "M", "N", "NG", "P", "R", "S", "SH", "T", "TH"}
OTHERS |= {"V", "W", "Y", "Z", "ZH"}
# The network has each vowel with each stress, and a UW without one.
PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *sorted({f"{v}{s}" for v in VOWELS for s in "012"} | OTHERS | {"UW"}))
LONGEST = 20
HISSING, VOICELESS = {"S", "Z", "SH", "ZH", "CH", "JH"}, {"P", "T", "K", "F", "TH"}


def without_stress(phonemes: list[str]) -> str:
    """Joins phonemes with spaces, without the digits of their stress."""
    return " ".join(one.rstrip("012") for one in phonemes)


def possessive(stem: str) -> str:
    """Gives the phonemes of a word with 's, from those of the word."""
    last = stem.split()[-1]
    return f"{stem} {'IH Z' if last in HISSING else 'S' if last in VOICELESS else 'Z'}"


class LetterToSound:
    """The network of g2p-en (Park and Kim 2019), from letters to phonemes: two GRUs, greedy search.

    Args:
        path: the weights, `checkpoint20.npz` of the package.
    """

    def __init__(self, path: Path) -> None:
        weights = {name: torch.from_numpy(array).float() for name, array in np.load(path).items()}
        self.letters, self.phonemes = weights["enc_emb"], weights["dec_emb"]
        self.encoder, self.decoder = (_cell(weights, name) for name in ("enc", "dec"))
        self.out, self.bias = weights["fc_w"], weights["fc_b"]

    @classmethod
    def installed(cls) -> LetterToSound | None:
        """Loads the network of the package, without its other parts; None if the package is not installed."""
        found = find_spec("g2p_en")
        return None if found is None or found.origin is None else cls(Path(found.origin).parent / "checkpoint20.npz")

    @torch.no_grad()
    def __call__(self, word: str) -> str:
        """Gives the phonemes of a word, without stress; empty if the network finds none."""
        state = torch.zeros(1, self.encoder.hidden_size)
        for letter in [*word.lower().replace("'", ""), "</s>"]:
            place = LETTERS.index(letter) if letter in LETTERS else 1
            state = self.encoder(self.letters[place][None], state)
        last, found = PHONEMES.index("<s>"), []
        for _ in range(LONGEST):
            state = self.decoder(self.phonemes[last][None], state)
            last = int((state @ self.out.T + self.bias).argmax())
            if PHONEMES[last] == "</s>":
                break
            found.append(PHONEMES[last])
        return without_stress([one for one in found if one[0] != "<"])


def _cell(weights: dict[str, Tensor], name: str) -> nn.GRUCell:
    """Makes a GRU of its weights."""
    cell = nn.GRUCell(weights[f"{name}_w_ih"].shape[1], weights[f"{name}_w_hh"].shape[1])
    parts = {f"weight_{kind}": weights[f"{name}_w_{kind}"] for kind in ("ih", "hh")}
    cell.load_state_dict(parts | {f"bias_{kind}": weights[f"{name}_b_{kind}"] for kind in ("ih", "hh")})
    return cell
