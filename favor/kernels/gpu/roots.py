"""Root and inverse root of small symmetric matrices in one launch, see `favor.features.linalg.newton_schulz`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import load_rows, padded_width, store_rows


@triton.jit
def _newton_schulz(matrix, root, inverse, iterations, width: tl.constexpr, WIDTH: tl.constexpr):
    """One matrix. Columns past `width` are zeros in the root, and stay apart from the others in its inverse."""
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
    """Root and inverse root of float32 matrices `[..., d, d]`, d at most 64; not finite gives NaN."""
    matrix = matrix.contiguous()
    root, inverse = torch.empty_like(matrix), torch.empty_like(matrix)
    width = matrix.shape[-1]
    with torch.cuda.device_of(matrix):
        _newton_schulz[(matrix.shape[:-2].numel(),)](
            matrix,
            root,
            inverse,
            iterations,
            width=width,
            WIDTH=padded_width(width),
        )
    return root, inverse
