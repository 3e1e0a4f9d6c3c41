"""Transducer loss as one node of autograd's graph: from logits, or from the inputs of a joint network.

Both go through the logits a piece at a time, twice: first for the log probabilities in the lattice, then, in the
backward pass, for the gradient. Between the two they keep the probabilities of the transitions, `[B, T, U + 1]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from favor.models.speech.transducer.lattice import (
    Cells,
    Lattice,
    slices,
)

PIECE = {"cpu": 1 << 18}
LARGE_PIECE = 1 << 23
Joint = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """Data and settings of the loss of one batch.

    Attributes:
        targets: `[B, U + 1]` int64 on the device of the logits; padding holds some valid id.
        frames: T_b of each sequence.
        labels: U_b of each.
        blank: id.
        clamp: largest size of an entry of the gradient of a sequence's loss, None for no limit.
        kernel: "torch" or "triton".
        differentiable: whether a backward pass can follow.
    """

    targets: Tensor
    frames: list[int]
    labels: list[int]
    blank: int
    clamp: float | None
    kernel: str
    differentiable: bool


def wide(dtype: torch.dtype) -> torch.dtype:
    """Gives the type to compute in: float32, or float64."""
    return torch.promote_types(dtype, torch.float32)


def score(task: Task, read: Callable[[Cells], Tensor], cells: int) -> tuple[Tensor, ...]:
    """Computes losses `[B]` and, for a backward pass, the probabilities of blanks and labels, `[B, T, U + 1]` each.

    Args:
        task: the batch.
        read: gives the logits `[t, u, V]` of a piece.
        cells: most nodes in a piece.
    """
    lattice = Lattice(task.frames, task.labels, task.targets.device)
    dtype = torch.float32
    for piece in slices(task.frames, task.labels, cells):
        dtype = _enter(lattice, task, piece, read(piece))
    total, ways = lattice.log_likelihood(task.kernel)
    losses = -total.to(dtype)
    return (losses, *lattice.occupancies(task.kernel, total, ways, dtype)) if task.differentiable else (losses,)


def _enter(lattice: Lattice, task: Task, piece: Cells, logits: Tensor) -> torch.dtype:
    """Puts log probabilities of a piece into the lattice; returns their type."""
    row, t, u = piece
    log_p = torch.log_softmax(logits, -1, dtype=wide(logits.dtype))
    lattice.blank[piece] = log_p[..., task.blank]
    known = slice(u.start, min(u.stop, task.labels[row]))
    ids = task.targets[row, known].expand(len(log_p), -1).unsqueeze(-1)
    lattice.label[row, t, known] = log_p[:, : ids.shape[1]].gather(-1, ids).squeeze(-1)
    return log_p.dtype


class Slope:
    """Gradient with respect to the logits, a piece at a time.

    Args:
        task: the batch.
        weights: gradients of the losses `[B]`. A sequence of weight 0 counts for nothing, even if its loss is infinite.
        blank: second result of `score`.
        label: third result.
    """

    def __init__(self, task: Task, weights: Tensor, blank: Tensor, label: Tensor) -> None:
        self.task = task
        scale = weights[:, None, None]
        self.blank, self.label = (torch.where(scale == 0, 0, part * scale) for part in (blank, label))
        self.limits = None if task.clamp is None else task.clamp * weights.abs()

    def of(self, piece: Cells, logits: Tensor) -> Tensor:
        """Computes the gradient `[t, u, V]` with respect to the logits of a piece, in float32 or float64."""
        row, _, u = piece
        blank, label = self.blank[piece], self.label[piece]
        slope = torch.softmax(logits, -1, dtype=blank.dtype)
        slope *= (blank + label).unsqueeze(-1)
        slope[..., self.task.blank] -= blank
        ids = self.task.targets[row, u].expand(len(slope), -1).unsqueeze(-1)
        slope.scatter_add_(-1, ids, -label.unsqueeze(-1))
        return slope if self.limits is None else slope.clamp_(-self.limits[row], self.limits[row])


def refuse_second_derivatives() -> None:
    """Raises RuntimeError in a backward pass that builds a graph, where the gradients would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the transducer loss can be differentiated once; take its gradients without create_graph=True, separately "
            "from gradients that are differentiated again."
        )


class FromLogits(torch.autograd.Function):
    """Losses `[B]` from `task` and logits `[B, T, U + 1, V]`; keeps the logits by reference."""

    @staticmethod
    def forward(ctx: Any, task: Task, logits: Tensor) -> Tensor:
        """Computes the losses."""
        ctx.task, ctx.cells = task, max(1, PIECE.get(logits.device.type, LARGE_PIECE) // logits.shape[-1])
        losses, *occupancies = score(task, logits.__getitem__, ctx.cells)
        ctx.save_for_backward(logits, *occupancies)
        return losses

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Any, ...]:
        """Computes the gradient with respect to the logits."""
        refuse_second_derivatives()
        logits, *occupancies = ctx.saved_tensors
        task, slope = ctx.task, Slope(ctx.task, weights, *occupancies)
        gradient = torch.empty_like(logits)
        for row, (stop, last) in enumerate(zip(task.frames, task.labels, strict=True)):
            gradient[row, stop:] = 0
            gradient[row, :stop, last + 1 :] = 0
        for piece in slices(task.frames, task.labels, ctx.cells):
            gradient[piece] = slope.of(piece, logits[piece])
        return None, gradient


