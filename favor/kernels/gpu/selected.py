"""Groups of keys, near keys and chosen keys in Triton: one program for each block of queries.

The mathematics are those of `favor.kernels.selected`. A program keeps the queries of its block and streams the groups
with their counts, the near keys, and the chosen pages, which it gathers, under one running maximum. A chosen key has
the weight that it adds to its group: that of the key, less that of the mean.

Backwards the program streams them once more. With p the weights, whose sum is one, g the gradient of the output and
delta = g.out, the gradient of the logit of a group is p (g.w - delta). A chosen key with the weight a has
a (g.v - delta), and takes b (g.v - delta) from the logit of its group, if the mean weighs b there. The gradients of
queries are written; those of means, keys and values are added up atomically in float32, because many blocks read the
same ones. Their sums may differ in the last bits from run to run.
"""

from __future__ import annotations

from typing import Any

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
    load_rows,
    mix,
    store_rows,
    tuned,
    wide,
    width_constants,
)
from favor.kernels.operands import SelectedOperands

# By the bytes of a number and of the widest row: rows of a block of queries (tokens) and keys of a tile (features).
_FORWARD = {
    2: {
        128: (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 3), Blocks(16, 64, 4, 2)),
        256: (Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 2), Blocks(16, 64, 4, 2)),
        512: (Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2)),
    },
    4: {
        256: (Blocks(32, 32, 4, 2), Blocks(16, 64, 4, 2)),
        512: (Blocks(16, 32, 4, 2), Blocks(16, 16, 4, 2)),
        1024: (Blocks(16, 16, 4, 2),),
    },
}
# One each: if several were timed, all of them would add to the gradients.
_BACKWARD = {
    2: {256: (Blocks(32, 32, 4, 2),), 512: (Blocks(16, 32, 8, 2),)},
    4: {256: (Blocks(16, 32, 4, 2),), 512: (Blocks(16, 32, 8, 1),), 1024: (Blocks(16, 16, 4, 1),)},
}
# Logarithm in base 2 of the largest weight backwards: it is at most 1, except for logits that are rounded differently.
_MOST = tl.constexpr(8.0)

_SIZES = ("blocks", "sections", "rows", "groups", "nears", "keys", "number", "per_head", "first")


