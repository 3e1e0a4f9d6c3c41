"""Bound majorization compared with other optimizers of l2-regularised multinomial logistic regression.

    python -m favor.eval.papers.majorization
    python -m favor.eval.papers.majorization --uci_dir DIR --images_dir DIR --datasets secstr digit1 text mnist adult

All methods minimise F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2 from the same point near 0. The
minimum F* is that of scipy's L-BFGS in double precision. The report has F - F* and the test error, by passes over the
data and by seconds. Seconds are processor time of one thread, which other processes do not disturb, of steps alone and
without evaluations. `steps` in this folder defines a pass, and `data` the scaling of the data.

Every method has the same budget to find its step size and other options: a search of at most --trials short runs with
seed 0, which together take at most as long as one run; the best objective at their end wins. A run ends after
--num_train_epochs passes (full-batch methods: five times as many, a tuning run: a tenth), after --time_limit seconds of
optimisation, or when F - F* is 1e-6 F*. It also ends when F is not finite or a thousand times its first value: the
method has diverged.
A seed determines split, initial point and order of examples.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.majorization.data import LAM_SUM, Optimum, Problem, make_problem, minimise
from favor.eval.papers.majorization.methods import METHODS, Configuration, Method, Score, search
from favor.eval.papers.majorization.report import checks, plot, report_lines, summary, thinned
from favor.eval.papers.majorization.steps import CONVERGED, Trace, initial_head, run
from favor.train.common.program import Parser, did_you_mean, program

QUICK = ("synthetic", "digits", "breast_cancer")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.majorization", __doc__)
    parser.add_argument("--datasets", nargs="+", default=list(QUICK), metavar="NAME", help="data sets")
    parser.add_argument("--uci_dir", type=Path, help="folder of the UCI files, for adult and ecoli")
    parser.add_argument("--images_dir", type=Path, help="folder of the image files, for mnist and fashion")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="methods to compare; default: all")
    parser.add_argument("--num_train_epochs", type=float, default=30, help="passes over the data (see above)")
    parser.add_argument("--trials", type=int, default=10, help="greatest number of configurations that are tried")
    parser.add_argument("--num_seeds", type=int, default=1, help="runs with the chosen configuration")
    parser.add_argument("--time_limit", type=float, default=8, help="seconds of a run, and of all trials together")
    parser.add_argument("--max_rows", type=int, default=0, help="rows of a data set that are used; 0 (default): all")
    add_results(parser, "majorization")
    arguments = parser.parse_args(argv)
    arguments.methods = arguments.methods or list(METHODS)
    for name, known in (("datasets", LAM_SUM), ("methods", METHODS)):
        unknown = [word for word in getattr(arguments, name) if word not in known]
        if unknown:
            parser.error(
                f"--{name} must be among {', '.join(known)}; got {unknown[0]}{did_you_mean(unknown[0], known)}"
            )
    if min(arguments.trials, arguments.num_seeds) < 1 or min(arguments.num_train_epochs, arguments.time_limit) <= 0:
        parser.error("--trials, --num_seeds, --num_train_epochs and --time_limit must be positive")
    if not math.isfinite(arguments.num_train_epochs):
        parser.error("--num_train_epochs must be finite")
    return arguments


TUNING_SHARE = 10


def evaluate(
    method: Method, problems: Sequence[Problem], optima: Sequence[Optimum], arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Trace]]:
    """Evaluates one method on one data set: the search, then one run per seed.

    Args:
        method: the optimizer.
        problems: one per seed.
        optima: their solutions.
        arguments: of the program.

    Returns:
        The entry of the tables, and the runs; no runs if the method is not possible.
    """
    obstacle = method.obstacle(problems[0])
    if obstacle:
        return {"name": method.name, "obstacle": obstacle}, []

    spent, limit = 0.0, arguments.time_limit

    def trial(configuration: Configuration) -> Score:
        nonlocal spent
        short = arguments.num_train_epochs / TUNING_SHARE, limit / arguments.trials
        found = start(method, configuration, problems[0], optima[0], 0, *short)
        spent += found.seconds[-1]
        if found.diverged or "matrix" in found.end:
            return 1.0, configuration["lr"]
        return 0.0, max(found.objective[-1], (1 + CONVERGED) * optima[0].objective), found.passes[-1]

    axes = method.axes(problems[0])
    chosen = search(axes, trial, arguments.trials, lambda: spent >= limit) if axes else ({}, False, 0)
    configuration, edge, trials = chosen
    traces = [
        start(method, configuration, problem, optimum, seed, arguments.num_train_epochs, limit)
        for seed, (problem, optimum) in enumerate(zip(problems, optima, strict=True))
    ]
    values = [optimum.objective for optimum in optima]
    result = {"name": method.name, "configuration": dict(configuration), "edge": edge, "trials": trials}
    result["runs"] = [summary(trace, value) for trace, value in zip(traces, values, strict=True)]
    result["curve"] = thinned(traces[0], values[0])
    return result, traces


def start(
    method: Method,
    configuration: Configuration,
    problem: Problem,
    optimum: Optimum,
    seed: int,
    epochs: float,
    seconds: float,
) -> Trace:
    """Runs a method from the initial point of a seed.

    Args:
        method: the optimizer.
        configuration: its options.
        problem: the data.
        optimum: its solution.
        seed: draws the initial point.
        epochs: greatest number of passes.
        seconds: greatest time.
    """
    head = initial_head(problem, seed)
    with warnings.catch_warnings():
        # favor's optimizers warn when they skip a step of a run that has diverged; such a run ends anyway.
        warnings.filterwarnings("ignore", message=".*skipped a step", category=RuntimeWarning)
        return run(method.make(problem, head, configuration, seed), problem, optimum, epochs, seconds)


def evaluate_dataset(name: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, list[Trace]]]:
    """Evaluates all methods on one data set; prints a line for each.

    Returns:
        The entry of the report, and the runs of each method that is possible.
    """
    begin = time.perf_counter()
    folders = arguments.uci_dir, arguments.images_dir
    problems = [make_problem(name, seed, *folders, arguments.max_rows) for seed in range(arguments.num_seeds)]
    optima = [minimise(problem) for problem in problems]
    first = problems[0]
    results, traces = {}, {}
    for key in arguments.methods:
        cell = time.perf_counter()
        results[key], found = evaluate(METHODS[key], problems, optima, arguments)
        if found:
            traces[key] = found
        print(f"{name} {key}: {described(results[key])} ({time.perf_counter() - cell:.0f} s)", flush=True)
    return {
        "rows": first.rows,
        "test_rows": len(first.y_test),
        "columns": first.x.shape[1],
        "classes": first.classes,
        "size": first.size,
        "lam_sum": first.lam_sum,
        "dtype": str(first.x.dtype).removeprefix("torch."),
        "optima": [vars(optimum) for optimum in optima],
        "seconds": time.perf_counter() - begin,
        "methods": results,
    }, traces


def described(result: dict[str, Any]) -> str:
    """Describes a cell in one line, for the terminal."""
    if "obstacle" in result:
        return str(result["obstacle"])
    run = result["runs"][0]
    mark = " (edge)" if result["edge"] else ""
    return (
        f"{result['configuration']}{mark}, {result['trials']} trials; passes to 10 % {run['passes_10']:.3g}, to 1 % "
        f"{run['passes_1']:.3g}, {run['seconds_1']:.3g} s; gap {run['gap']:.1e} after {run['passes']:.3g} passes, "
        f"{run['seconds']:.3g} s: {run['end']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, since the checks are claims of the papers and not of the program."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    torch.set_num_threads(1)
    begin, results = time.perf_counter(), {}
    command = report.shown_command(
        "favor.eval.papers.majorization", words, ["--uci_dir", "--images_dir"], ["--output_dir"]
    )
    for name in unique(arguments.datasets):
        results[name], traces = evaluate_dataset(name, arguments)
        # Write after every data set, so that a run that is stopped leaves its finished results.
        content: dict[str, Any] = {
            **report.context(command, ("scikit-learn", "scipy", "numpy")),
            "epochs": arguments.num_train_epochs,
            "trials": arguments.trials,
            "time_limit": arguments.time_limit,
            "seconds": time.perf_counter() - begin,
            "datasets": results,
        }
        lines, found = report_lines(results, arguments), checks(results)
        report.write(arguments.output_dir, arguments.name, lines, content, found)
        plot(name, results[name], traces, arguments.output_dir / f"{arguments.name}_{name}.png")
    print("\n".join(["", *lines, "", *(check.line() for check in found)]))
    return 0


def unique(names: Iterable[str]) -> list[str]:
    """Gives the names in order, each once."""
    return list(dict.fromkeys(names))


cli = program("favor.eval.papers.majorization", main)


if __name__ == "__main__":
    cli()
