"""Passes over tokens in front of the attention: quadratic forms, moments, and the roots of small matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    ceil_divide,
    load_rows,
    load_tile,
    padded_width,
    processors,
    split_count,
    store_rows,
    store_tile,
    strides,
)


def _tile(width: int, tokens: int) -> dict[str, int]:
    """Gives the rows of a program, with their width: `tokens`, or for wide rows so few that registers hold a matrix."""
    padded = padded_width(width)
    return {"width": width, "WIDTH": padded, "TOKENS": tokens if padded <= 64 else 16, "num_warps": 8}


@triton.jit
def _load_head(base, batch, head, stride_batch, stride_head, columns, width: tl.constexpr):
    """Loads a vector `[WIDTH]` of a head, zeros past `width`."""
    return tl.load(base + batch * stride_batch + head * stride_head + columns, mask=columns < width, other=0.0)


@triton.jit(do_not_specialize=["length"])
def _form(
    rows, matrix, shift, linear, hidden, grad, out,
    weight, length, heads,
    rows_batch, rows_head, rows_row, matrix_batch, matrix_head, shift_batch, shift_head, linear_batch, linear_head,
    hidden_batch, out_batch, out_head, out_row,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes the form of a block of tokens of one head, or its gradient times `grad` if that is given."""
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
    r = load_tile(rows, batch, head, first, rows_batch, rows_head, rows_row, shown, width, WIDTH).to(tl.float32)
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
        store_tile(out, batch, head, first, out_batch, out_head, out_row, slope, inside, width, WIDTH)


def form(
    rows: Tensor,
    matrix: Tensor | None,
    shift: Tensor | None,
    linear: Tensor | None,
    weight: float,
    hidden: Tensor | None,
    grad: Tensor | None = None,
) -> Tensor:
    """Computes a quadratic form of every token (the part of log-features of the token alone), or its gradient.

    form(r) = -|A'(r - c)|^2 / 2 + r.b + w |r|^2,   its gradient -A A'(r - c) + b + 2 w r

    Matrices A `[d, d]` and vectors c and b belong to a head; each of the three terms may be left out.

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
        if out.stride(-1) != 1:  # if rows overlap
            out = rows.new_empty(rows.shape)
    if not out.numel():
        return out
    with torch.cuda.device_of(rows):
        tile = _tile(width, 64)
        _form[(batch * heads * ceil_divide(length, tile["TOKENS"]),)](
            *(rows, matrix, shift, linear, hidden, grad, out, weight, length, heads),
            *(*strides(rows), *matrix_strides, *shift_strides, *linear_strides),
            length if hidden is not None and hidden.shape[0] > 1 else 0,
            *((0, 0, 0) if grad is None else strides(out)),
            **tile,
        )
    return out


@triton.jit(do_not_specialize=["length", "splits"])
def _sums(
    rows, weights, pivot, first_sum, second_sum,
    length, heads, splits,
    rows_batch, rows_head, rows_row,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sums w (r - p) and w (r - p)(r - p)' over a piece of the tokens of one head."""
    program = tl.program_id(0).to(tl.int64)
    head, batch = program // splits % heads, program // splits // heads
    columns = tl.arange(0, WIDTH)
    owner = batch * heads + head
    p = tl.load(pivot + owner * width + columns, mask=columns < width, other=0.0)
    first = tl.zeros([WIDTH], tl.float32)
    second = tl.zeros([WIDTH, WIDTH], tl.float32)
    size = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    start = (program % splits).to(tl.int32) * size
    stop = tl.minimum(start + size, length)
    for begin in range(start, stop, TOKENS):
        index = begin + tl.arange(0, TOKENS)
        shown = index < stop
        if weights is not None:
            w = tl.load(weights + owner * length + index, mask=shown, other=0.0)
            # Tokens that do not count may hold anything, NaN included: they are not even read.
            shown = w > 0
        row = tl.cast(begin, tl.int64)
        r = load_tile(rows, batch, head, row, rows_batch, rows_head, rows_row, shown, width, WIDTH).to(tl.float32)
        r = tl.where(shown[:, None], r - p[None, :], 0.0)
        weighted = r
        if weights is not None:
            weighted = r * w[:, None]
        first += tl.sum(weighted, 0)
        second = tl.dot(tl.trans(weighted), r, acc=second, input_precision="tf32x3")
    tl.store(first_sum + program * width + columns, first, mask=columns < width)
    store_rows(second_sum + program * width * width, width, second, columns < width, width, WIDTH, WIDTH)


