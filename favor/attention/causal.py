"""Causal attention by a scan over chunks with a running maximum.

Queries are aligned with the last keys: with S keys and L <= S queries, query i sees keys 0 ... S - L + i.

Past chunks enter through a state that is rescaled whenever the running maximum of a feature rises, as in an online
softmax. Inside a chunk the keys a query sees are split into halves of halves: a query in the second half of a block
sees all of the first half. So every maximum is over keys that all its queries see, and the largest product of each
row is 1 however steeply features rise along the sequence: no epsilon, no underflow, and no look-ahead, not even in
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.attention.common import append_one, finite_max, normalise

# One part of a row's sum: (log of its scale [..., 1], sums at that scale [..., dv + 1]).
Part = tuple[Tensor, Tensor]


def causal_positive_attention(log_query: Tensor, log_key: Tensor, value: Tensor, *, chunk_size: int = 64) -> Tensor:
    """Causal form of `positive_attention`.

    Args:
        log_query: `[B, H, L, G, M]`.
        log_key: `[B, H, S, M]`, S >= L, -inf for masked keys.
        value: `[B, H, S, dv]`, finite everywhere.
        chunk_size: tokens a chunk, a power of two; the result does not depend on it but for rounding.

    Returns:
        `[B, H, L, G, dv]`.
    """
    length = log_query.shape[2]
    prefix = log_key.shape[2] - length
    value = append_one(value)
    anchor = finite_max(log_key[:, :, :prefix], dim=-2)
    state = (log_key[:, :, :prefix] - anchor).exp().transpose(-1, -2) @ value[:, :, :prefix]
    seen = log_key[:, :, :prefix].detach().amax(-2) if prefix else torch.full_like(anchor[..., 0, :], -torch.inf)

    chunk_size = min(chunk_size, _power_of_two(length))
    log_query = _chunks(log_query, chunk_size, 0.0)  # [B, H, n, C, G, M]
    log_key = _chunks(log_key[:, :, prefix:], chunk_size, -torch.inf)  # [B, H, n, C, M]
    value = _chunks(value[:, :, prefix:], chunk_size, 0.0)  # [B, H, n, C, dv + 1]

    past = _past(log_query, log_key, value, state, seen)
    parts = [past, _itself(log_query, log_key, value)]
    half = 1
    while half < chunk_size:
        parts.append(_first_half(log_query, log_key, value, half))
        half *= 2
    return normalise(_combine(parts)).flatten(2, 3)[:, :, :length]


def causal_signed_attention(
    query: Tensor, key: Tensor, log_scale: Tensor, value: Tensor, *, chunk_size: int = 64
) -> Tensor:
    """Causal form of `signed_attention`; shapes as there, S >= L. Returns `[B, H, L, G, dv]`."""
    length, groups = query.shape[2:4]
    prefix = key.shape[2] - length
    value = append_one(value)
    top = finite_max(log_scale[:, :, :prefix], dim=-1)
    scaled = key[:, :, :prefix] * (log_scale[:, :, :prefix] - top).exp().unsqueeze(-1)
    state = scaled.transpose(-1, -2) @ value[:, :, :prefix]
    if not prefix:
        top = torch.full_like(top, -torch.inf)

    chunk_size = min(chunk_size, _power_of_two(length))
    query = _chunks(query, chunk_size, 0.0)
    key = _chunks(key[:, :, prefix:], chunk_size, 0.0)
    value = _chunks(value[:, :, prefix:], chunk_size, 0.0)
    log_scale = _chunks(log_scale[:, :, prefix:].unsqueeze(-1), chunk_size, -torch.inf)[..., 0]
    outside = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)

    outputs = []
    for q, k, v, s in zip(query.unbind(2), key.unbind(2), value.unbind(2), log_scale.unbind(2), strict=True):
        row_top = torch.maximum(s.detach().cummax(-1).values, top)  # [B, H, C]
        row_top = row_top.masked_fill(row_top == -torch.inf, 0.0)
        rows = q.flatten(2, 3)
        decay = (s.unsqueeze(-2) - row_top.unsqueeze(-1)).masked_fill(outside, -torch.inf).exp()
        inside = (rows @ k.transpose(-1, -2)).unflatten(2, (chunk_size, groups)) * decay.unsqueeze(-2)
        before = (rows @ state).unflatten(2, (chunk_size, groups)) * (top - row_top).exp()[..., None, None]
        outputs.append((inside.flatten(2, 3) @ v).unflatten(2, (chunk_size, groups)) + before)
        last = row_top[..., -1:]
        fresh = k * (s - last).exp().unsqueeze(-1)
        state = state * (top - last).exp().unsqueeze(-1) + fresh.transpose(-1, -2) @ v
        top = last
    return normalise(torch.stack(outputs, dim=2)).flatten(2, 3)[:, :, :length]


def _past(log_query: Tensor, log_key: Tensor, value: Tensor, state: Tensor, seen: Tensor) -> Part:
    """Keys before the chunk, through the state `[B, H, M, dv + 1]` with running maximum `seen` `[B, H, M]`."""
    chunk_top = log_key.detach().amax(3)  # [B, H, n, M]
    anchor = finite_max(log_key, dim=3)
    updates = (log_key - anchor).exp().transpose(-1, -2) @ value  # [B, H, n, M, dv + 1]
    states, tops = [], []
    for index in range(chunk_top.shape[2]):
        states.append(state)
        tops.append(seen)
        risen = torch.maximum(seen, chunk_top[:, :, index])
        base = risen.masked_fill(risen == -torch.inf, 0.0)
        keep, add = (seen - base).exp(), (chunk_top[:, :, index] - base).exp()
        state = state * keep.unsqueeze(-1) + updates[:, :, index] * add.unsqueeze(-1)
        seen = risen
    return _rows_on_state(log_query, torch.stack(tops, dim=2), torch.stack(states, dim=2))


def _rows_on_state(log_query: Tensor, top: Tensor, state: Tensor) -> Part:
    """Rows `[..., C, G, M]` on a state `[..., M, dv + 1]` whose keys have the maxima `top` `[..., M]`."""
    rows = log_query.flatten(-3, -2) + top.unsqueeze(-2)
    scale = finite_max(rows, dim=-1)
    sums = (rows - scale).exp() @ state
    # A row that sees no key has a scale of -inf, so that the other parts decide.
    scale = scale.masked_fill((top == -torch.inf).all(-1)[..., None, None], -torch.inf)
    shape = log_query.shape[-3:-1]
    return scale.unflatten(-2, shape), sums.unflatten(-2, shape)


def _itself(log_query: Tensor, log_key: Tensor, value: Tensor) -> Part:
    """Each query's own key."""
    pair = log_query + log_key.unsqueeze(-2)
    top = pair.detach().amax(-1, keepdim=True)
    weight = (pair - top.masked_fill(top == -torch.inf, 0.0)).exp().sum(-1, keepdim=True)
    return top, weight * value.unsqueeze(-2)


