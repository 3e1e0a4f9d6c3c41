"""The state of causal attention in plain torch, for any device: over the keys of a prompt, and one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.eager import common
from favor.kernels.operands import Geometry, Operands, sequences


def summarise(
    directions: Tensor, key: Tensor, bias: Tensor, value: Tensor, cumulative: None, max_length: int
) -> tuple[Tensor, Tensor]:
    """Gives the summary `[B, Hk, M, dv]` and log weight `[B, Hk, M]` of the keys, 0 and -inf without a visible key.

    Directions are `[n, Hk, M, d]`, n = 1 or B. Packed sequences are not taken: there is no `cumulative`, and all are S.
    """
    offset = directions.new_zeros(directions.shape[:3])
    operands = Operands(key[:, :, :0], key, value, directions, directions, offset, bias)
    (sequence,) = sequences(operands, Geometry(cumulative, None, 0, max_length))
    top, total, state = common.summarise(common.Inputs.of(sequence), max_length)
    summary = state / total.masked_fill(total == 0, 1.0)
    log_weight = common.LN2 * top + total.log()
    return summary.reshape(*key.shape[:2], -1, value.shape[-1]), log_weight.reshape(*key.shape[:2], -1)


def decode(*tensors: Tensor) -> Tensor:
    """Takes one step of causal attention: the tensors of `favor.kernels.decode` and of its state, which is changed."""
    query, key, value, query_directions, key_directions, offset, key_bias, log_weight, summary = tensors
    key_heads, dtype = key.shape[1], log_weight.dtype
    hidden = (key_bias == -torch.inf).unsqueeze(-1)
    key, value = (tensor.to(dtype).masked_fill(hidden, 0.0) for tensor in (key, value))
    logits = (key_directions @ key.transpose(2, 3)).squeeze(3) + key_bias  # [B, Hk, M]
    risen = torch.logaddexp(log_weight, logits)
    seen = risen != -torch.inf
    share = torch.where(seen, logits - risen, -torch.inf).exp().unsqueeze(3)
    summary += share * (value - summary)
    log_weight.copy_(risen)
    queries = query.to(dtype).unflatten(1, (key_heads, -1)).squeeze(3)  # [B, Hk, G, d]
    rows = queries @ query_directions.transpose(2, 3) + torch.where(seen, risen + offset, 0.0).unsqueeze(2)
    return (rows.softmax(-1) @ summary).flatten(1, 2).unsqueeze(2).to(query.dtype)
