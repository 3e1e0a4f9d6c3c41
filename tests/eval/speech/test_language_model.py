"""The language model of books, against `write_arpa` of the transcripts by hand."""

import lzma

import pytest

from favor.eval.speech import language_model
from favor.models.speech import write_arpa

TEXT = "Mr. Grey came in. It was \u201ccold\u201d; very cold!\n\n* * *\n\nGrey left"
SAID = ["MISTER GREY CAME IN", "IT WAS COLD", "VERY COLD", "GREY LEFT"]


def call(*words):
    assert language_model.main([str(word) for word in words]) == 0


def test_sentences_are_transcripts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with lzma.open(tmp_path / "b.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("Grey came.")
    (tmp_path / "words.txt").write_text("Zebra\nit's\nnew york\ncold\n", encoding="utf-8")
    for order in (2, 3):
        texts = ["--texts", tmp_path / "a.txt", tmp_path / "b.txt.xz"]
        call(*texts, "--order", order, "--words", tmp_path / "words.txt", "--output_file", tmp_path / "new/lm.arpa")
        words = ["ZEBRA", "IT'S", "NEW", "YORK"]
        expected = write_arpa([*SAID, "GREY CAME"], tmp_path / "expected.arpa", order, words).read_text()
        assert (tmp_path / "new/lm.arpa").read_text() == expected
    assert "5 sentences of 13 words, 9 different ones and 4 more" in capsys.readouterr().out
    call("--texts", tmp_path / "a.txt", "--output_file", tmp_path / "lm.arpa")
    assert (tmp_path / "lm.arpa").read_text() == write_arpa(SAID, tmp_path / "expected.arpa", 3).read_text()


def test_what_it_refuses(tmp_path):
    (tmp_path / "empty.txt").write_text("1, 2, 3.")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    for name, order, message in (
        ("empty.txt", 3, "texts must hold at least one word"),
        ("none.txt", 3, r"expected a text file, got .*none\.txt"),
        ("a.txt", 7, "order must be 2 to 6, which KenLM reads, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            call("--texts", tmp_path / name, "--order", order, "--output_file", tmp_path / "lm.arpa")
