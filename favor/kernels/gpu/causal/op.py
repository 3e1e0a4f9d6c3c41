"""Causal attention in Triton: linear time, by chunks whose states are passed on, and quadratic only within a chunk.

With lq_im = q_i.uq_m and lk_jm = k_j.uk_m + bias_j, query i gives key j <= i the weight
sum_m exp(lq_im + offset_m + lk_jm). Keys of earlier chunks enter through a softmax over the features m, with their
weights and mean values; keys of the own chunk one by one. Both share the maximum of the row, and nothing is added to a
normaliser. Within a chunk exp(lq_im + offset_m + lk_jm) is a product of two factors, relative to an anchor per feature
that every query sees. In the rare chunk in which keys rise too steeply over it slower kernels take over; which chunks
those are only the device knows.

The backward pass computes the states before the chunks again, and from them the gradient of the queries. The same pass
over the queries, backwards, leaves what the keys of a chunk need of later chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.gpu.causal.backward import chunk_key_gradients, chunk_query_gradients
from favor.kernels.gpu.causal.forward import chunk_outputs
from favor.kernels.gpu.causal.problem import Problem
from favor.kernels.gpu.causal.states import key_states, query_states
from favor.kernels.gpu.causal.steep import steep_outputs
from favor.kernels.gpu.causal.steep_backward import steep_key_gradients, steep_query_gradients
from favor.kernels.gpu.common import padded_width


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    chunk_size: int | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention; queries stand beside the last keys.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of one type, any strides but the last.
        query_directions, key_directions, offset: float32 `[n, Hk, M, d]`, the same and `[n, Hk, M]`; n sequences or 1.
        key_bias: float32 `[B, Hk, S]`; -inf hides a key.
        cu_q, cu_k: int32, cumulative lengths of the sequences of a packed batch (B = 1), or None.
        max_q, max_k: lengths of the longest sequence.
        chunk_size: tokens in a chunk, a power of two from 16; None to choose.
        segments: parts into which the pass over the chunks is cut; None to choose.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, inf for a query that
        sees no key; and two empty tensors, because the backward pass computes the states again.
    """
    problem = _problem(
        query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k, max_k, chunk_size, segments
    )
    batch, heads, length = query.shape[:3]
    # Queries before the first key of their sequence, if there are more of them than keys, are in no chunk.
    alone = cu_k is not None or length > key.shape[2]
    shape = (batch, length, heads, value.shape[-1])
    out = (query.new_zeros(shape) if alone else query.new_empty(shape)).transpose(1, 2)
    lse = offset.new_full(query.shape[:3], torch.inf) if alone else offset.new_empty(query.shape[:3])
    if problem.programs(heads) and out.numel():
        states = key_states(problem)
        chunk_outputs(problem, states, out, lse)
        steep_outputs(problem, states, out, lse)
    return out, lse, offset.new_empty(0), offset.new_empty(0)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    out: Tensor,
    lse: Tensor,
    mu: Tensor,
    summary: Tensor,
    *,
    chunk_size: int | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and key_bias, from that of the output and from what `forward` returned."""
    problem = _problem(
        query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k, max_k, chunk_size, segments
    )
    empty = not (problem.programs(query.shape[1]) and query.numel() and key.numel())
    # Queries before the first key, and rows of a packed batch outside of all sequences, are in no chunk.
    fill = torch.zeros_like if empty or cu_k is not None else torch.empty_like
    dk, dv, dbias = fill(key), fill(value), fill(key_bias)
    dq = torch.zeros_like(query) if query.shape[2] > key.shape[2] else fill(query)
    if empty:
        return dq, dk, dv, dbias
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    states, delta = key_states(problem), torch.empty_like(lse)
    chunk_query_gradients(problem, states, grad, out, lse, delta, dq)
    steep_query_gradients(problem, states, grad, lse, delta, dq)
    later = query_states(problem, grad, lse, delta)
    chunk_key_gradients(problem, states, later, grad, lse, delta, dk, dv, dbias)
    steep_key_gradients(problem, states, later, grad, lse, delta, dk, dv, dbias)
    return dq, dk, dv, dbias


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_k: int,
    chunk_size: int | None,
    segments: int | None,
) -> Problem:
    directions = (query_directions, key_directions, offset)
    if chunk_size is None:
        # Wide rows leave room for short chunks only, in registers and in shared memory; float16 is multiplied as tf32.
        row = query.element_size() * max(padded_width(tensor.shape[-1]) for tensor in (query, value))
        chunk_size = max(16, min(64 if query.dtype == torch.float16 else 128, 2**14 // row))
    return Problem(query, key, value, *directions, key_bias, cu_q, cu_k, max_k, chunk_size, segments)
