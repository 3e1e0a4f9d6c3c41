"""Loads saved fine-tuning runs again and evaluates them, independently of the program that trained them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

import favor
import favor.models  # registers the zoo, so that its checkpoints reload with their backend
from favor.eval.common.launch import Backend
from favor.models.stored_backend import keeps_backend
from favor.train.common.arguments import DataArguments
from favor.train.text.glue_data import get_task, load_glue, with_distractors
from favor.train.text.glue_models import label_rows, names_of, tokenized
from favor.train.text.glue_report import glue_metrics, named
from favor_command import saved


def find_runs(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Finds the folders of one-seed runs below `root`, with their `all_results.json`.

    Raises:
        ValueError: if there are no such runs.
    """
    found = [(path.parent, json.loads(path.read_text())) for path in sorted(root.rglob("all_results.json"))]
    runs = [(folder, results) for folder, results in found if (folder / "config.json").exists()]
    if not runs:
        raise ValueError(
            f"expected saved runs (folders with all_results.json and config.json) below {root}, found none; "
            "train some with favor.train.glue or with favor.eval.glue without --checkpoints"
        )
    return runs


def record_of(folder: Path, results: dict[str, Any]) -> dict[str, str]:
    """Gives the `backend` and the `machine` of a run: as `favor.eval.glue` recorded them, else from the results."""
    name, options = results["attn_implementation"], results["favor"] or {}
    backend = Backend(name, options.get("features") if name in ("favor#", "favor_sharp") else None)
    record = folder / "cell.json"
    written = json.loads(record.read_text()) if record.exists() else {}
    return {"backend": backend.label, "machine": results["device"]} | written


def load_model(folder: Path, results: dict[str, Any]) -> Any:
    """Loads the saved model with the backend of its training.

    Zoo models remember their backend; for others it is set here, and its options are read from the config.
    """
    model = saved.load_model(AutoModelForSequenceClassification, str(folder))
    backend = results["attn_implementation"]
    if model.config._attn_implementation != backend:
        if keeps_backend(model.config.model_type):
            raise ValueError(
                f"{folder} should load with {backend}, but loaded with {model.config._attn_implementation}"
            )
        favor.configure(model, attn_implementation=backend)
    return model.eval()


@torch.no_grad()
def evaluate(folder: Path, results: dict[str, Any], data_dir: str | None) -> tuple[dict[str, float], list[int]]:
    """Computes the metrics of a saved run on its development sets, with its training's limit of length.

    Also returns how many tokens each sample of the first one has.

    Args:
        folder: where `save_pretrained` wrote model and tokenizer.
        results: the run's `all_results.json`.
        data_dir: as in `favor.train.glue`. None: the data folder of the training, else the hub.
    """
    known = {field.name for field in fields(DataArguments)} & results["arguments"].keys()
    arguments = DataArguments(**{name: results["arguments"][name] for name in known})
    task = get_task(results["task_name"])
    data = load_glue(task.name, data_dir or arguments.data_dir, train=False)
    data.keep_first(None, arguments.max_eval_samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(folder, results).to(device), saved.load_processor(str(folder))
    rows, _ = label_rows(names_of(model.config), task, str(folder), "train it again")
    mixed = results["mixed_precision"]
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=None if mixed == "no" else 8)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed)
    scores: dict[str, float] = {}
    lengths: list[int] = []
    for split, texts in data.evaluation.items():
        encoded = tokenized(with_distractors(texts, task, arguments.distractors), task, tokenizer, arguments)
        lengths = lengths or [len(ids) for ids in encoded["input_ids"]]
        guesses, labels = [], []
        for batch in DataLoader(encoded, results["arguments"]["per_device_eval_batch_size"], collate_fn=collate):
            labels.append(batch.pop("labels"))
            with torch.autocast(device.type, precision) if precision else contextlib.nullcontext():
                logits = model(**batch.to(device)).logits.float()[:, rows]
            guesses.append((logits.squeeze(-1) if task.is_regression else logits.argmax(-1)).cpu())
        said, true = torch.cat(guesses).numpy(), torch.cat(labels).numpy()
        scores |= named(glue_metrics(task, said, true), split)
    return scores, lengths
