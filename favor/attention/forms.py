"""Quadratic forms of every token: the part of the logarithm of its features that belongs to the token alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from favor.features import Parameters
from favor.features.linalg import joined
from favor.kernels.dispatch import fuses, is_transformed, kernel_module


@dataclass
class Form:
    """-|matrix' (root r - shift)|^2 / 2 + root r . linear + weight |r|^2 + level for rows r; None leaves a term out.

    The level is log det(Sigma) / 2 of `sigma` plus a constant.

    Attributes:
        matrix: `[..., d, d]`, broadcast over batch and key heads like all that follow.
        shift, linear: `[..., d]`.
        weight, root: numbers.
        sigma: parameters; with None the level is 0.
        constant: part of the level.
        groups: heads of rows for each key head.
    """

    matrix: Tensor | None
    shift: Tensor | None = None
    linear: Tensor | None = None
    weight: float = 0.0
    root: float = 1.0
    sigma: Parameters | None = None
    constant: float = 0.0
    groups: int = 1

    def __call__(self, rows: Tensor, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Gives the form `[B, H, S]` of rows in `dtype`; -inf and no gradient unless they are `seen` `[B, 1, S]`."""
        factor = None if self.sigma is None else self.sigma.factor
        given = (self.matrix, self.shift, self.linear, factor)
        is_fixed = not any(t is not None and t.requires_grad for t in given)
        if is_fixed and dtype == torch.float32 and fuses(rows):
            return _Fused.apply(rows, seen, self, *given[:3])
        form, hidden = self._scaled(), None if seen is None else ~seen
        shared = rows if self.groups == 1 else rows.unflatten(1, (-1, self.groups)).flatten(2, 3)
        if is_transformed() or not is_fixed:
            value = form.of(shared if hidden is None else shared.masked_fill(hidden.unsqueeze(-1), 0.0), dtype)
            value = value if hidden is None else value.masked_fill(hidden, -torch.inf)
        else:
            value = _Apply.apply(shared, form.matrix, form.shift, form.linear, form.weight, hidden, dtype)
        if self.sigma is not None:
            value = value + (self.sigma.log_det_sigma / 2 + self.constant).unsqueeze(-1)
        return value.view(rows.shape[:3])

    def _scaled(self) -> Form:
        """Gives the same form with a root of 1."""
        matrix, shift, linear = self.matrix, self.shift, self.linear
        if self.root != 1:
            matrix = None if matrix is None else self.root * matrix
            shift = None if shift is None else shift / self.root
            linear = None if linear is None else self.root * linear
        return replace(self, matrix=matrix, shift=shift, linear=linear, root=1.0)

    def of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Gives the form with a root of 1, without its level, in plain operations."""
        terms = []
        if self.matrix is not None:
            terms.append(_squares(self._moved(rows, dtype) @ self.matrix, dtype) / -2)
        if self.linear is not None:
            terms.append((rows.to(dtype) @ self.linear.unsqueeze(-1)).squeeze(-1))
        if self.weight or not terms:
            terms.append(self.weight * _squares(rows, dtype))
        return sum(terms[1:], terms[0])

    def slope(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Gives the gradient of the rows, given that of the form with one more dimension."""
        terms = [rows * (2 * self.weight * grad).to(rows.dtype)] if self.weight else []
        if self.matrix is not None:
            terms.append((self._moved(rows, grad.dtype) @ (self.matrix @ self.matrix.mT)).mul_(-grad))
        if self.linear is not None:
            terms.append(self.linear.unsqueeze(-2) * grad)
        total = terms.pop() if terms else torch.zeros_like(rows)
        for term in terms:
            total.add_(term)  # in the type of the gradient
        return total

    def _moved(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.to(dtype) if self.shift is None else rows.to(dtype) - self.shift.unsqueeze(-2)


def _squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).square()  # one pass


class _Apply(torch.autograd.Function):
    """A form with fixed coefficients; keeps no temporary and no copy of the rows.

    Hidden rows get -inf and no gradient, whatever they hold.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *arguments: Any) -> Tensor:
        matrix, shift, linear, weight, hidden, dtype = arguments
        ctx.save_for_backward(rows, matrix, shift, linear, hidden)
        ctx.weight = weight
        form = Form(matrix, shift, linear, weight)
        # A CPU works in parts that stay in cache; a compiler fuses the whole, and a GPU wants few launches.
        temporary = matrix is not None or linear is not None or rows.dtype != dtype
        in_parts = temporary and rows.device.type == "cpu" and not torch.compiler.is_compiling()
        if in_parts:
            bias = joined([form.of(part, dtype) for part in rows.split(rows.shape[2] // 32 + 64, dim=2)], 2)
        else:
            bias = form.of(rows, dtype)
        return bias if hidden is None else bias.masked_fill(hidden, -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, matrix, shift, linear, hidden = ctx.saved_tensors
        return _slope(Form(matrix, shift, linear, ctx.weight), rows, grad, hidden), *(None,) * 6


def _slope(form: Form, rows: Tensor, grad: Tensor, hidden: Tensor | None) -> Tensor:
    slope = form.slope(rows, grad.unsqueeze(-1))
    if hidden is not None:
        slope = slope.masked_fill(hidden.unsqueeze(-1), 0.0)
    return slope.to(rows.dtype)


class _Fused(torch.autograd.Function):
    """A form with fixed coefficients, in one launch for each pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *arguments: Any) -> Tensor:
        seen, form, *terms = arguments
        ctx.save_for_backward(rows, seen, *terms)
        ctx.form, sigma, level = replace(form, matrix=None, shift=None, linear=None, sigma=None), form.sigma, None
        if sigma is not None and sigma.form != "identity":
            level = sigma.factor if sigma.form == "triangular" else torch.linalg.slogdet(sigma.factor).logabsdet
        numbers = (form.weight, form.root, form.constant)
        return kernel_module("triton", "tokens").form(rows, *terms, numbers, level, seen, groups=form.groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, seen, matrix, shift, linear = ctx.saved_tensors
        form = replace(ctx.form, matrix=matrix, shift=shift, linear=linear)
        if torch.is_grad_enabled() or not fuses(rows):
            hidden = None if seen is None else ~seen
            shared = rows.unflatten(1, (-1, form.groups)).flatten(2, 3)
            slope = _slope(form._scaled(), shared, grad.reshape(shared.shape[:3]), hidden).view(rows.shape)
        else:
            numbers = (form.weight, form.root, 0.0)
            fused = kernel_module("triton", "tokens").form
            slope = fused(rows, matrix, shift, linear, numbers, None, seen, grad, form.groups)
        return slope, *(None,) * 5
