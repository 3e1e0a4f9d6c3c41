"""The layout of the FAVOR# paper's Table 1: eight GLUE tasks, one row per backend, and the paper's own rows below.

A table is built from `Run` records, one per (task, backend, seed). All values are fractions in memory and
are multiplied by 100 only in the output, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from favor.eval.common.report import table_row


@dataclass(frozen=True)
class Column:
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
BASELINE_LABEL = "majority baseline"
DASH = "-"


@dataclass(frozen=True)
class Run:
    """One finished fine-tuning run: its place in the table and its measurements."""

    task: str
    backend: str
    seed: int
    value: float
    baseline: float | None = None
    train_rows: int | None = None
    seconds_per_step: float | None = None
    peak_memory_mb: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


def column(task: str) -> Column:
    """Gives the column of a task; raises ValueError for a task that Table 1 does not have."""
    for candidate in COLUMNS:
        if candidate.task == task:
            return candidate
    names = ", ".join(c.task for c in COLUMNS)
    raise ValueError(f"task must be one of {names} (the columns of Table 1), got {task!r}")


def is_exact(backend: str) -> bool:
    """Tells whether a row is a reference with exact softmax attention rather than a linear backend."""
    return not backend.startswith("favor")


def ordered_backends(runs: Sequence[Run]) -> list[str]:
    """Lists the backends in the order in which they first appear."""
    return list(dict.fromkeys(run.backend for run in runs))


def summarise(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """Computes mean and sample standard deviation over seeds, as `{backend: {task: {...}}}`."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for backend in ordered_backends(runs):
        row: dict[str, dict[str, Any]] = {}
        for col in COLUMNS:
            cell = sorted((r for r in runs if (r.backend, r.task) == (backend, col.task)), key=lambda r: r.seed)
            if cell:
                row[col.task] = _summarise_cell(cell, col.metric)
        summary[backend] = row
    return summary


def _summarise_cell(cell: Sequence[Run], metric: str) -> dict[str, Any]:
    seeds = [run.seed for run in cell]
    if len(set(seeds)) != len(seeds):
        raise ValueError(
            f"expected one run per seed for {cell[0].task} with {cell[0].backend}, got seeds {seeds}; "
            "remove the duplicated result folder"
        )
    values = [run.value for run in cell]
    steps = [run.seconds_per_step for run in cell if run.seconds_per_step is not None]
    peaks = [run.peak_memory_mb for run in cell if run.peak_memory_mb is not None]
    return {
        "metric": metric,
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "values": values,
        "seeds": seeds,
        "seconds_per_step": statistics.median(steps) if steps else None,
        "peak_memory_mb": max(peaks) if peaks else None,
        "details": [run.details for run in cell],
    }


def baselines(runs: Sequence[Run]) -> dict[str, float]:
    """Gives the majority-class metric of each task that was run; raises ValueError if two runs of a task disagree."""
    found: dict[str, float] = {}
    for run in runs:
        if run.baseline is None:
            continue
        if abs(found.setdefault(run.task, run.baseline) - run.baseline) > 1e-9:
            raise ValueError(
                f"the runs of {run.task} disagree on the majority baseline ({found[run.task]} and "
                f"{run.baseline}): they were not evaluated on the same file"
            )
    return found


def train_rows(runs: Sequence[Run]) -> dict[str, int]:
    """Gives the number of training rows of each task, the largest if runs differ."""
    found: dict[str, int] = {}
    for run in runs:
        if run.train_rows is not None:
            found[run.task] = max(run.train_rows, found.get(run.task, 0))
    return found


def _best(values: dict[str, float]) -> str | None:
    return max(values, key=lambda name: values[name]) if values else None


def _score(cell: dict[str, Any] | None, bold: bool) -> str:
    if cell is None:
        return DASH
    text = f"{100 * cell['mean']:.2f}"
    if bold:
        text = f"**{text}**"
    return text if cell["std"] is None else f"{text} ± {100 * cell['std']:.2f}"


def _average(scores: dict[str, float], tasks: Sequence[str]) -> list[str]:
    """Makes the cell of the mean over tasks: no cell if there is only one task, a dash if the row lacks a task."""
    if len(tasks) < 2:
        return []
    return [f"{statistics.fmean(scores[task] for task in tasks):.2f}" if scores.keys() >= set(tasks) else DASH]


