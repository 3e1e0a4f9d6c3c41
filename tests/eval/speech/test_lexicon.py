"""The lexicon of a dictionary and a network, by hand and torch's own GRU; the language model of books, by hand."""

import lzma
import sys

import numpy as np
import pytest
import torch

from favor.eval.speech import language_model, lexicon
from favor.eval.speech.lexicon import LETTERS, PHONEMES, LetterToSound
from favor.models.speech import Pronunciations, write_arpa

DICTIONARY = """good G UH1 D
day D EY1 # a comment
a.m. EY2 EH1 M
read R IY1 D
read(2) R EH1 D
read(3) R IY0 D
rose R OW1 Z
rock R AA1 K
"""
WIDTH = 4
TEXT = "Mr. Grey came in. It was \u201ccold\u201d; very cold!\n\n* * *\n\nGrey left"
SAID = ["MISTER GREY CAME IN", "IT WAS COLD", "VERY COLD", "GREY LEFT"]


@pytest.fixture
def dictionary(tmp_path):
    (tmp_path / "dictionary.txt").write_text(DICTIONARY)
    return ["--dictionary", str(tmp_path / "dictionary.txt"), "--output_file", str(tmp_path / "new/lexicon.txt")]


def network(path):
    """Random weights, with those of the package's names and shapes."""
    generator = np.random.default_rng(0)
    weights = {"enc_emb": (len(LETTERS), 3), "dec_emb": (len(PHONEMES), 3)}
    for name in ("enc", "dec"):
        weights |= {f"{name}_w_ih": (3 * WIDTH, 3), f"{name}_w_hh": (3 * WIDTH, WIDTH)}
        weights |= {f"{name}_b_ih": (3 * WIDTH,), f"{name}_b_hh": (3 * WIDTH,)}
    weights |= {"fc_w": (len(PHONEMES), WIDTH), "fc_b": (len(PHONEMES),)}
    np.savez(path, **{name: generator.normal(size=size).astype(np.float32) for name, size in weights.items()})
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


def test_the_words_of_a_dictionary_and_of_texts(dictionary, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LetterToSound, "installed", classmethod(lambda kind: None))
    (tmp_path / "text.txt").write_text("Good day's read; a rose's rock's. The roses' Zugzwang")
    assert lexicon.main([*dictionary, "--texts", str(tmp_path / "text.txt")]) == 0
    spoken = Pronunciations(tmp_path / "new/lexicon.txt").spoken
    expected = {"GOOD": "G UH D", "DAY": "D EY", "READ": "R IY D, R EH D", "ROSE": "R OW Z", "ROCK": "R AA K"}
    expected |= {"DAY'S": "D EY Z", "ROSE'S": "R OW Z IH Z", "ROCK'S": "R AA K S"}
    assert {word: ", ".join(map(" ".join, own)) for word, own in spoken.items()} == expected
    out = capsys.readouterr().out
    assert "5 words of the dictionary and 3 more" in out
    assert "4 words have no pronunciation, such as A, ROSES', THE, ZUGZWANG" in out


def test_the_network_is_that_of_the_package(tmp_path, monkeypatch, dictionary):
    """Two GRUs, the last state of the first begins the second, and the most probable phoneme goes on."""
    (tmp_path / "g2p_en").mkdir()
    (tmp_path / "g2p_en/__init__.py").write_text("raise ImportError('not imported')")
    weights = network(tmp_path / "g2p_en/checkpoint20.npz")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "g2p_en", raising=False)
    said = LetterToSound.installed()
    grus = {}
    for name in ("enc", "dec"):
        grus[name] = torch.nn.GRU(3, WIDTH, batch_first=True)
        kinds = {"weight_ih_l0": "w_ih", "weight_hh_l0": "w_hh", "bias_ih_l0": "b_ih", "bias_hh_l0": "b_hh"}
        grus[name].load_state_dict({own: weights[f"{name}_{other}"] for own, other in kinds.items()})
    letters = [LETTERS.index(one) for one in "zugs"] + [LETTERS.index("</s>")]
    state, expected = grus["enc"](weights["enc_emb"][letters][None])[1], [PHONEMES.index("<s>")]
    for _ in range(20):
        frames, state = grus["dec"](weights["dec_emb"][expected[-1]][None, None], state)
        expected.append(int((frames[0, 0] @ weights["fc_w"].T + weights["fc_b"]).argmax()))
        if PHONEMES[expected[-1]] == "</s>":
            break
    names = [PHONEMES[one].rstrip("012") for one in expected if PHONEMES[one][0] != "<"]
    assert said("ZUG'S").split() == names
    assert len(PHONEMES) == 74
    (tmp_path / "text.txt").write_text("zugs")
    lexicon.main([*dictionary, "--texts", str(tmp_path / "text.txt")])
    found = Pronunciations(tmp_path / "new/lexicon.txt").spoken.get("ZUGS", [()])
    assert found == [tuple(names)]


def test_sentences_are_transcripts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with lzma.open(tmp_path / "b.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("Grey came.")
    (tmp_path / "words.txt").write_text("Zebra\nit's\nnew york\ncold\n", encoding="utf-8")
    for order in (2, 3):
        texts = ["--texts", tmp_path / "a.txt", tmp_path / "b.txt.xz", "--output_file", tmp_path / "new/lm.arpa"]
        language_model.main([*map(str, texts), "--order", str(order), "--words", str(tmp_path / "words.txt")])
        words = ["ZEBRA", "IT'S", "NEW", "YORK"]
        expected = write_arpa([*SAID, "GREY CAME"], tmp_path / "expected.arpa", order, words).read_text()
        assert (tmp_path / "new/lm.arpa").read_text() == expected
    assert "5 sentences of 13 words, 9 different ones and 4 more" in capsys.readouterr().out
    language_model.main(["--texts", str(tmp_path / "a.txt"), "--output_file", str(tmp_path / "lm.arpa")])
    assert (tmp_path / "lm.arpa").read_text() == write_arpa(SAID, tmp_path / "expected.arpa", 3).read_text()


def test_what_is_refused(dictionary, tmp_path):
    (tmp_path / "dictionary.txt").write_text("a.m. EY2 EH1 M\ngood\n")
    with pytest.raises(ValueError, match="must have lines of a word and its phonemes"):
        lexicon.main(dictionary)
    (tmp_path / "empty.txt").write_text("1, 2, 3.")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    for name, order, message in (
        ("empty.txt", 3, "texts must hold at least one word"),
        ("none.txt", 3, r"expected a text file, got .*none\.txt"),
        ("a.txt", 7, "order must be 2 to 6, which KenLM reads, got 7"),
    ):
        words = ["--texts", str(tmp_path / name), "--order", str(order), "--output_file", str(tmp_path / "lm.arpa")]
        with pytest.raises(ValueError, match=message):
            language_model.main(words)
