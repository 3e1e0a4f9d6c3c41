"""`node_attention`: landmarks of encoders as one operator, for kernels that compute all of its steps.

`favor.landmark.bidirectional` says what it computes, and composes it from plain operations where no such kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favor.kernels.dispatch import is_exporting, is_transformed, kernel_module, operator, pick, plain
from favor.kernels.operands import NodeOptions

_OPTIONS = (
    "SymInt means, SymInt selected, SymInt block, bool together, bool is_padded, float spread, float scale, str kernel"
)
_TOKENS = "Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? key_lengths"
_RESULTS = 12


def is_fused(kernel: str, query: Tensor, value: Tensor) -> bool:
    """Tells whether a kernel of its own computes it."""
    return not is_exporting() and not is_transformed() and pick(kernel, query, value) == "triton"


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *tokens, kernel = arguments
    with torch.cuda.device_of(tokens[0]):
        module = kernel_module(pick(kernel, tokens[0], tokens[2]), "nodes")
        results: tuple[Tensor, ...] = module.forward(*tokens[:5], NodeOptions(*tokens[5:]))
    return results


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, *numbers, _ = arguments
    given, (batch, heads, length, _), (key_heads, keys) = NodeOptions(*numbers), query.shape, key.shape[1:3]
    blocks, number, width = -(-length // given.block), given.number(keys), value.shape[3]

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = made(batch, heads, length, dtype=torch.float32)
    of_keys = made(batch, key_heads, keys)
    of_queries = made(batch, heads, length) if given.together and given.selected else made(0)
    rows = (
        tensor.new_empty(*tensor.shape[:2], size, tensor.shape[3]) for size in (keys, number) for tensor in (key, value)
    )
    far_log = made(batch, heads, blocks, number, dtype=torch.float32)
    marks = made(batch, heads, blocks, given.most(keys)), made(batch, heads, blocks), made(batch, heads)
    return (out, lse, of_keys, of_queries, *rows, far_log, *marks)


def _backward(grad: Tensor, results: list[Tensor], *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, _, key_lengths, *numbers, kernel = arguments
    with torch.cuda.device_of(query):
        module = kernel_module(pick(kernel, query, value), "nodes")
        gradients: tuple[Tensor, Tensor, Tensor] = module.backward(
            grad, query, key, value, key_lengths, tuple(results), NodeOptions(*numbers)
        )
    return gradients


_forward_operator = operator(
    "node_attention", f"({_TOKENS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * _RESULTS)})", _forward, _fake_forward
)
_backward_operator = operator(
    "node_attention_backward",
    f"(Tensor grad, Tensor[] results, {_TOKENS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, results, *tokens: tuple(torch.empty_like(tensor) for tensor in tokens[:3]),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *unused: Any, backward: Any = _backward_operator) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * (5 + len(ctx.options))
    tokens, results = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    return (*backward(grad, list(results), *tokens, *ctx.options), *(None,) * (2 + len(ctx.options)))


_forward_operator.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, which takes the host longer than all launches."""

    setup_context = staticmethod(_keep)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        alone = plain(grads[0]) and not torch.is_grad_enabled()
        return _differentiate(ctx, *grads, backward=_backward if alone else _backward_operator)


def node_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    key_lengths: Tensor | None,
    options: NodeOptions,
    kernel: str = "auto",
) -> Tensor:
    """Attends to the nodes of alike keys, see `favor.landmark.bidirectional`.

    Args:
        query: `[B, H, L, d]`, padding at the end.
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`, padding at the end, zeros.
        lengths, key_lengths: how many queries and how many keys count, int64 `[B]`; None if all do.
        options: the numbers of the call.
        kernel: a kernel for which `is_fused` is true.

    Returns:
        `[B, H, L, dv]`, in the type of the queries.
    """
    tokens = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    inputs = (*tokens, lengths, key_lengths, *options, kernel)
    return (_Eager.apply(*inputs) if plain(query, key, value) else _forward_operator(*inputs))[0]
