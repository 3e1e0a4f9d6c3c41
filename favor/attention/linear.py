"""Attention by positive random features: from queries, keys and a family to the operands of the kernels.

On a GPU every launch takes the host some time. So what is fixed is kept, and Triton kernels make the rest if nothing
traces or needs gradients of parameters; plain operations do the same elsewhere.

Directions and offsets come from the family. The biases hold what belongs to a key or a query alone: quadratic terms,
shift, padding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall, method
from favor.attention.packing import Packing
from favor.features import Moments, Parameters, PositiveFeatures
from favor.features.linalg import joined
from favor.kernels import extend, linear_attention
from favor.kernels.dispatch import fuses, is_tracing, is_transformed, kernel_module, pick, plain

_MOST_ASKED = 64  # queries whose attention a kernel sums up
# The largest head_dim for each kind of `favor.kernels.gpu.fits`.
_WIDEST_FIT = {"isotropic": 128, "diagonal": 128, "symmetric": 64, "asymmetric": 64, "centred": 64}


@method(PositiveFeatures)
def attend(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` by positive random features."""
    scale, packing, state = call.scale, call.packing, call.state
    parameters, to_query, to_key, offset = prepared(family, query, key, value, call)
    seen = None if call.key_mask is None else call.key_mask[:, None, :]
    bias = key_bias(family.alpha, key, parameters, scale, seen, packing)
    options: dict[str, Any] = {} if packing is None else packing.for_kernel()
    if call.window:
        own = query_bias(query, parameters, key.shape[1], offset.shape[-1], scale, packing)
        options |= {"window": call.window, "scale": scale, "query_bias": own}
    operands = (query, key, value, to_query, to_key, offset, bias)
    if state is not None and state.memory is not None:
        return extend(*operands, state, **options, kernel=call.kernel)
    if state is not None:
        state.begin(key, value, to_key, bias, call.window, call.kernel)
    return linear_attention(*operands, is_causal=call.is_causal, kernel=call.kernel, **options)


