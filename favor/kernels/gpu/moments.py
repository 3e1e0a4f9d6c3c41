"""Weighted mean and scatter of the tokens of each head, in one pass over them.

Sums are those of differences from a pivot, the first token that counts: as differences of plain second moments they
would lose their digits where the mean is large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.causal.problem import corner
from favor.kernels.gpu.common import load_rows, padded_width, split_count, store_rows

_TOKENS = 64


@triton.jit(do_not_specialize=["length", "splits"])
def _sums(
    rows,
    weights,
    pivot,
    first_sum,
    second_sum,
    length,
    heads,
    splits,
    rows_batch,
    rows_head,
    rows_row,
    width: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sums of w (r - p) and w (r - p)(r - p)' over a piece of the tokens of one head."""
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
        there = corner(rows, batch, head, tl.cast(begin, tl.int64), rows_batch, rows_head, rows_row)
        r = load_rows(there, rows_row, shown, width, TOKENS, WIDTH).to(tl.float32)
        r = tl.where(shown[:, None], r - p[None, :], 0.0)
        weighted = r
        if weights is not None:
            weighted = r * w[:, None]
        first += tl.sum(weighted, 0)
        second = tl.dot(tl.trans(weighted), r, acc=second, input_precision="tf32x3")
    tl.store(first_sum + program * width + columns, first, mask=columns < width)
    store_rows(second_sum + program * width * width, width, second, columns < width, width, WIDTH, WIDTH)


def moments(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weighted mean and covariance of tokens.

    Args:
        rows: `[B, H, L, d]`, float32 or half precision, d at most 128, L at least 1; the last stride is 1.
        weights: `[B, H, L]`, not negative; 0 leaves a token out, whatever it holds. None weighs all alike.

    Returns:
        mean `[B, H, d]` and covariance `[B, H, d, d]`, float32; zeros where all weights are.
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
    splits = split_count(batch * heads, length, rows.device)
    first = pivot.new_empty(batch, heads, splits, width)
    second = pivot.new_empty(batch, heads, splits, width, width)
    with torch.cuda.device_of(rows):
        _sums[(batch * heads * splits,)](
            rows,
            weights,
            pivot,
            first,
            second,
            length,
            heads,
            splits,
            *rows.stride()[:3],
            width=width,
            WIDTH=padded_width(width),
            TOKENS=_TOKENS,
        )
    moved = first.sum(2) * share
    return pivot + moved, second.sum(2) * share.unsqueeze(-1) - moved.unsqueeze(-1) * moved.unsqueeze(-2)
