"""Results of the benchmark: one record per cell, crossover lengths, Markdown, JSON and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from favor.eval.common import report
from favor.eval.speed.measure import Timing

BASELINE, EAGER, DASH = "sdpa", "eager", "-"


@dataclass
class Result:
    """One method at one length of a panel, such as "causal, forward"."""

    panel: str
    method: str
    length: int
    status: str = "ok"  # or "failed" (its check or the method itself) or "skipped"
    reason: str = ""  # why it failed or was skipped
    check: dict[str, Any] | None = None  # errors and tolerance
    timing: Timing | None = None  # of a pass, if the status is "ok"
    speedup: float | None = None  # seconds of the fastest SDPA backend of the cell over its own; more is better
    peak_bytes: int | None = None  # of a pass, without inputs
    tokens_per_second: float | None = None  # of whole models only
    profile: list[dict[str, Any]] | None = None  # what took longest in one pass: name, calls, ms


def is_baseline(method: str) -> bool:
    """Tells whether a method is one of the SDPA backends."""
    return method.split(":")[0] == BASELINE


def crossover(method: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[str, float] | None:
    """Finds the length from which on `method` is faster than `baseline`, at every longer length measured for both.

    Both are seconds by length. Between two lengths, the logarithm of the ratio is interpolated linearly in the
    logarithm of the length.

    Returns:
        "interpolated" and the length, "at or below" and the shortest length, or "not reached" and the longest; None if
        no length was measured for both.
    """
    lengths = sorted(set(method) & set(baseline))
    if not lengths:
        return None
    ratios = [math.log(method[length] / baseline[length]) for length in lengths]
    last = max((number for number, ratio in enumerate(ratios) if ratio >= 0), default=None)
    if last is None:
        return "at or below", float(lengths[0])
    if last == len(lengths) - 1:
        return "not reached", float(lengths[-1])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    return "interpolated", math.exp(low + share * (high - low))


def compare(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Fills in `speedup` of every timed cell, if SDPA was timed at its length; gives crossovers of linear methods."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        if result.timing is not None:
            times.setdefault(result.panel, {}).setdefault(result.method, {})[result.length] = result.timing.median
    crosses = []
    for panel, methods in times.items():
        best: dict[int, float] = {}
        for name in filter(is_baseline, methods):
            best |= {length: min(value, best.get(length, value)) for length, value in methods[name].items()}
        for result in results:
            if result.panel == panel and result.timing is not None and result.length in best:
                result.speedup = best[result.length] / result.timing.median
        for name, own in methods.items():  # SDPA and eager attention are both quadratic
            if not is_baseline(name) and name != EAGER and (found := crossover(own, best)) is not None:
                crosses.append({"panel": panel, "method": name, "kind": found[0], "length": found[1]})
    return crosses


def crossover_line(item: Mapping[str, Any]) -> str:
    """Describes one crossover in words."""
    where = f"{item['length']:.0f} tokens"
    texts = {
        "interpolated": f"faster than SDPA from {where} on",
        "at or below": f"faster than SDPA at every length from {where} on",
        "not reached": f"not faster than SDPA up to {where}, the longest length measured for both",
    }
    return f"- {item['panel']}: `{item['method']}` is {texts[item['kind']]}"


def _number(value: float) -> str:
    """Writes a number with three digits, never with an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(decimals, 6)}f}"


def _time(result: Result) -> str:
    if result.timing is None:
        return f"FAILED ({result.reason})" if result.status == "failed" else DASH
    return f"{_number(1e3 * result.timing.median)}" + (f" ({result.speedup:.2f}x)" if result.speedup else "")


TABLES: dict[str, Callable[[Result], str]] = {
    "Time of a pass in ms (in brackets: how many times as fast as the fastest SDPA backend)": _time,
    "Tokens a second": lambda own: f"{own.tokens_per_second:.0f}" if own.tokens_per_second is not None else DASH,
    "Peak memory of a pass in MB (10^6 bytes; output and gradients included, inputs not)": (
        lambda own: _number(own.peak_bytes / 1e6) if own.peak_bytes is not None else DASH
    ),
}


