"""Attention by positive random features: from queries, keys and a family to the operands of the kernels."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from favor.attention.packing import Packing
from favor.features import Moments, Parameters, PositiveFeatures
from favor.kernels import linear_attention


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
    packing: Packing | None,
    kernel: str,
) -> Tensor:
    """Attention output `[B, H, L, dv]`; arguments as in `favor.favor_attention`.

    Omega is `[Hk, M, d]`, times the root of the scale.
    """
    with torch.no_grad():
        params = _parameters(
            features, query, key, omega, key_mask, query_mask, is_causal, scale, use_statistics, packing
        )
        to_query, to_key, offset = features.directions(omega, params, scale**0.5)
        if offset.ndim == 2:
            to_query, to_key, offset = to_query[None], to_key[None], offset[None]
    hidden = None if key_mask is None else ~key_mask[:, None, :]
    bias = _key_bias(features, key, params, scale, hidden, packing)
    lengths = {} if packing is None else packing.for_kernel()
    return linear_attention(
        query, key, value, to_query, to_key, offset, bias, is_causal=is_causal, kernel=kernel, **lengths
    )


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
        nothing = omega.new_zeros(0, head_dim)
        return features.fit_moments(Moments.from_samples(nothing, nothing))
    if is_causal or not use_statistics:
        warnings.warn(
            f"{features.name}: parameters from this sequence would let its tokens see later ones; "
            "using those of FAVOR+ (A = 0, B = I), which need no data.",
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


def _key_bias(
    features: PositiveFeatures,
    key: Tensor,
    params: Parameters,
    scale: float,
    hidden: Tensor | None,
    packing: Packing | None,
) -> Tensor:
    """Quadratic term of the keys, `[B, Hk, S]`, -inf where hidden."""
    if not params.maps:
        return _Quadratic.apply(key, None, scale * (features.alpha - 0.5), hidden, params.factor.dtype)
    matrices = params.inverse if params.inverse.ndim == 4 else params.inverse[None]
    if packing is None or matrices.shape[0] == 1:
        pairs = [(key, matrices)]
    else:
        pairs = list(zip(packing.split_keys(key), matrices.split(1), strict=True))
    biases = [
        _Quadratic.apply(part, scale**0.5 * matrix, scale * features.alpha, hidden, params.factor.dtype)
        for part, matrix in pairs
    ]
    return torch.cat(biases, dim=2)


def _quadratic(rows: Tensor, matrix: Tensor | None, weight: float, dtype: torch.dtype) -> Tensor:
    if matrix is None:
        return _squares(rows, dtype).mul_(weight)
    value = (rows.to(dtype) @ matrix).square_().sum(-1).div_(-2)
    return value if weight == 0 else value.add_(_squares(rows, dtype), alpha=weight)


def _squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.device.type == "cpu":
        return rows.to(dtype).square().sum(-1)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).square()  # one pass, no copy in `dtype`


class _Quadratic(torch.autograd.Function):
    """weight |k|^2 - |matrix' k|^2 / 2 for keys `[B, Hk, S, d]`; keeps no temporary and no copy of the keys.

    Hidden keys get -inf and no gradient, whatever they hold.
    """

    @staticmethod
    def forward(ctx, key, matrix, weight, hidden, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(key, matrix, hidden)
        ctx.weight = weight
        # On a CPU in parts that stay in cache; a compiler fuses the whole, and a GPU wants few launches.
        in_parts = key.device.type == "cpu" and not torch.compiler.is_compiling()
        size = key.shape[2] // 32 + 64 if in_parts else max(key.shape[2], 1)
        bias = torch.cat([_quadratic(part, matrix, weight, dtype) for part in key.split(size, dim=2)], dim=2)
        return bias if hidden is None else bias.masked_fill(hidden, -torch.inf)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        key, matrix, hidden = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        if matrix is None:
            slope = key * (2 * ctx.weight * grad).to(key.dtype)
        else:
            slope = (key.to(grad.dtype) @ (matrix @ matrix.transpose(-1, -2))).mul_(-grad)
            if ctx.weight:
                slope += key * (2 * ctx.weight * grad)
        if hidden is not None:
            slope = slope.masked_fill(hidden.unsqueeze(-1), 0.0)
        return slope.to(key.dtype), None, None, None, None
