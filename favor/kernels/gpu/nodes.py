"""Landmarks of encoders: nodes of sorted keys, which of them a block of queries reads exactly, and attention to them.

These are the steps of `favor.landmark.bidirectional`, each in one launch. Keys and values are moved into their order;
queries are read where they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    ceil_divide,
    interpreted,
    load_rows,
    padded_width,
    power_of_two,
    strides,
    width_constants,
)
from favor.kernels.gpu.reading import Reading, gather, pull_back, read
from favor.kernels.gpu.sorting import count_of, sort
from favor.kernels.operands import NodeOptions

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _extent(lengths, batch, length, means, node):
    """Gives the keys of a node of this sequence, the first key of `node`, and how many keys it has (int64)."""
    limit = count_of(lengths, batch, length)
    size = tl.maximum(tl.cdiv(limit, means), 1)
    return size, node * size, tl.minimum(tl.maximum(limit - node * size, 0), size)


@triton.jit(do_not_specialize=["length"])
def _sum_up(
    key, value, lengths, mean, mean_value, variance,
    heads, length, means, number,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes mean key, mean value and variances of one node of sorted keys; zeros if it is empty."""
    program = tl.program_id(0).to(tl.int64)
    head = program // number
    _, first, count = _extent(lengths, head // heads, length, means, program % number)
    sums, squares = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    of_value = tl.zeros([VALUE_WIDTH], tl.float32)
    key += (head * length + first) * width
    value += (head * length + first) * value_width
    for begin in range(0, count.to(tl.int32), TOKENS):
        there = begin + tl.arange(0, TOKENS) < count
        k = load_rows(key + begin * width, width, there, width, TOKENS, WIDTH).to(tl.float32)
        sums += tl.sum(k, 0)
        squares += tl.sum(k * k, 0)
        v = load_rows(value + begin * value_width, value_width, there, value_width, TOKENS, VALUE_WIDTH)
        of_value += tl.sum(v.to(tl.float32), 0)
    divisor = tl.maximum(count, 1).to(tl.float32)
    column = tl.arange(0, WIDTH)
    sums = sums / divisor
    tl.store(mean + program * width + column, sums.to(mean.dtype.element_ty), mask=column < width)
    tl.store(variance + program * width + column, squares / divisor - sums * sums, mask=column < width)
    column = tl.arange(0, VALUE_WIDTH)
    of_value = (of_value / divisor).to(mean_value.dtype.element_ty)
    tl.store(mean_value + program * value_width + column, of_value, mask=column < value_width)


@triton.jit
def _best(scores, number):
    """Marks the `number` largest scores of each row `[R, C]`, of equal ones the first; none that is -inf.

    A score is not less than another one if its bits are not, as whole numbers, with those of negative ones turned.
    """
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _HIGHEST, bits)
    low, high = tl.full([scores.shape[0]], _LOWEST, tl.int32), tl.full([scores.shape[0]], _HIGHEST, tl.int32)
    for _ in range(33):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = tl.sum((bits >= middle[:, None]).to(tl.int32), 1) >= number
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    above, equal = bits > low[:, None], bits == low[:, None]
    left = number - tl.sum(above.to(tl.int32), 1)
    is_early = tl.cumsum(equal.to(tl.int32), 1) <= left[:, None]
    return (above | (equal & is_early)) & (scores > float("-inf"))


