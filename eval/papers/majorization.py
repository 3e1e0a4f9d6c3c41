"""Bound majorization compared with other optimizers of l2-regularised multinomial logistic regression.

    python -m favor.eval.papers.majorization
    python -m favor.eval.papers.majorization --uci_dir DIR --images_dir DIR --datasets secstr digit1 text mnist adult

All methods minimise F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2 from the same point near 0. The
minimum F* is that of scipy's L-BFGS in double precision. The report has F - F* and the test error, by passes over the
data and by seconds. Seconds are processor time of one thread, which other processes do not disturb, of steps alone and
without evaluations. `favor.eval.papers.majorization_methods` defines a pass.

Every method has the same budget to find its step size and other options: a search of at most 10 short runs with seed 0,
which together take at most as long as one run; the best objective at their end wins. A run ends after 30 passes
(full-batch methods: five times as many, a tuning run: a tenth), after 8 seconds of optimisation, or when F - F* is 1e-6
F*. It also ends when F is not finite or a thousand times its first value: the method has diverged.

A data set is shuffled; 90 % of its rows are for training, the others for testing. The scaling is computed from the
training part and is equal for all methods. A column that holds only zeros and ones is not changed. Every other column
is centred and divided by its standard deviation (a constant column is only centred). Exceptions: text (rows of norm 1)
and synthetic (badly scaled on purpose) are not changed; pixels of fashion are divided by one number, so that the
largest is 1; pixels of mnist are projected to 50 principal components, which are divided by one number in the same way
(D = 510 = 10 * 51 in "Stochastic Bound Majorization" suggests 50 features and a bias; the paper does not state its
projection). A column of ones is the bias, regularised like the others. Numbers have double precision in sets of at most
four million entries and single precision in larger sets.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.common import panels, save
from favor.eval.papers.datasets import SSL_FILES, Dataset, load, read_adult, read_images, read_ssl, symmetric
from favor.eval.papers.majorization_methods import (
    HALF_DECADES,
    METHODS,
    Axis,
    Method,
    Optimum,
    Problem,
    Stepper,
    initial_head,
    minimise,
)
from favor.train.common.program import Parser, did_you_mean, program

# lam_sum of the SUM objective; for secstr, digit1, text, mnist and synthetic it is that of the papers.
LAM_SUM = {"secstr": 10.0, "digit1": 10.0, "text": 10.0, "mnist": 1e-2, "adult": 1.0, "ecoli": 1.0, "fashion": 10.0}
LAM_SUM |= {"synthetic": 10.0, "digits": 1.0, "breast_cancer": 1.0}
QUICK = ("synthetic", "digits", "breast_cancer")
IMAGE_FILES = {"mnist": "mnist_10k.npz", "fashion": "fashion_mnist_10k.npz"}
COMPONENTS = 50
DOUBLE_PRECISION = 4_000_000

EPOCHS, FULL_BATCH_FACTOR, TUNING_SHARE = 30, 5, 10
TRIALS, SECONDS = 10, 8.0
CONVERGED, DIVERGED = 1e-6, 1e3
BASELINES = ("sgd", "asgd_tau", "asgd", "adam", "lbfgs", "newton")
ROUNDING = 1e-6  # a relative increase of F that single precision explains
HEADER = ("method", "configuration", "passes to 10 %", "passes to 1 %", "seconds to 1 %", "gap", "test error, %", "end")

Configuration = Mapping[str, Any]
Score = tuple[float, ...]
Results = Mapping[str, Mapping[str, Any]]


def make_problem(name: str, uci_dir: Path | None, images_dir: Path | None) -> Problem:
    """Loads one data set of LAM_SUM, split and scaled; ValueError if its folder or its package is missing."""
    rows = read(name, uci_dir, images_dir).shuffled(0)
    held = max(1, round(0.1 * len(rows.labels)))
    train, test = scale(name, rows.x[:-held], rows.x[-held:])
    kind = torch.float64 if train.size <= DOUBLE_PRECISION else torch.float32
    parts = [
        torch.from_numpy(np.hstack((part, np.ones((len(part), 1), part.dtype)))).to(kind) for part in (train, test)
    ]
    labels = torch.from_numpy(rows.labels.astype(np.int64))
    return Problem(parts[0], labels[:-held], parts[1], labels[-held:], rows.classes, LAM_SUM[name])


def read(name: str, uci_dir: Path | None, images_dir: Path | None) -> Dataset:
    """Reads encoded features and labels of a data set, neither shuffled nor scaled."""
    if name in QUICK:
        return symmetric() if name == "synthetic" else load(name, None)
    if name in SSL_FILES:
        return read_ssl(name)
    option, folder = ("--images_dir", images_dir) if name in IMAGE_FILES else ("--uci_dir", uci_dir)
    if folder is None:
        raise ValueError(f"{name} needs {option}, the folder of its files.")
    if name in IMAGE_FILES:
        images, labels = read_images(folder, IMAGE_FILES[name], "x_train", "y_train")
        return Dataset(name, images.reshape(len(images), -1).astype(np.float32), labels, 10)
    return read_adult(folder) if name == "adult" else load(name, folder)


def scale(name: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales training and test inputs as the module's docstring says."""
    if name in ("synthetic", "text"):
        return train, test
    if name in IMAGE_FILES:
        if name == "mnist":
            mean, axes = train.mean(0), np.linalg.eigh(np.cov(train.T))[1][:, ::-1][:, :COMPONENTS]
            train, test = (train - mean) @ axes, (test - mean) @ axes
        largest = np.abs(train).max()
        return train / largest, test / largest
    numeric = ((train != 0) & (train != 1)).any(0)
    mean, spread = train[:, numeric].mean(0), train[:, numeric].std(0)
    spread[spread == 0] = 1
    scaled = train.copy(), test.copy()
    for part in scaled:
        part[:, numeric] = (part[:, numeric] - mean) / spread
    return scaled


