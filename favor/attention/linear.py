"""Attention by positive random features: from queries, keys and a family to the operands of the kernels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from favor.attention.biases import key_bias, query_bias
from favor.attention.call import AttentionCall
from favor.features import Moments, Parameters, PositiveFeatures
from favor.kernels import extend, linear_attention


def attend(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Attention output `[B, H, L, dv]` by positive random features."""
    scale, packing, state = call.scale, call.packing, call.state
    omega = call.directions(family, key, scale**0.5)
    if call.parameters is None:
        with torch.no_grad():
            parameters = _parameters(family, query, key, omega, call)
    else:
        parameters = _checked("parameters", call.parameters, omega)
    if call.correction is not None:
        parameters = parameters.corrected(_checked("correction", call.correction, omega))
    query_directions, key_directions, offset = family.directions(omega, parameters, scale**0.5)
    if offset.ndim == 2:
        query_directions, key_directions, offset = query_directions[None], key_directions[None], offset[None]
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, :]
    bias = key_bias(family, key, parameters, scale, hidden, packing)
    options: dict[str, Any] = {} if packing is None else packing.for_kernel()
    if call.window:
        own = query_bias(query, parameters, key.shape[1], omega.shape[-2], scale, packing)
        options |= {"window": call.window, "scale": scale, "query_bias": own}
    operands = (query, key, value, query_directions, key_directions, offset, bias)
    if state is not None and state.memory is not None:
        return extend(*operands, state, **options, kernel=call.kernel)
    if state is not None:
        state.begin(key, value, key_directions, bias, call.window, call.kernel)
    return linear_attention(*operands, is_causal=call.is_causal, kernel=call.kernel, **options)


def _checked(name: str, given: Parameters, omega: Tensor) -> Parameters:
    """Given parameters in the type and on the device of omega `[Hk, M, d]`."""
    heads, head_dim = omega.shape[0], omega.shape[-1]
    for part in (given.transform, given.inverse, given.factor):
        if part.shape[-2:] != (head_dim, head_dim) or (part.ndim > 2 and part.shape[-3] not in (1, heads)):
            raise ValueError(f"{name} must be [{heads}, {head_dim}, {head_dim}], got {tuple(part.shape)}.")
    return given.to(omega)


def _parameters(family: PositiveFeatures, query: Tensor, key: Tensor, omega: Tensor, call: AttentionCall) -> Parameters:
    """Parameters for these tokens, `[B, Hk, ...]`, or those that need no data."""
    head_dim, packing = omega.shape[-1], call.packing
    if not family.needs_statistics:
        mean, cov = (omega.new_zeros(()).expand(shape) for shape in ((head_dim,), (head_dim, head_dim)))
        return family.fit_moments(Moments(mean, mean, cov, cov))
    if call.is_causal or not call.use_statistics:
        warnings.warn(
            f"{family.name}: parameters from this sequence would let its tokens see later ones; using those of "
            "FAVOR+ (A = 0, B = I), which need no data. favor.calibrate(model, data) gives it parameters of its own.",
            stacklevel=4,
        )
        return Parameters.identity(head_dim, dtype=omega.dtype, device=omega.device)
    query_mask = call.query_mask
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = call.key_mask
    parts = [(query, key)] if packing is None else packing.split(query, key)
    moments = [_moments(family, q, k, query_mask, call.key_mask, call.scale) for q, k in parts]
    return family.fit_moments(moments[0] if packing is None else Moments.cat(moments))


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
