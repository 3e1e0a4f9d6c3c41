"""Matrices of many heads at once: square roots, traces, sums in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.dispatch import fuses, kernel_module


def without_eigh(factorization: str, matrix: Tensor, instead: str) -> str:
    """Resolves "auto" for a matrix: "eigh" on a CPU, `instead` elsewhere; gives any other factorization unchanged.

    GPUs decompose the matrices of a batch one after another, at about a millisecond each (pytorch/pytorch issues 175585
    and 183806), but multiply them all together.
    """
    if factorization != "auto":
        return factorization
    return "eigh" if matrix.device.type == "cpu" else instead


def eigh(matrix: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues, above zero, and eigenvectors of symmetric matrices; those of I if one is not finite.

    Eigenvalues smaller than the rounding of the largest may be noise of any sign, and their inverse roots would have
    any size. So they are at least `least` `[...]`, a known bound; default: the rounding of the largest.
    """
    check_onnx()
    values, vectors = torch.linalg.eigh(finite(matrix))
    info = torch.finfo(values.dtype)
    if least is None:
        bound = info.eps * values[..., -1:]
    else:
        # With the square of the rounding, the root of noise stays below the rounding of the largest root.
        bound = torch.maximum(least.unsqueeze(-1), info.eps**2 * values[..., -1:])
    return torch.maximum(values, bound.clamp(min=info.tiny)), vectors


def cholesky(matrix: Tensor) -> Tensor:
    """Computes the lower Cholesky factor; a matrix that has none gives something else, and no error."""
    check_onnx()
    return torch.linalg.cholesky_ex(matrix)[0]


def inverse(matrix: Tensor, iterations: int = 48) -> Tensor:
    """Inverts matrices; while a model is exported to ONNX, by matrix products.

    An engine computes the inverse of a constant once, when it loads the model. An iteration takes two products, and
    doubles the digits once some are right; 48 suffice for condition 1e6.

    Source: G. Schulz, "Iterative Berechnung der reziproken Matrix" (1933).
    """
    if not _is_for_onnx():
        return torch.linalg.inv(matrix)
    eye, size = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device), matrix.abs()
    norms = size.sum(-1).amax(-1) * size.sum(-2).amax(-1)
    found = matrix.mT / norms[..., None, None]
    for _ in range(iterations):
        found = found @ (2 * eye - matrix @ found)
    return found


def check_onnx() -> None:
    """Raises a ValueError while a model is exported to ONNX, which has no decompositions."""
    if _is_for_onnx():
        raise ValueError(
            "parameters from each sequence, and any but those of FAVOR+ with a window, need eigenvalues, Cholesky "
            "factors or determinants, which ONNX does not have. Use landmark, favor+ or favor++; or, without a window, "
            'favor.calibrate with statistics="calibrated", or features="sderf" with factorization="newton_schulz". '
            "torch.export alone has no such limit."
        )


@torch.compiler.assume_constant_result  # a tracer would answer "no" by itself
def _is_for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def from_spectrum(values: Tensor, vectors: Tensor) -> Tensor:
    """Makes the symmetric matrix with these eigenvalues and eigenvectors."""
    return vectors * values.unsqueeze(-2) @ vectors.transpose(-1, -2)


def finite(matrix: Tensor) -> Tensor:
    """Replaces matrices that are not finite by the identity."""
    # LAPACK raises on NaN and infinity; attention on such inputs gives NaN, as softmax attention does.
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=(-2, -1), keepdim=True)
    return torch.where(largest < torch.inf, matrix, eye)


def newton_schulz(matrix: Tensor, iterations: int = 24) -> tuple[Tensor, Tensor]:
    """Computes the root and inverse root by the coupled Newton-Schulz iteration.

    Small eigenvalues converge last, their roots from below by a factor of 1.5 per iteration: 24 suffice for matrices of
    condition 1e6, with three products each. Unlike eigenvectors, the result is differentiable whatever the eigenvalues.
    It is NaN for a matrix that is not finite.

    Source: N. Higham, "Functions of Matrices" (2008), equation (6.35).
    """
    if matrix.dtype == torch.float32 and matrix.shape[-1] <= 64 and not torch.is_grad_enabled() and fuses(matrix):
        return kernel_module("triton", "tokens").newton_schulz(matrix, iterations)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs().sum(-1).amax(-1)[..., None, None].clamp(min=torch.finfo(matrix.dtype).tiny)
    root, inverse = matrix / size, eye
    for _ in range(iterations):
        step = 1.5 * eye - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    root, inverse = ((part + part.transpose(-1, -2)) / 2 for part in (root, inverse))
    return size.sqrt() * root, inverse / size.sqrt()


def trace(matrix: Tensor) -> Tensor:
    """Computes the trace over the last two dimensions."""
    return torch.diagonal(matrix, dim1=-2, dim2=-1).sum(-1)


def add_diagonal(matrix: Tensor, number: Tensor | float) -> Tensor:
    """Adds a number `[...]` times the identity to matrices `[..., d, d]`."""
    diagonal = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    # A choice, not a product with the identity: infinity times zero is NaN.
    return torch.where(diagonal, matrix + (number[..., None, None] if isinstance(number, Tensor) else number), matrix)


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """Joins pieces; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def row_parts(samples: Tensor, copied: bool = True) -> list[slice]:
    """Gives how many rows to take at a time: they stay in cache on a CPU, and copies of them stay small elsewhere.

    If rows are not `copied`, all are taken at once.
    """
    length = samples.shape[-2]
    if not copied or torch.compiler.is_compiling() or samples.numel() == 0:
        return [slice(None)]
    size = 512 if samples.device.type == "cpu" else max(512, 2**26 * length // samples.numel())
    return [slice(start, start + size) for start in range(0, length, size)]
