"""Tables, checks and figures of `favor.eval.papers.majorization`."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.common import report
from favor.eval.papers.majorization.steps import CONVERGED, FULL_BATCH_FACTOR, Trace

Results = Mapping[str, Mapping[str, Any]]
BASELINES = ("sgd", "asgd_tau", "asgd", "adam", "lbfgs", "newton")
CURVE_POINTS = 20
FEW_POINTS = 4  # a run with fewer points also gets markers, since its line is hard to see
ROUNDING = 1e-6  # a relative increase of F that single precision explains
HEADER = ("method", "configuration", "passes to 10 %", "passes to 1 %", "seconds to 1 %", "gap", "test error, %", "end")


def crossing(position: Sequence[float], gap: Sequence[float], level: float) -> float:
    """Finds where a gap first is at most `level`, by linear interpolation of its logarithm; infinity if nowhere.

    Args:
        position: passes or seconds of each evaluation.
        gap: at each evaluation.
        level: the gap to reach.
    """
    for i, value in enumerate(gap):
        if value <= level:
            if i == 0 or math.isinf(gap[i - 1]):
                return position[i]
            low, high = math.log(max(value, 1e-300)), math.log(gap[i - 1])
            share = (high - math.log(level)) / (high - low)
            return position[i - 1] + share * (position[i] - position[i - 1])
    return math.inf


def summary(trace: Trace, optimum: float) -> dict[str, Any]:
    """Summarises a run for the tables.

    Returns:
        Passes and seconds to 1.1 F* and to 1.01 F*; the relative gap (F - F*)/F*, test error, passes and
        seconds at the end; the reason for the end; the largest relative increase of F between evaluations.
    """
    gap = [value / optimum - 1 for value in trace.objective]
    rises = [later / before - 1 for before, later in zip(trace.objective, trace.objective[1:], strict=False)]
    return {
        "passes_10": crossing(trace.passes, gap, 0.1),
        "passes_1": crossing(trace.passes, gap, 0.01),
        "seconds_10": crossing(trace.seconds, gap, 0.1),
        "seconds_1": crossing(trace.seconds, gap, 0.01),
        "gap": gap[-1],
        "error": trace.error[-1],
        "passes": trace.passes[-1],
        "seconds": trace.seconds[-1],
        "end": trace.end,
        "largest_increase": max(rises, default=0.0),
    }


def thinned(trace: Trace, optimum: float) -> dict[str, list[float]]:
    """Picks twenty points of a run, close together at the start, with three digits."""
    last = len(trace.passes) - 1
    picks = sorted({round(x) for x in np.geomspace(1, last + 1, CURVE_POINTS) - 1}) if last else [0]
    rows = {"passes": trace.passes, "seconds": trace.seconds, "error": trace.error}
    rows["gap"] = [value / optimum - 1 for value in trace.objective]
    return {name: [float(f"{values[i]:.3g}") for i in picks] for name, values in rows.items()}


def median(result: Mapping[str, Any], key: str) -> float:
    """Computes the median over seeds; a level that was not reached counts as infinity."""
    return float(np.median([run[key] if not math.isnan(run[key]) else math.inf for run in result["runs"]]))


def ran(results: Results, *methods: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Finds the data sets on which all of these methods were possible, and their results."""
    found = []
    for name, result in results.items():
        cells = [result["methods"].get(method, {"obstacle": ""}) for method in methods]
        if not any("obstacle" in cell for cell in cells):
            found.append((name, cells))
    return found


