"""Cases of the kernels of linear attention, and how far from the definition in float64 their results may be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from truth import error as relative_error

from favor.kernels.naive import naive_linear_attention
from favor.kernels.operands import Geometry, Operands

Given = tuple[Operands, Geometry, Tensor]
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A dense batch, or packed sequences.

    Attributes:
        lengths: of queries and keys: a pair, or one for each packed sequence.
        hidden: spans of keys; or "some": all of the first sequence, a third at the left of the last, and others.
        transposed: whether tokens come before heads in memory, with gaps between the rows.
        rise: how far some keys are above the others along one of the directions.
        options: of the host functions.
    """

    lengths: tuple[Any, ...] = (40, 40)
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    width: int = 32
    value_width: int = 32
    features: int = 16
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    window: int = 0
    own_directions: bool = False
    hidden: Any = ()
    transposed: bool = False
    scale: float = 1.0
    grad_scale: float = 1.0
    rise: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether `lengths` are those of packed sequences."""
        return isinstance(self.lengths[0], tuple)

    @property
    def geometry(self) -> Geometry:
        """Which key a query sees."""
        pairs = self.lengths if self.is_packed else (self.lengths,)
        ends = [torch.tensor([0, *(pair[i] for pair in pairs)]).cumsum(0).int() for i in (0, 1)]
        longest = (max(pair[i] for pair in pairs) for i in (0, 1))
        packing = ends if self.is_packed else (None, None)
        return Geometry(*packing, *longest, self.is_causal, self.window, 0.5 * self.width**-0.5)


def make(case: Case, seed: int = 0) -> Given:
    """Draws operands and the gradient of the output; hidden keys and their values are NaN."""
    torch.manual_seed(seed)
    (heads, key_heads), geometry = case.heads, case.geometry
    pairs = case.lengths if case.is_packed else (case.lengths,)
    length, size = (sum(pair[i] for pair in pairs) for i in (0, 1))

    def tokens(heads: int, length: int, width: int, scale: float = 1.0) -> Tensor:
        if case.transposed:
            drawn = torch.randn(case.batch, length, heads, width + 3)[..., :width].transpose(1, 2)
        else:
            drawn = torch.randn(case.batch, heads, length, width)
        return (scale * drawn).to(case.dtype)

    def per_head(*shape: int) -> Tensor:
        number = max(case.batch, len(pairs)) if case.own_directions else 1
        return torch.randn(number, key_heads, case.features, *shape)

    query, key = tokens(heads, length, case.width, case.scale), tokens(key_heads, size, case.width, case.scale)
    value = tokens(key_heads, size, case.value_width)
    directions = [per_head(case.width) * case.width**-0.5 for _ in range(2)]
    if case.rise:
        # Some keys after the first one of their chunk are far along some direction.
        for step, place in enumerate(range(5, size, 9)):
            along = directions[1][:, :, step % case.features]
            along = along / along.square().sum(-1, keepdim=True)
            key[:, :, place] += (case.rise * (1 + step % 3) / 3 * along[0]).to(case.dtype)
    bias = torch.randn(case.batch, key_heads, size)
    if case.hidden == "some":
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[0, :, : pairs[0][1]] = -torch.inf
        bias[-1, :, size - pairs[-1][1] : size - pairs[-1][1] * 2 // 3] = -torch.inf
    else:
        for start, stop in case.hidden:
            bias[:, :, start:stop] = -torch.inf
    key, value = (tensor.masked_fill(bias.isneginf().unsqueeze(3), torch.nan) for tensor in (key, value))
    query_bias = torch.randn(case.batch, heads, length) if case.window else None
    operands = Operands(query, key, value, *directions, per_head(), bias, query_bias)
    return operands, geometry, tokens(heads, length, case.value_width, case.grad_scale)


def truth(given: Given, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The output and the gradients of tokens and biases, with everything in one type."""
    operands, geometry, grad = given
    leaves = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in operands]
    form = {"is_causal": geometry.is_causal, "window": geometry.window, "scale": geometry.scale}
    form |= {"cu_seqlens_q": geometry.cu_q, "cu_seqlens_k": geometry.cu_k}
    out = naive_linear_attention(*leaves[:7], query_bias=leaves[7], **form)
    out.backward(grad.to(dtype))
    gradients = {name: leaf.grad for name, leaf in zip(Operands._fields, leaves, strict=True) if leaf is not None}
    return {"out": out.detach()} | gradients


def run(kernel: ModuleType, given: Given, **options: Any) -> dict[str, Tensor]:
    """The same by a kernel; only the torch kernel has gradients of directions."""
    operands, geometry, grad = given
    saved = kernel.forward(operands, geometry, **options)
    assert not any(tensor.isnan().any() for tensor in saved[:2])
    gradients = kernel.backward(grad, operands, geometry, saved, **options)._asdict()
    for name in ("query_directions", "key_directions", "offset", *(["query_bias"] if not geometry.window else [])):
        assert not gradients.pop(name).numel()
    for name, tensor in gradients.items():
        like = getattr(operands, name)
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
    return {"out": saved.out} | gradients


def small_gradients(kernel: ModuleType, case: Case) -> dict[str, float]:
    """Errors in float16 where gradients of tokens are normal numbers, and those of the logits are too small for it."""
    operands, *rest = make(replace(case, dtype=F16, scale=2.0**-10, grad_scale=2.0**-9))
    for directions in operands[3:5]:
        directions *= 2.0**10
    operands.value.mul_(2.0**-4)
    found, exact = run(kernel, (operands, *rest)), truth((operands, *rest))
    return {name: relative_error(own, exact[name]) for name, own in found.items()}


def check(kernel: ModuleType, case: Case, tolerance: float | None = None) -> None:
    """Compares them by the largest error, relative to the largest number.

    The default tolerance is that of float32, to which twice the error of the definition in the type of the tokens comes
    if numbers are rounded, or large.
    """
    given = make(case)
    found, exact, plain = run(kernel, given, **case.options), truth(given), truth(given, case.dtype)
    largest = max(exact[name].abs().max() for name in found if name != "out")
    assert found["out"].dtype == case.dtype
    for name, own in found.items():
        # Gradients that vanish in exact arithmetic are compared with the others.
        size = max(exact[name].abs().max(), 0.1 * largest if name != "out" else 0.1)
        allowed = (tolerance or 2e-5) * size
        if tolerance is None and (case.dtype != torch.float32 or case.scale > 1):
            allowed += 2 * (plain[name].double() - exact[name]).nan_to_num(0).abs().max()
        error = (own.double() - exact[name]).abs().max()
        assert error <= allowed, (name, error / size, allowed / size)