def moments(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes the weighted mean and covariance of the tokens of each head, in one pass over them.

    Sums are those of differences from a pivot, a token that counts: as differences of plain second moments they
    would lose their digits where the mean is large.

    Args:
        rows: `[B, H, L, d]`, float32 or half precision, d at most 128, L at least 1; the last stride is 1.
        weights: `[B, H, L]`, not negative; 0 leaves a token out, whatever it holds. None weighs all alike.

    Returns:
        mean `[B, H, d]` and covariance `[B, H, d, d]`, float32; zeros where all weights are zero.
    """
    batch, heads, length, width = rows.shape
    if weights is None:
        pivot, share = rows[:, :, 0].float().contiguous(), torch.full((), 1.0 / length, device=rows.device)
    else:
        weights = weights.float().contiguous()
        total = weights.sum(-1, keepdim=True)
        seen = total > 0
        share = (1.0 / total).masked_fill_(~seen, 0.0)
        place = weights.argmax(-1)[..., None, None].expand(batch, heads, 1, width)
        pivot = torch.where(seen, rows.gather(2, place).squeeze(2).float(), 0.0)
    splits = split_count(batch * heads, length, 2 * processors(rows.device))
    first = pivot.new_empty(batch, heads, splits, width)
    second = pivot.new_empty(batch, heads, splits, width, width)
    with torch.cuda.device_of(rows):
        arguments = (rows, weights, pivot, first, second, length, heads, splits, *strides(rows))
        _sums[(batch * heads * splits,)](*arguments, **_tile(width, 32))
    moved = first.sum(2) * share
    return pivot + moved, second.sum(2) * share.unsqueeze(-1) - moved.unsqueeze(-1) * moved.unsqueeze(-2)


@triton.jit
def _newton_schulz(matrix, root, inverse, iterations, width: tl.constexpr, WIDTH: tl.constexpr):
    """Computes both roots of one matrix. Columns past `width` are zeros in the root, and apart in its inverse."""
    place = tl.program_id(0).to(tl.int64) * width * width
    row = tl.arange(0, WIDTH)
    real = row < width
    scaled = load_rows(matrix + place, width, real, width, WIDTH, WIDTH)
    size = tl.max(tl.sum(tl.abs(scaled), 1), 0)
    size = tl.where(size < 1.1754943508222875e-38, 1.1754943508222875e-38, size)  # not NaN
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    y, z = scaled / size, eye
    for _ in range(iterations):
        step = 1.5 * eye - 0.5 * tl.dot(z, y, input_precision="tf32x3")
        y, z = tl.dot(y, step, input_precision="tf32x3"), tl.dot(step, z, input_precision="tf32x3")
    y, z = (y + tl.trans(y)) * (tl.sqrt(size) / 2), (z + tl.trans(z)) / (2 * tl.sqrt(size))
    store_rows(root + place, width, y, real, width, WIDTH, WIDTH)
    store_rows(inverse + place, width, z, real, width, WIDTH, WIDTH)


def newton_schulz(matrix: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Gives root and inverse root of small symmetric matrices in one launch, see `favor.features.linalg.newton_schulz`.

    Matrices are `[..., d, d]`, float32, d at most 64; one that is not finite gives NaN.
    """
    matrix = matrix.contiguous()
    root, inverse = torch.empty_like(matrix), torch.empty_like(matrix)
    width = matrix.shape[-1]
    with torch.cuda.device_of(matrix):
        count = matrix.shape[:-2].numel()
        _newton_schulz[(count,)](matrix, root, inverse, iterations, width=width, WIDTH=padded_width(width))
    return root, inverse
