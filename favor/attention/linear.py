"""Attention by positive random features: from queries, keys and a family to the operands of the kernels.

Directions and offsets come from the family. The biases hold what belongs to a key or a query alone: quadratic terms,
shift, padding.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall, method
from favor.attention.packing import Packing
from favor.features import Moments, Parameters, PositiveFeatures
from favor.features.linalg import joined
from favor.kernels import extend, linear_attention
from favor.kernels.dispatch import fuses, is_transformed, kernel_module


@method(PositiveFeatures)
def attend(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` by positive random features."""
    scale, packing, state = call.scale, call.packing, call.state
    omega = call.directions(family, key, scale**0.5)
    if call.parameters is None:
        with torch.no_grad():
            parameters = _parameters(family, query, key, omega, call)
    else:
        parameters = _checked("parameters", call.parameters, omega)
    if call.correction is not None:
        parameters = parameters.corrected(_checked("correction", call.correction, omega))
    if parameters.directions is not None:
        omega = parameters.directions * scale**0.5
    query_directions, key_directions, offset = family.directions(omega, parameters, scale**0.5)
    if offset.ndim == 2:
        query_directions, key_directions, offset = query_directions[None], key_directions[None], offset[None]
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, :]
    bias = key_bias(family.alpha, key, parameters, scale, hidden, packing)
    options: dict[str, Any] = {} if packing is None else packing.for_kernel()
    if call.window:
        own = query_bias(query, parameters, key.shape[1], omega.shape[-2], scale, packing)
        options |= {"window": call.window, "scale": scale, "query_bias": own}
    operands = (query, key, value, query_directions, key_directions, offset, bias)
    if state is not None and state.memory is not None:
        return extend(*operands, state, **options, kernel=call.kernel)
    if state is not None:
        state.begin(key, value, key_directions, bias, call.window, call.kernel)
    return linear_attention(*operands, is_causal=call.is_causal, kernel=call.kernel, **options)


def _checked(name: str, given: Parameters, omega: Tensor) -> Parameters:
    """Gives the caller's parameters in the type and on the device of the drawn omega `[Hk, M, d]`."""
    heads, head_dim = omega.shape[0], omega.shape[-1]
    for part in (given.transform, given.inverse, given.factor):
        if part.shape[-2:] != (head_dim, head_dim) or (part.ndim > 2 and part.shape[-3] not in (1, heads)):
            raise ValueError(f"{name} must be [{heads}, {head_dim}, {head_dim}], got {tuple(part.shape)}.")
    if given.directions is not None and given.directions.shape != omega.shape:
        raise ValueError(
            f"{name} hold learned directions {tuple(given.directions.shape)}, and num_features, key heads and head_dim "
            f"ask for {tuple(omega.shape)}: learned directions cannot be used with other numbers."
        )
    return given.to(omega)


def _parameters(family: PositiveFeatures, query: Tensor, key: Tensor, omega: Tensor, call: AttentionCall) -> Parameters:
    """Gives parameters for these tokens, `[B, Hk, ...]`, or those that need no data."""
    head_dim, packing = omega.shape[-1], call.packing
    if not family.needs_statistics:
        mean, cov = (omega.new_zeros(()).expand(shape) for shape in ((head_dim,), (head_dim, head_dim)))
        return family.fit_moments(Moments(mean, mean, cov, cov))
    if call.is_causal or not call.use_statistics:
        warnings.warn(
            f"{family.name} in a causal layer without favor.calibrate(model, data) computes FAVOR+: parameters from "
            "this sequence would let its tokens see later ones, and those of FAVOR+ (A = 0, B = I) need no data.",
            stacklevel=4,
        )
        return Parameters.identity(head_dim, dtype=omega.dtype, device=omega.device)
    if packing is None:
        return family.fit_moments(_moments(family, query, key, call))
    return family.fit_moments(Moments.cat([_moments(family, q, k, call) for q, k in packing.split(query, key)]))


def _moments(family: PositiveFeatures, query: Tensor, key: Tensor, call: AttentionCall) -> Moments:
    """Computes statistics of x and y for each sequence and key head; the query heads of a key head are pooled."""
    groups, query_mask = query.shape[1] // key.shape[1], call.query_padding(query.shape[2], key.shape[2])
    masks = (
        None if query_mask is None else query_mask[:, None].repeat(1, 1, groups),
        None if call.key_mask is None else call.key_mask[:, None],
    )
    return family.moments(query.unflatten(1, (-1, groups)).flatten(2, 3), key, *masks, scale=call.scale)