def score_lines(runs: Sequence[Run]) -> list[str]:
    """Writes Table 1 as Markdown lines: favor's rows, the baseline, then the paper's rows.

    The last column is the mean over the tasks that were run.
    """
    summary, base, rows = summarise(runs), baselines(runs), train_rows(runs)
    best = {
        col.task: _best(
            {b: summary[b][col.task]["mean"] for b in summary if not is_exact(b) and col.task in summary[b]}
        )
        for col in COLUMNS
    }
    tasks = [c.task for c in COLUMNS if any(c.task in row for row in summary.values())]
    mean, none = (["mean"], [DASH]) if len(tasks) > 1 else ([], [])
    lines = [table_row(["System", *(f"{c.heading} {c.metric_label}" for c in COLUMNS), *mean])]
    lines.append(table_row(["---", *("---:" for _ in (*COLUMNS, *mean))]))
    lines.append(table_row(["training rows", *(str(rows.get(c.task, DASH)) for c in COLUMNS), *none]))
    for backend, row in summary.items():
        scores = [_score(row.get(c.task), best[c.task] == backend) for c in COLUMNS]
        means = {task: 100 * cell["mean"] for task, cell in row.items()}
        lines.append(table_row([f"`{backend}`", *scores, *_average(means, tasks)]))
    scores = [f"{100 * base[c.task]:.2f}" if c.task in base else DASH for c in COLUMNS]
    means = {task: 100 * value for task, value in base.items()}
    lines.append(table_row([BASELINE_LABEL, *scores, *_average(means, tasks)]))
    lines.append(table_row(["*paper: training rows*", *PAPER_TRAIN_ROWS, *none]))
    for name, values in PAPER.items():
        tops = [max(v[i] for v in PAPER.values()) for i in range(len(COLUMNS))]
        scores = [f"**{v:.2f}**" if v == top else f"{v:.2f}" for v, top in zip(values, tops, strict=True)]
        means = dict(zip((c.task for c in COLUMNS), values, strict=True))
        lines.append(table_row([f"*paper: {name}*", *scores, *_average(means, tasks)]))
    return lines


def mismatched_lines(runs: Sequence[Run]) -> list[str]:
    """Writes the scores on MNLI's mismatched half, which the paper's table does not have, if runs were evaluated on it.

    Its values are the mean over seeds, and the sample standard deviation where there are several.
    """
    halves = [
        replace(run, value=run.details["all_metrics"]["accuracy_mismatched"])
        for run in runs
        if "accuracy_mismatched" in run.details["all_metrics"]
    ]
    cells = [f"`{name}` {_score(row['mnli'], False)}" for name, row in summarise(halves).items()]
    return [f"- MNLI, mismatched half (accuracy): {', '.join(cells)}"] if cells else []


def cost_lines(runs: Sequence[Run]) -> list[str]:
    """Writes median seconds per step and peak memory of the rows that were run, as Markdown lines."""
    summary = summarise(runs)
    columns = [c for c in COLUMNS if any(c.task in row for row in summary.values())]
    lines = [table_row(["Backend", *(c.heading for c in columns)]), table_row(["---", *("---:" for _ in columns)])]
    for backend, row in summary.items():
        lines.append(table_row([f"`{backend}`", *(_cost(row.get(c.task)) for c in columns)]))
    return lines


def _cost(cell: dict[str, Any] | None) -> str:
    if cell is None or cell["seconds_per_step"] is None or cell["peak_memory_mb"] is None:
        return DASH
    return f"{cell['seconds_per_step']:.3f} s, {cell['peak_memory_mb']:.0f} MB"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws bars per task and backend; whiskers are one standard deviation, lines the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    summary, base = summarise(runs), baselines(runs)
    columns = [c for c in COLUMNS if any(c.task in row for row in summary.values())]
    width = 0.84 / max(1, len(summary))
    figure, axes = plt.subplots(figsize=(max(6.0, 2.2 * len(columns) + 2), 4.2))
    for i, (backend, row) in enumerate(summary.items()):
        done = [(x, row[c.task]) for x, c in enumerate(columns) if c.task in row]
        axes.bar(
            [x + (i - (len(summary) - 1) / 2) * width for x, _ in done],
            [100 * cell["mean"] for _, cell in done],
            width,
            yerr=[100 * (cell["std"] or 0.0) for _, cell in done],
            label=backend,
            color="black" if is_exact(backend) else f"C{i}",
            error_kw={"elinewidth": 0.8},
        )
    for x, c in enumerate(columns):
        if c.task in base:
            label = BASELINE_LABEL if x == 0 else "_nolegend_"
            axes.hlines(100 * base[c.task], x - 0.45, x + 0.45, colors="red", linestyles="dashed", label=label)
    axes.set_xticks(range(len(columns)), [f"{c.heading}\n{c.metric_label}" for c in columns])
    axes.set_ylabel("development set, x 100")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
