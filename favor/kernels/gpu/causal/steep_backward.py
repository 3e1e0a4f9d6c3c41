"""Gradients in steep chunks, see `favor.kernels.gpu.causal.steep`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import Problem, corner, load_features, load_logit, locate_chunk, wide
from favor.kernels.gpu.causal.states import States
from favor.kernels.gpu.causal.steep import logit_of_feature, rows_of
from favor.kernels.gpu.common import LOG2E, contract, load_rows, store_rows


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _steep_queries(
    query,
    key,
    value,
    to_query,
    to_key,
    offset,
    bias,
    log_weight,
    summary,
    steep,
    grad,
    lse,
    delta,
    dq,
    cu_q,
    cu_k,
    queries,
    keys,
    chunks,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    grad_batch,
    grad_head,
    grad_row,
    dq_batch,
    dq_head,
    dq_row,
    M: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradient of some queries of a steep chunk."""
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
    q = corner(query, batch, head, token, query_batch, query_head, query_row)
    q = load_rows(q, query_row, asking, width, ROWS, WIDTH)
    g = corner(grad, batch, head, token, grad_batch, grad_head, grad_row)
    g = load_rows(g, grad_row, asking, value_width, ROWS, VALUE_WIDTH)
    numbers = (batch * HK * GROUP + head) * queries + token + index
    total = tl.load(lse + numbers, mask=asking, other=float("inf")) * LOG2E
    share = tl.load(delta + numbers, mask=asking, other=0.0)
    landmarks = (sequence * OWN * HK + source) * M
    to_query += landmarks * width
    to_key += landmarks * width
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
        k = corner(key, batch, source, place + other, key_batch, key_head, key_row)
        k = load_rows(k, key_row, shown, width, ROWS, WIDTH).to(tl.float32)
        v = corner(value, batch, source, place + other, value_batch, value_head, value_row)
        v = load_rows(v, value_row, shown, value_width, ROWS, VALUE_WIDTH)
        seen = shown[None, :] & (block + index[:, None] >= other + index[None, :])
        slopes = contract(g, v) - share[:, None]
        for feature in range(0, M):
            lq, direction = logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, _ = logit_of_feature(k, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + landmarks + feature) * LOG2E
            weights = tl.exp2(tl.where(seen, (lq - total)[:, None] + lk[None, :], float("-inf")))
            acc += tl.sum(weights * slopes, axis=1)[:, None] * direction[None, :]
    dq = corner(dq, batch, head, token, dq_batch, dq_head, dq_row)
    store_rows(dq, dq_row, acc, asking, width, ROWS, WIDTH)


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _steep_keys(
    query,
    key,
    value,
    to_query,
    to_key,
    offset,
    bias,
    steep,
    later_weight,
    later_summary,
    later_share,
    grad,
    lse,
    delta,
    dk,
    dv,
    dbias,
    cu_q,
    cu_k,
    queries,
    keys,
    chunks,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    grad_batch,
    grad_head,
    grad_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    M: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradient of some keys, values and biases of a steep chunk."""
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
    k = corner(key, batch, source, place, key_batch, key_head, key_row)
    k = load_rows(k, key_row, shown, width, ROWS, WIDTH)
    v = corner(value, batch, source, place, value_batch, value_head, value_row)
    v = load_rows(v, value_row, shown, value_width, ROWS, VALUE_WIDTH)
    landmarks = (sequence * OWN * HK + source) * M
    to_query += landmarks * width
    to_key += landmarks * width
    later_summary += state * M * value_width
    key_acc = tl.zeros([ROWS, WIDTH], tl.float32)
    value_acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    bias_acc = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        shift = load_features(offset + landmarks, features, M) * LOG2E
        shift += load_features(later_weight + state * M, features, M)
        share = tl.load(later_share + state * M + features, mask=real, other=0.0)
        directions = load_rows(to_key + start * width, width, real, width, FEATURES, WIDTH)
        t = tl.exp2(contract(k, directions) * LOG2E + logit[:, None] + shift[None, :])
        r = load_rows(later_summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        value_acc = wide(t, r, value_acc, k)
        t *= contract(v, r) - share[None, :]
        key_acc = wide(t, directions, key_acc, k)
        bias_acc += tl.sum(t, axis=1)

    precise = k.to(tl.float32)
    for pair in range(0, (CHUNK - block) // ROWS * GROUP):
        other = block + pair // GROUP * ROWS
        head = source * GROUP + pair % GROUP
        asking = (number + other + index >= 0) & (number + other + index < query_count)
        q = corner(query, batch, head, token + other, query_batch, query_head, query_row)
        q = load_rows(q, query_row, asking, width, ROWS, WIDTH).to(tl.float32)
        g = corner(grad, batch, head, token + other, grad_batch, grad_head, grad_row)
        g = load_rows(g, grad_row, asking, value_width, ROWS, VALUE_WIDTH)
        numbers = (batch * HK * GROUP + head) * queries + token + other + index
        total = tl.load(lse + numbers, mask=asking, other=float("inf")) * LOG2E
        seen = shown[:, None] & (block + index[:, None] <= other + index[None, :])
        slopes = contract(v, g) - tl.load(delta + numbers, mask=asking, other=0.0)[None, :]
        scores = tl.zeros([ROWS, ROWS], tl.float32)
        for feature in range(0, M):
            lq, _ = logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, direction = logit_of_feature(precise, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + landmarks + feature) * LOG2E
            weights = tl.exp2(tl.where(seen, (lq - total)[None, :] + lk[:, None], float("-inf")))
            scores += weights
            change = tl.sum(weights * slopes, axis=1)
            key_acc += change[:, None] * direction[None, :]
            bias_acc += change
        value_acc = wide(scores, g, value_acc, k)

    dk = corner(dk, batch, source, place, dk_batch, dk_head, dk_row)
    store_rows(dk, dk_row, key_acc, there, width, ROWS, WIDTH)
    dv = corner(dv, batch, source, place, dv_batch, dv_head, dv_row)
    store_rows(dv, dv_row, value_acc, there, value_width, ROWS, VALUE_WIDTH)
    tl.store(dbias + (batch * HK + source) * keys + place + index, bias_acc, mask=there)


def steep_query_gradients(
    problem: Problem, states: States, grad: Tensor, lse: Tensor, delta: Tensor, dq: Tensor
) -> None:
    """Writes the gradient of the queries of all chunks that are steep."""
    constants = problem.constants | rows_of(problem)
    programs = problem.programs(problem.query.shape[1]) * (problem.chunk // constants["ROWS"])
    _steep_queries[(programs,)](
        *problem.tensors,
        states.log_weight,
        states.summary,
        states.steep,
        grad,
        lse,
        delta,
        dq,
        *problem.sizes,
        *problem.strides,
        *grad.stride()[:3],
        *dq.stride()[:3],
        **constants,
    )


def steep_key_gradients(
    problem: Problem,
    states: States,
    later: States,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor,
) -> None:
    """Writes the gradients of the keys, values and biases of all chunks that are steep."""
    constants = problem.constants | rows_of(problem)
    programs = problem.programs(problem.key.shape[1]) * (problem.chunk // constants["ROWS"])
    _steep_keys[(programs,)](
        *problem.tensors,
        states.steep,
        later.log_weight,
        later.summary,
        later.share,
        grad,
        lse,
        delta,
        dk,
        dv,
        dbias,
        *problem.sizes,
        *problem.strides,
        *grad.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        **constants,
    )