def prepared(
    family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> tuple[Parameters, Tensor, Tensor, Tensor]:
    """Gives the parameters of a call, and directions of queries and keys `[n, Hk, M, d]` and offsets `[n, Hk, M]`."""
    omega = call.directions(family, key, call.scale**0.5)
    made = None
    if call.parameters is None:
        with torch.no_grad():
            kind = _fused_fit(family, query, key, value, call)
            if kind is None:
                parameters = _parameters(family, query, key, omega, call)
            else:
                parameters, made = _fit(kind, family, query, key, omega, call)
    else:
        parameters = _checked("parameters", call.parameters, omega)
    if call.correction is not None:
        parameters = parameters.corrected(_checked("correction", call.correction, omega))
    if parameters.directions is not None:
        omega = parameters.directions * call.scale**0.5
    if made is not None and call.correction is None:
        return parameters, *made
    is_fixed = call.state is None and not any(tensor.requires_grad for tensor in parameters.tensors())
    if is_fixed and _runs_triton(query, key, value, call):  # whose kernel takes directions in the type of the tokens
        to_query, to_key, offset = _rounded(family, key, omega, parameters, call)
    else:
        to_query, to_key, offset = family.directions(omega, parameters, call.scale**0.5)
    if offset.ndim == 2:
        to_query, to_key, offset = to_query[None], to_key[None], offset[None]
    return parameters, to_query, to_key, offset


def _fused_fit(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> str | None:
    """Names the kernel that makes parameters and directions from the tokens; None if there is none that could."""
    if torch.compiler.is_compiling():
        return None
    kind, factorization = vars(type(family)).get("fused_fit") or (None, "auto")
    if kind is None or family.factorization not in ("auto", factorization) or family.num_queries > _MOST_ASKED:
        return None
    if call.is_causal or not call.use_statistics or call.packing is not None or query.shape[-1] > _WIDEST_FIT[kind]:
        return None
    compiles = _runs_triton(query, key, value, call) and kernel_module("triton", "fits").compiles(kind, query.device)
    return kind if compiles else None


def _fit(
    kind: str, family: PositiveFeatures, query: Tensor, key: Tensor, omega: Tensor, call: AttentionCall
) -> tuple[Parameters, tuple[Tensor, Tensor, Tensor]]:
    """Gives parameters and directions for these tokens in two or three launches."""
    query_mask = call.query_padding(query.shape[2], key.shape[2])
    masks, full = (query_mask, call.key_mask), _WIDEST_FIT[kind] == 64
    pieces = kernel_module("triton", "moments").pieces(query, key, *masks, call.scale, family.num_queries, full)
    ridge = (getattr(family, "regularization", 0.0), getattr(family, "floor", 0.0))
    eye = _identity(omega).factor
    return kernel_module("triton", "fits").fit(kind, pieces, omega, eye, key.dtype, call.scale**0.5, *ridge)


def _runs_triton(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> bool:
    return fuses(query) and fuses(key) and pick(call.kernel, query, value) == "triton"


def _rounded(
    family: PositiveFeatures, key: Tensor, omega: Tensor, parameters: Parameters, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives what `family.directions` gives, with directions in the type of the tokens."""
    bare = parameters.directions is None and parameters.log_weights is None and parameters.shift is None
    if parameters.form == "identity" and bare and not parameters.maps:
        rounded = call.directions(family, key, call.scale**0.5, key.dtype)
        return rounded, rounded, _constant(torch.zeros, omega.shape[:-1], omega)
    return kernel_module("triton", "parameters").directions(omega, parameters, call.scale**0.5, key.dtype)


def _constant(make: Callable[..., Tensor], sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """Gives zeros or an eye, which nobody may change: it is kept if nothing traces."""
    if is_tracing(like) or not plain(like):
        return make(*sizes, dtype=like.dtype, device=like.device)
    return _kept(make, sizes, like.dtype, like.device)


@lru_cache(maxsize=64)
def _kept(make: Callable[..., Tensor], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return make(*sizes, dtype=dtype, device=device)


def _identity(omega: Tensor) -> Parameters:
    eye = _constant(torch.eye, omega.shape[-1:], omega)
    return Parameters(eye, eye, eye, maps=False, form="identity")


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
        if type(family).fit_moments is PositiveFeatures.fit_moments:
            return _identity(omega)
        mean, cov = (omega.new_zeros(()).expand(shape) for shape in ((head_dim,), (head_dim, head_dim)))
        return family.fit_moments(Moments(mean, mean, cov, cov))
    if call.is_causal or not call.use_statistics:
        if not torch.compiler.is_compiling():  # a compiler cannot warn
            warnings.warn(
                f"{family.name} in a causal layer without favor.calibrate(model, data) computes FAVOR+: parameters "
                "from this sequence would let its tokens see later ones, and those of FAVOR+ (A = 0, B = I) need no "
                "data.",
                stacklevel=4,
            )
        return _identity(omega)
    if packing is None:
        return family.fit_moments(moments_of(family, query, key, call))
    return family.fit_moments(Moments.cat([moments_of(family, q, k, call) for q, k in packing.split(query, key)]))


def moments_of(family: PositiveFeatures, query: Tensor, key: Tensor, call: AttentionCall) -> Moments:
    """Computes statistics of x and y for each sequence and key head; the query heads of a key head are pooled."""
    groups, query_mask = query.shape[1] // key.shape[1], call.query_padding(query.shape[2], key.shape[2])
    masks = (
        None if query_mask is None else query_mask[:, None].repeat(1, 1, groups),
        None if call.key_mask is None else call.key_mask[:, None],
    )
    return family.moments(query.unflatten(1, (-1, groups)).flatten(2, 3), key, *masks, scale=call.scale)


def key_bias(
    alpha: float, key: Tensor, params: Parameters, scale: float, seen: Tensor | None, packing: Packing | None
) -> Tensor:
    """Gives the quadratic term of the keys `[B, Hk, S]`; -inf, without gradient, if they are not seen `[B, 1, S]`."""
    root, dtype = scale**0.5, params.factor.dtype
    if not params.maps and params.shift is None:
        return Form(None, weight=scale * (alpha - 0.5))(key, seen, dtype)
    biases = []
    for rows, own in _pairs(key, params, packing, "key_lengths"):
        biases.append(Form(own.inverse, own.shift, weight=scale * alpha, root=root)(rows, seen, dtype))
    return joined(biases, 2)


def query_bias(
    query: Tensor, params: Parameters, key_heads: int, num_features: int, scale: float, packing: Packing | None
) -> Tensor:
    """Gives the bias that makes the sum over features an estimate of exp(x . y) itself, `[B, H, L]`.

    It is log det(Sigma)/2 - |G x|^2/2 + x . b - log M, the part of log(f_1 f_2) / M that depends on the query alone,
    which normalised attention can drop as long as every weight is an estimate.
    """
    dtype, groups = params.factor.dtype, query.shape[1] // key_heads
    biases = []
    for rows, own in _pairs(query, params, packing, "query_lengths"):
        matrix, weight = (own.transform.transpose(-1, -2), 0.0) if own.maps else (None, -scale / 2)
        level = -math.log(num_features)
        form = Form(matrix, None, own.shift, weight, scale**0.5, sigma=own, constant=level, groups=groups)
        biases.append(form(rows, None, dtype))
    return joined(biases, 2)


def _pairs(rows: Tensor, params: Parameters, packing: Packing | None, lengths: str) -> list[tuple[Tensor, Parameters]]:
    """Gives rows with the parameters that belong to them: all at once, or one packed sequence after another."""
    if packing is None or params.factor.ndim < 4 or params.factor.shape[0] == 1:
        return [(rows, params)]
    return list(zip(rows.split(getattr(packing, lengths), dim=2), params.split(), strict=True))


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
