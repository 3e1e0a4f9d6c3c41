"""Causal landmarks of sequences that are cut over processes: a process reads the keys and values of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from favor.attention.functional import AttentionCall
from favor.attention.parallel import gathered
from favor.kernels.exported import in_blocks
from favor.landmark import causal


def attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, group: Any) -> Tensor:
    """Computes causal attention `[B, H, n, dv]` of the queries of this process.

    Raises:
        ValueError: if pieces do not end where blocks of queries do.
    """
    batch, length, given = query.shape[0], query.shape[2], query.dtype
    if length % causal.BLOCK:
        raise ValueError(
            f"inside sequence_parallel landmarks need pieces of a multiple of {causal.BLOCK} tokens; this one has "
            f"{length}."
        )
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)  # whatever padding holds
    if query.device.type == "cpu":
        raised = torch.promote_types(given, torch.float32)
        query, key, value = query.to(raised), key.to(raised), value.to(raised)
    every, number = query[:, :, :: causal.STEP], causal.BLOCK // causal.STEP
    key, value, samples = (gathered(own, group).movedim(0, 2).flatten(2, 3) for own in (key, value, every))
    with torch.no_grad():
        kept = causal.coordinates(samples[:, :, :number], key[:, :, : causal.BLOCK])
        index = causal.indexed(key, kept)
    precision = torch.promote_types(key.dtype, torch.float32)
    far_key, far_value = (in_blocks(own, causal.SECTION).sum(3, dtype=precision) for own in (key, value))
    known = causal.Past(key, value, far_key, far_value, samples.detach(), kept, index)
    past = torch.full((batch,), dist.get_rank(group) * length, device=query.device)
    return causal.read_past(known, query, past, False, call.selected_keys, call.scale, call.kernel).to(given)
