"""Time and peak memory of the Transducer loss, compared with log_softmax and autograd through the recursion."""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from favor.eval.common import report
from favor.eval.options.transducer_loss import Cell, parse_arguments
from favor.eval.speed import measure
from favor.models.conformer.transducer_loss import joint_transducer_loss, transducer_loss
from favor.train.common.program import program

TOLERANCE = 1e-3  # the naive recursion is in float32
# Logarithm for a path of probability 0. It is finite, because the gradient of logaddexp(-inf, -inf) is NaN.
NEVER = -1e30
MB = 1 << 20


class Joint(nn.Module):
    """The part of a joint network that makes the logits: tanh of the sum, then a linear layer."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.head = nn.Linear(cell.width, cell.V)

    def forward(self, hidden: Tensor, prediction: Tensor) -> Tensor:
        """Computes the logits `[..., V]`."""
        return self.head(torch.tanh(hidden + prediction))


def naive(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the mean loss of sequences without padding, diagonal by diagonal, for plain autograd; the blank is 0."""
    _, T, width, _ = logits.shape
    log_p = logits.log_softmax(-1)
    ids = torch.nn.functional.pad(targets, (0, 1))[:, None, :, None].expand(-1, T, -1, -1)
    step = torch.arange(T + width - 1, device=logits.device)[:, None]
    u = torch.arange(width, device=logits.device)
    t = step - u
    outside = (t < 0) | (t >= T)

    def diagonals(values: Tensor, never: Tensor) -> tuple[Tensor, ...]:
        return values[:, t.clamp(0, T - 1), u].masked_fill(never, NEVER).unbind(1)

    blank = diagonals(log_p[..., 0], outside)
    label = diagonals(log_p.gather(-1, ids).squeeze(-1), outside | (u == width - 1))
    alpha = torch.where(u == 0, logits.new_zeros(len(logits), 1), NEVER)
    for stay, move in zip(blank[:-1], label[:-1], strict=True):
        moved = torch.nn.functional.pad((alpha + move)[:, :-1], (1, 0), value=NEVER)
        alpha = torch.logaddexp(alpha + stay, moved)
    return -(alpha[:, -1] + blank[-1][:, -1]).mean()


@dataclass
class Inputs:
    """Tensors of a cell: logits, or the outputs of two networks; all sequences have full length."""

    wanted: list[Tensor]
    joint: Joint | None
    targets: Tensor

    @classmethod
    def of(cls, cell: Cell, networks: bool) -> Inputs:
        """Draws standard normal tensors."""
        torch.manual_seed(cell.seed)
        widths = [(cell.T, cell.width), (cell.U + 1, cell.width)] if networks else [(cell.T, cell.U + 1, cell.V)]
        wanted = [torch.randn(cell.B, *shape).to(cell.device).requires_grad_() for shape in widths]
        targets = torch.randint(1, cell.V, (cell.B, cell.U)).to(cell.device)
        return cls(wanted, Joint(cell).to(cell.device) if networks else None, targets)

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Frames and labels of each sequence."""
        batch, labels = self.targets.shape
        return torch.full((batch,), self.wanted[0].shape[1]), torch.full((batch,), labels)

    def logits(self) -> Tensor:
        """Computes all logits."""
        if self.joint is None:
            return self.wanted[0]
        hidden, prediction = self.wanted
        return self.joint(hidden[:, :, None], prediction[:, None])

    def one(self, row: int) -> Inputs:
        """Takes one sequence, in float64."""
        wanted = [x[row : row + 1].detach().double().requires_grad_() for x in self.wanted]
        joint = None if self.joint is None else copy.deepcopy(self.joint).double()
        return Inputs(wanted, joint, self.targets[row : row + 1])


@dataclass(frozen=True)
class Method:
    """One way to compute the mean loss."""

    name: str
    kernel: str | None = None
    max_cells: int | None = None

    @property
    def label(self) -> str:
        """Gives the name of the method in tables."""
        return self.name if self.kernel is None else f"{self.name} ({self.kernel})"

    def loss(self, inputs: Inputs) -> Tensor:
        """Computes the loss, mean over the batch."""
        if self.kernel is None:
            return naive(inputs.logits(), inputs.targets)
        targets = (inputs.targets, *inputs.lengths)
        if self.max_cells is None or inputs.joint is None:
            return transducer_loss(inputs.logits(), *targets, kernel=self.kernel)
        options: dict[str, Any] = {"kernel": self.kernel, "max_cells": self.max_cells}
        return joint_transducer_loss(*inputs.wanted, inputs.joint, *targets, **options)

    def run(self, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the loss, and gradients with respect to the inputs and the parameters."""
        loss = self.loss(inputs)
        parameters = [] if inputs.joint is None else [*inputs.joint.parameters()]
        return loss.detach(), torch.autograd.grad(loss, [*inputs.wanted, *parameters])


