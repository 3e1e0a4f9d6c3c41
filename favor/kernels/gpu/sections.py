"""Landmarks of whole causal sequences: the steps of `favor.landmark.causal`, each in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.chosen import Reading, pull_back, read, search
from favor.kernels.gpu.common import (
    ceil_divide,
    load_rows,
    padded_width,
    power_of_two,
    strides,
    width_constants,
)
from favor.kernels.gpu.nodes import put_back
from favor.kernels.operands import SectionOptions


@triton.jit(do_not_specialize=["length", "keys"])
def _find_coordinates(
    query, key, coordinates,
    heads, groups, length, keys, rank,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    step: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Finds the coordinates that vary most in the logits of the first block of one query head, in their order."""
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    asked, there = row * step < tl.minimum(length, BLOCK), row < keys
    x = load_rows(query + batch * query_batch + head * query_head, query_row * step, asked, width, BLOCK, WIDTH)
    x = x.to(tl.float32)
    squares = tl.sum(x * x, 0) / tl.sum(asked.to(tl.float32), 0)
    k = load_rows(key + batch * key_batch + head // groups * key_head, key_row, there, width, BLOCK, WIDTH)
    k, number = k.to(tl.float32), tl.sum(there.to(tl.float32), 0)
    k = tl.where(there[:, None], k - (tl.sum(k, 0) / number)[None, :], 0.0)
    weight = squares * tl.sum(k * k, 0) / number
    weight = tl.where((column < width) & (weight == weight), weight, -1.0)  # not NaN: places stay different
    better = tl.zeros([WIDTH], tl.int32)
    for begin in tl.static_range(0, WIDTH, COLUMNS):
        other = begin + tl.arange(0, COLUMNS)
        own = tl.sum(tl.where(column[:, None] == other[None, :], weight[:, None], 0.0), 0)
        before = (own[None, :] > weight[:, None]) | (
            (own[None, :] == weight[:, None]) & (other[None, :] < column[:, None])
        )
        better += tl.sum(before.to(tl.int32), 1)
    kept = better < rank
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(coordinates + program * rank + place, column.to(tl.int64), mask=kept)


@triton.jit(do_not_specialize=["length"])
def _sum_up(
    key, value, coordinates, index, far_key, far_value, mean, mean_value,
    heads, groups, length, rank, sections,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    section: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sums up one section of one key head, and copies the coordinates in which its query heads search."""
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // sections // heads, program // sections % heads
    first = program % sections * section
    key += batch * key_batch + head * key_head + first * key_row
    value += batch * value_batch + head * value_head + first * value_row
    column, of_value = tl.arange(0, RANK), tl.zeros([VALUE_WIDTH], tl.float32)
    of_key = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, section, TOKENS):
        row = begin + tl.arange(0, TOKENS)
        there = (row < section) & (first + row < length)
        k = load_rows(key + begin * key_row, key_row, there, width, TOKENS, WIDTH)
        of_key += tl.sum(k.to(tl.float32), 0)
        v = load_rows(value + begin * value_row, value_row, there, value_width, TOKENS, VALUE_WIDTH)
        of_value += tl.sum(v.to(tl.float32), 0)
        for member in range(0, groups):
            own = (batch * heads + head) * groups + member
            at = tl.load(coordinates + own * rank + column, mask=column < rank, other=0)
            real = there[:, None] & (column < rank)[None, :]
            found = tl.load(key + row[:, None] * key_row + at[None, :], mask=real, other=0.0)
            tl.store(index + ((own * length + first + row) * rank)[:, None] + column[None, :], found, mask=real)
    column = tl.arange(0, WIDTH)
    tl.store(far_key + program * width + column, of_key, mask=column < width)
    of_key = (of_key / section).to(mean.dtype.element_ty)
    tl.store(mean + program * width + column, of_key, mask=column < width)
    column = tl.arange(0, VALUE_WIDTH)
    tl.store(far_value + program * value_width + column, of_value, mask=column < value_width)
    of_value = (of_value / section).to(mean_value.dtype.element_ty)
    tl.store(mean_value + program * value_width + column, of_value, mask=column < value_width)


@triton.jit
def _collect_votes(
    query, votes,
    heads, blocks, query_batch, query_head, query_row,
    block: tl.constexpr, step: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Adds up every so many queries until the first one of each block: so many as a block has."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(blocks, BLOCKS)
    head, own = program // tiles, program % tiles * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, WIDTH)
    query += head // heads * query_batch + head % heads * query_head
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    for back in range(0, block, step):
        place = own * block - back
        there = ((own < blocks) & (place >= 0))[:, None] & (column < width)[None, :]
        total += tl.load(query + place[:, None] * query_row + column[None, :], mask=there, other=0.0).to(tl.float32)
    to = votes + (head * blocks + own)[:, None] * width + column[None, :]
    tl.store(to, total.to(votes.dtype.element_ty), mask=(own < blocks)[:, None] & (column < width)[None, :])


@triton.jit
def count_left(
    shared, starts, far_log,
    blocks, chosen, sections, block: tl.constexpr, section: tl.constexpr, KEYS: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Takes the logarithm of how many keys of each closed section a block did not choose."""
    program = tl.program_id(0).to(tl.int64)
    start = program % blocks * block
    if starts is not None:
        start += tl.load(starts + program // blocks)
    place = tl.arange(0, SECTIONS)
    taken = tl.zeros([SECTIONS], tl.int32)
    for begin in range(0, chosen, KEYS):
        index = begin + tl.arange(0, KEYS)
        key = tl.load(shared + program * chosen + index, mask=index < chosen, other=-1)
        taken += tl.histogram(tl.where(key < 0, SECTIONS - 1, key // section), SECTIONS)
    left = tl.where(place < start // section, section - taken, 0)
    left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), float("-inf"))
    tl.store(far_log + program * sections + place, left, mask=place < sections)


def forward(query: Tensor, key: Tensor, value: Tensor, given: SectionOptions) -> tuple[Tensor, ...]:
    """Computes attention; the arguments are those of `favor.kernels.landmarks.section_attention`.

    Returns:
        output `[B, H, L, dv]`; the coordinates in which queries search, and these of all keys; sums of keys and values
        of each section; and for the backward pass log normalisers, means, and what blocks and queries chose.
    """
    (batch, heads, length, width), key_heads, value_width = query.shape, key.shape[1], value.shape[3]
    sections, blocks = ceil_divide(length, given.section), ceil_divide(length, given.block)
    rank, number = given.rank(width), min(given.selected, length)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(batch, *shape, dtype=dtype)

    coordinates, index = made(heads, rank, dtype=torch.int64), made(heads, length, rank, dtype=key.dtype)
    _find_coordinates[(batch * heads,)](
        *(query, key, coordinates, heads, heads // key_heads, length, length, rank, *strides(query, key)),
        step=given.step,
        width=width,
        WIDTH=padded_width(width),
        BLOCK=given.block,
        COLUMNS=16,
    )
    sums = [made(key_heads, sections, size) for size in (width, value_width)]
    means = [made(key_heads, sections, size, dtype=key.dtype) for size in (width, value_width)]
    _sum_up[(batch * key_heads * sections,)](
        *(key, value, coordinates, index, *sums, *means),
        *(key_heads, heads // key_heads, length, rank, sections, *strides(key, value)),
        section=given.section,
        **width_constants(width, value_width),
        RANK=padded_width(rank),
        TOKENS=min(power_of_two(given.section), 64),
    )
    votes = made(heads, blocks, width, dtype=query.dtype)
    tile = 16
    _collect_votes[(batch * heads * ceil_divide(blocks, tile),)](
        *(query, votes, heads, blocks, *strides(query)),
        block=given.block,
        step=given.step,
        width=width,
        WIDTH=padded_width(width),
        BLOCKS=tile,
    )
    shared = search(votes, key, given, number=number, sink=given.sink)
    own = search(query, index, given, number=number // given.share, taken=shared, columns=coordinates)
    far_log = made(heads, blocks, sections)
    count_left[(batch * heads * blocks,)](
        *(shared, None, far_log, blocks, number, sections),
        block=given.block,
        section=given.section,
        KEYS=min(max(power_of_two(max(number, 1)), 16), 1024),
        SECTIONS=max(power_of_two(sections + 1), 16),
    )
    saved = (*means, far_log, shared, own)
    out, lse = read(_reading(query, key, value, saved, given))
    return (out, coordinates, index, *sums, lse, *saved)


def _reading(query: Tensor, key: Tensor, value: Tensor, saved: tuple[Tensor, ...], given: SectionOptions) -> Reading:
    *means, far_log, shared, own = saved
    marks = (far_log, shared, own if own.shape[-1] else None, None, None, None, None)
    options = (given.block, given.section, shared.shape[-1], given.scale)
    return Reading._make((query, key, value, *means, *marks, *options))


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, results: tuple[Tensor, ...], given: SectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values from that of the output and all that `forward` gave."""
    out, _, _, _, _, lse, *saved = results
    of_query, *sums = pull_back(grad, _reading(query, key, value, tuple(saved), given), out, lse)
    return (of_query, *put_back(None, None, sums, (key, value), results[3].shape[2] * given.section))
