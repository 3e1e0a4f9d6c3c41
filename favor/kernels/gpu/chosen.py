"""The operators of `favor.kernels.chosen` in Triton.

To choose, a program goes through the keys of some bins, one of each bin at a time, and keeps the best of each.
`favor.kernels.gpu.reading` attends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    ceil_divide,
    contract,
    interpreted,
    padded_width,
    strides,
)
from favor.kernels.gpu.reading import Reading, gather, pull_back, read
from favor.kernels.operands import ChosenOperands, SectionOptions


def _reading(given: ChosenOperands) -> Reading:
    """Puts all heads of the operands into one sequence."""
    query, key, value, shared, own, seen, far_key, far_value, far_log, first, run, *options = given
    tokens = [tensor.contiguous().unsqueeze(0) for tensor in (query.flatten(1, 2), key, value, far_key, far_value)]
    others = [tensor.contiguous() for tensor in (far_log, shared, own, seen, first, run)]
    return Reading._make((*tokens, *others, None, query.shape[2], *options, 1.0))


def forward(given: ChosenOperands) -> tuple[Tensor, Tensor]:
    """Computes output `[N, Z, B, dv]` and log normalisers `[N, Z, B]`, float32, -inf for rows that see nothing."""
    out, lse = read(_reading(given))
    return out[0].contiguous().view(*given.query.shape[:3], -1), lse.view(given.query.shape[:3])


def backward(grad: Tensor, given: ChosenOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of queries, keys, values, and mean keys and values; weights are computed again."""
    grad, out = (tensor.contiguous().flatten(1, 2).unsqueeze(0) for tensor in (grad, out))
    of_query, *sums = pull_back(grad, _reading(given), out, lse.flatten(1).unsqueeze(0))
    return (of_query.view(given.query.shape), *(total[0].to(given.query.dtype, copy=True) for total in sums))


