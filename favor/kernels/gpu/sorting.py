"""The order in which rows of a head are alike, in four launches: see `favor.landmark.sorting`, which defines it.

One program per head compares the centres and halves them at medians. Then every row finds its nearest centre, and rows
are sorted by the ranks of their centres: counted in tiles, the counts added up, and the rows put in their places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import ceil_divide, interpreted, load_rows, padded_width, strides

_SAMPLED, _CENTRES = 64, 256  # those of favor.landmark.sorting
_BINS = 512  # a power of two with room for the ranks of all centres and for padding
_LEVELS = 8


@triton.jit
def count_of(lengths, batch, length):
    """Gives how many rows of a sequence count: all if there are no `lengths`."""
    if lengths is None:
        return tl.cast(length, tl.int64) + batch * 0
    else:
        return tl.load(lengths + batch)


@triton.jit
def _halve(
    points, values, order, level: tl.constexpr, SAMPLED: tl.constexpr, CENTRES: tl.constexpr, PART: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Sorts the points of each cell of one level by the coordinate that varies most: reads one order, writes another.

    Equal values stay in the order in which they were.
    """
    size: tl.constexpr = CENTRES >> level
    place = tl.arange(0, CENTRES)
    point = tl.load(order + level % 2 * CENTRES + place)
    largest, axis = tl.full([CENTRES // size], -1.0, tl.float32), tl.zeros([CENTRES // size], tl.int32)
    for first in tl.static_range(0, SAMPLED, PART):
        column = first + tl.arange(0, PART)
        cells = tl.load(points + point[:, None] * SAMPLED + column[None, :])
        cells = tl.reshape(cells, [CENTRES // size, size, PART])
        mean = tl.sum(cells, 1) / size
        variance = tl.sum(cells * cells, 1) / size - mean * mean
        most = tl.max(variance, 1)
        axis = tl.where(most > largest, first + tl.argmax(variance, 1), axis)
        largest = tl.maximum(largest, most)
    axis = tl.reshape(tl.broadcast_to(axis[:, None], [CENTRES // size, size]), [CENTRES])
    own = tl.load(points + point * SAMPLED + axis)
    tl.store(values + place, own)
    tl.debug_barrier()
    rank = place // size * size
    for begin in range(0, CENTRES, STEP):
        other = begin + tl.arange(0, STEP)
        value = tl.load(values + other)
        before = (value[None, :] < own[:, None]) | (
            (value[None, :] == own[:, None]) & (other[None, :] < place[:, None])
        )
        same = (other // size)[None, :] == (place // size)[:, None]
        rank += tl.sum((before & same).to(tl.int32), 1)
    tl.store(order + (level + 1) % 2 * CENTRES + rank, point)
    tl.debug_barrier()


@triton.jit
def _columns(rows, first, width: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads some columns of rows at addresses `[R]`, float32; zeros past `width`."""
    column = first + tl.arange(0, COLUMNS)
    return tl.load(rows[:, None] + column[None, :], mask=(column < width)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "other_length"])
def _centres(
    rows, others, lengths, other_lengths, points, moved, half, rank, values, order,
    heads, shared, groups, length, other_length,
    rows_batch, rows_head, rows_row, others_batch, others_head, others_row,
    width: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SAMPLED: tl.constexpr, CENTRES: tl.constexpr,
    LEVELS: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compares the centres of one head with samples of the other side, and ranks them.

    A head compares with `groups` heads of the other side in turn, or `shared` heads compare with one.
    """
    program = tl.program_id(0).to(tl.int64)
    head, batch = program % heads, program // heads
    sample = tl.arange(0, SAMPLED).to(tl.int64)
    last = tl.maximum(count_of(other_lengths, batch, other_length), 1) - 1
    from_head = head // shared * groups + sample % groups
    asked = others + batch * others_batch + from_head * others_head + sample * last // (SAMPLED - 1) * others_row
    last = tl.maximum(count_of(lengths, batch, length), 1) - 1
    rows += batch * rows_batch + head * rows_head
    points += program * CENTRES * SAMPLED
    moved += program * CENTRES * width
    half, rank, values = half + program * CENTRES, rank + program * CENTRES, values + program * CENTRES
    order += program * 2 * CENTRES
    for begin in range(0, CENTRES, STEP):
        index = begin + tl.arange(0, STEP)
        centre = rows + index.to(tl.int64) * last // (CENTRES - 1) * rows_row
        p = tl.zeros([STEP, SAMPLED], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            c, q = _columns(centre, first, width, COLUMNS), _columns(asked, first, width, COLUMNS)
            p = tl.dot(c, tl.trans(q), acc=p, input_precision="tf32x3")
        p = tl.where(tl.abs(p) < float("inf"), p, 0.0)  # not NaN: places stay different
        tl.store(points + index[:, None] * SAMPLED + tl.arange(0, SAMPLED)[None, :], p)
        tl.store(half + index, tl.sum(p * p, 1) / 2)
        for first in range(0, WIDTH, COLUMNS):
            m = tl.dot(p, _columns(asked, first, width, COLUMNS), input_precision="tf32x3")
            column = first + tl.arange(0, COLUMNS)
            tl.store(moved + index[:, None] * width + column[None, :], m, mask=(column < width)[None, :])
        tl.store(order + index, index)
    tl.debug_barrier()
    for level in tl.static_range(LEVELS):
        _halve(points, values, order, level, SAMPLED, CENTRES, PART, STEP)
    place = tl.arange(0, CENTRES)
    point = tl.load(order + LEVELS % 2 * CENTRES + place)
    tl.store(values.to(tl.pointer_type(tl.int32)) + point, place)
    tl.debug_barrier()
    # A row that is there twice counts once.
    index = place.to(tl.int64)
    first = tl.cdiv(index * last // (CENTRES - 1) * (CENTRES - 1), tl.maximum(last, 1))
    tl.store(rank + place, tl.load(values.to(tl.pointer_type(tl.int32)) + first))


@triton.jit(do_not_specialize=["length", "tiles"])
def _nearest(
    rows, lengths, moved, half, rank, codes, counts,
    heads, length, tiles, rows_batch, rows_head, rows_row,
    width: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CENTRES: tl.constexpr, BINS: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Finds the rank of the nearest centre of each row of a tile, that of padding is last, and counts the ranks."""
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles
    batch, first = head // heads, tile * TOKENS
    row = first + tl.arange(0, TOKENS)
    rows += batch * rows_batch + head % heads * rows_head + first * rows_row
    count = count_of(lengths, batch, length)
    # Padding, which may hold anything, counts as the last row before it.
    own = rows + tl.minimum(tl.arange(0, TOKENS), tl.maximum(count, 1) - 1 - first) * rows_row
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    found = tl.zeros([TOKENS], tl.int32)
    for begin in range(0, CENTRES, STEP):
        index = begin + tl.arange(0, STEP)
        scores = tl.zeros([TOKENS, STEP], tl.float32)
        for column in tl.static_range(0, WIDTH, COLUMNS):
            m = _columns(moved + (head * CENTRES + index) * width, column, width, COLUMNS)
            r = _columns(own, column, width, COLUMNS)
            scores = tl.dot(r, tl.trans(m), acc=scores, input_precision="tf32x3")
        scores -= tl.load(half + head * CENTRES + index)[None, :]
        top = tl.max(scores, 1)
        found = tl.where(top > best, begin + tl.argmax(scores, 1), found)
        best = tl.maximum(best, top)
    code = tl.load(rank + head * CENTRES + found)
    code = tl.where(row < count, code, CENTRES)
    tl.store(codes + head * length + row, code, mask=row < length)
    for begin in range(0, BINS, STEP):
        bins = begin + tl.arange(0, STEP)
        here = (code[:, None] == bins[None, :]) & (row < length)[:, None]
        tl.store(counts + program * BINS + bins, tl.sum(here.to(tl.int32), 0))


@triton.jit(do_not_specialize=["tiles"])
def _starts(counts, tiles, BINS: tl.constexpr, TILES: tl.constexpr):
    """Replaces the counts of each tile and rank by the place of its first row, for one head."""
    counts += tl.program_id(0).to(tl.int64) * tiles * BINS
    step, bins = tl.arange(0, TILES), tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for begin in range(0, tiles, TILES):
        at = counts + (begin + step)[:, None] * BINS + bins[None, :]
        total += tl.sum(tl.load(at, mask=(begin + step < tiles)[:, None], other=0), 0)
    before = tl.cumsum(total, 0) - total
    for begin in range(0, tiles, TILES):
        at, there = counts + (begin + step)[:, None] * BINS + bins[None, :], (begin + step < tiles)[:, None]
        own = tl.load(at, mask=there, other=0)
        tl.store(at, before[None, :] + tl.cumsum(own, 0) - own, mask=there)
        before += tl.sum(own, 0)


@triton.jit(do_not_specialize=["length", "tiles"])
def _place(
    codes, starts, order, key, value, sorted_key, sorted_value,
    heads, length, tiles, key_batch, key_head, key_row, value_batch, value_head, value_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BINS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes which row comes in each place, for the rows of a tile, and moves keys and values if they are given."""
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles
    batch, own = head // heads, head % heads
    first = tile * TOKENS
    row = first + tl.arange(0, TOKENS)
    inside = row < length
    code = tl.load(codes + head * length + row, mask=inside, other=BINS - 1)
    before = (code[:, None] == code[None, :]) & (row[None, :] < row[:, None])
    place = tl.load(starts + program * BINS + code) + tl.sum(before.to(tl.int32), 1)
    place = head * length + place
    tl.store(order + place, row.to(tl.int32), mask=inside)
    if key is not None:
        column, there = tl.arange(0, WIDTH), inside[:, None]
        key += batch * key_batch + own * key_head + first * key_row
        k = load_rows(key, key_row, inside, width, TOKENS, WIDTH)
        tl.store(sorted_key + place[:, None] * width + column[None, :], k, mask=there & (column < width)[None, :])
        column = tl.arange(0, VALUE_WIDTH)
        value += batch * value_batch + own * value_head + first * value_row
        v = load_rows(value, value_row, inside, value_width, TOKENS, VALUE_WIDTH)
        there = there & (column < value_width)[None, :]
        tl.store(sorted_value + place[:, None] * value_width + column[None, :], v, mask=there)


class Sorted(NamedTuple):
    """Sorted rows.

    Attributes:
        order: which row comes in each place, int32 `[B, H, L]`.
        key, value: keys and values in that order, `[B, H, L, d]` and `[B, H, L, dv]`; None if only the order was asked.
    """

    order: Tensor
    key: Tensor | None = None
    value: Tensor | None = None


def sort(
    rows: Tensor, others: Tensor, lengths: Tensor | None, other_lengths: Tensor | None, value: Tensor | None = None
) -> Sorted:
    """Sorts the rows of each head so that neighbours are alike; padding comes last.

    Args:
        rows: `[B, H, L, d]`.
        others: `[B, Ho, S, d]`, the other side; one of the numbers of heads is a multiple of the other one.
        lengths, other_lengths: how many first rows count, int64 `[B]`; None if all do.
        value: `[B, H, L, dv]`, with which rows are keys, to be moved with their values; None for the order alone.
    """
    (batch, heads, length, width), other_heads = rows.shape, others.shape[1]
    count, wide = batch * heads, padded_width(width)
    tokens, step = (16, 64) if interpreted() else (64, 32)
    tiles = ceil_divide(length, tokens)

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return rows.new_empty(count, *shape, dtype=dtype)

    points, moved, half = (made(_CENTRES, size, dtype=torch.float32) for size in (_SAMPLED, width, 1))
    rank, values, order, codes, counts = (
        made(size) for size in (_CENTRES, _CENTRES, 2 * _CENTRES, length, tiles * _BINS)
    )
    constants = {"width": width, "WIDTH": wide, "COLUMNS": min(wide, 64), "CENTRES": _CENTRES}
    _centres[(count,)](
        *(rows, others, lengths, other_lengths, points, moved, half, rank, values.view(torch.float32), order),
        *(heads, max(heads // other_heads, 1), max(other_heads // heads, 1), length, others.shape[2]),
        *strides(rows, others),
        **constants,
        SAMPLED=_SAMPLED,
        LEVELS=_LEVELS,
        PART=64 if interpreted() else 32,
        STEP=64 if interpreted() else 16,
        num_warps=8,
        num_stages=1,
    )
    _nearest[(count * tiles,)](
        *(rows, lengths, moved, half, rank, codes, counts, heads, length, tiles, *strides(rows)),
        **constants,
        BINS=_BINS,
        TOKENS=tokens,
        STEP=step,
        num_stages=2 if wide <= 128 else 1,
    )
    _starts[(count,)](counts, tiles, BINS=_BINS, TILES=16)
    found = Sorted(rows.new_empty(batch, heads, length, dtype=torch.int32))
    if value is not None:
        found = found._replace(key=rows.new_empty(rows.shape), value=value.new_empty(value.shape))
    _place[(count * tiles,)](
        *(codes, counts, found.order, None if value is None else rows, value, found.key, found.value),
        *(heads, length, tiles, *(strides(rows, value) if value is not None else (0,) * 6)),
        width=width,
        value_width=width if value is None else value.shape[3],
        WIDTH=wide,
        VALUE_WIDTH=wide if value is None else padded_width(value.shape[3]),
        BINS=_BINS,
        TOKENS=tokens,
    )
    return found
