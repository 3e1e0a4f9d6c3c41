"""`choose`, `log_left` and `chosen_attention`: exact attention to keys that a search found, and to means of all others.

    weight of key j for query i    = exp(scale q_i.k_j)            if j is near i, or chosen by its block or by itself
    weight of a mean c of n keys   = (n - chosen) exp(scale q_i.c) with the mean of their values

under one softmax. `chosen` counts the keys of the mean that the block of the query chose. Which keys are chosen is a
constant for gradients. `favor.landmark` says who chooses.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from favor.kernels.dispatch import is_transformed, kernel_module, operator, pick
from favor.kernels.operands import ChosenOperands

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor shared, Tensor own, Tensor seen, Tensor far_key, Tensor far_value, "
    "Tensor far_log, Tensor first, Tensor run"
)
_OPTIONS = "SymInt section, SymInt most, float scale, str kernel"


def _choose(query: Tensor, key: Tensor, seen: Tensor, taken: Tensor | None, number: int, kernel: str) -> Tensor:
    with torch.cuda.device_of(query):
        return kernel_module(pick(kernel, query, query), "chosen").choose(query, key, seen, taken, number)


_choose_operator = operator(
    "choose_keys",
    "(Tensor query, Tensor key, Tensor seen, Tensor? taken, SymInt number, str kernel) -> Tensor",
    _choose,
    lambda query, *others: query.new_empty(*query.shape[:3], others[3], dtype=torch.int32),
)


@torch.no_grad()
def choose(
    query: Tensor, key: Tensor, seen: Tensor, number: int, *, taken: Tensor | None = None, kernel: str = "auto"
) -> Tensor:
    """Finds the key with the largest product with a query in each bin; bin n has the keys n, n + number, ...

    Neighbours are in different bins, so this is nearly as good as the best `number` keys, and needs no sorting.

    Args:
        query: `[N, Z, B, r]`, rows in blocks.
        key: `[Nk, S, r]`; N is a multiple of Nk.
        seen: how many of the first keys each block may choose, int32 `[N, Z]`.
        number: of bins.
        taken: keys that the block does not need any more, int32 `[N, Z, C]`, found by `choose`: the key of bin n or -1.
            A block that sees at most C keys has taken all of them, and need not get any.
        kernel: "auto", "torch" or "triton".

    Returns:
        Places of keys, int32 `[N, Z, B, number]`; -1 for a bin without a key.
    """
    if not number or 0 in query.shape:
        return query.new_zeros(*query.shape[:3], number, dtype=torch.int32)
    return _choose_operator(query, key, seen, taken, number, kernel)


def _log_left(shared: Tensor, seen: Tensor, run: Tensor, span: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    limit, run, span = seen.unsqueeze(-1), run.view(-1, 1, 1), span.view(-1, 1, 1)
    count = (limit - torch.arange(number, device=shared.device, dtype=torch.int32) * span).clamp(min=0).minimum(span)
    mean = torch.where(shared < 0, number, shared * run // span).long()
    taken = torch.where(shared < 0, 0, limit - shared * run).minimum(run).to(dtype)
    left = torch.nn.functional.pad(count.to(dtype), (0, 1)).scatter_add_(2, mean, -taken)
    return left[..., :number].log()


_log_left_operator = operator(
    "log_of_keys_left",
    "(Tensor shared, Tensor seen, Tensor run, Tensor span, SymInt number, ScalarType dtype) -> Tensor",
    _log_left,
    lambda shared, *others: shared.new_empty(*shared.shape[:2], others[3], dtype=others[4]),
)


def log_left(shared: Tensor, seen: Tensor, run: Tensor, span: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """Takes the logarithm of how many keys of each mean a block has not chosen.

    Args:
        shared, seen, run: as in `favor.kernels.operands.ChosenOperands`.
        span: keys of a mean, int32 `[N]`: mean m has the keys m span ... m span + span - 1 before `seen`.
        number: of means.
        dtype: of the logarithms.

    Returns:
        `[N, Z, number]`; -inf for none.
    """
    return _log_left_operator(shared, seen, run, span, number, dtype)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = ChosenOperands(*arguments[:-1])
    with torch.cuda.device_of(given.query):
        return kernel_module(pick(arguments[-1], given.query, given.value), "chosen").forward(given)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = ChosenOperands(*arguments[:-1])
    lse = given.query.new_empty(given.query.shape[:3], dtype=given.far_log.dtype)
    return given.query.new_empty(*given.query.shape[:3], given.value.shape[-1]), lse


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = ChosenOperands(*arguments[:-1])
    with torch.cuda.device_of(given.query):
        return kernel_module(pick(arguments[-1], given.query, given.value), "chosen").backward(grad, given, out, lse)


def _fake_backward(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = ChosenOperands(*arguments[:-1])
    read = (given.query, given.key, given.value, given.far_key, given.far_value)
    return tuple(tensor.new_empty(tensor.shape) for tensor in read)


_forward_operator = operator(
    "chosen_attention", f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake_forward
)
_backward_operator = operator(
    "chosen_attention_backward",
    f"(Tensor grad, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)


def _operations(*arguments: Any) -> int:
    """Counts operations in products of matrices; tensors are given by their shapes."""
    given: Any = ChosenOperands(*arguments)
    columns = given.far_key[1] + min(given.most, given.key[1]) + given.own[3] + given.section
    return 2 * prod(given.query[:3]) * columns * (given.query[3] + given.value[2])


@register_flop_formula(torch.ops.favor.chosen_attention)
def _(*arguments: Any, **_: Any) -> int:
    return _operations(*arguments[:-1])


@register_flop_formula(torch.ops.favor.chosen_attention_backward)
def _(grad: Any, out: Any, lse: Any, *arguments: Any, **_: Any) -> int:
    return 5 * _operations(*arguments[:-1]) // 2  # weights are computed again


@register_flop_formula(torch.ops.favor.choose_keys)
def _(query: Any, key: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(query) * int(key[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:11], *output)
    ctx.options = inputs[11:]


def _differentiate(ctx: Any, grad: Tensor, unused: Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    query, key, value, far_key, far_value = _backward_operator(grad.contiguous(), out, lse, *tensors, *ctx.options)
    return (query, key, value, None, None, None, far_key, far_value, *(None,) * 7)


_forward_operator.register_autograd(_differentiate, setup_context=_keep)


def chosen_attention(given: ChosenOperands, kernel: str = "auto") -> Tensor:
    """Attends to near keys, chosen keys and means under one softmax; see `favor.kernels.chosen`.

    Args:
        given: the operands.
        kernel: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".

    Returns:
        `[N, Z, B, dv]`, in the type of the queries; zeros for rows that see nothing. Gradients reach queries, keys,
        values and means.

    Raises:
        ValueError: for an unknown kernel, Triton where it cannot run, or inside a transform of torch.func.
    """
    if is_transformed():
        raise ValueError(
            "torch.func cannot transform landmarks that select keys, nor causal ones. Use torch.autograd, or an "
            "encoder with selected_keys=0."
        )
    return _forward_operator(*given, kernel)[0]