@triton.jit
def _locate(blocks, sections, rows, per_head, first, nears, TOKENS: tl.constexpr):
    """Tells where a program works.

    Returns:
        its head, section and block, each counted over all before it (int64); its rows in the block `[TOKENS]`, and
        which of them exist; the last near key that each sees.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(rows, TOKENS)
    row = (program % tiles).to(tl.int32) * TOKENS + tl.arange(0, TOKENS)
    block = program // tiles
    section = block // blocks
    start = (block % blocks).to(tl.int32) % per_head * rows
    last = tl.where(first < 0, nears - 1, first + start + row)
    return section // sections, section, block, row, row < rows, last


@triton.jit
def _gather(base, places, seen, width: tl.constexpr, WIDTH: tl.constexpr):
    """Loads `[C, WIDTH]` rows at `places` `[C]` (int64); zeros, and nothing read, where not `seen`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + places[:, None] * width + columns[None, :]
    return tl.load(pointers, mask=seen[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _add(base, places, seen, rows, width: tl.constexpr, WIDTH: tl.constexpr):
    """Adds `rows` `[C, WIDTH]` to those at `places`, together with what other programs add there."""
    columns = tl.arange(0, WIDTH)
    pointers = base + places[:, None] * width + columns[None, :]
    tl.atomic_add(pointers, rows, mask=seen[:, None] & (columns < width)[None, :], sem="relaxed")


@triton.jit
def _load_groups(q, counts, far_key, begin, groups, factor, width: tl.constexpr, FEATURES: tl.constexpr):
    """Loads a tile of groups: which have keys `[C]`, means `[C, WIDTH]`, and logits `[R, C]` in base 2, with counts."""
    place = begin + tl.arange(0, FEATURES)
    count = tl.load(counts + place, mask=place < groups, other=0.0)
    seen = count > 0
    c = load_rows(far_key + begin * width, width, seen, width, FEATURES, q.shape[1])
    logits = contract(q, c) * factor + tl.where(seen, tl.log2(tl.where(seen, count, 1.0)), float("-inf"))[None, :]
    return seen, c, logits


@triton.jit
def _load_near(q, near_counts, near_key, begin, nears, last, factor, width: tl.constexpr, FEATURES: tl.constexpr):
    """Loads a tile of near keys: which count `[C]`, the keys `[C, WIDTH]`, and logits `[R, C]` in base 2."""
    place = begin + tl.arange(0, FEATURES)
    seen = tl.load(near_counts + place, mask=place < nears, other=0.0) > 0
    k = load_rows(near_key + begin * width, width, seen, width, FEATURES, q.shape[1])
    visible = seen[None, :] & (place[None, :] <= last[:, None])
    return seen, k, tl.where(visible, contract(q, k) * factor, float("-inf"))


@triton.jit
def _load_chosen(
    q, row, key, far_key, counts, pages, cell, since, begin, number, factor,
    page_size: tl.constexpr, width: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Loads a tile of chosen keys.

    Returns:
        which of them count `[C]`, and which have a group that counts; the places of key and group (int64); keys and
        means `[C, WIDTH]`; logits of both `[R, C]` in base 2, -inf where a row does not see the key.
    """
    index = begin + tl.arange(0, FEATURES)
    group = tl.load(cell + index, mask=index < number, other=-1).to(tl.int64)
    seen = group >= 0
    page = tl.load(pages + index // page_size, mask=seen, other=0).to(tl.int64)
    from_row = tl.load(since + index // page_size, mask=seen, other=0)
    place = page * page_size + index % page_size
    grouped = seen & (tl.load(counts + group, mask=seen, other=0.0) > 0)
    visible = seen[None, :] & (from_row[None, :] <= row[:, None])
    k = _gather(key, place, seen, width, q.shape[1])
    c = _gather(far_key, group, grouped, width, q.shape[1])
    own = tl.where(visible, contract(q, k) * factor, float("-inf"))
    mean = tl.where(visible & grouped[None, :], contract(q, c) * factor, float("-inf"))
    return seen, grouped, place, group, k, c, own, mean


@triton.jit(do_not_specialize=_SIZES)
def _read(
    query, counts, far_key, far_value, near_counts, near_key, near_value, key, value, pages, cell, since, out, lse,
    blocks, sections, rows, groups, nears, keys, number, per_head, first, scale,
    page_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Reads for some rows of a block. Rows that see nothing get zeros, and infinity as logarithm of the normaliser."""
    head, section, block, row, inside, last = _locate(blocks, sections, rows, per_head, first, nears, TOKENS)
    factor = scale * LOG2E
    q = _gather(query, block * rows + row, inside, width, WIDTH)
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)

    counts += section * groups
    far_key += section * groups * width
    far_value += section * groups * value_width
    for begin in range(0, groups, FEATURES):
        seen, _, logits = _load_groups(q, counts, far_key, begin, groups, factor, width, FEATURES)
        w = load_rows(far_value + begin * value_width, value_width, seen, value_width, FEATURES, VALUE_WIDTH)
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, w, acc * decay[:, None])

    near_counts += section * nears
    near_key += section * nears * width
    near_value += section * nears * value_width
    for begin in range(0, tl.minimum(nears, tl.max(last, 0) + 1), FEATURES):
        seen, _, logits = _load_near(q, near_counts, near_key, begin, nears, last, factor, width, FEATURES)
        v = load_rows(near_value + begin * value_width, value_width, seen, value_width, FEATURES, VALUE_WIDTH)
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    key += head * keys * width
    value += head * keys * value_width
    pages += block * (number // page_size)
    since += block * (number // page_size)
    cell += block * number
    for begin in range(0, number, FEATURES):
        seen, _, place, _, _, _, own, mean = _load_chosen(
            q, row, key, far_key, counts, pages, cell, since, begin, number, factor, page_size, width, FEATURES
        )
        v = _gather(value, place, seen, value_width, VALUE_WIDTH)
        top, total, weights, decay = absorb(own, top, total)
        # The groups came before: the maximum is above the logits of their means, and finite where there is one.
        taken = tl.exp2(mean - finite(top)[:, None])
        total -= tl.sum(taken, axis=1)
        acc = mix(weights - taken, v, acc * decay[:, None])

    empty = total <= 0.0
    total = tl.where(empty, 1.0, total)
    result = tl.where(empty[:, None], 0.0, acc / total[:, None])
    tl.store(lse + block * rows + row, tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2), mask=inside)
    first_row = block * rows + tl.min(row, 0)
    store_rows(out + first_row * value_width, value_width, result, inside, value_width, TOKENS, VALUE_WIDTH)


@triton.jit
def _pull_back(weights, q, k, v, g, delta, dq):
    """Computes gradients of keys `[C, WIDTH]` and values `[C, VALUE_WIDTH]`, unscaled, and the new sum of queries'."""
    slopes = weights * (contract(g, v) - delta[:, None])
    zeros = tl.zeros(k.shape, tl.float32)
    dk = wide(tl.trans(slopes), q, zeros, q)
    dv = mix(tl.trans(weights), g, tl.zeros(v.shape, tl.float32))
    return dk, dv, wide(slopes, k, dq, q)


@triton.jit(do_not_specialize=_SIZES)
def _gradients(
    query, counts, far_key, far_value, near_counts, near_key, near_value, key, value, pages, cell, since, grad, out,
    lse, d_query, d_far_key, d_far_value, d_near_key, d_near_value, d_key, d_value,
    blocks, sections, rows, groups, nears, keys, number, per_head, first, scale,
    page_size: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients for some rows of a block."""
    head, section, block, row, inside, last = _locate(blocks, sections, rows, per_head, first, nears, TOKENS)
    factor = scale * LOG2E
    asked = block * rows + row
    q = _gather(query, asked, inside, width, WIDTH)
    g = _gather(grad, asked, inside, value_width, VALUE_WIDTH)
    o = _gather(out, asked, inside, value_width, VALUE_WIDTH)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    norm = tl.load(lse + asked, mask=inside, other=float("inf"))[:, None] * LOG2E
    dq = tl.zeros([TOKENS, WIDTH], tl.float32)
    tile = tl.arange(0, FEATURES).to(tl.int64)

    counts += section * groups
    far_key += section * groups * width
    far_value += section * groups * value_width
    d_far_key += section * groups * width
    d_far_value += section * groups * value_width
    for begin in range(0, groups, FEATURES):
        seen, c, logits = _load_groups(q, counts, far_key, begin, groups, factor, width, FEATURES)
        w = load_rows(far_value + begin * value_width, value_width, seen, value_width, FEATURES, VALUE_WIDTH)
        dk, dv, dq = _pull_back(tl.exp2(tl.minimum(logits - norm, _MOST)), q, c, w, g, delta, dq)
        _add(d_far_key, begin + tile, seen, dk * scale, width, WIDTH)
        _add(d_far_value, begin + tile, seen, dv, value_width, VALUE_WIDTH)

    near_counts += section * nears
    near_key += section * nears * width
    near_value += section * nears * value_width
    d_near_key += section * nears * width
    d_near_value += section * nears * value_width
    for begin in range(0, tl.minimum(nears, tl.max(last, 0) + 1), FEATURES):
        seen, k, logits = _load_near(q, near_counts, near_key, begin, nears, last, factor, width, FEATURES)
        v = load_rows(near_value + begin * value_width, value_width, seen, value_width, FEATURES, VALUE_WIDTH)
        dk, dv, dq = _pull_back(tl.exp2(tl.minimum(logits - norm, _MOST)), q, k, v, g, delta, dq)
        _add(d_near_key, begin + tile, seen, dk * scale, width, WIDTH)
        _add(d_near_value, begin + tile, seen, dv, value_width, VALUE_WIDTH)

    key += head * keys * width
    value += head * keys * value_width
    d_key += head * keys * width
    d_value += head * keys * value_width
    pages += block * (number // page_size)
    since += block * (number // page_size)
    cell += block * number
    for begin in range(0, number, FEATURES):
        seen, grouped, place, group, k, c, own, mean = _load_chosen(
            q, row, key, far_key, counts, pages, cell, since, begin, number, factor, page_size, width, FEATURES
        )
        v = _gather(value, place, seen, value_width, VALUE_WIDTH)
        weights = tl.exp2(tl.minimum(own - norm, _MOST))
        taken = tl.exp2(tl.minimum(mean - norm, _MOST))
        pull = contract(g, v) - delta[:, None]
        dv = mix(tl.trans(weights - taken), g, tl.zeros([FEATURES, VALUE_WIDTH], tl.float32))
        _add(d_value, place, seen, dv, value_width, VALUE_WIDTH)
        slopes = weights * pull
        dk = wide(tl.trans(slopes), q, tl.zeros([FEATURES, WIDTH], tl.float32), q)
        _add(d_key, place, seen, dk * scale, width, WIDTH)
        dq = wide(slopes, k, dq, q)
        slopes = -taken * pull
        dk = wide(tl.trans(slopes), q, tl.zeros([FEATURES, WIDTH], tl.float32), q)
        _add(d_far_key, group, grouped, dk * scale, width, WIDTH)
        dq = wide(slopes, c, dq, q)

    first_row = block * rows + tl.min(row, 0)
    store_rows(d_query + first_row * width, width, dq * scale, inside, width, TOKENS, WIDTH)


def _launch(kernel: Any, choices: dict[int, Any], given: SelectedOperands, *others: Tensor) -> None:
    """Runs a kernel on the operands and other tensors, which are contiguous."""
    heads, sections, blocks, rows, width = given.query.shape
    widths = (width, given.value.shape[-1])
    chosen = tuned(kernel, choices[given.query.element_size()], widths, given.query, longest=rows)
    sizes = (given.counts.shape[-1], given.near_counts.shape[-1], given.key.shape[1], given.cell.shape[-1])

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (heads * sections * blocks * ceil_divide(rows, meta["TOKENS"]),)

    chosen[grid](
        *(tensor.contiguous() for tensor in given[:12]),
        *others,
        *(blocks, sections, rows, *sizes, given.per_head, given.first, given.scale),
        page_size=given.page_size,
        **width_constants(*widths),
    )


def forward(given: SelectedOperands) -> tuple[Tensor, Tensor]:
    """Computes output `[N, F, Z, R, dv]` and logarithms of normalisers, `[N, F, Z, R]`, inf for rows that see nothing.

    Args:
        given: the operands, float32 or half precision; counts are float32.
    """
    out = given.query.new_empty(*given.query.shape[:-1], given.value.shape[-1])
    lse = given.counts.new_empty(given.query.shape[:-1])
    if out.numel():
        _launch(_read, _FORWARD, given, out, lse)
    return out, lse


def backward(grad: Tensor, given: SelectedOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of query, far key and value, near key and value, key and value."""
    of_query = given.query.new_empty(given.query.shape)
    _, _, far_key, far_value, _, near_key, near_value, key, value, *_ = given
    read = (far_key, far_value, near_key, near_value, key, value)
    sums = [given.counts.new_zeros(tensor.shape) for tensor in read]
    if out.numel():
        _launch(_gradients, _BACKWARD, given, grad.contiguous(), out, lse, of_query, *sums)
    return (of_query, *(total.to(given.query.dtype) for total in sums))
