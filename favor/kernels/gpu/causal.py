"""Causal attention in Triton: linear time, by chunks whose states are passed on, and quadratic only within a chunk.

With lq_im = q_i.uq_m and lk_jm = k_j.uk_m + bias_j, query i gives key j <= i the weight
sum_m exp(lq_im + offset_m + lk_jm). Keys of earlier chunks enter through a softmax over the features m, with their
weights and mean values; keys of the own chunk one by one. Both share the maximum of the row, and nothing is added to a
normaliser. Within a chunk exp(lq_im + offset_m + lk_jm) is a product of two factors, relative to an anchor per feature
that every query sees. In the rare chunk whose keys rise too steeply above it, slower kernels take over; only the device
knows which chunks these are.

The backward pass computes the states before the chunks again, and from them the gradient of the queries. The same pass
over the queries, backwards, leaves what the keys of a chunk need of later chunks. With g the gradient of the output,
delta_i = g_i.out_i and w_ij the weight of key j for query i, the gradient of its logarithm is w_ij (g_i.v_j - delta_i),
and each w_ij is a sum over the features, of P_im A_jm in the chunk itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.chunks import (
    Problem,
    after_first,
    from_later,
    key_states,
    load_features,
    load_logit,
    locate_chunk,
    query_states,
)
from favor.kernels.gpu.common import (
    LN2,
    LOG2E,
    Blocks,
    contract,
    finite,
    load_rows,
    load_tile,
    mix,
    narrow,
    store_tile,
    wide,
)
from favor.kernels.gpu.steep import launch_steep, steep_keys, steep_output, steep_queries
from favor.kernels.operands import Geometry, Gradients, Operands, Result

_BLOCKS = {
    128: (Blocks(None, 32, 8, 3), Blocks(None, 64, 8, 2), Blocks(None, 64, 8, 1)),
    256: (Blocks(None, 32, 8, 2), Blocks(None, 64, 8, 2), Blocks(None, 32, 4, 2)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2)),
    1024: (Blocks(None, 16, 8, 1), Blocks(None, 16, 4, 1)),
}
_QUERY_BLOCKS = {
    128: (Blocks(None, 64, 8, 1), Blocks(None, 64, 8, 3), Blocks(None, 64, 8, 2), Blocks(None, 32, 4, 2)),
    256: (Blocks(None, 64, 8, 2), Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2), Blocks(None, 32, 4, 3)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2)),
    1024: (Blocks(None, 16, 8, 1), Blocks(None, 16, 4, 1)),
}
_KEY_BLOCKS = {
    128: (Blocks(None, 16, 8, 1), Blocks(None, 32, 8, 1), Blocks(None, 32, 8, 3)),
    256: (Blocks(None, 32, 8, 1), Blocks(None, 32, 8, 2)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 8, 1)),
    1024: (Blocks(None, 16, 8, 1), Blocks(None, 16, 4, 1)),
}


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _chunk_output(
    query, key, value, to_query, to_key, offset, bias, log_weight, summary, steep, anchor, out, lse,
    cu_q, cu_k, queries, keys, chunks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes output and l of one chunk of one query head, unless the chunk is steep.

    The weights of the keys of the chunk are products P_im A_jm = exp(lq_im + anchor_m - r_i) exp(lk_jm - anchor_m): the
    first factor is at most 1 with the running maximum r_i, the second one not too far above it.
    """
    head, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0), HK * GROUP, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    if (left <= 0) | (number + CHUNK <= 0):
        return
    source = head // GROUP
    state = slot * HK + source
    if tl.load(steep + state) != 0:
        return

    index = tl.arange(0, CHUNK)
    asking = (number + index >= 0) & (number + index < query_count)
    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, asking, width, WIDTH)
    logit = load_logit(bias + (batch * HK + source) * keys + place, index < left, CHUNK)
    shown = logit > float("-inf")
    k = load_tile(key, batch, source, place, key_batch, key_head, key_row, shown, width, WIDTH)
    after = after_first(shown, CHUNK)

    first_direction = (sequence * OWN * HK + source) * M
    to_query += first_direction * width
    to_key += first_direction * width
    summary += state * M * value_width
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, VALUE_WIDTH], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        before = load_features(log_weight + state * M, features, M)
        most = load_features(anchor + state * M, features, M)
        shift = load_features(offset + first_direction, features, M) * LOG2E
        u = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
        p = contract(q, u) * LOG2E + tl.where(after[:, None], most[None, :], before[None, :])
        risen = tl.maximum(top, tl.max(p, axis=1))
        decay = tl.exp2(top - finite(risen))
        p = tl.exp2(p - finite(risen)[:, None])
        u = load_rows(to_key + start * width, width, real, width, FEATURES, WIDTH)
        a = tl.exp2(contract(k, u) * LOG2E + logit[:, None] + (shift - finite(most))[None, :])
        scores = wide(p, tl.trans(a), scores * decay[:, None], q)
        p = tl.where(after[:, None], p * tl.exp2(before - finite(most))[None, :], p)
        total = total * decay + tl.sum(p, axis=1)
        s = load_rows(summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        acc = mix(p, s, acc * decay[:, None])
        top = risen

    scores = tl.where((index[:, None] >= index[None, :]) & shown[None, :], scores, 0.0)
    total += tl.sum(scores, axis=1)
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    inverse = tl.where(empty, 0.0, 1.0 / total)
    v = load_tile(value, batch, source, place, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
    acc = mix(scores * inverse[:, None], v, acc * inverse[:, None])
    store_tile(out, batch, head, token, out_batch, out_head, out_row, acc, asking, value_width, VALUE_WIDTH)
    total = tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse + (batch * HK * GROUP + head) * queries + token + index, total, mask=asking)


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


def forward(
    operands: Operands, geometry: Geometry, *, chunk_size: int | None = None, segments: int | None = None
) -> Result:
    """Computes causal attention; the queries belong to the last keys, the others come before the first query.

    A chunk has `chunk_size` tokens, a power of two from 16; the pass over chunks is cut in `segments`; None to choose.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, inf for a query that
        sees no key; and two empty tensors, because the backward pass computes the states again.
    """
    problem = Problem.of(operands, geometry, chunk_size, segments)
    result = Result.empty("causal", operands, geometry, joins_heads=True)
    heads, length = operands.query.shape[1:3]
    if geometry.cu_k is not None or length > operands.key.shape[2]:
        # Queries before the first key of their sequence, if there are more of them than keys, are in no chunk.
        result.out.zero_()
        result.lse.fill_(torch.inf)
    if problem.programs(heads) and result.out.numel():
        states = key_states(problem)
        found, written = (states.log_weight, states.summary, states.steep), result[:2]
        kernel = problem.tuned(_chunk_output, _BLOCKS)
        problem.launch(kernel, problem.programs(heads), (*found, states.anchor, *written), written[:1])
        launch_steep(steep_output, problem, heads, (*found, *written), written[:1])
    return result


def backward(
    grad: Tensor,
    operands: Operands,
    geometry: Geometry,
    saved: Result,
    for_directions: bool = False,
    *,
    chunk_size: int | None = None,
    segments: int | None = None,
) -> Gradients:
    """Computes the gradients of query, key, value and key_bias from that of the output and what `forward` returned.

    The torch kernel computes gradients of the directions: `for_directions` must be False.
    """
    problem = Problem.of(operands, geometry, chunk_size, segments)
    query, key, out, lse = operands.query, operands.key, saved.out, saved.lse
    grads, empty = Gradients.empty(operands, for_directions=False), not (query.numel() and key.numel())
    if empty or geometry.cu_k is not None or query.shape[2] > key.shape[2]:
        # Queries before the first key, and rows of a packed batch outside of all sequences, are in no chunk.
        for written in grads[:4]:
            written.zero_()
    if empty or not problem.programs(query.shape[1]):
        return grads
    dq, dk, dv, dbias = grads[:4]
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    heads, key_heads = query.shape[1], key.shape[1]
    states, delta = key_states(problem), torch.empty_like(lse)
    before = (states.log_weight, states.summary, states.steep)
    kernel, tensors = problem.tuned(_chunk_queries, _QUERY_BLOCKS), (*before, states.anchor, grad, out, lse, delta, dq)
    problem.launch(kernel, problem.programs(heads), tensors, (grad, out, dq))
    launch_steep(steep_queries, problem, heads, (*before, grad, lse, delta, dq), (grad, dq))
    later = query_states(problem, grad, lse, delta)
    tensors = (later.log_weight, later.summary, later.share, grad, lse, delta, dk, dv, dbias)
    kernel, own = problem.tuned(_chunk_keys, _KEY_BLOCKS), (states.log_weight, states.anchor, states.steep)
    problem.launch(kernel, problem.programs(key_heads), (*own, *tensors), (grad, dk, dv))
    launch_steep(steep_keys, problem, key_heads, (states.steep, *tensors), (grad, dk, dv))
    return grads
