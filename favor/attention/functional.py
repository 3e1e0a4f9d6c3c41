"""`favor_attention`: one call for every family, bidirectional, causal, cross and packed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from favor import features as families
from favor.attention import linear, signed
from favor.attention.call import AttentionCall, CallOptions
from favor.attention.padding import Compaction
from favor.features import PositiveFeatures, SignedFeatures
from favor.landmark import Landmarks
from favor.landmark import attention as landmark
from favor.registry import Family

# Each has the signature `attend(family, query, key, value, call)`.
_METHODS: dict[type[Any], Any] = {
    PositiveFeatures: linear.attend,
    SignedFeatures: signed.attend,
    Landmarks: landmark.attend,
}


def favor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: str | Family,
    num_features: int = 256,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Computes attention in linear time, by random features of the softmax kernel or by landmarks.

    Approximates softmax(scale query key') value. Works on x = sqrt(scale) query and y = sqrt(scale) key; features and
    maxima are float32 (float64 for float64 inputs) whatever the inputs are. No epsilon is added anywhere. A query
    that sees no key gives zeros, with zero gradient. Positive features are computed for one block of tokens at a time,
    forward and backward, so memory is linear in the length and does not grow with the number of features. With a window
    each block keeps M means of values, so memory grows like 1 + M / window.

    All positive families except PosRF take their parameters, per sequence and key head and without gradient, from the
    moments of the tokens that are not padding, unless `parameters` are given. Moments of a whole sequence would show a
    causal query its future (a change of the second half of a sequence moves the first half's output by about a
    quarter), so with `is_causal` or `use_statistics=False` these families fall back to the parameters that need no
    data, A = 0 and B = I: they then equal PosRF, that is FAVOR+. A warning says so once.

    Landmarks (`features="landmark"`, `favor.landmark.Landmarks`) use nothing random and need no parameters: the keys
    that matter to a block of queries are exact, and means stand for all others.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hk, S, d]`; H must be a multiple of Hk (grouped-query attention, keys are not repeated).
        value: `[B, Hk, S, dv]`; dv is free.
        features: a registry name ("pos", "gerf", "sderf", "landmark", ...) or an instance from `favor.features`.
        num_features: number of features M, default 256. More is closer to softmax and slower. Landmarks have M means;
            in causal attention they have one for each 256 keys, and do not read it.
        key_padding_mask: boolean `[B, S]`, True for real keys; None if there is no padding.
        query_padding_mask: boolean `[B, L]`, True for the queries that count in statistics. Defaults to
            `key_padding_mask` where L equals S (self-attention). Causal attention takes no statistics. Other queries
            are padding: NaN and infinity in them count as 0, so that gradients of real tokens are finite.
        is_causal: query i sees keys 0 ... S - L + i (queries are the last ones, as with a cache).
        scale: positive factor of the logits, default 1/sqrt(d).
        seed, layer, redraw: choose the random directions; equal numbers give equal directions on every device.
        orthogonal: orthogonal (default) or independent directions.
        use_statistics: False keeps data-dependent parameters out, for layers whose queries must not see each other;
            with landmarks each query then chooses its keys alone. Causal landmarks are not concerned.
        parameters: parameters of positive features to use instead of those fitted here, `[Hk, d, d]` and `[Hk, d]`
            (or with a leading dimension for the sequences), for x and y. They get gradients if they require them. With
            them a causal query sees nothing of later tokens.
        correction: learned change of the parameters, whether given or fitted, see
            `favor.features.Parameters.corrected`.
        window: tokens are cut into blocks of this many, and inside a block attention is exact, under one normaliser
            with the estimate of the rest; 0 (default) estimates everything. Queries and keys must be those of the same
            tokens. Blocks are counted from the first real token, wherever padding is; padding that is not at the end
            costs a copy of the inputs, and then a step with a cache costs the work of all tokens. A window costs 4
            window d operations per token and head, the features 8 M d. A window that covers the sequence gives softmax
            attention.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths `[N + 1]` of N sequences packed one after another along L and S,
            starting with 0 (the same tensor twice for self-attention). B is then 1, there are no masks, and no
            sequence sees another, nor its statistics.
        max_seqlen_q, max_seqlen_k: the longest sequence; counted if absent, which makes a GPU wait.
        state: for causal attention piece by piece: what earlier tokens left (`favor.kernels.StreamState()` before the
            first), changed in place. The inputs are then the next tokens, without their padding. Packing is not
            possible, and only the first piece gets gradients. The size of the state does not depend on the length,
            except with landmarks, which keep all keys and values and read few of them.
        kernel: how attention by positive features or landmarks is computed: "auto" (Triton on CUDA, torch elsewhere),
            "torch" or "triton"; see `favor.kernels`. All other attention has one form, in plain torch, and refuses
            "triton".
        key_heads: for a process that has only some heads of a layer: the number of its first key head, and how many
            the layer has. Its directions are then those of its own heads. None (default) if it has all.
        selected_keys: K, for landmarks: how many keys a block of queries attends to exactly. Default None: 768, or
            1,024 in causal attention, where each query chooses K/16 more for itself. 0 for none. With at least as many
            as there are keys this is softmax attention.

    Returns:
        `[B, H, L, dv]`, in the type of `query`.

    Raises:
        TypeError: if an input is not a floating-point tensor, or a mask not boolean.
        ValueError: if shapes do not fit together, `scale` is not positive, L > S with `is_causal`, `kernel` cannot run
            here, a window is set where none is possible (cross attention, features that do not estimate exp(x.y)), or a
            state is given without causal attention by positive features or landmarks.

    Example:
        >>> import torch, favor
        >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
        >>> out = favor.favor_attention(query, key, value, features="landmark", num_features=16)
        >>> out.shape
        torch.Size([1, 2, 100, 8])

        As many selected keys as there are keys give softmax attention:

        >>> exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> out = favor.favor_attention(query, key, value, features="landmark", selected_keys=100)
        >>> bool((out - exact).abs().max() < 1e-5)
        True
    """
    family = families.get(features) if isinstance(features, str) else features
    attend = next((method for kind, method in _METHODS.items() if isinstance(family, kind)), None)
    if attend is None:
        raise TypeError(
            f"features must be a name, a RandomFeatures instance or Landmarks, got {type(features).__name__}."
        )
    call = AttentionCall.of(
        family,
        (query, key, value),
        scale=scale,
        key_padding_mask=key_padding_mask,
        num_features=num_features,
        is_causal=is_causal,
        seed=seed,
        **options,
    )
    if call.state is not None:
        call.state.note(call.key_mask, key.shape[2], will_forget=isinstance(family, Landmarks))
    if 0 in (*query.shape[:3], value.shape[3]):  # nothing to compute; still a part of the graph
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        return nothing.to(query.dtype).expand(*query.shape[:3], value.shape[3])
    given, length, compaction = query.dtype, query.shape[2], None
    common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = query.to(common), key.to(common), value.to(common)
    query = call.finite_padding(query, key.shape[2])
    if call.key_mask is not None and call.window:  # blocks begin with the first real token, wherever the padding is
        compaction = Compaction.of(call.key_mask)
    if compaction is not None:
        query, key, value = (compaction.move(tensor) for tensor in (query, key, value))
        query_mask = call.query_mask
        if query_mask is not None and query_mask.shape == compaction.order.shape:
            query_mask = query_mask.gather(1, compaction.order)
        call = replace(call, key_mask=compaction.mask, query_mask=query_mask)
    elif isinstance(family, Landmarks):
        (query, key, value), call, compaction = _moved_apart((query, key, value), call)
    # Autocast would run the projections, and so the exponents, in half precision.
    kind = query.device.type
    with torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext():
        out = attend(family, query, key, value, call)
    if compaction is not None:
        if is_causal:
            # Padding was moved behind tokens that came after it, and would see them.
            out = out.masked_fill(~compaction.mask[:, None, :, None], 0.0)
        out = compaction.back(out, length)
    return out.to(given)


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _moved_apart(
    tensors: tuple[Tensor, Tensor, Tensor], call: AttentionCall
) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionCall, Compaction | None]:
    """Moves padding to the end, so that queries and keys begin with the first real one.

    Returns:
        Query, key and value; the call with their masks; how queries were moved, if they were.
    """
    query, key, value = tensors
    queries, keys = call.query_padding(query.shape[2], key.shape[2]), call.key_mask
    compaction = None if queries is None else Compaction.of(queries)
    is_same = call.query_mask is None and query.shape[2] == key.shape[2]  # a GPU waits for each look at a mask
    moved = compaction if is_same else None if keys is None else Compaction.of(keys)
    if moved is not None:
        key, value, keys = moved.move(key), moved.move(value), moved.mask
    if compaction is not None:
        query, queries = compaction.move(query), compaction.mask
    return (query, key, value), replace(call, key_mask=keys, query_mask=queries), compaction
