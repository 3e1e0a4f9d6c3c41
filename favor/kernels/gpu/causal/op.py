"""Causal attention in Triton: linear time, by chunks whose states are passed on, and quadratic only within a chunk.

With lq_im = q_i.uq_m and lk_jm = k_j.uk_m + bias_j, query i gives key j <= i the weight
sum_m exp(lq_im + offset_m + lk_jm). Keys of earlier chunks enter through a softmax over the features m, with their
weights and mean values; keys of the own chunk one by one. Both share the maximum of the row, and nothing is added to a
normaliser. Within a chunk exp(lq_im + offset_m + lk_jm) is a product of two factors, relative to an anchor per feature
that every query sees. In the rare chunk whose keys rise too steeply above it, slower kernels take over; only the device
knows which chunks these are.

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
from favor.kernels.gpu.causal.steep import steep_key_gradients, steep_outputs, steep_query_gradients
from favor.kernels.operands import Geometry, Gradients, Operands, Result


def forward(
    operands: Operands, geometry: Geometry, *, chunk_size: int | None = None, segments: int | None = None
) -> Result:
    """Computes causal attention; the queries belong to the last keys.

    Args:
        operands: the last stride of query, key and value is 1; the other tensors are float32.
        geometry: the longest sequence of keys and where packed ones begin are read.
        chunk_size: tokens in a chunk, a power of two from 16; None to choose.
        segments: parts into which the pass over the chunks is cut; None to choose.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, inf for a query that
        sees no key; and two empty tensors, because the backward pass computes the states again.
    """
    problem = Problem.of(operands, geometry, chunk_size, segments)
    query, offset = operands.query, operands.offset
    batch, heads, length = query.shape[:3]
    # Queries before the first key of their sequence, if there are more of them than keys, are in no chunk.
    alone = geometry.cu_k is not None or length > operands.key.shape[2]
    shape = (batch, length, heads, operands.value.shape[-1])
    out = (query.new_zeros(shape) if alone else query.new_empty(shape)).transpose(1, 2)
    lse = offset.new_full(query.shape[:3], torch.inf) if alone else offset.new_empty(query.shape[:3])
    if problem.programs(heads) and out.numel():
        states = key_states(problem)
        chunk_outputs(problem, states, out, lse)
        steep_outputs(problem, states, out, lse)
    return Result(out, lse, offset.new_empty(0), offset.new_empty(0))


def backward(
    grad: Tensor,
    operands: Operands,
    geometry: Geometry,
    saved: Result,
    for_directions: bool = False,
    *,
    chunk_size: int | None = None,
    segments: int | None = None,
) -> Gradients:
    """Computes the gradients of query, key, value and key_bias from that of the output and what `forward` returned.

    The torch kernel computes gradients of the directions: `for_directions` must be False.
    """
    problem = Problem.of(operands, geometry, chunk_size, segments)
    query, key, value, _, _, offset, key_bias, _ = operands
    out, lse = saved.out, saved.lse
    nothing = tuple(offset.new_empty(0) for _ in range(4))
    empty = not (problem.programs(query.shape[1]) and query.numel() and key.numel())
    # Queries before the first key, and rows of a packed batch outside of all sequences, are in no chunk.
    fill = torch.zeros_like if empty or geometry.cu_k is not None else torch.empty_like
    dk, dv, dbias = fill(key), fill(value), fill(key_bias)
    dq = torch.zeros_like(query) if query.shape[2] > key.shape[2] else fill(query)
    if empty:
        return Gradients(dq, dk, dv, dbias, *nothing)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    states, delta = key_states(problem), torch.empty_like(lse)
    chunk_query_gradients(problem, states, grad, out, lse, delta, dq)
    steep_query_gradients(problem, states, grad, lse, delta, dq)
    later = query_states(problem, grad, lse, delta)
    for key_gradients in (chunk_key_gradients, steep_key_gradients):
        key_gradients(problem, states, later, (grad, lse, delta), (dk, dv, dbias))
    return Gradients(dq, dk, dv, dbias, *nothing)
