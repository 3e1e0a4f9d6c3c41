"""The order in which keys and queries of an encoder are alike: neighbours have alike logits.

Two keys are alike if a few sampled queries give them alike logits, and two queries if sampled keys do. Rows are sorted
by the nearest of 256 sampled rows, and these by splits at medians. Nothing is random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.dispatch import is_exporting, operator

SAMPLED = 64  # rows of the other side whose logits say what is alike
CENTRES = 256
_ROWS = 2**10  # compared with the centres at a time


@torch.no_grad()
def order_of(rows: Tensor, others: Tensor, lengths: Tensor, other_lengths: Tensor) -> Tensor:
    """Sorts the rows of each head, so that neighbours are alike.

    Args:
        rows: `[N, L, d]`.
        others: `[N', G, S, d]`, the other side; of G heads in turn. N is a multiple of N', and N/N' heads share them.
        lengths: how many first rows count, `[N]`; the others come last.
        other_lengths: of `others`, `[N']`.

    Returns:
        Places of rows among those of all heads, int64 `[N L]`: row r of head n is at n L + r.
    """
    return (_sort if is_exporting() else _order)(rows, others, lengths, other_lengths)


def _spaced(lengths: Tensor, number: int) -> Tensor:
    """Gives evenly spaced places, with the first and the last that count, `[N, number]`."""
    return torch.arange(number, device=lengths.device) * (lengths.clamp(min=1).unsqueeze(-1) - 1) // (number - 1)


def sampled(rows: Tensor, lengths: Tensor, number: int) -> Tensor:
    """Takes evenly spaced rows, with the first and the last that count, from heads in turn: `[N, number, d]`."""
    place = _spaced(lengths, number)
    place = place + torch.arange(number, device=rows.device) % rows.shape[1] * rows.shape[2]
    return rows.flatten(1, 2).gather(1, place.unsqueeze(-1).expand(-1, -1, rows.shape[3]))


def _sort(rows: Tensor, others: Tensor, lengths: Tensor, other_lengths: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    queries = sampled(others, other_lengths, SAMPLED).to(dtype).repeat_interleave(rows.shape[0] // others.shape[0], 0)
    centres = sampled(rows.unsqueeze(1), lengths, CENTRES).to(dtype)
    rank = _splits(centres @ queries.mT).argsort(-1)
    place = _spaced(lengths, CENTRES)
    rank = rank.gather(1, (place.unsqueeze(2) > place.unsqueeze(1)).sum(2))  # a row that is there twice counts once
    moved = centres @ (queries.mT @ queries)
    half = (moved * centres).sum(-1) / 2
    if is_exporting():  # one graph for every length has no loop
        nearest = (rows.to(dtype) @ moved.mT - half.unsqueeze(1)).argmax(-1)
    else:
        every = zip(rows, moved, half, strict=True)
        nearest = torch.stack([torch.cat([_nearest(part, *own) for part in head.split(_ROWS)]) for head, *own in every])
    code = rank.gather(1, nearest)
    behind = torch.arange(rows.shape[1], device=rows.device) >= lengths.unsqueeze(-1)
    order = _sorted(code.masked_fill(behind, CENTRES))
    return (order + torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1) * rows.shape[1]).flatten()


def _sorted(numbers: Tensor) -> Tensor:
    """Gives the places of numbers `[..., n]` in order, of equal ones the first first."""
    if not is_exporting():
        numbers = numbers if numbers.is_floating_point() else numbers.to(torch.int16)  # sorted faster
        return numbers.argsort(dim=-1, stable=True)
    # ONNX has no stable sort, so no two numbers may be equal.
    if numbers.is_floating_point():
        numbers = (numbers.unsqueeze(-1) > numbers.unsqueeze(-2)).sum(-1)
    place = torch.arange(numbers.shape[-1], device=numbers.device)
    return (numbers.to(torch.int64) * numbers.shape[-1] + place).argsort(-1)


def _nearest(rows: Tensor, moved: Tensor, half: Tensor) -> Tensor:
    """Finds the nearest centre of each row `[n, d]`, whose centres times the metric are `moved`, `[n]`.

    In float32 the column is put in the last digits of the score: the largest with its place is slow to find on a CPU.
    """
    scores = torch.addmm(half, rows.to(moved.dtype), moved.T, beta=-1.0)
    if scores.dtype != torch.float32:
        return scores.argmax(-1)
    column = torch.arange(CENTRES, device=scores.device, dtype=torch.int32)
    scores.view(torch.int32).bitwise_and_(-CENTRES).bitwise_or_(column)
    return scores.amax(-1).view(torch.int32) & (CENTRES - 1)


def _splits(points: Tensor) -> Tensor:
    """Orders points `[N, n, r]`, n a power of two: halves at the median of the coordinate with the largest variance."""
    order = torch.arange(points.shape[1], device=points.device).expand(points.shape[:2])
    size = points.shape[1]
    while size > 1:
        cells = points.unflatten(1, (-1, size))
        axis = (cells.square().mean(2) - cells.mean(2).square()).argmax(-1)[:, :, None, None].expand(-1, -1, size, 1)
        inner = _sorted(cells.gather(3, axis).squeeze(3))
        order = order.unflatten(1, (-1, size)).gather(2, inner).flatten(1)
        points = cells.gather(2, inner[..., None].expand_as(cells)).flatten(1, 2)
        size //= 2
    return order


_order = operator(
    "order_by_logits",
    "(Tensor rows, Tensor others, Tensor lengths, Tensor other_lengths) -> Tensor",
    _sort,
    lambda rows, *others: rows.new_empty(rows.shape[0] * rows.shape[1], dtype=torch.int64),
)
