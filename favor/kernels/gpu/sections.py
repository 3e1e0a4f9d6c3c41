"""Landmarks of whole causal sequences: the steps of `favor.landmark.causal`, each in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.chosen import search
from favor.kernels.gpu.common import (
    ceil_divide,
    load_rows,
    padded_width,
    power_of_two,
    strides,
    width_constants,
)
from favor.kernels.gpu.nodes import put_back
from favor.kernels.gpu.reading import Reading, pull_back, read
from favor.kernels.operands import SectionOptions, SectionTables


@triton.jit(do_not_specialize=["length"])
def _find_coordinates(
    query, key, coordinates,
    heads, groups, length, rank,
    query_batch, query_head, query_row, key_batch, key_head, key_row,
    step: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Finds the coordinates that vary most in the logits of the first block of one query head, in their order."""
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    asked, there = row * step < tl.minimum(length, BLOCK), row < length
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
    key, value, coordinates, index, far_key, far_value,
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
    column = tl.arange(0, VALUE_WIDTH)
    tl.store(far_value + program * value_width + column, of_value, mask=column < value_width)


@triton.jit
def _collect_votes(
    samples, starts, votes,
    heads, blocks, samples_batch, samples_head, samples_row,
    block: tl.constexpr, step: tl.constexpr, width: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Adds up the samples of each block until its first query, `step` tokens apart: as many as a block has."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(blocks, BLOCKS)
    head, own = program // tiles, program % tiles * BLOCKS + tl.arange(0, BLOCKS)
    first = own * block
    if starts is not None:
        first += tl.load(starts + head // heads) // block * block
    column = tl.arange(0, WIDTH)
    samples += head // heads * samples_batch + head % heads * samples_head
    total = tl.zeros([BLOCKS, WIDTH], tl.float32)
    for back in range(0, block, step):
        place = first - back
        there = ((own < blocks) & (place >= 0))[:, None] & (column < width)[None, :]
        at = samples + (place // step)[:, None] * samples_row + column[None, :]
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    to = votes + (head * blocks + own)[:, None] * width + column[None, :]
    tl.store(to, total.to(votes.dtype.element_ty), mask=(own < blocks)[:, None] & (column < width)[None, :])


@triton.jit
def _count_left(
    shared, starts, counts, length, far_log,
    heads, blocks, chosen, sections,
    block: tl.constexpr, section: tl.constexpr, KEYS: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Takes the logarithm of how many keys of each closed section a block did not choose.

    For one token at `starts`, the `length` of its sequence grows by `counts`.
    """
    program = tl.program_id(0).to(tl.int64)
    batch, first = program // blocks // heads, program % blocks * block
    if starts is not None:
        first += tl.load(starts + batch)
    place = tl.arange(0, SECTIONS)
    taken = tl.zeros([SECTIONS], tl.int32)
    for begin in range(0, chosen, KEYS):
        index = begin + tl.arange(0, KEYS)
        key = tl.load(shared + program * chosen + index, mask=index < chosen, other=-1)
        taken += tl.histogram(tl.where(key < 0, SECTIONS - 1, key // section), SECTIONS)
    left = tl.where(place < first // section, section - taken, 0)
    left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), float("-inf"))
    tl.store(far_log + program * sections + place, left, mask=place < sections)
    if length is not None:  # no program reads it
        grown = first + 1
        if counts is not None:
            grown = first + tl.load(counts + batch)
        tl.store(length + batch, grown)


@triton.jit
def _append(
    query, key, value, table, values, far_key, far_value, samples, coordinates, index, length, place,
    heads, groups, rank, slots, sections, keys,
    query_batch, query_head, key_batch, key_head, value_batch, value_head,
    section: tl.constexpr, step: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Writes one token of a key head, and of its query heads, behind the others; gives its `place` in the sequence."""
    program = tl.program_id(0).to(tl.int64)
    batch, head = program // heads, program % heads
    at = tl.load(length + batch)
    tl.store(place + batch, at)
    column = tl.arange(0, WIDTH)
    real = column < width
    key += batch * key_batch + head * key_head
    k = tl.load(key + column, mask=real, other=0.0)
    tl.store(table + (program * keys + at) * width + column, k, mask=real)
    of_section = far_key + (program * sections + at // section) * width + column
    tl.store(of_section, tl.load(of_section, mask=real, other=0.0) + k.to(tl.float32), mask=real)
    for member in range(0, groups):
        own = program * groups + member
        x = tl.load(query + batch * query_batch + (head * groups + member) * query_head + column, mask=real, other=0.0)
        slot = tl.where(at % step == 0, at // step, slots - 1)  # the last one is for nothing
        tl.store(samples + (own * slots + slot) * width + column, x, mask=real)
        searched = tl.arange(0, RANK)
        chosen = tl.load(coordinates + own * rank + searched, mask=searched < rank, other=0)
        found = tl.load(key + chosen, mask=searched < rank, other=0.0)
        tl.store(index + (own * keys + at) * rank + searched, found, mask=searched < rank)
    column = tl.arange(0, VALUE_WIDTH)
    real = column < value_width
    v = tl.load(value + batch * value_batch + head * value_head + column, mask=real, other=0.0)
    tl.store(values + (program * keys + at) * value_width + column, v, mask=real)
    of_section = far_value + (program * sections + at // section) * value_width + column
    tl.store(of_section, tl.load(of_section, mask=real, other=0.0) + v.to(tl.float32), mask=real)


def _votes(samples: Tensor, starts: Tensor | None, blocks: int, given: SectionOptions) -> Tensor:
    """Collects the votes `[B, H, blocks, d]` of samples `[B, H, n, d]`, from the blocks at `starts` `[B]` on."""
    batch, heads, _, width = samples.shape
    votes, tile = samples.new_empty(batch, heads, blocks, width), min(power_of_two(blocks), 16)
    _collect_votes[(batch * heads * ceil_divide(blocks, tile),)](
        *(samples, starts, votes, heads, blocks, *strides(samples)),
        block=given.block,
        step=given.step,
        width=width,
        WIDTH=padded_width(width),
        BLOCKS=tile,
    )
    return votes


def _left(shared: Tensor, sections: int, given: SectionOptions, *one: Tensor | None) -> Tensor:
    """Gives the logarithms of the keys left, `[B, H, Z, F]`; for `one` token, with its place, count, and the length."""
    batch, heads, blocks, number = shared.shape
    far_log = shared.new_empty(batch, heads, blocks, sections, dtype=torch.float32)
    _count_left[(batch * heads * blocks,)](
        *(shared, *(one or (None, None, None)), far_log, heads, blocks, number, sections),
        block=given.block,
        section=given.section,
        KEYS=min(max(power_of_two(max(number, 1)), 16), 1024),
        SECTIONS=max(power_of_two(sections + 1), 16),
    )
    return far_log


def forward(query: Tensor, key: Tensor, value: Tensor, given: SectionOptions) -> tuple[Tensor, ...]:
    """Computes attention; the arguments are those of `favor.kernels.landmarks.section_attention`.

    Returns:
        output `[B, H, L, dv]`; the coordinates in which queries search, and these of all keys; sums of keys and values
        of each section; and for the backward pass log normalisers, logarithms of the keys left, and what blocks and
        queries chose.
    """
    (batch, heads, length, width), key_heads, value_width = query.shape, key.shape[1], value.shape[3]
    sections, blocks = ceil_divide(length, given.section), ceil_divide(length, given.block)
    rank, number = given.rank(width), min(given.selected, length)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(batch, *shape, dtype=dtype)

    coordinates, index = made(heads, rank, dtype=torch.int64), made(heads, length, rank, dtype=key.dtype)
    _find_coordinates[(batch * heads,)](
        *(query, key, coordinates, heads, heads // key_heads, length, rank, *strides(query, key)),
        step=given.step,
        width=width,
        WIDTH=padded_width(width),
        BLOCK=given.block,
        COLUMNS=16,
    )
    sums = [made(key_heads, sections, size) for size in (width, value_width)]
    _sum_up[(batch * key_heads * sections,)](
        *(key, value, coordinates, index, *sums, key_heads, heads // key_heads, length, rank, sections),
        *strides(key, value),
        section=given.section,
        **width_constants(width, value_width),
        RANK=padded_width(rank),
        TOKENS=min(power_of_two(given.section), 64),
    )
    votes = _votes(query[:, :, :: given.step], None, blocks, given)
    shared = search(votes, key, given, number=number, sink=given.sink)
    own = search(query, index, given, number=number // given.share, taken=shared, columns=coordinates)
    saved = (*sums, _left(shared, sections, given), shared, own)
    out, lse = read(_reading(query, key, value, saved, given))
    return (out, coordinates, index, *sums, lse, *saved[2:])


def _reading(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: tuple[Tensor, ...],
    given: SectionOptions,
    place: Tensor | None = None,
) -> Reading:
    *sums, far_log, shared, own = saved
    marks = (far_log, shared, own if own.shape[-1] else None, None, place, None, None)
    options = (given.block, given.section, shared.shape[-1], given.scale, 1 / given.section)
    return Reading._make((query, key, value, *sums, *marks, *options))


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, results: tuple[Tensor, ...], given: SectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values from that of the output and all that `forward` gave."""
    out, _, _, *sums, lse, far_log, shared, own = results
    reading = _reading(query, key, value, (*sums, far_log, shared, own), given)
    of_query, *parts = pull_back(grad, reading, out, lse)
    return (of_query, *put_back(None, None, parts, (key, value), sums[0].shape[2] * given.section))


def step(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor | None, tables: SectionTables, given: SectionOptions
) -> Tensor:
    """Attends with one more token; the arguments are those of `favor.kernels.landmarks.step`."""
    (batch, heads, _, width), value_width = query.shape, value.shape[3]
    key_heads, keys = tables.key.shape[1:3]
    place, rank, sections = torch.empty_like(tables.length), given.rank(width), tables.far_key.shape[2]
    _append[(batch * key_heads,)](
        *(query, key, value, *tables[:8], place),
        *(key_heads, heads // key_heads, rank, tables.samples.shape[2], sections, keys),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
        section=given.section,
        step=given.step,
        **width_constants(width, value_width),
        RANK=padded_width(rank),
    )
    shared = tables.shared
    if tables.chooses:
        votes = _votes(tables.samples, place, 1, given)
        search(votes, tables.key, given, number=shared.shape[3], sink=given.sink, starts=place, found=shared)
    number, one = shared.shape[3] // given.share, given._replace(block=1)
    own = search(query, tables.searched, one, number=number, taken=shared, columns=tables.coordinates, starts=place)
    far_log = _left(shared, sections, given, place, counts, tables.length)
    saved = (tables.far_key, tables.far_value, far_log, shared, own)
    return read(_reading(query, tables.key, tables.value, saved, one, place))[0]
