"""Attention by features of any sign (trigonometric features, ReLU and ELU maps), bidirectional and causal.

Shapes: keys are `[B, H, S, F]`, with H the number of key heads. The queries of the G heads that share a key head are
rows of it, `[B, H, L, G, F]`, so that grouped-query attention never repeats a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall, method
from favor.features import SignedFeatures


@method(SignedFeatures)
def attend(family: SignedFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` by features of any sign."""
    if call.packing is not None:
        return call.packing.each(attend, family, query, key, value, call)
    if query.shape[2] == 0:  # an empty one of packed sequences
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    scale, key_mask = call.scale, call.key_mask
    compute = torch.float64 if key.dtype == torch.float64 else torch.float32
    omega = call.directions(family, key) if family.is_drawn else key.new_empty(0)
    x = query.to(compute).unflatten(1, (key.shape[1], -1)).transpose(2, 3) * scale**0.5  # [B, Hk, L, G, d]
    y, value = key.to(compute) * scale**0.5, value.to(compute)
    hidden = None if key_mask is None else ~key_mask[:, None, :]
    if hidden is not None:
        # Whatever padding holds, NaN included, must not reach a real token: 0 * NaN is NaN.
        y, value = y.masked_fill(hidden.unsqueeze(-1), 0.0), value.masked_fill(hidden.unsqueeze(-1), 0.0)
    phi_query = family.phi(x.flatten(2, 3), omega).unflatten(2, x.shape[2:4])
    phi_key, log_scale = family.phi(y, omega), family.log_scale(y)
    if hidden is not None:
        log_scale = log_scale.masked_fill(hidden, -torch.inf)
    compute_rows = _causal_attention if call.is_causal else _attention
    return compute_rows(phi_query, phi_key, log_scale, value).transpose(2, 3).flatten(1, 2).to(query.dtype)


def _attention(query: Tensor, key: Tensor, log_scale: Tensor, value: Tensor) -> Tensor:
    """Computes attention `[B, H, L, G, dv]` with weights (query . key) exp(log_scale).

    Query `[B, H, L, G, F]` and key `[B, H, S, F]` are feature values; log_scale `[B, H, S]` is -inf for masked keys,
    and value `[B, H, S, dv]` is finite everywhere.
    """
    scale = (log_scale - _finite_max(log_scale)).exp().unsqueeze(-1)
    state = (key * scale).transpose(-1, -2) @ _append_one(value)
    return _normalise(query.flatten(2, 3) @ state).unflatten(2, query.shape[2:4])


def _causal_attention(query: Tensor, key: Tensor, log_scale: Tensor, value: Tensor) -> Tensor:
    """Computes `_attention` where query i sees keys 0 ... S - L + i, with S >= L. Returns `[B, H, L, G, dv]`."""
    length, groups = query.shape[2:4]
    prefix = key.shape[2] - length
    value = _append_one(value)
    top = _finite_max(log_scale[:, :, :prefix])
    scaled = key[:, :, :prefix] * (log_scale[:, :, :prefix] - top).exp().unsqueeze(-1)
    state = scaled.transpose(-1, -2) @ value[:, :, :prefix]
    if not prefix:
        top = torch.full_like(top, -torch.inf)

    chunk_size = min(64, 1 << (length - 1).bit_length())
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
    return _normalise(torch.stack(outputs, dim=2)).flatten(2, 3)[:, :, :length]


def _append_one(value: Tensor) -> Tensor:
    """Puts a column of ones behind the value columns, `[..., dv + 1]`: one product gives numerator and normaliser."""
    return torch.cat((value, value.new_ones(*value.shape[:-1], 1)), dim=-1)


def _normalise(sums: Tensor) -> Tensor:
    """Divides numerator by normaliser, `[..., dv + 1]` -> `[..., dv]`; rows without keys give zeros and no gradient."""
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1.0)


def _finite_max(values: Tensor) -> Tensor:
    """Gives the maximum of the last dimension, kept, as a constant; 0 where everything is -inf: -inf - max is -inf."""
    if values.shape[-1] == 0:
        return values.new_zeros(*values.shape[:-1], 1)
    top = values.detach().amax(-1, keepdim=True)
    return top.masked_fill(top == -torch.inf, 0.0)


def _chunks(rows: Tensor, chunk_size: int, fill: float) -> Tensor:
    """Cuts rows `[B, H, L, ...]` into chunks `[B, H, n, chunk_size, ...]` and fills up the last one."""
    tail = rows.new_full((*rows.shape[:2], -rows.shape[2] % chunk_size, *rows.shape[3:]), fill)
    rows = torch.cat((rows, tail), dim=2) if tail.shape[2] else rows
    return rows.unflatten(2, (-1, chunk_size))
