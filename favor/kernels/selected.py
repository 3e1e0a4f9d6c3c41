"""`selected_attention`: groups of keys, near keys and chosen keys under one normaliser.

    weight of key j for query i = exp(scale q_i.k_j)     if j is near, or chosen for i
                                = exp(scale q_i.c_g)     else, c_g the mean of its group

so that with sums over groups (n_m keys with the mean value w_m) and the chosen keys C_i

    out_i = [ sum_m n_m e^{q_i.c_m} w_m + sum_{j near} e^{q_i.k_j} v_j
              + sum_{j in C_i} (e^{q_i.k_j} - e^{q_i.c_g(j)}) v_j ] / the same sums with 1 for w and v.

The difference loses no digits: by Jensen's inequality a group never weighs more by its mean than by its keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from favor.kernels.dispatch import kernel_module, pick
from favor.kernels.operands import SelectedOperands

_TENSORS = (
    "Tensor query, Tensor counts, Tensor far_key, Tensor far_value, Tensor near_counts, Tensor near_key, "
    "Tensor near_value, Tensor key, Tensor value, Tensor pages, Tensor cell, Tensor since"
)
_OPTIONS = "SymInt page_size, SymInt per_head, SymInt first, float scale, str kernel"


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = SelectedOperands(*arguments[:-1])
    picked = pick(arguments[-1], given.query, given.value)
    with torch.cuda.device_of(given.query):
        found: tuple[Tensor, Tensor] = kernel_module(picked, "selected").forward(given)
    return found


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = SelectedOperands(*arguments[:-1])
    picked = pick(arguments[-1], given.query, given.value)
    with torch.cuda.device_of(given.query):
        found: tuple[Tensor, ...] = kernel_module(picked, "selected").backward(grad, given, out, lse)
    return found


selected_forward = torch.library.custom_op(
    "favor::selected_attention", _forward, mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
selected_backward = torch.library.custom_op(
    "favor::selected_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@selected_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = SelectedOperands(*arguments[:-1])
    lse = given.query.new_empty(given.query.shape[:-1], dtype=given.counts.dtype)
    return given.query.new_empty(*given.query.shape[:-1], given.value.shape[-1]), lse


@selected_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = SelectedOperands(*arguments[:-1])
    read = (given.query, given.far_key, given.far_value, given.near_key, given.near_value, given.key, given.value)
    return tuple(tensor.new_empty(tensor.shape) for tensor in read)


def _operations(*arguments: Any) -> int:
    """Counts operations in products of matrices; tensors are given by their shapes."""
    given: Any = SelectedOperands(*arguments)
    columns = given.counts[2] + given.near_counts[2] + given.pages[3] * given.page_size
    number: int = 2 * prod(given.query[:4]) * columns * (given.query[4] + given.value[2])
    return number


@register_flop_formula(torch.ops.favor.selected_attention)
def _(*arguments: Any, **_: Any) -> int:
    return _operations(*arguments[:-1])


@register_flop_formula(torch.ops.favor.selected_attention_backward)
def _(grad: Any, out: Any, lse: Any, *arguments: Any, **_: Any) -> int:
    return 5 * _operations(*arguments[:-1]) // 2  # weights are computed again


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.options = inputs[12:]


def _differentiate(ctx: Any, grad: Tensor, unused: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    query, far_key, far_value, near_key, near_value, key, value = selected_backward(
        grad.contiguous(), out, lse, *tensors, *ctx.options
    )
    return (query, None, far_key, far_value, None, near_key, near_value, key, value, *(None,) * 8)


selected_forward.register_autograd(_differentiate, setup_context=_keep)


def selected_attention(given: SelectedOperands, kernel: str = "auto") -> Tensor:
    """Attends to groups, near keys and chosen keys under one normaliser; see `favor.kernels.selected`.

    Args:
        given: the operands.
        kernel: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".

    Returns:
        `[N, F, Z, R, dv]`, in the type of the queries; zeros for rows that see nothing. Gradients reach query, means,
        near keys, keys and their values; which keys are chosen is a constant.

    Raises:
        ValueError: for an unknown kernel, or Triton where it cannot run.
    """
    out: Tensor = selected_forward(*given, kernel)[0]
    return out
