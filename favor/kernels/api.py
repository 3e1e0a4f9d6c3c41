"""`linear_attention`: the one call behind which all kernels stand."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.dispatch import readable
from favor.kernels.operands import Geometry, Operands
from favor.kernels.ops import attention


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    *,
    is_causal: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    query_bias: Tensor | None = None,
    window: int = 0,
    scale: float = 1.0,
    kernel: str = "auto",
) -> Tensor:
    """Attention with weights sum_m exp(query.uq_m + key.uk_m + offset_m + key_bias), in time linear in the length.

    With a window, tokens are cut into blocks of that many, and the weights inside a block are exp(scale query.key)
    instead; the others are then multiplied by exp(query_bias), which makes the two comparable.

    Logits, maxima and sums are float32 (float64 for float64 inputs); memory is linear in the length and holds no
    feature. Nothing is added to the normaliser. A query that sees no key gives zeros, with zero gradient.

    Args:
        query: `[B, H, L, d]`, float64, float32, bfloat16 or float16.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of the type of `query`; H must be a multiple of Hk.
        query_directions, key_directions: uq and uk `[n, Hk, M, d]`, with the scale of the logits; float32, or
            float64 for float64 inputs. n is the number of sequences, or 1 if they share the directions.
        offset: `[n, Hk, M]`.
        key_bias: `[B, Hk, S]`; -inf hides a key, whatever key and value hold there.
        is_causal: query i sees keys 0 ... S - L + i.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths `[N + 1]`, int32, starting with 0, of N sequences packed one
            after another along L and S; then B is 1 and no sequence sees another.
        max_seqlen_q, max_seqlen_k: the longest of them; L and S, which is only slower, if absent.
        query_bias: `[B, H, L]`, float32 or float64 like the directions; required with a window, and only then.
        window: length of the blocks, 0 (default) for none. Queries and keys are then those of the same tokens: as many
            queries as keys, or at most as many if causal.
        scale: of the exact logits, for a window.
        kernel: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".

    Returns:
        `[B, H, L, dv]` in the type of `query`. Its memory may be laid out `[B, L, H, dv]`.

    Raises:
        ValueError: for an unknown kernel, Triton where it cannot run, or a window that does not fit the inputs.

    Source: positive random features of Choromanski et al., "Rethinking Attention with Performers" (2021), in the
    proposal form of `favor.features.parameters`.
    """
    if (window > 0) != (query_bias is not None) or window < 0:
        raise ValueError(f"window must be positive with a query_bias and 0 without, got {window}.")
    if window and not is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"a window needs queries and keys of the same tokens, got {query.shape[2]} queries and {key.shape[2]} keys."
        )
    tokens, others = readable(query, key, value), (query_directions, key_directions, offset, key_bias)
    bias = None if query_bias is None else query_bias.contiguous()
    operands = Operands._make((*tokens, *(tensor.contiguous() for tensor in others), bias))
    geometry = Geometry(
        None if cu_seqlens_q is None else cu_seqlens_q.to(torch.int32),
        None if cu_seqlens_k is None else cu_seqlens_k.to(torch.int32),
        query.shape[2] if max_seqlen_q is None else max_seqlen_q,
        key.shape[2] if max_seqlen_k is None else max_seqlen_k,
        is_causal,
        window,
        scale,
    )
    return attention(operands, geometry, kernel).out
