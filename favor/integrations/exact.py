"""Exact attention of a layer: what FAVOR backends run on short inputs, in local layers and in heads kept exact."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from favor.attention.local import local_attention
from favor.attention.packing import Packing
from favor.integrations.masks import Visibility


def exact_attention(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    sees: Visibility,
    *,
    mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
) -> Tensor:
    """Computes softmax attention `[B, L, H, dv]`, of packed sequences one by one.

    Args:
        module: the attention module.
        tensors: query `[B, H, L, d]`, key `[B, Hk, S, d]`, value `[B, Hk, S, dv]`.
        sees: which keys the queries see. Layers that see a window run in linear time.
        mask: of all pairs, `[B, 1, L, S]`; read if `sees.dense`.
        scaling: factor of the logits, default 1/sqrt(d).
        dropout: probability that an attention weight is dropped.
        packing: where packed sequences begin and end; None for a batch of rows.
    """
    if sees.dense:
        return sdpa_attention_forward(module, *tensors, mask, dropout, scaling, False)[0]
    outs = []
    for query, key, value in [tensors] if packing is None else packing.split(*tensors):
        if sees.reach is not None:
            padding = sees.padding if packing is None else None
            out = local_attention(
                query,
                key,
                value,
                sees.reach,
                is_causal=sees.causal,
                key_padding_mask=padding,
                scale=scaling,
                dropout=dropout,
            ).transpose(1, 2)
        else:
            mask = exact_mask(sees.padding, query.shape[2], key.shape[2], sees.causal, query)
            out = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, sees.causal)[0]
        outs.append(out)
    return outs[0] if packing is None else torch.cat(outs, dim=1)


def exact_mask(padding: Tensor | None, length: int, key_length: int, is_causal: bool, like: Tensor) -> Tensor | None:
    """Makes the boolean mask `[B, 1, L, S]` of exact attention, or None where its `is_causal` argument is enough.

    Args:
        padding: boolean `[B, S]`, True for real keys; None without padding.
        length, key_length: L and S; the queries are those of the last tokens.
        is_causal: whether queries see earlier keys only.
        like: a tensor on the device of the mask.
    """
    if not is_causal or length == 1:
        return None if padding is None else padding[:, None, None, :].expand(-1, 1, length, -1)
    if padding is None and length == key_length:
        return None
    triangle = torch.ones(length, key_length, dtype=torch.bool, device=like.device).tril(key_length - length)
    return triangle[None, None] if padding is None else triangle & padding[:, None, None, :]
