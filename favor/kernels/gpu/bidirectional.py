"""Bidirectional and cross attention in Triton: two softmax attentions through M landmarks, the features.

The keys are summarised in landmarks (`favor.kernels.gpu.summary`), and every query reads a mean of the landmarks:

    l_i = logsumexp_m (q_i.uq_m + mu_m),   out_i = sum_m exp(q_i.uq_m + mu_m - l_i) s_m

with mu the logarithm of the weight of a landmark and s its summary. Both run like softmax attention, a block of
tokens by a block of features at a time, so no feature is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.bidirectional_backward import key_gradients, query_gradients
from favor.kernels.gpu.common import (
    LN2,
    LOG2E,
    Blocks,
    bounds,
    ceil_divide,
    contract,
    load_rows,
    mix,
    padded_width,
    store_rows,
    tuned,
)
from favor.kernels.gpu.summary import Landmarks, collect, empty_landmarks, join
from favor.kernels.operands import Geometry, Gradients, Operands, Result

_BLOCKS = {
    128: (Blocks(128, 64, 4, 3), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)),
    256: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    512: (Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2)),
    1024: (Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)),
}


@triton.jit(do_not_specialize=["length", "total_length"])
def _read(
    query,
    directions,
    log_weight,
    summary,
    cumulative,
    out,
    lse,
    length,
    total_length,
    max_length,
    heads,
    group,
    features,
    directions_sequence,
    query_batch,
    query_head,
    query_row,
    out_batch,
    out_head,
    out_row,
    width: tl.constexpr,
    value_width: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
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
    q = load_rows(query, query_row, inside, width, TOKENS, WIDTH)
    landmark_head = head // group * features
    directions += sequence * directions_sequence + landmark_head * width
    landmark_head += sequence * (heads // group * features)
    log_weight += landmark_head
    summary += landmark_head * value_width

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
    out += batch * out_batch + head * out_head + start * out_row
    store_rows(out, out_row, acc, inside, value_width, TOKENS, VALUE_WIDTH)
    lse += (batch * heads + head) * total_length + start
    tl.store(lse + row, (top + tl.log2(total)) * LN2, mask=inside)


def forward(operands: Operands, geometry: Geometry, splits: int | None = None) -> Result:
    """Attention output and what the backward pass needs.

    Args:
        operands: the last stride of query, key and value is 1; the other tensors are float32.
        geometry: the longest sequences and where packed ones begin are read.
        splits: into how many pieces to cut the keys; by default, as many as fill the device.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`; logarithm of the
        weight of each landmark `[N, Hk, M]` and its summary `[N, Hk, M, dv]`, zeros where no key is visible.
    """
    value, cu_k, max_k = operands.value, geometry.cu_k, geometry.max_k
    parts = collect(operands.key_directions, operands.key, operands.key_bias, value, cu_k, max_k, splits=splits)
    found = empty_landmarks(parts)
    if value.dtype != torch.float32:
        found = found._replace(compact=torch.empty_like(found.summary, dtype=value.dtype))
    join(parts, found, operands.offset, fill=True)
    directions = operands.query_directions.to(operands.query.dtype)
    out, lse = _read_landmarks(operands.query, directions, found, geometry.cu_q, geometry.max_q)
    return Result(out, lse, found.log_weight, found.summary)


def _read_landmarks(
    query: Tensor, directions: Tensor, found: Landmarks, cumulative: Tensor | None, max_length: int
) -> tuple[Tensor, Tensor]:
    batch, heads, total_length, width = query.shape
    sequences, landmark_heads, features, value_width = found.summary.shape
    out = query.new_empty(batch, total_length, heads, value_width).transpose(1, 2)
    lse = found.summary.new_empty(batch, heads, total_length)
    longest = total_length if cumulative is None else max_length
    count = sequences * heads
    if not count * longest:
        return out, lse
    kernel = tuned(_read, _BLOCKS, query, out)
    kernel[lambda block: (count * ceil_divide(longest, block["TOKENS"]),)](
        query,
        directions,
        found.log_weight,
        found.summary if found.compact is None else found.compact,
        cumulative,
        out,
        lse,
        total_length,
        total_length,
        longest,
        heads,
        heads // landmark_heads,
        features,
        0 if directions.shape[0] == 1 else directions.stride(0),
        *query.stride()[:3],
        *out.stride()[:3],
        width=width,
        value_width=value_width,
        WIDTH=padded_width(width),
        VALUE_WIDTH=padded_width(value_width),
    )
    return out, lse


def backward(
    grad: Tensor,
    operands: Operands,
    geometry: Geometry,
    saved: Result,
    for_directions: bool = False,
    splits: int | None = None,
) -> Gradients:
    """Gradients of query, key, value and key_bias, from that of the output and from what `forward` returned.

    Those of the directions are for the torch kernel: `for_directions` must be False.

    With p_im the weights of the read and delta_i = g_i.out_i, the gradient of a query logit is
    p_im (g_i.s_m - delta_i). The landmarks gather g and delta from the queries like a summary: r_m and e_m, with weight
    rho_m. With t_jm = exp(k_j.uk_m + bias_j + offset_m + rho_m), the gradient of v_j is sum_m t_jm r_m and that of a
    key logit is t_jm (v_j.r_m - e_m).
    """
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    query, key, value, query_directions, key_directions, offset, key_bias, _ = operands
    cu_q, max_q, dtype = geometry.cu_q, geometry.max_q, query.dtype
    out, lse, mu, summary = saved
    compact = summary if dtype == torch.float32 else summary.to(dtype)
    dq, delta = query_gradients(grad, query, query_directions.to(dtype), mu, compact, out, lse, cu_q, max_q)
    parts = collect(query_directions, query, lse.neg(), grad, cu_q, max_q, delta, splits)
    gathered = empty_landmarks(parts)._replace(summary=None, compact=torch.empty_like(summary, dtype=dtype))
    join(parts, gathered, offset, rescale=True)
    of_keys = key_gradients(key, value, key_directions.to(dtype), key_bias, gathered, geometry.cu_k, geometry.max_k)
    return Gradients(dq, *of_keys, *(offset.new_empty(0) for _ in range(4)))
