"""Gradients of queries in windowed attention, and of their bias: once more over the landmarks and the keys of a block.

With p the weights of the softmax, g the gradient of the output and delta_i = g_i.out_i, the gradient of the logit of a
landmark is p_im (g_i.s_m - delta_i), and that of a key p_ij (g_i.v_j - delta_i). The bias is subtracted from the logits
of the keys, which is as good as adding it to those of the landmarks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import corner, wide
from favor.kernels.gpu.common import LOG2E, Blocks, ceil_divide, contract, load_rows, store_rows
from favor.kernels.gpu.window.problem import Problem, locate_tile

_BLOCKS = {
    128: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2)),
    256: (Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    512: (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    1024: (Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _query_gradients(
    grad,
    query,
    key,
    value,
    directions,
    key_bias,
    query_bias,
    log_weight,
    summary,
    out,
    lse,
    dq,
    dquery_bias,
    delta,
    cu_q,
    cu_k,
    queries,
    keys,
    batches,
    window,
    blocks,
    longest,
    scale,
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
    out_batch,
    out_head,
    out_row,
    dq_batch,
    dq_head,
    dq_row,
    M: tl.constexpr,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    OWN: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One tile of the queries of a block, one head; also writes delta."""
    head, source, sequence, batch, slot, query_zero, key_zero, position, first, start, stop, outside = locate_tile(
        cu_q, cu_k, queries, keys, window, blocks, longest, HK, GROUP, IS_CAUSAL, True, TOKENS
    )
    if (position >= stop) | (position + TOKENS <= start):
        return
    place = position + tl.arange(0, TOKENS)
    inside = (place >= start) & (place < stop)
    token = query_zero + position
    there = corner(query, batch, head, token, query_batch, query_head, query_row)
    q = load_rows(there, query_row, inside, width, TOKENS, WIDTH)
    there = corner(grad, batch, head, token, grad_batch, grad_head, grad_row)
    g = load_rows(there, grad_row, inside, value_width, TOKENS, VALUE_WIDTH)
    there = corner(out, batch, head, token, out_batch, out_head, out_row)
    o = load_rows(there, out_row, inside, value_width, TOKENS, VALUE_WIDTH)
    pull = tl.sum(g.to(tl.float32) * o.to(tl.float32), axis=1)
    number = (batch * HK * GROUP + head) * queries + token + tl.arange(0, TOKENS)
    tl.store(delta + number, pull, mask=inside)
    norm = tl.load(lse + number, mask=inside, other=float("inf")) * LOG2E
    own = norm + tl.load(query_bias + number, mask=inside, other=0.0) * LOG2E

    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    key_bias += (batch * HK + source) * keys + key_zero
    last = tl.minimum(stop, position + TOKENS) if IS_CAUSAL else stop
    for begin in range(first, last, FEATURES):
        column = begin + tl.arange(0, FEATURES)
        shown = tl.load(key_bias + column, mask=column < last, other=float("-inf")) > float("-inf")
        there = corner(key, batch, source, key_zero + begin, key_batch, key_head, key_row)
        k = load_rows(there, key_row, shown, width, FEATURES, WIDTH)
        there = corner(value, batch, source, key_zero + begin, value_batch, value_head, value_row)
        v = load_rows(there, value_row, shown, value_width, FEATURES, VALUE_WIDTH)
        logits = contract(q, k) * (scale * LOG2E) - own[:, None]
        logits += tl.where(shown, 0.0, float("-inf"))[None, :]
        if IS_CAUSAL:
            logits = tl.where(column[None, :] <= place[:, None], logits, float("-inf"))
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
    there = corner(dq, batch, head, token, dq_batch, dq_head, dq_row)
    store_rows(there, dq_row, acc, inside, width, TOKENS, WIDTH)


def query_gradients(
    problem: Problem, grad: Tensor, out: Tensor, lse: Tensor, weight: Tensor, summary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries and of their bias, and delta `[B, H, L]`, the product of output and gradient."""
    query = problem.query
    dq, dquery_bias, delta = torch.empty_like(query), torch.empty_like(lse), torch.empty_like(lse)
    directions = problem.query_directions.to(query.dtype)
    count = problem.sequences * query.shape[1] * problem.query_blocks
    if count:
        problem.tuned(_query_gradients, _BLOCKS)[
            lambda block: (count * ceil_divide(problem.longest, block["TOKENS"]),)
        ](
            grad,
            query,
            problem.key,
            problem.value,
            directions,
            problem.key_bias,
            problem.query_bias,
            weight,
            summary,
            out,
            lse,
            dq,
            dquery_bias,
            delta,
            *problem.sizes,
            problem.query_blocks,
            problem.longest,
            problem.scale,
            *problem.strides,
            *grad.stride()[:3],
            *out.stride()[:3],
            *dq.stride()[:3],
            **problem.constants,
        )
    return dq, dquery_bias, delta
