"""The operators of `favor.kernels.chosen` in Triton: one program for some queries of a block.

To attend, a program keeps its queries and streams all that they see under one running maximum: first the keys that each
query chose for itself, one of each query at a time, then the means with their counts, the near keys, and the keys that
the block chose, which it gathers.

Backwards the program streams them once more. With p the weights, whose sum is one, g the gradient of the output and
delta = g.out, the gradient of the logit of a key with value v is p (g.v - delta). The gradients of queries are written;
those of keys, values and means are added up atomically in float32, because many blocks read the same ones. Their sums
may differ in the last bits from run to run.

To choose, a program goes through the keys of some bins, one of each bin at a time, and keeps the best of each.
"""

from __future__ import annotations

from typing import Any

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
    interpreted,
    load_rows,
    mix,
    padded_width,
    settled,
    store_rows,
    tuned,
    wide,
    width_constants,
)
from favor.kernels.operands import ChosenOperands

# By the bytes of a number and of the widest row: queries of a block (tokens) and keys of a tile (features).
_FORWARD = {
    2: {
        256: (Blocks(64, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 3)),
        512: (Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2)),
    },
    4: {
        256: (Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2)),
        512: (Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2)),
        1024: (Blocks(16, 16, 4, 2),),
    },
}
# One each: if several were timed, all of them would add to the gradients.
_BACKWARD = {
    2: {256: (Blocks(64, 32, 8, 2),), 512: (Blocks(16, 32, 8, 2),)},
    4: {256: (Blocks(32, 32, 8, 2),), 512: (Blocks(16, 32, 8, 1),), 1024: (Blocks(16, 16, 4, 1),)},
}
# With fewer queries in a block, more warps would have nothing to multiply.
_MANY_ROWS = 32
# Logarithm in base 2 of the largest weight backwards: it is at most 1, except for logits that are rounded differently.
_MOST = tl.constexpr(8.0)

# Steps over which keys of rows are loaded ahead: their addresses, then themselves.
_AHEAD = tl.constexpr(3)

_SIZES = ("blocks", "rows", "groups", "keys", "chosen", "owns", "means", "most")


