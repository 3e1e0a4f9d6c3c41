"""Output of windowed attention: each query takes one softmax over the summaries of its block and the keys in it.

    l_i = log(sum_m exp(q_i.uq_m + log_weight_m) + sum_j exp(scale q_i.k_j - c_i)),
    out_i = sum_m exp(q_i.uq_m + log_weight_m - l_i) s_m + sum_j exp(scale q_i.k_j - c_i - l_i) v_j

with s_m the mean of a summary and c the bias of the query.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import LN2, LOG2E, Blocks, absorb, contract, load_rows, load_tile, mix, store_tile
from favor.kernels.gpu.window.problem import Problem, load_keys, locate_tile
from favor.kernels.gpu.window.states import States

_BLOCKS = {
    128: (Blocks(128, 64, 8, 3), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 128, 8, 2)),
    256: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    512: (Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2)),
    1024: (Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)),
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


def read(problem: Problem, states: States) -> tuple[Tensor, Tensor]:
    """Computes output `[B, H, L, dv]`, laid out `[B, L, H, dv]`, and l `[B, H, L]`."""
    query, key, value, directions, _, offset, key_bias, query_bias = problem.operands
    batch, heads, length = query.shape[:3]
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    lse = offset.new_empty(batch, heads, length)
    tensors = (query, key, value, directions.to(query.dtype), key_bias, query_bias, *states[:2], out, lse)
    problem.launch(problem.tuned(_read, _BLOCKS), heads, problem.query_blocks, tensors, (out,))
    return out, lse
