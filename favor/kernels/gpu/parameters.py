"""Small matrices of every head: from parameters to directions and offsets, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.features.parameters import Parameters
from favor.kernels.gpu.common import ceil_divide, load_rows, padded_width
from favor.kernels.gpu.tokens import per_head

_FEATURES = 32


@triton.jit
def product(left, right):
    """Multiplies two matrices of float32."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _part(base, row, column, rows, row_stride, column_stride, width: tl.constexpr):
    """Loads a part of a matrix in memory; zeros past its `rows` and `width`."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(base + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)


@triton.jit
def _multiply(
    rows, matrix, to, shift, row, features, row_stride, column_stride, width: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes rows in memory times a matrix there, or None; gives their squares, and their products with `shift`.

    All is done in parts: registers hold no matrix of 128 columns.
    """
    PART: tl.constexpr = min(WIDTH, 64)
    squares, products = tl.zeros(row.shape, tl.float32), tl.zeros(row.shape, tl.float32)
    for begin in range(0, WIDTH, PART):
        column = begin + tl.arange(0, PART)
        if matrix is None:
            u = _part(rows, row, column, features, width, 1, width)
        else:
            u = tl.zeros([row.shape[0], PART], tl.float32)
            for first in range(0, WIDTH, PART):
                inner = first + tl.arange(0, PART)
                drawn = _part(rows, row, inner, features, width, 1, width)
                part = _part(matrix, inner, column, width, row_stride, column_stride, width)
                u = tl.dot(drawn, part, acc=u, input_precision="tf32x3")
        there, inside = row[:, None] * width + column[None, :], (row < features)[:, None] & (column < width)[None, :]
        tl.store(to + there, u.to(to.dtype.element_ty), mask=inside)
        squares += tl.sum(u * u, 1)
        if shift is not None:
            products += tl.sum(u * tl.load(shift + column, mask=column < width, other=0.0)[None, :], 1)
    return squares, products


@triton.jit
def move(
    omega, factor, transform, inverse, shift, moved, to_query, to_key, first, features, root,
    width: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Moves drawn directions of a head from `first` on by its matrices, through `moved`; gives their offsets."""
    row = first + tl.arange(0, FEATURES)
    if transform is None:
        squares, products = _multiply(omega, factor, to_query, shift, row, features, 1, width, width, WIDTH)
    else:
        squares, _ = _multiply(omega, factor, moved, None, row, features, 1, width, width, WIDTH)
        tl.debug_barrier()
        _multiply(moved, transform, to_query, None, row, features, width, 1, width, WIDTH)
        _, products = _multiply(moved, inverse, to_key, shift, row, features, 1, width, width, WIDTH)
    number = -products / root
    if factor is not None:
        u = load_rows(omega + first * width, width, row < features, width, FEATURES, WIDTH)
        number += (tl.sum(u * u, 1) - squares) / (2 * root * root)
    return number


@triton.jit
def _directions(
    omega, factor, transform, inverse, shift, log_weights, moved, to_query, to_key, offset,
    root, heads, features, blocks,
    omega_batch, omega_head, factor_batch, factor_head, transform_batch, transform_head, inverse_batch, inverse_head,
    shift_batch, shift_head, weights_batch, weights_head,
    width: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Computes the directions of some features of one head."""
    program = tl.program_id(0).to(tl.int64)
    first, owner = program % blocks * FEATURES, program // blocks
    head, batch = owner % heads, owner // heads
    feature = first + tl.arange(0, FEATURES)
    real = feature < features
    place = owner * features
    number = move(
        omega + batch * omega_batch + head * omega_head,
        factor + batch * factor_batch + head * factor_head if factor is not None else None,
        transform + batch * transform_batch + head * transform_head if transform is not None else None,
        inverse + batch * inverse_batch + head * inverse_head if inverse is not None else None,
        shift + batch * shift_batch + head * shift_head if shift is not None else None,
        moved + place * width, to_query + place * width, to_key + place * width, first, features, root,
        width, WIDTH, FEATURES,
    )  # fmt: skip
    if log_weights is not None:
        number += tl.load(log_weights + batch * weights_batch + head * weights_head + feature, mask=real, other=0.0)
    tl.store(offset + place + feature, number, mask=real)


def directions(omega: Tensor, params: Parameters, root: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what `PositiveFeatures.directions` does.

    Args:
        omega: `[Hk, M, d]` float32, times `root`; d at most 128.
        params: in float32, `[..., d, d]`.
        root: root of the scale of the logits.
        dtype: type of the directions.

    Returns:
        query directions and key directions `[n, Hk, M, d]` (the same tensor if nothing is mapped) and offsets
        `[n, Hk, M]` float32; n is the size of the batch, or 1 if all share their parameters.
    """
    heads, features, width = omega.shape
    is_identity, shapes = params.form == "identity", [part.shape for part in (params.factor, params.transform)]
    batch = max((shape[0] for shape in shapes if len(shape) == 4), default=1)
    mapped = (params.transform, params.inverse) if params.maps else (None, None)
    matrices = [None if is_identity else params.factor, *mapped]
    given = [
        per_head(omega, batch, heads, features, width),
        *(per_head(matrix, batch, heads, width, width) for matrix in matrices),
        per_head(params.shift, batch, heads, width),
        per_head(params.log_weights, batch, heads, features),
    ]
    to_query = omega.new_empty(batch, heads, features, width, dtype=dtype)
    to_key = torch.empty_like(to_query) if params.maps else to_query
    moved = torch.empty_like(to_query, dtype=torch.float32) if params.maps else to_query
    offset = omega.new_empty(batch, heads, features)
    blocks = ceil_divide(features, _FEATURES)
    with torch.cuda.device_of(omega):
        _directions[(batch * heads * blocks,)](
            *(tensor for tensor, _ in given),
            *(moved, to_query, to_key, offset, root, heads, features, blocks),
            *(stride for _, strides in given for stride in strides),
            width=width,
            WIDTH=padded_width(width),
            FEATURES=_FEATURES,
            num_warps=8 if width > 32 else 4,  # each group of warps gets 32 columns
        )
    return to_query, to_key, offset
