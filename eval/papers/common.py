"""Parts that the papers' programs share: panels of figures and their files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

GREY_LINES = ("--", ":", "-.")  # line styles, in grey, of methods that are not the paper's


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Makes a figure and its panels `[rows, columns]` of this size, each with a grid."""
    size = (width * columns, height * rows + 0.6)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    return figure, grid


def panels_by_name(names: Sequence[str], xlabel: str, ylabel: str) -> tuple[Any, dict[str, Any]]:
    """Makes a figure with a panel per name, three in a row, whose outer axes are labelled."""
    columns = min(3, len(names))
    figure, grid = panels(math.ceil(len(names) / columns), columns, 4, 3.1, sharex=True)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel(xlabel)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    named = dict(zip(names, grid.flat, strict=False))
    for name, axes in named.items():
        axes.set_title(name, fontsize=10)
    return figure, named


def styles(methods: Sequence[str], others: Sequence[str]) -> dict[str, dict[str, str]]:
    """Gives each method a style: a colour, or for those among `others` grey and a line that is not solid."""
    own = [method for method in methods if method not in others]
    grey = [method for method in methods if method in others]
    return {method: {"color": f"C{i}"} for i, method in enumerate(own)} | {
        method: {"color": "grey", "linestyle": line} for method, line in zip(grey, GREY_LINES, strict=False)
    }


def save(figure: Any, path: Path, legend: Any = None, columns: int = 5) -> None:
    """Writes a figure as a PNG with a palette, which makes the file a third of its size."""
    if legend is not None:
        figure.legend(*legend.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)
