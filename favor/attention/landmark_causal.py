"""Causal attention through landmarks: a state of M groups of keys that takes in one block of tokens after another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.grouped import attend, sums_of
from favor.features import Landmarks

BLOCK = 128


def attention(
    features: Landmarks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int,
    *,
    counts: Tensor,
    scale: float,
    block: int,
) -> Tensor:
    """Each token attends to its own block up to itself, and to the groups of all earlier tokens.

    After a block its keys join the groups, and where there are then more than M, they are grouped again, as the queries
    of the block choose. So no token sees anything of a later one. Keys before the first query are groups of their own
    until the end of the first block.

    Args:
        query: `[B, Hk, G, L, d]`, those of one key head together.
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`, S >= L; hidden ones at the end, and zeros.
        num_landmarks: M.
        counts: 1 for keys that count and 0 for others, `[B, Hk, S]`.
        scale: of the logits.
        block: length of a block.

    Returns:
        `[B, Hk, G, L, dv]`.
    """
    groups, length = query.shape[2:4]
    past = key.shape[2] - length
    held = counts[..., :past]
    held_key, held_value = (tensor[..., :past, :].to(counts.dtype) for tensor in (key, value))
    outs = []
    for start in range(0, length, block):
        rows = query[:, :, :, start : start + block]
        here = slice(past + start, past + start + rows.shape[3])
        own_key, own_value, own = key[:, :, here], value[:, :, here], counts[:, :, here]
        share = held.clamp(min=1).unsqueeze(-1)
        every_key = torch.cat([(held_key / share).to(key.dtype), own_key], 2)
        every_value = torch.cat([(held_value / share).to(key.dtype), own_value], 2)
        every = torch.cat([held, own], 2)
        later = key.new_full((rows.shape[3], rows.shape[3]), -torch.inf).triu(1)
        seen = pad(later, (held.shape[2], 0)).repeat(groups, 1)
        flat = rows.flatten(2, 3)
        outs.append(
            attend(flat, every_key, every_value, counts=every, scale=scale, seen=seen).unflatten(2, rows.shape[2:4])
        )
        if start + block >= length:
            break
        if every.shape[2] <= num_landmarks:
            held = every
            held_key, held_value = torch.cat([held_key, own_key], 2), torch.cat([held_value, own_value], 2)
            continue
        real = (own > 0).repeat(1, 1, groups)
        cells = features.cells(flat, every_key, num_landmarks, real, every > 0, scale=scale, counts=every)
        tokens = (torch.cat([held_key, own_key], 2), torch.cat([held_value, own_value], 2), every.unsqueeze(-1))
        held_key, held_value, held = sums_of(cells, num_landmarks, *tokens)
        held = held.squeeze(-1)
    return torch.cat(outs, 3)
