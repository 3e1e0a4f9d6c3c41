"""Summaries: for every feature, the logarithm of the summed weights of tokens and the weighted mean of their values.

    log_weight_m = logsumexp_j (x_j.u_m + bias_j),   mean_m = sum_j exp(x_j.u_m + bias_j - log_weight_m) y_j

This is softmax attention with the directions u as queries. The tokens, and the token heads that share summaries, are
divided among programs; a second kernel puts their parts together.
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
    bounds,
    ceil_divide,
    contract,
    empty_sums,
    finite,
    load_rows,
    mix,
    padded_width,
    power_of_two,
    processors,
    shared_stride,
    split_count,
    store_rows,
    strides,
    tuned,
    width_constants,
)

_BLOCKS = {
    128: (Blocks(64, 128, 8, 3), Blocks(64, 128, 4, 2), Blocks(128, 64, 4, 3)),
    256: (Blocks(64, 128, 8, 3), Blocks(32, 128, 8, 3), Blocks(64, 64, 4, 3), Blocks(32, 64, 4, 3)),
    512: (Blocks(32, 64, 8, 2), Blocks(16, 64, 4, 2)),
    1024: (Blocks(16, 32, 4, 2), Blocks(32, 32, 8, 1)),
}
_PRECISE = _BLOCKS | {512: (Blocks(16, 32, 4, 2),)}  # for float32, whose products are sums of three


class Summaries(NamedTuple):
    """Summaries, or parts of them that are still to be joined (then with one more dimension, before M).

    Attributes:
        mean: `[N, Hk, M, dv]`; parts are float32.
        log_weight: `[N, Hk, M]` float32.
        extra: `[N, Hk, M]` float32, or None.
    """

    mean: Any
    log_weight: Any
    extra: Any = None


@triton.jit(do_not_specialize=["length", "total_length", "splits"])
def _part(
    directions, tokens, bias, values, extra, cumulative, state, log_weight, extra_state,
    length, total_length, heads, group, features, splits,
    directions_sequence, tokens_batch, tokens_head, tokens_row, values_batch, values_head, values_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    feature_blocks = tl.cdiv(features, FEATURES)
    program = tl.program_id(0)
    first_feature = program % feature_blocks * FEATURES
    part = (program // feature_blocks).to(tl.int64)
    head = part // splits % heads
    sequence = part // splits // heads
    batch, start, length = bounds(cumulative, sequence, length)

    size = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    first = (part % splits).to(tl.int32) * size
    last = tl.minimum(first + size, length)

    row = tl.arange(0, FEATURES)
    real = first_feature + row < features
    directions += sequence * directions_sequence + (head // group * features + first_feature) * width
    u = load_rows(directions, width, real, width, FEATURES, WIDTH).to(tokens.dtype.element_ty)

    bias += (batch * heads + head) * total_length + start
    tokens += batch * tokens_batch + head * tokens_head + start * tokens_row
    values += batch * values_batch + head * values_head + start * values_row
    if extra is not None:
        extra += (batch * heads + head) * total_length + start

    top, total, extra_sum, acc = empty_sums(FEATURES, VALUE_WIDTH)
    for begin in range(first, last, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        if NEGATIVE:
            shift = tl.load(bias + place, mask=place < last, other=float("inf")) * -LOG2E
        else:
            shift = tl.load(bias + place, mask=place < last, other=float("-inf")) * LOG2E
        # Hidden tokens may hold anything, NaN included: they are not even read.
        visible = shift > float("-inf")
        offset = tl.cast(begin, tl.int64)
        x = load_rows(tokens + offset * tokens_row, tokens_row, visible, width, TOKENS, WIDTH)
        y = load_rows(values + offset * values_row, values_row, visible, value_width, TOKENS, VALUE_WIDTH)
        logits = contract(u, x) * LOG2E + shift[None, :]
        top, total, weights, decay = absorb(logits, top, total)
        if extra is not None:
            share = tl.load(extra + place, mask=place < last, other=0.0)
            extra_sum = extra_sum * decay + tl.sum(weights * share[None, :], 1)
        acc = mix(weights, y, acc * decay[:, None])

    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    place = part * features + first_feature
    tl.store(log_weight + place + row, tl.where(empty, float("-inf"), top + tl.log2(norm)), mask=real)
    if extra is not None:
        tl.store(extra_state + place + row, extra_sum / norm, mask=real)
    state += place * value_width
    store_rows(state, value_width, acc / norm[:, None], real, value_width, FEATURES, VALUE_WIDTH)


@triton.jit(do_not_specialize=["parts"])
def _join(
    state, log_weight, extra_state, offset, summary, out_weight, out_extra, parts, features, heads,
    offset_sequence,
    value_width: tl.constexpr, VALUE_WIDTH: tl.constexpr, PARTS: tl.constexpr, FEATURES: tl.constexpr,
    FILL: tl.constexpr, RESCALE: tl.constexpr,
):  # fmt: skip
    feature_blocks = tl.cdiv(features, FEATURES)
    program = tl.program_id(0)
    head = (program // feature_blocks).to(tl.int64)
    feature = program % feature_blocks * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, VALUE_WIDTH)
    real = feature < features
    wide = real[:, None] & (column < value_width)[None, :]

    top, total, extra, acc = empty_sums(FEATURES, VALUE_WIDTH)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        place = (head * parts + part)[:, None] * features + feature[None, :]
        here = (part < parts)[:, None] & real[None, :]
        logs = tl.load(log_weight + place, mask=here, other=float("-inf"))
        risen = tl.maximum(top, tl.max(logs, 0))
        base = finite(risen)
        weights = tl.exp2(logs - base[None, :])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 0)
        if extra_state is not None:
            extra = extra * decay + tl.sum(weights * tl.load(extra_state + place, mask=here, other=0.0), 0)
        cells = place[:, :, None] * value_width + column[None, None, :]
        means = tl.load(state + cells, mask=(part < parts)[:, None, None] & wide[None, :, :], other=0.0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * means, 0)
        top = risen

    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    log_total = top + tl.log2(norm)
    extra = extra / norm
    acc = acc / norm[:, None]
    if RESCALE:
        size = tl.maximum(tl.max(tl.abs(acc), 1), tl.abs(extra))
        power = tl.ceil(tl.log2(tl.maximum(size, 1e-30)))
        log_total += power
        acc = acc * tl.exp2(-power)[:, None]
        extra = extra * tl.exp2(-power)
    log_total = log_total * LN2
    place = head * features + feature
    if offset is not None:
        shared = head // heads * offset_sequence + head % heads * features + feature
        log_total += tl.load(offset + shared, mask=real, other=0.0)
    if FILL:
        log_total = tl.where(empty, 0.0, log_total)
    if out_weight is not None:
        tl.store(out_weight + place, log_total, mask=real)
    if out_extra is not None:
        tl.store(out_extra + place, extra, mask=real)
    cells = place[:, None] * value_width + column[None, :]
    if summary is not None:
        tl.store(summary + cells, acc.to(summary.dtype.element_ty), mask=wide)


def join(parts: Summaries, into: Summaries, offset: Tensor | None = None, fill: bool = False, rescale: bool = False):
    """Joins weighted means over their third dimension.

    Args:
        parts: mean `[N, H, P, M, dv]`; log_weight, in base 2, and extra `[N, H, P, M]`.
        into: where to write; what is None is left out.
        offset: `[n, H, M]`, added to the joint log_weight, which is in base e.
        fill: write the weight 0, not -inf, where nothing was seen.
        rescale: move the magnitude of every mean, and of its extra, into its weight, as a power of two. The means may
            then be rounded to half precision without underflow.
    """
    sequences, heads, count, features, width = parts.mean.shape
    block = min(power_of_two(count), 16)
    rows = 32 // block
    grid = (sequences * heads * ceil_divide(features, rows),)
    if not grid[0]:
        return
    _join[grid](
        *parts[:3],
        offset,
        *into,
        *(count, features, heads),
        0 if offset is None else shared_stride(offset),
        value_width=width,
        VALUE_WIDTH=padded_width(width),
        PARTS=block,
        FEATURES=rows,
        FILL=fill,
        RESCALE=rescale,
    )


def collect(
    directions: Tensor,
    tokens: Tensor,
    bias: Tensor,
    values: Tensor,
    cumulative: Tensor | None,
    max_length: int,
    extra: Tensor | None = None,
    splits: int | None = None,
) -> Summaries:
    """Collects the parts that `join` puts together.

    Args:
        directions: `[n, Hk, M, d]`, contiguous; n is the number of sequences N, or 1.
        tokens: `[B, Ht, T, d]`, Ht a multiple of Hk: consecutive heads share their summaries.
        bias: `[B, Ht, T]` float32, contiguous; -inf hides a token, whatever it and its value hold. With `extra` it is
            subtracted, not added.
        values: `[B, Ht, T, dv]` in the type of `tokens`.
        cumulative: cumulative lengths `[N + 1]` of packed sequences, or None.
        max_length: the largest length.
        extra: `[B, Ht, T]` float32, one more column of values, averaged in float32; or None.
        splits: into how many pieces to cut the tokens; by default, as many as fill the device.
    """
    batch, heads, total_length, width = tokens.shape
    sequences = batch if cumulative is None else cumulative.shape[0] - 1
    key_heads, features = directions.shape[1:3]
    value_width = values.shape[-1]
    if splits is None:
        programs = sequences * heads * ceil_divide(features, 128)
        splits = split_count(programs, max_length, 2 * processors(tokens.device))
    shape = (sequences, key_heads, heads // key_heads * splits, features)
    parts = Summaries(
        bias.new_empty(*shape, value_width),
        bias.new_empty(shape),
        None if extra is None else bias.new_empty(shape),
    )
    count = sequences * heads * splits
    if not count:
        return parts
    length = max_length if cumulative is not None else total_length
    choices = _PRECISE if tokens.element_size() == 4 else _BLOCKS
    kernel = tuned(_part, choices, (width, value_width), tokens)
    kernel[lambda block: (count * ceil_divide(features, block["FEATURES"]),)](
        *(directions, tokens, bias, values, extra, cumulative, *parts[:3]),
        *(length, total_length, heads, heads // key_heads, features, splits),
        *(shared_stride(directions), *strides(tokens, values)),
        **width_constants(width, value_width),
        NEGATIVE=extra is not None,
    )
    return parts


def summarise(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the summaries of the tokens of each sequence; the arguments are those of `collect`.

    Returns:
        mean `[N, Hk, M, dv]`, log_weight `[N, Hk, M]` and the mean of extra `[N, Hk, M]` (or None), float32; 0, -inf
        and 0 for a sequence without a visible token.
    """
    parts = collect(*arguments, **options)
    into = empty_summaries(parts)
    join(parts, into)
    return into.mean, into.log_weight, into.extra


def empty_summaries(parts: Summaries) -> Summaries:
    """Makes memory for what `parts` add up to."""
    sequences, heads, _, features, width = parts.mean.shape
    mean = parts.mean.new_empty(sequences, heads, features, width)
    log_weight = mean.new_empty(sequences, heads, features)
    return Summaries(mean, log_weight, None if parts.extra is None else torch.empty_like(log_weight))
