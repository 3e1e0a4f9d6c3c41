"""Time of an exact full-rank step on one example, compared with a step of stochastic gradient descent."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from favor.eval.common import report
from favor.eval.options.exact_step import parse_arguments
from favor.optim import ProxBoundSGD, bound_coefficients, bound_matvec, exact_step_
from favor.optim.single import single_direction
from favor.train.common.program import program

DAMPING = 0.01
LIMIT = 1.5
NAMES = ("SGD in place", "exact_step_", "torch.optim.SGD", "ProxBoundSGD")


def steps(labels: int, inputs: int, seed: int) -> dict[str, Callable[[], Any]]:
    """Makes the four steps by name, each on a weight of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(inputs, generator=generator)
    weights = [torch.randn(labels, inputs, generator=generator) * 0.05 for _ in range(2)]
    target = torch.tensor([labels // 2])

    def in_place() -> None:
        residual = torch.mv(weights[0], x).softmax(-1)
        residual[target] -= 1
        weights[0].addr_(residual, x, alpha=-1e-3)

    def passes(make: Callable[[torch.nn.Linear], torch.optim.Optimizer]) -> Callable[[], None]:
        head = torch.nn.Linear(inputs, labels, bias=False)
        optimizer = make(head)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(head(x.unsqueeze(0)), target).backward()
            optimizer.step()

        return step

    return dict(
        zip(
            NAMES,
            (
                in_place,
                lambda: exact_step_(weights[1], x, int(target), damping=DAMPING),
                passes(lambda head: torch.optim.SGD(head.parameters(), lr=1e-3)),
                passes(lambda head: ProxBoundSGD(head, lr=1 / DAMPING)),
            ),
            strict=True,
        )
    )


def residual(labels: int, inputs: int, seed: int) -> float:
    """Computes the residual of the linear system that the exact step solves, relative to its right side."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(labels, generator=generator, dtype=torch.float64)
    right = logits.softmax(-1)
    right[0] = -right[1:].sum()
    found = single_direction(logits, right, float(inputs), 0.0, DAMPING)
    left = inputs * bound_matvec(bound_coefficients(logits, "none"), found) + DAMPING * found
    return ((left - right).norm() / right.norm()).item()


def measure(labels: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the milliseconds of the four steps, medians over repeats in turn, and their ratios (less is faster)."""
    found = steps(labels, arguments.inputs, arguments.seed)
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(arguments.repeats + arguments.warmup):
        for name, step in found.items():
            clock = time.perf_counter()
            step()
            if number >= arguments.warmup:
                times[name].append(1e3 * (time.perf_counter() - clock))
    medians = {name: statistics.median(values) for name, values in times.items()}
    in_place, exact, sgd, prox = NAMES
    return {
        "milliseconds": medians,
        "in_place_ratio": medians[exact] / medians[in_place],
        "exact_ratio": medians[exact] / medians[sgd],
        "optimizer_ratio": medians[prox] / medians[sgd],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a solution is wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    torch.set_num_threads(arguments.threads)
    rows, results = [], {}
    for labels in arguments.labels:
        error = residual(labels, arguments.inputs, arguments.seed)
        if not error < 1e-6:
            print(f"{labels} labels: relative residual {error:.1e}: no times are given")
            return 1
        result = measure(labels, arguments) | {"residual": error}
        results[str(labels)] = result
        ratios = [f"{result[name]:.2f}" for name in ("in_place_ratio", "exact_ratio", "optimizer_ratio")]
        rows.append([str(labels), *(f"{result['milliseconds'][name]:.3g}" for name in NAMES), *ratios])
        print("  ".join(rows[-1]), flush=True)
    slope = np.polyfit(
        np.log([int(name) for name in results]), [np.log(r["milliseconds"][NAMES[1]]) for r in results.values()], 1
    )[0]
    pairs = {
        "exact_step_ over gradient descent in place": "in_place_ratio",
        "exact_step_ over torch.optim.SGD": "exact_ratio",
        "ProxBoundSGD over torch.optim.SGD": "optimizer_ratio",
    }
    checks = []
    for pair, name in pairs.items():
        found = [result[name] for result in results.values()]
        checks.append(
            report.Check(f"{pair} is at most {LIMIT}", f"{min(found):.2f} to {max(found):.2f}", max(found) <= LIMIT)
        )
    ratios = ["exact_step_ / in place", "exact_step_ / torch SGD", "Prox / torch SGD"]
    header = ["labels", *(f"{name}, ms" for name in NAMES), *ratios]
    lines = [
        "# An exact full-rank step beside a step of gradient descent",
        "",
        f"One example, {arguments.inputs} inputs, float32; medians of {arguments.repeats} steps, the four in turn. "
        f"Time of exact_step_ grows like labels to the power {slope:.2f}.",
        "",
        *report.table(header, rows),
    ]
    command = report.shown_command("favor.eval.exact_step", words, [], ["--output_dir"])
    content = {**report.context(command, ("numpy", "scipy")), "seed": arguments.seed, "slope": slope, "labels": results}
    report.write(arguments.output_dir, arguments.name, lines, content, checks)
    print("\n".join(["", *lines, "", *(check.line() for check in checks)]))
    return 0


cli = program("favor.eval.exact_step", main)


if __name__ == "__main__":
    cli()
