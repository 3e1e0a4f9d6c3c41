"""Tables, checks and figure of `favor.eval.kernel_classification`."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.common import report

Results = Mapping[str, Mapping[str, Any]]
MEAN = "mean over data sets"
SIGNED = {"RBFSampler": "--", "trig": ":"}  # line styles of methods without positive features


def methods_of(results: Results) -> list[str]:
    """Lists the methods in the order in which they ran."""
    return list(next(iter(results.values()))["splits"][0]["methods"])


def accuracy(result: Mapping[str, Any], method: str, count: int) -> float:
    """Computes the test accuracy of one method on one data set, the mean over splits.

    Args:
        result: of the data set.
        method: name of the method.
        count: number of features.
    """
    return float(np.mean([split["methods"][method][str(count)]["test"] for split in result["splits"]]))


def mean_accuracy(results: Results, method: str, count: int) -> float:
    """Computes the test accuracy, the mean over data sets.

    Args:
        results: by data set.
        method: name of the method.
        count: number of features.
    """
    return float(np.mean([accuracy(result, method, count) for result in results.values()]))


def checks(results: Results, counts: Sequence[int]) -> list[report.Check]:
    """Checks that, on average over the data sets, cderf is at least as good as sderf, and sderf as gerf, at every M."""
    order = [name for name in ("cderf", "sderf", "gerf") if name in methods_of(results)]
    found = []
    for better, worse in itertools.pairwise(order):
        pairs = [[100 * mean_accuracy(results, method, count) for method in (better, worse)] for count in counts]
        numbers = ", ".join(f"M = {c}: {one:.2f} and {two:.2f}" for c, (one, two) in zip(counts, pairs, strict=True))
        statement = f"mean accuracy of {better} is at least that of {worse} at every M"
        found.append(report.Check(statement, numbers, all(one >= two for one, two in pairs)))
    return found


def report_lines(results: Results, counts: Sequence[int], arguments: argparse.Namespace) -> list[str]:
    """Writes the Markdown report: the mean over data sets, then one section per data set; the best of a column is bold.

    Args:
        results: by data set.
        counts: numbers of features.
        arguments: of the program.
    """
    lines = [
        "# Kernel classification with random features (Figure 3 of the FAVOR# paper)",
        "",
        *_settings(arguments),
        "",
        f"## {MEAN[0].upper()}{MEAN[1:]}",
        "",
        *_table({m: [mean_accuracy(results, m, c) for c in counts] for m in methods_of(results)}, None, counts),
    ]
    exact = np.mean([_mean(result, "exact") for result in results.values()])
    lines += [
        "",
        f"Exact kernel {100 * exact:.1f}, most common class "
        f"{100 * np.mean([_majority(result) for result in results.values()]):.1f}.",
    ]
    for name, result in results.items():
        sizes = result["splits"][0]["sizes"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['rows']} rows, {result['dim']} columns after encoding, {result['classes']} classes; "
            f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test rows. Exact kernel "
            f"{100 * _mean(result, 'exact'):.1f}, most common class {100 * _majority(result):.1f}. In brackets: "
            "standard deviation over draws, chosen s"
            + (" (both the mean, that of s geometric, over splits)." if arguments.shuffles > 1 else "."),
            "",
            *_table({m: [accuracy(result, m, c) for c in counts] for m in methods_of(results)}, result, counts),
        ]
    return lines


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Explains in words how the measurements were made."""
    splits = f"{arguments.shuffles} random splits, averaged" if arguments.shuffles > 1 else "one random split"
    used = f" The first {arguments.max_rows} rows after the shuffle are used." if arguments.max_rows else ""
    scales = f"{len(arguments.scales)} values, {min(arguments.scales):g} to {max(arguments.scales):g}"
    return [
        f"Test accuracy in %, Nadaraya-Watson with the Gaussian kernel exp(-s^2 |u - v|^2/2); 90/5/5, {splits}, seed "
        f"{arguments.seed}; {arguments.feature_seeds} draws of the features in validation and as many fresh ones in "
        f"test; s by validation from {scales}.{used} Columns that read as numbers are numbers, others one-hot (chess "
        "board files a-h are 1-8); every column is centred and scaled to unit variance on the training part.",
        "",
        "Parameters are fitted to (s test inputs, s training inputs), in validation to (s validation inputs, s "
        "training inputs), without labels. Directions are orthogonal, those of cderf in opposite pairs besides; trig "
        "is the sin/cos form; RBFSampler is scikit-learn's (independent directions, random phase); cderf is not in the "
        "paper. Features in float32, parameters in float64. M below the largest takes the first M features of the "
        "same draws.",
        "",
        "Queries and training inputs come from one standardised distribution: their moments are nearly equal and their "
        "means near zero. So saderf and aderf are nearly gerf here, and cderf is nearly sderf with opposite pairs.",
    ]


def _mean(result: Mapping[str, Any], key: str) -> float:
    return float(np.mean([split[key]["test"] for split in result["splits"]]))


def _majority(result: Mapping[str, Any]) -> float:
    return float(np.mean([split["majority"] for split in result["splits"]]))


def _table(values: dict[str, list[float]], result: Mapping[str, Any] | None, counts: Sequence[int]) -> list[str]:
    best = [max(row[i] for row in values.values()) for i in range(len(counts))]
    rows = []
    for method, row in values.items():
        cells = []
        for i, count in enumerate(counts):
            text = f"**{100 * row[i]:.1f}**" if row[i] == best[i] else f"{100 * row[i]:.1f}"
            if result is not None:
                runs = [split["methods"][method][str(count)] for split in result["splits"]]
                deviation = np.mean([run["std"] for run in runs])
                scale = math.exp(np.mean([math.log(run["scale"]) for run in runs]))
                text += f" ({100 * deviation:.1f}, {scale:.2g})"
            cells.append(text)
        rows.append([method, *cells])
    return report.table(["method", *(f"M = {count}" for count in counts)], rows)


def plot(results: Results, counts: Sequence[int], path: Path) -> None:
    """Draws a panel per data set and one for their mean, with a curve per method; the exact kernel is dashed.

    Args:
        results: by data set.
        counts: numbers of features.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, tuple[dict[str, list[float]], float]] = {
        name: ({m: [accuracy(result, m, c) for c in counts] for m in methods_of(results)}, _mean(result, "exact"))
        for name, result in results.items()
    }
    means = {m: [mean_accuracy(results, m, c) for c in counts] for m in methods_of(results)}
    panels[MEAN] = (means, float(np.mean([exact for _, exact in panels.values()])))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows + 0.6), squeeze=False, sharex=True, layout="constrained"
    )
    for axes, (name, (curves, exact)) in zip(grid.flat, panels.items(), strict=False):
        positive = [method for method in curves if method not in SIGNED]
        for method, values in curves.items():
            grey = {"color": "grey", "linestyle": SIGNED.get(method)}
            style = grey if method in SIGNED else {"color": f"C{positive.index(method)}"}
            axes.plot(counts, [100 * v for v in values], marker=".", label=method, **style)
        axes.axhline(100 * exact, color="black", linewidth=0.8, linestyle="--", label="exact kernel")
        axes.set_title(name, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("M")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy, %")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