@dataclass
class Trace:
    """One run: numbers at each evaluation, also before the first step, and the reason for its end."""

    passes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    end: str = ""

    def add(self, stepper: Stepper, seconds: float) -> None:
        """Evaluates a method after some seconds."""
        problem, weight = stepper.problem, stepper.weight
        found = (stepper.passes, seconds, problem.objective(weight), problem.error(weight))
        for numbers, value in zip((self.passes, self.seconds, self.objective, self.error), found, strict=True):
            numbers.append(value)

    @property
    def diverged(self) -> bool:
        """Tells whether F is not finite any more, or has grown too large."""
        return not self.objective[-1] <= DIVERGED * self.objective[0]

    def gaps(self, optimum: float) -> list[float]:
        """Gives (F - F*)/F* at each evaluation."""
        return [value / optimum - 1 for value in self.objective]


def next_evaluation(passes: float) -> float:
    """Says after how many passes a stochastic method is evaluated next."""
    for end, step in ((0.2, 0.05), (1.0, 0.1), (5.0, 0.25)):
        if passes < end - 1e-9:
            return passes + step
    return passes + max(1.0, 0.05 * passes)


def run(stepper: Stepper, optimum: Optimum, epochs: float, seconds: float) -> Trace:
    """Takes steps until passes or processor time are used up, or F is at its minimum or has diverged."""
    trace, spent = Trace(), 0.0
    epochs *= FULL_BATCH_FACTOR if stepper.full_batch else 1
    trace.add(stepper, 0.0)
    while not trace.end:
        due = 0.0 if stepper.full_batch else min(epochs, next_evaluation(stepper.passes))
        begin, failure = time.process_time(), None
        try:
            stepper.advance()
            while stepper.passes < due - 1e-9 and time.process_time() - begin < seconds - spent:
                stepper.advance()
        except (ValueError, FloatingPointError, torch.linalg.LinAlgError) as error:
            failure = error
        spent += time.process_time() - begin
        trace.add(stepper, spent)
        if trace.diverged:
            trace.end = "diverged"
        elif isinstance(failure, ValueError):
            raise failure
        elif failure is not None:
            trace.end = "matrix not positive definite"
        elif trace.objective[-1] <= (1 + CONVERGED) * optimum.objective:
            trace.end = "converged"
        elif spent >= seconds:
            trace.end = "time limit"
        elif stepper.passes >= epochs - 1e-9:
            trace.end = "passes"
    return trace


