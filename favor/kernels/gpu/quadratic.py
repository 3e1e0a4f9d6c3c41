"""Quadratic forms of tokens in one pass over them: the part of log-features that belongs to a token alone.

    form(r) = -|A'(r - c)|^2 / 2 + r.b + w |r|^2,   its gradient -A A'(r - c) + b + 2 w r

Matrices A `[d, d]` and vectors c and b belong to a head; each of the three terms may be left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import corner
from favor.kernels.gpu.common import ceil_divide, load_rows, padded_width, store_rows

_TOKENS = 64


@triton.jit
def _load_head(base, batch, head, stride_batch, stride_head, columns, width: tl.constexpr):
    """Vector `[WIDTH]` of a head, zeros past `width`."""
    return tl.load(base + batch * stride_batch + head * stride_head + columns, mask=columns < width, other=0.0)


@triton.jit(do_not_specialize=["length"])
def _form(
    rows,
    matrix,
    shift,
    linear,
    hidden,
    grad,
    out,
    weight,
    length,
    heads,
    rows_batch,
    rows_head,
    rows_row,
    matrix_batch,
    matrix_head,
    shift_batch,
    shift_head,
    linear_batch,
    linear_head,
    hidden_batch,
    out_batch,
    out_head,
    out_row,
    width: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The form of a block of tokens of one head; its gradient times `grad` if that is given."""
    blocks = tl.cdiv(length, TOKENS)
    program = tl.program_id(0)
    first = (program % blocks).to(tl.int64) * TOKENS
    head = (program // blocks).to(tl.int64) % heads
    batch = (program // blocks).to(tl.int64) // heads
    index = first + tl.arange(0, TOKENS)
    inside = index < length
    shown = inside
    if hidden is not None:
        shown = inside & (tl.load(hidden + batch * hidden_batch + index, mask=inside, other=1) == 0)
    columns = tl.arange(0, WIDTH)
    # Hidden tokens may hold anything, NaN included: they are not even read.
    r = load_rows(
        corner(rows, batch, head, first, rows_batch, rows_head, rows_row), rows_row, shown, width, TOKENS, WIDTH
    )
    r = r.to(tl.float32)
    if matrix is not None:
        moved = r
        if shift is not None:
            moved = r - _load_head(shift, batch, head, shift_batch, shift_head, columns, width)[None, :]
        there = matrix + batch * matrix_batch + head * matrix_head
        a = load_rows(there, width, columns < width, width, WIDTH, WIDTH)
        moved = tl.dot(moved, a, input_precision="tf32x3")
    if linear is not None:
        tilt = _load_head(linear, batch, head, linear_batch, linear_head, columns, width)
    place = (batch * heads + head) * length + index
    if grad is None:
        value = weight * tl.sum(r * r, 1)
        if matrix is not None:
            value -= tl.sum(moved * moved, 1) / 2
        if linear is not None:
            value += tl.sum(r * tilt[None, :], 1)
        tl.store(out + place, tl.where(shown, value, float("-inf")), mask=inside)
    else:
        slope = 2 * weight * r
        if matrix is not None:
            slope -= moved
        if linear is not None:
            slope += tilt[None, :]
        g = tl.load(grad + place, mask=shown, other=0.0)
        slope = tl.where(shown[:, None], slope * g[:, None], 0.0)
        out = corner(out, batch, head, first, out_batch, out_head, out_row)
        store_rows(out, out_row, slope, inside, width, TOKENS, WIDTH)


def form(
    rows: Tensor,
    matrix: Tensor | None,
    shift: Tensor | None,
    linear: Tensor | None,
    weight: float,
    hidden: Tensor | None,
    grad: Tensor | None = None,
) -> Tensor:
    """The form of every token, or its gradient.

    Args:
        rows: `[B, H, S, d]`, float32 or half precision, d at most 128; the last stride is 1.
        matrix: A `[..., d, d]`, or A A' for the gradient; float32, broadcast over batch and heads.
        shift, linear: c and b, `[..., d]`.
        weight: w.
        hidden: boolean `[B, 1, S]`, True for tokens that are not read.
        grad: gradient of the form `[B, H, S]`, to get that of the rows.

    Returns:
        `[B, H, S]` float32, -inf where hidden; or like `rows`, zeros where hidden.
    """
    batch, heads, length, width = rows.shape

    def per_head(tensor: Tensor | None, *sizes: int) -> tuple[Tensor | None, tuple[int, ...]]:
        if tensor is None:
            return None, (0, 0)
        wide = tensor.contiguous().expand(batch, heads, *sizes)
        return wide, wide.stride()[:2]

    (matrix, matrix_strides), (shift, shift_strides), (linear, linear_strides) = (
        per_head(matrix, width, width),
        per_head(shift, width),
        per_head(linear, width),
    )
    if hidden is not None:
        hidden = hidden.contiguous()
    if grad is None:
        out = torch.empty(batch, heads, length, dtype=torch.float32, device=rows.device)
    else:
        out, grad = torch.empty_like(rows), grad.contiguous()
        if out.stride(-1) != 1:  # like rows that overlap
            out = rows.new_empty(rows.shape)
    if not out.numel():
        return out
    with torch.cuda.device_of(rows):
        _form[(batch * heads * ceil_divide(length, _TOKENS),)](
            rows,
            matrix,
            shift,
            linear,
            hidden,
            grad,
            out,
            weight,
            length,
            heads,
            *rows.stride()[:3],
            *matrix_strides,
            *shift_strides,
            *linear_strides,
            length if hidden is not None and hidden.shape[0] > 1 else 0,
            *((0, 0, 0) if grad is None else out.stride()[:3]),
            width=width,
            WIDTH=padded_width(width),
            TOKENS=_TOKENS,
        )
    return out
