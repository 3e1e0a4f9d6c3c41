"""Results of the benchmark: one record per cell, crossover lengths, Markdown, JSON and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from favor.eval.common.report import table_row, write_files
from favor.eval.speed.measure import Timing

BASELINE = "sdpa"
EAGER = "eager"
DASH = "-"


@dataclass
class Result:
    """One method at one length.

    Attributes:
        panel: name of the comparison, such as "causal, forward".
        method: name of the row in the tables.
        length: tokens L.
        status: "ok", "failed" (its check or the method itself) or "skipped".
        reason: reason why it failed or was skipped, empty otherwise.
        check: errors and tolerance of the check, None if there was no check.
        timing: seconds of a pass; None unless the status is "ok".
        speedup: seconds of the fastest SDPA backend of the cell over its own; more is better.
        peak_bytes: peak memory of a pass, without inputs.
        tflops: counted floating-point operations per second, in 10^12.
        roofline: least possible time, as the report defines it, over its own; 1 is best.
        tokens_per_second: of whole models only.
    """

    panel: str
    method: str
    length: int
    status: str = "ok"
    reason: str = ""
    check: dict[str, Any] | None = None
    timing: Timing | None = None
    speedup: float | None = None
    peak_bytes: int | None = None
    tflops: float | None = None
    roofline: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Crossover:
    """The length from which on a method is faster than SDPA.

    Attributes:
        kind: "interpolated", "at or below" the shortest length, or "not reached" up to the longest.
        length: tokens; the shortest length for "at or below", the longest for "not reached".
    """

    kind: str
    length: float


def is_baseline(method: str) -> bool:
    """Tells whether a method is one of the SDPA backends."""
    return method.split(":")[0] == BASELINE


def crossover(method: Mapping[int, float], baseline: Mapping[int, float]) -> Crossover | None:
    """Finds the length from which on `method` is faster than `baseline`, at every longer length measured for both.

    Between two lengths, the logarithm of the ratio is interpolated linearly in the logarithm of the length.

    Args:
        method, baseline: seconds by length.

    Returns:
        None if no length was measured for both.

    Example:
        >>> crossover({1: 4.0, 2: 8.0, 4: 16.0}, {1: 1.0, 2: 4.0, 4: 64.0})
        Crossover(kind='interpolated', length=2.5198...)
    """
    lengths = sorted(set(method) & set(baseline))
    if not lengths:
        return None
    ratios = [math.log(method[length] / baseline[length]) for length in lengths]
    slower = [number for number, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return Crossover("at or below", float(lengths[0]))
    last = slower[-1]
    if last == len(lengths) - 1:
        return Crossover("not reached", float(lengths[-1]))
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    return Crossover("interpolated", math.exp(low + share * (high - low)))


def seconds_by_length(results: Sequence[Result]) -> dict[str, dict[str, dict[int, float]]]:
    """Gives the median seconds of the cells that were timed, as `{panel: {method: {length: seconds}}}`."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for result in results:
        if result.timing is not None:
            found.setdefault(result.panel, {}).setdefault(result.method, {})[result.length] = result.timing.median
    return found


