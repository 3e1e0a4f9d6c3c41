"""Tables, checks and heat maps of `favor.eval.language.needle`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.common import report

Answer = Mapping[str, Any]


class Cells:
    """Answers by variant, task and length.

    Args:
        variants: labels; the first is exact attention.
        lengths: in rising order.
        tasks: names.
    """

    def __init__(self, variants: Sequence[str], lengths: Sequence[int], tasks: Sequence[str]) -> None:
        self.variants, self.lengths, self.tasks = list(variants), list(lengths), list(tasks)
        self._answers: dict[tuple[str, str, int], list[Answer]] = {}
        self._seconds: dict[tuple[str, int], list[list[float]]] = {}

    def add(self, variant: str, length: int, case: int, result: Mapping[str, Any]) -> None:
        """Adds the result of `answer` for one document.

        Args:
            variant: label of the variant.
            length: tokens of the document.
            case: number of the document.
            result: of `answer`.
        """
        for found in result["answers"]:
            self._answers.setdefault((variant, found["task"], length), []).append({**found, "case": case})
        self._seconds.setdefault((variant, length), []).append(result["seconds"])

    def of(self, variant: str, task: str, length: int) -> list[Answer]:
        """Gives all answers of a cell, in the order of the documents.

        Args:
            variant: label of the variant.
            task: name of the task.
            length: tokens of the documents.
        """
        return self._answers[variant, task, length]

    def mean(self, variant: str, task: str, length: int, what: str) -> float:
        """Computes the mean "score" or "nats" of a cell.

        Args:
            variant: label of the variant.
            task: name of the task.
            length: tokens of the documents.
            what: "score" or "nats".
        """
        return float(np.mean([found[what] for found in self.of(variant, task, length)]))

    def by_depth(self, variant: str, task: str) -> dict[float, dict[int, float]]:
        """Computes accuracy by depth and length; empty for tasks whose facts are at several places."""
        found: dict[float, dict[int, list[float]]] = {}
        for length in self.lengths:
            for one in self.of(variant, task, length):
                if one["depth"] is not None:
                    found.setdefault(one["depth"], {}).setdefault(length, []).append(one["score"])
        return {d: {n: float(np.mean(x)) for n, x in found[d].items()} for d in sorted(found)}

    def seconds(self) -> dict[str, dict[str, list[float]]]:
        """Computes the mean seconds of reading a document and of all its answers, by variant and length."""
        return {
            variant: {str(n): np.mean(self._seconds[variant, n], 0).round(3).tolist() for n in self.lengths}
            for variant in self.variants
        }

    def table(self) -> list[dict[str, Any]]:
        """Gives every cell as a plain dictionary."""
        return [
            {
                "variant": variant,
                "task": task,
                "length": length,
                "answers": len(self.of(variant, task, length)),
                "accuracy": self.mean(variant, task, length, "score"),
                "nats": self.mean(variant, task, length, "nats"),
                "by_depth": {f"{d:g}": own[length] for d, own in self.by_depth(variant, task).items() if length in own},
            }
            for task in self.tasks
            for variant in self.variants
            for length in self.lengths
        ]


def lines(cells: Cells, context: Mapping[str, Any], arguments: argparse.Namespace) -> list[str]:
    """Writes the Markdown report.

    Args:
        cells: all answers.
        context: model, command and versions.
        arguments: of the program.
    """
    how = (
        "the facts of all tasks but common words in one document" if arguments.together else "a document for each task"
    )
    found = [
        "# What is found in a long text",
        "",
        f"Model {context['model']}, float32; {len(arguments.cases)} documents a task and length, from "
        f"{Path(arguments.text).name}; {how}; seed {arguments.seed}. Accuracy in % (nats of a token of the right "
        "answer): more of the first, less of the second is better. Answers are generated greedily, token by token, "
        "with the cache; multikey asks for each of its keys.",
        "",
        *(f"- `{variant.label}`: cache {variant.cache}" for variant in arguments.variants),
    ]
    for task in cells.tasks:
        rows = []
        for variant in cells.variants:
            pairs = [
                (cells.mean(variant, task, n, "score"), cells.mean(variant, task, n, "nats")) for n in cells.lengths
            ]
            rows.append([f"`{variant}`", *(f"{100 * score:.0f} ({nats:.2f})" for score, nats in pairs)])
        found += ["", f"## {task}", "", *report.table(["attention", *(f"{n} tokens" for n in cells.lengths)], rows)]
    rows = [
        [f"`{variant}`", *(f"{read:.3g} + {asked:.3g}" for read, asked in own.values())]
        for variant, own in cells.seconds().items()
    ]
    header = ["attention", *(f"{n} tokens" for n in cells.lengths)]
    return [*found, "", "## Seconds: to read a document, and for all its answers", "", *report.table(header, rows)]


def checks(cells: Cells) -> list[report.Check]:
    """Checks that each variant finds at least 95 % of the needles that exact attention finds."""
    exact, *others = cells.variants
    found = []
    for task in (task for task in cells.tasks if task in ("single", "multikey")):
        for variant in others:
            counts = [[sum(a["score"] for a in cells.of(v, task, n)) for v in (variant, exact)] for n in cells.lengths]
            numbers = ", ".join(f"{n}: {a:g} of {b:g}" for n, (a, b) in zip(cells.lengths, counts, strict=True))
            statement = f"{variant} finds at least 95 % of what {exact} finds, task {task}, at every length"
            found.append(report.Check(statement, numbers, all(own >= 0.95 * most for own, most in counts)))
    return found


def plot(cells: Cells, path: Path) -> None:
    """Draws a heat map of accuracy by depth and length for each variant (columns) and task with one place (rows)."""
    shown = [task for task in cells.tasks if cells.by_depth(cells.variants[0], task)]
    if not shown:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (1.5 + 2.6 * len(cells.variants), 0.6 + 2.8 * len(shown))
    figure, grid = plt.subplots(len(shown), len(cells.variants), figsize=size, squeeze=False, layout="constrained")
    for row, task in zip(grid, shown, strict=True):
        for axes, variant in zip(row, cells.variants, strict=True):
            own = cells.by_depth(variant, task)
            values = [[100 * at.get(length, np.nan) for length in cells.lengths] for at in own.values()]
            image = axes.imshow(np.array(values), vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
            axes.set_title(f"{task}\n{variant.replace(',', ', ')}", fontsize=7, wrap=True)
            axes.set_xticks(range(len(cells.lengths)), [str(n) for n in cells.lengths], fontsize=7)
            axes.set_yticks(range(len(own)), [f"{100 * depth:.0f} %" for depth in own], fontsize=7)
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("depth", fontsize=8)
    figure.colorbar(image, ax=grid, label="accuracy, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)
