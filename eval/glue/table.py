"""The layout of the FAVOR# paper's Table 1: eight GLUE tasks, one row per backend, and the paper's own rows below.

A table is built from `Run` records, one per (task, backend, seed). All values are fractions in memory and
are multiplied by 100 only in the output, as in the paper. How models were adapted to their attention stands below it.
"""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from favor.eval.common.launch import Backend
from favor.eval.common.pretrained import MODULE, PACKAGE, SHA256
from favor.eval.common.report import local_names, table


class Column(NamedTuple):
    """One column of Table 1: the task's short name, its heading, and the name of its metric."""

    task: str
    heading: str
    metric: str
    metric_label: str


COLUMNS = (
    Column("mnli", "MNLI(m)", "accuracy", "acc"),
    Column("qqp", "QQP", "accuracy", "acc"),
    Column("qnli", "QNLI", "accuracy", "acc"),
    Column("sst2", "SST-2", "accuracy", "acc"),
    Column("cola", "CoLA", "matthews_correlation", "MCC"),
    Column("stsb", "STS-B", "spearmanr", "Spearman"),
    Column("mrpc", "MRPC", "f1", "F1"),
    Column("rte", "RTE", "accuracy", "acc"),
)

# Table 1 of the FAVOR# paper (BERT-base, development sets), in the order of COLUMNS.
PAPER_TRAIN_ROWS = ("392k", "363k", "108k", "67k", "8.5k", "5.7k", "3.5k", "2.5k")
PAPER = {
    "ELU": (82.58, 90.05, 89.81, 92.43, 58.63, 87.91, 87.50, 67.15),
    "RELU": (82.49, 90.71, 89.68, 92.32, 57.57, 88.15, 87.25, 68.95),
    "FAVOR+": (77.69, 86.69, 89.41, 91.80, 54.87, 83.78, 80.73, 66.19),
    "FAVOR++": (82.29, 90.43, 89.73, 92.20, 58.85, 85.90, 88.73, 67.63),
    "FAVOR#": (82.69, 90.68, 90.01, 92.53, 59.33, 85.48, 87.99, 69.68),
}
DASH = "-"
EXACT = ("sdpa", "eager")
# What favor.train.distill does one after another, and the parts of a learning curve.
STAGES = ("closed form", "attention", "exact heads", "model")
PARTS = 10


@dataclass(frozen=True)
class Run:
    """A finished fine-tuning run: its place in the table, its score, a baseline's, and its `all_results.json`."""

    task: str
    backend: str
    seed: int
    value: float
    baseline: float
    machine: str
    results: Mapping[str, Any]

    @classmethod
    def of(cls, results: Mapping[str, Any], backend: str, machine: str) -> Run:
        """Makes a record from the `all_results.json` of one seed."""
        own, seeds = column(results["task_name"]), results["seeds"]
        if len(seeds) != 1:
            raise ValueError(f"expected the results of one seed, got seeds {seeds}; give a folder of one seed")
        score, baseline = results["metrics"][own.metric], results["baseline"][own.metric]
        return cls(own.task, backend, seeds[0], score, baseline, machine, results)

    @property
    def details(self) -> dict[str, Any]:
        """The facts about the run in the JSON file."""
        return {
            "machine": self.machine,
            "model": model_in_words(self.results["model_name_or_path"]),
            "all_metrics": self.results["metrics"],
            "options": self.results["favor"],
            "constant_predictions": bool(self.results["constant_prediction_seeds"]),
            **{name: self.results[name] for name in ("versions", "steps", "sources")},
        }


def column(task: str) -> Column:
    """Gives the column of a task; raises ValueError for a task that Table 1 does not have."""
    known = {column.task: column for column in COLUMNS}
    if task not in known:
        raise ValueError(f"task must be one of {', '.join(known)} (the columns of Table 1), got {task!r}")
    return known[task]


def model_in_words(path: str) -> str:
    """Gives the pretrained model's name, without the folders of this machine."""
    if MODULE in Path(path).parts:
        return f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE} (model.safetensors sha256 {SHA256})"
    return Path(path).name if Path(path).exists() else path


