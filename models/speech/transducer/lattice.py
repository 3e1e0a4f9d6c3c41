"""Sums over all alignments of a Transducer: the lattice of Graves 2012 (arXiv:1211.3711, section 2.4), by diagonals.

A node (t, u) has seen t frames and emitted u labels. Blank leads from it to (t + 1, u), the next label to (t, u + 1),
so all nodes with the same t + u follow from those one step before: T + U steps on vectors. Log probabilities are kept
sheared, `[T + U, B, U + 1]`, a diagonal in one piece. A label is kept at the node it leads to, where both sums need it.

Shorter sequences continue from their own end (T_b, U_b) to the common end (T, U) on the only way left open, at no cost.
So all sequences have the same number of steps and the same last node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from favor.kernels import dispatch

KERNELS = ("auto", "torch", "triton")
WIDEST = 1024
INF = float("inf")
Cells = tuple[int, slice, slice]


def slices(frames: list[int], labels: list[int], cells: int) -> Iterator[Cells]:
    """Yields sequence, frames and labels of pieces of at most `cells` nodes, in order; they leave out padding only."""
    for row, (stop, last) in enumerate(zip(frames, labels, strict=True)):
        width = min(last + 1, cells)
        height = max(1, cells // width)
        for t in range(0, stop, height):
            for u in range(0, last + 1, width):
                yield row, slice(t, min(t + height, stop)), slice(u, min(u + width, last + 1))


class Lattice:
    """Log probabilities of the transitions, in float64, and sums over their paths.

    Sums reach thousands of nats, and differences of them are taken; compared with the logits, float64 costs almost
    nothing.

    Args:
        frames: T_b of each sequence, at least 1.
        labels: U_b of each.
        device: of the tensors.

    Attributes:
        blank: `[B, T, U + 1]` view to be filled with log P(blank) at each node that is not padding; T and U are the
            largest T_b and U_b.
        label: `[B, T + 1, U]` view to be filled with log P(next label), where u < U_b.
    """

    def __init__(self, frames: list[int], labels: list[int], device: torch.device) -> None:
        batch, T, U = len(frames), max(frames), max(labels)
        self._blank = torch.full((T + U, batch, U + 1), -INF, dtype=torch.float64, device=device)
        self._label = torch.full_like(self._blank, -INF)
        row, step = U + 1, batch * (U + 1)
        self.blank = self._blank.as_strided((batch, T, U + 1), (row, step, step + 1))
        self.label = self._label.as_strided((batch, T + 1, U), (row, step, step + 1), 1)
        for number, (stop, last) in enumerate(zip(frames, labels, strict=True)):
            self.blank[number, stop:, U] = 0
            self.label[number, stop, last:] = 0

    def log_likelihood(self, kernel: str) -> tuple[Tensor, Tensor]:
        """Computes the log probability of each target `[B]`, and the sums over the ways to each node.

        Args:
            kernel: as `pick` returns it.
        """
        if kernel == "triton":
            from favor.models.speech.transducer import lattice_gpu

            ways = lattice_gpu.ways_to(self._blank, self._label)
        else:
            ways = ways_to(self._blank, self._label)
        return ways[-1, :, -1].clone(), ways

    def occupancies(self, kernel: str, total: Tensor, ways: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes the probabilities, given the target, that an alignment takes each blank and label, `[B, T, U + 1]`.

        The log probabilities are overwritten. Padding, and labels past the last, hold 0.

        Args:
            kernel: as `pick` returns it.
            total: first result of `log_likelihood`.
            ways: second result.
            dtype: of the probabilities.
        """
        if kernel == "triton":
            from favor.models.speech.transducer import lattice_gpu

            lattice_gpu.add_ways_from(self._blank, self._label)
        else:
            add_ways_from(self._blank, self._label)
        self._blank += ways[:-1, :, 1:]
        self._label += ways[:-1, :, :-1]
        for diagonals in (self._blank, self._label):
            diagonals -= total[:, None]
            diagonals.exp_()
        blank = self.blank.to(dtype, memory_format=torch.contiguous_format)
        label = torch.zeros_like(blank)
        label[:, :, :-1] = self.label[:, :-1]
        return blank, label


def ways_to(blank: Tensor, label: Tensor) -> Tensor:
    """Sums all ways from the first node to each, alpha of eq. 16: `[N + 1, B, W + 1]` for two times `[N, B, W]`.

    Column u + 1 is for u labels; column 0 is -inf.
    """
    steps, batch, width = blank.shape
    ways = blank.new_full((steps + 1, batch, width + 1), -INF)
    ways[0, :, 1] = 0
    here = ways[0]
    for stay, move, following in zip(blank.unbind(), label.unbind(), ways[1:].unbind(), strict=True):
        torch.logaddexp(here[:, 1:] + stay, here[:, :-1] + move, out=following[:, 1:])
        here = following
    return ways


def add_ways_from(blank: Tensor, label: Tensor) -> None:
    """Adds to each transition the sum over all ways from where it leads to the last node, beta of eq. 18, in place."""
    _, batch, width = blank.shape
    ways = blank.new_full((batch, width), -INF)
    ways[:, -1] = 0
    for stay, move in zip(reversed(blank.unbind()), reversed(label.unbind()), strict=True):
        stay += ways
        move += ways
        ways = stay.clone()
        torch.logaddexp(stay[:, :-1], move[:, 1:], out=ways[:, :-1])


def pick(kernel: str, device: torch.device, width: int) -> str:
    """Chooses the kernel for sums over a lattice, "torch" or "triton".

    Args:
        kernel: "auto" (Triton on CUDA if it is installed and fits, else torch), "torch" or "triton".
        device: where the logits are.
        width: U + 1.

    Raises:
        ValueError: for an unknown name, or if Triton is asked for and cannot run.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}; got {kernel!r}.")
    if kernel == "torch" or (kernel == "auto" and device.type != "cuda"):
        return "torch"
    problem = dispatch.available()["triton"]
    if problem == "available" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        problem = f"the logits are on {device.type}, not on a CUDA device"
    if problem == "available" and width > WIDEST:
        problem = f"it takes at most {WIDEST - 1} labels, got {width - 1}"
    if problem == "available":
        return "triton"
    if kernel == "triton":
        raise ValueError(f'kernel="triton" cannot run: {problem}. Use kernel="auto" or "torch".')
    return "torch"
