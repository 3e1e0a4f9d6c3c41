"""How causal attention is cut into chunks: where a chunk lies in memory, and the states before and after each.

Queries belong to the last keys. Positions are those of the keys: query i of a sequence with L queries and S keys has
position S - L + i, and chunk c holds the keys and the queries with positions [c C, (c + 1) C).
Exponents are kept in base 2.

A state is what other chunks leave, per feature a weight and the weighted mean of values. Forwards, over the keys:
log_weight_m = offset_m + log sum_j exp(lk_jm) and the mean of v_j with these weights, over the keys before the chunk.
Backwards, over the queries of all heads of a key head: this weight and mean with logits lq_im - l_i and values g_i, and
the mean of delta_i, over the queries after the chunk.

States are stored per chunk, those of the key heads of a chunk together. The chunks of a packed sequence start at slot
cu_k[sequence] // C + sequence: far enough apart, and known without counting the chunks of the sequences before.
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
    padded_width,
    processors,
    settled,
    store_rows,
    strides,
    wide,
)
from favor.kernels.operands import Geometry, Operands

# Logits (base 2) may rise by this much in a chunk, above what its first query sees, before the fast kernels refuse it.
STEEP = tl.constexpr(57.0)

# For float32, in every kernel.
_PRECISE = {
    256: (Blocks(None, 16, 8, 2), Blocks(None, 16, 4, 2), Blocks(None, 32, 8, 2)),
    512: (Blocks(None, 16, 8, 2), Blocks(None, 16, 8, 1)),
    1024: (Blocks(None, 16, 8, 1),),
}


@dataclass(frozen=True)
class Problem(common.Problem):
    """A call of causal attention, cut into chunks.

    Attributes:
        chunk: tokens in a chunk, C.
        segments: parts into which the pass over the chunks is cut; None to choose.
    """

    chunk: int
    segments: int | None = None

    precise = _PRECISE
    key = ("CHUNK", "WIDTH", "VALUE_WIDTH")

    @classmethod
    def of(
        cls, operands: Operands, geometry: Geometry, chunk_size: int | None = None, segments: int | None = None
    ) -> Problem:
        """Describes a call with chunks of this size; None chooses the size."""
        if chunk_size is None:
            # Wide rows leave room for short chunks only, in registers and shared memory; float16 is multiplied as tf32.
            query, value = operands.query, operands.value
            row = query.element_size() * max(padded_width(tensor.shape[-1]) for tensor in (query, value))
            chunk_size = max(16, min(64 if query.dtype == torch.float16 else 128, 2**14 // row))
        return cls(operands, geometry, chunk_size, segments)

    @property
    def chunks(self) -> int:
        """Chunks of the longest sequence."""
        return ceil_divide(self.geometry.max_k, self.chunk)

    @property
    def slots(self) -> int:
        """States to make room for."""
        if self.geometry.cu_k is None:
            return self.sequences * self.chunks
        return self.operands.key.shape[2] // self.chunk + self.sequences

    def programs(self, heads: int) -> int:
        """Counts the programs: one for each chunk of each sequence and head."""
        return self.sequences * heads * self.chunks

    @property
    def sizes(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Where sequences start, or how long they are."""
        return (*self.geometry[:2], self.operands.query.shape[2], self.operands.key.shape[2], self.chunks)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for which kernels are compiled."""
        return super().constants | {"CHUNK": self.chunk}

    def launch(
        self, kernel: Any, programs: int, tensors: tuple[Any, ...], strided: tuple[Tensor, ...], **constants: int
    ) -> None:
        """Launches a kernel that takes the inputs, `tensors`, where chunks lie, and strides, also of `strided`."""
        arguments = (*self.tensors, *tensors, *self.sizes, *self.strides, *strides(*strided))
        kernel[(programs,)](*arguments, **self.constants, **constants)


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Gives the batch row, first query, number of queries, first key, number of keys and first slot of a sequence."""
    slot = sequence * chunks
    if cu_k is not None:
        slot = tl.load(cu_k + sequence).to(tl.int64) // CHUNK + sequence
    batch, first_query, query_count = bounds(cu_q, sequence, queries)
    _, first_key, key_count = bounds(cu_k, sequence, keys)
    return batch, first_query, query_count, first_key, key_count, slot


