"""What the chunks before (or after) each chunk leave behind: per feature a weight and the weighted mean of the values.

Forwards, over the keys: log_weight_m = offset_m + log sum_j exp(lk_jm) and the mean of v_j with these weights, over the
keys before the chunk. Backwards, over the queries of all heads of a key head: the same with logits lq_im - l_i, values
g_i, and the mean of delta_i beside them, over the queries after the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import STEEP, Blocks, Problem, corner, locate
from favor.kernels.gpu.common import LOG2E, ceil_divide, contract, finite, load_rows, mix, processors, store_rows


class States(NamedTuple):
    """States of all chunks; a slot is a chunk of a sequence.

    Attributes:
        log_weight: `[slots, Hk, M]`, base 2, -inf where there is nothing.
        summary: `[slots, Hk, M, dv]` in the type of the values.
        anchor: `[slots, Hk, M]`, the larger of log_weight and the logit of the first visible key of the chunk, offset
            included; keys only.
        steep: `[slots, Hk]`, 1 where a logit of the chunk is far above the anchor; keys only.
        share: `[slots, Hk, M]`, mean of delta; queries only.
    """

    log_weight: Tensor
    summary: Tensor
    anchor: Tensor | None = None
    steep: Tensor | None = None
    share: Tensor | None = None


_BLOCKS = {
    128: (Blocks(64, 4, 2), Blocks(64, 4, 3), Blocks(128, 8, 2), Blocks(32, 4, 3)),
    256: (Blocks(64, 4, 2), Blocks(64, 4, 3), Blocks(64, 8, 3), Blocks(32, 4, 3)),
    512: (Blocks(64, 8, 2), Blocks(32, 4, 2)),
    1024: (Blocks(32, 8, 1), Blocks(16, 4, 1)),
}


@triton.jit
def _settled(top, total):
    """Logarithm of a sum from its maximum and the rest, and the reciprocal of the rest; -inf and 0 for an empty sum."""
    empty = total == 0.0
    rest = tl.where(empty, 1.0, total)
    return tl.where(empty, float("-inf"), top + tl.log2(rest)), tl.where(empty, 0.0, 1.0 / rest)


@triton.jit
def _first_visible(logits, logit, CHUNK: tl.constexpr):
    """Column of `[M, CHUNK]` logits with the first visible key; -inf if there is none."""
    index = tl.arange(0, CHUNK)
    first = tl.min(tl.where(logit == float("-inf"), CHUNK, index), axis=0)
    return tl.sum(tl.where(index[None, :] == first, logits, 0.0), axis=1) + tl.where(first < CHUNK, 0.0, float("-inf"))


@triton.jit(do_not_specialize=["queries", "keys", "chunks", "segments"])
def _chunk_states(
    tokens,
    values,
    directions,
    offset,
    bias,
    delta,
    log_weight,
    summary,
    anchor,
    steep,
    share,
    total_weight,
    total_summary,
    total_share,
    cu_q,
    cu_k,
    queries,
    keys,
    chunks,
    segments,
    tokens_batch,
    tokens_head,
    tokens_row,
    values_batch,
    values_head,
    values_row,
    M: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    OWN: tl.constexpr,
    REVERSE: tl.constexpr,
    TOTALS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One segment of the chunks of a sequence, one key head, one block of features; backwards over queries if REVERSE.

    With TOTALS it writes what the whole segment holds, otherwise what lies before each of its chunks.
    """
    program = tl.program_id(0)
    blocks: tl.constexpr = (M + FEATURES - 1) // FEATURES
    first_feature, program = program % blocks * FEATURES, program // blocks
    segment, program = program % segments, program // segments
    landmark_head, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, slot = locate(
        sequence, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    count = tl.cdiv(key_count, CHUNK)
    length = tl.cdiv(count, segments)

    row = tl.arange(0, FEATURES)
    real = first_feature + row < M
    landmarks = (sequence * OWN * HK + landmark_head) * M + first_feature
    u = load_rows(directions + landmarks * width, width, real, width, FEATURES, WIDTH).to(tokens.dtype.element_ty)
    top = tl.full([FEATURES], float("-inf"), tl.float32)
    total = tl.zeros([FEATURES], tl.float32)
    part = tl.zeros([FEATURES], tl.float32)
    acc = tl.zeros([FEATURES, VALUE_WIDTH], tl.float32)
    if not REVERSE:
        shift = tl.load(offset + landmarks + row, mask=real, other=0.0) * LOG2E
    if not TOTALS and total_weight is not None:
        for earlier in range(0, segment):
            place = ((sequence * HK + landmark_head) * segments + earlier) * M + first_feature
            weight = tl.load(total_weight + place + row, mask=real, other=float("-inf"))
            risen = tl.maximum(top, weight)
            decay = tl.exp2(top - finite(risen))
            weight = tl.exp2(weight - finite(risen))
            total = total * decay + weight
            there = total_summary + place * value_width
            before = load_rows(there, value_width, real, value_width, FEATURES, VALUE_WIDTH)
            acc = acc * decay[:, None] + before * weight[:, None]
            if REVERSE:
                part = part * decay + tl.load(total_share + place + row, mask=real, other=0.0) * weight
            top = risen

    index = tl.arange(0, CHUNK)
    stop = tl.minimum((segment + 1) * length, count)
    if TOTALS:  # nobody asks for that of the last segment
        stop = tl.where(segment == segments - 1, 0, stop)
    for step in range(segment * length * GROUP, stop * GROUP):
        chunk = step // GROUP
        if REVERSE:
            chunk = count - 1 - chunk
        head = landmark_head * GROUP + step % GROUP
        state = ((slot + chunk) * HK + landmark_head) * M + first_feature
        if not TOTALS:
            weight, scale = _settled(top, total)
            written = real & (step % GROUP == 0)
            there = summary + state * value_width
            store_rows(there, value_width, acc * scale[:, None], written, value_width, FEATURES, VALUE_WIDTH)
            if REVERSE:
                tl.store(share + state + row, part * scale, mask=written)
            else:
                weight += shift
            tl.store(log_weight + state + row, weight, mask=written)

        if REVERSE:
            number = chunk * CHUNK - (key_count - query_count)
            token = first_query + number
            inside = (number + index >= 0) & (number + index < query_count)
            there = bias + (batch * HK * GROUP + head) * queries + token
            logit = tl.load(there + index, mask=inside, other=float("inf")) * -LOG2E
        else:
            token = first_key + chunk * CHUNK
            there = bias + (batch * HK + head) * keys + token
            logit = tl.load(there + index, mask=chunk * CHUNK + index < key_count, other=float("-inf")) * LOG2E
        # Hidden tokens may hold anything, NaN included: they are not even read.
        shown = logit > float("-inf")
        there = corner(tokens, batch, head, token, tokens_batch, tokens_head, tokens_row)
        x = load_rows(there, tokens_row, shown, width, CHUNK, WIDTH)
        there = corner(values, batch, head, token, values_batch, values_head, values_row)
        y = load_rows(there, values_row, shown, value_width, CHUNK, VALUE_WIDTH)
        logits = contract(u, x) * LOG2E + logit[None, :]
        peak = tl.max(logits, axis=1)
        if not REVERSE and not TOTALS:
            most = tl.maximum(weight, _first_visible(logits, logit, CHUNK) + shift)
            tl.store(anchor + state + row, most, mask=real)
            rise = tl.max(tl.where(real, peak + shift - finite(most), float("-inf")), axis=0)
            tl.store(steep + (slot + chunk) * HK + head, 1, mask=rise > STEEP)

        risen = tl.maximum(top, peak)
        decay = tl.exp2(top - finite(risen))
        weights = tl.exp2(logits - finite(risen)[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        acc = mix(weights, y, acc * decay[:, None])
        if REVERSE:
            there = delta + (batch * HK * GROUP + head) * queries + token
            shares = tl.load(there + index, mask=shown, other=0.0)
            part = part * decay + tl.sum(weights * shares[None, :], axis=1)
        top = risen

    if TOTALS:
        weight, scale = _settled(top, total)
        place = ((sequence * HK + landmark_head) * segments + segment) * M + first_feature
        tl.store(total_weight + place + row, weight, mask=real)
        there = total_summary + place * value_width
        store_rows(there, value_width, acc * scale[:, None], real, value_width, FEATURES, VALUE_WIDTH)
        if REVERSE:
            tl.store(total_share + place + row, part * scale, mask=real)


def key_states(problem: Problem) -> States:
    """States before each chunk, of the keys."""
    slots, offset, value = problem.slots, problem.offset, problem.value
    log_weight = offset.new_empty(slots, *offset.shape[1:])
    anchor = torch.empty_like(log_weight)
    steep = torch.zeros(log_weight.shape[:2], dtype=torch.int32, device=value.device)
    states = States(log_weight, value.new_empty(*log_weight.shape, value.shape[-1]), anchor, steep)
    _launch(problem, problem.key, value, problem.key_directions, problem.key_bias, None, states)
    return states


def query_states(problem: Problem, grad: Tensor, lse: Tensor, delta: Tensor) -> States:
    """States after each chunk, of the queries; lse and delta `[B, H, L]`."""
    offset = problem.offset
    log_weight = offset.new_empty(problem.slots, *offset.shape[1:])
    summary = grad.new_empty(*log_weight.shape, grad.shape[-1])
    states = States(log_weight, summary, share=torch.empty_like(log_weight))
    _launch(problem, problem.query, grad, problem.query_directions, lse, delta, states)
    return states


def _launch(
    problem: Problem,
    tokens: Tensor,
    values: Tensor,
    directions: Tensor,
    bias: Tensor,
    delta: Tensor | None,
    states: States,
) -> None:
    """Segments are summed up first if there is more than one, so that the second pass starts each where it should."""
    heads, features = directions.shape[1:3]
    programs = problem.sequences * heads
    segments = problem.segments
    if segments is None:
        # Two programs on each processor, as long as a segment has a few chunks.
        segments = min(2 * processors(tokens.device) // (programs * ceil_divide(features, 64)), problem.chunks // 4)
    segments = max(segments, 1)
    constants = problem.constants | {"REVERSE": delta is not None}
    if delta is None:
        constants["GROUP"] = 1
    totals: list[Tensor | None] = [None, None, None]
    if segments > 1:
        weight = states.log_weight.new_empty(programs * segments, features)
        totals = [weight, weight.new_empty(*weight.shape, values.shape[-1]), torch.empty_like(weight)]

    def grid(block: dict[str, int]) -> tuple[int]:
        return (programs * segments * ceil_divide(features, block["FEATURES"]),)

    for summing in (True, False) if segments > 1 else (False,):
        problem.tuned(_chunk_states, _BLOCKS)[grid](
            tokens,
            values,
            directions,
            problem.offset,
            bias,
            delta,
            states.log_weight,
            states.summary,
            states.anchor,
            states.steep,
            states.share,
            *totals,
            problem.cu_q,
            problem.cu_k,
            problem.query.shape[2],
            problem.key.shape[2],
            problem.chunks,
            segments,
            *tokens.stride()[:3],
            *values.stride()[:3],
            TOTALS=summing,
            **constants,
        )