def best_baseline(methods: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Gives the seconds of the fastest SDPA backend at each length."""
    best: dict[int, float] = {}
    for name, times in methods.items():
        if is_baseline(name):
            for length, value in times.items():
                best[length] = min(value, best.get(length, math.inf))
    return best


def add_speedups(results: Sequence[Result]) -> None:
    """Fills in `speedup` of every timed cell, if SDPA was timed at its length."""
    best = {panel: best_baseline(methods) for panel, methods in seconds_by_length(results).items()}
    for result in results:
        base = best.get(result.panel, {}).get(result.length)
        if result.timing is not None and base is not None:
            result.speedup = base / result.timing.median


def crossovers(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Finds the crossover of each linear method in each panel; SDPA and eager attention are both quadratic."""
    found = []
    for panel, methods in seconds_by_length(results).items():
        base = best_baseline(methods)
        for name, times in methods.items():
            if not is_baseline(name) and name != EAGER and (cross := crossover(times, base)) is not None:
                found.append({"panel": panel, "method": name, **asdict(cross)})
    return found


def crossover_line(item: Mapping[str, Any]) -> str:
    """Describes one crossover in words."""
    where = f"{item['length']:.0f} tokens"
    texts = {
        "interpolated": f"faster than SDPA from {where} on",
        "at or below": f"faster than SDPA at every length from {where} on",
        "not reached": f"not faster than SDPA up to {where}, the longest length measured for both",
    }
    return f"- {item['panel']}: `{item['method']}` is {texts[item['kind']]}"


def _ordered(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _number(value: float) -> str:
    """Writes a number with three digits, never with an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(decimals, 6)}f}"


def _time_cell(result: Result) -> str:
    if result.status == "failed":
        return f"FAILED ({result.reason})"
    if result.timing is None:
        return DASH
    return f"{_number(1e3 * result.timing.median)}" + (f" ({result.speedup:.2f}x)" if result.speedup else "")


def _memory_cell(result: Result) -> str:
    return DASH if result.peak_bytes is None else _number(result.peak_bytes / 1e6)


def _rate_cell(result: Result) -> str:
    if result.tflops is None or result.roofline is None:
        return DASH
    return f"{_number(result.tflops)} ({100 * result.roofline:.0f} %)"


def _tokens_cell(result: Result) -> str:
    return DASH if result.tokens_per_second is None else f"{result.tokens_per_second:.0f}"


TABLES = (
    ("Time of a pass in ms (in brackets: how many times as fast as the fastest SDPA backend)", _time_cell, "timing"),
    ("Tokens a second", _tokens_cell, "tokens_per_second"),
    ("Peak memory of a pass in MB (10^6 bytes; output and gradients included, inputs not)", _memory_cell, "peak_bytes"),
    ("TFLOP/s (in brackets: share of the roofline)", _rate_cell, "tflops"),
)


def table_lines(results: Sequence[Result]) -> list[str]:
    """Writes all tables as Markdown lines: a section per panel, a row per length, a column per method."""
    lines: list[str] = []
    for panel in _ordered([r.panel for r in results]):
        here = [r for r in results if r.panel == panel]
        methods = [m for m in _ordered([r.method for r in here]) if any(_shown(r) for r in here if r.method == m)]
        cells = {(r.length, r.method): r for r in here}
        lines += [f"## {panel[0].upper()}{panel[1:]}", ""]
        for title, show, attribute in TABLES:
            if attribute != "timing" and all(getattr(r, attribute) is None for r in here):
                continue
            lines += [f"{title}:", "", table_row(["L", *methods]), table_row(["---:"] * (len(methods) + 1))]
            for length in sorted({r.length for r in here}):
                row = [cells.get((length, method)) for method in methods]
                lines.append(table_row([str(length), *(DASH if r is None else show(r) for r in row)]))
            lines.append("")
    return lines


def _shown(result: Result) -> bool:
    return result.status != "skipped"


def write(
    results: Sequence[Result],
    notes: Sequence[str],
    explanation: Sequence[str],
    context: Mapping[str, Any],
    folder: Path,
    name: str,
) -> list[str]:
    """Writes name.json, name.md and name.png into the folder; returns the lines of name.md.

    Args:
        results: every cell, also skipped ones.
        notes: lines about skipped or failed cells, with reasons.
        explanation: lines that explain the numbers.
        context: command, machine, versions, settings; all of it goes to JSON. Needs the keys "title", "command",
            "machine" and "versions".
        folder: of the files; it is made if needed.
        name: name of the files.
    """
    add_speedups(results)
    crosses = crossovers(results)
    versions = ", ".join(f"{package} {version}" for package, version in context["versions"].items())
    lines = [f"# {context['title']}", "", *table_lines(results)]
    if crosses:
        lines += ["## Crossover", "", *(crossover_line(item) for item in crosses), ""]
    if notes:
        lines += ["## Skipped or failed", "", *(f"- {note}" for note in notes), ""]
    lines += ["## How it was measured", "", *explanation, "", f"{context['machine']}; {versions}.", ""]
    lines += ["```bash", context["command"], "```"]
    content = {**context, "crossover": crosses, "notes": list(notes), "cells": [asdict(r) for r in results]}
    write_files(folder, name, lines, content)
    plot(results, folder / f"{name}.png")
    return lines


def _style(name: str, favors: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Gives the style of a line: SDPA is black, FAVOR solid and coloured, other methods are dashed.

    Args:
        name: the method.
        favors: names of FAVOR methods.
        others: names of other methods.
    """
    if is_baseline(name):
        dashes = ("-", "--", ":", "-.")
        return {"color": "black", "linestyle": dashes[[m for m in others if is_baseline(m)].index(name) % 4]}
    if name in favors:
        return {"color": f"C{favors.index(name)}", "linestyle": "-", "linewidth": 2.2}
    rest = [m for m in others if not is_baseline(m)]
    return {"color": f"C{5 + rest.index(name) % 5}", "linestyle": "--"}


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws time, or tokens per second of whole models, and below it peak memory if measured, against the length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _ordered([r.panel for r in results])
    timed = [r for r in results if r.timing is not None]
    names = _ordered([r.method for r in timed])
    favors = [n for n in names if n.startswith("favor")]
    others = [n for n in names if n not in favors]
    models = any(r.tokens_per_second is not None for r in timed)
    first = ("tokens a second", "tokens_per_second", 1.0) if models else ("time of a pass, ms", "timing", 1e3)
    rows = [first]
    if any(r.peak_bytes for r in timed):
        rows.append(("peak memory, MB", "peak_bytes", 1e-6))
    size = (3.6 * max(1, len(panels)) + 0.6, 3.3 * len(rows) + 0.7)
    figure, grid = plt.subplots(len(rows), max(1, len(panels)), figsize=size, squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for row, (label, attribute, scale) in enumerate(rows):
        for column, panel in enumerate(panels):
            axes = grid[row][column]
            for name in names:
                points = []
                for r in timed:
                    value = getattr(r, attribute)
                    value = value.median if isinstance(value, Timing) else value
                    if (r.panel, r.method) == (panel, name) and value:
                        points.append((r.length, scale * value))
                if points:
                    style = _style(name, favors, others)
                    (handles[name],) = axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            if row == 0:
                axes.set_title(panel, fontsize=10)
            if row == len(rows) - 1:
                axes.set_xlabel("length L")
            if column == 0:
                axes.set_ylabel(label)
    shown = [name for name in names if name in handles]
    if shown:
        figure.legend([handles[n] for n in shown], shown, loc="lower center", ncols=min(6, len(shown)), fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
