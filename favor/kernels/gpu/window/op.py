"""Windowed attention in Triton: exact inside blocks of tokens, by summaries between them, one normaliser.

The mathematics are those of `favor.kernels.eager.window.op`. Forwards, the keys of every block are summed up, sweeps
over the blocks make the summaries of each from the others (`states`), and tiles of queries read the summaries and the
keys of their block (`forward`). Backwards, tiles of queries read them again, what they send to the summaries is summed
up and swept over in the same way, and tiles of keys gather it, with what the queries of their own block send them
(`backward`). Nothing is added atomically.
"""

from __future__ import annotations

from torch import Tensor

from favor.kernels.gpu.window.backward import key_gradients, query_gradients
from favor.kernels.gpu.window.forward import read
from favor.kernels.gpu.window.problem import Problem
from favor.kernels.gpu.window.states import key_states, query_states
from favor.kernels.operands import Geometry, Gradients, Operands, Result


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Computes the attention output and what the backward pass needs.

    Args:
        operands: the last stride of query, key and value is 1; the other tensors are float32.
        geometry: if causal, there may be keys before the first query.

    Returns:
        output `[B, H, L, dv]`, laid out `[B, L, H, dv]`; logarithm of the normaliser `[B, H, L]`, +inf where a query
        sees no key; log weights `[b, B, Hk, M]` and summaries `[b, B, Hk, M, dv]` of what lies outside of each of b
        blocks, the latter in the type of the values.
    """
    problem = Problem(operands, geometry)
    states = key_states(problem)
    return Result(*read(problem, states), states.log_weight, states.summary)


def backward(
    grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool = False
) -> Gradients:
    """Computes gradients of query, key, value, key_bias and query_bias from that of the output and what `forward` gave.

    The torch kernel computes gradients of the directions: `for_directions` must be False.
    """
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    problem = Problem(operands, geometry)
    dq, dquery_bias, delta = query_gradients(problem, grad, saved)
    sent = query_states(problem, grad, saved.lse, delta)
    directions = (operands.offset.new_empty(0) for _ in range(3))
    of_keys = key_gradients(problem, grad, saved.lse, delta, sent)
    return Gradients._make((dq, *of_keys, *directions, dquery_bias))
