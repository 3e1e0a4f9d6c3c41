"""Which keys are equal: without positions, the keys of a token that occurs often are equal up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.dispatch import on_cpu

_LINES = 8


def first_equal(key: Tensor, mask: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    """Gives the place of the first key equal to each, `[..., S]`; its own for a key that equals no earlier one.

    Equal keys lie side by side once all keys are sorted along a line, and only they agree along seven more. They may
    differ by rounding, and means of n equal keys by n times as much: processors round in different ways.

    Args:
        key: `[..., S, d]`.
        mask: boolean `[..., S]`, True for the keys that count; others equal no key.
        counts: how many keys each is the mean of, `[..., S]`; None means one.
    """
    rows = key.to(torch.promote_types(key.dtype, torch.float32))
    along = rows @ lines(key.shape[-1], rows)
    reach = torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(along, dim=-1)
    reach = 16 * reach if counts is None else (16 + counts) * reach
    line = along[..., 0] if mask is None else along[..., 0].masked_fill(~mask, torch.inf)  # others come last
    is_numpy = on_cpu(key)  # numpy sorts several times as fast
    order = torch.from_numpy(line.numpy().argsort(-1)) if is_numpy else line.sort(-1).indices
    reach = reach.gather(-1, order)
    place = torch.arange(key.shape[-2], device=key.device)
    sorted_along = along.gather(-2, order.unsqueeze(-1).expand_as(along))
    before = (place - 1).clamp(min=0)  # no slices, which would bind an exported program to some lengths
    distance = torch.linalg.vector_norm(sorted_along - sorted_along.index_select(-2, before), dim=-1)
    is_equal = (distance <= torch.maximum(reach, reach.index_select(-1, before))) & (place > 0)
    if mask is not None:
        is_equal = is_equal & mask.gather(-1, order)
    if is_numpy and not bool(is_equal.any()):  # the usual case; on a GPU this test would take longer
        return place.expand(key.shape[:-1])
    run = (~is_equal).cumsum(-1) - 1
    first = torch.full_like(order, key.shape[-2]).scatter_reduce(-1, run, order, "amin")
    return torch.zeros_like(order).scatter(-1, order, first.gather(-1, run))


def lines(width: int, like: Tensor) -> Tensor:
    """Gives eight directions without a pattern, `[d, 8]`: cubes modulo a prime, the same on every device."""
    number = torch.arange(1, width * _LINES + 1, device=like.device)
    return (number**3 * 7919 % 65521).view(width, _LINES).to(like.dtype) / 65521 - 0.5
