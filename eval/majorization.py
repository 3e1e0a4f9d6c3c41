"""Bound majorization compared with other optimizers of l2-regularised multinomial logistic regression."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from favor.eval.common import report
from favor.eval.optim.majorization_data import Optimum, Problem, make_problem, minimise
from favor.eval.optim.majorization_methods import METHODS, Configuration, Method, Score, search
from favor.eval.optim.majorization_report import checks, plot, report_lines, summary, thinned
from favor.eval.optim.majorization_steps import CONVERGED, Trace, initial_head, run
from favor.eval.options.majorization import parse_arguments
from favor.train.common.program import program

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
    command = report.shown_command("favor.eval.majorization", words, ["--uci_dir", "--images_dir"], ["--output_dir"])
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


cli = program("favor.eval.majorization", main)


if __name__ == "__main__":
    cli()
