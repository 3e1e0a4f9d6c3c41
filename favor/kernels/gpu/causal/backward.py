"""Gradients of causal attention, a chunk at a time, from the states before the chunk and those after it.

With g the gradient of the output, delta_i = g_i.out_i and w_ij the weight of key j for query i, the gradient of its
logarithm is w_ij (g_i.v_j - delta_i), and each w_ij is a sum over the features, of P_im A_jm in the chunk itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import Problem, after_first, load_features, load_logit, locate_chunk
from favor.kernels.gpu.causal.states import States
from favor.kernels.gpu.common import LOG2E, Blocks, contract, finite, load_rows, load_tile, narrow, store_tile, wide

_QUERY_BLOCKS = {
    128: (Blocks(None, 64, 8, 1), Blocks(None, 64, 8, 3), Blocks(None, 64, 8, 2), Blocks(None, 32, 4, 2)),
    256: (Blocks(None, 64, 8, 2), Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2), Blocks(None, 32, 4, 3)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2)),
    1024: (Blocks(None, 16, 8, 1), Blocks(None, 16, 4, 1)),
}
_KEY_BLOCKS = {
    128: (Blocks(None, 32, 8, 3), Blocks(None, 64, 8, 1), Blocks(None, 32, 8, 2), Blocks(None, 64, 8, 2)),
    256: (Blocks(None, 32, 8, 2), Blocks(None, 32, 8, 1), Blocks(None, 32, 4, 2), Blocks(None, 64, 8, 1)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 8, 1)),
    1024: (Blocks(None, 16, 8, 1), Blocks(None, 16, 4, 1)),
}


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _chunk_queries(
    query, key, value, to_query, to_key, offset, bias, log_weight, summary, steep, anchor,
    grad, out, lse, delta, dq,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes delta of one chunk of one query head, and the gradient of its queries unless the chunk is steep."""
    head, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0), HK * GROUP, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    if (left <= 0) | (number + CHUNK <= 0):
        return
    source = head // GROUP
    state = slot * HK + source

    index = tl.arange(0, CHUNK)
    asking = (number + index >= 0) & (number + index < query_count)
    g = load_tile(grad, batch, head, token, grad_batch, grad_head, grad_row, asking, value_width, VALUE_WIDTH)
    result = load_tile(out, batch, head, token, out_batch, out_head, out_row, asking, value_width, VALUE_WIDTH)
    share = tl.sum(g.to(tl.float32) * result.to(tl.float32), axis=1)
    numbers = (batch * HK * GROUP + head) * queries + token
    tl.store(delta + numbers + index, share, mask=asking)
    if tl.load(steep + state) != 0:
        return

    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, asking, width, WIDTH)
    total = tl.load(lse + numbers + index, mask=asking, other=float("inf")) * LOG2E
    logit = load_logit(bias + (batch * HK + source) * keys + place, index < left, CHUNK)
    shown = logit > float("-inf")
    k = load_tile(key, batch, source, place, key_batch, key_head, key_row, shown, width, WIDTH)
    v = load_tile(value, batch, source, place, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
    after = after_first(shown, CHUNK)
    slopes = contract(g, v) - share[:, None]
    slopes = narrow(tl.where((index[:, None] >= index[None, :]) & shown[None, :], slopes, 0.0), q)

    first_direction = (sequence * OWN * HK + source) * M
    to_query += first_direction * width
    to_key += first_direction * width
    summary += state * M * value_width
    acc = tl.zeros([CHUNK, WIDTH], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        before = load_features(log_weight + state * M, features, M)
        most = load_features(anchor + state * M, features, M)
        shift = load_features(offset + first_direction, features, M) * LOG2E
        u = load_rows(to_key + start * width, width, real, width, FEATURES, WIDTH)
        a = tl.exp2(contract(k, u) * LOG2E + logit[:, None] + (shift - finite(most))[None, :])
        a = wide(slopes, a, tl.zeros([CHUNK, FEATURES], tl.float32), q)
        s = load_rows(summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        earlier = contract(g, s) - share[:, None]
        earlier *= tl.where(after[:, None], tl.exp2(before - finite(most))[None, :], 1.0)
        u = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
        p = tl.exp2(contract(q, u) * LOG2E + tl.where(after[:, None], most[None, :], before[None, :]) - total[:, None])
        acc = wide(p * (a + earlier), u, acc, q)
    store_tile(dq, batch, head, token, dq_batch, dq_head, dq_row, acc, asking, width, WIDTH)


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


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _chunk_keys(
    query, key, value, to_query, to_key, offset, bias, log_weight, anchor, steep, later_weight, later_summary,
    later_share, grad, lse, delta, dk, dv, dbias,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the keys, values and biases of one chunk of one key head, unless the chunk is steep."""
    source, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0), HK, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    if left <= 0:
        return
    state = slot * HK + source
    if tl.load(steep + state) != 0:
        return

    index = tl.arange(0, CHUNK)
    there = index < left
    logit = load_logit(bias + (batch * HK + source) * keys + place, there, CHUNK)
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

    asking = (number + index >= 0) & (number + index < query_count)
    after = after_first(shown, CHUNK)
    for head in range(source * GROUP, source * GROUP + GROUP):
        q = load_tile(query, batch, head, token, query_batch, query_head, query_row, asking, width, WIDTH)
        g = load_tile(grad, batch, head, token, grad_batch, grad_head, grad_row, asking, value_width, VALUE_WIDTH)
        numbers = (batch * HK * GROUP + head) * queries + token + index
        total = tl.load(lse + numbers, mask=asking, other=float("inf")) * LOG2E
        slopes = contract(v, g) - tl.load(delta + numbers, mask=asking, other=0.0)[None, :]
        slopes = narrow(tl.where((index[:, None] <= index[None, :]) & shown[:, None], slopes, 0.0), k)
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for start in range(0, M, FEATURES):
            features = start + tl.arange(0, FEATURES)
            real = features < M
            before = load_features(log_weight + state * M, features, M)
            most = load_features(anchor + state * M, features, M)
            shift = load_features(offset + first_direction, features, M) * LOG2E
            u = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
            p = tl.exp2(
                contract(q, u) * LOG2E + tl.where(after[:, None], most[None, :], before[None, :]) - total[:, None]
            )
            p = narrow(p, k)
            u = load_rows(to_key + start * width, width, real, width, FEATURES, WIDTH)
            a = tl.exp2(contract(k, u) * LOG2E + logit[:, None] + (shift - finite(most))[None, :])
            scores = wide(a, tl.trans(p), scores, k)
            a *= wide(slopes, p, tl.zeros([CHUNK, FEATURES], tl.float32), k)
            key_acc = wide(a, u, key_acc, k)
            bias_acc += tl.sum(a, axis=1)
        scores = tl.where((index[:, None] <= index[None, :]) & shown[:, None], scores, 0.0)
        value_acc = wide(scores, g, value_acc, k)

    store_tile(dk, batch, source, place, dk_batch, dk_head, dk_row, key_acc, there, width, WIDTH)
    store_tile(dv, batch, source, place, dv_batch, dv_head, dv_row, value_acc, there, value_width, VALUE_WIDTH)
    tl.store(dbias + (batch * HK + source) * keys + place + index, bias_acc, mask=there)


def chunk_query_gradients(
    problem: Problem, states: States, grad: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor
) -> None:
    """Writes delta `[B, H, L]` of all chunks, and the gradient of the queries of those that are not steep."""
    tensors = (states.log_weight, states.summary, states.steep, states.anchor, grad, out, lse, delta, dq)
    programs = problem.programs(problem.operands.query.shape[1])
    problem.launch(problem.tuned(_chunk_queries, _QUERY_BLOCKS), programs, tensors, (grad, out, dq))


def chunk_key_gradients(
    problem: Problem, states: States, later: States, sent: tuple[Tensor, ...], found: tuple[Tensor, ...]
) -> None:
    """Writes the gradients of the keys, values and biases, `found`, of all chunks that are not steep.

    Args:
        states, later: of the keys before each chunk, and of the queries after it.
        sent: gradient of the output, logarithm of the normaliser and delta.
    """
    tensors = (states.log_weight, states.anchor, states.steep, later.log_weight, later.summary, later.share)
    programs = problem.programs(problem.operands.key.shape[1])
    kernel = problem.tuned(_chunk_keys, _KEY_BLOCKS)
    problem.launch(kernel, programs, (*tensors, *sent, *found), (sent[0], *found[:2]))