def search(
    axes: Mapping[str, Axis],
    score: Callable[[Configuration], Score],
    trials: int,
    over: Callable[[], bool] = lambda: False,
) -> tuple[Configuration, bool, int]:
    """Searches, axis by axis, for the configuration with the smallest score.

    The search begins at the start of every axis. It moves along one axis after the other, up and then down, while the
    score gets smaller, until no neighbour is better, the trials are used up, or it is over for another reason.

    Returns:
        The best configuration; whether a neighbour of its step size has not been tried or lies outside the axis (only
        if the first axis is that of step sizes, else False); the number of trials.
    """
    tried: dict[tuple[int, ...], Score] = {}
    values = [axis.values for axis in axes.values()]

    def configuration(place: tuple[int, ...]) -> Configuration:
        return {name: own[i] for name, own, i in zip(axes, values, place, strict=True)}

    def neighbour(place: tuple[int, ...], number: int, side: int) -> tuple[int, ...] | None:
        moved = place[number] + side
        return (*place[:number], moved, *place[number + 1 :]) if 0 <= moved < len(values[number]) else None

    def visit(place: tuple[int, ...]) -> Score:
        if place not in tried:
            if tried and (len(tried) >= trials or over()):
                return (math.inf,)
            tried[place] = score(configuration(place))
        return tried[place]

    best = tuple(axis.start for axis in axes.values())
    visit(best)
    improved = True
    while improved and len(tried) < trials:
        improved = False
        for number in range(len(axes)):
            for side in (1, -1):
                while (place := neighbour(best, number, side)) and visit(place) < tried[best]:
                    best, improved = place, True
    edge = len(values[0]) > 2 * HALF_DECADES and any(neighbour(best, 0, side) not in tried for side in (1, -1))
    return configuration(best), edge, len(tried)


def evaluate(method: Method, problem: Problem, optimum: Optimum) -> tuple[dict[str, Any], Trace | None]:
    """Evaluates one method on one data set: the search, then a run."""
    obstacle = method.obstacle(problem)
    if obstacle:
        return {"name": method.name, "obstacle": obstacle}, None

    spent = 0.0

    def start(configuration: Configuration, epochs: float, seconds: float) -> Trace:
        with warnings.catch_warnings():
            # favor's optimizers warn when they skip a step of a run that has diverged; such a run ends anyway.
            warnings.filterwarnings("ignore", message=".*skipped a step", category=RuntimeWarning)
            return run(method.make(problem, initial_head(problem, 0), configuration, 0), optimum, epochs, seconds)

    def trial(configuration: Configuration) -> Score:
        nonlocal spent
        found = start(configuration, EPOCHS / TUNING_SHARE, SECONDS / TRIALS)
        spent += found.seconds[-1]
        if found.diverged or "matrix" in found.end:
            return 1.0, configuration["lr"]
        return 0.0, max(found.objective[-1], (1 + CONVERGED) * optimum.objective), found.passes[-1]

    axes = method.axes(problem)
    configuration, edge, trials = search(axes, trial, TRIALS, lambda: spent >= SECONDS) if axes else ({}, False, 0)
    trace = start(configuration, EPOCHS, SECONDS)
    result = {"name": method.name, "configuration": dict(configuration), "edge": edge, "trials": trials}
    return result | {"run": summary(trace, optimum.objective)}, trace


def crossing(position: Sequence[float], gap: Sequence[float], level: float) -> float:
    """Finds where a gap first is at most `level`, by linear interpolation of its logarithm; infinity if nowhere."""
    i = next((i for i, value in enumerate(gap) if value <= level), None)
    if i is None or i == 0 or math.isinf(gap[i - 1]):
        return math.inf if i is None else position[i]
    pair = (math.log(max(gap[i], 1e-300)), math.log(gap[i - 1]))
    return float(np.interp(math.log(level), pair, (position[i], position[i - 1])))


def summary(trace: Trace, optimum: float) -> dict[str, Any]:
    """Gives passes and seconds to 1.1 F* and to 1.01 F*, the end of a run, and the largest relative increase of F."""
    gap = trace.gaps(optimum)
    rises = [later / before - 1 for before, later in zip(trace.objective, trace.objective[1:], strict=False)]
    at = {"passes": trace.passes, "seconds": trace.seconds}
    return {
        **{f"{unit}_{level}": crossing(of, gap, level / 100) for unit, of in at.items() for level in (10, 1)},
        "gap": gap[-1],
        "error": trace.error[-1],
        "passes": trace.passes[-1],
        "seconds": trace.seconds[-1],
        "end": trace.end,
        "largest_increase": max(rises, default=0.0),
    }