class Surroundings:
    """Autocast and random numbers that a joint network depends on besides its inputs, to call it again equally."""

    def __init__(self, example: Tensor) -> None:
        self.kind = example.device.type
        self.enabled, self.dtype = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(example)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the earlier autocast and random numbers; afterwards random numbers go on undisturbed."""
        kind = "cuda" if self.kind == "cpu" else self.kind
        autocast = torch.autocast(self.kind, self.dtype, self.enabled)
        with torch.random.fork_rng(self.devices, device_type=kind), autocast:
            torch.set_rng_state(self.random)
            set_device_states(self.devices, self.states, device_type=kind)
            yield


def join(joint: Joint, hidden: Tensor, prediction: Tensor) -> Tensor:
    """Computes logits `[t, u, V]` of frames `[t, H]` and predictions `[u, P]`.

    Raises:
        ValueError: if the joint network returns another shape.
    """
    logits = joint(hidden[:, None], prediction[None])
    expected = (len(hidden), len(prediction))
    if logits.ndim != 3 or tuple(logits.shape[:2]) != expected or not logits.is_floating_point():
        raise ValueError(
            f"joint must turn {[*hidden[:, None].shape]} and {[*prediction[None].shape]} into floating-point logits "
            f"[{expected[0]}, {expected[1]}, V], leading dimensions broadcast; got {logits.dtype} {[*logits.shape]}."
        )
    return logits


def probe(joint: Joint, hidden: Tensor, prediction: Tensor) -> tuple[int, list[Tensor]]:
    """Finds the size of the vocabulary, and the parameters that the joint network uses, in the graph of one node."""
    with Surroundings(hidden).again():
        logits = join(joint, hidden[0, :1].detach(), prediction[0, :1].detach())
    found: list[Tensor] = []
    seen, waiting = set(), [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return logits.shape[-1], found


@dataclass(frozen=True)
class Network:
    """A joint network, how many nodes of the lattice it may be given at a time, and the parameters it uses."""

    joint: Joint
    max_cells: int
    parameters: list[Tensor]


@contextmanager
def hooks_aside(parameters: list[Tensor]) -> Iterator[None]:
    """Keeps hooks of parameters (`Tensor.register_hook`) from seeing gradients of pieces; they see the sum, later."""
    hooks = [parameter._backward_hooks for parameter in parameters]
    try:
        for parameter in parameters:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, own in zip(parameters, hooks, strict=True):
            parameter._backward_hooks = own


class FromNetworks(torch.autograd.Function):
    """Losses `[B]` from `task`, `network`, hidden `[B, T, H]`, prediction `[B, U + 1, P]` and the joint's parameters.

    Parameters are inputs, so that their gradients reach them by the graph, where hooks (of DDP, say) see them once.
    """

    @staticmethod
    def forward(
        ctx: Any, task: Task, network: Network, hidden: Tensor, prediction: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Computes the losses."""
        ctx.task, ctx.network, ctx.surroundings = task, network, Surroundings(hidden)

        def read(piece: Cells) -> Tensor:
            row, t, u = piece
            return join(network.joint, hidden[row, t], prediction[row, u])

        losses, *occupancies = score(task, read, network.max_cells)
        ctx.save_for_backward(*occupancies, hidden, prediction, *parameters)
        return losses

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Any, ...]:
        """Computes gradients with respect to all tensors, summed over pieces."""
        refuse_second_derivatives()
        blank, label, *tensors = ctx.saved_tensors
        task, network, needed = ctx.task, ctx.network, ctx.needs_input_grad[2:]
        slope = Slope(task, weights, blank, label)
        totals = [torch.zeros_like(x, dtype=wide(x.dtype)) if n else None for x, n in zip(tensors, needed, strict=True)]
        with ctx.surroundings.again(), hooks_aside(network.parameters):
            for piece in slices(task.frames, task.labels, network.max_cells):
                places = [(piece[0], part) for part in piece[1:]]
                inputs = [
                    x[place].detach().requires_grad_(n) for x, place, n in zip(tensors, places, needed, strict=False)
                ]
                sums = [x if x is None else x[place] for x, place in zip(totals, places, strict=False)] + totals[2:]
                _pull(network, inputs, sums, partial(slope.of, piece))
        return None, None, *(x if x is None else x.to(y.dtype) for x, y in zip(totals, tensors, strict=True))


def _pull(network: Network, inputs: list[Tensor], sums: list[Tensor | None], slope: Callable[[Tensor], Tensor]) -> None:
    """Adds the gradients of one piece with respect to `inputs` and the parameters to `sums`, where not None."""
    with torch.enable_grad():
        logits = join(network.joint, *inputs)
    pairs = [(x, total) for x, total in zip([*inputs, *network.parameters], sums, strict=True) if total is not None]
    found = torch.autograd.grad(
        logits, [x for x, _ in pairs], slope(logits.detach()).to(logits.dtype), allow_unused=True
    )
    for (_, total), gradient in zip(pairs, found, strict=True):
        if gradient is not None:
            total += gradient
