"""The report on approximation errors: Markdown, JSON, heat maps of heads and curves over M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from favor.eval.approximation.heads import LOCAL, MEAN, HeadErrors, Variant
from favor.eval.common.report import table, write_files


@dataclass
class Results:
    """Holds what was measured.

    Attributes:
        facts: model, text, machine, versions, seed, command.
        heads: errors and diagnostics of single heads.
        measure: of the whole model.
        exact: its value with exact attention.
        scores: its value by variant.
        sts: exact, by variant, and number of pairs of STS-B; None if not measured.
    """

    facts: dict[str, Any]
    heads: HeadErrors
    measure: str
    exact: float
    scores: dict[Variant, float]
    sts: tuple[float, dict[Variant, float], int] | None


def by_head(layers: dict[int, list[Tensor]]) -> Tensor:
    """Mean over sequences, `[layers, heads]`."""
    return torch.stack([torch.stack(rows).mean(0) for _, rows in sorted(layers.items())])


def mean_error(results: Results, variant: Variant) -> float:
    """Mean over sequences, layers and heads."""
    return float(by_head(results.heads.errors[variant]).mean())


def _row(results: Results, variant: Variant) -> list[str]:
    errors = by_head(results.heads.errors[variant])
    cells = [
        f"`{variant.label}`" if variant.backend not in (MEAN, LOCAL) else variant.label,
        str(variant.num_features or "-"),
        str(variant.window or "-"),
        f"{errors.mean():.3f}",
        f"{errors.median():.3f}",
        f"{(errors < 0.5).double().mean():.0%}",
        f"{results.scores[variant]:.4f}" if variant in results.scores else "-",
    ]
    if results.sts is not None:
        cells.append(f"{results.sts[1][variant]:.4f}" if variant in results.sts[1] else "-")
    return cells


def lines(results: Results) -> list[str]:
    """The report in Markdown."""
    head = ["attention", "M", "window", "mean error", "median", "heads under 0.5", results.measure]
    if results.sts is not None:
        head.append("STS-B Spearman")
    exact = ["exact", "-", "-", "0", "0", "100%", f"{results.exact:.4f}"]
    if results.sts is not None:
        exact.append(f"{results.sts[0]:.4f}")
    rows = [exact, *(_row(results, variant) for variant in results.heads.variants)]
    found = [
        "# Approximation of softmax attention on a pretrained model",
        "",
        *(f"- {name[0].upper()}{name[1:]}: {value}" for name, value in results.facts.items()),
        "",
        "Nothing is trained unless a folder is named. Error: |output - exact| / |exact| of the attention output of a",
        "head over a sequence, on the queries, keys and values of the exact model; mean and median over layers, heads",
        f"and samples. Column {results.measure}: the whole model, with the backend in every layer.",
        *([f"STS-B: {results.sts[2]} pairs of the development set, `exact_below=0`."] if results.sts else []),
        "",
        *table(head, rows),
        "",
        "## Diagnostics by layer, mean over heads (largest head)",
        "",
        *_diagnostics(results),
    ]
    return found


def _diagnostics(results: Results) -> list[str]:
    values = {name: by_head(layers) for name, layers in results.heads.diagnostics.items()}
    best = best_variant(results)
    uniform = by_head(results.heads.errors[Variant(MEAN, None, 0, 0)])
    errors = by_head(results.heads.errors[best])
    rows = [
        f"rho is the expected log(1 + Var / K^2) of wDERF; M features estimate a head well while rho < log M "
        f"({math.log(best.num_features):.1f} at M = {best.num_features}). |x|, |y|: root mean squared norms of queries "
        "and keys times the root of the scale. Attention layers count from 0, as in the picture.",
        "",
    ]
    options = f"M = {best.num_features}, window {best.window}"
    head = ["layer", "rho", "\\|x\\|", "\\|y\\|", "error, mean of V", f"error, `{best.label}` {options}"]
    body = []
    for layer in range(len(uniform)):
        cells = [f"{values[n][layer].mean():.1f} ({values[n][layer].max():.1f})" for n in ("rho", "|x|", "|y|")]
        cells += [f"{t[layer].mean():.2f} ({t[layer].max():.2f})" for t in (uniform, errors)]
        body.append([str(layer), *cells])
    return rows + table(head, body)


def best_variant(results: Results) -> Variant:
    """The backend with the smallest mean error."""
    backends = [variant for variant in results.heads.variants if variant.backend not in (MEAN, LOCAL)]
    return min(backends, key=lambda variant: mean_error(results, variant))


def write(results: Results, folder: Path, name: str) -> None:
    """Writes `name.md`, `name.json` and `name.png`."""
    entries = [
        asdict(variant)
        | {
            "label": variant.label,
            "error": mean_error(results, variant),
            "by_head": [[round(x, 4) for x in row] for row in by_head(results.heads.errors[variant]).tolist()],
            "score": results.scores.get(variant),
            "sts": None if results.sts is None else results.sts[1].get(variant),
        }
        for variant in results.heads.variants
    ]
    content = {
        "facts": results.facts,
        "measure": results.measure,
        "exact": results.exact,
        "sts_exact": None if results.sts is None else results.sts[0],
        "variants": entries,
        "diagnostics": {n: by_head(v).tolist() for n, v in results.heads.diagnostics.items()},
    }
    write_files(folder, name, lines(results), content)
    plot(results, folder / f"{name}.png")


def plot(results: Results, path: Path) -> None:
    """Heat maps of the errors of heads (mean of V, first and best backend) and curves over M."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = best_variant(results)
    backends = [variant for variant in results.heads.variants if variant.backend not in (MEAN, LOCAL)]
    shown = [Variant(MEAN, None, 0, 0), backends[0], best]
    figure, axes = pyplot.subplots(1, 4, figsize=(20, 4.2), gridspec_kw={"width_ratios": [1, 1, 1, 1.3]})
    for axis, variant in zip(axes, shown, strict=False):
        image = axis.imshow(
            by_head(results.heads.errors[variant]).numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto"
        )
        title = variant.label + (f", M = {variant.num_features}" if variant.num_features else "")
        axis.set(title=title + (f", window {variant.window}" if variant.window else ""), xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=axes[2], label="relative error")
    _curves(results, backends, axes[3])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(results: Results, backends: Sequence[Variant], axis: Any) -> None:
    labels = dict.fromkeys((variant.label, variant.window) for variant in backends)
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(label for label, _ in labels))}
    windows = sorted({window for _, window in labels})
    styles = {window: ("-", "--", ":", "-.")[place % 4] for place, window in enumerate(windows)}
    for label, window in labels:
        own = [v for v in backends if (v.label, v.window) == (label, window)]
        errors = [mean_error(results, variant) for variant in own]
        style = {"color": colours[label], "linestyle": styles[window], "marker": "o"}
        axis.plot([v.num_features for v in own], errors, label=f"{label}, window {window}", **style)
    axis.axhline(mean_error(results, Variant(MEAN, None, 0, 0)), color="grey", label=MEAN)
    axis.set(xscale="log", xlabel="number of features M", ylabel="mean relative error", ylim=(0, None))
    ticks = sorted({variant.num_features for variant in backends})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