def ran(results: Results, *methods: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Finds the data sets on which all of these methods were possible, and their runs."""
    cells = {name: [result["methods"].get(method, {}) for method in methods] for name, result in results.items()}
    return [(name, [cell["run"] for cell in of]) for name, of in cells.items() if all("run" in cell for cell in of)]


def checks(results: Results) -> list[report.Check]:
    """Checks the claims of the papers, each on every data set on which its methods are possible."""
    found: list[report.Check] = []

    def claim(statement: str, rows: Sequence[tuple[str, str, bool]]) -> None:
        if rows:
            share = f"{sum(holds for _, _, holds in rows)} of {len(rows)} data sets"
            numbers = f"{share}; " + ", ".join(f"{name} {text}" for name, text, _ in rows)
            found.append(report.Check(statement, numbers, all(holds for _, _, holds in rows)))

    for method in ("sbm", "sbm_accumulated"):
        rows = [(n, text_of(r["passes_1"]), r["passes_1"] <= 1) for n, (r,) in ran(results, method)]
        claim(f"{METHODS[method].name} is within 1 % of F* after one pass (passes to 1 %)", rows)
    for method in ("sbm", "sbm_accumulated", "spfb_literal", "spfb", "lspfb", "lspfb_repaired", "prox"):
        rows = [(n, *faster(r, "passes")) for n, r in ran(results, method, "sgd")]
        claim(f"{METHODS[method].name} takes fewer passes than tuned SGD", rows)
    for method in ("bbm", "bbm_cheap"):
        rises = [(n, r["largest_increase"]) for n, (r,) in ran(results, method)]
        rows = [(n, f"{rise:.0e}", rise <= ROUNDING) for n, rise in rises]
        claim(f"F never increases under {METHODS[method].name} (largest relative change in a step)", rows)
    for key in ("passes", "seconds"):
        rows = [(n, *faster(r, key)) for n, r in ran(results, "bbm", "lbfgs")]
        claim(f"BBM takes fewer {key} than L-BFGS", rows)
    gaps = [(n, r["gap"], r["passes"]) for n, (r,) in ran(results, "spfb_one")]
    rows = [(n, f"gap {gap:.1e} after {passes:.3g} passes", gap <= 0.01) for n, gap, passes in gaps]
    claim("SPFB as published with one example a step comes within 1 % of F*", rows)
    return found


def faster(runs: Sequence[Mapping[str, Any]], unit: str) -> tuple[str, bool]:
    """Compares passes or seconds of two methods to 1 %, or to 10 % if neither reaches 1 %; tells if the first wins."""
    level = 1 if any(math.isfinite(run[f"{unit}_1"]) for run in runs) else 10
    one, two = (run[f"{unit}_{level}"] for run in runs)
    return f"{text_of(one)} and {text_of(two)} to {level} %", one < two


def text_of(value: float) -> str:
    """Writes a number with two digits; "-" if it was not reached."""
    return f"{value:.2g}" if math.isfinite(value) else "-"


def configured(result: Mapping[str, Any]) -> str:
    """Writes the options of a method, with a star if a neighbour of the step size was not tried."""
    words = []
    for option, value in result["configuration"].items():
        if option == "decay" or (option == "tau" and not value):
            words += ["decay"] if value else []
        else:
            words.append(f"{option} {value:.3g}" if isinstance(value, float) else f"{option} {value}")
    return ", ".join(words) + ("*" if result["edge"] else "") or "-"


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Writes a row per method."""
    rows = []
    for result in methods.values():
        if "obstacle" in result:
            rows.append([result["name"], result["obstacle"], *["-"] * (len(HEADER) - 2)])
            continue
        run = result["run"]
        numbers = [text_of(run[key]) for key in ("passes_10", "passes_1", "seconds_1")]
        gap = f"{max(run['gap'], 0):.1e}" if math.isfinite(run["gap"]) else "inf"
        end = f"{run['end']}, {run['passes']:.3g} passes, {run['seconds']:.2g} s"
        rows.append([result["name"], configured(result), *numbers, gap, f"{100 * run['error']:.1f}", end])
    return report.table(HEADER, rows)


def report_lines(results: Results) -> list[str]:
    """Writes the Markdown report, one table per data set."""
    lines = [
        "# Bound majorization and other optimizers of logistic regression",
        "",
        "F(W) = mean loss + lam/2 |W|^2; 10 % and 1 %: F <= 1.1 F* and 1.01 F*, interpolated between evaluations; gap: "
        "(F - F*)/F* at the end; -: not reached, or nothing to tune. A mini-batch of m of T rows is m/T passes, an "
        "evaluation of loss and gradient by a full-batch method is one pass. Seconds are processor time of one thread, "
        "without evaluation; for small batches they are mostly those of Python. One run.",
        "",
        f"Every method had up to {TRIALS} trials of {EPOCHS / TUNING_SHARE:g} passes (full-batch methods "
        f"{FULL_BATCH_FACTOR * EPOCHS / TUNING_SHARE:g}) and {SECONDS / TRIALS:g} s for its options, by the training "
        "objective; a star: a neighbour of the step size was not tried. A run ends after "
        f"{EPOCHS:g} passes (full-batch methods {FULL_BATCH_FACTOR * EPOCHS:g}), after {SECONDS:g} s, at a gap of "
        f"{CONVERGED:g}, or when it has diverged. SPFB as published has no damping and divides lr by the number of the "
        "step; tau is that of lr tau/(tau + i), decay stands for tau = the steps of an epoch. ASGD: mean of the "
        "iterates from the second epoch on.",
        "",
        "The checks are claims of the papers, not of this package: one holds if it does on every data set where its "
        "methods are possible. Comparisons are of what it takes to 1 %, or to 10 % where neither method gets to 1 %.",
    ]
    for name, result in results.items():
        optimum = result["optimum"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['rows']} training and {result['test_rows']} test rows, {result['columns']} columns with that of "
            f"ones, {result['classes']} classes, D = {result['size']}, lam = {result['lam_sum']:g}/{result['rows']}, "
            f"{result['dtype']}. F* = {optimum['objective']:.5f}; test error there {100 * optimum['error']:.1f} %. All "
            f"of it took {result['seconds']:.0f} s.",
            "",
            *table(result["methods"]),
        ]
    return lines


