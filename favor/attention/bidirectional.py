"""Bidirectional and cross attention, from log features (positive) or from feature values (signed)."""

from __future__ import annotations

from torch import Tensor

from favor.attention.common import append_one, finite_max, normalise


def positive_attention(log_query: Tensor, log_key: Tensor, value: Tensor) -> Tensor:
    """Attention with weights sum_m exp(log_query + log_key), without any epsilon.

    The maximum over keys of each feature moves from the keys to the queries, which changes no product. For every
    query the largest product is then 1, so the normaliser is at least 1.

    Args:
        log_query: `[B, H, L, G, M]`.
        log_key: `[B, H, S, M]`, -inf for masked keys.
        value: `[B, H, S, dv]`, finite everywhere.

    Returns:
        `[B, H, L, G, dv]`; zeros where every key is masked.
    """
    rows = log_query.flatten(2, 3)
    top_key = finite_max(log_key, dim=-2)
    rows = rows + top_key
    weights = (rows - finite_max(rows, dim=-1)).exp()
    state = (log_key - top_key).exp().transpose(-1, -2) @ append_one(value)
    return normalise(weights @ state).unflatten(2, log_query.shape[2:4])


def signed_attention(query: Tensor, key: Tensor, log_scale: Tensor, value: Tensor) -> Tensor:
    """Attention with weights (query . key) exp(log_scale).

    Args:
        query: feature values `[B, H, L, G, F]`.
        key: feature values `[B, H, S, F]`.
        log_scale: `[B, H, S]`, -inf for masked keys.
        value: `[B, H, S, dv]`, finite everywhere.

    Returns:
        `[B, H, L, G, dv]`.
    """
    scale = (log_scale - finite_max(log_scale, dim=-1)).exp().unsqueeze(-1)
    state = (key * scale).transpose(-1, -2) @ append_one(value)
    return normalise(query.flatten(2, 3) @ state).unflatten(2, query.shape[2:4])
