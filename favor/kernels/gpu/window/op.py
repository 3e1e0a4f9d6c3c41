"""Windowed attention in Triton: exact inside blocks of tokens, through M landmarks between them, one normaliser.

The mathematics are those of `chunked_window`. Forwards, the keys of every block are summed up, sweeps over the blocks
make the landmarks of each from the others (`states`), and tiles of queries read the landmarks and the
keys of their block (`forward`). Backwards, tiles of queries read them again (`backward_queries`), what
they send to the landmarks is summed up and swept over in the same way, and tiles of keys gather it, with what the
queries of their own block send them (`backward_keys`). Nothing is added atomically.
"""

from __future__ import annotations

from torch import Tensor

from favor.kernels.gpu.window.backward_keys import key_gradients
from favor.kernels.gpu.window.backward_queries import query_gradients
from favor.kernels.gpu.window.forward import read
from favor.kernels.gpu.window.problem import Problem
from favor.kernels.gpu.window.states import key_states, query_states


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
    query_bias: Tensor,
    window: int,
    scale: float,
    is_causal: bool,
    max_q: int,
    max_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention output and what the backward pass needs.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`, one type; the last stride is 1.
        query_directions, key_directions, offset: `[n, Hk, M, d]`, `[n, Hk, M, d]`, `[n, Hk, M]`, contiguous float32;
            n is the number of sequences N, or 1.
        key_bias: `[B, Hk, S]` contiguous float32; -inf hides a key, in its own block too.
        cu_q, cu_k: cumulative lengths `[N + 1]` int32 of packed sequences, or None.
        query_bias: `[B, H, L]` contiguous float32, of the weights outside of the block.
        window, scale: tokens of a block, and factor of the logits inside of it.
        is_causal: whether later keys are hidden; there may then be keys before the first query.
        max_q, max_k: the longest sequences; not read without `cu_q` and `cu_k`.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, +inf where a query
        sees no key; log weights `[b, B, Hk, M]` and summaries `[b, B, Hk, M, dv]` of the landmarks, the latter in the
        type of the values, see `chunked_window.empty_landmarks`.
    """
    if cu_k is None:
        max_q, max_k = query.shape[2], key.shape[2]
    inputs = (query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k)
    problem = Problem(*inputs, query_bias, window, scale, is_causal, max_q, max_k)
    states = key_states(problem)
    return *read(problem, states), states.log_weight, states.summary


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
    query_bias: Tensor,
    window: int,
    scale: float,
    is_causal: bool,
    max_q: int,
    max_k: int,
    out: Tensor,
    lse: Tensor,
    weight: Tensor,
    summary: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, key_bias and query_bias; from that of the output and what `forward` returned."""
    if cu_k is None:
        max_q, max_k = query.shape[2], key.shape[2]
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    inputs = (query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k)
    problem = Problem(*inputs, query_bias, window, scale, is_causal, max_q, max_k)
    dq, dquery_bias, delta = query_gradients(problem, grad, out, lse, weight, summary)
    sent = query_states(problem, grad, lse, delta)
    return dq, *key_gradients(problem, grad, lse, delta, sent), dquery_bias
