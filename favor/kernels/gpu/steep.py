"""The chunks whose keys rise too steeply for a common anchor: every weight within them from its own exponents.

These kernels are launched together with the fast ones and return at once for the other chunks. They take rows of a
chunk with the rows of the chunk that they see, a block of each at a time, and go through the features one after the
other.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.chunks import Problem, from_later, load_features, load_logit, locate_chunk
from favor.kernels.gpu.common import LN2, LOG2E, absorb, contract, finite, load_rows, load_tile, mix, store_tile, wide

_FEATURES = 32


@triton.jit
def _logit_of_feature(tokens, directions, width: tl.constexpr, WIDTH: tl.constexpr):
    """Computes logits `[R]` (base 2) of float32 tokens `[R, WIDTH]` for one feature, and its directions `[WIDTH]`."""
    columns = tl.arange(0, WIDTH)
    direction = tl.load(directions + columns, mask=columns < width, other=0.0)
    return tl.sum(tokens * direction[None, :], axis=1) * LOG2E, direction


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def steep_output(
    query, key, value, to_query, to_key, offset, bias, log_weight, summary, steep, out, lse,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Computes output and l of some rows of a steep chunk."""
    blocks: tl.constexpr = CHUNK // ROWS
    block = tl.program_id(0) % blocks * ROWS
    head, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0) // blocks, HK * GROUP, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    token += block
    number += block
    if (left <= block) | (number + ROWS <= 0):
        return
    source = head // GROUP
    state = slot * HK + source
    if tl.load(steep + state) == 0:
        return

    index = tl.arange(0, ROWS)
    asking = (number + index >= 0) & (number + index < query_count)
    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, asking, width, WIDTH)
    first_direction = (sequence * OWN * HK + source) * M
    to_query += first_direction * width
    to_key += first_direction * width
    summary += state * M * value_width
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        before = load_features(log_weight + state * M, features, M)
        directions = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
        weights = contract(q, directions) * LOG2E + before[None, :]
        top, total, weights, decay = absorb(weights, top, total)
        s = load_rows(summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        acc = mix(weights, s, acc * decay[:, None])

    q = q.to(tl.float32)
    for other in range(0, block + ROWS, ROWS):
        logit = load_logit(bias + (batch * HK + source) * keys + place + other, other + index < left, ROWS)
        shown = logit > float("-inf")
        row = place + other
        k = load_tile(key, batch, source, row, key_batch, key_head, key_row, shown, width, WIDTH).to(tl.float32)
        seen = shown[None, :] & (block + index[:, None] >= other + index[None, :])
        most = tl.full([ROWS, ROWS], float("-inf"), tl.float32)
        rest = tl.zeros([ROWS, ROWS], tl.float32)
        for feature in range(0, M):
            lq, _ = _logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, _ = _logit_of_feature(k, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + first_direction + feature) * LOG2E
            term = tl.where(seen, lq[:, None] + lk[None, :], float("-inf"))
            risen = tl.maximum(most, term)
            rest = rest * tl.exp2(most - finite(risen)) + tl.exp2(term - finite(risen))
            most = risen
        risen = tl.maximum(top, tl.max(most + tl.log2(tl.where(seen, rest, 1.0)), axis=1))
        decay = tl.exp2(top - finite(risen))
        weights = rest * tl.exp2(most - finite(risen)[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = load_tile(value, batch, source, row, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
        acc = mix(weights, v, acc * decay[:, None])
        top = risen

    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    acc = acc * tl.where(empty, 0.0, 1.0 / total)[:, None]
    store_tile(out, batch, head, token, out_batch, out_head, out_row, acc, asking, value_width, VALUE_WIDTH)
    total = tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse + (batch * HK * GROUP + head) * queries + token + index, total, mask=asking)


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def steep_queries(
    query, key, value, to_query, to_key, offset, bias, log_weight, summary, steep, grad, lse, delta, dq,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, dq_batch, dq_head, dq_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of some queries of a steep chunk."""
    blocks: tl.constexpr = CHUNK // ROWS
    block = tl.program_id(0) % blocks * ROWS
    head, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0) // blocks, HK * GROUP, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    token += block
    number += block
    if (left <= block) | (number + ROWS <= 0):
        return
    source = head // GROUP
    state = slot * HK + source
    if tl.load(steep + state) == 0:
        return

    index = tl.arange(0, ROWS)
    asking = (number + index >= 0) & (number + index < query_count)
    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, asking, width, WIDTH)
    g = load_tile(grad, batch, head, token, grad_batch, grad_head, grad_row, asking, value_width, VALUE_WIDTH)
    numbers = (batch * HK * GROUP + head) * queries + token + index
    total = tl.load(lse + numbers, mask=asking, other=float("inf")) * LOG2E
    share = tl.load(delta + numbers, mask=asking, other=0.0)
    first_direction = (sequence * OWN * HK + source) * M
    to_query += first_direction * width
    to_key += first_direction * width
    summary += state * M * value_width
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        before = load_features(log_weight + state * M, features, M)
        directions = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
        weights = tl.exp2(contract(q, directions) * LOG2E + before[None, :] - total[:, None])
        s = load_rows(summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        acc = wide(weights * (contract(g, s) - share[:, None]), directions, acc, q)

    q = q.to(tl.float32)
    for other in range(0, block + ROWS, ROWS):
        logit = load_logit(bias + (batch * HK + source) * keys + place + other, other + index < left, ROWS)
        shown = logit > float("-inf")
        row = place + other
        k = load_tile(key, batch, source, row, key_batch, key_head, key_row, shown, width, WIDTH).to(tl.float32)
        v = load_tile(value, batch, source, row, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
        seen = shown[None, :] & (block + index[:, None] >= other + index[None, :])
        slopes = contract(g, v) - share[:, None]
        for feature in range(0, M):
            lq, direction = _logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, _ = _logit_of_feature(k, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + first_direction + feature) * LOG2E
            weights = tl.exp2(tl.where(seen, (lq - total)[:, None] + lk[None, :], float("-inf")))
            acc += tl.sum(weights * slopes, axis=1)[:, None] * direction[None, :]
    store_tile(dq, batch, head, token, dq_batch, dq_head, dq_row, acc, asking, width, WIDTH)


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def steep_keys(
    query, key, value, to_query, to_key, offset, bias, steep, later_weight, later_summary, later_share, grad, lse,
    delta, dk, dv, dbias,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of some keys, values and biases of a steep chunk."""
    blocks: tl.constexpr = CHUNK // ROWS
    block = tl.program_id(0) % blocks * ROWS
    source, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0) // blocks, HK, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    if left <= block:
        return
    state = slot * HK + source
    if tl.load(steep + state) == 0:
        return

    index = tl.arange(0, ROWS)
    there = block + index < left
    place += block
    logit = load_logit(bias + (batch * HK + source) * keys + place, there, ROWS)
    shown = logit > float("-inf")
    k = load_tile(key, batch, source, place, key_batch, key_head, key_row, shown, width, WIDTH)
    v = load_tile(value, batch, source, place, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
    first_direction = (sequence * OWN * HK + source) * M
    to_query += first_direction * width
    to_key += first_direction * width
    later_summary += state * M * value_width
    key_acc, value_acc, bias_acc = from_later(
        k, v, logit, to_key, offset + first_direction, later_weight + state * M, later_summary, later_share + state * M,
        M, width, value_width, FEATURES,
    )  # fmt: skip

    precise = k.to(tl.float32)
    for pair in range(0, (CHUNK - block) // ROWS * GROUP):
        other = block + pair // GROUP * ROWS
        head = source * GROUP + pair % GROUP
        asking = (number + other + index >= 0) & (number + other + index < query_count)
        row = token + other
        q = load_tile(query, batch, head, row, query_batch, query_head, query_row, asking, width, WIDTH).to(tl.float32)
        g = load_tile(grad, batch, head, row, grad_batch, grad_head, grad_row, asking, value_width, VALUE_WIDTH)
        numbers = (batch * HK * GROUP + head) * queries + row + index
        total = tl.load(lse + numbers, mask=asking, other=float("inf")) * LOG2E
        seen = shown[:, None] & (block + index[:, None] <= other + index[None, :])
        slopes = contract(v, g) - tl.load(delta + numbers, mask=asking, other=0.0)[None, :]
        scores = tl.zeros([ROWS, ROWS], tl.float32)
        for feature in range(0, M):
            lq, _ = _logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, direction = _logit_of_feature(precise, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + first_direction + feature) * LOG2E
            weights = tl.exp2(tl.where(seen, (lq - total)[None, :] + lk[:, None], float("-inf")))
            scores += weights
            change = tl.sum(weights * slopes, axis=1)
            key_acc += change[:, None] * direction[None, :]
            bias_acc += change
        value_acc = wide(scores, g, value_acc, k)

    store_tile(dk, batch, source, place, dk_batch, dk_head, dk_row, key_acc, there, width, WIDTH)
    store_tile(dv, batch, source, place, dv_batch, dv_head, dv_row, value_acc, there, value_width, VALUE_WIDTH)
    tl.store(dbias + (batch * HK + source) * keys + place + index, bias_acc, mask=there)


def launch_steep(
    kernel: Any, problem: Problem, heads: int, tensors: tuple[Any, ...], strided: tuple[Tensor, ...]
) -> None:
    """Launches `kernel` for all chunks, 16 or 32 rows of a chunk in a program; wide rows are in chunks of up to 32."""
    rows = max(16, min(problem.chunk // 2, 32))
    programs = problem.programs(heads) * (problem.chunk // rows)
    problem.launch(kernel, programs, tensors, strided, FEATURES=_FEATURES, ROWS=rows, num_warps=8)
