"""One step of causal attention with a recurrent state: the summaries take up one key, and one query reads them.

    log_weight' = logaddexp(log_weight, lk),   summary' = summary + (v - summary) exp(lk - log_weight')
    out = sum_m softmax_m(lq + log_weight' + offset) summary'

A program owns some of the summaries of a key head and serves all its query heads, so that the state is read and written
once. What the programs of a head read is put together like the parts of a summary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LOG2E,
    absorb,
    ceil_divide,
    contract,
    finite,
    load_rows,
    mix,
    padded_width,
    processors,
    shared_stride,
    store_rows,
    width_constants,
)
from favor.kernels.gpu.summary import Summaries, join, summarise

__all__ = ["decode", "summarise"]


@triton.jit
def _take_up(log_weight, summary, logits, value):
    """Adds one more value `[dv]`, whose logits are `[M]`, to weights `[M]` and means `[M, dv]`."""
    first = log_weight == float("-inf")
    top = tl.maximum(log_weight, logits)
    base = finite(top)
    total = tl.exp(log_weight - base) + tl.exp(logits - base)
    risen = top + tl.log(tl.where(total == 0.0, 1.0, total))
    # The first key replaces whatever the state holds; where there is no key yet, it is zeros.
    summary = tl.where(first[:, None], 0.0, summary)
    share = tl.exp(logits - tl.where(first, base, risen))
    return risen, summary + (value[None, :] - summary) * share[:, None]


@triton.jit
def _step(
    query, key, value, query_directions, key_directions, offset, bias, log_weight, summary, out, out_weight,
    key_heads, group, first_row, features, per_program, splits,
    directions_sequence, query_batch, query_head, key_batch, key_head, value_batch, value_head,
    width: tl.constexpr, value_width: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, FEATURES: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    split = (program % splits).to(tl.int32)
    owner = program // splits
    batch = owner // key_heads
    head = owner % key_heads

    column = tl.arange(0, WIDTH)
    value_column = tl.arange(0, VALUE_WIDTH)
    own = tl.load(bias + owner)
    # A hidden key may hold anything, NaN included: it is not even read.
    visible = own > float("-inf")
    key += batch * key_batch + head * key_head
    k = tl.load(key + column, mask=column < tl.where(visible, width, 0), other=0.0).to(tl.float32)
    value += batch * value_batch + head * value_head
    v = tl.load(value + value_column, mask=value_column < tl.where(visible, value_width, 0), other=0.0).to(tl.float32)
    row = first_row + tl.arange(0, GROUP)
    real_row = row < group
    query += batch * query_batch + (head * group + first_row) * query_head
    q = load_rows(query, query_head, real_row, width, GROUP, WIDTH).to(tl.float32)

    shared = batch * directions_sequence + head * features
    query_directions += shared * width
    key_directions += shared * width
    offset += shared
    log_weight += owner * features
    summary += owner * features * value_width
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, VALUE_WIDTH], tl.float32)
    last = tl.minimum((split + 1) * per_program, features)
    for first in range(split * per_program, last, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        real = feature < last
        new = tl.load(log_weight + feature, mask=real, other=float("-inf"))
        s = load_rows(summary + first * value_width, value_width, real, value_width, FEATURES, VALUE_WIDTH)
        if UPDATE:
            uk = load_rows(key_directions + first * width, width, real, width, FEATURES, WIDTH)
            lk = tl.sum(uk * k[None, :], 1) + own
            new, s = _take_up(new, s, lk, v)
            tl.store(log_weight + feature, new, mask=real)
            store_rows(summary + first * value_width, value_width, s, real, value_width, FEATURES, VALUE_WIDTH)

        uq = load_rows(query_directions + first * width, width, real, width, FEATURES, WIDTH)
        shift = tl.where(real, new + tl.load(offset + feature, mask=real, other=0.0), float("-inf"))
        logits = (contract(q, uq) + shift[None, :]) * LOG2E
        top, total, weights, decay = absorb(logits, top, total)
        acc = mix(weights, s, acc * decay[:, None])

    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    weight = tl.where(empty, float("-inf"), top + tl.log2(norm))
    tl.store(out_weight + program * group + row, weight, mask=real_row)
    out += (program * group + first_row) * value_width
    store_rows(out, value_width, acc / norm[:, None], real_row, value_width, GROUP, VALUE_WIDTH)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    log_weight: Tensor,
    summary: Tensor,
    splits: int | None = None,
) -> Tensor:
    """Attends from one new query to all keys so far and the new one; updates log_weight and summary in place.

    The first arguments are those of `favor.kernels.decode`. The state is contiguous float32; at the start log_weight is
    -inf, and the summary is ignored. The summaries of a head are spread over `splits` programs; by default, until the
    device is full. Gives `[B, H, 1, dv]`; zeros where no key was visible yet.
    """
    batch, heads, _, width = query.shape
    key_heads, features, value_width = summary.shape[1:]
    group = heads // key_heads
    out = query.new_empty(batch, 1, heads, value_width).transpose(1, 2)
    owners = batch * key_heads
    if not out.numel():
        return out
    block = 32 if max(width, value_width) <= 64 else 16
    most = 64 if max(width, value_width) <= 128 else 32
    blocks = ceil_divide(features, block)
    if splits is None:
        splits = min(blocks, ceil_divide(2 * processors(query.device), owners))
    per_program = ceil_divide(blocks, splits) * block
    # Programs without a feature of their own report the weight 0.
    rows = summary.new_empty(batch, key_heads, splits, group, value_width)
    weights = summary.new_empty(batch, key_heads, splits, group)
    # The first launch updates the state, the others only read it.
    for first_row in range(0, group, most):
        _step[(owners * splits,)](
            *(query, key, value, query_directions, key_directions, offset, key_bias),
            *(log_weight, summary, rows, weights),
            *(key_heads, group, first_row, features, per_program, splits),
            *(shared_stride(offset), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
            **width_constants(width, value_width),
            GROUP=padded_width(min(group, most)),
            FEATURES=block,
            UPDATE=first_row == 0,
            num_warps=4 if max(width, value_width) <= 128 else 8,
            num_stages=2 if max(width, value_width) <= 128 else 1,
        )
    join(Summaries(rows, weights), Summaries(out, None))
    return out
