"""The training program as users start it: `accelerate launch`, a kill in the middle, two processes."""

import json
from pathlib import Path

import pytest
import torch
from launching import LAUNCH, TWO, fork, kill_after, options, run
from safetensors.torch import load_file
from stopping import redrawing, same_weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import favor.models  # noqa: F401  registers Performer BERT
from favor.train.text.glue_data import get_task, load_glue
from favor.train.text.glue_report import glue_metrics

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def arguments(bert: Path, data: Path, output: Path, **values: object) -> list[str]:
    return options({"model_name_or_path": bert, "data_dir": data, "output_dir": output, **values})


def test_kill_and_resume_gives_the_same_bits(bert_folder, glue_folder, tmp_path):
    backend = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0}
    steps = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "checkpointing_steps": 5}
    run_settings = {"task_name": "sst2", "head_optimizer": "softmax_bound", "max_train_steps": 60, **backend, **steps}
    program = "favor.train.glue"
    model = redrawing(bert_folder, tmp_path / "redrawing", 7)
    fork(program, *arguments(model, glue_folder, tmp_path / "whole", **run_settings))

    killed = tmp_path / "killed"
    words = arguments(model, glue_folder, killed, **run_settings)
    kill_after(10, killed, program, *words)
    printed = fork(program, *words, "--resume")
    assert "continuing from checkpoint-" in printed

    assert same_weights(tmp_path / "whole", killed)
    first, second = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("whole", "killed"))
    assert first["metrics"] == second["metrics"]
    assert first["per_seed"][0]["history"] == second["per_seed"][0]["history"]


def test_two_processes_evaluate_every_sample_once_and_resume(bert_folder, glue_folder, tmp_path):
    # 13 samples in batches of 2 x 2: the last round has one sample for two processes.
    words = arguments(bert_folder, glue_folder, tmp_path / "two", task_name="stsb", per_device_eval_batch_size=2)
    words += ["--num_train_epochs", "2", "--checkpointing_steps", "3", "--per_device_train_batch_size", "3"]
    rate = ("--learning_rate", "1e-2")
    printed = run(*LAUNCH, *TWO, ROOT / "train" / "glue.py", *words, *rate)
    assert printed.count("majority baseline") == 1
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert results["num_processes"] == 2
    # 40 samples, 3 a process: 7 steps an epoch.
    assert results["steps"] == 14
    assert [path.name for path in sorted((tmp_path / "two").glob("checkpoint*"))] == ["checkpoint-12", "checkpoint-9"]

    data = load_glue("stsb", glue_folder).evaluation["validation"]
    pairs = zip(data["sentence1"][:], data["sentence2"][:], strict=True)
    said = [logits_of(tmp_path / "two", *pair).item() for pair in pairs]
    assert len(said) == 13
    expected = glue_metrics(get_task("stsb"), said, data["label"][:])
    assert results["metrics"]["spearmanr"] == pytest.approx(expected["spearmanr"], abs=1e-9)
    assert results["metrics"]["pearson"] == pytest.approx(expected["pearson"], abs=1e-4)

    # As if both processes had been killed in the second epoch, and the files of one were damaged.
    before = load_file(tmp_path / "two" / "model.safetensors")
    (tmp_path / "two" / "checkpoint-12" / "process_1.json").write_text("")
    for name in ("all_results.json", "model.safetensors"):
        (tmp_path / "two" / name).unlink()
    printed = fork("favor.train.glue", *words, *rate, "--resume", processes=2)
    assert "checkpoint-12 cannot be used: process_1.json cannot be read" in printed
    assert printed.count("continuing from checkpoint-9") == 1
    after = load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "two" / "all_results.json").read_text())["metrics"] == results["metrics"]


def logits_of(folder: Path, *texts: object) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")).logits
