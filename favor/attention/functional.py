"""`favor_attention`: one call for every family of features, bidirectional, causal, cross and packed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from favor import features as families
from favor.attention import linear as positive
from favor.attention import signed
from favor.attention.directions import directions
from favor.attention.packing import Packing
from favor.attention.padding import Compaction
from favor.features import Landmarks, Parameters, PositiveFeatures, RandomFeatures, SignedFeatures
from favor.kernels import StreamState
from favor.landmark import attention as landmark

__all__ = ["directions", "favor_attention"]


def favor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: str | RandomFeatures | Landmarks,
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
    parameters: Parameters | None = None,
    correction: Parameters | None = None,
    window: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    state: StreamState | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attention in time linear in the sequence length, by random features of the softmax kernel or by landmarks.

    Approximates softmax(scale query key') value. Works on x = sqrt(scale) query and y = sqrt(scale) key; features and
    maxima are float32 (float64 for float64 inputs) whatever the inputs are. No epsilon is added anywhere. A query
    that sees no key gives zeros, with zero gradient. Positive features exist one block of tokens at a time, forward and
    backward, so memory is linear in the length and does not grow with the number of features, except with a window:
    each of its blocks keeps M means of values, so memory grows like 1 + M / window.

    All positive families but PosRF take their parameters, per sequence and key head and without gradient, from the
    moments of the tokens that are not padding, unless `parameters` are given. Moments of a whole sequence would show a
    causal query its future (a change of the second half of a sequence moves the first half's output by about a
    quarter), so with `is_causal` or `use_statistics=False` these families fall back to the parameters that need no
    data, A = 0 and B = I: they then equal PosRF, that is FAVOR+. A warning says so once.

    Landmarks (`features="landmark"`, `favor.features.Landmarks`) are nothing random: M groups of keys stand for all
    keys, by their mean. They need no parameters, and causal layers group the keys of earlier blocks only. In causal
    attention the tokens of a block, 256 or `window`, are exact; where there are more keys than queries, blocks are
    those of the queries and the earlier keys are exact until the end of the first one.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hk, S, d]`; H must be a multiple of Hk (grouped-query attention, keys are not repeated).
        value: `[B, Hk, S, dv]`; dv is free.
        features: a registry name ("pos", "gerf", "sderf", "landmark", ...) or an instance from `favor.features`.
        num_features: number of features (or landmarks) M, default 256. More is closer to softmax and slower.
        key_padding_mask: boolean `[B, S]`, True for real keys; None if there is no padding.
        query_padding_mask: boolean `[B, L]`, True for the queries that count in statistics. Defaults to
            `key_padding_mask` where L equals S (self-attention). Causal attention does not read it.
        is_causal: query i sees keys 0 ... S - L + i (queries are the last ones, as with a cache).
        scale: positive factor of the logits, default 1/sqrt(d).
        seed, layer, redraw: choose the random directions; equal numbers give equal directions on every device.
        orthogonal: orthogonal (default) or independent directions.
        use_statistics: False keeps data-dependent parameters out, for layers whose queries must not see each other;
            landmarks are then evenly spaced, but in causal attention, where queries only choose for later ones.
        parameters: parameters of positive features to use instead of those fitted here, `[Hk, d, d]` and `[Hk, d]`
            (or with a leading dimension for the sequences), for x and y. They get gradients if they require them. With
            them a causal query sees nothing of later tokens.
        correction: learned change of the parameters, given or fitted, see `favor.features.Parameters.corrected`.
        window: tokens are cut into blocks of this many, and inside a block attention is exact, under one normaliser
            with the estimate of the rest; 0 (default) estimates everything. Queries and keys must be those of the same
            tokens. Blocks are counted from the first real token, wherever padding is; padding that is not at the end
            costs a copy of the inputs, and a cached step then the work of all tokens. Costs 4 window d operations a
            token and head, where the features cost 8 M d. A window that covers the sequence gives softmax attention.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths `[N + 1]` of N sequences packed one after another along L and S,
            starting with 0 (the same tensor twice for self-attention). B is then 1, there are no masks, and no
            sequence sees another, nor its statistics.
        max_seqlen_q, max_seqlen_k: the longest sequence; counted if absent, which stalls a GPU.
        state: for causal attention piece by piece: what earlier tokens left (`favor.kernels.StreamState()` before the
            first), changed in place. The inputs are then the tokens that come next, of which padding is left out; there
            is no packing, and no gradient but for the first piece. The state keeps its size, whatever the length.
        kernel: how attention by positive features is computed, "auto" (Triton on CUDA, torch elsewhere), "torch" or
            "triton"; see `favor.kernels`. Other features have one plain form, which "triton" refuses.

    Returns:
        `[B, H, L, dv]`, in the type of `query`.

    Raises:
        TypeError: if an input is not a floating-point tensor, or a mask not boolean.
        ValueError: if shapes do not fit together, `scale` is not positive, L > S with `is_causal`, `kernel` cannot run
            here, a window is asked for where there is none (cross attention, features that do not estimate exp(x.y)),
            or a state without causal attention by positive features or landmarks.
    """
    _check(query, key, value, key_padding_mask, query_padding_mask, is_causal, scale)
    packing = Packing.of(query, key, is_causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if packing is not None and not (key_padding_mask is None and query_padding_mask is None):
        raise ValueError("a packed batch has no padding: pass either masks or cu_seqlens, not both.")
    family = families.get(features) if isinstance(features, str) else features
    if not isinstance(family, PositiveFeatures | SignedFeatures | Landmarks):
        raise TypeError(
            f"features must be a name, a RandomFeatures instance or Landmarks, got {type(features).__name__}."
        )
    if state is not None:
        _check_stream(family, is_causal, packing is not None, query.shape[2], key.shape[2])
        state.is_ragged = state.is_ragged or key_padding_mask is not None
    _check_window(window, family, query, key, is_causal, cu_seqlens_q, cu_seqlens_k)
    if kernel == "triton" and not isinstance(family, PositiveFeatures):
        raise ValueError(f'{family.name} features have no Triton kernel; use kernel="auto" or "torch".')
    if not (parameters is None and correction is None) and not getattr(family, "needs_statistics", False):
        raise ValueError(f"{family.name} features have no parameters that could be given or corrected.")
    if 0 in (*query.shape[:3], value.shape[3]):  # nothing to compute; still a part of the graph
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        return nothing.to(query.dtype).expand(*query.shape[:3], value.shape[3])
    (head_dim, key_heads), given = (query.shape[-1], key.shape[1]), query.dtype
    common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = query.to(common), key.to(common), value.to(common)
    compute = torch.float64 if common == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scale is None else scale
    omega = query.new_empty(0)
    if isinstance(family, RandomFeatures):
        # Most families draw alike; a name, unlike an object, is something a compiler can hold constant.
        source: str | RandomFeatures = features if isinstance(features, str) else family
        if type(family).draw is RandomFeatures.draw:
            source = "cderf" if family.antithetic else "pos"
        root = scale**0.5 if isinstance(family, PositiveFeatures) else 1.0
        drawn = (num_features, head_dim, key_heads, orthogonal, seed, layer, redraw, query.device, compute)
        omega = directions(source, *drawn, root)
    length, compaction = query.shape[2], None
    has_blocks = window > 0
    if is_causal and isinstance(family, Landmarks):
        has_blocks = length == key.shape[2]  # else they are blocks of queries
    if has_blocks and key_padding_mask is not None:
        compaction = Compaction.of(key_padding_mask)
    if compaction is not None:
        query, key, value = (compaction.move(tensor) for tensor in (query, key, value))
        key_padding_mask = compaction.mask
        if query_padding_mask is not None and query_padding_mask.shape == compaction.order.shape:
            query_padding_mask = query_padding_mask.gather(1, compaction.order)
    # Autocast would run the projections, and so the exponents, in half precision.
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(family, PositiveFeatures):
            out = positive.attention(
                family,
                query,
                key,
                value,
                omega,
                key_mask=key_padding_mask,
                query_mask=query_padding_mask,
                is_causal=is_causal,
                scale=scale,
                use_statistics=use_statistics,
                parameters=parameters,
                correction=correction,
                window=window,
                packing=packing,
                state=state,
                kernel=kernel,
            )
        else:
            parts = [(query, key, value)] if packing is None else packing.split(query, key, value)
            if isinstance(family, Landmarks):
                attend: Any = partial(
                    landmark.attention,
                    family,
                    num_landmarks=num_features,
                    query_mask=query_padding_mask,
                    is_causal=is_causal,
                    use_queries=use_statistics,
                    window=window,
                    state=state,
                )
            else:
                attend = partial(signed.attention, family, omega=omega, is_causal=is_causal)
            outs = [attend(*part, key_mask=key_padding_mask, scale=scale) for part in parts]
            out = outs[0] if packing is None else torch.cat(outs, dim=2)
    if compaction is not None:
        if is_causal:
            # Moved behind them, padding would see the tokens that come after it.
            out = out.masked_fill(~compaction.mask[:, None, :, None], 0.0)
        out = compaction.back(out, length)
    return out.to(given)


def _check_stream(
    family: RandomFeatures | Landmarks, is_causal: bool, is_packed: bool, length: int, key_length: int
) -> None:
    if not isinstance(family, PositiveFeatures | Landmarks):
        raise ValueError(f"a state is for positive features, got {family!r}; use pos, gerf, a dense one or landmark.")
    if not is_causal or is_packed or length != key_length:
        raise ValueError(
            "a state is for causal self-attention without packing: is_causal=True, as many keys as queries, no "
            f"cu_seqlens; got is_causal={is_causal}, {length} queries and {key_length} keys"
            f"{', and lengths' if is_packed else ''}."
        )


def _check_window(
    window: int,
    family: RandomFeatures | Landmarks,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:
    if window < 0:
        raise ValueError(f"window must not be negative, got {window}.")
    if window and not isinstance(family, Landmarks) and (not isinstance(family, PositiveFeatures) or family.alpha):
        raise ValueError(
            f"a window needs positive features of the softmax kernel (alpha = 0), which share a normaliser with exact "
            f"weights; got {family!r}. Use window=0."
        )
    if window and not is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"a window needs queries and keys of the same tokens, got {query.shape[2]} queries and {key.shape[2]} "
            "keys; use window=0 for cross attention."
        )
    if not window or is_causal or cu_seqlens_q is None or cu_seqlens_k is None or cu_seqlens_q is cu_seqlens_k:
        return
    if not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError(
            "a window needs packed queries and keys of the same lengths; use window=0 for cross attention."
        )


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
