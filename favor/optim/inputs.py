"""How an optimizer gets the inputs of a linear layer, and learns on which of them the loss depends."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """All inputs of a step that the loss depends on, in float32 or float64.

    Attributes:
        x: `[N, d]`, with a column of ones if the layer has a bias to train.
        weights: `[N]`, positive, sum 1 for a loss that is a mean; N may be 0.
    """

    x: Tensor
    weights: Tensor


class RowStore(list[tuple[Tensor, Tensor]]):
    """Pairs of inputs `[N, d]` and, for each of them, a weight or whether the loss depends on it, `[N]`."""

    __slots__ = ("__weakref__",)


class Capture:
    """Forward hook that keeps inputs once a gradient has come back for them.

    It waits for the gradient of the output and not for the forward pass: an output that is never differentiated leaves
    nothing behind, a pass that checkpointing repeats counts once, and a row of zeros tells that the loss leaves this
    input out.

    The store belongs to the optimizer. Without it, in a copy of the module or when the optimizer is gone, the hook does
    nothing.

    Args:
        store: where to keep them. Default: none.
    """

    def __init__(self, store: RowStore | None = None) -> None:
        self._store = None if store is None else weakref.ref(store)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Keeps the inputs; the module calls this after its forward pass."""
        store = None if self._store is None else self._store()
        if store is None or not output.requires_grad:
            return
        x = (args[0] if args else kwargs["input"]).detach()

        def keep(gradient: Tensor) -> None:
            counted = gradient.detach().reshape(-1, gradient.shape[-1]).any(-1)
            store.append((x.reshape(-1, x.shape[-1]), counted))

        output.register_hook(keep)

    def __deepcopy__(self, memo: Any) -> Capture:
        return Capture()

    def __reduce__(self) -> tuple[type[Capture], tuple[()]]:
        return Capture, ()


def collect(store: RowStore, width: int, with_ones: bool, like: Tensor) -> Batch:
    """Empties the store into one batch.

    Float weights are not changed; if rows only count or do not count, those that count share a total of 1.

    Args:
        store: what was kept.
        width: inputs of the layer.
        with_ones: append a column of ones.
        like: tensor that gives dtype and device.
    """
    parts = [(x[part != 0], part[part != 0]) for x, part in store]
    store.clear()
    x = torch.cat([like.new_zeros(0, width), *(rows.to(like) for rows, _ in parts)])
    weights = torch.cat([like.new_zeros(0), *(part.to(like) for _, part in parts)])
    if parts and not parts[0][1].is_floating_point():
        weights = weights / max(1, len(weights))
    if with_ones:
        x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
    return Batch(x, weights)


def checked_rows(x: Tensor, weight: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Checks what `set_batch` was given: rows `[N, d]` and float weights `[N]`; ValueError if it does not fit."""
    if x.ndim == 0 or x.shape[-1] != width or (weight is not None and weight.shape != x.shape[:-1]):
        got = f"{tuple(x.shape)} and {None if weight is None else tuple(weight.shape)}"
        raise ValueError(f"x must be [..., {width}] and weight [...], got {got}.")
    rows = x.detach().reshape(-1, width)
    if weight is None:
        return rows, rows.new_full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float32)
    flat = weight.detach().reshape(-1)
    flat = flat if flat.is_floating_point() else flat.float() / flat.count_nonzero().clamp_min(1)
    if not bool((flat >= 0).all()):
        raise ValueError("weight must not be negative or NaN.")
    return rows, flat
