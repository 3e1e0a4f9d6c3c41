"""Attention by positive random features: from queries, keys and a family to the operands of the kernels.

Directions and offsets come from the family. The biases hold what belongs to a key or a query alone: quadratic terms,
shift, padding.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from favor.attention.forms import Form
from favor.attention.functional import AttentionCall, method
from favor.attention.packing import Packing
from favor.features import Moments, Parameters, PositiveFeatures
from favor.features.linalg import joined
from favor.kernels import extend, linear_attention
from favor.kernels.dispatch import fuses, is_tracing, kernel_module, pick, plain

_MOST_ASKED = 64  # queries whose attention a kernel sums up
# The largest head_dim for each kind of `favor.kernels.gpu.fits`.
_WIDEST_FIT = {"isotropic": 128, "diagonal": 128, "symmetric": 64, "asymmetric": 64, "centred": 64}


@method(PositiveFeatures)
def attend(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` by positive random features."""
    scale, packing, state = call.scale, call.packing, call.state
    omega = call.directions(family, key, scale**0.5)
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
        omega = parameters.directions * scale**0.5
    if made is not None and call.correction is None:
        query_directions, key_directions, offset = made
    elif state is None and _rounds(query, key, value, parameters, call):
        query_directions, key_directions, offset = _rounded(family, key, omega, parameters, call)
    else:
        query_directions, key_directions, offset = family.directions(omega, parameters, scale**0.5)
    if offset.ndim == 2:
        query_directions, key_directions, offset = query_directions[None], key_directions[None], offset[None]
    seen = None if call.key_mask is None else call.key_mask[:, None, :]
    bias = key_bias(family.alpha, key, parameters, scale, seen, packing)
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


def _fused_fit(family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> str | None:
    """Names the kernel that makes parameters and directions from the tokens; None if there is none that could."""
    kind, factorization = vars(type(family)).get("fused_fit") or (None, "auto")
    if kind is None or family.factorization not in ("auto", factorization) or family.num_queries > _MOST_ASKED:
        return None
    if call.is_causal or not call.use_statistics or call.packing is not None or query.shape[-1] > _WIDEST_FIT[kind]:
        return None
    return kind if fuses(query) and fuses(key) and pick(call.kernel, query, value) == "triton" else None


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


def _rounds(query: Tensor, key: Tensor, value: Tensor, parameters: Parameters, call: AttentionCall) -> bool:
    """Tells whether the kernel takes directions in the type of the tokens, which one launch can then write."""
    if any(tensor.requires_grad for tensor in parameters.tensors()):
        return False
    return fuses(key) and fuses(query) and pick(call.kernel, query, value) == "triton"


def _rounded(
    family: PositiveFeatures, key: Tensor, omega: Tensor, parameters: Parameters, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives what `family.directions` gives, with directions in the type of the tokens."""
    bare = parameters.directions is None and parameters.log_weights is None and parameters.shift is None
    if parameters.form == "identity" and bare and not parameters.maps:
        rounded = call.directions(family, key, call.scale**0.5, key.dtype)
        return rounded, rounded, _kept("zeros", omega.shape[:-1], omega.dtype, omega.device)
    return kernel_module("triton", "parameters").directions(omega, parameters, call.scale**0.5, key.dtype)


@lru_cache(maxsize=64)
def _kept(name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes a constant once; nobody may change it."""
    with torch.inference_mode(False), torch.no_grad():
        constant: Tensor = getattr(torch, name)(*sizes, dtype=dtype, device=device)
        return constant


def _identity(omega: Tensor) -> Parameters:
    """Gives G = L = I, without a launch."""
    head_dim = omega.shape[-1]
    if is_tracing(omega) or not plain(omega):
        return Parameters.identity(head_dim, dtype=omega.dtype, device=omega.device)
    eye = _kept("eye", (head_dim,), omega.dtype, omega.device)
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
        warnings.warn(
            f"{family.name} in a causal layer without favor.calibrate(model, data) computes FAVOR+: parameters from "
            "this sequence would let its tokens see later ones, and those of FAVOR+ (A = 0, B = I) need no data.",
            stacklevel=4,
        )
        return _identity(omega)
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