@triton.jit(do_not_specialize=["length", "keys", "blocks"])
def _choose(
    query, order, lengths, key_lengths, mean, variance, far_log, shared, seen, runs,
    heads, groups, length, keys, blocks, means, number, selected, most, spread,
    query_batch, query_head, query_row,
    width: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Chooses nodes for some blocks of one query head by the mean query of each, and counts the keys of all others.

    Logarithms of the counts are written where the scores were.
    """
    tiles = tl.cdiv(blocks, BLOCKS)
    program = tl.program_id(0).to(tl.int64)
    head, own = program // tiles, program % tiles * BLOCKS + tl.arange(0, BLOCKS)
    batch, source = head // heads, head // groups
    asked = count_of(lengths, batch, length)
    column = tl.arange(0, WIDTH)
    query += batch * query_batch + head % heads * query_head
    sums, squares = tl.zeros([BLOCKS, WIDTH], tl.float32), tl.zeros([BLOCKS, WIDTH], tl.float32)
    for row in range(0, ROWS):
        place = own * ROWS + row
        real = place < asked
        if order is not None:
            place = tl.load(order + head * length + place, mask=real, other=0).to(tl.int64)
        there = real[:, None] & (column < width)[None, :]
        x = tl.load(query + place[:, None] * query_row + column[None, :], mask=there, other=0.0).to(tl.float32)
        sums += x
        squares += x * x
    divisor = tl.minimum(tl.maximum(asked - own * ROWS, 1), ROWS).to(tl.float32)[:, None]
    sums, squares = sums / divisor, squares / divisor

    limit = count_of(key_lengths, batch, keys)
    size, _, _ = _extent(key_lengths, batch, keys, means, limit * 0)
    block = head * blocks + own
    there = own < blocks
    far_log += block[:, None] * number
    # Two loops, as registers hold one factor.
    for begin in range(0, number, STEP):
        node = begin + tl.arange(0, STEP)
        inside = node < number
        v = load_rows(variance + (source * number + begin) * width, width, inside, width, STEP, WIDTH)
        score = tl.dot(squares, tl.trans(tl.maximum(v, 0.0)), input_precision="tf32x3")
        tl.store(far_log + node[None, :], spread * tl.sqrt(score), mask=there[:, None] & inside[None, :])
    tl.debug_barrier()
    for begin in range(0, number, STEP):
        node = begin + tl.arange(0, STEP)
        inside = node < number
        m = load_rows(mean + (source * number + begin) * width, width, inside, width, STEP, WIDTH).to(tl.float32)
        score = tl.dot(sums, tl.trans(m), input_precision="tf32x3")
        score += tl.load(far_log + node[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        score = tl.where((node * size < limit)[None, :] & (score == score), score, float("-inf"))  # not NaN
        tl.store(far_log + node[None, :], score, mask=there[:, None] & inside[None, :])
    tl.debug_barrier()
    node = tl.arange(0, NODES)
    inside = there[:, None] & (node < number)[None, :]
    score = tl.load(far_log + node[None, :], mask=inside, other=float("-inf"))
    chosen = _best(score, tl.minimum(tl.cdiv(selected, size), most).to(tl.int32))
    _, _, count = _extent(key_lengths, batch, keys, means, node)
    left = tl.where(chosen, 0, count[None, :])
    left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), float("-inf"))
    tl.store(far_log + node[None, :], left, mask=inside)
    place = tl.cumsum(chosen.to(tl.int32), 1) - 1
    shared += block[:, None] * most
    tl.store(shared + place, tl.broadcast_to(node[None, :], place.shape), mask=chosen & inside)
    total = tl.sum(chosen.to(tl.int32), 1)
    tl.store(
        shared + node[None, :], -1, mask=there[:, None] & (node[None, :] >= total[:, None]) & (node < most)[None, :]
    )
    tl.store(seen + block, limit.to(tl.int32), mask=there)
    tl.store(runs + head, size.to(tl.int32))


@triton.jit
def _put(rows, mean, to, row, step, node, share, inside, seen, width: tl.constexpr, WIDTH: tl.constexpr):
    """Writes `[R, WIDTH]` rows, and their shares in those of their means, at the places `row`."""
    column = tl.arange(0, WIDTH)
    total = load_rows(rows, width, seen, width, row.shape[0], WIDTH)
    total += share * gather(mean, node, width, seen, width, WIDTH)
    to += row[:, None] * step + column[None, :]
    tl.store(to, total.to(to.dtype.element_ty), mask=inside[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["length"])
def _put_back(
    order, lengths, of_key, of_value, of_mean, of_mean_value, d_key, d_value,
    heads, length, extent, means, number, tiles, key_batch, key_head, key_row, value_batch, value_head, value_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of sorted keys and values, and the shares in those of their means, in the order given.

    Means are those of `extent` keys, if no `lengths` are given.
    """
    program = tl.program_id(0).to(tl.int64)
    tile, head = program % tiles, program // tiles
    batch, own = head // heads, head % heads
    place = tile * TOKENS + tl.arange(0, TOKENS)
    inside = place < length
    limit = count_of(lengths, batch, extent)
    size, _, _ = _extent(lengths, batch, extent, means, limit * 0)
    node = tl.minimum(place // size, number - 1)
    _, _, count = _extent(lengths, batch, extent, means, node)
    seen = inside & (place < limit)
    share = tl.where(seen, 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0)[:, None]
    row = place
    if order is not None:
        row = tl.load(order + head * length + place, mask=inside, other=0).to(tl.int64)
    first = head * length + tile * TOKENS
    node += head * number
    to = d_key + batch * key_batch + own * key_head
    _put(of_key + first * width, of_mean, to, row, key_row, node, share, inside, seen, width, WIDTH)
    of_value += first * value_width
    to = d_value + batch * value_batch + own * value_head
    _put(of_value, of_mean_value, to, row, value_row, node, share, inside, seen, value_width, VALUE_WIDTH)


def _tokens(width: int) -> int:
    return 16 if interpreted() or width > 128 else 64


def forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, key_lengths: Tensor | None, given: NodeOptions
) -> tuple[Tensor, ...]:
    """Computes attention; the arguments are those of `favor.kernels.landmarks.node_attention`.

    Returns:
        output `[B, H, L, dv]` and, for the backward pass, log normalisers; the order of keys, and of queries (empty if
        they are read as given); sorted keys and values; means; counts and choices of blocks, what they see, and runs.
    """
    (batch, heads, length, width), (key_heads, keys), value_width = query.shape, key.shape[1:3], value.shape[-1]
    asked = (query, lengths) if given.together else (key, key_lengths)
    order_of_keys, sorted_key, sorted_value = sort(key, asked[0], key_lengths, asked[1], value)
    assert sorted_key is not None
    assert sorted_value is not None
    number, block = given.number(keys), given.block
    mean, mean_value = (tensor.new_empty(batch, key_heads, number, tensor.shape[3]) for tensor in (key, value))
    variance = torch.empty_like(mean, dtype=torch.float32)
    constants = width_constants(width, value_width)
    _sum_up[(batch * key_heads * number,)](
        *(sorted_key, sorted_value, key_lengths, mean, mean_value, variance, key_heads, keys, given.means, number),
        **constants,
        TOKENS=_tokens(max(width, value_width)),
    )
    order = query.new_empty(0, dtype=torch.int32)
    if given.together and given.selected:
        order = sort(query, sorted_key, lengths, key_lengths).order
    blocks, most = ceil_divide(length, block), given.most(keys)
    far_log = query.new_empty(batch, heads, blocks, number, dtype=torch.float32)
    shared, seen, run = (
        query.new_empty(batch, heads, *shape, dtype=torch.int32) for shape in ((blocks, most), (blocks,), ())
    )
    _choose[(batch * heads * ceil_divide(blocks, 16),)](
        *(query, order if order.numel() else None, lengths, key_lengths, mean, variance, far_log, shared, seen, run),
        *(heads, heads // key_heads, length, keys, blocks, given.means, number, given.selected, most, given.spread),
        *strides(query),
        width=width,
        WIDTH=padded_width(width),
        ROWS=block,
        BLOCKS=16,
        NODES=max(power_of_two(number), 16),
        STEP=32 if width > 128 else 64,
        num_warps=4 if width <= 64 else 8,
        num_stages=2 if width <= 128 else 1,
    )
    saved = (order_of_keys, order, sorted_key, sorted_value, mean, mean_value, far_log, shared, seen, run)
    return (*read(_reading(query, saved, given)), *saved)


def _reading(query: Tensor, saved: tuple[Tensor, ...], given: NodeOptions) -> Reading:
    _, order, key, value, mean, mean_value, far_log, shared, seen, run = saved
    marks = (far_log, shared, None, seen, None, run, order if order.numel() else None)
    return Reading(query, key, value, mean, mean_value, *marks, given.block, 0, given.selected, given.scale)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    results: tuple[Tensor, ...],
    given: NodeOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values from that of the output and all that `forward` gave."""
    out, lse, *saved = results
    of_query, *sums = pull_back(grad, _reading(query, tuple(saved), given), out, lse)
    return (of_query, *put_back(saved[0], key_lengths, sums, (key, value), key.shape[2], given.means))


def put_back(
    order: Tensor | None,
    lengths: Tensor | None,
    sums: list[Tensor],
    tokens: tuple[Tensor, Tensor],
    extent: int,
    means: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gives the gradients of keys and values, `tokens`, from those of sorted ones and of their means in float32.

    Args:
        order: which key comes in each place, `[B, Hk, S]`; None for the given order.
        lengths: how many keys count, `[B]`; None for all.
        sums: gradients of keys, values, and mean keys and values.
        tokens: keys `[B, Hk, S, d]` and values.
        extent: how many keys there are with those that fill the last mean.
        means: into how many equal parts the keys were divided; by default, as many as there are means.
    """
    (batch, heads, keys, width), value_width = tokens[0].shape, tokens[1].shape[3]
    of_key, of_value = (torch.empty_like(tensor) for tensor in tokens)
    number, block = sums[2].shape[2], _tokens(max(width, value_width))
    tiles = ceil_divide(keys, block)
    _put_back[(batch * heads * tiles,)](
        *(order, lengths, *sums, of_key, of_value, heads, keys, extent, means or number, number, tiles),
        *strides(of_key, of_value),
        **width_constants(width, value_width),
        TOKENS=block,
    )
    return of_key, of_value
