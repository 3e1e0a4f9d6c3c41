"""Output of causal attention, a chunk of queries at a time, from the states before the chunk and its own keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import Problem, after_first, load_features, load_logit, locate_chunk
from favor.kernels.gpu.causal.states import States
from favor.kernels.gpu.common import LN2, LOG2E, Blocks, contract, finite, load_rows, load_tile, mix, store_tile, wide

_BLOCKS = {
    128: (Blocks(None, 64, 8, 3), Blocks(None, 64, 8, 2), Blocks(None, 32, 8, 3), Blocks(None, 64, 8, 1)),
    256: (Blocks(None, 64, 8, 2), Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2), Blocks(None, 32, 4, 3)),
    512: (Blocks(None, 32, 8, 2), Blocks(None, 32, 4, 2)),
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


def chunk_outputs(problem: Problem, states: States, out: Tensor, lse: Tensor) -> None:
    """Writes output `[B, H, L, dv]` and logarithm of the normaliser `[B, H, L]` of all chunks that are not steep."""
    tensors = (states.log_weight, states.summary, states.steep, states.anchor, out, lse)
    programs = problem.programs(problem.operands.query.shape[1])
    problem.launch(problem.tuned(_chunk_output, _BLOCKS), programs, tensors, (out,))
