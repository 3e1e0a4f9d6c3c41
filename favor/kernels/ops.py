"""The kernels as operators of PyTorch, `favor::linear_attention` and its backward, opaque to `torch.compile`."""

# No `from __future__ import annotations`: the schemas of the operators are read from the annotations.
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from favor.kernels.dispatch import pick, plain, triton_module
from favor.kernels.eager import bidirectional as chunked
from favor.kernels.eager import causal as chunked_causal
from favor.kernels.eager import window as chunked_window


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    query_bias: Optional[Tensor],  # noqa: UP045
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, logarithm of the normaliser, and weight and summary of the landmarks; see `linear_attention`.

    What the backward pass of a kernel has no use for is empty.
    """
    inputs = (query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k)
    blocks = (window, scale, is_causal)
    if pick(kernel, query, value) == "torch":
        if query_bias is not None:
            return chunked_window.forward(*inputs, query_bias, *blocks)
        return (chunked_causal if is_causal else chunked).forward(*inputs)
    with torch.cuda.device_of(query):
        if query_bias is not None:
            return triton_module("window.op").forward(*inputs, query_bias, *blocks, max_q, max_k)
        return triton_module("causal.op" if is_causal else "bidirectional").forward(*inputs, max_q, max_k)


attention_forward = torch.library.custom_op("favor::linear_attention", _forward, mutates_args=())


@attention_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    query_bias: Optional[Tensor],  # noqa: UP045
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = chunked.empty_output(query, value), query_directions.new_empty(query.shape[:3])
    triton = pick(kernel, query, value) == "triton"
    if triton:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    elif not window and not is_causal:
        lse = offset.new_empty(0)
    if window:
        weight, summary = chunked_window.empty_landmarks(offset, value, window, cu_k)
        return out, lse, weight, summary.to(value.dtype) if triton else summary
    if is_causal:
        return out, lse, offset.new_empty(0), offset.new_empty(0)
    number = query.shape[0] if cu_q is None else cu_q.shape[0] - 1
    landmarks = (number, *offset.shape[1:])
    return out, lse, offset.new_empty(landmarks), offset.new_empty(*landmarks, value.shape[-1])


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    out: Tensor,
    lse: Tensor,
    weight: Tensor,
    summary: Tensor,
    query_bias: Optional[Tensor],  # noqa: UP045
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: int,
    scale: float,
    for_directions: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients; empty for directions and offset unless `for_directions`, and for a query bias that is not given."""
    picked = pick(kernel, query, value)
    if for_directions and picked == "triton":
        # As they entered the forward pass.
        query_directions, key_directions = (
            directions.to(query.dtype).to(directions.dtype) for directions in (query_directions, key_directions)
        )
    inputs = (query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k)
    saved, nothing = (out, lse, weight, summary), offset.new_empty(0)
    blocks = (window, scale, is_causal)
    # The Triton kernels hold the directions fixed; training them is for the chunked form, on any device.
    if for_directions or picked == "torch":
        if query_bias is not None:
            saved = (*saved[:3], summary.to(offset.dtype))
            grads, dquery_bias = chunked_window.backward(grad, *inputs, query_bias, *blocks, *saved, for_directions)
            return *grads, dquery_bias
        return *(chunked_causal if is_causal else chunked).backward(grad, *inputs, *saved, for_directions), nothing
    last = nothing
    with torch.cuda.device_of(query):
        if query_bias is not None:
            *grads, last = triton_module("window.op").backward(grad, *inputs, query_bias, *blocks, max_q, max_k, *saved)
        else:
            grads = triton_module("causal.op" if is_causal else "bidirectional").backward(
                grad, *inputs, max_q, max_k, *saved
            )
    return *grads, *(torch.empty_like(nothing) for _ in range(3)), last


attention_backward = torch.library.custom_op("favor::linear_attention_backward", _backward, mutates_args=())


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Optional[Tensor],  # noqa: UP045
    cu_k: Optional[Tensor],  # noqa: UP045
    out: Tensor,
    lse: Tensor,
    weight: Tensor,
    summary: Tensor,
    query_bias: Optional[Tensor],  # noqa: UP045
    max_q: int,
    max_k: int,
    is_causal: bool,
    window: int,
    scale: float,
    for_directions: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = chunked.empty_gradients(
        query, key, value, query_directions, key_directions, offset, key_bias, for_directions
    )
    return *grads, offset.new_empty(0) if query_bias is None else torch.empty_like(query_bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, query_bias, ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, *output, query_bias)
    ctx.set_materialize_grads(False)  # zeros for the landmarks of a window would be many


def _differentiate(
    ctx: Any,
    grad: Optional[Tensor],  # noqa: UP045
    *unused: Any,
    differentiate: Callable[..., tuple[Tensor, ...]] = attention_backward,
) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    for_directions = any(ctx.needs_input_grad[3:6])
    options = (ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, for_directions, ctx.kernel)
    query, key, value, bias, *found, query_bias = differentiate(grad, *ctx.saved_tensors, *options)
    directions = found if for_directions else (None, None, None)
    return query, key, value, *directions, bias, None, None, query_bias if ctx.window else None, *(None,) * 6


attention_forward.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, on which the host spends more time than on all else in a short pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Any, ...]:  # type: ignore[override]  # noqa: UP045
        # Where gradients are to be differentiated again, the operator says that it cannot.
        alone = plain(grads[0]) and not torch.is_grad_enabled()
        return _differentiate(ctx, *grads, differentiate=_backward if alone else attention_backward)


def attention(*inputs: Any) -> tuple[Tensor, ...]:
    """What `attention_forward` returns; by way of the operator only where something looks at operators."""
    return _Eager.apply(*inputs) if plain(*inputs[:3]) else attention_forward(*inputs)
