"""Windowed attention in Triton: exact inside blocks of tokens, by summaries between them, one normaliser.

The mathematics are those of `favor.kernels.eager.window`. Forwards, the keys of every block are summed up, sweeps over
the blocks make the summaries of each from the others, and tiles of queries read the summaries and the keys of their
block, with s_m the mean of a summary and c the bias of the query:

    l_i = log(sum_m exp(q_i.uq_m + log_weight_m) + sum_j exp(scale q_i.k_j - c_i)),
    out_i = sum_m exp(q_i.uq_m + log_weight_m - l_i) s_m + sum_j exp(scale q_i.k_j - c_i - l_i) v_j

Backwards, tiles of queries read them again. With p the weights of the softmax, g the gradient of the output and
delta_i = g_i.out_i, the gradient of the logit of a summary is p_im (g_i.s_m - delta_i), and that of a key
p_ij (g_i.v_j - delta_i). The bias of the queries is subtracted from the logits of the keys, which is equivalent to
adding it to those of the summaries. What the queries send to the summaries is summed up and swept over in the same way.

From the queries of its own block a key gets the gradients of softmax attention. The gradients from other blocks are
collected in the summaries of its block: with r_m and e_m the means of g and delta there, rho_m their log weight and
t_jm = exp(k_j.uk_m + bias_j + offset_m + rho_m), the gradient of v_j is sum_m t_jm r_m, and that of the logit of a
summary t_jm (v_j.r_m - e_m). Nothing is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.blocks import Problem, key_states, load_keys, locate_tile, query_states
from favor.kernels.gpu.common import (
    LN2,
    LOG2E,
    Blocks,
    absorb,
    contract,
    load_rows,
    load_tile,
    mix,
    store_tile,
    wide,
)
from favor.kernels.operands import Geometry, Gradients, Operands, Result

_FORWARD = {
    128: (Blocks(64, 32, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(128, 64, 4, 3)),
    256: (Blocks(64, 32, 4, 3), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2)),
    512: (Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2)),
    1024: (Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)),
}
_BACKWARD = {
    128: (Blocks(64, 32, 8, 2), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
    256: (Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    512: (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    1024: (Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _read(
    query, key, value, directions, key_bias, query_bias, log_weight, summary, out, lse,
    cu_q, cu_k, queries, keys, batches, window, blocks, longest, scale,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Reads for one tile of the queries of a block, one head. Rows that see nothing get zeros, and infinity as l."""
    head, source, sequence, batch, slot, query_zero, key_zero, position, first, start, stop, outside = locate_tile(
        cu_q, cu_k, queries, keys, window, blocks, longest, HK, GROUP, IS_CAUSAL, True, TOKENS
    )
    if (position >= stop) | (position + TOKENS <= start):
        return
    place = position + tl.arange(0, TOKENS)
    inside = (place >= start) & (place < stop)
    token = query_zero + position
    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, inside, width, WIDTH)
    number = (batch * HK * GROUP + head) * queries + token + tl.arange(0, TOKENS)
    own = tl.load(query_bias + number, mask=inside, other=0.0) * LOG2E

    directions += (sequence * OWN * HK + source) * M * width
    state = ((slot * batches + batch) * HK + source) * M
    log_weight += state
    summary += state * value_width
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    for begin in range(0, tl.where(outside, M, 0), FEATURES):
        feature = begin + tl.arange(0, FEATURES)
        real = feature < M
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        u = load_rows(directions + begin * width, width, real, width, FEATURES, WIDTH)
        s = load_rows(summary + begin * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        top, total, weights, decay = absorb(contract(q, u) * LOG2E + shift[None, :], top, total)
        acc = mix(weights, s, acc * decay[:, None])

    key_bias += (batch * HK + source) * keys + key_zero
    last = tl.minimum(stop, position + TOKENS) if IS_CAUSAL else stop
    for begin in range(first, last, FEATURES):
        _, v, logits = load_keys(
            q, own, place, begin, last, scale, key, value, key_bias, batch, source, key_zero,
            key_batch, key_head, key_row, value_batch, value_head, value_row,
            width, value_width, VALUE_WIDTH, IS_CAUSAL, FEATURES,
        )  # fmt: skip
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, v, acc * decay[:, None])

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + number, tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2), mask=inside)
    store_tile(
        out, batch, head, token, out_batch, out_head, out_row, acc / total[:, None], inside, value_width, VALUE_WIDTH
    )


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _query_gradients(
    grad, query, key, value, directions, key_bias, query_bias, log_weight, summary, out, lse, dq, dquery_bias,
    delta,
    cu_q, cu_k, queries, keys, batches, window, blocks, longest, scale,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of the queries of a block, one head; also writes delta."""
    head, source, sequence, batch, slot, query_zero, key_zero, position, first, start, stop, outside = locate_tile(
        cu_q, cu_k, queries, keys, window, blocks, longest, HK, GROUP, IS_CAUSAL, True, TOKENS
    )
    if (position >= stop) | (position + TOKENS <= start):
        return
    place = position + tl.arange(0, TOKENS)
    inside = (place >= start) & (place < stop)
    token = query_zero + position
    q = load_tile(query, batch, head, token, query_batch, query_head, query_row, inside, width, WIDTH)
    g = load_tile(grad, batch, head, token, grad_batch, grad_head, grad_row, inside, value_width, VALUE_WIDTH)
    o = load_tile(out, batch, head, token, out_batch, out_head, out_row, inside, value_width, VALUE_WIDTH)
    pull = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    number = (batch * HK * GROUP + head) * queries + token + tl.arange(0, TOKENS)
    tl.store(delta + number, pull, mask=inside)
    norm = tl.load(lse + number, mask=inside, other=float("inf")) * LOG2E
    own = norm + tl.load(query_bias + number, mask=inside, other=0.0) * LOG2E

    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    key_bias += (batch * HK + source) * keys + key_zero
    last = tl.minimum(stop, position + TOKENS) if IS_CAUSAL else stop
    for begin in range(first, last, FEATURES):
        k, v, logits = load_keys(
            q, own, place, begin, last, scale, key, value, key_bias, batch, source, key_zero,
            key_batch, key_head, key_row, value_batch, value_head, value_row,
            width, value_width, VALUE_WIDTH, IS_CAUSAL, FEATURES,
        )  # fmt: skip
        acc = wide(tl.exp2(logits) * (contract(g, v) - pull[:, None]), k, acc, q)

    acc *= scale
    bias_acc = tl.zeros([TOKENS], tl.float32)
    directions += (sequence * OWN * HK + source) * M * width
    state = ((slot * batches + batch) * HK + source) * M
    log_weight += state
    summary += state * value_width
    for begin in range(0, tl.where(outside, M, 0), FEATURES):
        feature = begin + tl.arange(0, FEATURES)
        real = feature < M
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        u = load_rows(directions + begin * width, width, real, width, FEATURES, WIDTH)
        s = load_rows(summary + begin * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        slopes = tl.exp2(contract(q, u) * LOG2E + shift[None, :] - norm[:, None]) * (contract(g, s) - pull[:, None])
        bias_acc += tl.sum(slopes, axis=1)
        acc = wide(slopes, u, acc, q)

    tl.store(dquery_bias + number, bias_acc, mask=inside)
    store_tile(dq, batch, head, token, dq_batch, dq_head, dq_row, acc, inside, width, WIDTH)


@triton.jit
def _pull(values, gathered):
    """Multiplies `[R, W]` x `[M, W]` -> `[R, M]`; what is gathered for float16 is float32."""
    if values.dtype == gathered.dtype:
        return contract(values, gathered)
    else:
        return tl.dot(values.to(gathered.dtype), tl.trans(gathered), input_precision="tf32")


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _key_gradients(
    grad, query, key, value, directions, key_bias, query_bias, lse, delta, log_weight, gathered, share, dk, dv,
    dbias,
    cu_q, cu_k, queries, keys, batches, window, blocks, longest, scale,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    M: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    OWN: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of the keys of a block, one key head."""
    _, source, sequence, batch, slot, query_zero, key_zero, position, _, start, stop, outside = locate_tile(
        cu_q, cu_k, queries, keys, window, blocks, longest, HK, 1, IS_CAUSAL, False, TOKENS
    )
    if position >= stop:
        return
    place = position + tl.arange(0, TOKENS)
    inside = place < stop
    token = key_zero + position
    number = (batch * HK + source) * keys + token + tl.arange(0, TOKENS)
    own = tl.load(key_bias + number, mask=inside, other=float("-inf")) * LOG2E
    shown = own > float("-inf")
    k = load_tile(key, batch, source, token, key_batch, key_head, key_row, shown, width, WIDTH)
    v = load_tile(value, batch, source, token, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)

    key_acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    value_acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    hidden = tl.where(shown, 0.0, float("-inf"))
    if IS_CAUSAL:
        start = tl.maximum(start, position)
    for step in range(0, tl.cdiv(tl.maximum(stop - start, 0), FEATURES) * GROUP):
        head = source * GROUP + step % GROUP
        begin = start + step // GROUP * FEATURES
        column = begin + tl.arange(0, FEATURES)
        asking = column < stop
        row = query_zero + begin
        q = load_tile(query, batch, head, row, query_batch, query_head, query_row, asking, width, WIDTH)
        g = load_tile(grad, batch, head, row, grad_batch, grad_head, grad_row, asking, value_width, VALUE_WIDTH)
        asked = (batch * HK * GROUP + head) * queries + row + tl.arange(0, FEATURES)
        norm = tl.load(lse + asked, mask=asking, other=float("inf"))
        norm += tl.load(query_bias + asked, mask=asking, other=0.0)
        pull = tl.load(delta + asked, mask=asking, other=0.0)
        logits = contract(k, q) * (scale * LOG2E) - (norm * LOG2E)[None, :] + hidden[:, None]
        if IS_CAUSAL:
            logits = tl.where(place[:, None] <= column[None, :], logits, float("-inf"))
        weights = tl.exp2(logits)
        value_acc = mix(weights, g, value_acc)
        key_acc = wide(weights * (contract(v, g) - pull[None, :]), q, key_acc, q)

    key_acc *= scale
    bias_acc = tl.zeros([TOKENS], tl.float32)
    directions += (sequence * OWN * HK + source) * M * width
    state = ((slot * batches + batch) * HK + source) * M
    log_weight += state
    share += state
    gathered += state * value_width
    for begin in range(0, tl.where(outside, M, 0), FEATURES):
        feature = begin + tl.arange(0, FEATURES)
        real = feature < M
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        e = tl.load(share + feature, mask=real, other=0.0)
        u = load_rows(directions + begin * width, width, real, width, FEATURES, WIDTH)
        r = load_rows(gathered + begin * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        weights = tl.exp2(contract(k, u) * LOG2E + shift[None, :] + own[:, None])
        slopes = weights * (_pull(v, r) - e[None, :])
        bias_acc += tl.sum(slopes, axis=1)
        value_acc = wide(weights, r, value_acc, v)
        key_acc = wide(slopes, u, key_acc, k)

    tl.store(dbias + number, bias_acc, mask=inside)
    store_tile(dk, batch, source, token, dk_batch, dk_head, dk_row, key_acc, inside, width, WIDTH)
    store_tile(dv, batch, source, token, dv_batch, dv_head, dv_row, value_acc, inside, value_width, VALUE_WIDTH)


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Computes the attention output and what the backward pass needs.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, +inf where a query
        sees no key; log weights `[b, B, Hk, M]` and summaries `[b, B, Hk, M, dv]` of what lies outside of each of b
        blocks, the latter in the type of the values.
    """
    problem = Problem(operands, geometry)
    states = key_states(problem)
    query, key, value, directions, _, offset, key_bias, query_bias = operands
    batch, heads, length = query.shape[:3]
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    result = Result(out, offset.new_empty(batch, heads, length), states.log_weight, states.summary)
    inputs = (query, key, value, directions.to(query.dtype), key_bias, query_bias)
    kernel, tensors = problem.tuned(_read, _FORWARD), (*inputs, *states[:2], *result[:2])
    problem.launch(kernel, heads, problem.query_blocks, tensors, (out,))
    return result


def backward(
    grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool = False
) -> Gradients:
    """Computes gradients of query, key, value, key_bias and query_bias from that of the output and what `forward` gave.

    The torch kernel computes gradients of the directions: `for_directions` must be False.
    """
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    problem = Problem(operands, geometry)
    grads = Gradients.empty(operands, for_directions=False)
    query, key, value, query_directions, key_directions, _, *biases = operands
    out, lse, weight, summary = saved
    delta = torch.empty_like(lse)
    inputs = (grad, query, key, value, query_directions.to(query.dtype), *biases)
    tensors = (*inputs, weight, summary, out, lse, grads.query, grads.query_bias, delta)
    kernel = problem.tuned(_query_gradients, _BACKWARD)
    problem.launch(kernel, query.shape[1], problem.query_blocks, tensors, (grad, out, grads.query))
    sent = query_states(problem, grad, lse, delta)
    inputs = (grad, query, key, value, key_directions.to(key.dtype), *biases)
    tensors = (*inputs, lse, delta, *sent, grads.key, grads.value, grads.key_bias)
    kernel = problem.tuned(_key_gradients, _BACKWARD)
    problem.launch(kernel, key.shape[1], problem.blocks, tensors, (grad, grads.key, grads.value))
    return grads
