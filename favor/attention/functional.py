"""`favor_attention`: one call for every family of features, bidirectional, causal and cross."""

from __future__ import annotations

import hashlib
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from favor import features as families
from favor.attention.bidirectional import positive_attention, signed_attention
from favor.attention.causal import causal_positive_attention, causal_signed_attention
from favor.features import Parameters, PositiveFeatures, RandomFeatures, SignedFeatures


def favor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: str | RandomFeatures,
    num_features: int = 256,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
    layer: int = 0,
    redraw: int = 0,
    orthogonal: bool = True,
    use_statistics: bool = True,
) -> Tensor:
    """Attention in time linear in the sequence length, by random features of the softmax kernel.

    Approximates softmax(scale query key') value. Works on x = sqrt(scale) query and y = sqrt(scale) key; features and
    maxima are float32 (float64 for float64 inputs) whatever the inputs are. No epsilon is added anywhere. A query
    that sees no key gives zeros, with zero gradient.

    GERF, SADERF, ADERF and SDERF take their parameters, per sequence and key head and without gradient, from the
    moments of the tokens that are not padding. Moments of a whole sequence would show a causal query its future (a
    change of the second half of a sequence moves the first half's output by about a quarter), so with `is_causal` or
    `use_statistics=False` these families fall back to the parameters that need no data, A = 0 and B = I: they then
    equal PosRF, that is FAVOR+. A warning says so once.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hk, S, d]`; H must be a multiple of Hk (grouped-query attention, keys are not repeated).
        value: `[B, Hk, S, dv]`; dv is free.
        features: a registry name ("pos", "gerf", "sderf", ...) or an instance from `favor.features`.
        num_features: number of features M, default 256. More is closer to softmax and slower.
        key_padding_mask: boolean `[B, S]`, True for real keys; None if there is no padding.
        query_padding_mask: boolean `[B, L]`, True for the queries that count in statistics. Defaults to
            `key_padding_mask` where L equals S (self-attention).
        is_causal: query i sees keys 0 ... S - L + i (queries are the last ones, as with a cache).
        scale: positive factor of the logits, default 1/sqrt(d).
        seed, layer, redraw: choose the random directions; equal numbers give equal directions on every device.
        orthogonal: orthogonal (default) or independent directions.
        use_statistics: False keeps data-dependent parameters out, for layers whose queries must not see each other.

    Returns:
        `[B, H, L, dv]`, in the type of `query`.

    Raises:
        TypeError: if an input is not a floating-point tensor, or a mask not boolean.
        ValueError: if shapes do not fit together, `scale` is not positive, or L > S with `is_causal`.
    """
    _check(query, key, value, key_padding_mask, query_padding_mask, is_causal, scale)
    if isinstance(features, str):
        features = _by_name(features)
    if not isinstance(features, PositiveFeatures | SignedFeatures):
        raise TypeError(f"features must be a name or a RandomFeatures instance, got {type(features).__name__}.")
    if query.shape[2] == 0:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    head_dim, key_heads = query.shape[-1], key.shape[1]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    root = (head_dim**-0.5 if scale is None else scale) ** 0.5
    # Autocast would run the projections, and so the exponents, in half precision.
    with torch.autocast(query.device.type, enabled=False):
        x = query.to(compute).unflatten(1, (key_heads, -1)).transpose(2, 3) * root  # [B, Hk, L, G, d]
        y, v = key.to(compute) * root, value.to(compute)
        hidden = None
        if key_padding_mask is not None:
            # Whatever padding holds, NaN included, must not reach a real token: 0 * NaN is NaN.
            hidden = ~key_padding_mask[:, None, :]
            y, v = y.masked_fill(hidden.unsqueeze(-1), 0.0), v.masked_fill(hidden.unsqueeze(-1), 0.0)
        omega = directions(
            features, num_features, head_dim, key_heads, orthogonal, seed, layer, redraw, query.device, compute
        )
        if isinstance(features, PositiveFeatures):
            without_data = is_causal or not use_statistics
            params = _parameters(features, x, y, key_padding_mask, query_padding_mask, without_data)
            out = _positive(features, x, y, v, hidden, omega, params, is_causal)
        else:
            out = _signed(features, x, y, v, hidden, omega, is_causal)
    return out.transpose(2, 3).flatten(1, 2).to(query.dtype)


