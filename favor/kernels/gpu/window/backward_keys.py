"""Gradients of keys, values and the bias of the keys in windowed attention.

From the queries of its own block a key gets the gradients of softmax attention. Those of the other blocks come together
in the landmarks of its block: with r_m and e_m the means of g and delta there, rho_m their log weight and
t_jm = exp(k_j.uk_m + bias_j + offset_m + rho_m), the gradient of v_j is sum_m t_jm r_m, and that of the logit of a
landmark t_jm (v_j.r_m - e_m).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import corner, wide
from favor.kernels.gpu.common import LOG2E, Blocks, ceil_divide, contract, load_rows, mix, store_rows
from favor.kernels.gpu.window.problem import Problem, locate_tile
from favor.kernels.gpu.window.states import States

_BLOCKS = {
    128: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2)),
    256: (Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    512: (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    1024: (Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}


@triton.jit
def _pull(values, gathered):
    """Products `[R, W]` x `[M, W]` -> `[R, M]`; what is gathered for float16 is float32."""
    if values.dtype == gathered.dtype:
        return contract(values, gathered)
    else:
        return tl.dot(values.to(gathered.dtype), tl.trans(gathered), input_precision="tf32")


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _key_gradients(
    grad,
    query,
    key,
    value,
    directions,
    key_bias,
    query_bias,
    lse,
    delta,
    log_weight,
    gathered,
    share,
    dk,
    dv,
    dbias,
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
    IS_CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One tile of the keys of a block, one key head."""
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
    there = corner(key, batch, source, token, key_batch, key_head, key_row)
    k = load_rows(there, key_row, shown, width, TOKENS, WIDTH)
    there = corner(value, batch, source, token, value_batch, value_head, value_row)
    v = load_rows(there, value_row, shown, value_width, TOKENS, VALUE_WIDTH)

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
        there = corner(query, batch, head, row, query_batch, query_head, query_row)
        q = load_rows(there, query_row, asking, width, FEATURES, WIDTH)
        there = corner(grad, batch, head, row, grad_batch, grad_head, grad_row)
        g = load_rows(there, grad_row, asking, value_width, FEATURES, VALUE_WIDTH)
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
    there = corner(dk, batch, source, token, dk_batch, dk_head, dk_row)
    store_rows(there, dk_row, key_acc, inside, width, TOKENS, WIDTH)
    there = corner(dv, batch, source, token, dv_batch, dv_head, dv_row)
    store_rows(there, dv_row, value_acc, inside, value_width, TOKENS, VALUE_WIDTH)


def key_gradients(
    problem: Problem, grad: Tensor, lse: Tensor, delta: Tensor, sent: States
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and bias; `sent` is what the queries outside of each block send to it."""
    key, value = problem.key, problem.value
    dk, dv, dbias = torch.empty_like(key), torch.empty_like(value), torch.empty_like(problem.key_bias)
    directions = problem.key_directions.to(key.dtype)
    count = problem.sequences * key.shape[1] * problem.blocks
    if count:
        problem.tuned(_key_gradients, _BLOCKS)[lambda block: (count * ceil_divide(problem.longest, block["TOKENS"]),)](
            grad,
            problem.query,
            key,
            value,
            directions,
            problem.key_bias,
            problem.query_bias,
            lse,
            delta,
            *sent,
            dk,
            dv,
            dbias,
            *problem.sizes,
            problem.blocks,
            problem.longest,
            problem.scale,
            *problem.strides,
            *grad.stride()[:3],
            *dk.stride()[:3],
            *dv.stride()[:3],
            **problem.constants,
        )
    return dk, dv, dbias
