"""`linear_attention`, the one call for all kernels, and the operators of PyTorch that it consists of.

The operators, `favor::linear_attention` and its backward, are opaque to `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from typing_extensions import Unpack

from favor.kernels import exported
from favor.kernels.dispatch import TABLE, is_exporting, is_transformed, kernel_module, operator, pick, plain
from favor.kernels.operands import Geometry, GeometryOptions, Gradients, Operands, Result

# The arguments of an operator have to be flat; their order is that of saved graphs, and cannot change.
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
    """Gives the arguments named by `_TENSORS` and `_OPTIONS`, in bundles."""
    *tensors, cu_q, cu_k, query_bias, max_q, max_k, is_causal, size, scale = arguments
    return Operands._make((*tensors, query_bias)), Geometry(cu_q, cu_k, max_q, max_k, is_causal, size, scale)


def _forward(*arguments: Any) -> Result:
    operands, geometry = _bundled(arguments[:-1])
    picked = pick(arguments[-1], operands.query, operands.value)
    with torch.cuda.device_of(operands.query):
        return kernel_module(picked, geometry.form).forward(operands, geometry)


def _fake_forward(*arguments: Any) -> Result:
    operands, geometry = _bundled(arguments[:-1])
    picked = pick(arguments[-1], operands.query, operands.value)
    return Result.empty(geometry.form, operands, geometry, **TABLE[picked].result)


def _backward(grad: Tensor, *arguments: Any) -> Gradients:
    """Runs the backward pass of the kernel that is picked; see `Gradients`."""
    *arguments_of_forward, for_directions, kernel = arguments
    saved = Result(*arguments_of_forward[9:13])
    operands, geometry = _bundled((*arguments_of_forward[:9], *arguments_of_forward[13:]))
    picked = pick(kernel, operands.query, operands.value)
    if for_directions and not TABLE[picked].trains_directions:
        rounded = (t.to(operands.query.dtype).to(t.dtype) for t in operands[3:5])
        operands = operands._replace(**dict(zip(("query_directions", "key_directions"), rounded, strict=True)))
        picked = "torch"
    with torch.cuda.device_of(operands.query):
        return kernel_module(picked, geometry.form).backward(grad, operands, geometry, saved, for_directions)


def _fake_backward(grad: Tensor, *arguments: Any) -> Gradients:
    operands, _ = _bundled((*arguments[:9], *arguments[13:-2]))
    return Gradients.empty(operands, for_directions=arguments[-2])


attention_forward = operator("linear_attention", _FORWARD, _forward, _fake_forward)
attention_backward = operator("linear_attention_backward", _BACKWARD, _backward, _fake_backward)


def _products(*arguments: Any) -> tuple[int, int]:
    """Counts operations in products of matrices: for features and for exact pairs. Tensors are given by their shapes.

    As in PyTorch's counts of softmax attention, causality saves nothing.
    """
    query, key, value, directions = arguments[:4]
    rows, both = prod(query[:3]), query[3] + value[3]
    return 2 * directions[2] * both * (rows + prod(key[:3])), 2 * both * rows * min(arguments[13], key[2])


@register_flop_formula(torch.ops.favor.linear_attention)
def _(*arguments: Any, **_: Any) -> int:
    return sum(_products(*arguments))


@register_flop_formula(torch.ops.favor.linear_attention_backward)
def _(grad: Any, *arguments: Any, **_: Any) -> int:
    features, pairs = _products(*arguments[:9], *arguments[13:])
    return 2 * features + 5 * pairs // 2  # both are computed again


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, query_bias, ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, ctx.kernel = inputs
    ctx.save_for_backward(*tensors, *output, query_bias)
    ctx.set_materialize_grads(False)  # zeros for the summaries of a window would be many


def _differentiate(
    ctx: Any,
    grad: Tensor | None,
    of_lse: Tensor | None = None,
    *unused: Any,
    differentiate: Callable[..., tuple[Tensor, ...]] = attention_backward,
) -> tuple[Any, ...]:
    of_lse = None if of_lse is None or of_lse.ndim == 1 else of_lse  # which bidirectional attention does not keep
    if grad is None and of_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    for_directions = any(ctx.needs_input_grad[3:6])
    options = (ctx.max_q, ctx.max_k, ctx.is_causal, ctx.window, ctx.scale, for_directions, ctx.kernel)
    saved = list(ctx.saved_tensors)
    if of_lse is not None:
        grad, saved = _with_normaliser(grad, of_lse, saved)
    found = Gradients(*differentiate(grad, *saved, *options))
    if of_lse is not None:  # kernels take the gradient of the query bias from the features, as that of all logits is 0
        found = found._replace(value=found.value[..., :-1])
        found = found._replace(query_bias=found.query_bias - of_lse) if ctx.window else found
    directions = (found.query_directions, found.key_directions, found.offset) if for_directions else (None,) * 3
    query_bias = found.query_bias if ctx.window else None
    options_of_forward = (None,) * 6
    return (*found[:3], *directions, found.key_bias, None, None, query_bias, *options_of_forward)


def _with_normaliser(grad: Tensor | None, of_lse: Tensor, saved: list[Any]) -> tuple[Tensor, list[Any]]:
    """Adds the gradient h_i of the normaliser to that of the output, by one more column of values that are all zero.

    The gradient of the logarithm of weight w_ij is w_ij (g_i.v_j - g_i.out_i + h_i). A kernel gets it if g_i has one
    more entry, 1, v_j a 0 and out_i the entry -h_i.
    """
    _, _, value, *_, out, _, _, summary, _ = saved
    grad = torch.zeros_like(out) if grad is None else grad
    saved[2] = torch.nn.functional.pad(value, (0, 1))
    if summary.numel():
        saved[12] = torch.nn.functional.pad(summary, (0, 1))
    saved[9] = torch.cat([out, -of_lse.unsqueeze(-1).to(out.dtype)], -1)
    return torch.nn.functional.pad(grad, (0, 1), value=1.0), saved


attention_forward.register_autograd(_differentiate, setup_context=_keep)


def _one_by_one(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Makes the rule of `torch.func.vmap` for an operator: its results for one entry after another."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        pairs = list(zip(arguments, in_dims, strict=True))
        results = [
            operator(*(given if dim is None else given.select(dim, entry) for given, dim in pairs))
            for entry in range(info.batch_size)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


attention_forward.register_vmap(_one_by_one(attention_forward))
attention_backward.register_vmap(_one_by_one(attention_backward))


class _Eager(torch.autograd.Function):
    """The operator without its dispatch, on which the host spends more time than on all else in a short pass.

    It also is the form that the transforms of torch.func take.
    """

    generate_vmap_rule = True
    setup_context = staticmethod(_keep)

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _forward(*inputs) if plain(*inputs[:3]) else attention_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        # If gradients are to be differentiated again, the operator raises an error.
        alone = plain(grads[0]) and not torch.is_grad_enabled()
        transformed = _Backward.apply if is_transformed() else attention_backward
        return _differentiate(ctx, *grads, differentiate=_backward if alone else transformed)


class _Backward(torch.autograd.Function):
    """The operator of the backward pass, as the transforms of torch.func take it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise NotImplementedError("linear attention has first derivatives only, no derivatives of its gradients.")


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    *,
    query_bias: Tensor | None = None,
    kernel: str = "auto",
    **geometry: Unpack[GeometryOptions],
) -> Tensor:
    """Attends with weights sum_m exp(query.uq_m + key.uk_m + offset_m + key_bias), in time linear in the length.

    With a window, tokens are cut into blocks of `window` tokens, and the weights inside a block are exp(scale
    query.key) instead; the others are then multiplied by exp(query_bias), which makes the two comparable.

    Logits, maxima and sums are float32 (float64 for float64 inputs); memory is linear in the length and holds no
    feature. Nothing is added to the normaliser. A query that sees no key gives zeros, with zero gradient.

    Args:
        query: `[B, H, L, d]`, float64, float32, bfloat16 or float16.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of the type of `query`; H must be a multiple of Hk.
        query_directions, key_directions: uq and uk `[n, Hk, M, d]`, with the scale of the logits; float32, or
            float64 for float64 inputs. n is the number of sequences, or 1 if they share the directions.
        offset: `[n, Hk, M]`.
        key_bias: `[B, Hk, S]`; -inf hides a key, whatever key and value hold there.
        query_bias: `[B, H, L]`, float32 or float64 like the directions; required with a window, and only then.
        kernel: "auto" (Triton on CUDA, torch elsewhere), "torch" or "triton".
        is_causal: query i sees keys 0 ... S - L + i; default False.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths `[N + 1]`, int32, starting with 0, of N sequences packed one
            after another along L and S; then B is 1 and no sequence sees another. None (default) if nothing is packed.
        max_seqlen_q, max_seqlen_k: the largest lengths; if absent, L and S, which is only slower.
        window: length of the blocks, 0 (default) for none. Queries and keys are then those of the same tokens: as many
            queries as keys, or at most as many if causal.
        scale: of the exact logits, for a window; default 1.

    Returns:
        `[B, H, L, dv]` in the type of `query`. Its memory may be laid out `[B, L, H, dv]`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an unknown kernel, Triton where it cannot run, or a window that does not fit the inputs.

    Source: positive random features of Choromanski et al., "Rethinking Attention with Performers" (2021), in the
    proposal form of `favor.features.parameters`.

    Example:
        >>> import torch
        >>> from favor.kernels import linear_attention
        >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
        >>> uq, uk, offset = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), torch.zeros(1, 2, 8)
        >>> linear_attention(q, k, v, uq, uk, offset, torch.zeros(1, 2, 6)).shape
        torch.Size([1, 2, 6, 4])
    """
    given = Operands(query, key, value, query_directions, key_directions, offset, key_bias, query_bias)
    return _run(given, Geometry.of(query, key, query_bias, **geometry), kernel)[0]


def attention_and_normaliser(operands: Operands, kernel: str, **geometry: Unpack[GeometryOptions]) -> Result:
    """Gives what `linear_attention` gives, and the logarithm of the normaliser `[B, H, L]`, both with gradients.

    For causal attention, or with a window, whose normaliser is that of the weights divided by exp(query_bias).
    """
    form = Geometry.of(operands.query, operands.key, operands.query_bias, **geometry)
    found = Result(*_run(operands, form, kernel))
    # Kernels keep inf for queries that see nothing.
    return found._replace(lse=found.lse.masked_fill(found.lse == torch.inf, -torch.inf))


def _run(given: Operands, form: Geometry, kernel: str) -> tuple[Tensor, ...]:
    if is_exporting() and not form.is_causal and form.cu_k is None:
        return (exported.attention(given, form),)
    cu_q, cu_k, *options = form
    *tensors, query_bias = given.readable()
    inputs = (*tensors, cu_q, cu_k, query_bias, *options, kernel)
    plainly = is_transformed() or plain(*tensors[:3])
    return _Eager.apply(*inputs) if plainly else attention_forward(*inputs)
