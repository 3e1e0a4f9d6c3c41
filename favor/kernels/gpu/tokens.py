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

_TOKENS = 64


def _tile(width: int, tokens: int) -> dict[str, int]:
    """Gives the rows of a program, with their width: `tokens`, or for wide rows so few that registers hold a matrix."""
    padded = padded_width(width)
    return {"width": width, "WIDTH": padded, "TOKENS": tokens if padded <= 64 else 16, "num_warps": 8}


@triton.jit
def _load_head(base, batch, head, stride_batch, stride_head, columns, width: tl.constexpr):
    """Loads a vector `[WIDTH]` of a head, zeros past `width`."""
    return tl.load(base + batch * stride_batch + head * stride_head + columns, mask=columns < width, other=0.0)


@triton.jit
def _locate(length, heads, TOKENS: tl.constexpr):
    """Gives batch, head and first token of a program; its tokens `[TOKENS]`, and which of them exist."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(length, TOKENS)
    first, owner = program % blocks * TOKENS, program // blocks
    index = first + tl.arange(0, TOKENS)
    return owner // heads, owner % heads, first, index, index < length


@triton.jit(do_not_specialize=["length"])
def _form(
    rows, matrix, shift, linear, level, seen, grad, out,
    root, weight, constant, length, heads, group,
    rows_batch, rows_head, rows_row, matrix_batch, matrix_head, shift_batch, shift_head, linear_batch, linear_head,
    level_batch, level_head, seen_batch, out_batch, out_head, out_row,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, FLIP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Computes the form of a block of tokens of one head, or its gradient times `grad` if that is given."""
    batch, head, first, index, inside = _locate(length, heads, TOKENS)
    owner = head // group
    shown = inside
    if seen is not None:
        shown = inside & (tl.load(seen + batch * seen_batch + index, mask=inside, other=0) != 0)
    columns = tl.arange(0, WIDTH)
    # Hidden tokens may hold anything, NaN included: they are not even read.
    r = load_tile(rows, batch, head, first, rows_batch, rows_head, rows_row, shown, width, WIDTH).to(tl.float32)
    if linear is not None:
        tilt = _load_head(linear, batch, owner, linear_batch, linear_head, columns, width) * root
    value = weight * tl.sum(r * r, 1) + constant
    if linear is not None:
        value += tl.sum(r * tilt[None, :], 1)
    if matrix is not None:
        moved = r * root
        if shift is not None:
            moved -= _load_head(shift, batch, owner, shift_batch, shift_head, columns, width)[None, :]
        there = matrix + batch * matrix_batch + owner * matrix_head
        a = load_rows(there, width, columns < width, width, WIDTH, WIDTH)
        if FLIP:
            a = tl.trans(a)
        moved = tl.dot(moved, a, input_precision="tf32x3")
    place = (batch * heads + head) * length + index
    if grad is None:
        if matrix is not None:
            value -= tl.sum(moved * moved, 1) / 2
        if level is not None:
            level += batch * level_batch + owner * level_head
            if DIAGONAL:
                value += tl.sum(tl.log(tl.abs(tl.load(level + columns * (width + 1), mask=columns < width, other=1.0))))
            else:
                value += tl.load(level)
        tl.store(out + place, tl.where(shown, value, float("-inf")), mask=inside)
    else:
        # Read again, so that registers are free for the products.
        r = load_tile(rows, batch, head, first, rows_batch, rows_head, rows_row, shown, width, WIDTH).to(tl.float32)
        slope = 2 * weight * r
        if matrix is not None:
            slope -= tl.dot(moved, tl.trans(a), input_precision="tf32x3") * root
        if linear is not None:
            slope += tilt[None, :]
        g = tl.load(grad + place, mask=shown, other=0.0)
        slope = tl.where(shown[:, None], slope * g[:, None], 0.0)
        store_tile(out, batch, head, first, out_batch, out_head, out_row, slope, inside, width, WIDTH)


def per_head(tensor: Tensor | None, batch: int, heads: int, *sizes: int) -> tuple[Tensor | None, tuple[int, ...]]:
    """Gives a tensor `[..., *sizes]` whose last dimensions lie in one piece, and its strides of batch and heads."""
    if tensor is None:
        return None, (0, 0)
    # Almost always in one piece; a product of matrices may leave its result transposed.
    wide = tensor.contiguous().expand(batch, heads, *sizes)
    return wide, wide.stride()[:2]


