"""`node_attention` and `section_attention`: landmarks as one operator, for kernels that compute all of its steps.

`favor.landmark.bidirectional` and `favor.landmark.causal` say what they compute, and compose it from smaller operators
where no such kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from favor.kernels.dispatch import is_exporting, is_transformed, kernel_module, operator, pick, plain
from favor.kernels.operands import NodeOptions, SectionOptions, SectionTables

Tensors = tuple[Tensor, ...]


def is_fused(kernel: str, query: Tensor, value: Tensor) -> bool:
    """Tells whether one kernel computes all steps."""
    return not is_exporting() and not is_transformed() and pick(kernel, query, value) == "triton"


class _Fused:
    """Forward and backward pass as operators, and a call that leaves them out where nothing watches.

    The dispatch of an operator takes the host longer than all launches.

    Args:
        form: module of a kernel that has `forward(*tensors, options)` and `backward(grad, *tensors, results, options)`.
        options: type of the options; their schema follows from its annotations.
        others: names of optional tensors after query, key and value.
        results: how many tensors `forward` gives; the first is the output.
        fake: gives them without numbers.
    """

    def __init__(self, form: str, options: Any, others: tuple[str, ...], results: int, fake: Callable[..., Tensors]):
        self.form, self.options, self.tensors = form, options, 3 + len(others)
        kinds = {int: "SymInt", bool: "bool", float: "float"}
        numbers = (f"{kinds[kind]} {name}" for name, kind in get_type_hints(options).items())
        tensors = (*(f"Tensor {name}" for name in ("query", "key", "value")), *(f"Tensor? {name}" for name in others))
        schema, gives = ", ".join((*tensors, *numbers, "str kernel")), ", ".join(["Tensor"] * results)
        self.forward_operator = operator(
            f"{form}_attention",
            f"({schema}) -> ({gives})",
            self.forward,
            lambda *inputs: fake(*self.bundled(*inputs)[:-1]),
        )
        self.backward_operator = operator(
            f"{form}_attention_backward",
            f"(Tensor grad, Tensor[] results, {schema}) -> (Tensor, Tensor, Tensor)",
            self.backward,
            lambda grad, results, *tensors: tuple(torch.empty_like(tensor) for tensor in tensors[:3]),
        )
        self.forward_operator.register_autograd(self.differentiate, setup_context=self.keep)

    def bundled(self, *inputs: Any) -> tuple[Any, ...]:
        """Gives the tensors, the options as one, and the name of the kernel."""
        return (*inputs[: self.tensors], self.options(*inputs[self.tensors : -1]), inputs[-1])

    def forward(self, *inputs: Any) -> Tensors:
        *arguments, kernel = self.bundled(*inputs)
        with torch.cuda.device_of(inputs[0]):
            results: Tensors = kernel_module(pick(kernel, inputs[0], inputs[2]), self.form).forward(*arguments)
        return results

    def backward(self, grad: Tensor, results: list[Tensor], *inputs: Any) -> Tensors:
        """Runs the backward pass of the kernel that is picked; gives the gradients of query, key and value."""
        *tensors, given, kernel = self.bundled(*inputs)
        with torch.cuda.device_of(grad):
            module = kernel_module(pick(kernel, inputs[0], inputs[2]), self.form)
            gradients: Tensors = module.backward(grad, *tensors, tuple(results), given)
        return gradients

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.save_for_backward(*inputs[: self.tensors], *output)
        ctx.options = inputs[self.tensors :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])

    def differentiate(self, ctx: Any, grad: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        nothing = (None,) * (self.tensors - 3 + len(ctx.options))
        if grad is None:
            return (None, None, None, *nothing)
        backward = self.backward if plain(grad) and not torch.is_grad_enabled() else self.backward_operator
        tensors, results = ctx.saved_tensors[: self.tensors], ctx.saved_tensors[self.tensors :]
        return (*backward(grad, list(results), *tensors, *ctx.options), *nothing)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensors:
        """Gives all results of the forward pass; the first one has a graph."""
        tokens = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
        inputs = (*tokens, *others)
        return _Eager.apply(self, *inputs) if plain(query, key, value) else self.forward_operator(*inputs)


class _Eager(torch.autograd.Function):
    """Either of the two without the dispatch of an operator."""

    @staticmethod
    def forward(fused: _Fused, *inputs: Any) -> Tensors:
        return fused.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.fused = inputs[0]
        ctx.fused.keep(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return (None, *ctx.fused.differentiate(ctx, *grads))


def _out(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Makes memory for the output and the logarithms of normalisers, as kernels lay it out."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, length, dtype=torch.float32)


def _fake_nodes(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, key_lengths: Tensor | None, given: NodeOptions
) -> Tensors:
    (batch, heads, length), (key_heads, keys) = query.shape[:3], key.shape[1:3]
    blocks, number = -(-length // given.block), given.number(keys)

    def made(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.int32)

    is_sorted = given.together and given.selected
    orders = made(batch, key_heads, keys), made(batch, heads, length) if is_sorted else made(0)
    shapes = (
        (tensor, (*tensor.shape[:2], size, tensor.shape[3])) for size in (keys, number) for tensor in (key, value)
    )
    rows = (tensor.new_empty(shape) for tensor, shape in shapes)
    far_log = query.new_empty(batch, heads, blocks, number, dtype=torch.float32)
    marks = made(batch, heads, blocks, given.most(keys)), made(batch, heads, blocks), made(batch, heads)
    return (*_out(query, value), *orders, *rows, far_log, *marks)


def _fake_sections(query: Tensor, key: Tensor, value: Tensor, given: SectionOptions) -> Tensors:
    (batch, heads, length, width), key_heads, wide = query.shape, key.shape[1], torch.float32
    sections, blocks, rank = -(-length // given.section), -(-length // given.block), given.rank(width)
    number, (out, lse) = min(given.selected, length), _out(query, value)
    coordinates = query.new_empty(batch, heads, rank, dtype=torch.int64)
    tables = [(key_heads, sections, size) for size in (width, value.shape[3])]
    sums = [key.new_empty(batch, *shape, dtype=wide) for shape in tables]
    shared = query.new_empty(batch, heads, blocks, number, dtype=torch.int32)
    own = query.new_empty(batch, heads, blocks, given.block, number // given.share, dtype=torch.int32)
    far_log = query.new_empty(batch, heads, blocks, sections, dtype=wide)
    index = key.new_empty(batch, heads, length, rank)
    return (out, coordinates, index, *sums, lse, far_log, shared, own)


_nodes = _Fused("nodes", NodeOptions, ("lengths", "key_lengths"), 12, _fake_nodes)
_sections = _Fused("sections", SectionOptions, (), 9, _fake_sections)


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
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`, padding at the end.
        lengths, key_lengths: how many queries and how many keys count, int64 `[B]`; None if all do.
        options: the numbers of the call.
        kernel: a kernel for which `is_fused` is true.

    Returns:
        `[B, H, L, dv]`, in the type of the queries.
    """
    return _nodes(query, key, value, lengths, key_lengths, *options, kernel)[0]


