"""Moments of queries and keys of every key head, in pieces of their tokens: one launch, two with weights of keys.

A piece has the sum of its weights, its weighted mean, and the weighted sum of (r - mean)(r - mean)', or the diagonal of
that. Pieces are added up (`joined`) without any difference of large numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LOG2E,
    absorb,
    contract,
    finite,
    load_rows,
    load_tile,
    padded_width,
    processors,
    settled,
    split_count,
    store_rows,
    strides,
)

_TOKENS = 64
_MARKS = tl.constexpr(1024)  # entries of a mask that are counted at a time


class Pieces(NamedTuple):
    """Pieces of the queries, and after them pieces of the keys.

    Attributes:
        weight: `[P]`.
        mean: `[P, d]`.
        scatter: `[P, d, d]`, or its diagonals `[P, d]`.
        queries, keys: pieces of each key head.
        first_key: the first piece of keys.
    """

    weight: Tensor
    mean: Tensor
    scatter: Tensor
    queries: int
    keys: int
    first_key: int


@triton.jit
def _places(mask, length, group, number, ROWS: tl.constexpr):
    """Gives places of `number` evenly spaced rows `[ROWS]` among those of `group` heads that count, and how many do."""
    steps = (tl.arange(0, ROWS).to(tl.float32) + 0.5) / tl.cast(number, tl.float32)
    if mask is None:
        return (steps * tl.cast(group * length, tl.float32)).to(tl.int64), group * length
    else:
        mark = tl.arange(0, _MARKS)
        count = tl.sum(mark * 0)
        for begin in range(0, length, _MARKS):
            count += tl.sum((tl.load(mask + begin + mark, mask=begin + mark < length, other=0) != 0).to(tl.int32))
        wanted = (steps * tl.cast(group * count, tl.float32)).to(tl.int32)
        own = tl.maximum(count, 1)
        head, wanted = wanted // own, wanted % own
        place = wanted * 0
        before = count * 0
        for begin in range(0, length, _MARKS):
            real = tl.load(mask + begin + mark, mask=begin + mark < length, other=0) != 0
            passed = before + tl.cumsum(real.to(tl.int32), 0)  # rows that count, up to each
            skipped = (passed[None, :] <= wanted[:, None]) & (begin + mark < length)[None, :]
            place += tl.sum(skipped.to(tl.int32), 1)
            before += tl.sum(real.to(tl.int32))
        return head.to(tl.int64) * length + tl.minimum(place, length - 1), count


@triton.jit(do_not_specialize=["length", "keys", "splits"])
def _attention(
    query, key, query_mask, key_mask, asked, log_sum,
    length, keys, heads, group, splits, number, scale,
    query_batch, query_head, query_row, key_batch, key_head, key_row, query_mask_batch, key_mask_batch,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums exp(logits) of some queries over a piece of the keys of one key head; also copies these queries."""
    program = tl.program_id(0).to(tl.int64)
    owner, split = program // splits, (program % splits).to(tl.int32)
    head, batch = owner % heads, owner // heads
    if query_mask is not None:
        query_mask += batch * query_mask_batch
    place, count = _places(query_mask, length, group, number, ROWS)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (row < number) & (count > 0)
    there = query + batch * query_batch + (head * group + place // length) * query_head + place % length * query_row
    q = tl.load(there[:, None] + column[None, :], mask=real[:, None] & (column < width)[None, :], other=0.0)
    store_rows(asked + owner * ROWS * width, width, q, (row < ROWS) & (split == 0), width, ROWS, WIDTH)

    size = tl.cdiv(tl.cdiv(keys, splits), TOKENS) * TOKENS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(split * size, tl.minimum(split * size + size, keys), TOKENS):
        index = begin + tl.arange(0, TOKENS)
        shown = index < keys
        if key_mask is not None:
            shown &= tl.load(key_mask + batch * key_mask_batch + index, mask=shown, other=0) != 0
        first = tl.cast(begin, tl.int64)
        k = load_tile(key, batch, head, first, key_batch, key_head, key_row, shown, width, WIDTH)
        logits = contract(q, k) * (scale * LOG2E)
        top, total, _, _ = absorb(tl.where(shown[None, :], logits, float("-inf")), top, total)
    found, _ = settled(top, total)
    tl.store(log_sum + program * ROWS + row, tl.where(row < number, found, float("-inf")))


@triton.jit
def _normaliser(log_sum, splits, ROWS: tl.constexpr):
    """Joins the sums of all pieces `[splits, ROWS]`; infinity for a query that sees nothing."""
    row = tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for piece in range(splits):
        found = tl.load(log_sum + piece * ROWS + row)
        risen = tl.maximum(top, found)
        total = total * tl.exp2(top - finite(risen)) + tl.exp2(found - finite(risen))
        top = risen
    found, _ = settled(top, total)
    return tl.where(found == float("-inf"), float("inf"), found)


@triton.jit
def _sum_up(
    rows, mask, asked, log_sum, weight, mean, scatter, place, owner, batch, head, part, splits, length, number, scale,
    mask_batch, rows_batch, rows_head, rows_row,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sums up a piece of the tokens of one head; with `asked`, weighted by the attention that these queries pay."""
    columns = tl.arange(0, WIDTH)
    total = tl.sum(tl.zeros([WIDTH], tl.float32))
    centre = tl.zeros([WIDTH], tl.float32)
    spread = tl.zeros([WIDTH, WIDTH] if FULL else [WIDTH], tl.float32)
    if asked is not None:
        q = load_rows(asked + owner * ROWS * width, width, tl.arange(0, ROWS) < ROWS, width, ROWS, WIDTH)
        norm = _normaliser(log_sum + owner * splits * ROWS, splits, ROWS)
    size = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    start = part.to(tl.int32) * size
    for begin in range(start, tl.minimum(start + size, length), TOKENS):
        index = begin + tl.arange(0, TOKENS)
        shown = index < length
        if mask is not None:
            shown &= tl.load(mask + batch * mask_batch + index, mask=shown, other=0) != 0
        first = tl.cast(begin, tl.int64)
        # Tokens that do not count may hold anything, NaN included: they are not even read.
        r = load_tile(rows, batch, head, first, rows_batch, rows_head, rows_row, shown, width, WIDTH)
        w = shown.to(tl.float32)
        if asked is not None:
            paid = tl.exp2(contract(r, q) * (scale * LOG2E) - norm[None, :])
            w = tl.where(shown, tl.sum(paid, 1) / number, 0.0)
        r = r.to(tl.float32)
        own = tl.sum(w)
        middle = tl.sum(r * w[:, None], 0) / tl.where(own == 0.0, 1.0, own)
        r = tl.where(shown[:, None], r - middle[None, :], 0.0)
        away, risen = middle - centre, total + own
        share = own / tl.where(risen == 0.0, 1.0, risen)
        if FULL:
            spread = tl.dot(tl.trans(r * w[:, None]), r, acc=spread, input_precision="tf32x3")
            spread += away[:, None] * away[None, :] * (total * share)
        else:
            spread += tl.sum(r * r * w[:, None], 0) + away * away * (total * share)
        centre += away * share
        total = risen
    tl.store(weight + place, total)
    tl.store(mean + place * width + columns, centre, mask=columns < width)
    if FULL:
        store_rows(scatter + place * width * width, width, spread, columns < width, width, WIDTH, WIDTH)
    else:
        tl.store(scatter + place * width + columns, spread, mask=columns < width)


@triton.jit(do_not_specialize=["length", "keys", "splits", "key_splits"])
def _pieces(
    query, key, query_mask, key_mask, asked, log_sum, weight, mean, scatter,
    length, keys, heads, group, splits, key_splits, first_key, number, scale,
    query_batch, query_head, query_row, key_batch, key_head, key_row, query_mask_batch, key_mask_batch,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sums up a piece of queries, or after these of keys."""
    program = tl.program_id(0).to(tl.int64)
    if program < first_key:
        owner = program // splits
        _sum_up(
            query, query_mask, None, None, weight, mean, scatter, program,
            owner, owner // (heads * group), owner % (heads * group), program % splits, splits, length, number, scale,
            query_mask_batch, query_batch, query_head, query_row, width, WIDTH, TOKENS, ROWS, FULL,
        )  # fmt: skip
    else:
        owner = (program - first_key) // key_splits
        _sum_up(
            key, key_mask, asked, log_sum, weight, mean, scatter, program,
            owner, owner // heads, owner % heads, (program - first_key) % key_splits, key_splits, keys, number, scale,
            key_mask_batch, key_batch, key_head, key_row, width, WIDTH, TOKENS, ROWS, FULL,
        )  # fmt: skip


@triton.jit
def joined(weight, mean, scatter, first, count, root, width: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Adds up pieces: mean `[WIDTH]` and covariance `[WIDTH, WIDTH]`, or its diagonal, of `root` times the tokens."""
    columns = tl.arange(0, WIDTH)
    total = tl.sum(tl.zeros([WIDTH], tl.float32))
    centre = tl.zeros([WIDTH], tl.float32)
    spread = tl.zeros([WIDTH, WIDTH] if FULL else [WIDTH], tl.float32)
    for piece in range(first, first + count):
        own = tl.load(weight + piece)
        away = tl.load(mean + piece * width + columns, mask=columns < width, other=0.0) - centre
        risen = total + own
        share = own / tl.where(risen == 0.0, 1.0, risen)
        if FULL:
            spread += load_rows(scatter + piece * width * width, width, columns < width, width, WIDTH, WIDTH)
            spread += away[:, None] * away[None, :] * (total * share)
        else:
            spread += tl.load(scatter + piece * width + columns, mask=columns < width, other=0.0)
            spread += away * away * (total * share)
        centre += away * share
        total = risen
    return centre * root, spread * (root * root / tl.where(total == 0.0, 1.0, total))


def pieces(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    number: int = 0,
    full: bool = True,
) -> Pieces:
    """Computes moments of queries and keys in pieces; the query heads of a key head are pooled.

    Args:
        query, key: `[B, H, L, d]` and `[B, Hk, S, d]` of the same type, d at most 128 (64 if `full`).
        query_mask, key_mask: boolean `[B, L]` and `[B, S]`, True for tokens that count; None for all.
        scale: of the logits.
        number: weigh keys by the attention of this many evenly spaced queries; 0 weighs them alike.
        full: whole covariances, or their diagonals only.
    """
    (batch, heads, length, width), (key_heads, keys) = query.shape, key.shape[1:3]
    slots = 2 * processors(query.device)
    splits, key_splits = split_count(batch * heads, length, slots), split_count(batch * key_heads, keys, slots)
    masks = [mask if mask is None or mask.stride(-1) == 1 else mask.contiguous() for mask in (query_mask, key_mask)]
    steps = (*strides(query, key), *(0 if mask is None else mask.stride(0) for mask in masks))
    sizes = (length, keys, key_heads, heads // key_heads)
    constants = {"width": width, "WIDTH": padded_width(width), "TOKENS": _TOKENS, "ROWS": padded_width(max(number, 1))}
    first_key = batch * heads * splits
    count = first_key + batch * key_heads * key_splits
    weight = torch.empty(count, dtype=torch.float32, device=query.device)
    mean = weight.new_empty(count, width)
    scatter = weight.new_empty(count, width, *((width,) if full else ()))
    asked = log_sum = None
    with torch.cuda.device_of(query):
        if number:
            owners = batch * key_heads
            asked = query.new_empty(owners, constants["ROWS"], width)
            log_sum = weight.new_empty(owners, key_splits, constants["ROWS"])
            arguments = (query, key, *masks, asked, log_sum, *sizes, key_splits, number, scale, *steps)
            _attention[(owners * key_splits,)](*arguments, **constants, num_warps=8 if width <= 32 else 4)
        arguments = (query, key, *masks, asked, log_sum, weight, mean, scatter, *sizes)
        constants |= {"FULL": full, "TOKENS": 32}
        _pieces[(count,)](*arguments, splits, key_splits, first_key, number, scale, *steps, **constants)
    return Pieces(weight, mean, scatter, heads // key_heads * splits, key_splits, first_key)
