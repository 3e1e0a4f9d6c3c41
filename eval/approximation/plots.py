"""Pictures of approximation errors: heat maps of heads, and curves over M or over the length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from favor.eval.approximation.variants import MEAN, Variant

if TYPE_CHECKING:
    from favor.eval.approximation.report import Measured

STYLES = ("-", "--", ":", "-.")


def plot(measured: Sequence[Measured], path: Path) -> None:
    """Draws heat maps at the greatest length (mean of V, first and best backend), and curves.

    The curves are over the length if there are several lengths, else over M.

    Args:
        measured: results of each length, ascending.
        path: of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = measured[-1]
    backends = [variant for variant in last.heads.variants if variant.is_backend]
    first = next((variant for variant in backends if variant.num_features), backends[0])
    figure, axes = pyplot.subplots(1, 4, figsize=(20, 4.2), gridspec_kw={"width_ratios": [1, 1, 1, 1.3]})
    for axis, variant in zip(axes, [Variant(MEAN, None, 0, 0), first, last.best], strict=False):
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
    pyplot.close(figure)


def _over_features(part: Measured, backends: Sequence[Variant], axis: Any) -> None:
    chosen, backends = [v for v in backends if not v.num_features], [v for v in backends if v.num_features]
    labels = dict.fromkeys((variant.label, variant.window) for variant in backends)
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(label for label, _ in labels))}
    windows = sorted({window for _, window in labels})
    styles = {window: STYLES[place % 4] for place, window in enumerate(windows)}
    for label, window in labels:
        own = [v for v in backends if (v.label, v.window) == (label, window)]
        style = {"color": colours[label], "linestyle": styles[window], "marker": "o"}
        errors = [part.mean_error(variant) for variant in own]
        axis.plot([v.num_features for v in own], errors, label=f"{label}, window {window}", **style)
    axis.axhline(part.mean_error(Variant(MEAN, None, 0, 0)), color="grey", label=MEAN)
    for place, variant in enumerate(chosen):
        axis.axhline(part.mean_error(variant), color="black", linestyle=STYLES[place % 4], label=variant.label)
    axis.set(xscale="log", xlabel=f"number of features M, at L = {part.length}")
    ticks = sorted({variant.num_features for variant in backends})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])


def _over_length(measured: Sequence[Measured], backends: Sequence[Variant], axis: Any) -> None:
    lengths = [part.length for part in measured]
    shown = [Variant(MEAN, None, 0, 0), *backends]
    for place, variant in enumerate(shown):
        style = {"color": f"C{place % 10}", "linestyle": STYLES[place // 10 % 4], "marker": "o"}
        style = style if variant.is_backend else {"color": "grey"}
        axis.plot(lengths, [part.mean_error(variant) for part in measured], label=variant.title, **style)
    axis.set(xscale="log", xlabel="tokens L")
    axis.set_xticks(lengths, [str(length) for length in lengths])