def section_attention(
    query: Tensor, key: Tensor, value: Tensor, options: SectionOptions, kernel: str = "auto"
) -> Tensors:
    """Computes causal attention of whole sequences by sections, see `favor.landmark.causal`.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, L, d]` and `[B, Hk, L, dv]`, padding at the end.
        options: the numbers of the call.
        kernel: a kernel for which `is_fused` is true.

    Returns:
        `[B, H, L, dv]`, in the type of the queries; and without a graph, what a cache keeps: coordinates in which
        queries search, int64 `[B, H, r]`, these of all keys `[B, H, L, r]`, and the sums of keys and values of each
        section, `[B, Hk, F, d]` and `[B, Hk, F, dv]`, float32.
    """
    return _sections(query, key, value, *options, kernel)[:5]


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor | None,
    tables: SectionTables,
    options: SectionOptions,
    kernel: str = "auto",
) -> Tensor:
    """Attends with one more token, which is written into the tables of all before it.

    Args:
        query, key, value: `[B, H, 1, d]`, `[B, Hk, 1, d]` and `[B, Hk, 1, dv]`.
        counts: 1, or 0 where the token is padding, int64 `[B]`; None for 1.
        tables: changed in place.
        options: the numbers of the call.
        kernel: a kernel for which `is_fused` is true.

    Returns:
        `[B, H, 1, dv]`, in the type of the queries, without a graph.
    """
    tokens = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    with torch.cuda.device_of(query):
        out: Tensor = kernel_module(pick(kernel, query, value), "sections").step(*tokens, counts, tables, options)
    return out