def checks(results: Results) -> list[report.Check]:
    """Checks the claims of the papers, each on every data set on which its methods are possible."""
    found: list[report.Check] = []

    def claim(statement: str, rows: Sequence[tuple[str, str, bool]]) -> None:
        if rows:
            share = f"{sum(holds for _, _, holds in rows)} of {len(rows)} data sets"
            numbers = f"{share}; " + ", ".join(f"{name} {text}" for name, text, _ in rows)
            found.append(report.Check(statement, numbers, all(holds for _, _, holds in rows)))

    for method in ("sbm", "sbm_accumulated"):
        rows = [(n, text_of(median(c, "passes_1")), median(c, "passes_1") <= 1) for n, (c,) in ran(results, method)]
        claim(f"{title(results, method)} is within 1 % of F* after one pass (passes to 1 %)", rows)
    for method in ("sbm", "sbm_accumulated", "spfb_literal", "spfb", "lspfb", "lspfb_repaired", "prox"):
        rows = [(n, *faster(c, "passes")) for n, c in ran(results, method, "sgd")]
        claim(f"{title(results, method)} takes fewer passes than tuned SGD", rows)
    for method in ("bbm", "bbm_cheap"):
        rises = [(n, max(run["largest_increase"] for run in c["runs"])) for n, (c,) in ran(results, method)]
        rows = [(n, f"{rise:.0e}", rise <= ROUNDING) for n, rise in rises]
        claim(f"F never increases under {title(results, method)} (largest relative change in a step)", rows)
    for key in ("passes", "seconds"):
        rows = [(n, *faster(c, key)) for n, c in ran(results, "bbm", "lbfgs")]
        claim(f"{title(results, 'bbm')} takes fewer {key} than L-BFGS", rows)
    ends = [(n, median(c, "gap"), median(c, "passes")) for n, (c,) in ran(results, "spfb_one")]
    rows = [(n, f"gap {gap:.1e} after {through:.3g} passes", gap <= 0.01) for n, gap, through in ends]
    claim("SPFB as published with one example a step comes within 1 % of F*", rows)
    return found


def title(results: Results, method: str) -> str:
    """Gives the name of a method in tables."""
    return next((r["methods"][method]["name"] for r in results.values() if method in r["methods"]), method)


def faster(cells: Sequence[Mapping[str, Any]], unit: str) -> tuple[str, bool]:
    """Compares passes or seconds of two methods; also says whether the first has fewer.

    Both are counted to a gap of 1 %, or of 10 % if neither method reaches 1 %.
    """
    level = 1 if any(math.isfinite(median(cell, f"{unit}_1")) for cell in cells) else 10
    one, two = (median(cell, f"{unit}_{level}") for cell in cells)
    return f"{text_of(one)} and {text_of(two)} to {level} %", one < two


def text_of(value: float) -> str:
    """Writes a number with two digits; "-" if it was not reached."""
    return f"{value:.2g}" if math.isfinite(value) else "-"


def configuration(result: Mapping[str, Any]) -> str:
    """Writes the options of a method, with a star if a neighbour of the step size was not tried."""
    words = []
    for option, value in result["configuration"].items():
        if option == "decay" or (option == "tau" and not value):
            words += ["decay"] if value else []
        else:
            words.append(f"{option} {value:.3g}" if isinstance(value, float) else f"{option} {value}")
    return ", ".join(words) + ("*" if result["edge"] else "") or "-"


def report_lines(results: Results, arguments: argparse.Namespace) -> list[str]:
    """Writes the Markdown report, one table per data set."""
    lines = ["# Bound majorization and other optimizers of logistic regression", "", *settings(arguments)]
    for name, result in results.items():
        minima = ", ".join(f"{optimum['objective']:.5f}" for optimum in result["optima"])
        errors = ", ".join(f"{100 * optimum['error']:.1f}" for optimum in result["optima"])
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['rows']} training and {result['test_rows']} test rows, {result['columns']} columns with that of "
            f"ones, {result['classes']} classes, D = {result['size']}, lam = {result['lam_sum']:g}/{result['rows']}, "
            f"{result['dtype']}. F* = {minima}; test error there {errors} %. All of it took {result['seconds']:.0f} s.",
            "",
            *_table(result["methods"]),
        ]
    return lines


