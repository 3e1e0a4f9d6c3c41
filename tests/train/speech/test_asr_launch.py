"""The speech training program in processes of its own: killed, and on two processes."""

import json

import pytest
import torch
from launching import fork, kill_after
from safetensors.torch import load_file
from speech import write_corpus

pytestmark = pytest.mark.slow
SETTINGS = {"preset": "tiny", "tokenizer_type": "char", "attn_implementation": "favor#", "num_features": 16}
SETTINGS |= {"exact_below": 0, "per_device_train_batch_seconds": 8, "learning_rate": 2e-3, "eval_epochs": 10}


def words(corpus, output, **values):
    given = {"data_dir": corpus, "output_dir": output, **SETTINGS, **values}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 8, "dev": 2})
    program = "favor.train.asr"
    settings = {"max_train_steps": 20, "checkpointing_steps": 4}
    fork(program, *words(corpus, tmp_path / "whole", **settings))
    again = words(corpus, tmp_path / "killed", **settings)
    kill_after(4, tmp_path / "killed", program, *again)
    assert "continuing from checkpoint-" in fork(program, *again, "--resume")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_share_the_batches(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", {"train": 9, "dev": 5})
    printed = fork("favor.train.asr", *words(corpus, tmp_path / "two", num_train_epochs=2), processes=2)
    assert printed.count("utterances to train on") == 1
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert results["num_processes"] == 2
    fork("favor.train.asr", *words(corpus, tmp_path / "one", num_train_epochs=2))
    whole = json.loads((tmp_path / "one" / "all_results.json").read_text())
    # Half the steps, rounded up; every utterance of the evaluation once.
    assert results["steps"] == 2 * -(-whole["steps"] // 4)
    assert results["utterances"] == whole["utterances"] == {"train": 9, "dev": 5}
