"""Every command of the guides of speech and streaming runs, on a small corpus and with the smallest model."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile
from launching import isolated_here
from speech import WORDS, write_corpus
from speech_corpus import write_shard
from tiny_causal import save_causal
from tiny_whisper import make_processor, save

from favor.eval import asr as evaluation
from favor.eval import whisper_ctc, whisper_ctc_long
from favor.eval.speech import language_model, lexicon
from favor.models.speech import write_arpa
from favor.train import asr, distill, nst
from favor.train.speech import loaders
from favor.train.text import distill_data as text_data

GUIDES = [Path(__file__).parents[3] / f"docs/guides/{name}.md" for name in ("speech", "streaming")]
PROGRAMS = {
    "favor.train.asr": asr.main,
    "favor.train.distill": distill.main,
    "favor.train.nst": nst.main,
    "favor.eval.asr": evaluation.main,
    "favor.eval.speech.language_model": language_model.main,
    "favor.eval.speech.lexicon": lexicon.main,
    "favor.eval.whisper_ctc": whisper_ctc.main,
    "favor.eval.whisper_ctc_long": whisper_ctc_long.main,
}
TRAINED = dict.fromkeys(("favor.train.asr", "favor.train.distill"), "all_results.json")
RESULTS = TRAINED | {"favor.eval.asr": "asr.json"}
NOVEL = "".join(f"{word} a cab faced a bad bead and a cafe. " for word in ("Ace", "Dad", "Fed", "Cab", "Bad"))
SPLITS = ("train-clean-100", "dev-clean", "dev-other", "test-clean", "train", "dev", "test")


def commands():
    """Program and arguments of each command, in the order of the guides."""
    text = "".join(guide.read_text() for guide in GUIDES)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            program = next((word for word in words if word in PROGRAMS), None)
            if program is not None:
                yield program, words[words.index(program) + 1 :]


def smaller(program, words):
    """The command with a small model and one step; options that stand later win."""
    if program == "favor.eval.asr":  # the transcripts of the corpus have other words
        return ["A" if word in ("MORNING", "NEW YORK") else word for word in words]
    if program in ("favor.eval.speech.language_model", "favor.eval.speech.lexicon"):
        return words
    if program == "favor.eval.whisper_ctc":
        names = {"gemma": "causal", "out/phonemes_1": "out/phonemes_head"}  # no command makes the second seed
        words = [names.get(word, word) for word in words]
        return [*words, "--lm_weights", "0.5", "--word_scores", "1", "--beam_size", "5", "--choose_beam_size", "5"]
    if program == "favor.eval.whisper_ctc_long":
        return [*words, "--minutes", "0.02", "--step", "0.2", "--look_ahead", "0.2", "--context", "1"]
    if program == "favor.train.distill":
        return [*words, "--attention_steps", "1", "--model_steps", "1"]
    if "--encoder_learning_rate" in words:
        return [*words, "--max_train_steps", "1"]
    if {"whisper", "out/linear"} & {*words} and "--whisper_teacher" not in words:
        return [*words, "--max_train_steps", "1", "--join_seconds", "5"]
    words = ["tiny" if word == "small" else word for word in words]
    return [*words, "--max_train_steps", "1", "--tokenizer_type", "char"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folders that the guide names."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, dict.fromkeys(SPLITS, 2))
    for split in ("train", "dev", "test"):
        members = []
        for chapter in (tmp_path / "LibriSpeech" / split).glob("*/*"):
            for line in next(chapter.glob("*.txt")).read_text().splitlines():
                name, text = line.split(" ", 1)
                members += [(f"{name}.flac", (chapter / f"{name}.flac").read_bytes()), (f"{name}.txt", text.encode())]
        write_shard(tmp_path / "shards" / f"{split}-000000.tar", members)
    for name in ("musan/noise/free/hum.wav", "rooms/hall.wav"):
        (tmp_path / name).parent.mkdir(parents=True)
        soundfile.write(tmp_path / name, 0.1 * np.random.default_rng(0).normal(size=4000), 16000)
    write_arpa(["A B", "B A"], tmp_path / "lm.arpa")
    (tmp_path / "words.txt").write_text("BEAD\nCAFE\n")
    spoken = "".join(f"{word.lower()} {' '.join(word)}\n" for word in [*WORDS, "AND", "FACED"])
    (tmp_path / "cmudict.dict").write_text(spoken)
    (tmp_path / "novel.txt").write_text(NOVEL)
    monkeypatch.setattr(whisper_ctc_long, "isolated", isolated_here)
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", 1)
    monkeypatch.setattr(loaders, "JOIN_SECONDS", 1.0)
    for module in (loaders, text_data):
        monkeypatch.setattr(module, "HELD_OUT_SAMPLES", 1)
    save(tmp_path / "whisper", make_processor())
    save_causal(tmp_path / "causal")
    return tmp_path


def test_the_commands_of_the_guide_run(place, fresh_accelerator):
    ran = []
    for program, words in commands():
        if "--language_model" in words and find_spec("flashlight") is None:
            continue
        PROGRAMS[program](smaller(program, words))
        fresh_accelerator()
        if program in ("favor.eval.speech.language_model", "favor.eval.speech.lexicon"):
            first = "\\data\\" if program.endswith("model") else "BAD\tB A D"
            assert (place / words[words.index("--output_file") + 1]).read_text().startswith(first)
            continue
        ran.append(words[words.index("--output_dir") + 1])
        name = RESULTS.get(program, f"{program.rpartition('.')[2]}.json")
        assert json.loads((place / ran[-1] / name).read_text())
    assert {"out/asr", "out/asr/test", "out/noisy", "out/shards", "out/shards/test", "out/linear"} <= set(ran)
    assert {"out/phonemes_errors", "out/mean_errors", "out/voices_errors"} <= set(ran)
    assert {"out/whisper", "out/phonemes", "out/voices"} <= set(ran)