@triton.jit
def locate_chunk(program, heads, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Locates the chunk of a program.

    Returns:
        head, sequence, batch row, slot; row of the tensor of queries of the first position, number of the query there
        (negative before the first one) and number of queries; row of the tensor of keys, and number of keys from it on.
    """
    chunk, program = program % chunks, program // chunks
    head, sequence = (program % heads).to(tl.int64), (program // heads).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, slot = locate(
        sequence, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    number = chunk * CHUNK - (key_count - query_count)
    token, key_row, left = first_query + number, first_key + chunk * CHUNK, key_count - chunk * CHUNK
    return head, sequence, batch, slot + chunk, token, number, query_count, key_row, left


@triton.jit
def load_logit(base, there, CHUNK: tl.constexpr):
    """Loads the bias of the keys of a chunk, in base 2; -inf where there is no key."""
    return tl.load(base + tl.arange(0, CHUNK), mask=there, other=float("-inf")) * LOG2E


@triton.jit
def load_features(base, features, count):
    """Loads one number for each feature, -inf for those past the last one."""
    return tl.load(base + features, mask=features < count, other=float("-inf"))


@triton.jit
def after_first(shown, CHUNK: tl.constexpr):
    """Marks the rows from the first visible key of a chunk on.

    Rows before it see only the past, whose weights may be far below the anchor.
    """
    index = tl.arange(0, CHUNK)
    return index >= tl.min(tl.where(shown, index, CHUNK), axis=0)


@triton.jit
def from_later(
    k, v, logit, to_key, offset, later_weight, later_summary, later_share,
    M: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Sums what queries of later chunks contribute to the gradients of some keys, of their values and their biases.

    Args:
        k, v, logit: keys `[R, WIDTH]`, values `[R, VALUE_WIDTH]`, and biases `[R]` in base 2.
        to_key, offset, later_weight, later_summary, later_share: addresses of the first feature.
    """
    key_acc = tl.zeros(k.shape, tl.float32)
    value_acc = tl.zeros(v.shape, tl.float32)
    bias_acc = tl.zeros(logit.shape, tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        shift = load_features(offset, features, M) * LOG2E
        shift += load_features(later_weight, features, M)
        share = tl.load(later_share + features, mask=real, other=0.0)
        u = load_rows(to_key + start * width, width, real, width, FEATURES, k.shape[1])
        t = tl.exp2(contract(k, u) * LOG2E + logit[:, None] + shift[None, :])
        r = load_rows(later_summary + start * value_width, value_width, real, value_width, FEATURES, v.shape[1])
        value_acc = wide(t, r, value_acc, k)
        t *= contract(v, r) - share[None, :]
        key_acc = wide(t, u, key_acc, k)
        bias_acc += tl.sum(t, axis=1)
    return key_acc, value_acc, bias_acc


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
    128: (Blocks(None, 32, 8, 2), Blocks(None, 64, 8, 2), Blocks(None, 128, 8, 2), Blocks(None, 32, 4, 3)),
    256: (Blocks(None, 64, 8, 2), Blocks(None, 64, 8, 3), Blocks(None, 32, 4, 3)),
    512: (Blocks(None, 64, 8, 2), Blocks(None, 32, 4, 2)),
    1024: (Blocks(None, 32, 8, 1), Blocks(None, 16, 4, 1)),
}


@triton.jit
def _first_visible(logits, logit, CHUNK: tl.constexpr):
    """Gives the column of `[M, CHUNK]` logits with the first visible key; -inf if there is none."""
    index = tl.arange(0, CHUNK)
    first = tl.min(tl.where(logit == float("-inf"), CHUNK, index), axis=0)
    return tl.sum(tl.where(index[None, :] == first, logits, 0.0), axis=1) + tl.where(first < CHUNK, 0.0, float("-inf"))


@triton.jit(do_not_specialize=["queries", "keys", "chunks", "segments"])
def _chunk_states(
    tokens, values, directions, offset, bias, delta, log_weight, summary, anchor, steep, share, total_weight,
    total_summary, total_share,
    cu_q, cu_k, queries, keys, chunks, segments,
    tokens_batch, tokens_head, tokens_row, values_batch, values_head, values_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, REVERSE: tl.constexpr, TOTALS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Works through one segment of chunks, for one key head and block of features; backwards over queries if REVERSE.

    With TOTALS it writes what the whole segment holds, otherwise what lies before each of its chunks.
    """
    program = tl.program_id(0)
    blocks: tl.constexpr = (M + FEATURES - 1) // FEATURES
    first_feature, program = program % blocks * FEATURES, program // blocks
    segment, program = program % segments, program // segments
    source, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, slot = locate(
        sequence, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    count = tl.cdiv(key_count, CHUNK)
    length = tl.cdiv(count, segments)

    row = tl.arange(0, FEATURES)
    real = first_feature + row < M
    first_direction = (sequence * OWN * HK + source) * M + first_feature
    u = load_rows(directions + first_direction * width, width, real, width, FEATURES, WIDTH).to(tokens.dtype.element_ty)
    top, total, part, acc = empty_sums(FEATURES, VALUE_WIDTH)
    if not REVERSE:
        shift = tl.load(offset + first_direction + row, mask=real, other=0.0) * LOG2E
    if not TOTALS and total_weight is not None:
        for earlier in range(0, segment):
            place = ((sequence * HK + source) * segments + earlier) * M + first_feature
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
    if TOTALS:  # the total of the last segment is not needed
        stop = tl.where(segment == segments - 1, 0, stop)
    for step in range(segment * length * GROUP, stop * GROUP):
        chunk = step // GROUP
        if REVERSE:
            chunk = count - 1 - chunk
        head = source * GROUP + step % GROUP
        state = ((slot + chunk) * HK + source) * M + first_feature
        if not TOTALS:
            weight, scale = settled(top, total)
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
        x = load_tile(tokens, batch, head, token, tokens_batch, tokens_head, tokens_row, shown, width, WIDTH)
        y = load_tile(
            values, batch, head, token, values_batch, values_head, values_row, shown, value_width, VALUE_WIDTH
        )
        logits = contract(u, x) * LOG2E + logit[None, :]
        if not REVERSE and not TOTALS:
            most = tl.maximum(weight, _first_visible(logits, logit, CHUNK) + shift)
            tl.store(anchor + state + row, most, mask=real)
            rise = tl.max(tl.where(real, tl.max(logits, axis=1) + shift - finite(most), float("-inf")), axis=0)
            tl.store(steep + (slot + chunk) * HK + head, 1, mask=rise > STEEP)

        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, y, acc * decay[:, None])
        if REVERSE:
            there = delta + (batch * HK * GROUP + head) * queries + token
            shares = tl.load(there + index, mask=shown, other=0.0)
            part = part * decay + tl.sum(weights * shares[None, :], axis=1)

    if TOTALS:
        weight, scale = settled(top, total)
        place = ((sequence * HK + source) * segments + segment) * M + first_feature
        tl.store(total_weight + place + row, weight, mask=real)
        there = total_summary + place * value_width
        store_rows(there, value_width, acc * scale[:, None], real, value_width, FEATURES, VALUE_WIDTH)
        if REVERSE:
            tl.store(total_share + place + row, part * scale, mask=real)


def key_states(problem: Problem) -> States:
    """Computes the states before each chunk, of the keys."""
    _, key, value, _, directions, offset, bias, _ = problem.operands
    log_weight = offset.new_empty(problem.slots, *offset.shape[1:])
    anchor = torch.empty_like(log_weight)
    steep = torch.zeros(log_weight.shape[:2], dtype=torch.int32, device=value.device)
    states = States(log_weight, value.new_empty(*log_weight.shape, value.shape[-1]), anchor, steep)
    _launch(problem, (key, value, directions, offset, bias, None), states)
    return states


def query_states(problem: Problem, grad: Tensor, lse: Tensor, delta: Tensor) -> States:
    """Computes the states after each chunk, of the queries; lse and delta `[B, H, L]`."""
    query, offset = problem.operands.query, problem.operands.offset
    log_weight = offset.new_empty(problem.slots, *offset.shape[1:])
    summary = grad.new_empty(*log_weight.shape, grad.shape[-1])
    states = States(log_weight, summary, share=torch.empty_like(log_weight))
    _launch(problem, (query, grad, problem.operands.query_directions, offset, lse, delta), states)
    return states


def _launch(problem: Problem, tensors: tuple[Any, ...], states: States) -> None:
    """Sums up segments first if there is more than one, so that the second pass starts each where it should.

    Args:
        tensors: tokens, values, directions, offset, bias and delta; no delta for keys.
        states: written here.
    """
    tokens, values, directions, *_, delta = tensors
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

    arguments = (*tensors, *states, *totals, *problem.sizes, segments, *strides(tokens, values))
    for summing in (True, False) if segments > 1 else (False,):
        problem.tuned(_chunk_states, _BLOCKS)[grid](*arguments, TOTALS=summing, **constants)
