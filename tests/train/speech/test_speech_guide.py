"""Every command of the guides of speech and streaming runs, on a small corpus and with the smallest model."""

import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import isolated_here
from speech_corpus import (
    WORDS,
    few_and_short,
    make_processor,
    members,
    save,
    save_causal,
    write_corpus,
    write_shard,
    write_sound,
)

from favor.eval import whisper_ctc_long
from favor.models.speech import write_arpa
from favor.train.speech.sources import load_speech

GUIDES = [Path(__file__).parents[3] / f"docs/guides/{name}.md" for name in ("speech", "streaming")]
# Programs and their results; two write a file that the command names.
RESULTS = dict.fromkeys(("favor.train.asr", "favor.train.distill"), "all_results.json")
RESULTS |= {"favor.train.nst": "nst.json", "favor.eval.asr": "asr.json", "favor.eval.whisper_ctc": "whisper_ctc.json"}
RESULTS |= {"favor.eval.whisper_ctc_long": "whisper_ctc_long.json"}
FILES = ("favor.eval.speech.language_model", "favor.eval.speech.lexicon")
NOVEL = "".join(f"{word} a cab faced a bad bead and a cafe. " for word in ("Ace", "Dad", "Fed", "Cab", "Bad"))
SPLITS = ("train-clean-100", "dev-clean", "dev-other", "test-clean", "train", "dev", "test")


def commands():
    """Program and arguments of each command, in the order of the guides."""
    text = "".join(guide.read_text() for guide in GUIDES)
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            program = next((word for word in words if word in (*RESULTS, *FILES)), None)
            if program is not None:
                yield program, words[words.index(program) + 1 :]


def smaller(program, words):
    """The command with a small model and one step; options that stand later win."""
    if program == "favor.eval.asr":  # the transcripts of the corpus have other words
        return ["A" if word in ("MORNING", "NEW YORK") else word for word in words]
    if program in FILES:
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
        write_shard(tmp_path / "shards" / f"{split}-000000.tar", members(load_speech(tmp_path, split)[0], told=False))
    for name in ("musan/noise/free/hum.wav", "rooms/hall.wav"):
        write_sound(tmp_path / name, 0.25)
    write_arpa(["A B", "B A"], tmp_path / "lm.arpa")
    (tmp_path / "words.txt").write_text("BEAD\nCAFE\n")
    spoken = "".join(f"{word.lower()} {' '.join(word)}\n" for word in [*WORDS, "AND", "FACED"])
    (tmp_path / "cmudict.dict").write_text(spoken)
    (tmp_path / "novel.txt").write_text(NOVEL)
    monkeypatch.setattr(whisper_ctc_long, "isolated", isolated_here)
    few_and_short(monkeypatch, 1, 1.0)
    save(tmp_path / "whisper", make_processor())
    save_causal(tmp_path / "causal")
    return tmp_path


def test_the_commands_of_the_guide_run(place, fresh_accelerator):
    ran = []
    for program, words in commands():
        if "--language_model" in words and find_spec("flashlight") is None:
            continue
        import_module(program).main(smaller(program, words))
        fresh_accelerator()
        if program in FILES:
            first = "\\data\\" if program.endswith("model") else "BAD\tB A D"
            assert (place / words[words.index("--output_file") + 1]).read_text().startswith(first)
            continue
        ran.append(words[words.index("--output_dir") + 1])
        assert json.loads((place / ran[-1] / RESULTS[program]).read_text())
    assert {"out/asr", "out/asr/test", "out/noisy", "out/shards", "out/shards/test", "out/linear"} <= set(ran)
    assert {"out/phonemes_errors", "out/mean_errors", "out/voices_errors"} <= set(ran)
    assert {"out/whisper", "out/phonemes", "out/voices"} <= set(ran)
