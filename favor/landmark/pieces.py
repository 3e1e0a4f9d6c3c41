"""Causal landmarks of sequences cut over processes, with few key heads: a process reads the keys and values of all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from favor.attention.functional import AttentionCall
from favor.attention.parallel import gathered
from favor.landmark import causal
from favor.landmark.attention import ready


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
    query, key, value = ready(query, key, value, call)
    every, number = query[:, :, :: causal.STEP], causal.BLOCK // causal.STEP
    key, value, samples = (gathered(own, group).movedim(0, 2).flatten(2, 3) for own in (key, value, every))
    known = causal.past_with(samples.detach(), samples[:, :, :number].detach(), key, value)
    past = torch.full((batch,), dist.get_rank(group) * length, device=query.device)
    return causal.read_past(known, query, past, False, call.selected_keys, call.scale, call.kernel).to(given)