def summarise(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Computes mean and sample standard deviation over seeds, as `{backend: {task: {...}}}`."""
    summary: dict[str, dict[str, dict[str, Any]]] = {run.backend: {} for run in runs}
    for (backend, row), col in itertools.product(summary.items(), COLUMNS):
        cell = sorted((r for r in runs if (r.backend, r.task) == (backend, col.task)), key=lambda r: r.seed)
        if not cell:
            continue
        seeds, values = [run.seed for run in cell], [run.value for run in cell]
        if len(set(seeds)) != len(seeds):
            raise ValueError(f"expected one run per seed for {col.task} with {backend}, got seeds {seeds}")
        # A run that was resumed at its end has no time of a step.
        steps = [run.results["seconds_per_step"] for run in cell if run.results["seconds_per_step"] is not None]
        row[col.task] = {
            "metric": col.metric,
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
            "seeds": seeds,
            "seconds_per_step": statistics.median(steps) if steps else None,
            "peak_memory_mb": max(run.results["peak_memory_bytes"] for run in cell) / 2**20,
            "details": [run.details for run in cell],
        }
    return summary


def baselines(runs: Sequence[Run]) -> dict[str, float]:
    """Gives the majority-class metric of each task that was run; raises ValueError if two runs of a task disagree."""
    found: dict[str, float] = {}
    for run in runs:
        if abs(found.setdefault(run.task, run.baseline) - run.baseline) > 1e-9:
            raise ValueError(
                f"the runs of {run.task} disagree on the majority baseline ({found[run.task]} and "
                f"{run.baseline}): they were not evaluated on the same file"
            )
    return found


def train_rows(runs: Sequence[Run]) -> dict[str, int]:
    """Gives the number of training rows of each task, the largest if runs differ."""
    rows = sorted((run.results["train_samples"], run.task) for run in runs)
    return {task: number for number, task in rows}


def _score(cell: dict[str, Any] | None, bold: bool = False) -> str:
    if cell is None:
        return DASH
    text = f"{100 * cell['mean']:.2f}"
    text = f"**{text}**" if bold else text
    return text if cell["std"] is None else f"{text} ± {100 * cell['std']:.2f}"


def score_lines(runs: Sequence[Run]) -> list[str]:
    """Writes Table 1 as Markdown lines: favor's rows, the baseline, then the paper's rows.

    The last column is the mean over the tasks that were run, if they are several; a row that lacks one has a dash.
    """
    summary, numbers = summarise(runs), train_rows(runs)
    names = [col.task for col in COLUMNS]
    tasks = [name for name in names if any(name in row for row in summary.values())]
    several = len(tasks) > 1

    def line(label: str, cells: Mapping[str, str], values: Mapping[str, float] | None = None) -> list[str]:
        known = values is not None and values.keys() >= set(tasks)
        mean = f"{statistics.fmean(values[task] for task in tasks):.2f}" if known and values else DASH
        return [label, *(cells.get(name, DASH) for name in names), *([mean] if several else [])]

    rows = [line("training rows", {task: str(number) for task, number in numbers.items()})]
    linear = [row for backend, row in summary.items() if backend not in EXACT]
    best = {name: max((row[name]["mean"] for row in linear if name in row), default=None) for name in names}
    for backend, row in summary.items():
        bold = {task for task, cell in row.items() if backend not in EXACT and cell["mean"] == best[task]}
        cells = {task: _score(cell, task in bold) for task, cell in row.items()}
        rows.append(line(f"`{backend}`", cells, {task: 100 * cell["mean"] for task, cell in row.items()}))
    base = {task: 100 * value for task, value in baselines(runs).items()}
    rows.append(line("majority baseline", {task: f"{value:.2f}" for task, value in base.items()}, base))
    rows.append(line("*paper: training rows*", dict(zip(names, PAPER_TRAIN_ROWS, strict=True))))
    tops = [max(values) for values in zip(*PAPER.values(), strict=True)]
    for name, values in PAPER.items():
        shown = [f"**{v:.2f}**" if v == top else f"{v:.2f}" for v, top in zip(values, tops, strict=True)]
        own = dict(zip(names, values, strict=True))
        rows.append(line(f"*paper: {name}*", dict(zip(names, shown, strict=True)), own))
    headings = [f"{col.heading} {col.metric_label}" for col in COLUMNS]
    return table(["System", *headings, *(["mean"] if several else [])], rows)


def mismatched_lines(runs: Sequence[Run]) -> list[str]:
    """Writes the scores on MNLI's mismatched half, which the paper's table does not have, if runs were evaluated on it.

    Its values are the mean over seeds, and the sample standard deviation where there are several.
    """
    name = "accuracy_mismatched"
    halves = [replace(run, value=run.results["metrics"][name]) for run in runs if name in run.results["metrics"]]
    cells = [f"`{backend}` {_score(row['mnli'])}" for backend, row in summarise(halves).items()]
    return [f"- MNLI, mismatched half (accuracy): {', '.join(cells)}"] if cells else []


def cost_lines(runs: Sequence[Run]) -> list[str]:
    """Writes median seconds per step and peak memory of the rows that were run, as Markdown lines."""
    summary = summarise(runs)
    columns = [col for col in COLUMNS if any(col.task in row for row in summary.values())]
    rows = []
    for backend, row in summary.items():
        cells = (row.get(col.task) for col in columns)
        timed = (cell if cell and cell["seconds_per_step"] is not None else None for cell in cells)
        shown = (f"{c['seconds_per_step']:.3f} s, {c['peak_memory_mb']:.0f} MB" if c else DASH for c in timed)
        rows.append([f"`{backend}`", *shown])
    return table(["Backend", *(col.heading for col in columns)], rows)


def read_adapted(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads the costs, errors and losses (means of ten parts) that `favor.train.distill` wrote, by label of the row."""
    found = {}
    for folder in folders:
        label = Backend.adapted(folder).label
        results = json.loads((Path(folder) / "all_results.json").read_text())
        losses = {stage: results[f"{stage}_loss"] for stage in ("attention", "model")}
        losses = {stage: np.array_split(own, PARTS) for stage, own in losses.items() if len(own) >= PARTS}
        found[label] = {
            "command": shlex.join(local_names(shlex.split(results["command"]))),
            "minutes": results["seconds"] / 60,
            "errors": results["errors"],
            "exact_heads": sum(len(layer.get("exact_heads", ())) for layer in (results["layers"] or {}).values()),
            "losses": {stage: [float(part.mean()) for part in parts] for stage, parts in losses.items()},
        }
    return found


def adaptation_lines(adapted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Writes the section about adaptation; none for no models."""
    if not adapted:
        return []
    errors, curves = [], []
    for name, own in adapted.items():
        shown = (f"{own['errors'][stage]:.4f}" if stage in own["errors"] else "" for stage in STAGES)
        errors.append([f"`{name}`", f"{own['minutes']:.0f}", str(own["exact_heads"]), *shown])
        for stage, losses in own["losses"].items():
            curves.append([f"`{name}`, {stage}", *(f"{loss:.4f}" for loss in losses)])
    about = (
        "Learning curves: the mean loss of each tenth of the steps. Attention: relative error of the output of a head. "
        "Model: relative squared error of the hidden states and divergence of the predictions, as the weights in the "
        "command say."
    )
    return [
        "",
        "## Adaptation",
        "",
        *(f"- `{name}`: `{own['command']}`" for name, own in adapted.items()),
        "",
        "Relative error of the hidden states on samples that were held out, after each stage:",
        "",
        *table(["model", "minutes", "number of exact heads", *(f"after {stage}" for stage in STAGES)], errors),
        *(["", about, "", *table(["model, stage", *map(str, range(1, PARTS + 1))], curves)] if curves else []),
    ]