def _positive(
    features: PositiveFeatures,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    omega: Tensor,
    params: Parameters,
    is_causal: bool,
) -> Tensor:
    to_query, to_key, offset = features.directions(omega, params)  # [(B,) Hk, M, d], [(B,) Hk, M]
    log_query = (x.flatten(2, 3) @ to_query.transpose(-1, -2)).unflatten(2, x.shape[2:4])
    log_key = y @ to_key.transpose(-1, -2) + offset.unsqueeze(-2) + features.key_bias(y, params).unsqueeze(-1)
    if hidden is not None:
        log_key = log_key.masked_fill(hidden.unsqueeze(-1), -torch.inf)
    attend = causal_positive_attention if is_causal else positive_attention
    return attend(log_query, log_key, value)


def _signed(
    features: SignedFeatures,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    omega: Tensor,
    is_causal: bool,
) -> Tensor:
    phi_query = features.phi(x.flatten(2, 3), omega).unflatten(2, x.shape[2:4])
    phi_key, log_scale = features.phi(y, omega), features.log_scale(y)
    if hidden is not None:
        log_scale = log_scale.masked_fill(hidden, -torch.inf)
    attend = causal_signed_attention if is_causal else signed_attention
    return attend(phi_query, phi_key, log_scale, value)


@lru_cache(maxsize=128)
def directions(
    features: RandomFeatures,
    num_features: int,
    head_dim: int,
    num_heads: int,
    orthogonal: bool,
    seed: int,
    layer: int,
    redraw: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Omega `[num_heads, M, d]`, a pure function of its arguments: drawn on the CPU and cached on the device."""
    digest = hashlib.sha256(f"{seed},{layer},{redraw}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # A tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        omega = features.draw(
            num_features, head_dim, orthogonal=orthogonal, generator=generator, batch_shape=(num_heads,)
        )
        return omega.to(device=device, dtype=dtype)


def _parameters(
    features: PositiveFeatures,
    x: Tensor,
    y: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    without_data: bool,
) -> Parameters:
    if not features.needs_statistics:
        return features.fit(x.new_zeros(0, x.shape[-1]), y.new_zeros(0, y.shape[-1]))  # nothing to average
    if without_data:
        warnings.warn(
            f"{features.name}: parameters from this sequence would let its tokens see later ones; "
            "using those of FAVOR+ (A = 0, B = I), which need no data.",
            stacklevel=3,
        )
        return Parameters.identity(x.shape[-1], dtype=x.dtype, device=x.device)
    if query_mask is None and x.shape[2] == y.shape[2]:
        query_mask = key_mask
    groups = x.shape[3]
    x_mask = None if query_mask is None else query_mask.repeat_interleave(groups, dim=1)[:, None]
    y_mask = None if key_mask is None else key_mask[:, None]
    return features.fit(x.flatten(2, 3), y, x_mask=x_mask, y_mask=y_mask)


@lru_cache(maxsize=32)
def _by_name(name: str) -> RandomFeatures:
    return families.get(name)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}.")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], got shape {tuple(tensor.shape)}.")
    batch, heads, length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    if key.shape[0] != batch or key.shape[-1] != head_dim:
        raise ValueError(
            f"key must have the batch size {batch} and width {head_dim} of query, got shape {tuple(key.shape)}."
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must agree with key in batch, heads and length {tuple(key.shape[:3])}, "
            f"got {tuple(value.shape[:3])}."
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query heads must be a multiple of the key heads, got {heads} and {key_heads}.")
    if is_causal and length > key_length:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {length} queries and {key_length} keys."
        )
    for name, mask, size in (
        ("key_padding_mask", key_mask, key_length),
        ("query_padding_mask", query_mask, length),
    ):
        if mask is None:
            continue
        if mask.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean (True for real tokens), got {mask.dtype}.")
        if mask.shape != (batch, size):
            raise ValueError(f"{name} must be [{batch}, {size}], got {tuple(mask.shape)}.")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}.")