def settings(arguments: argparse.Namespace) -> list[str]:
    """Explains in words how the measurements were made."""
    used = f" At most {arguments.max_rows} rows of a data set are used." if arguments.max_rows else ""
    number, passes = arguments.num_seeds, arguments.num_train_epochs
    seeds = "One run" if number == 1 else f"Median of {number} runs (other split, start and order)"
    return [
        "F(W) = mean loss + lam/2 |W|^2; 10 % and 1 %: F <= 1.1 F* and 1.01 F*, interpolated between evaluations; gap: "
        "(F - F*)/F* at the end; -: not reached, or nothing to tune. A mini-batch of m of T rows is m/T passes, an "
        "evaluation of loss and gradient by a full-batch method is one pass. Seconds are processor time of one thread, "
        f"without evaluation; for small batches they are mostly those of Python. {seeds}.{used}",
        "",
        f"Every method had up to {arguments.trials} trials of {passes / 10:g} passes (full-batch methods "
        f"{FULL_BATCH_FACTOR * passes / 10:g}) and {arguments.time_limit / arguments.trials:g} s for its "
        "options, by the training objective; a star: a neighbour of the step size was not tried. A run ends after "
        f"{passes:g} passes (full-batch methods {FULL_BATCH_FACTOR * passes:g}), after "
        f"{arguments.time_limit:g} s, at a gap of {CONVERGED:g}, or when it has diverged. SPFB as published has no "
        "damping and divides lr by the number of the step; tau is that of lr tau/(tau + i), decay stands for tau = the "
        "steps of an epoch. ASGD: mean of the iterates from the second epoch on.",
        "",
        "The checks are claims of the papers, not of this package: one holds if it does on every data set where its "
        "methods are possible. Comparisons are of what it takes to 1 %, or to 10 % where neither method gets to 1 %.",
    ]


def _table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for result in methods.values():
        if "obstacle" in result:
            rows.append([result["name"], result["obstacle"], *["-"] * (len(HEADER) - 2)])
            continue
        ends = list(dict.fromkeys(run["end"] for run in result["runs"]))
        gap = median(result, "gap")
        rows.append(
            [
                result["name"],
                configuration(result),
                *(text_of(median(result, key)) for key in ("passes_10", "passes_1", "seconds_1")),
                f"{max(gap, 0):.1e}" if math.isfinite(gap) else "inf",
                f"{100 * median(result, 'error'):.1f}",
                f"{' / '.join(ends)}, {median(result, 'passes'):.3g} passes, {median(result, 'seconds'):.2g} s",
            ]
        )
    return report.table(HEADER, rows)


def plot(name: str, result: Mapping[str, Any], traces: Mapping[str, Sequence[Trace]], path: Path) -> None:
    """Draws relative gap and test error against passes and seconds, of the first run of every method; baselines dashed.

    Args:
        name: name of the data set.
        result: its results.
        traces: its runs, by method.
        path: of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    optimum = result["optima"][0]["objective"]
    colours = [plt.get_cmap("tab20")(i) for i in range(20)]
    figure, grid = plt.subplots(2, 2, figsize=(10, 8), sharey="row", sharex="col", layout="constrained")
    for number, (method, runs) in enumerate(traces.items()):
        trace = runs[0]
        gap = [value / optimum - 1 for value in trace.objective]
        start = gap[0]
        # A run that diverges leaves the figure at the top.
        shown = [min(max(value, CONVERGED / 10), 3 * start) if value == value else 3 * start for value in gap]
        style: dict[str, Any] = {"color": colours[number % len(colours)], "linewidth": 1.2}
        style["linestyle"] = "--" if method in BASELINES else "-"
        style["marker"] = "." if len(gap) < FEW_POINTS else ""
        for column, across in enumerate((trace.passes, trace.seconds)):
            label = result["methods"][method]["name"]
            grid[0, column].plot(across[1:], shown[1:], label=label, **style)
            grid[1, column].plot(across[1:], [100 * e for e in trace.error[1:]], **style)
    for column, text in enumerate(("passes over the data", "seconds")):
        grid[1, column].set_xlabel(text)
        grid[1, column].set_xscale("log")
    grid[0, 0].set_yscale("log")
    grid[0, 0].set_ylabel("(F - F*) / F*")
    grid[1, 0].set_ylabel("test error, %")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    figure.suptitle(f"{name}: {result['rows']} rows, D = {result['size']}", fontsize=11)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    plt.close(figure)
    # A palette makes the file a third of its size.
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)
