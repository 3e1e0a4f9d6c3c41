"""Output of windowed attention: each query takes one softmax over the landmarks of its block and the keys in it.

    l_i = log(sum_m exp(q_i.uq_m + mu_m) + sum_j exp(scale q_i.k_j - c_i)),
    out_i = sum_m exp(q_i.uq_m + mu_m - l_i) s_m + sum_j exp(scale q_i.k_j - c_i - l_i) v_j

with mu the log weight of a landmark, s its summary and c the bias of the query.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import corner
from favor.kernels.gpu.common import LN2, LOG2E, Blocks, ceil_divide, contract, finite, load_rows, mix, store_rows
from favor.kernels.gpu.window.problem import Problem, locate_tile
from favor.kernels.gpu.window.states import States

_BLOCKS = {
    128: (Blocks(128, 64, 8, 3), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 128, 8, 2)),
    256: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)),
    512: (Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2)),
    1024: (Blocks(16, 16, 4, 2), Blocks(32, 16, 4, 2)),
}


@triton.jit
def _absorb(logits, values, top, total, acc):
    """One step of a softmax: more logits `[R, C]`, in base 2, and their values `[C, W]`."""
    risen = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits - finite(risen)[:, None])
    decay = tl.exp2(top - finite(risen))
    return risen, total * decay + tl.sum(weights, axis=1), mix(weights, values, acc * decay[:, None])


@triton.jit(do_not_specialize=["queries", "keys", "batches", "blocks", "longest"])
def _read(
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
    out_batch,
    out_head,
    out_row,
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
    """One tile of the queries of a block, one head. Rows that see nothing get zeros, and infinity as l."""
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
        top, total, acc = _absorb(contract(q, u) * LOG2E + shift[None, :], s, top, total, acc)

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
        top, total, acc = _absorb(logits, v, top, total, acc)

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + number, tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2), mask=inside)
    there = corner(out, batch, head, token, out_batch, out_head, out_row)
    store_rows(there, out_row, acc / total[:, None], inside, value_width, TOKENS, VALUE_WIDTH)


def read(problem: Problem, states: States) -> tuple[Tensor, Tensor]:
    """Output `[B, H, L, dv]`, laid out `[B, L, H, dv]`, and l `[B, H, L]`."""
    query, value = problem.query, problem.value
    batch, heads, length = query.shape[:3]
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    lse = problem.offset.new_empty(batch, heads, length)
    directions = problem.query_directions.to(query.dtype)
    count = problem.sequences * heads * problem.query_blocks
    if count:
        problem.tuned(_read, _BLOCKS)[lambda block: (count * ceil_divide(problem.longest, block["TOKENS"]),)](
            query,
            problem.key,
            value,
            directions,
            problem.key_bias,
            problem.query_bias,
            states.log_weight,
            states.summary,
            out,
            lse,
            *problem.sizes,
            problem.query_blocks,
            problem.longest,
            problem.scale,
            *problem.strides,
            *out.stride()[:3],
            **problem.constants,
        )
    return out, lse