def methods(networks: bool, kernels: Sequence[str], max_cells: int) -> list[Method]:
    """Lists the methods of one table, the naive one first."""
    found = [Method("naive"), *(Method("transducer_loss", kernel) for kernel in kernels)]
    return found + [Method("joint_transducer_loss", kernel, max_cells) for kernel in kernels] if networks else found


def truth(inputs: Inputs) -> tuple[float, list[Tensor]]:
    """Computes the loss, and gradients for the first sequence, in float64."""
    losses = []
    for row in range(len(inputs.targets)):
        one = inputs.one(row)
        loss = Method("naive").loss(one)
        losses.append(loss.item())
        if row == 0:
            slopes = torch.autograd.grad(loss / len(inputs.targets), one.wanted)
    return statistics.fmean(losses), list(slopes)


def error(method: Method, inputs: Inputs, expected: tuple[float, list[Tensor]]) -> float:
    """Computes the largest relative error: of the loss, or of a gradient of the first sequence (by largest entries).

    Args:
        method: the method to check.
        inputs: all sequences.
        expected: loss and gradients, from `truth`.
    """
    loss, slopes = method.run(inputs)
    found = [abs(loss.item() / expected[0] - 1)]
    for slope, exact in zip(slopes, expected[1], strict=False):
        found.append(((slope[:1] - exact).abs().max() / exact.abs().max()).item())
    return max(found)


def isolated_peak(request: dict[str, Any]) -> int:
    """Measures peak bytes of one pass in the calling process."""
    method, cell = Method(**request["method"]), Cell(**request["cell"])
    tiny = replace(cell, B=1, T=2, U=2)
    method.run(Inputs.of(tiny, request["networks"]))
    inputs = Inputs.of(cell, request["networks"])
    measure.warm_libraries()
    return measure.resident_peak(lambda: method.run(inputs))


def isolated_peaks(requests: list[dict[str, Any]], threads: int) -> list[int]:
    """Measures the peak bytes of each request, in a process of its own; raises RuntimeError if one fails."""
    with measure.MemoryServer(threads, "favor.eval.transducer_loss") as server:
        return [server.peak(request) for request in requests]


def compare(cell: Cell, networks: bool, arguments: argparse.Namespace) -> list[dict[str, Any]] | str:
    """Measures all methods on a cell.

    Args:
        cell: sizes.
        networks: whether the inputs are the outputs of two networks.
        arguments: of the program.

    Returns:
        One row per method, or a text that says what is wrong.
    """
    inputs = Inputs.of(cell, networks)
    chosen = methods(networks, arguments.kernels, arguments.max_cells)
    expected, rows, watches = truth(inputs), [], {}
    for method in chosen:
        clock = time.perf_counter()
        wrong = error(method, inputs, expected)
        if not wrong < TOLERANCE:
            return f"{cell.label}, {method.label}: relative error {wrong:.1e}: no times are given"
        call = partial(method.run, inputs)
        watches[method.label] = measure.Stopwatch(call, lambda: None, time.perf_counter() - clock)
        rows.append({"size": cell.label, "method": method.label, "logits_bytes": cell.logits_bytes, "error": wrong})
    timings = measure.interleaved(watches, cell.device, arguments.repeats, arguments.seconds_per_cell)
    if cell.device == "cuda":
        peaks = [measure.cuda_peak(partial(method.run, inputs)) for method in chosen]
    else:
        del inputs, watches, call
        wanted = [{"method": asdict(method), "cell": asdict(cell), "networks": networks} for method in chosen]
        peaks = isolated_peaks(wanted, arguments.threads)
    for row, peak in zip(rows, peaks, strict=True):
        timing = timings[row["method"]]
        if isinstance(timing, Exception):
            raise timing
        row |= {"seconds": asdict(timing), "peak_bytes": peak}
    return rows