def form(
    rows: Tensor,
    matrix: Tensor | None,
    shift: Tensor | None,
    linear: Tensor | None,
    numbers: tuple[float, float, float],
    level: Tensor | None = None,
    seen: Tensor | None = None,
    grad: Tensor | None = None,
    groups: int = 1,
) -> Tensor:
    """Computes a quadratic form of every token (the part of log-features of the token alone), or its gradient.

    form(r) = -|A'(t r - c)|^2 / 2 + t r.b + w |r|^2 + h + constant,   its gradient -t A A'(t r - c) + t b + 2 w r

    Matrices A `[d, d]`, vectors c and b and numbers h belong to a head; each of the four may be left out.

    Args:
        rows: `[B, H, S, d]`, float32 or half precision, d at most 128; the last stride is 1.
        matrix: A `[..., d, d]`, float32, broadcast over batch and heads; it may be transposed in memory.
        shift, linear: c and b, `[..., d]`.
        numbers: w, t and the constant.
        level: h `[...]`, or a matrix `[..., d, d]` the logarithms of whose diagonal add up to h.
        seen: boolean `[B, 1, S]`, False for tokens that are not read.
        grad: gradient of the form `[B, H, S]`, to get that of the rows.
        groups: heads that share the matrices, vectors and numbers.

    Returns:
        `[B, H, S]` float32, -inf where hidden; or like `rows`, zeros where hidden.
    """
    batch, heads, length, width = rows.shape
    flip = matrix is not None and not matrix.is_contiguous() and matrix.mT.is_contiguous()
    owners, is_diagonal = heads // groups, level is not None and level.shape[-2:] == (width, width)
    matrix, matrix_strides = per_head(matrix.mT if matrix is not None and flip else matrix, batch, owners, width, width)
    shift, shift_strides = per_head(shift, batch, owners, width)
    linear, linear_strides = per_head(linear, batch, owners, width)
    level, level_strides = per_head(level, batch, owners, *((width, width) if is_diagonal else ()))
    weight, root, constant = numbers
    if seen is not None and seen.stride(-1) != 1:
        seen = seen.contiguous()
    if grad is None:
        out = torch.empty(batch, heads, length, dtype=torch.float32, device=rows.device)
    else:
        out, grad = torch.empty_like(rows), grad.contiguous()
        if out.stride(-1) != 1:  # if rows overlap
            out = rows.new_empty(rows.shape)
    if not out.numel():
        return out
    with torch.cuda.device_of(rows):
        tile = _tile(width, _TOKENS if matrix is None else _TOKENS // 2)
        _form[(batch * heads * ceil_divide(length, tile["TOKENS"]),)](
            *(rows, matrix, shift, linear, level, seen, grad, out),
            *(root, weight, constant, length, heads, groups),
            *(*strides(rows), *matrix_strides, *shift_strides, *linear_strides, *level_strides),
            0 if seen is None or seen.shape[0] == 1 else seen.stride(0),
            *((0, 0, 0) if grad is None else strides(out)),
            **tile,
            FLIP=flip,
            DIAGONAL=is_diagonal,
        )
    return out


@triton.jit(do_not_specialize=["length"])
def _cleaned(
    rows, seen, grad, out, length, heads,
    rows_batch, rows_head, rows_row, seen_batch, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    width: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Puts 0 in place of NaN and infinity in hidden rows, or of their gradient if `grad` is given."""
    batch, head, first, index, inside = _locate(length, heads, TOKENS)
    shown = tl.load(seen + batch * seen_batch + index, mask=inside, other=0) != 0
    r = load_tile(rows, batch, head, first, rows_batch, rows_head, rows_row, inside, width, WIDTH)
    kept = shown[:, None] | (tl.abs(r.to(tl.float32)) < float("inf"))
    if grad is not None:
        r = load_tile(grad, batch, head, first, grad_batch, grad_head, grad_row, inside, width, WIDTH)
    r = tl.where(kept, r, 0.0)
    store_tile(out, batch, head, first, out_batch, out_head, out_row, r, inside, width, WIDTH)


def cleaned(rows: Tensor, seen: Tensor, grad: Tensor | None = None) -> Tensor:
    """Puts 0 in place of NaN and infinity in hidden rows, see `favor.attention.packing.Cleaned`.

    Rows are `[B, H, L, d]`, d at most 128; `seen` `[B, L]` is False for hidden ones. Given the gradient of the result,
    it gives that of the rows.
    """
    batch, heads, length, width = rows.shape
    out = torch.empty_like(rows)
    if out.stride(-1) != 1:  # if rows overlap
        out = rows.new_empty(rows.shape)
    seen = seen if seen.stride(-1) == 1 else seen.contiguous()
    grad = grad if grad is None or grad.stride(-1) == 1 else grad.contiguous()
    with torch.cuda.device_of(rows):
        _cleaned[(batch * heads * ceil_divide(length, _TOKENS),)](
            *(rows, seen, grad, out, length, heads, *strides(rows), seen.stride(0)),
            *((0, 0, 0) if grad is None else strides(grad)),
            *strides(out),
            width=width,
            WIDTH=padded_width(width),
            TOKENS=_TOKENS,
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
    y, z = roots(load_rows(matrix + place, width, real, width, WIDTH, WIDTH), iterations, WIDTH)
    store_rows(root + place, width, y, real, width, WIDTH, WIDTH)
    store_rows(inverse + place, width, z, real, width, WIDTH, WIDTH)


@triton.jit
def roots(scaled, iterations, WIDTH: tl.constexpr):
    """Gives root and inverse root of a symmetric matrix, see `favor.features.linalg.newton_schulz`."""
    row = tl.arange(0, WIDTH)
    size = tl.max(tl.sum(tl.abs(scaled), 1), 0)
    size = tl.where(size < 1.1754943508222875e-38, 1.1754943508222875e-38, size)  # not NaN
    diagonal = row[:, None] == row[None, :]
    y, z = scaled / size, tl.where(diagonal, 1.0, 0.0)
    for _ in range(iterations):
        step = tl.where(diagonal, 1.5, 0.0) - 0.5 * tl.dot(z, y, input_precision="tf32x3")
        y, z = tl.dot(y, step, input_precision="tf32x3"), tl.dot(step, z, input_precision="tf32x3")
    return (y + tl.trans(y)) * (tl.sqrt(size) / 2), (z + tl.trans(z)) / (2 * tl.sqrt(size))


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