def key_bias(
    alpha: float, key: Tensor, params: Parameters, scale: float, hidden: Tensor | None, packing: Packing | None
) -> Tensor:
    """Gives the quadratic term of the keys, `[B, Hk, S]`, -inf where hidden `[B, 1, S]`, which has no gradient."""
    root, dtype = scale**0.5, params.factor.dtype
    if not params.maps and params.shift is None:
        return _Form(None, weight=scale * (alpha - 0.5))(key, hidden, dtype)
    biases = []
    for rows, own in _pairs(key, params, packing, "key_lengths"):
        shift = None if own.shift is None else own.shift / root
        biases.append(_Form(root * own.inverse, shift, weight=scale * alpha)(rows, hidden, dtype))
    return joined(biases, 2)


def query_bias(
    query: Tensor, params: Parameters, key_heads: int, num_features: int, scale: float, packing: Packing | None
) -> Tensor:
    """Gives the bias that makes the sum over features an estimate of exp(x . y) itself, `[B, H, L]`.

    It is log det(Sigma)/2 - |G x|^2/2 + x . b - log M, the part of log(f_1 f_2) / M that depends on the query alone,
    which normalised attention can drop as long as every weight is an estimate.
    """
    root, dtype = scale**0.5, params.factor.dtype
    biases = []
    for rows, own in _pairs(query, params, packing, "query_lengths"):
        # The queries that share a key head are rows of it.
        shared = rows.unflatten(1, (key_heads, -1)).flatten(2, 3)
        linear = None if own.shift is None else root * own.shift
        if own.maps:
            form = _Form(root * own.transform.transpose(-1, -2), linear=linear)
        else:
            form = _Form(None, linear=linear, weight=-scale / 2)
        value = form(shared, None, dtype) + (own.log_det_sigma / 2 - math.log(num_features)).unsqueeze(-1)
        biases.append(value.view(rows.shape[:3]))
    return joined(biases, 2)


def _pairs(rows: Tensor, params: Parameters, packing: Packing | None, lengths: str) -> list[tuple[Tensor, Parameters]]:
    """Gives rows with the parameters that belong to them: all at once, or one packed sequence after another."""
    if packing is None or params.factor.ndim < 4 or params.factor.shape[0] == 1:
        return [(rows, params)]
    return list(zip(rows.split(getattr(packing, lengths), dim=2), params.split(), strict=True))


@dataclass
class _Form:
    """-|matrix' (r - shift)|^2 / 2 + r . linear + weight |r|^2 for rows r `[B, Hk, S, d]`; None leaves a term out."""

    matrix: Tensor | None
    shift: Tensor | None = None
    linear: Tensor | None = None
    weight: float = 0.0

    def __call__(self, rows: Tensor, hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Gives the form `[B, Hk, S]` in `dtype`, -inf where hidden."""
        if is_transformed() or any(t is not None and t.requires_grad for t in (self.matrix, self.shift, self.linear)):
            value = self.of(rows if hidden is None else rows.masked_fill(hidden.unsqueeze(-1), 0.0), dtype)
            return value if hidden is None else value.masked_fill(hidden, -torch.inf)
        return _Apply.apply(rows, self.matrix, self.shift, self.linear, self.weight, hidden, dtype)

    def of(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Gives the form, in plain operations."""
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
        if dtype == torch.float32 and fuses(rows):
            return kernel_module("triton", "tokens").form(rows, matrix, shift, linear, weight, hidden)
        form = _Form(matrix, shift, linear, weight)
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
        if grad.dtype == torch.float32 and not torch.is_grad_enabled() and fuses(rows):
            gram = None if matrix is None else matrix @ matrix.mT
            form = kernel_module("triton", "tokens").form
            return form(rows, gram, shift, linear, ctx.weight, hidden, grad), *(None,) * 6
        slope = _Form(matrix, shift, linear, ctx.weight).slope(rows, grad.unsqueeze(-1))
        if hidden is not None:
            slope = slope.masked_fill(hidden.unsqueeze(-1), 0.0)
        return slope.to(rows.dtype), *(None,) * 6