def plot(name: str, result: Mapping[str, Any], traces: Mapping[str, Trace], path: Path) -> None:
    """Draws relative gap and test error against passes and seconds, of every method; baselines dashed."""
    figure, grid = panels(2, 2, 5, 3.7, sharey="row", sharex="col")
    for number, (method, trace) in enumerate(traces.items()):
        gap = trace.gaps(result["optimum"]["objective"])
        top = 3 * gap[0]
        # A run that diverges leaves the figure at the top.
        shown = [min(max(value, CONVERGED / 10), top) if value == value else top for value in gap]
        style: dict[str, Any] = {"color": f"C{number % 10}", "linewidth": 1.2 if number < 10 else 2}
        style["linestyle"] = "--" if method in BASELINES else "-"
        for column, across in enumerate((trace.passes, trace.seconds)):
            grid[0, column].plot(across[1:], shown[1:], label=METHODS[method].name, **style)
            grid[1, column].plot(across[1:], [100 * e for e in trace.error[1:]], **style)
    for column, text in enumerate(("passes over the data", "seconds")):
        grid[1, column].set(xlabel=text, xscale="log")
    grid[0, 0].set(yscale="log", ylabel="(F - F*) / F*")
    grid[1, 0].set_ylabel("test error, %")
    figure.suptitle(f"{name}: {result['rows']} rows, D = {result['size']}", fontsize=11)
    save(figure, path, grid[0, 0])


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.majorization", __doc__)
    parser.add_argument("--datasets", nargs="+", default=list(QUICK), metavar="NAME", help="data sets")
    parser.add_argument("--uci_dir", type=Path, help="folder of the UCI files, for adult and ecoli")
    parser.add_argument("--images_dir", type=Path, help="folder of the image files, for mnist and fashion")
    add_results(parser, "majorization")
    arguments = parser.parse_args(argv)
    for name in arguments.datasets:
        if name not in LAM_SUM:
            parser.error(f"--datasets must be among {', '.join(LAM_SUM)}; got {name}{did_you_mean(name, LAM_SUM)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, since the checks are claims of the papers and not of the program."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)
    context: Any = ("favor.eval.papers.majorization", argv, ("scikit-learn", "scipy", "numpy"))
    results: dict[str, Any] = {}
    for name in dict.fromkeys(arguments.datasets):
        begin = time.perf_counter()
        problem = make_problem(name, arguments.uci_dir, arguments.images_dir)
        optimum = minimise(problem)
        cells = {key: evaluate(method, problem, optimum) for key, method in METHODS.items()}
        results[name] = {
            "rows": problem.rows,
            "test_rows": len(problem.y_test),
            "columns": problem.x.shape[1],
            "classes": problem.classes,
            "size": problem.size,
            "lam_sum": problem.lam_sum,
            "dtype": str(problem.x.dtype).removeprefix("torch."),
            "optimum": vars(optimum),
            "methods": {key: result for key, (result, _) in cells.items()},
            "seconds": time.perf_counter() - begin,
        }
        traces = {key: trace for key, (_, trace) in cells.items() if trace is not None}
        plot(name, results[name], traces, arguments.output_dir / f"{arguments.name}_{name}.png")
        # After every data set, so that a run that is stopped leaves its finished results.
        settings = {"epochs": EPOCHS, "trials": TRIALS, "time_limit": SECONDS, "datasets": results}
        content = report.context_of(*context, ["--uci_dir", "--images_dir"]) | settings
        lines, shown = report_lines(results), [f"## {name}", "", *table(results[name]["methods"])]
        report.finish(arguments, lines, content, checks(results), shown)
    return 0


cli = program("favor.eval.papers.majorization", main)


if __name__ == "__main__":
    cli()
