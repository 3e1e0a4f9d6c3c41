"""Figures of the comparison of decompositions."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.papers.decomposition.nmf import MU
from favor.eval.papers.decomposition.pca import CLAIM_GAP, TARGETS

LEAST_GAP = 1e-12


def plot(part: str, result: Mapping[str, Any], path: Path) -> None:
    """Draws the figure of a part, if it has one.

    Args:
        part: "nmf", "mixture" and "pca" have a figure.
        result: returned by the part's `measure`.
        path: of the PNG file.
    """
    drawings = {"nmf": _nmf, "mixture": _mixture, "pca": _pca}
    if part not in drawings:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure = drawings[part](plt, result)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    plt.close(figure)
    # A palette makes the file a third of its size.
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


def _nmf(plt: Any, result: Mapping[str, Any]) -> Any:
    """Draws a row per data set: objective in units of the best, by sweeps and by seconds.

    Objectives are means over starts, times are medians. Values of the first tenth of the sweeps may lie above the top.
    """
    sets, counts = result["sets"], np.array(result["sweeps"])
    figure, grid = plt.subplots(len(sets), 2, figsize=(10, 2.8 * len(sets) + 0.6), squeeze=False, layout="constrained")
    for row, (name, found) in zip(grid, sets.items(), strict=True):
        means = {method: np.mean(runs, 0) for method, runs in found["objective"].items()}
        best = min(line.min() for line in means.values())
        for method, line in means.items():
            style = {"color": "black", "linestyle": "--"} if method == MU else {}
            row[0].plot(counts, line / best, marker=".", label=method, **style)
            row[1].plot(np.median(found["seconds"][method], 0), line / best, marker=".", **style)
        top = means[MU][counts >= counts.max() / 10][0] / best
        for axes in row:
            axes.set_ylim(1 - 0.05 * (top - 1), top)
        row[0].set_ylabel(f"{name}\nD / best")
        row[1].set_xlim(0, None)
    grid[-1, 0].set_xlabel("sweeps")
    grid[-1, 1].set_xlabel("processor seconds")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _mixture(plt: Any, result: Mapping[str, Any]) -> Any:
    """Draws a panel per problem: relative gap by iteration."""
    figure, row = plt.subplots(1, len(result["problems"]), figsize=(10, 4), layout="constrained")
    for axes, (name, found) in zip(row, result["problems"].items(), strict=True):
        for method, cell in found["methods"].items():
            style = {"color": "black", "linestyle": "--"} if method == "EM" else {}
            shown = [(number, gap) for number, gap in cell["curve"] if gap > LEAST_GAP]
            axes.plot(*zip(*shown, strict=True), label=method, **style)
        axes.set_title(name, fontsize=10)
        axes.set_yscale("log")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, None)
        axes.set_xlabel("iteration")
    row[0].set_ylabel("relative gap of the objective")
    row[0].legend(fontsize=9)
    return figure


def _pca(plt: Any, result: Mapping[str, Any]) -> Any:
    """Draws the error by passes at the gap of the claim, or at the first gap if that was not measured."""
    gaps = result["gaps"]
    gap = f"{CLAIM_GAP:g}" if f"{CLAIM_GAP:g}" in gaps else next(iter(gaps))
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for name, cell in gaps[gap].items():
        style = {"linewidth": 1} if name.startswith("VR") else {"linewidth": 1, "linestyle": "--"}
        passes, errors = zip(*cell["path"], strict=True)
        axes.plot(passes, errors, marker=".", markersize=4, label=name, **style)
    axes.set_yscale("log")
    axes.set_ylim(TARGETS[-1] / 100, 2)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(0, None)
    axes.set_xlabel("passes over the data")
    axes.set_ylabel("1 - (x'u)^2")
    axes.set_title(f"gap {gap}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
