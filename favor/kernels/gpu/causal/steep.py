"""The chunks whose keys rise too steeply for a common anchor: every weight within them from its own exponents.

These kernels are launched beside the fast ones and return at once for the other chunks. They take rows of a chunk with
the rows of the chunk that they see, a block of each at a time, and go through the features one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import Problem, corner, load_features, load_logit, locate_chunk
from favor.kernels.gpu.causal.states import States
from favor.kernels.gpu.common import LN2, LOG2E, contract, finite, load_rows, mix, store_rows

_FEATURES = 32


@triton.jit
def logit_of_feature(tokens, directions, width: tl.constexpr, WIDTH: tl.constexpr):
    """Logits `[R]` (base 2) of float32 tokens `[R, WIDTH]` for one feature, and its directions `[WIDTH]`."""
    columns = tl.arange(0, WIDTH)
    direction = tl.load(directions + columns, mask=columns < width, other=0.0)
    return tl.sum(tokens * direction[None, :], axis=1) * LOG2E, direction


@triton.jit(do_not_specialize=["queries", "keys", "chunks"])
def _steep_output(
    query,
    key,
    value,
    to_query,
    to_key,
    offset,
    bias,
    log_weight,
    summary,
    steep,
    out,
    lse,
    cu_q,
    cu_k,
    queries,
    keys,
    chunks,
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
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Output and l of some rows of a steep chunk."""
    blocks: tl.constexpr = CHUNK // ROWS
    block = tl.program_id(0) % blocks * ROWS
    head, sequence, batch, slot, token, number, query_count, place, left = locate_chunk(
        tl.program_id(0) // blocks, HK * GROUP, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    token += block
    number += block
    if (left <= block) | (number + ROWS <= 0):
        return
    source = head // GROUP
    state = slot * HK + source
    if tl.load(steep + state) == 0:
        return

    index = tl.arange(0, ROWS)
    asking = (number + index >= 0) & (number + index < query_count)
    q = corner(query, batch, head, token, query_batch, query_head, query_row)
    q = load_rows(q, query_row, asking, width, ROWS, WIDTH)
    landmarks = (sequence * OWN * HK + source) * M
    to_query += landmarks * width
    to_key += landmarks * width
    summary += state * M * value_width
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(0, M, FEATURES):
        features = start + tl.arange(0, FEATURES)
        real = features < M
        before = load_features(log_weight + state * M, features, M)
        directions = load_rows(to_query + start * width, width, real, width, FEATURES, WIDTH)
        weights = contract(q, directions) * LOG2E + before[None, :]
        risen = tl.maximum(top, tl.max(weights, axis=1))
        decay = tl.exp2(top - finite(risen))
        weights = tl.exp2(weights - finite(risen)[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        s = load_rows(summary + start * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        acc = mix(weights, s, acc * decay[:, None])
        top = risen

    q = q.to(tl.float32)
    for other in range(0, block + ROWS, ROWS):
        logit = load_logit(bias + (batch * HK + source) * keys + place + other, other + index < left, ROWS)
        shown = logit > float("-inf")
        k = corner(key, batch, source, place + other, key_batch, key_head, key_row)
        k = load_rows(k, key_row, shown, width, ROWS, WIDTH).to(tl.float32)
        seen = shown[None, :] & (block + index[:, None] >= other + index[None, :])
        most = tl.full([ROWS, ROWS], float("-inf"), tl.float32)
        rest = tl.zeros([ROWS, ROWS], tl.float32)
        for feature in range(0, M):
            lq, _ = logit_of_feature(q, to_query + feature * width, width, WIDTH)
            lk, _ = logit_of_feature(k, to_key + feature * width, width, WIDTH)
            lk += logit + tl.load(offset + landmarks + feature) * LOG2E
            term = tl.where(seen, lq[:, None] + lk[None, :], float("-inf"))
            risen = tl.maximum(most, term)
            rest = rest * tl.exp2(most - finite(risen)) + tl.exp2(term - finite(risen))
            most = risen
        risen = tl.maximum(top, tl.max(most + tl.log2(tl.where(seen, rest, 1.0)), axis=1))
        decay = tl.exp2(top - finite(risen))
        weights = rest * tl.exp2(most - finite(risen)[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = corner(value, batch, source, place + other, value_batch, value_head, value_row)
        v = load_rows(v, value_row, shown, value_width, ROWS, VALUE_WIDTH)
        acc = mix(weights, v, acc * decay[:, None])
        top = risen

    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    acc = acc * tl.where(empty, 0.0, 1.0 / total)[:, None]
    out = corner(out, batch, head, token, out_batch, out_head, out_row)
    store_rows(out, out_row, acc, asking, value_width, ROWS, VALUE_WIDTH)
    total = tl.where(empty, float("inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse + (batch * HK * GROUP + head) * queries + token + index, total, mask=asking)


def rows_of(problem: Problem) -> dict[str, int]:
    """Rows of a chunk, and features of the states, that a program takes at a time."""
    return {"ROWS": min(problem.chunk, 32), "FEATURES": _FEATURES}


def steep_outputs(problem: Problem, states: States, out: Tensor, lse: Tensor) -> None:
    """Writes output and logarithm of the normaliser of all chunks that are steep."""
    constants = problem.constants | rows_of(problem)
    programs = problem.programs(problem.query.shape[1]) * (problem.chunk // constants["ROWS"])
    _steep_output[(programs,)](
        *problem.tensors,
        states.log_weight,
        states.summary,
        states.steep,
        out,
        lse,
        *problem.sizes,
        *problem.strides,
        *out.stride()[:3],
        **constants,
    )
