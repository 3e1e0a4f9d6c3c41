"""Groups of keys under one mean: sums over groups, and softmax attention in which a key counts for several."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def sums_of(cells: Tensor, number: int, *tensors: Tensor) -> list[Tensor]:
    """Sums over the keys of each landmark, `[..., M, w]`, at least float32, of tensors `[..., S, w]`.

    Cells are `[..., S]`; keys with a cell of M count nowhere.
    """
    lead, places = cells.shape[:-1], number + 1
    first = torch.arange(0, lead.numel() * places, places, device=cells.device).view(*lead, 1)
    flat = (cells + first).flatten()

    def total(tensor: Tensor) -> Tensor:
        rows = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(len(flat), tensor.shape[-1])
        empty = rows.new_zeros(lead.numel() * places, rows.shape[-1])
        return empty.index_add(0, flat, rows).view(*lead, places, rows.shape[-1])[..., :number, :]

    return [total(tensor) for tensor in tensors]


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, counts: Tensor | None, scale: float, causal_rows: int = 0
) -> Tensor:
    """Softmax attention in which key m counts `counts[..., m]` times.

    Queries that see nothing that counts give zeros if the values they see are zeros.

    Args:
        query, key, value: `[B, Hk, R, d]`, `[B, Hk, T, d]`, `[B, Hk, T, dv]`.
        counts: `[B, Hk, T]`; None is one each.
        scale: of the logits.
        causal_rows: the queries are those of so many tokens, the last ones of the keys, of one head after another, and
            see the keys up to their own. 0: they see all.
    """
    width, keys, bias = value.shape[-1], key.shape[-2], None
    if causal_rows > 1:  # a single one sees all
        later = query.new_full((causal_rows, keys), -torch.inf).triu(keys - causal_rows + 1)
        bias = later.repeat(query.shape[-2] // causal_rows, 1)
    if counts is not None:
        own = counts.log().masked_fill(counts.sum(-1, keepdim=True) == 0, 0.0).to(query.dtype).unsqueeze(-2)
        bias = own if bias is None else own + bias
    if query.device.type == "cpu" and width != query.shape[-1]:
        # The fused kernel wants one width; the other one would form all weights.
        largest = max(width, query.shape[-1])
        query, key, value = (pad(tensor, (0, largest - tensor.shape[-1])) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)[..., :width]
