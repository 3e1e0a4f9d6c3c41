"""Gradients of the tokens in bidirectional attention, each from a second pass over the landmarks.

Products with the gradients are taken in the type of the inputs. float16 has a narrow range, so there every row is first
divided by its magnitude, and multiplied by it at the end; `RANGE` switches this on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LOG2E,
    Blocks,
    bounds,
    ceil_divide,
    contract,
    finite,
    load_rows,
    mix,
    padded_width,
    store_rows,
    tuned,
)
from favor.kernels.gpu.summary import Landmarks

_BLOCKS = {
    128: (Blocks(64, 32, 4, 2), Blocks(64, 64, 4, 2), Blocks(128, 32, 4, 3), Blocks(128, 64, 8, 2)),
    256: (Blocks(128, 32, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2)),
    512: (Blocks(64, 16, 8, 2), Blocks(32, 32, 8, 1)),
    1024: (Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}


@triton.jit(do_not_specialize=["length", "total_length"])
def _query_gradients(
    grad,
    query,
    directions,
    log_weight,
    summary,
    out,
    lse,
    cumulative,
    dq,
    delta,
    length,
    total_length,
    max_length,
    heads,
    group,
    features,
    directions_sequence,
    grad_batch,
    grad_head,
    grad_row,
    query_batch,
    query_head,
    query_row,
    out_batch,
    out_head,
    out_row,
    dq_batch,
    dq_head,
    dq_row,
    width: tl.constexpr,
    value_width: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANGE: tl.constexpr,
):
    token_blocks = tl.cdiv(max_length, TOKENS)
    program = tl.program_id(0)
    block = program % token_blocks * TOKENS
    head = (program // token_blocks).to(tl.int64) % heads
    sequence = (program // token_blocks).to(tl.int64) // heads
    batch, start, length = bounds(cumulative, sequence, length)
    if block >= length:
        return

    row = tl.arange(0, TOKENS)
    inside = block + row < length
    start += block
    query += batch * query_batch + head * query_head + start * query_row
    grad += batch * grad_batch + head * grad_head + start * grad_row
    out += batch * out_batch + head * out_head + start * out_row
    q = load_rows(query, query_row, inside, width, TOKENS, WIDTH)
    g = load_rows(grad, grad_row, inside, value_width, TOKENS, VALUE_WIDTH)
    o = load_rows(out, out_row, inside, value_width, TOKENS, VALUE_WIDTH)
    place = (batch * heads + head) * total_length + start
    pull = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + place + row, pull, mask=inside)
    if RANGE:
        power = tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(g.to(tl.float32)), 1), 1e-30)))
        g = (g.to(tl.float32) * tl.exp2(-power)[:, None]).to(g.dtype)
        pull *= tl.exp2(-power)
    norm = tl.load(lse + place + row, mask=inside, other=float("inf")) * LOG2E

    landmark_head = head // group * features
    directions += sequence * directions_sequence + landmark_head * width
    landmark_head += sequence * (heads // group * features)
    log_weight += landmark_head
    summary += landmark_head * value_width
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
    dq += batch * dq_batch + head * dq_head + start * dq_row
    store_rows(dq, dq_row, acc, inside, width, TOKENS, WIDTH)


@triton.jit(do_not_specialize=["length", "total_length"])
def _key_gradients(
    key,
    value,
    directions,
    bias,
    log_weight,
    gathered,
    share,
    cumulative,
    dk,
    dv,
    dbias,
    length,
    total_length,
    max_length,
    heads,
    features,
    directions_sequence,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    width: tl.constexpr,
    value_width: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANGE: tl.constexpr,
):
    token_blocks = tl.cdiv(max_length, TOKENS)
    program = tl.program_id(0)
    block = program % token_blocks * TOKENS
    head = (program // token_blocks).to(tl.int64) % heads
    sequence = (program // token_blocks).to(tl.int64) // heads
    batch, start, length = bounds(cumulative, sequence, length)
    if block >= length:
        return

    row = tl.arange(0, TOKENS)
    inside = block + row < length
    start += block
    place = (batch * heads + head) * total_length + start
    own = tl.load(bias + place + row, mask=inside, other=float("-inf")) * LOG2E
    visible = own > float("-inf")
    key += batch * key_batch + head * key_head + start * key_row
    value += batch * value_batch + head * value_head + start * value_row
    k = load_rows(key, key_row, visible, width, TOKENS, WIDTH)
    v = load_rows(value, value_row, visible, value_width, TOKENS, VALUE_WIDTH)

    directions += sequence * directions_sequence + head * features * width
    landmark_head = (sequence * heads + head) * features
    log_weight += landmark_head
    share += landmark_head
    gathered += landmark_head * value_width
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
    dk += batch * dk_batch + head * dk_head + start * dk_row
    store_rows(dk, dk_row, key_acc, inside, width, TOKENS, WIDTH)
    dv += batch * dv_batch + head * dv_head + start * dv_row
    store_rows(dv, dv_row, value_acc, inside, value_width, TOKENS, VALUE_WIDTH)


def query_gradients(
    grad: Tensor,
    query: Tensor,
    directions: Tensor,
    log_weight: Tensor,
    summary: Tensor,
    out: Tensor,
    lse: Tensor,
    cumulative: Tensor | None,
    max_length: int,
) -> tuple[Tensor, Tensor]:
    """Gradient of the queries, and delta `[B, H, L]`, the product of output and gradient.

    Directions and summary are in the type of the queries, otherwise arguments are as in
    `favor.kernels.gpu.bidirectional.backward`.
    """
    heads, total_length, width = query.shape[1:]
    sequences, landmark_heads, features, value_width = summary.shape
    dq, delta = torch.empty_like(query), torch.empty_like(lse)
    longest = total_length if cumulative is None else max_length
    count = sequences * heads
    if not count * longest:
        return dq, delta
    kernel = tuned(_query_gradients, _BLOCKS, query, out)
    kernel[lambda block: (count * ceil_divide(longest, block["TOKENS"]),)](
        grad,
        query,
        directions,
        log_weight,
        summary,
        out,
        lse,
        cumulative,
        dq,
        delta,
        total_length,
        total_length,
        longest,
        heads,
        heads // landmark_heads,
        features,
        0 if directions.shape[0] == 1 else directions.stride(0),
        *grad.stride()[:3],
        *query.stride()[:3],
        *out.stride()[:3],
        *dq.stride()[:3],
        width=width,
        value_width=value_width,
        WIDTH=padded_width(width),
        VALUE_WIDTH=padded_width(value_width),
        RANGE=query.dtype == torch.float16,
    )
    return dq, delta


def key_gradients(
    key: Tensor,
    value: Tensor,
    directions: Tensor,
    bias: Tensor,
    gathered: Landmarks,
    cumulative: Tensor | None,
    max_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and bias; `gathered` holds offset + rho, r (compact) and e (extra)."""
    heads, total_length, width = key.shape[1:]
    value_width = value.shape[-1]
    dk, dv, dbias = torch.empty_like(key), torch.empty_like(value), torch.empty_like(bias)
    sequences, _, features = gathered.log_weight.shape
    longest = total_length if cumulative is None else max_length
    count = sequences * heads
    if not count * longest:
        return dk, dv, dbias
    kernel = tuned(_key_gradients, _BLOCKS, key, value)
    kernel[lambda block: (count * ceil_divide(longest, block["TOKENS"]),)](
        key,
        value,
        directions,
        bias,
        gathered.log_weight,
        gathered.compact,
        gathered.extra,
        cumulative,
        dk,
        dv,
        dbias,
        total_length,
        total_length,
        longest,
        heads,
        features,
        0 if directions.shape[0] == 1 else directions.stride(0),
        *key.stride()[:3],
        *value.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        width=width,
        value_width=value_width,
        WIDTH=padded_width(width),
        VALUE_WIDTH=padded_width(value_width),
        RANGE=key.dtype == torch.float16,
    )
    return dk, dv, dbias
