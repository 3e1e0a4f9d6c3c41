"""Table, checks and figure of `favor.eval.papers.head_optimizer`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.common import report
from favor.eval.papers.head_optimizer.tasks import HeadTask

NAMES = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "bound": "SoftmaxBound",
    "defaults": "SoftmaxBound, defaults",
    "recommended": "SoftmaxBound, recommended",
}
COLORS = {"adamw": "C0", "sgd": "C7", "bound": "C3", "defaults": "C1", "recommended": "C1"}


def label(config: Mapping[str, Any]) -> str:
    """Describes a configuration in words: learning rates, and those options of SoftmaxBound that are usually varied."""
    words = [f"body {config['body_lr']:g}"]
    if config["head"] == "bound":
        words += [config["curvature"], f"damping {config['damping']:g}"]
        words += [f"{name} {config[name]:g}" for name in ("lr", "curvature_ema")]
    else:
        words.append(f"head {config['lr']:g}")
    return ", ".join(words)


@dataclass(frozen=True)
class Entry:
    """One configuration after one number of epochs, with all seeds.

    Args:
        method: a key of NAMES.
        epochs: number of epochs after which the losses were measured.
        config: the configuration.
        train: training loss by seed.
        test: test loss by seed.
        accuracy: test accuracy by seed.
        seconds: of an epoch, median.
        at_edge: whether one of its learning rates is the first or last of the grid.
        steps: loss of every batch, by seed.
    """

    method: str
    epochs: int
    config: Mapping[str, Any]
    train: list[float]
    test: list[float]
    accuracy: list[float]
    seconds: float
    at_edge: bool
    steps: list[list[float]]

    @classmethod
    def of(
        cls, method: str, epochs: int, config: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], at_edge: bool
    ) -> Entry:
        """Makes an entry from the runs with all seeds.

        Args:
            method: a key of NAMES.
            epochs: number of epochs after which the losses were measured.
            config: the configuration.
            runs: one per seed.
            at_edge: whether one of its learning rates is the first or last of the grid.
        """
        key = str(epochs)
        return cls(
            method,
            epochs,
            config,
            [run["train"][key] for run in runs],
            [run["test"][key][0] for run in runs],
            [run["test"][key][1] for run in runs],
            statistics.median([second for run in runs for second in run["seconds"]] or [0.0]),
            at_edge,
            [run["steps"] for run in runs],
        )

    def content(self) -> dict[str, Any]:
        """Gives the content for JSON: everything except the loss of every batch."""
        return {name: value for name, value in vars(self).items() if name != "steps"}


def checks(results: Mapping[str, Sequence[Entry]]) -> list[report.Check]:
    """Checks that SoftmaxBound has a lower mean training loss than AdamW, for every task and number of epochs."""
    found = []
    for task, entries in results.items():
        by = {(entry.method, entry.epochs): entry for entry in entries}
        for (method, epochs), entry in by.items():
            rival = by.get(("adamw", epochs))
            if method not in ("bound", "defaults", "recommended") or rival is None:
                continue
            ours, theirs = np.mean(entry.train), np.mean(rival.train)
            statement = f"{task}, {epochs} epochs: {NAMES[method]} has a lower training loss than the best AdamW"
            numbers = f"{ours:.4f} and {theirs:.4f}, lower in {_wins(entry, rival)}"
            found.append(report.Check(statement, numbers, bool(ours < theirs)))
    return sorted(found, key=lambda check: check.statement)


def _wins(entry: Entry, rival: Entry) -> str:
    pairs = list(zip(entry.train, rival.train, strict=True))
    return f"{sum(one < two for one, two in pairs)} of {len(pairs)} seeds"


def report_lines(results: Mapping[str, Sequence[Entry]], tasks: Mapping[str, HeadTask], text: str) -> list[str]:
    """Writes the Markdown report, one section per task; the lowest training loss after a number of epochs is bold.

    Args:
        results: entries by task.
        tasks: by name.
        text: explains how the measurements were made.
    """
    lines = ["# Optimizers of a softmax output layer", "", text]
    header = ["method", "epochs", "configuration", "training loss", "below AdamW", "test loss", "test accuracy, %"]
    for name, entries in results.items():
        rows = []
        for epochs in sorted({entry.epochs for entry in entries}):
            group = [entry for entry in entries if entry.epochs == epochs]
            lowest = min(float(np.mean(entry.train)) for entry in group)
            rival = next((entry for entry in group if entry.method == "adamw"), None)
            for entry in group:
                wins = "" if rival is None or entry is rival else _wins(entry, rival)
                loss = _spread(entry.train)
                rows.append(
                    [
                        NAMES[entry.method],
                        str(epochs),
                        label(entry.config) + (" (edge)" if entry.at_edge else ""),
                        f"**{loss}**" if np.mean(entry.train) == lowest else loss,
                        wins,
                        _spread(entry.test),
                        f"{100 * np.mean(entry.accuracy):.1f}",
                        f"{entry.seconds:.2f}",
                    ]
                )
        lines += ["", f"## {name}", "", tasks[name].about, "", *report.table([*header, "s/epoch"], rows)]
    return lines


def _spread(values: Sequence[float]) -> str:
    deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.4f} ± {deviation:.4f}"


def plot(results: Mapping[str, Sequence[Entry]], path: Path, points: int = 40) -> None:
    """Draws a panel per task: training loss of the batches against steps, of the entries of the last epoch.

    Args:
        results: entries by task.
        path: of the PNG.
        points: number of points of a curve; each is the mean over seeds and over neighbouring steps.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, len(results), figsize=(4.2 * len(results), 3.4), squeeze=False, layout="constrained")
    for axes, (name, entries) in zip(grid[0], results.items(), strict=True):
        last = max(entry.epochs for entry in entries)
        for entry in (entry for entry in entries if entry.epochs == last):
            number = min(len(steps) for steps in entry.steps)
            mean = np.mean([steps[:number] for steps in entry.steps], axis=0)
            parts = np.array_split(np.arange(number), min(points, number))
            style = {"color": COLORS[entry.method], "label": NAMES[entry.method]}
            axes.plot([part.mean() + 1 for part in parts], [mean[part].mean() for part in parts], **style)
        axes.set_title(f"{name}: best after {last} epochs", fontsize=10)
        axes.set_xlabel("steps")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    grid[0][0].set_ylabel("training loss of the batches")
    grid[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
