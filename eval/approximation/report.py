"""The report on approximation errors: Markdown, JSON, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from favor.eval.approximation.variants import MEAN, HeadErrors, Variant, by_head
from favor.eval.common.report import table, write_files

STYLES = ("-", "--", ":", "-.")
UNIFORM = Variant(MEAN, None, 0, 0)


@dataclass
class Measured:
    """Holds the measurements at one length."""

    length: int
    samples: int
    heads: HeadErrors
    exact: float
    scores: dict[Variant, float]

    def errors(self, variant: Variant) -> Tensor:
        """Gives the mean error over samples, `[layers, heads]`."""
        return by_head(self.heads.errors[variant])

    def mean_error(self, variant: Variant) -> float:
        """Gives the mean error over samples, layers and heads."""
        return float(self.errors(variant).mean())

    @property
    def best(self) -> Variant:
        """The backend with the smallest mean error."""
        return min((v for v in self.heads.variants if v.is_backend), key=self.mean_error)


@dataclass
class Results:
    """Holds all measurements."""

    facts: dict[str, Any]
    measure: str
    measured: list[Measured]
    sts: tuple[float, dict[Variant, float], int] | None
    chosen: dict[Variant, list[dict[str, Any]]] = field(default_factory=dict)


def spread(errors: Tensor) -> dict[str, float]:
    """Computes mean, median, ninth decile and maximum over all heads, and the fraction of errors below 0.5."""
    values = errors.flatten().double()
    p50, p90 = torch.quantile(values, torch.tensor([0.5, 0.9], dtype=torch.float64)).tolist()
    rest = {"max": float(values.max()), "under_half": float((values < 0.5).double().mean())}
    return {"mean": float(values.mean()), "p50": p50, "p90": p90, **rest}


def _name(variant: Variant) -> list[str]:
    label = f"`{variant.label}`" if variant.is_backend else variant.label
    return [label, str(variant.num_features or "-"), str(variant.window or "-")]


def _row(results: Results, part: Measured, variant: Variant) -> list[str]:
    found = spread(part.errors(variant))
    errors = [*(f"{found[name]:.3f}" for name in ("mean", "p50", "p90", "max")), f"{found['under_half']:.0%}"]
    scores = [part.scores, *([] if results.sts is None else [results.sts[1]])]
    shown = [f"{own[variant]:.4f}" if variant in own else "-" for own in scores]
    return [*_name(variant), str(part.length), *errors, *shown]


def lines(results: Results) -> list[str]:
    """Writes the report in Markdown."""
    head = ["attention", "M", "window", "L", "mean error", "p50", "p90", "max", "heads under 0.5", results.measure]
    rows = []
    for part in results.measured:
        exact = ["exact", "-", "-", str(part.length), "0", "0", "0", "0", "100%", f"{part.exact:.4f}"]
        rows.append(exact if results.sts is None else [*exact, f"{results.sts[0]:.4f}"])
        rows += [_row(results, part, variant) for variant in part.heads.variants]
    if results.sts is not None:
        head.append("STS-B Spearman")
    return [
        "# Approximation of softmax attention on a pretrained model",
        "",
        *(f"- {name[0].upper()}{name[1:]}: {value}" for name, value in results.facts.items()),
        "",
        "Nothing is trained unless a folder is named. L: tokens of a sample, or frames of an audio encoder. Error:",
        "|output - exact| / |exact| of the attention output of a head over a sequence, on the queries, keys and values",
        "of the exact model, mean over samples; then mean, median, ninth decile and maximum over heads of all layers.",
        f"Column {results.measure}: the whole model or encoder, with the backend in every layer.",
        *([f"STS-B: {results.sts[2]} pairs of the development set, `exact_below=0`."] if results.sts else []),
        "",
        *(_by_length(results) if len(results.measured) > 1 else []),
        *table(head, rows),
        "",
        *(_chosen(results) if results.chosen else []),
    ]


def _by_length(results: Results) -> list[str]:
    head = ["mean error (p90)", "M", "window", *(f"L = {part.length}" for part in results.measured)]
    rows = []
    for variant in results.measured[0].heads.variants:
        found = [spread(part.errors(variant)) for part in results.measured]
        rows.append([*_name(variant), *(f"{each['mean']:.3f} ({each['p90']:.3f})" for each in found)])
    return ["## By length", "", *table(head, rows), "", "## All figures", ""]


def _chosen(results: Results) -> list[str]:
    """Writes what each layer runs where layers have settings of their own."""
    head = ["layer", *(f"`{variant.label}`" for variant in results.chosen)]
    said = "M = {num_features}, {selected_keys} selected keys"
    cells = [["exact" if "exact_heads" in own else said.format(**own) for own in of] for of in results.chosen.values()]
    rows = [[str(layer), *row] for layer, row in enumerate(zip(*cells, strict=True))]
    return ["## Chosen for each layer", "", *table(head, rows), ""]


def write(results: Results, folder: Path, name: str) -> None:
    """Writes `name.md`, `name.json` and `name.png`."""
    sts_exact, sts = (None, {}) if results.sts is None else results.sts[:2]
    entries = []
    for part, variant in ((each, variant) for each in results.measured for variant in each.heads.variants):
        found = spread(part.errors(variant))
        entry = {**asdict(variant), "label": variant.label, "length": part.length, "error": found.pop("mean"), **found}
        entry["by_head"] = [[round(x, 4) for x in row] for row in part.errors(variant).tolist()]
        own = {"score": part.scores.get(variant), "sts": sts.get(variant), "chosen": results.chosen.get(variant)}
        entries.append(entry | own)
    exact = {part.length: part.exact for part in results.measured}
    content = {"facts": results.facts, "measure": results.measure, "exact": exact, "sts_exact": sts_exact}
    write_files(folder, name, lines(results), {**content, "variants": entries})
    plot(results.measured, folder / f"{name}.png")


def plot(measured: Sequence[Measured], path: Path) -> None:
    """Draws heat maps at the greatest length (mean of V, first and best backend), and curves.

    The curves are over the length if there are several lengths, else over M.
    """
    last = measured[-1]
    backends = [variant for variant in last.heads.variants if variant.is_backend]
    first = next((variant for variant in backends if variant.num_features), backends[0])
    figure = Figure(figsize=(20, 4.2))
    axes = figure.subplots(1, 4, gridspec_kw={"width_ratios": [1, 1, 1, 1.3]})
    for axis, variant in zip(axes, [UNIFORM, first, last.best], strict=False):
        image = axis.imshow(last.errors(variant).numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(f"{variant.title}, L = {last.length}", fontsize=9)
    figure.colorbar(image, ax=axes[2], label="relative error")
    if len(measured) > 1:
        _over_length(measured, backends, axes[3])
    else:
        _over_features(last, backends, axes[3])
    axes[3].set(ylabel="mean relative error", ylim=(0, None))
    axes[3].minorticks_off()
    axes[3].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _over_features(part: Measured, backends: Sequence[Variant], axis: Any) -> None:
    chosen, backends = [v for v in backends if not v.num_features], [v for v in backends if v.num_features]
    labels = dict.fromkeys((variant.label, variant.window) for variant in backends)
    colours, windows = list(dict.fromkeys(label for label, _ in labels)), sorted({window for _, window in labels})
    for label, window in labels:
        own = [v for v in backends if (v.label, v.window) == (label, window)]
        style = {"color": f"C{colours.index(label)}", "linestyle": STYLES[windows.index(window) % 4], "marker": "o"}
        errors = [part.mean_error(variant) for variant in own]
        axis.plot([v.num_features for v in own], errors, label=f"{label}, window {window}", **style)
    axis.axhline(part.mean_error(UNIFORM), color="grey", label=MEAN)
    for place, variant in enumerate(chosen):
        axis.axhline(part.mean_error(variant), color="black", linestyle=STYLES[place % 4], label=variant.label)
    axis.set(xscale="log", xlabel=f"number of features M, at L = {part.length}")
    ticks = sorted({variant.num_features for variant in backends})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])


def _over_length(measured: Sequence[Measured], backends: Sequence[Variant], axis: Any) -> None:
    lengths = [part.length for part in measured]
    shown = [UNIFORM, *backends]
    for place, variant in enumerate(shown):
        style = {"color": f"C{place % 10}", "linestyle": STYLES[place // 10 % 4], "marker": "o"}
        style = style if variant.is_backend else {"color": "grey"}
        axis.plot(lengths, [part.mean_error(variant) for part in measured], label=variant.title, **style)
    axis.set(xscale="log", xlabel="tokens L")
    axis.set_xticks(lengths, [str(length) for length in lengths])
