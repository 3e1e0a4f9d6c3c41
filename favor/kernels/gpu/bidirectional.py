"""Bidirectional and cross attention in Triton: two softmax attentions, with the features between them.

The keys are summed up per feature (`favor.kernels.gpu.summary`), and every query reads a mean of the summaries:

    l_i = logsumexp_m (q_i.uq_m + log_weight_m),   out_i = sum_m exp(q_i.uq_m + log_weight_m - l_i) s_m

with s the means of the summaries. Both run like softmax attention, a block of tokens by a block of features at a time,
so no feature is ever stored. The gradients of the tokens come from a second pass over the summaries.

Products with the gradients are taken in the type of the inputs. float16 has a narrow range, so there every row is first
divided by its magnitude, and multiplied by it at the end; `RANGE` switches this on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LN2,
    LOG2E,
    Blocks,
    Problem,
    bounds,
    ceil_divide,
    contract,
    finite,
    load_rows,
    load_tile,
    mix,
    shared_stride,
    store_tile,
    strides,
    tuned,
    width_constants,
)
from favor.kernels.gpu.summary import Summaries, collect, empty_summaries, join
from favor.kernels.operands import Geometry, Gradients, Operands, Result

_BLOCKS = {
    128: (Blocks(128, 64, 4, 3), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
    256: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    512: (Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2)),
    1024: (Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)),
}
_BACKWARD_BLOCKS = {
    128: (Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 2), Blocks(128, 32, 4, 3), Blocks(128, 64, 8, 2)),
    256: (Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    512: (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    1024: (Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}
# In place of those above for float32, whose products are sums of three and need their registers.
_PRECISE = {512: (Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2))}
_PRECISE_BACKWARD = {512: (Blocks(16, 16, 8, 1), Blocks(32, 32, 8, 1))}


@triton.jit
def _locate_tile(cumulative, length, max_length, heads, TOKENS: tl.constexpr):
    """Locates the tile of this program: head, sequence, batch row, first row, and which of its rows exist `[TOKENS]`.

    There are none if the sequence ends before the tile.
    """
    blocks = tl.cdiv(max_length, TOKENS)
    program = tl.program_id(0)
    block = program % blocks * TOKENS
    head = (program // blocks).to(tl.int64) % heads
    sequence = (program // blocks).to(tl.int64) // heads
    batch, start, length = bounds(cumulative, sequence, length)
    return head, sequence, batch, start + block, length - block


@triton.jit(do_not_specialize=["length", "total_length"])
def _read(
    query, directions, log_weight, summary, cumulative, out, lse,
    length, total_length, max_length, heads, group, features,
    directions_sequence, query_batch, query_head, query_row, out_batch, out_head, out_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    head, sequence, batch, start, left = _locate_tile(cumulative, length, max_length, heads, TOKENS)
    if left <= 0:
        return
    row = tl.arange(0, TOKENS)
    inside = row < left
    q = load_tile(query, batch, head, start, query_batch, query_head, query_row, inside, width, WIDTH)
    first_feature = head // group * features
    directions += sequence * directions_sequence + first_feature * width
    first_feature += sequence * (heads // group * features)
    log_weight += first_feature
    summary += first_feature * value_width

    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        real = feature < features
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        u = load_rows(directions + first * width, width, real, width, FEATURES, WIDTH)
        s = load_rows(summary + first * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        logits = contract(q, u) * LOG2E + shift[None, :]
        risen = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - risen[:, None])
        decay = tl.exp2(top - risen)
        total = total * decay + tl.sum(weights, 1)
        acc = mix(weights, s, acc * decay[:, None])
        top = risen

    acc = acc / total[:, None]
    store_tile(out, batch, head, start, out_batch, out_head, out_row, acc, inside, value_width, VALUE_WIDTH)
    lse += (batch * heads + head) * total_length + start
    tl.store(lse + row, (top + tl.log2(total)) * LN2, mask=inside)


@triton.jit(do_not_specialize=["length", "total_length"])
def _query_gradients(
    grad, query, directions, log_weight, summary, out, lse, cumulative, dq, delta,
    length, total_length, max_length, heads, group, features,
    directions_sequence, grad_batch, grad_head, grad_row, query_batch, query_head, query_row,
    out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    head, sequence, batch, start, left = _locate_tile(cumulative, length, max_length, heads, TOKENS)
    if left <= 0:
        return
    row = tl.arange(0, TOKENS)
    inside = row < left
    q = load_tile(query, batch, head, start, query_batch, query_head, query_row, inside, width, WIDTH)
    g = load_tile(grad, batch, head, start, grad_batch, grad_head, grad_row, inside, value_width, VALUE_WIDTH)
    o = load_tile(out, batch, head, start, out_batch, out_head, out_row, inside, value_width, VALUE_WIDTH)
    place = (batch * heads + head) * total_length + start
    pull = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + place + row, pull, mask=inside)
    if RANGE:
        power = tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(g.to(tl.float32)), 1), 1e-30)))
        g = (g.to(tl.float32) * tl.exp2(-power)[:, None]).to(g.dtype)
        pull *= tl.exp2(-power)
    norm = tl.load(lse + place + row, mask=inside, other=float("inf")) * LOG2E

    first_feature = head // group * features
    directions += sequence * directions_sequence + first_feature * width
    first_feature += sequence * (heads // group * features)
    log_weight += first_feature
    summary += first_feature * value_width
    acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        real = feature < features
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        u = load_rows(directions + first * width, width, real, width, FEATURES, WIDTH)
        s = load_rows(summary + first * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        weights = tl.exp2(contract(q, u) * LOG2E + shift[None, :] - norm[:, None])
        acc = mix(weights * (contract(g, s) - pull[:, None]), u, acc)

    if RANGE:
        acc *= tl.exp2(power)[:, None]
    store_tile(dq, batch, head, start, dq_batch, dq_head, dq_row, acc, inside, width, WIDTH)


@triton.jit(do_not_specialize=["length", "total_length"])
def _key_gradients(
    key, value, directions, bias, log_weight, gathered, share, cumulative, dk, dv, dbias,
    length, total_length, max_length, heads, features,
    directions_sequence, key_batch, key_head, key_row, value_batch, value_head, value_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    head, sequence, batch, start, left = _locate_tile(cumulative, length, max_length, heads, TOKENS)
    if left <= 0:
        return
    row = tl.arange(0, TOKENS)
    inside = row < left
    place = (batch * heads + head) * total_length + start
    own = tl.load(bias + place + row, mask=inside, other=float("-inf")) * LOG2E
    visible = own > float("-inf")
    k = load_tile(key, batch, head, start, key_batch, key_head, key_row, visible, width, WIDTH)
    v = load_tile(value, batch, head, start, value_batch, value_head, value_row, visible, value_width, VALUE_WIDTH)

    directions += sequence * directions_sequence + head * features * width
    first_feature = (sequence * heads + head) * features
    log_weight += first_feature
    share += first_feature
    gathered += first_feature * value_width
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    bias_sum = tl.zeros([TOKENS], tl.float32)
    key_acc = tl.zeros([TOKENS, WIDTH], tl.float32)
    value_acc = tl.zeros([TOKENS, VALUE_WIDTH], tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        real = feature < features
        shift = tl.load(log_weight + feature, mask=real, other=float("-inf")) * LOG2E
        e = tl.load(share + feature, mask=real, other=0.0)
        u = load_rows(directions + first * width, width, real, width, FEATURES, WIDTH)
        r = load_rows(gathered + first * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        logits = contract(k, u) * LOG2E + shift[None, :]
        if RANGE:
            risen = tl.maximum(top, tl.max(logits, 1))
            base = finite(risen)
            weights = tl.exp2(logits - base[:, None])
            decay = tl.exp2(top - base)
            bias_sum *= decay
            key_acc *= decay[:, None]
            value_acc *= decay[:, None]
            top = risen
        else:
            weights = tl.exp2(logits + own[:, None])
        slopes = weights * (contract(v, r) - e[None, :])
        bias_sum += tl.sum(slopes, 1)
        value_acc = mix(weights, r, value_acc)
        key_acc = mix(slopes, u, key_acc)

    if RANGE:
        scale = tl.exp2(top + own)
        bias_sum *= scale
        key_acc *= scale[:, None]
        value_acc *= scale[:, None]
    tl.store(dbias + place + row, bias_sum, mask=inside)
    store_tile(dk, batch, head, start, dk_batch, dk_head, dk_row, key_acc, inside, width, WIDTH)
    store_tile(dv, batch, head, start, dv_batch, dv_head, dv_row, value_acc, inside, value_width, VALUE_WIDTH)


def forward(operands: Operands, geometry: Geometry, splits: int | None = None) -> Result:
    """Computes the attention output and what the backward pass needs; cuts the keys into `splits` pieces.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`; logarithm of the
        weight of each summary `[N, Hk, M]` and its mean `[N, Hk, M, dv]`, zeros where no key is visible, in the type
        of the values.
    """
    query, key, value, directions, key_directions, offset, key_bias, _ = operands
    parts = collect(key_directions, key, key_bias, value, geometry.cu_k, geometry.max_k, splits=splits)
    result = Result.empty("bidirectional", operands, geometry, joins_heads=True, keeps_lse=True, rounds_summaries=True)
    out, lse, log_weight, means = result
    join(parts, Summaries(means, log_weight), offset, fill=True)
    tensors = (query, directions.to(query.dtype), log_weight, means, geometry.cu_q)
    _launch(_read, _BLOCKS, Problem(operands, geometry), True, (*tensors, out, lse), (query, out))
    return result


def backward(
    grad: Tensor,
    operands: Operands,
    geometry: Geometry,
    saved: Result,
    for_directions: bool = False,
    splits: int | None = None,
) -> Gradients:
    """Computes the gradients of query, key, value and key_bias from that of the output and what `forward` returned.

    The torch kernel computes gradients of the directions: `for_directions` must be False.

    With p_im the weights of the read and delta_i = g_i.out_i, the gradient of a query logit is
    p_im (g_i.s_m - delta_i). The summaries gather g and delta from the queries as they gather values from the keys: r_m
    and e_m, with weight rho_m. With t_jm = exp(k_j.uk_m + bias_j + offset_m + rho_m), the gradient of v_j is
    sum_m t_jm r_m and that of a key logit is t_jm (v_j.r_m - e_m).
    """
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    problem, grads = Problem(operands, geometry), Gradients.empty(operands, for_directions=False)
    query, key, value, query_directions, key_directions, offset, bias, _ = operands
    out, lse, log_weight, summary = saved
    delta, constants = torch.empty_like(lse), {"RANGE": query.dtype == torch.float16}
    directions = query_directions.to(query.dtype)
    tensors = (grad, query, directions, log_weight, summary, out, lse, geometry.cu_q, grads.query, delta)
    strided: tuple[Tensor, ...] = (grad, query, out, grads.query)
    _launch(_query_gradients, _BACKWARD_BLOCKS, problem, True, tensors, strided, **constants)
    parts = collect(query_directions, query, lse, grad, geometry.cu_q, geometry.max_q, delta, splits)
    gathered = empty_summaries(parts)._replace(mean=torch.empty_like(summary))
    join(parts, gathered, offset, rescale=True)  # offset + rho, r (mean) and e (extra)
    found = (gathered.log_weight, gathered.mean, gathered.extra, geometry.cu_k)
    inputs = (key, value, key_directions.to(key.dtype), bias, *found, grads.key, grads.value, grads.key_bias)
    strided = (key, value, grads.key, grads.value)
    _launch(_key_gradients, _BACKWARD_BLOCKS, problem, False, inputs, strided, **constants)
    return grads


def _launch(
    kernel: Any,
    choices: dict[int, tuple[Blocks, ...]],
    problem: Problem,
    of_queries: bool,
    tensors: tuple[Any, ...],
    strided: tuple[Tensor, ...],
    **constants: bool,
) -> None:
    """Launches `kernel` for all tiles of the queries, or of the keys, with `tensors` and the strides of `strided`."""
    query, key, value, directions, *_ = problem.operands
    tokens, longest = (query, problem.geometry.max_q) if of_queries else (key, problem.geometry.max_k)
    heads, length, width = tokens.shape[1:]
    key_heads, features = directions.shape[1:3]
    groups = (heads // key_heads,) if of_queries else ()
    count = problem.sequences * heads
    if not count * longest:
        return
    if tokens.element_size() == 4:
        choices = choices | (_PRECISE if kernel is _read else _PRECISE_BACKWARD)
    kernel = tuned(kernel, choices, (width, value.shape[-1]), tokens)
    kernel[lambda block: (count * ceil_divide(longest, block["TOKENS"]),)](
        *tensors,
        *(length, length, longest, heads, *groups, features),
        *(shared_stride(directions), *strides(*strided)),
        **width_constants(width, value.shape[-1]),
        **constants,
    )