@triton.jit
def _locate(
    seen, first, runs, blocks, rows, groups, keys, most, owns, section: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Tells where a program works.

    Returns:
        its key head, its block, counted over all before it, and its first row, counted likewise (int64); its rows
        `[TOKENS]`, counted likewise, and which of them exist; the last near key that each sees; the first near key, and
        the end of those of all rows; how many keys the block may choose, the keys of a run, how many keys it chose, and
        how many each row may have.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(rows, TOKENS)
    tile = (program % tiles).to(tl.int32) * TOKENS
    row = tile + tl.arange(0, TOKENS)
    block = program // tiles
    asked = block * rows + row
    first_asked = block * rows + tile
    head = block // blocks
    limit = tl.load(seen + block).to(tl.int32)
    run = tl.load(runs + head).to(tl.int32)
    # Those without a key are at the end. A block that chose all keys leaves none for its rows.
    number = tl.cdiv(tl.minimum(most, limit), run) * run
    owns = tl.where(limit > most, owns, 0)
    if section > 0:
        start = tl.load(first + head).to(tl.int32) + (block % blocks).to(tl.int32) * rows
        nearest = start // section * section
        end = tl.minimum(start + tl.minimum(tile + TOKENS, rows), keys)
        last = start + row
    else:
        nearest, end, last = limit * 0, limit * 0, row
    return head // groups, block, first_asked, asked, row < rows, last, nearest, end, limit, run, number, owns


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
def _load_own(q, key, value, own, inside, owns, step, factor, width: tl.constexpr, value_width: tl.constexpr,
              VALUE_WIDTH: tl.constexpr):  # fmt: skip
    """Loads a key of each row: place and whether there is one `[R]`, keys, values `[R, ...]`, and logits `[R]`."""
    place = tl.load(own + tl.arange(0, q.shape[0]) * owns + step, mask=inside, other=-1).to(tl.int64)
    seen = place >= 0
    k = _gather(key, place, seen, width, q.shape[1]).to(tl.float32)
    v = _gather(value, place, seen, value_width, VALUE_WIDTH).to(tl.float32)
    logits = tl.sum(q.to(tl.float32) * k, axis=1) * factor
    return place, seen, k, v, tl.where(seen, logits, float("-inf"))


@triton.jit
def _load_means(q, key, value, log, begin, means, factor, width: tl.constexpr, value_width: tl.constexpr,
                VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """Loads a tile of means: places and which count `[C]`, keys and values `[C, ...]`, and logits `[R, C]`."""
    place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
    shift = tl.load(log + place, mask=place < means, other=float("-inf")).to(tl.float32) * LOG2E
    seen = shift > float("-inf")
    k = _gather(key, place, seen, width, q.shape[1])
    v = _gather(value, place, seen, value_width, VALUE_WIDTH)
    return place, seen, k, v, contract(q, k) * factor + shift[None, :]


@triton.jit
def _load_keys(q, key, value, place, seen, last, factor, width: tl.constexpr, value_width: tl.constexpr,
               VALUE_WIDTH: tl.constexpr):  # fmt: skip
    """Loads keys and values `[C, ...]` at places (int64), and logits `[R, C]`; rows see none after `last` `[R]`."""
    k = _gather(key, place, seen, width, q.shape[1])
    v = _gather(value, place, seen, value_width, VALUE_WIDTH)
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
    query, key, value, shared, own, seen, far_key, far_value, far_log, first, runs, out, lse,
    blocks, rows, groups, keys, chosen, owns, means, most, scale,
    section: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Reads for some rows of a block. Rows that see nothing get zeros, and -inf as logarithm of the normaliser."""
    head, block, first_asked, asked, inside, last, nearest, end, limit, run, number, others = _locate(
        seen, first, runs, blocks, rows, groups, keys, most, owns, section, TOKENS
    )
    factor = scale * LOG2E
    q = _gather(query, asked, inside, width, WIDTH)
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    key += head * keys * width
    value += head * keys * value_width

    # First, while the sums do not lie in registers as products of matrices need them.
    own += first_asked * owns
    for step in tl.range(0, others, num_stages=_AHEAD):
        _, _, _, v, logits = _load_own(q, key, value, own, inside, owns, step, factor, width, value_width, VALUE_WIDTH)
        risen = tl.maximum(top, logits)
        weights, decay = tl.exp2(logits - finite(risen)), tl.exp2(top - finite(risen))
        top, total = risen, total * decay + weights
        acc = acc * decay[:, None] + weights[:, None] * v

    far_key += head * means * width
    far_value += head * means * value_width
    for begin in range(0, means, FEATURES):
        _, _, _, v, logits = _load_means(
            q, far_key, far_value, far_log + block * means, begin, means, factor, width, value_width, VALUE_WIDTH,
            FEATURES,
        )  # fmt: skip
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    for begin in range(nearest, end, FEATURES):
        place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
        _, v, logits = _load_keys(q, key, value, place, place < end, last, factor, width, value_width, VALUE_WIDTH)
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    shared += block * chosen
    last = last * 0 + limit
    for begin in range(0, number, FEATURES):
        place, there = _places(shared, begin, number, limit, run, FEATURES)
        _, v, logits = _load_keys(q, key, value, place, there, last, factor, width, value_width, VALUE_WIDTH)
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    norm, inverse = settled(top, total)
    tl.store(lse + asked, norm * LN2, mask=inside)
    result = acc * inverse[:, None]
    store_rows(out + first_asked * value_width, value_width, result, inside, value_width, TOKENS, VALUE_WIDTH)


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
    query, key, value, shared, own, seen, far_key, far_value, far_log, first, runs, grad, out, lse,
    d_query, d_key, d_value, d_far_key, d_far_value,
    blocks, rows, groups, keys, chosen, owns, means, most, scale,
    section: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients for some rows of a block."""
    head, block, first_asked, asked, inside, last, nearest, end, limit, run, number, others = _locate(
        seen, first, runs, blocks, rows, groups, keys, most, owns, section, TOKENS
    )
    factor = scale * LOG2E
    q = _gather(query, asked, inside, width, WIDTH)
    g = _gather(grad, asked, inside, value_width, VALUE_WIDTH)
    o = _gather(out, asked, inside, value_width, VALUE_WIDTH)
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    norm = tl.load(lse + asked, mask=inside, other=float("-inf")) * LOG2E
    norm = tl.where(norm == float("-inf"), float("inf"), norm)  # no weight where nothing is seen
    dq = tl.zeros([TOKENS, WIDTH], tl.float32)
    key += head * keys * width
    value += head * keys * value_width
    d_key += head * keys * width
    d_value += head * keys * value_width

    own += first_asked * owns
    for step in tl.range(0, others, num_stages=_AHEAD):
        place, there, k, v, logits = _load_own(
            q, key, value, own, inside, owns, step, factor, width, value_width, VALUE_WIDTH
        )
        weights = tl.exp2(tl.minimum(logits - norm, _MOST))
        _add(d_value, place, there, weights[:, None] * g.to(tl.float32), value_width, VALUE_WIDTH)
        slopes = weights * (tl.sum(g.to(tl.float32) * v, axis=1) - delta)
        _add(d_key, place, there, (slopes * scale)[:, None] * q.to(tl.float32), width, WIDTH)
        dq += slopes[:, None] * k

    far_key += head * means * width
    far_value += head * means * value_width
    d_far_key += head * means * width
    d_far_value += head * means * value_width
    for begin in range(0, means, FEATURES):
        place, there, k, v, logits = _load_means(
            q, far_key, far_value, far_log + block * means, begin, means, factor, width, value_width, VALUE_WIDTH,
            FEATURES,
        )  # fmt: skip
        dq = _pull_back(
            q, g, delta, norm, k, v, logits, place, there, d_far_key, d_far_value, dq, scale, width, value_width
        )

    for begin in range(nearest, end, FEATURES):
        place = (begin + tl.arange(0, FEATURES)).to(tl.int64)
        k, v, logits = _load_keys(q, key, value, place, place < end, last, factor, width, value_width, VALUE_WIDTH)
        dq = _pull_back(
            q, g, delta, norm, k, v, logits, place, place < end, d_key, d_value, dq, scale, width, value_width
        )

    shared += block * chosen
    last = last * 0 + limit
    for begin in range(0, number, FEATURES):
        place, there = _places(shared, begin, number, limit, run, FEATURES)
        k, v, logits = _load_keys(q, key, value, place, there, last, factor, width, value_width, VALUE_WIDTH)
        dq = _pull_back(q, g, delta, norm, k, v, logits, place, there, d_key, d_value, dq, scale, width, value_width)

    store_rows(d_query + first_asked * width, width, dq * scale, inside, width, TOKENS, WIDTH)


def _launch(kernel: Any, choices: dict[int, Any], given: ChosenOperands, *others: Tensor) -> None:
    """Runs a kernel on the operands and other tensors, which are contiguous."""
    heads, blocks, rows, width = given.query.shape
    widths = (width, given.value.shape[-1])
    choices = choices[given.query.element_size()]
    if rows <= _MANY_ROWS:
        choices = {limit: tuple(one._replace(warps=4) for one in some) for limit, some in choices.items()}
    # float16 is multiplied in tf32, too, where its range is too narrow.
    chosen = tuned(kernel, choices, widths, given.query, tf32=given.query.dtype != torch.bfloat16, longest=rows)
    groups, sizes = heads // len(given.key), (given.shared.shape[-1], given.own.shape[-1], given.far_key.shape[1])

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (heads * blocks * ceil_divide(rows, meta["TOKENS"]),)

    chosen[grid](
        *(tensor.contiguous() for tensor in given[:11]),
        *others,
        *(blocks, rows, groups, given.key.shape[1], *sizes, given.most, given.scale),
        section=given.section,
        **width_constants(*widths),
    )


def forward(given: ChosenOperands) -> tuple[Tensor, Tensor]:
    """Computes output `[N, Z, B, dv]` and log normalisers `[N, Z, B]`, float32, -inf for rows that see nothing."""
    out = given.query.new_empty(*given.query.shape[:3], given.value.shape[-1])
    lse = given.query.new_empty(given.query.shape[:3], dtype=torch.float32)
    if out.numel():
        _launch(_read, _FORWARD, given, out, lse)
    return out, lse


def backward(grad: Tensor, given: ChosenOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of queries, keys, values, and mean keys and values; weights are computed again."""
    of_query = given.query.new_empty(given.query.shape)
    read = (given.key, given.value, given.far_key, given.far_value)
    sums = [tensor.new_zeros(tensor.shape, dtype=torch.float32) for tensor in read]
    if out.numel():
        _launch(_gradients, _BACKWARD, given, grad.contiguous(), out, lse, of_query, *sums)
    return (of_query, *(total.to(given.query.dtype) for total in sums))


@triton.jit(do_not_specialize=["blocks", "rows", "size", "groups", "keys", "number", "others"])
def _search(
    query, key, seen, taken, found,
    blocks, rows, size, groups, keys, number, others,
    width: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Finds the best keys of some bins for some queries; `size` rows see equally many, `taken` has `others` bins."""
    chunks, tiles = tl.cdiv(number, BINS), tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = (program % chunks).to(tl.int32) * BINS, (program // chunks % tiles).to(tl.int32) * ROWS
    block = program // chunks // tiles
    row, own = tile + tl.arange(0, ROWS), chunk + tl.arange(0, BINS)
    asked = block * rows + row
    q = load_rows(query + (block * rows + tile) * width, width, row < rows, width, ROWS, WIDTH)
    limit = tl.load(seen + asked // size, mask=row < rows, other=0).to(tl.int32)
    most = tl.max(limit, 0)
    key += (block // blocks // groups * keys + chunk) * width
    best = tl.full([ROWS, BINS], float("-inf"), tl.float32)
    found_place = tl.full([ROWS, BINS], -1, tl.int32)
    for member in range(0, tl.cdiv(most, number)):
        place = member * number + own
        there = (own < number) & (place < most)
        k = _gather(key, (member * number + tl.arange(0, BINS)).to(tl.int64), there, width, WIDTH)
        if taken is not None:
            there = there & (tl.load(taken + block * others + place % others, mask=there, other=-1) != place)
        visible = there[None, :] & (place[None, :] < limit[:, None])
        score = tl.where(visible, contract(q, k), float("-inf"))
        found_place = tl.where(score > best, place[None, :], found_place)  # of equal keys the first
        best = tl.maximum(best, score)
    mask = (row < rows)[:, None] & (own < number)[None, :]
    tl.store(found + asked[:, None] * number + own[None, :], found_place, mask=mask)


def _tiles(query: Tensor) -> tuple[int, int]:
    """Gives how many rows and bins a program searches at most: so many that nothing is spilled."""
    if interpreted():
        return 16, 16
    if padded_width(query.shape[-1]) * query.element_size() <= 256:
        return 64, 64
    return (16, 32) if query.element_size() == 4 else (32, 32)


def choose(query: Tensor, key: Tensor, seen: Tensor, taken: Tensor | None, number: int) -> Tensor:
    """Computes `favor.kernels.chosen.choose` for queries and keys in float32 or half precision."""
    heads, blocks, size, width = query.shape
    found = torch.empty(heads, blocks, size, number, dtype=torch.int32, device=query.device)
    if taken is None or not taken.shape[-1]:  # then rows of several blocks are searched for together
        taken, others, (blocks, rows) = None, 1, (1, blocks * size)
    else:
        taken, others, rows = taken.contiguous(), taken.shape[-1], size
    if found.numel():
        most = _tiles(query)
        row_tile, bin_tile = (min(one, padded_width(n)) for one, n in zip(most, (rows, number), strict=True))
        programs = heads * blocks * ceil_divide(rows, row_tile) * ceil_divide(number, bin_tile)
        _search[(programs,)](
            *(query.contiguous(), key.contiguous(), seen.contiguous(), taken, found),
            *(blocks, rows, size, heads // len(key), key.shape[1], number, others),
            width=width,
            WIDTH=padded_width(width),
            ROWS=row_tile,
            BINS=bin_tile,
        )
    return found
