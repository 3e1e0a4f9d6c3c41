"""Parameters of positive features from moments, with their directions: everything small of a head in one program.

Each kernel adds up the pieces of the moments, computes what `fit_moments` of a family computes without eigenvalues, and
goes on to the directions. Columns past the width are zeros in matrices, and apart from all others in their inverses.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.features.parameters import Parameters
from favor.kernels.gpu.common import load_rows, padded_width, store_rows
from favor.kernels.gpu.moments import Pieces, joined
from favor.kernels.gpu.parameters import move, product
from favor.kernels.gpu.tokens import roots

_FEATURES = 32
_EPS = tl.constexpr(1.1920928955078125e-07)  # rounding of float32
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _eye(width: tl.constexpr, WIDTH: tl.constexpr):
    """Gives the identity, zeros past `width`."""
    row = tl.arange(0, WIDTH)
    return tl.where((row[:, None] == row[None, :]) & (row < width)[:, None], 1.0, 0.0)


@triton.jit
def _trace(matrix, eye):
    return tl.sum(tl.where(eye > 0.0, matrix, 0.0))


@triton.jit
def _second(mean, cov):
    """Gives the second moment."""
    return cov + mean[:, None] * mean[None, :]


@triton.jit
def _optimal(phi):
    """Computes `favor.features.positive.optimal_sigma`."""
    phi = tl.where(phi < 0.0, 0.0, phi)
    return (1.0 + (2.0 * phi + 1.0 + tl.sqrt((2.0 * phi + 1.0) * (2.0 * phi + 1.0) + 8.0 * phi)) / 2.0) / 2.0


@triton.jit
def _cholesky(matrix, width: tl.constexpr, WIDTH: tl.constexpr):
    """Computes the lower Cholesky factor and its inverse, which is the identity past `width`."""
    index = tl.arange(0, WIDTH)
    row, column = index[:, None], index[None, :]
    factor = tl.zeros([WIDTH, WIDTH], tl.float32)
    inverse = tl.where(row == column, 1.0, 0.0)
    for step in range(width):
        line = tl.sum(tl.where(column == step, matrix, 0.0), 1)
        pivot = tl.sqrt(tl.sum(tl.where(index == step, line, 0.0)))
        line = tl.where(index >= step, line / pivot, 0.0)
        factor = tl.where(column == step, line[:, None], factor)
        matrix -= line[:, None] * line[None, :]
        solved = tl.sum(tl.where(row == step, inverse, 0.0), 0) / pivot
        below = tl.where(index > step, line, 0.0)
        inverse = tl.where(row == step, solved[None, :], inverse) - below[:, None] * solved[None, :]
    return factor, inverse


@triton.jit
def _store(base, matrix, width: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(base, width, matrix, tl.arange(0, WIDTH) < width, width, WIDTH, WIDTH)


@triton.jit
def isotropic(
    weight, mean, scatter, omega, factor, transform, inverse, shift, moved, to_query, to_key, offset,
    root, regularization, floor, queries, keys, first_key, heads, features,
    width: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, FULL: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """Fits GERF, or with MAPS SADERF: a multiple of the identity, and a diagonal map."""
    owner = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mean_x, x = joined(weight, mean, scatter, owner * queries, queries, root, width, WIDTH, FULL)
    mean_y, y = joined(weight, mean, scatter, first_key + owner * keys, keys, root, width, WIDTH, FULL)
    x += mean_x * mean_x
    y += mean_y * mean_y
    psi = tl.full([WIDTH], 1.0, tl.float32)
    if MAPS:
        ridge = regularization * (tl.sum(x) + tl.sum(y)) / (2 * width) + floor
        x, y = tl.where(column < width, x + ridge, 0.0), tl.where(column < width, y + ridge, 0.0)
        psi = tl.where(column < width, tl.sqrt(tl.sqrt(y / tl.where(column < width, x, 1.0))), 1.0)
    phi = tl.sum(psi * psi * x) + tl.sum(y / (psi * psi)) + 2 * tl.sum(mean_x * mean_y)
    size = tl.sqrt(_optimal(phi / width))
    row = tl.arange(0, 16)
    for first in range(0, width, 16):
        place = (owner * width + first) * width
        one = tl.where((first + row)[:, None] == column[None, :], 1.0, 0.0)
        real = first + row < width
        store_rows(factor + place, width, one * size, real, width, 16, WIDTH)
        if MAPS:
            store_rows(transform + place, width, one * psi[None, :], real, width, 16, WIDTH)
            store_rows(inverse + place, width, one / psi[None, :], real, width, 16, WIDTH)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        real = feature < features
        u = load_rows(omega + (owner % heads * features + first) * width, width, real, width, FEATURES, WIDTH)
        number = (1.0 - size * size) * tl.sum(u * u, 1) / (2 * root * root)
        tl.store(offset + owner * features + feature, number, mask=real)
        place = (owner * features + first) * width
        store_rows(to_query + place, width, u * (size * psi)[None, :], real, width, FEATURES, WIDTH)
        if MAPS:
            store_rows(to_key + place, width, u * (size / psi)[None, :], real, width, FEATURES, WIDTH)


@triton.jit
def _symmetric(second, eye, WIDTH: tl.constexpr):
    """Computes the factor of SDERF from the second moment of pairs."""
    second += 2 * _EPS * _trace(second, eye) * eye
    low, _ = roots(2 * second + 0.1715728752538097 * eye, 24, WIDTH)  # 3 - 8^(1/2)
    high, _ = roots(2 * second + 5.82842712474619 * eye, 24, WIDTH)
    both = product(low, high)
    l, _ = roots(0.75 * eye + second / 2 + (both + tl.trans(both)) / 8, 24, WIDTH)
    return l


@triton.jit
def _asymmetric(x, y, cross, eye, width: tl.constexpr, WIDTH: tl.constexpr):
    """Computes factor, map and its inverse of ADERF from second moments."""
    half, inverse_half = roots(x, 24, WIDTH)
    middle = product(product(half, y), half)
    half, _ = roots(middle + _EPS * _trace(middle, eye) * eye, 24, WIDTH)
    middle = product(product(inverse_half, half), inverse_half)
    phi = 2 * (tl.sum(middle * x) + cross) / width  # the trace of a product with a symmetric matrix
    g, g_inverse = roots(middle, 24, WIDTH)
    return tl.sqrt(_optimal(phi)) * eye, g, g_inverse


@triton.jit
def _centred(x, y, eye, width: tl.constexpr, WIDTH: tl.constexpr):
    """Computes factor, map and its inverse of cDERF and wDERF from covariances."""
    lower, lower_inverse = _cholesky(x, width, WIDTH)
    middle = product(product(tl.trans(lower), y), lower)
    size = _trace(middle, eye)
    least = 1e-5 * tl.sqrt(tl.where(size < _TINY, _TINY, size))
    middle, _ = roots(middle, 14, WIDTH)
    upper, upper_inverse = _cholesky(middle + least * eye, width, WIDTH)
    g = product(tl.trans(upper), lower_inverse)
    g_inverse = product(lower, tl.trans(upper_inverse))
    second = product(product(g, x), tl.trans(g)) + product(product(tl.trans(g_inverse), y), g_inverse)
    l, _ = _cholesky(second + eye, width, WIDTH)
    return l, g, g_inverse


@triton.jit
def whole(
    weight, mean, scatter, omega, factor, transform, inverse, shift, moved, to_query, to_key, offset,
    root, regularization, floor, queries, keys, first_key, heads, features,
    width: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, FULL: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """Fits SDERF, with MAPS ADERF, both in the form "newton_schulz"; with a shift cDERF and wDERF, form "cholesky"."""
    owner = tl.program_id(0).to(tl.int64)
    mean_x, x = joined(weight, mean, scatter, owner * queries, queries, root, width, WIDTH, FULL)
    mean_y, y = joined(weight, mean, scatter, first_key + owner * keys, keys, root, width, WIDTH, FULL)
    eye = _eye(width, WIDTH)
    factor += owner * width * width
    if MAPS:
        transform += owner * width * width
        inverse += owner * width * width
        if shift is None:
            x, y = _second(mean_x, x), _second(mean_y, y)
        ridge = (regularization * (_trace(x, eye) + _trace(y, eye)) / (2 * width) + floor) * eye
        if shift is None:
            l, g, g_inverse = _asymmetric(x + ridge, y + ridge, tl.sum(mean_x * mean_y), eye, width, WIDTH)
        else:
            l, g, g_inverse = _centred(x + ridge, y + ridge, eye, width, WIDTH)
            shift += owner * width
            b = mean_y + tl.sum(g * tl.sum(g * mean_x[None, :], 1)[:, None], 0)
            tl.store(shift + tl.arange(0, WIDTH), b, mask=tl.arange(0, WIDTH) < width)
        _store(transform, g, width, WIDTH)
        _store(inverse, g_inverse, width, WIDTH)
    else:
        l = _symmetric(_second(mean_x + mean_y, x + y), eye, WIDTH)
    _store(factor, l, width, WIDTH)
    tl.debug_barrier()  # all read from now on what was written
    omega += owner % heads * features * width
    moved += owner * features * width
    to_query += owner * features * width
    to_key += owner * features * width
    for first in range(0, features, FEATURES):
        number = move(
            omega, factor, transform if MAPS else None, inverse if MAPS else None, shift, moved, to_query, to_key,
            first, features, root, width, WIDTH, FEATURES,
        )  # fmt: skip
        feature = first + tl.arange(0, FEATURES)
        tl.store(offset + owner * features + feature, number, mask=feature < features)


# Of each kind: the kernel, whether there is a map, a shift, and what is known of the factor.
KINDS: dict[str, tuple[Any, bool, bool, str]] = {
    "isotropic": (isotropic, False, False, "triangular"),
    "diagonal": (isotropic, True, False, "triangular"),
    "symmetric": (whole, False, False, "full"),
    "asymmetric": (whole, True, False, "triangular"),
    "centred": (whole, True, True, "triangular"),
}


def compiles(kind: str, device: torch.device | int) -> bool:
    """Tells whether Triton compiles a kind for a device or a capability: 3.7 fails for the products of Blackwell."""
    if kind in ("isotropic", "diagonal"):
        return True
    if isinstance(device, torch.device):
        return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 10
    return device < 100


def fit(
    kind: str, pieces: Pieces, omega: Tensor, eye: Tensor, dtype: torch.dtype, root: float, *ridge: float
) -> tuple[Parameters, tuple[Tensor, Tensor, Tensor]]:
    """Fits a family, in one launch.

    Args:
        kind: a key of `KINDS`.
        pieces: moments of the tokens.
        omega: `[Hk, M, d]` float32, contiguous, times `root`; d at most 128 for "isotropic" and "diagonal", else 64.
        eye: the identity `[d, d]`, given back where there is no map.
        dtype: type of the directions.
        root: root of the scale of the logits.
        ridge: regularization and floor.

    Returns:
        parameters `[B, Hk, ...]` float32; and query directions, key directions (the same if there is no map) and
        offsets `[B, Hk, M]`.
    """
    kernel, maps, shifts, form = KINDS[kind]
    heads, features, width = omega.shape
    batch = (pieces.weight.shape[0] - pieces.first_key) // (heads * pieces.keys)
    factor = omega.new_empty(batch, heads, width, width)
    transform, inverse = (torch.empty_like(factor) if maps else eye for _ in range(2))
    shift = omega.new_empty(batch, heads, width) if shifts else None
    to_query = omega.new_empty(batch, heads, features, width, dtype=dtype)
    to_key = torch.empty_like(to_query) if maps else to_query
    moved = torch.empty_like(to_query, dtype=torch.float32) if maps else to_query
    offset = omega.new_empty(batch, heads, features)
    with torch.cuda.device_of(omega):
        kernel[(batch * heads,)](
            *pieces[:3],
            *(omega, factor, transform, inverse, shift, moved, to_query, to_key, offset, root, *ridge),
            *(pieces.queries, pieces.keys, pieces.first_key, heads, features),
            width=width,
            WIDTH=padded_width(width),
            FEATURES=_FEATURES,
            FULL=pieces.scatter.ndim == 3,
            MAPS=maps,
            num_stages=1,  # loads ahead would take registers
        )
    params = Parameters(transform, inverse, factor, maps=maps, shift=shift, form=form)  # type: ignore[arg-type]
    return params, (to_query, to_key, offset)
