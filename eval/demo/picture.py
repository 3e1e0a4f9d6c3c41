"""The demo's picture: seconds by length, and other halves found by seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from favor.eval.demo.retrieval import HALF, Reading


def draw(readings: Mapping[str, Reading], path: Path) -> None:
    """Writes a picture with two panels.

    Args:
        readings: by label, from `favor.eval.demo.retrieval.read_all`.
        path: of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, quality) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for number, (label, reading) in enumerate(readings.items()):
        lengths = sorted(reading.seconds)
        style = {"color": f"C{number}", "label": label}
        time.plot(lengths, [reading.median(length) for length in lengths], marker="o", **style)
        quality.plot(reading.median(HALF), 100 * reading.accuracy(), marker="o", markersize=10, linestyle="", **style)
    time.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds (less is better)", title="Time of one text")
    ticks = sorted({length for reading in readings.values() for length in reading.seconds})
    time.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    slowest = max(reading.median(max(reading.seconds)) for reading in readings.values())
    marks = [mark * 10**power for power in range(-3, 3) for mark in (1, 2, 5) if mark * 10**power < 2 * slowest]
    time.set(yticks=marks, yticklabels=[f"{mark:g}" for mark in marks], ylim=(slowest / 150, 1.5 * slowest))
    time.minorticks_off()
    quality.set(
        xlim=(0, None),
        ylim=(0, 100),
        xlabel=f"seconds of a half of {HALF:,} tokens (less is better)",
        ylabel="other halves found, % (more is better)",
        title="Find the other half",
    )
    for axis in (time, quality):
        axis.grid(alpha=0.3)
    quality.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