@triton.jit(do_not_specialize=["blocks", "rows", "size", "length", "total", "keys", "number", "others"])
def _search(
    query, key, seen, taken, columns, starts, found,
    blocks, rows, size, heads, groups, length, total, keys, number, others,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    section: tl.constexpr, step: tl.constexpr, sink: tl.constexpr,
    width: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Finds the best keys of some bins for some queries.

    Of `rows` queries together, `size` see equally many keys; with sections, those before the section of a query, and
    queries are `step` tokens apart. Blocks have taken keys of `others` bins. Of queries, the `columns` of their head
    are compared. The first bins hold the first `sink` keys. A head has `length` queries, the first of them the token
    at `starts` of its sequence, and room for `total`.
    """
    chunks, tiles = tl.cdiv(number, BINS), tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = (program % chunks).to(tl.int32) * BINS, (program // chunks % tiles).to(tl.int32) * ROWS
    block = program // chunks // tiles
    source = block // blocks
    batch, head = source // heads, source % heads
    row, own, column = tile + tl.arange(0, ROWS), chunk + tl.arange(0, BINS), tl.arange(0, WIDTH)
    place = block % blocks * rows + row
    inside = (row < rows) & (place < length)
    if columns is not None:
        column = tl.load(columns + source * width + column, mask=column < width, other=0)
    query += batch * query_batch + head * query_head
    real = inside[:, None] & (tl.arange(0, WIDTH) < width)[None, :]
    q = tl.load(query + place[:, None] * query_row + column[None, :], mask=real, other=0.0)
    if section > 0:
        token = place * step
        if starts is not None:
            token += tl.load(starts + batch)
        limit = tl.where(inside, token // section * section, 0).to(tl.int32)
    else:
        limit = tl.load(seen + (source * total + place) // size, mask=inside, other=0).to(tl.int32)
    most = tl.max(limit, 0)
    if (section > 0) & (taken is not None):
        most = tl.where(most > others, most, 0)  # else all are taken
    key += batch * key_batch + head // groups * key_head + chunk * key_row
    best = tl.full([ROWS, BINS], float("-inf"), tl.float32)
    found_place = tl.full([ROWS, BINS], -1, tl.int32)
    for member in range(0, tl.cdiv(most, number)):
        at = member * number + own
        there = (own < number) & (at < most)
        k = gather(key, (member * number + tl.arange(0, BINS)).to(tl.int64), key_row, there, width, WIDTH)
        if taken is not None:
            there = there & (tl.load(taken + block * others + at % others, mask=there, other=-1) != at)
        visible = there[None, :] & (at[None, :] < limit[:, None])
        score = tl.where(visible, contract(q, k), float("-inf"))
        found_place = tl.where(score > best, at[None, :], found_place)  # of equal keys the first
        best = tl.maximum(best, score)
    first = tl.where(limit[:, None] > own[None, :], own[None, :], -1)
    found_place = tl.where((own < sink)[None, :], first, found_place)
    mask = inside[:, None] & (own < number)[None, :]
    tl.store(found + (source * total + place)[:, None] * number + own[None, :], found_place, mask=mask)


def _tiles(query: Tensor) -> tuple[int, int]:
    """Gives how many rows and bins a program searches at most: so many that nothing is spilled."""
    if interpreted():
        return 16, 16
    if padded_width(query.shape[-1]) * query.element_size() <= 256:
        return 64, 64
    return (16, 32) if query.element_size() == 4 else (32, 32)


def _find(
    query: Tensor,
    key: Tensor,
    seen: Tensor | None,
    taken: Tensor | None,
    columns: Tensor | None,
    starts: Tensor | None,
    found: Tensor,
    sizes: tuple[int, int, int],
    **constants: int,
) -> None:
    """Launches the search for queries `[B, H, L, d]`, keys `[B, Hk, S, r]`; sizes: blocks, rows of one, and `size`."""
    (batch, heads, length), (key_heads, keys, width) = query.shape[:3], key.shape[1:]
    number, others = found.shape[-1], 1 if taken is None else taken.shape[-1]
    row_tile, bin_tile = (min(n, padded_width(m)) for n, m in zip(_tiles(key), (sizes[1], number), strict=True))
    programs = batch * heads * sizes[0] * ceil_divide(sizes[1], row_tile) * ceil_divide(number, bin_tile)
    if found.numel():
        _search[(programs,)](
            *(query, key, seen, taken, columns, starts, found, *sizes, heads, heads // key_heads, length),
            *(found.shape[2:-1].numel(), keys, number, others, *strides(query, key)),
            **constants,
            width=width,
            WIDTH=padded_width(width),
            ROWS=row_tile,
            BINS=bin_tile,
        )


def choose(query: Tensor, key: Tensor, seen: Tensor, taken: Tensor | None, number: int) -> Tensor:
    """Computes `favor.kernels.chosen.choose` for queries and keys in float32 or half precision."""
    heads, blocks, size, _ = query.shape
    found = torch.empty(1, heads, blocks, size, number, dtype=torch.int32, device=query.device)
    sizes, taken = (blocks, size, size), None if taken is None or not taken.shape[-1] else taken.contiguous()
    if taken is None:  # rows of several blocks are searched for together
        sizes = (1, blocks * size, size)
    tokens = query.contiguous().flatten(1, 2).unsqueeze(0), key.contiguous().unsqueeze(0)
    _find(*tokens, seen.contiguous(), taken, None, None, found, sizes, section=0, step=1, sink=0)
    return found[0]


def search(
    query: Tensor,
    key: Tensor,
    given: SectionOptions,
    *,
    number: int,
    sink: int = 0,
    taken: Tensor | None = None,
    columns: Tensor | None = None,
    starts: Tensor | None = None,
    found: Tensor | None = None,
) -> Tensor:
    """Chooses keys of the sections before its own for each query: `[B, H, Z]` blocks' sums of votes, or all queries.

    Args:
        query: `[B, H, Z, d]`; with `taken`, `[B, H, L, d]`, queries of blocks that took keys.
        key: `[B, Hk, S, r]`.
        given: the numbers of the call.
        number: of keys to choose, one of each bin.
        sink: keys that all get, the first ones.
        taken: what the blocks chose, int32 `[B, H, Z, K]`; None for the choice of blocks.
        columns: coordinates of queries that are compared with keys, int64 `[B, H, r]`; None for all.
        starts: token of the first query of each sequence, int64 `[B]`; None for the first one.
        found: where to write; None for new memory.

    Returns:
        int32 `[B, H, Z, number]` or `[B, H, Z, R, number]`; -1 for none.
    """
    batch, heads, length = query.shape[:3]
    sizes, step = (1, length, 1), given.block
    if taken is not None:
        sizes, step = (taken.shape[2], given.block, 1), 1
    shape = (length,) if taken is None else sizes[:2]
    found = query.new_empty(batch, heads, *shape, number, dtype=torch.int32) if found is None else found
    taken = taken if taken is not None and taken.shape[3] else None
    numbers = {"section": given.section, "step": step, "sink": min(sink, number)}
    _find(query, key, None, taken, columns, starts, found, sizes, **numbers)
    return found
