"""Small matrices of every head: from parameters to directions and offsets, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.features.parameters import Parameters
from favor.kernels.gpu.common import ceil_divide, load_rows, padded_width, store_rows
from favor.kernels.gpu.tokens import per_head

_FEATURES = 32


@triton.jit
def product(left, right):
    """Multiplies two matrices of float32."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def moved(u, factor, transform, inverse, shift, root):
    """Moves drawn directions `[F, WIDTH]` by matrices; gives those of queries and of keys, and offsets `[F]`."""
    number = tl.sum(u * 0.0, 1)
    if factor is not None:
        drawn = tl.sum(u * u, 1)
        u = product(u, tl.trans(factor))
        number = (drawn - tl.sum(u * u, 1)) / (2 * root * root)
    to_query, to_key = u, u
    if transform is not None:
        to_query, to_key = product(u, transform), product(u, tl.trans(inverse))
    if shift is not None:
        number -= tl.sum(to_key * shift[None, :], 1) / root
    return to_query, to_key, number


@triton.jit
def _load_matrix(base, batch, head, stride_batch, stride_head, width: tl.constexpr, WIDTH: tl.constexpr):
    """Loads the matrix `[WIDTH, WIDTH]` of a head, zeros past `width`; or None."""
    if base is None:
        return None
    else:
        there = base + batch * stride_batch + head * stride_head
        return load_rows(there, width, tl.arange(0, WIDTH) < width, width, WIDTH, WIDTH)


@triton.jit
def _directions(
    omega, factor, transform, inverse, shift, log_weights, to_query, to_key, offset,
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
    omega += batch * omega_batch + head * omega_head + first * width
    u = load_rows(omega, width, real, width, FEATURES, WIDTH)
    b = None
    if shift is not None:
        columns = tl.arange(0, WIDTH)
        b = tl.load(shift + batch * shift_batch + head * shift_head + columns, mask=columns < width, other=0.0)
    asking, answering, number = moved(
        u,
        _load_matrix(factor, batch, head, factor_batch, factor_head, width, WIDTH),
        _load_matrix(transform, batch, head, transform_batch, transform_head, width, WIDTH),
        _load_matrix(inverse, batch, head, inverse_batch, inverse_head, width, WIDTH),
        b,
        root,
    )
    place = (owner * features + first) * width
    store_rows(to_query + place, width, asking, real, width, FEATURES, WIDTH)
    if transform is not None:
        store_rows(to_key + place, width, answering, real, width, FEATURES, WIDTH)
    if log_weights is not None:
        number += tl.load(log_weights + batch * weights_batch + head * weights_head + feature, mask=real, other=0.0)
    tl.store(offset + owner * features + feature, number, mask=real)


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
    offset = omega.new_empty(batch, heads, features)
    blocks = ceil_divide(features, _FEATURES)
    with torch.cuda.device_of(omega):
        _directions[(batch * heads * blocks,)](
            *(tensor for tensor, _ in given),
            *(to_query, to_key, offset, root, heads, features, blocks),
            *(stride for _, strides in given for stride in strides),
            width=width,
            WIDTH=padded_width(width),
            FEATURES=_FEATURES,
            num_warps=8 if width > 32 else 4,  # each group of warps gets 32 columns
        )
    return to_query, to_key, offset