def shown(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Writes the cells of a table; times are compared with that of the naive method."""
    lines = []
    for row in rows:
        base = next(other for other in rows if other["size"] == row["size"])
        median = row["seconds"]["median"]
        cells = [row["size"], f"{row['logits_bytes'] / MB:.0f}", row["method"], f"{1e3 * median:.3g}"]
        cells += [f"{base['seconds']['median'] / median:.2f}", f"{row['peak_bytes'] / MB:.0f}"]
        lines.append([*cells, f"{row['peak_bytes'] / row['logits_bytes']:.2f}", f"{row['error']:.0e}"])
    return lines


def checks(logits: list[dict[str, Any]], networks: list[dict[str, Any]]) -> list[report.Check]:
    """Checks memory and time of the losses against those of the naive loss."""
    found = []
    for name, rows in (("transducer_loss", logits), ("joint_transducer_loss", networks)):
        ours = [row for row in rows if row["method"].split(" ")[0] == name]
        bases = [next(other for other in rows if other["size"] == row["size"]) for row in ours]
        shares = [row["peak_bytes"] / base["peak_bytes"] for base, row in zip(bases, ours, strict=True)]
        statement = f"the peak of {name} is at most half that of the naive loss"
        found.append(report.Check(statement, f"{min(shares):.2f} to {max(shares):.2f}", max(shares) <= 0.5))
        gains = [a["seconds"]["median"] / b["seconds"]["median"] for a, b in zip(bases, ours, strict=True)]
        statement = f"{name} takes no longer than the naive loss"
        found.append(report.Check(statement, f"{min(gains):.2f} to {max(gains):.2f} times as fast", min(gains) >= 1))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a result is wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    if arguments.isolate:  # with the threads of OMP_NUM_THREADS
        measure.serve(sys.stdin, sys.stdout, isolated_peak)
        return 0
    torch.set_num_threads(arguments.threads)
    tables: list[list[dict[str, Any]]] = [[], []]
    for B, T, U, V in arguments.sizes:
        cell = Cell(B, T, U, V, width=arguments.width, device=arguments.device, seed=arguments.seed)
        for networks, rows in enumerate(tables):
            found = compare(cell, bool(networks), arguments)
            if isinstance(found, str):
                print(found)
                return 1
            rows += found
            print("\n".join("  ".join(line) for line in shown(found)), flush=True)
    header = ["B x T x U x V", "logits, MiB", "method", "ms", "times as fast", "peak, MiB", "peak / logits", "error"]
    lines = [
        "# The Transducer loss: time and peak memory",
        "",
        f"Forward and backward pass, float32, no padding, medians of at most {arguments.repeats} passes in turns. Peak "
        "memory is without the inputs. Naive: log_softmax, then autograd through the recursion by diagonals. Error: "
        "largest relative one of the loss and of the gradients of a sequence, against float64.",
        "",
        "## From logits",
        "",
        *report.table(header, shown(tables[0])),
        "",
        f"## From the outputs of two networks, by a joint network of width {arguments.width}",
        "",
        f"The first methods make all logits at once; joint_transducer_loss makes those of {arguments.max_cells} nodes "
        "at a time, twice.",
        "",
        *report.table(header, shown(tables[1])),
    ]
    command = report.shown_command("favor.eval.transducer_loss", words, [], ["--output_dir"])
    content = {**report.context(command, ()), "seed": arguments.seed, "logits": tables[0], "networks": tables[1]}
    found_checks = checks(*tables)
    report.write(arguments.output_dir, arguments.name, lines, content, found_checks)
    print("\n".join(["", *lines, "", *(check.line() for check in found_checks)]))
    return 0


cli = program("favor.eval.transducer_loss", main)


if __name__ == "__main__":
    cli()