def table_lines(results: Sequence[Result]) -> list[str]:
    """Writes all tables as Markdown lines: a section per panel, a row per length, a column per method."""
    lines: list[str] = []
    for panel in dict.fromkeys(r.panel for r in results):
        here = [r for r in results if r.panel == panel]
        methods = list(dict.fromkeys(r.method for r in here if r.status != "skipped"))
        cells = {(r.length, r.method): r for r in here}
        lines += [f"## {panel[0].upper()}{panel[1:]}", ""]
        for title, show in TABLES.items():
            rows = [
                [str(length), *(show(cells[length, method]) for method in methods)]
                for length in sorted({r.length for r in here})
            ]
            if show is _time or any(set(row[1:]) - {DASH} for row in rows):
                lines += [f"{title}:", "", *report.table(["L", *methods], rows), ""]
        for own in (r for r in here if r.profile is not None):
            parts = [[f"`{part['name'][:80]}`", str(part["calls"]), _number(part["ms"])] for part in own.profile or ()]
            lines += [f"Profile of a pass of {own.method}, L = {own.length}, in ms on the device:", ""]
            lines += [*report.table(["what", "calls", "ms"], parts), ""]
    return lines


def write(
    results: Sequence[Result], notes: Sequence[str], explanation: Sequence[str], context: Mapping[str, Any], *place: Any
) -> list[str]:
    """Writes name.json, name.md and name.png, in the `place` (folder, name); returns the lines but the last ones."""
    folder, name = place
    crosses = compare(results)
    lines = [f"# {context['title']}", "", *table_lines(results)]
    if crosses:
        lines += ["## Crossover", "", *(crossover_line(item) for item in crosses), ""]
    if notes:
        lines += ["## Skipped or failed", "", *(f"- {note}" for note in notes), ""]
    lines += ["## How it was measured", "", *explanation]
    content = {**context, "crossover": crosses, "notes": list(notes), "cells": [asdict(r) for r in results]}
    report.write(folder, name, lines, content, [])
    plot(results, folder / f"{name}.png")
    return lines


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws time, or tokens per second of whole models, and below it peak memory if measured, against the length."""
    timed = [r for r in results if r.timing is not None]
    panels = list(dict.fromkeys(r.panel for r in results))
    styles = _styles(list(dict.fromkeys(r.method for r in timed)))
    rows: list[tuple[str, Any]] = [("time of a pass, ms", lambda r: 1e3 * r.timing.median)]
    if any(r.tokens_per_second for r in timed):
        rows = [("tokens a second", lambda r: r.tokens_per_second)]
    if any(r.peak_bytes for r in timed):
        rows.append(("peak memory, MB", lambda r: 1e-6 * (r.peak_bytes or math.nan)))
    size = (3.6 * max(1, len(panels)) + 0.6, 3.3 * len(rows) + 0.7)
    figure = Figure(figsize=size)
    grid = figure.subplots(len(rows), max(1, len(panels)), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for (label, value), line in zip(rows, grid, strict=True):
        line[0].set_ylabel(label)
        for panel, axes in zip(panels, line, strict=False):
            for name, style in styles.items():
                points = sorted((r.length, value(r)) for r in timed if (r.panel, r.method) == (panel, name))
                if points:
                    handles[name] = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **style)[0]
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
    for panel, above, below in zip(panels, grid[0], grid[-1], strict=False):
        above.set_title(panel, fontsize=10)
        below.set_xlabel("length L")
    if handles:
        figure.legend(handles.values(), handles, loc="lower center", ncols=min(6, len(handles)), fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(path, dpi=120)


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Gives the style of each line: SDPA is black, FAVOR solid and coloured, other methods are dashed."""
    favors = [name for name in names if name.startswith("favor")]
    found = {name: {"color": f"C{place}", "linewidth": 2.2} for place, name in enumerate(favors)}
    for place, name in enumerate(name for name in names if name not in favors):
        color = "black" if is_baseline(name) else f"C{5 + place % 5}"
        found[name] = {"color": color, "linestyle": ("-", "--", ":", "-.")[place % 4]}
    return found