def _first_half(log_query: Tensor, log_key: Tensor, value: Tensor, half: int) -> Part:
    """In every block of 2 `half` tokens, queries of the second half on keys of the first."""
    pairs = (-1, 2, half)
    rows = log_query.unflatten(3, pairs)[:, :, :, :, 1]  # [B, H, n, blocks, half, G, M]
    keys = log_key.unflatten(3, pairs)[:, :, :, :, 0]
    values = value.unflatten(3, pairs)[:, :, :, :, 0]
    top = finite_max(keys, dim=-2)
    masked = (keys.detach() == -torch.inf).all(-1).all(-1)  # [B, H, n, blocks]
    rows_flat = rows.flatten(-3, -2) + top
    scale = finite_max(rows_flat, dim=-1)
    weights = (rows_flat - scale).exp() @ (keys - top).exp().transpose(-1, -2)
    sums = (weights @ values).unflatten(-2, rows.shape[-3:-1])
    scale = scale.masked_fill(masked[..., None, None], -torch.inf).unflatten(-2, rows.shape[-3:-1])
    # First halves get nothing from this level.
    scale = torch.stack((torch.full_like(scale, -torch.inf), scale), dim=4)
    sums = torch.stack((torch.zeros_like(sums), sums), dim=4)
    return scale.flatten(3, 5), sums.flatten(3, 5)


def _combine(parts: list[Part]) -> Tensor:
    scales = torch.stack([scale for scale, _ in parts])
    scales = (scales - finite_max(scales, dim=0)).exp()
    total = scales[0] * parts[0][1]
    for scale, (_, sums) in zip(scales[1:], parts[1:], strict=True):
        total = total + scale * sums
    return total


def _chunks(rows: Tensor, chunk_size: int, fill: float) -> Tensor:
    """`[B, H, L, ...]` -> `[B, H, n, chunk_size, ...]`, the end filled up."""
    missing = -rows.shape[2] % chunk_size
    if missing:
        tail = rows.new_full((*rows.shape[:2], missing, *rows.shape[3:]), fill)
        rows = torch.cat((rows, tail), dim=2)
    return rows.unflatten(2, (-1, chunk_size))


def _power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()
