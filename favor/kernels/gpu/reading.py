"""Attention to near keys, chosen keys and means in Triton: one program for some queries of a block.

A program keeps its queries and streams all that they see under one running maximum: first the keys that each query
chose for itself, one of each query at a time, then the means with their counts, the near keys, and the keys that the
block chose, which it gathers.

Backwards the program streams them once more. With p the weights, whose sum is one, g the gradient of the output and
delta = g.out, the gradient of the logit of a key with value v is p (g.v - delta). The gradients of queries are written;
those of keys, values and means are added up atomically in float32, because many blocks read the same ones. Their sums
may differ in the last bits from run to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LN2,
    LOG2E,
    Blocks,
    absorb,
    ceil_divide,
    contract,
    finite,
    mix,
    settled,
    strides,
    tuned,
    wide,
    width_constants,
)

# By the bytes of a number and of the widest row: queries of a block (tokens) and keys of a tile (features).
_FORWARD = {
    2: {
        256: (Blocks(64, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 3)),
        512: (Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2)),
    },
    4: {
        256: (Blocks(32, 32, 4, 2), Blocks(64, 32, 8, 2)),
        512: (Blocks(16, 32, 4, 2), Blocks(32, 32, 8, 2)),
        1024: (Blocks(16, 16, 4, 2),),
    },
}
# One each: if several were timed, all of them would add to the gradients.
_BACKWARD = {
    2: {128: (Blocks(64, 32, 8, 2),), 256: (Blocks(32, 32, 8, 2),), 512: (Blocks(16, 16, 8, 1),)},
    4: {256: (Blocks(32, 32, 8, 2),), 512: (Blocks(16, 32, 8, 1),), 1024: (Blocks(16, 16, 4, 1),)},
}
# With fewer queries in a block, more warps would have nothing to multiply.
_MANY_ROWS = 32
# Logarithm in base 2 of the largest weight backwards: it is at most 1, except for logits that are rounded differently.
_MOST = tl.constexpr(8.0)

# Steps over which keys of rows are loaded ahead: their addresses, then themselves.
_AHEAD = tl.constexpr(3)

_SIZES = ("blocks", "rows", "heads", "groups", "length", "keys", "chosen", "owns", "means", "most")


@triton.jit
def _locate(
    seen, first, runs, order, blocks, rows, heads, groups, length, keys, most, owns, per_first,
    section: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tells where a program works.

    Returns:
        its sequence, its query head and its key head there, and its block, counted over all before it (int64); the
        first of its rows in the block, the places of its rows among the queries of the head `[TOKENS]`, and which of
        them exist; the last near key that each sees; the first near key, and the end of those of all rows; how many
        keys the block may choose, the keys of a run, how many keys it chose, and how many each row may have.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(rows, TOKENS)
    tile = (program % tiles).to(tl.int32) * TOKENS
    row = tile + tl.arange(0, TOKENS)
    block = program // tiles
    head = block // blocks
    place = block % blocks * rows + row
    inside = (row < rows) & (place < length)
    start = (block % blocks).to(tl.int32) * rows
    if first is not None:
        start += tl.load(first + head // per_first).to(tl.int32)
    if order is not None:
        place = tl.load(order + head * length + place, mask=inside, other=0).to(tl.int64)
    nearest, end, last = start * 0, start * 0, row
    if section > 0:
        nearest = start // section * section
        end = tl.minimum(start + tl.minimum(tile + TOKENS, rows), keys)
        last = start + row
    limit, run = nearest, start * 0 + 1
    if seen is not None:
        limit = tl.load(seen + block).to(tl.int32)
    if runs is not None:
        run = tl.load(runs + head).to(tl.int32)
    # Those without a key are at the end. A block that chose all keys leaves none for its rows.
    number = tl.cdiv(tl.minimum(most, limit), run) * run
    owns = tl.where(limit > most, owns, 0)
    batch, head = head // heads, head % heads
    return batch, head, head // groups, block, tile, place, inside, last, nearest, end, limit, run, number, owns


@triton.jit
def gather(base, places, step, seen, width: tl.constexpr, WIDTH: tl.constexpr):
    """Loads `[C, WIDTH]` rows at `places` `[C]` (int64), `step` apart; zeros, and nothing read, where not `seen`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + places[:, None] * step + columns[None, :]
    return tl.load(pointers, mask=seen[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _scatter(base, places, step, seen, rows, width: tl.constexpr):
    """Writes rows `[C, WIDTH]` at `places`, the counterpart of `_gather`."""
    columns = tl.arange(0, rows.shape[1])
    pointers = base + places[:, None] * step + columns[None, :]
    tl.store(pointers, rows.to(base.dtype.element_ty), mask=seen[:, None] & (columns < width)[None, :])


@triton.jit
def _add(base, places, seen, rows, width: tl.constexpr, WIDTH: tl.constexpr):
    """Adds `rows` `[C, WIDTH]` to those at `places`, together with what other programs add there."""
    columns = tl.arange(0, WIDTH)
    pointers = base + places[:, None] * width + columns[None, :]
    tl.atomic_add(pointers, rows, mask=seen[:, None] & (columns < width)[None, :], sem="relaxed")


@triton.jit
def _load_own(q, key, value, key_row, value_row, own, inside, owns, step, factor, width: tl.constexpr,
              value_width: tl.constexpr, VALUE_WIDTH: tl.constexpr):  # fmt: skip
    """Loads a key of each row: place and whether there is one `[R]`, keys, values `[R, ...]`, and logits `[R]`."""
    place = tl.load(own + tl.arange(0, q.shape[0]) * owns + step, mask=inside, other=-1).to(tl.int64)
    seen = place >= 0
    k = gather(key, place, key_row, seen, width, q.shape[1]).to(tl.float32)
    v = gather(value, place, value_row, seen, value_width, VALUE_WIDTH).to(tl.float32)
    logits = tl.sum(q.to(tl.float32) * k, axis=1) * factor
    return place, seen, k, v, tl.where(seen, logits, float("-inf"))


@triton.jit
def _load_means(q, key, value, log, begin, means, share, factor, width: tl.constexpr, value_width: tl.constexpr,
                VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """Loads a tile of means: places and which count `[C]`, keys and values `[C, ...]`, and logits `[R, C]`."""
    place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
    shift = tl.load(log + place, mask=place < means, other=float("-inf")).to(tl.float32) * LOG2E
    seen = shift > float("-inf")
    k = (gather(key, place, width, seen, width, q.shape[1]).to(tl.float32) * share).to(q.dtype)
    v = (gather(value, place, value_width, seen, value_width, VALUE_WIDTH).to(tl.float32) * share).to(q.dtype)
    return place, seen, k, v, contract(q, k) * factor + shift[None, :]


@triton.jit
def _load_keys(q, key, value, key_row, value_row, place, seen, last, factor, width: tl.constexpr,
               value_width: tl.constexpr, VALUE_WIDTH: tl.constexpr):  # fmt: skip
    """Loads keys and values `[C, ...]` at places (int64), and logits `[R, C]`; rows see none after `last` `[R]`."""
    k = gather(key, place, key_row, seen, width, q.shape[1])
    v = gather(value, place, value_row, seen, value_width, VALUE_WIDTH)
    visible = seen[None, :] & (place[None, :] <= last[:, None])
    return k, v, tl.where(visible, contract(q, k) * factor, float("-inf"))


@triton.jit
def _places(shared, begin, number, limit, run, FEATURES: tl.constexpr):
    """Gives the places `[C]` of some keys that a block chose (int64), and which of them count."""
    index = begin + tl.arange(0, FEATURES)
    chosen = tl.load(shared + index // run, mask=index < number, other=-1).to(tl.int64)
    place = chosen * run + index % run
    return place, (chosen >= 0) & (place < limit)


@triton.jit(do_not_specialize=_SIZES)
def _read(
    query, key, value, shared, own, seen, far_key, far_value, far_log, first, runs, order, out, lse,
    blocks, rows, heads, groups, length, keys, chosen, owns, means, most, per_first, scale, share,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row,
    section: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Reads for some rows of a block. Rows that see nothing get zeros, and -inf as logarithm of the normaliser."""
    batch, head, source, block, tile, asked, inside, last, nearest, end, limit, run, number, others = _locate(
        seen, first, runs, order, blocks, rows, heads, groups, length, keys, most, owns, per_first, section, TOKENS
    )
    factor = scale * LOG2E
    q = gather(query + batch * query_batch + head * query_head, asked, query_row, inside, width, WIDTH)
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    key += batch * key_batch + source * key_head
    value += batch * value_batch + source * value_head
    source += batch * (heads // groups)

    # First, while the sums do not lie in registers as products of matrices need them.
    own += (block * rows + tile) * owns
    for step in tl.range(0, others, num_stages=_AHEAD):
        _, _, _, v, logits = _load_own(
            q, key, value, key_row, value_row, own, inside, owns, step, factor, width, value_width, VALUE_WIDTH
        )
        risen = tl.maximum(top, logits)
        weights, decay = tl.exp2(logits - finite(risen)), tl.exp2(top - finite(risen))
        top, total = risen, total * decay + weights
        acc = acc * decay[:, None] + weights[:, None] * v

    far_key += source * means * width
    far_value += source * means * value_width
    for begin in range(0, means, FEATURES):
        _, _, _, v, logits = _load_means(
            q, far_key, far_value, far_log + block * means, begin, means, share, factor, width, value_width,
            VALUE_WIDTH, FEATURES,
        )  # fmt: skip
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    for begin in range(nearest, end, FEATURES):
        place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
        _, v, logits = _load_keys(
            q, key, value, key_row, value_row, place, place < end, last, factor, width, value_width, VALUE_WIDTH
        )
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    shared += block * chosen
    last = last * 0 + limit
    for begin in range(0, number, FEATURES):
        place, there = _places(shared, begin, number, limit, run, FEATURES)
        _, v, logits = _load_keys(
            q, key, value, key_row, value_row, place, there, last, factor, width, value_width, VALUE_WIDTH
        )
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    norm, inverse = settled(top, total)
    tl.store(lse + (batch * heads + head) * length + asked, norm * LN2, mask=inside)
    _scatter(out + batch * out_batch + head * out_head, asked, out_row, inside, acc * inverse[:, None], value_width)


@triton.jit
def _pull_back(
    q, g, delta, norm, k, v, logits, place, seen, d_key, d_value, dq, scale,
    width: tl.constexpr, value_width: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of keys and values at `place` `[C]`; gives the new sum of the queries', unscaled."""
    weights = tl.exp2(tl.minimum(logits - norm[:, None], _MOST))
    dv = mix(tl.trans(weights), g, tl.zeros(v.shape, tl.float32))
    _add(d_value, place, seen, dv, value_width, v.shape[1])
    slopes = weights * (contract(g, v) - delta[:, None])
    dk = wide(tl.trans(slopes), q, tl.zeros(k.shape, tl.float32), q)
    _add(d_key, place, seen, dk * scale, width, k.shape[1])
    return wide(slopes, k, dq, q)


@triton.jit(do_not_specialize=_SIZES)
def _gradients(
    query, key, value, shared, own, seen, far_key, far_value, far_log, first, runs, order, grad, out, lse,
    d_query, d_key, d_value, d_far_key, d_far_value,
    blocks, rows, heads, groups, length, keys, chosen, owns, means, most, per_first, scale, share,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    section: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients for some rows of a block."""
    batch, head, source, block, tile, asked, inside, last, nearest, end, limit, run, number, others = _locate(
        seen, first, runs, order, blocks, rows, heads, groups, length, keys, most, owns, per_first, section, TOKENS
    )
    factor = scale * LOG2E
    q = gather(query + batch * query_batch + head * query_head, asked, query_row, inside, width, WIDTH)
    g = gather(grad + batch * grad_batch + head * grad_head, asked, grad_row, inside, value_width, VALUE_WIDTH)
    o = gather(out + batch * out_batch + head * out_head, asked, out_row, inside, value_width, VALUE_WIDTH)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    norm = tl.load(lse + (batch * heads + head) * length + asked, mask=inside, other=float("-inf")) * LOG2E
    norm = tl.where(norm == float("-inf"), float("inf"), norm)  # no weight where nothing is seen
    dq = tl.zeros([TOKENS, WIDTH], tl.float32)
    key += batch * key_batch + source * key_head
    value += batch * value_batch + source * value_head
    source += batch * (heads // groups)
    d_key += source * keys * width
    d_value += source * keys * value_width

    own += (block * rows + tile) * owns
    for step in tl.range(0, others, num_stages=_AHEAD):
        place, there, k, v, logits = _load_own(
            q, key, value, key_row, value_row, own, inside, owns, step, factor, width, value_width, VALUE_WIDTH
        )
        weights = tl.exp2(tl.minimum(logits - norm, _MOST))
        _add(d_value, place, there, weights[:, None] * g.to(tl.float32), value_width, VALUE_WIDTH)
        slopes = weights * (tl.sum(g.to(tl.float32) * v, axis=1) - delta)
        _add(d_key, place, there, (slopes * scale)[:, None] * q.to(tl.float32), width, WIDTH)
        dq += slopes[:, None] * k

    far_key += source * means * width
    far_value += source * means * value_width
    d_far_key += source * means * width
    d_far_value += source * means * value_width
    for begin in range(0, means, FEATURES):
        place, there, k, v, logits = _load_means(
            q, far_key, far_value, far_log + block * means, begin, means, share, factor, width, value_width,
            VALUE_WIDTH, FEATURES,
        )  # fmt: skip
        dq = _pull_back(
            q, g, delta, norm, k, v, logits, place, there, d_far_key, d_far_value, dq, scale, width, value_width
        )

    for begin in range(nearest, end, FEATURES):
        place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
        k, v, logits = _load_keys(
            q, key, value, key_row, value_row, place, place < end, last, factor, width, value_width, VALUE_WIDTH
        )
        dq = _pull_back(
            q, g, delta, norm, k, v, logits, place, place < end, d_key, d_value, dq, scale, width, value_width
        )

    shared += block * chosen
    last = last * 0 + limit
    for begin in range(0, number, FEATURES):
        place, there = _places(shared, begin, number, limit, run, FEATURES)
        k, v, logits = _load_keys(
            q, key, value, key_row, value_row, place, there, last, factor, width, value_width, VALUE_WIDTH
        )
        dq = _pull_back(q, g, delta, norm, k, v, logits, place, there, d_key, d_value, dq, scale, width, value_width)

    _scatter(d_query + batch * dq_batch + head * dq_head, asked, dq_row, inside, dq * scale, width)


class Reading(NamedTuple):
    """Operands of `read` and `pull_back`: `ChosenOperands` with heads of their own dimension.

    Attributes:
        query: `[B, H, L, d]`; key and value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`. The last stride of each is 1.
        far_key, far_value: `[B, Hk, F, d]` and `[B, Hk, F, dv]`, contiguous; times `far_share` they are the means.
        far_log, shared, own, seen, first, run: as there, with `[B, H]` in place of `[N]`, contiguous; `first` may be
            `[B]`. None for no own keys, for blocks that see the sections before theirs, for heads that begin with the
            first key, and for runs of one key.
        order: which query comes in each place of the blocks, int32 `[B, H, L]`; None for the given order.
        rows: queries of a block.
        section, most, scale, far_share: as there and above.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    far_key: Tensor
    far_value: Tensor
    far_log: Tensor
    shared: Tensor
    own: Tensor | None
    seen: Tensor | None
    first: Tensor | None
    run: Tensor | None
    order: Tensor | None
    rows: int
    section: int
    most: int
    scale: float
    far_share: float = 1.0


def _launch(
    kernel: Any, choices: dict[int, Any], given: Reading, tensors: tuple[Tensor, ...], *strided: Tensor
) -> None:
    """Runs a kernel on the operands and other tensors, with the strides of some of these."""
    (batch, heads, length, width), (key_heads, keys) = given.query.shape, given.key.shape[1:3]
    widths, rows = (width, given.value.shape[-1]), given.rows
    blocks, choices = ceil_divide(length, rows), choices[given.query.element_size()]
    if rows <= _MANY_ROWS and not (kernel is _gradients and width > 128):  # registers of 4 warps do not hold these
        choices = {limit: tuple(one._replace(warps=4) for one in some) for limit, some in choices.items()}
    # float16 is multiplied in tf32, too, where its range is too narrow.
    chosen = tuned(kernel, choices, widths, given.query, tf32=given.query.dtype != torch.bfloat16, longest=rows)
    sizes = (given.shared.shape[-1], 0 if given.own is None else given.own.shape[-1], given.far_key.shape[2])

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (batch * heads * blocks * ceil_divide(rows, meta["TOKENS"]),)

    own = given.shared if given.own is None else given.own  # not read
    per_first = 1 if given.first is None else batch * heads // given.first.numel()
    chosen[grid](
        *(given.query, given.key, given.value, given.shared, own, given.seen, given.far_key, given.far_value),
        *(given.far_log, given.first, given.run, given.order, *tensors),
        *(blocks, rows, heads, heads // key_heads, length, keys, *sizes, given.most, per_first),
        *(given.scale, given.far_share),
        *strides(given.query, given.key, given.value, *strided),
        section=given.section,
        **width_constants(*widths),
    )


def read(given: Reading) -> tuple[Tensor, Tensor]:
    """Computes output `[B, H, L, dv]` and log normalisers `[B, H, L]`, float32, -inf for queries that see nothing."""
    (batch, heads, length, _), width = given.query.shape, given.value.shape[-1]
    out = given.query.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = given.query.new_empty(batch, heads, length, dtype=torch.float32)
    if out.numel():
        _launch(_read, _FORWARD, given, (out, lse), out)
    return out, lse


def pull_back(grad: Tensor, given: Reading, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of queries, and in float32 those of keys, values, and mean keys and values.

    Weights are computed again.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    of_query = torch.empty_like(given.query)
    read = (given.key, given.value, given.far_key, given.far_value)
    sums = given.query.new_zeros(sum(tensor.numel() for tensor in read), dtype=torch.float32)
    parts = sums.split([tensor.numel() for tensor in read])
    if out.numel():
        _launch(_gradients, _BACKWARD, given, (grad, out, lse, of_query, *parts), grad, out, of_query)
    return (of_query, *(part.view(tensor.shape) for part, tensor in zip(parts, read, strict=True)))
