"""Local attention: each query sees the keys at most `reach` tokens away, exactly, in linear time and memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_SMALLEST_BLOCK = 64  # with shorter blocks of queries most time goes into copies of keys


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: int,
    *,
    is_causal: bool,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Computes softmax attention within a sliding window, block by block.

    A block of queries and the keys that any of them sees are one row of a batch for torch's attention. Blocks are half
    as long as what a query sees, so that keys are copied three times at most, and no mask of all pairs is made.

    Args:
        query: `[B, H, L, d]`; the queries are those of the last L tokens. Without causality L must be S.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, with Hk a divisor of H.
        reach: query i sees keys i - reach ... i, and without causality those to i + reach too.
        is_causal: whether queries see earlier keys only.
        key_padding_mask: boolean `[B, S]`, True for real keys; None if all are.
        scale: factor of the logits, default 1/sqrt(d).
        dropout: probability that an attention weight is dropped.

    Returns:
        `[B, H, L, dv]`; zeros for queries that see no key.
    """
    batch, heads, length, _ = query.shape
    key_heads, key_length = key.shape[1:3]
    if length > key_length or (not is_causal and length != key_length):
        raise ValueError(
            "local attention aligns queries with the last keys: it takes at most as many queries as keys, and equally "
            f"many if it is not causal; got {length} queries and {key_length} keys."
        )
    if length == 0:
        return value.new_zeros(batch, heads, 0, value.shape[-1])
    reach = min(reach, key_length - 1)
    ahead = 0 if is_causal else reach
    block = min(max(_SMALLEST_BLOCK, (reach + ahead) // 2), length)
    blocks = -(-length // block)
    width = block + reach + ahead
    width += -width % 16  # GPUs want aligned masks

    # Window i of the keys begins `reach` tokens before block i of the queries.
    cut = max(key_length - length - reach, 0)
    before = reach - (key_length - length - cut)
    after = (blocks - 1) * block + width - before - (key_length - cut)

    def windows(rows: Tensor) -> Tensor:  # [B, Hk, S, d] -> [B * blocks, Hk, width, d], overlapping
        rows = pad(rows[:, :, cut:], (0, 0, before, after))
        return rows.unfold(2, width, block).permute(0, 2, 1, 4, 3).flatten(0, 1)

    # Query heads of one key head stand below each other, as more queries of the same block.
    groups = heads // key_heads
    rows = pad(query, (0, 0, 0, blocks * block - length)).unflatten(2, (blocks, block)).unflatten(1, (key_heads, -1))
    rows = rows.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(2, 3)
    real = query.new_ones(1, key_length, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    real = pad(real[:, cut:], (before, after)).unfold(1, width, block)
    ahead_of_first = torch.arange(width, device=query.device) - torch.arange(block, device=query.device)[:, None]
    visible = (ahead_of_first >= 0) & (ahead_of_first <= reach + ahead) & real[:, :, None]
    visible = visible.expand(batch, -1, -1, -1).flatten(0, 1)[:, None].repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(
        rows, windows(key), windows(value), attn_mask=visible, dropout_p=dropout, scale=scale
    )
    out = out.unflatten(2, (groups, block)).unflatten(0, (batch, blocks)).permute(0, 2, 3, 1, 4, 5)
    return out.flatten(3, 4).flatten(1, 2)[:, :, :length]
