"""The kernels as operators of PyTorch, `favor::linear_attention` and its backward, opaque to `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from favor.kernels.dispatch import kernel_module, pick, plain
from favor.kernels.eager import bidirectional, window
from favor.kernels.operands import Geometry, Gradients, Operands, Result

# What an operator takes has to be flat; the order is that of saved graphs, and cannot change.
_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_directions, Tensor key_directions, Tensor offset, "
    "Tensor key_bias, Tensor? cu_q, Tensor? cu_k"
)
_OPTIONS = "Tensor? query_bias, SymInt max_q, SymInt max_k, bool is_causal, SymInt window, float scale"
_SAVED = "Tensor out, Tensor lse, Tensor weight, Tensor summary"
_FORWARD = f"({_TENSORS}, {_OPTIONS}, str kernel) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, {_TENSORS}, {_SAVED}, {_OPTIONS}, bool for_directions, str kernel) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _bundled(arguments: tuple[Any, ...]) -> tuple[Operands, Geometry]:
    """The arguments named by `_TENSORS` and `_OPTIONS`, in bundles."""
    *tensors, cu_q, cu_k, query_bias, max_q, max_k, is_causal, size, scale = arguments
    return Operands._make((*tensors, query_bias)), Geometry(cu_q, cu_k, max_q, max_k, is_causal, size, scale)


def _forward(*arguments: Any) -> Result:
    """Output, logarithm of the normaliser, and weight and summary of the features; see `Result`."""
    operands, geometry = _bundled(arguments[:-1])
    picked = pick(arguments[-1], operands.query, operands.value)
    with torch.cuda.device_of(operands.query):
        return kernel_module(picked, geometry.is_causal, geometry.window).forward(operands, geometry)


attention_forward = torch.library.custom_op("favor::linear_attention", _forward, mutates_args=(), schema=_FORWARD)


@attention_forward.register_fake
def _(*arguments: Any) -> Result:
    operands, geometry = _bundled(arguments[:-1])
    query, value, offset = operands.query, operands.value, operands.offset
    out, lse = bidirectional.empty_output(query, value), offset.new_empty(query.shape[:3])
    triton = pick(arguments[-1], query, value) == "triton"
    if triton:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    elif not geometry.window and not geometry.is_causal:
        lse = offset.new_empty(0)
    if geometry.window:
        weight, summary = window.empty_landmarks(operands, geometry)
        return Result(out, lse, weight, summary.to(value.dtype) if triton else summary)
    if geometry.is_causal:
        return Result(out, lse, offset.new_empty(0), offset.new_empty(0))
    shape = (geometry.sequences(query.shape[0]), *offset.shape[1:])
    return Result(out, lse, offset.new_empty(shape), offset.new_empty(*shape, value.shape[-1]))


def _backward(grad: Tensor, *arguments: Any) -> Gradients:
    """Gradients; empty for directions and offset unless `for_directions`, and for a query bias that is not given."""
    *arguments_of_forward, for_directions, kernel = arguments
    saved = Result(*arguments_of_forward[9:13])
    operands, geometry = _bundled((*arguments_of_forward[:9], *arguments_of_forward[13:]))
    picked = pick(kernel, operands.query, operands.value)
    if for_directions and picked == "triton":
        # The Triton kernels hold the directions fixed; training them is for the torch kernels, on any device. The
        # directions are rounded as they were in the forward pass.
        rounded = (t.to(operands.query.dtype).to(t.dtype) for t in operands[3:5])
        operands = operands._replace(**dict(zip(("query_directions", "key_directions"), rounded, strict=True)))
        picked = "torch"
    with torch.cuda.device_of(operands.query):
        module = kernel_module(picked, geometry.is_causal, geometry.window)
        return module.backward(grad, operands, geometry, saved, for_directions)


attention_backward = torch.library.custom_op(
    "favor::linear_attention_backward", _backward, mutates_args=(), schema=_BACKWARD
)


@attention_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> Gradients:
    operands, _ = _bundled((*arguments[:9], *arguments[13:-2]))
    return bidirectional.empty_gradients(operands, for_directions=arguments[-2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, query_bias, ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, *output, query_bias)
    ctx.set_materialize_grads(False)  # zeros for the summaries of a window would be many


def _differentiate(
    ctx: Any,
    grad: Tensor | None,
    *unused: Any,
    differentiate: Callable[..., tuple[Tensor, ...]] = attention_backward,
) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    for_directions = any(ctx.needs_input_grad[3:6])
    options = (ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, for_directions, ctx.kernel)
    found = Gradients(*differentiate(grad, *ctx.saved_tensors, *options))
    directions = (found.query_directions, found.key_directions, found.offset) if for_directions else (None,) * 3
    query_bias = found.query_bias if ctx.window else None
    options_of_forward = (None,) * 6
    return (*found[:3], *directions, found.key_bias, None, None, query_bias, *options_of_forward)


attention_forward.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, on which the host spends more time than on all else in a short pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        # Where gradients are to be differentiated again, the operator says that it cannot.
        alone = plain(grads[0]) and not torch.is_grad_enabled()
        return _differentiate(ctx, *grads, differentiate=_backward if alone else attention_backward)


def attention(operands: Operands, geometry: Geometry, kernel: str) -> Result:
    """Runs the kernel; by way of the operator only where something looks at operators."""
    *tensors, query_bias = operands
    cu_q, cu_k, *options = geometry
    inputs = (*tensors, cu_q, cu_k, query_bias, *options, kernel)
    return Result(*(_Eager.apply(*inputs) if plain(*tensors[:3]) else attention_forward(*inputs)))
