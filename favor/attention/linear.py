"""Attention by positive random features: from queries, keys and a family to the operands of the kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from favor.attention.biases import key_bias, query_bias
from favor.attention.packing import Packing
from favor.features import Moments, Parameters, PositiveFeatures
from favor.kernels import StreamState, extend, linear_attention


def attention(
    features: PositiveFeatures,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    *,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    use_statistics: bool,
    parameters: Parameters | None,
    correction: Parameters | None,
    window: int,
    packing: Packing | None,
    state: StreamState | None,
    kernel: str,
) -> Tensor:
    """Attention output `[B, H, L, dv]`; arguments as in `favor.favor_attention`.

    Omega is `[Hk, M, d]`, times the root of the scale.
    """
    if parameters is None:
        with torch.no_grad():
            masks = (key_mask, query_mask)
            parameters = _parameters(features, query, key, omega, *masks, is_causal, scale, use_statistics, packing)
    else:
        parameters = _checked("parameters", parameters, omega)
    if correction is not None:
        parameters = parameters.corrected(_checked("correction", correction, omega))
    to_query, to_key, offset = features.directions(omega, parameters, scale**0.5)
    if offset.ndim == 2:
        to_query, to_key, offset = to_query[None], to_key[None], offset[None]
    hidden = None if key_mask is None else ~key_mask[:, None, :]
    bias = key_bias(features, key, parameters, scale, hidden, packing)
    options: dict[str, Any] = {} if packing is None else packing.for_kernel()
    if window:
        own = query_bias(query, parameters, key.shape[1], omega.shape[-2], scale, packing)
        options |= {"window": window, "scale": scale, "query_bias": own}
    operands = (query, key, value, to_query, to_key, offset, bias)
    if state is not None and state.memory is not None:
        return extend(*operands, state, **options, kernel=kernel)
    if state is not None:
        state.begin(key, value, to_key, bias, window, kernel)
    return linear_attention(*operands, is_causal=is_causal, kernel=kernel, **options)


def _checked(name: str, given: Parameters, omega: Tensor) -> Parameters:
    """Given parameters in the type and on the device of omega `[Hk, M, d]`."""
    heads, head_dim = omega.shape[0], omega.shape[-1]
    for part in (given.transform, given.inverse, given.factor):
        if part.shape[-2:] != (head_dim, head_dim) or (part.ndim > 2 and part.shape[-3] not in (1, heads)):
            raise ValueError(f"{name} must be [{heads}, {head_dim}, {head_dim}], got {tuple(part.shape)}.")
    return given.to(omega)


def _parameters(
    features: PositiveFeatures,
    query: Tensor,
    key: Tensor,
    omega: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    use_statistics: bool,
    packing: Packing | None,
) -> Parameters:
    head_dim = omega.shape[-1]
    if not features.needs_statistics:
        mean, cov = (omega.new_zeros(()).expand(shape) for shape in ((head_dim,), (head_dim, head_dim)))
        return features.fit_moments(Moments(mean, mean, cov, cov))
    if is_causal or not use_statistics:
        warnings.warn(
            f"{features.name}: parameters from this sequence would let its tokens see later ones; using those of "
            "FAVOR+ (A = 0, B = I), which need no data. favor.calibrate(model, data) gives it parameters of its own.",
            stacklevel=4,
        )
        return Parameters.identity(head_dim, dtype=omega.dtype, device=omega.device)
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    parts = [(query, key)] if packing is None else packing.split(query, key)
    moments = [_moments(features, q, k, query_mask, key_mask, scale) for q, k in parts]
    return features.fit_moments(moments[0] if packing is None else Moments.cat(moments))


def _moments(
    features: PositiveFeatures,
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
) -> Moments:
    """Statistics of x and y for each sequence and key head; the queries of a key head count together."""
    groups = query.shape[1] // key.shape[1]
    if query_mask is not None:
        query_mask = query_mask[:, None].repeat(1, 1, groups)
    rows = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)
    return features.moments(rows, key, query_mask, None if key_mask is None else key_mask[:, None], scale=scale)
