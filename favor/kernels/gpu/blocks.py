"""Tokens in blocks for windowed attention: where a block lies in memory, and what the other blocks leave behind.

Queries belong to the last keys: query i of a causal sequence with L queries and S keys has position S - L + i, and
block b of w tokens holds the keys and the queries with positions [b w, (b + 1) w). Without causality L = S. Exponents
are in base 2.

A state is what other blocks leave behind. Forwards, over the keys: log_weight_m = offset_m + log sum_j exp(lk_jm) and
the mean of v_j with these weights. Backwards, over the queries of all heads of a key head: this weight and mean with
logits lq_im - l_i and values g_i, and the mean of delta_i. One kernel sums up every block; another sweeps over the
blocks and joins those before each, those after it, or both. Nothing is subtracted.

Whatever is kept per block is stored `[slots, B, Hk, M, ...]`, see `favor.kernels.eager.window`: block b of a packed
sequence has slot cu_k[sequence] // w + sequence + b, that of a batch slot b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu import common
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
    load_tile,
    mix,
    processors,
    settled,
    store_rows,
    strides,
)

# For float32, in every kernel.
_PRECISE = {
    128: (Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2)),
    256: (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 2)),
    512: (Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 1)),
    1024: (Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1)),
}


@dataclass(frozen=True)
class Problem(common.Problem):
    """A call of windowed attention, cut into blocks; there is a bias of the queries."""

    precise = _PRECISE
    key = ("window", "WIDTH", "VALUE_WIDTH", "IS_CAUSAL")

    @property
    def window(self) -> int:
        """Tokens of a block, w."""
        return self.geometry.window

    @property
    def longest_tile(self) -> int:
        """Tokens that a tile may have: those of a block."""
        return self.window

    @property
    def slots(self) -> int:
        """Blocks to make room for."""
        return self.operands.key.shape[2] // self.window + (1 if self.geometry.cu_k is None else self.sequences)

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return ceil_divide(self.geometry.max_k, self.window)

    @property
    def query_blocks(self) -> int:
        """Blocks with queries, of the sequence with most of them."""
        return min(self.blocks, ceil_divide(self.geometry.max_q, self.window) + self.geometry.is_causal)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return min(self.window, self.geometry.max_k)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Where sequences start, how long they are together, rows of the batch, and the size of a block."""
        batch, _, queries = self.operands.query.shape[:3]
        return (*self.geometry[:2], queries, self.operands.key.shape[2], batch, self.window)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for which kernels are compiled."""
        return super().constants | {"IS_CAUSAL": self.geometry.is_causal}

    def launch(
        self, kernel: Any, heads: int, blocks: int, tensors: tuple[Any, ...], strided: tuple[Tensor, ...]
    ) -> None:
        """Launches a kernel that takes `tensors`, and strides of the inputs and of `strided`, for tiles of blocks."""
        count = self.sequences * heads * blocks
        if count:
            sizes = (*self.sizes, blocks, self.longest, self.geometry.scale)
            kernel[lambda block: (count * ceil_divide(self.longest, block["TOKENS"]),)](
                *tensors, *sizes, *self.strides, *strides(*strided), **self.constants
            )


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL: tl.constexpr):
    """Tells where a sequence lies.

    Returns:
        batch row, first query, number of queries, first key, number of keys, position of the first query, first slot.
    """
    batch, first_query, query_count = bounds(cu_q, sequence, queries)
    _, first_key, key_count = bounds(cu_k, sequence, keys)
    prefix = key_count - query_count if IS_CAUSAL else query_count * 0
    if cu_k is None:
        return batch, first_query, query_count, first_key, key_count, prefix, sequence * 0
    else:
        return batch, first_query, query_count, first_key, key_count, prefix, first_key // window + sequence


@triton.jit
def locate_tile(
    cu_q, cu_k, queries, keys, window, blocks, longest,
    HK: tl.constexpr, MEMBERS: tl.constexpr, IS_CAUSAL: tl.constexpr, OF_QUERIES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Locates the tile of queries, or of keys, of this program; tiles that share summaries come one after another.

    Returns:
        head, key head, sequence, batch row and slot; rows of the tensors of queries and of keys at position 0; position
        of the tile, of the first token of its block, of the first query there, and of the end of the block; whether
        there are tokens outside of the block that it exchanges something with.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(longest, TOKENS)
    tile, program = program % tiles, program // tiles
    member, program = program % MEMBERS, program // MEMBERS
    block, program = program % blocks, program // blocks
    source, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, prefix, slot = locate(
        sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL
    )
    if OF_QUERIES:
        block += prefix // window
    first = block * window
    start = tl.maximum(first, prefix)
    stop = tl.minimum(tl.minimum(first + window, key_count), prefix + query_count)
    head = source * MEMBERS + member
    position = first + tile * TOKENS
    before, after = first > 0, first + window < key_count
    if not IS_CAUSAL:
        before = before | after
        after = before
    slot += block
    query_zero = first_query - prefix
    exchanges = before if OF_QUERIES else after
    return head, source, sequence, batch, slot, query_zero, first_key, position, first, start, stop, exchanges


@triton.jit
def load_keys(
    q, own, place, begin, last, scale, key, value, key_bias, batch, source, key_zero,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    width: tl.constexpr, value_width: tl.constexpr, VALUE_WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loads some keys of a block, as a tile of queries sees them.

    Args:
        q, own, place: queries `[R, WIDTH]`, what to subtract from their logits in base 2, and their positions `[R]`.
        begin, last: the first position, and the one at which to stop.

    Returns:
        keys `[COLUMNS, WIDTH]`, values `[COLUMNS, VALUE_WIDTH]`, and logits `[R, COLUMNS]` in base 2.
    """
    column = begin + tl.arange(0, COLUMNS)
    shown = tl.load(key_bias + column, mask=column < last, other=float("-inf")) > float("-inf")
    row = key_zero + begin
    k = load_tile(key, batch, source, row, key_batch, key_head, key_row, shown, width, q.shape[1])
    v = load_tile(value, batch, source, row, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
    logits = contract(q, k) * (scale * LOG2E) - own[:, None]
    logits += tl.where(shown, 0.0, float("-inf"))[None, :]
    if IS_CAUSAL:
        logits = tl.where(column[None, :] <= place[:, None], logits, float("-inf"))
    return k, v, logits


class States(NamedTuple):
    """States of all blocks.

    Attributes:
        log_weight: `[slots, B, Hk, M]` float32, -inf where there is nothing.
        summary: `[slots, B, Hk, M, dv]`, zeros where there is nothing.
        share: `[slots, B, Hk, M]` float32, mean of delta; queries only.
    """

    log_weight: Tensor
    summary: Tensor
    share: Tensor | None = None


_BLOCKS = {
    128: (Blocks(64, 128, 8, 3), Blocks(128, 128, 8, 3), Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 3)),
    256: (Blocks(32, 128, 8, 3), Blocks(64, 128, 8, 3), Blocks(64, 64, 4, 3), Blocks(32, 64, 4, 3)),
    512: (Blocks(32, 64, 8, 2), Blocks(16, 64, 4, 2)),
    1024: (Blocks(16, 32, 4, 2), Blocks(32, 32, 8, 1)),
}


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks"])
def _block_states(
    tokens, values, directions, bias, delta, log_weight, summary, share,
    cu_q, cu_k, queries, keys, batches, window, blocks,
    tokens_batch, tokens_head, tokens_row, values_batch, values_head, values_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, IS_CAUSAL: tl.constexpr, OF_QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums up one block of tokens for one key head and one block of features."""
    program = tl.program_id(0)
    feature_blocks: tl.constexpr = (M + FEATURES - 1) // FEATURES
    first_feature, program = program % feature_blocks * FEATURES, program // feature_blocks
    block, program = program % blocks, program // blocks
    source, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, prefix, slot = locate(
        sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL
    )
    if (block * window >= key_count) | (window >= key_count):  # the only block of a sequence is not needed
        return
    start = block * window
    stop = tl.minimum(start + window, key_count)
    token = first_key
    length = keys
    if OF_QUERIES:
        start = tl.maximum(start - prefix, 0)
        stop = tl.minimum(stop - prefix, query_count)
        token = first_query
        length = queries

    row = tl.arange(0, FEATURES)
    real = first_feature + row < M
    directions += ((sequence * OWN * HK + source) * M + first_feature) * width
    u = load_rows(directions, width, real, width, FEATURES, WIDTH).to(tokens.dtype.element_ty)

    top, total, part, acc = empty_sums(FEATURES, VALUE_WIDTH)
    index = tl.arange(0, TOKENS)
    for step in range(0, tl.cdiv(tl.maximum(stop - start, 0), TOKENS) * GROUP):
        head = source * GROUP + step % GROUP
        begin = start + step // GROUP * TOKENS
        inside = begin + index < stop
        place = (batch * HK * GROUP + head) * length + token + begin
        if OF_QUERIES:
            shift = tl.load(bias + place + index, mask=inside, other=float("inf")) * -LOG2E
        else:
            shift = tl.load(bias + place + index, mask=inside, other=float("-inf")) * LOG2E
        # Hidden tokens may hold anything, NaN included: they are not even read.
        shown = shift > float("-inf")
        x = load_tile(tokens, batch, head, token + begin, tokens_batch, tokens_head, tokens_row, shown, width, WIDTH)
        y = load_tile(
            values, batch, head, token + begin, values_batch, values_head, values_row, shown, value_width, VALUE_WIDTH
        )
        logits = contract(u, x) * LOG2E + shift[None, :]
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, y, acc * decay[:, None])
        if OF_QUERIES:
            shares = tl.load(delta + place + index, mask=shown, other=0.0)
            part = part * decay + tl.sum(weights * shares[None, :], axis=1)

    weight, norm = settled(top, total)
    place = (((slot + block) * batches + batch) * HK + source) * M + first_feature
    tl.store(log_weight + place + row, weight, mask=real)
    if OF_QUERIES:
        tl.store(share + place + row, part * norm, mask=real)
    summary += place * value_width
    store_rows(summary, value_width, acc * norm[:, None], real, value_width, FEATURES, VALUE_WIDTH)


@triton.jit
def _load_state(
    log_weight, summary, share, place, real, value_width: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr
):
    """Loads log weight `[ROWS]`, mean `[ROWS, W]` float32 and mean share `[ROWS]`, or 0, from row `place` on."""
    row = tl.arange(0, ROWS)
    weight = tl.load(log_weight + place + row, mask=real, other=float("-inf"))
    mean = load_rows(summary + place * value_width, value_width, real, value_width, ROWS, W).to(tl.float32)
    mean_share = tl.zeros([ROWS], tl.float32)
    if share is not None:
        mean_share = tl.load(share + place + row, mask=real, other=0.0)
    return weight, mean, mean_share


@triton.jit
def _add(top, total, acc, part, weight, mean, mean_share):
    """Adds one more mean, with its weight, to sums times exp2(-top)."""
    risen = tl.maximum(top, weight)
    decay, factor = tl.exp2(top - finite(risen)), tl.exp2(weight - finite(risen))
    acc = acc * decay[:, None] + mean * factor[:, None]
    return risen, total * decay + factor, acc, part * decay + mean_share * factor


@triton.jit(do_not_specialize=["keys", "batches"])
def _outside(
    log_weight, summary, share, offset, out_weight, out_summary, out_share,
    cu_k, keys, batches, window,
    M: tl.constexpr, HK: tl.constexpr, value_width: tl.constexpr, OWN: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums for one sequence, one key head and one block of features; log weights come out in base e, with the offset.

    The first sweep leaves in the output what lies before each block, which the second one reads again.
    """
    program = tl.program_id(0)
    feature_blocks: tl.constexpr = (M + FEATURES - 1) // FEATURES
    first_feature, program = program % feature_blocks * FEATURES, program // feature_blocks
    source, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, _, _, _, key_count, _, slot = locate(sequence, cu_k, cu_k, keys, keys, window, False)
    count = tl.cdiv(key_count, window)
    row = tl.arange(0, FEATURES)
    real = first_feature + row < M
    known = first_feature + row < tl.where(count > 1, M, 0)  # the only block of a sequence is not summed up
    offset += (sequence * OWN * HK + source) * M + first_feature
    shift = tl.load(offset + row, mask=real, other=0.0)
    first = ((slot * batches + batch) * HK + source) * M + first_feature
    stride = batches.to(tl.int64) * HK * M

    if BEFORE:
        top, total, part, acc = empty_sums(FEATURES, VALUE_WIDTH)
        for block in tl.range(0, count, num_stages=STAGES):
            place = first + block * stride
            weight, norm = settled(top, total)
            if not AFTER:
                weight = weight * LN2 + shift
            tl.store(out_weight + place + row, weight, mask=real)
            there = out_summary + place * value_width
            store_rows(there, value_width, acc * norm[:, None], real, value_width, FEATURES, VALUE_WIDTH)
            if share is not None:
                tl.store(out_share + place + row, part * norm, mask=real)
            weight, mean, mean_share = _load_state(
                log_weight, summary, share, place, known, value_width, FEATURES, VALUE_WIDTH
            )
            top, total, acc, part = _add(top, total, acc, part, weight, mean, mean_share)
    if BEFORE and AFTER:
        tl.debug_barrier()  # every thread sees what the others wrote
    if AFTER:
        top, total, part, acc = empty_sums(FEATURES, VALUE_WIDTH)
        for step in tl.range(0, count, num_stages=STAGES):
            place = first + (count - 1 - step) * stride
            all_top, all_total, all_acc, all_part = top, total, acc, part
            if BEFORE:
                weight, mean, mean_share = _load_state(
                    out_weight, out_summary, out_share, place, real, value_width, FEATURES, VALUE_WIDTH
                )
                all_top, all_total, all_acc, all_part = _add(top, total, acc, part, weight, mean, mean_share)
            weight, norm = settled(all_top, all_total)
            tl.store(out_weight + place + row, weight * LN2 + shift, mask=real)
            there = out_summary + place * value_width
            store_rows(there, value_width, all_acc * norm[:, None], real, value_width, FEATURES, VALUE_WIDTH)
            if share is not None:
                tl.store(out_share + place + row, all_part * norm, mask=real)
            weight, mean, mean_share = _load_state(
                log_weight, summary, share, place, known, value_width, FEATURES, VALUE_WIDTH
            )
            top, total, acc, part = _add(top, total, acc, part, weight, mean, mean_share)


def key_states(problem: Problem) -> States:
    """Computes the states of the keys outside each block that its queries may see, in the type of the values."""
    _, key, value, _, directions, _, bias, _ = problem.operands
    parts = _sum_blocks(problem, (key, value, directions, bias, None), value.dtype)
    return _join_outside(problem, parts, before=True, after=not problem.geometry.is_causal)


def query_states(problem: Problem, grad: Tensor, lse: Tensor, delta: Tensor) -> States:
    """Computes the states of the queries outside each block that may see its keys; lse and delta `[B, H, L]`.

    For float16 the states are float32: gradients may be too small for float16.
    """
    dtype = torch.float32 if grad.dtype == torch.float16 else grad.dtype
    tensors = (problem.operands.query, grad, problem.operands.query_directions, lse, delta)
    return _join_outside(
        problem, _sum_blocks(problem, tensors, dtype), before=not problem.geometry.is_causal, after=True
    )


def _sum_blocks(problem: Problem, tensors: tuple[Any, ...], dtype: torch.dtype) -> States:
    """Computes the states of every block, log weights in base 2 and without the offset.

    Args:
        tensors: tokens, values, directions, bias and delta; no delta for keys.
        dtype: type of the means.
    """
    tokens, values, directions, _, delta = tensors
    parts = _empty(problem, dtype, delta is not None)
    constants = problem.constants | {"OF_QUERIES": delta is not None}
    if delta is None:
        constants["GROUP"] = 1
    count = problem.sequences * directions.shape[1] * problem.blocks

    def grid(block: dict[str, int]) -> tuple[int]:
        return (count * ceil_divide(directions.shape[2], block["FEATURES"]),)

    if count:
        arguments = (*tensors, *parts, *problem.sizes, problem.blocks, *strides(tokens, values))
        problem.tuned(_block_states, _BLOCKS)[grid](*arguments, **constants)
    return parts


def _join_outside(problem: Problem, parts: States, before: bool, after: bool) -> States:
    """Computes the states outside of every block. Sweeps wait for memory, so they are cut until many run at once."""
    found = _empty(problem, parts.summary.dtype, parts.share is not None)
    key, offset, cu_k = problem.operands.key, problem.operands.offset, problem.geometry.cu_k
    constants = {name: problem.constants[name] for name in ("M", "HK", "OWN", "value_width", "VALUE_WIDTH")}
    programs, features, width = problem.sequences * constants["HK"], constants["M"], constants["VALUE_WIDTH"]
    block = max(1, 2048 // width)
    while block * width > 256 and programs * ceil_divide(features, block) < 6 * processors(key.device):
        block //= 2
    if programs * problem.blocks:
        constants |= {"BEFORE": before, "AFTER": after, "FEATURES": block, "STAGES": 4}
        _outside[(programs * ceil_divide(features, block),)](
            *parts, offset, *found, cu_k, key.shape[2], key.shape[0], problem.window,
            num_warps=max(1, block * width // 256), **constants,
        )  # fmt: skip
    return found


def _empty(problem: Problem, dtype: torch.dtype, shares: bool) -> States:
    """Makes uninitialised states, with summaries of this type."""
    key, value, offset = problem.operands.key, problem.operands.value, problem.operands.offset
    heads, features = offset.shape[1:]
    log_weight = offset.new_empty(problem.slots, key.shape[0], heads, features)
    summary = value.new_empty(*log_weight.shape, value.shape[-1], dtype=dtype)
    return States(log_weight, summary, torch.empty_like(log_weight) if shares else None)
