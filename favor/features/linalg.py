"""Matrices of many heads at once: square roots, traces, sums in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.dispatch import fuses, triton_module


def without_eigh(factorization: str, matrix: Tensor, instead: str) -> str:
    """Resolves "auto" for a matrix: "eigh" on a CPU, `instead` elsewhere; any other factorization is what it is.

    GPUs decompose the matrices of a batch one after another, at a millisecond or so each (pytorch/pytorch issues 175585
    and 183806), where matrix products take them together.
    """
    if factorization != "auto":
        return factorization
    return "eigh" if matrix.device.type == "cpu" else instead


def eigh(matrix: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Eigenvalues, above zero, and eigenvectors of symmetric matrices; those of I for a matrix that is not finite.

    Eigenvalues smaller than the rounding of the largest may be noise of any sign, whose inverse root would be of any
    size.

    Args:
        matrix: `[..., d, d]`.
        least: a lower bound of the eigenvalues that is known, `[...]`; default: the rounding of the largest.
    """
    values, vectors = torch.linalg.eigh(finite(matrix))
    info = torch.finfo(values.dtype)
    if least is None:
        bound = info.eps * values[..., -1:]
    else:
        # The square of the rounding keeps the root of what is noise below the root of the largest.
        bound = torch.maximum(least.unsqueeze(-1), info.eps**2 * values[..., -1:])
    return torch.maximum(values, bound.clamp(min=info.tiny)), vectors


def from_spectrum(values: Tensor, vectors: Tensor) -> Tensor:
    """The symmetric matrix with these eigenvalues and eigenvectors."""
    return vectors * values.unsqueeze(-2) @ vectors.transpose(-1, -2)


def finite(matrix: Tensor) -> Tensor:
    """Matrices, the identity in place of those that are not finite."""
    # LAPACK raises on NaN and infinity; attention on such inputs gives NaN, as softmax attention does.
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=(-2, -1), keepdim=True)
    return torch.where(largest < torch.inf, matrix, eye)


def newton_schulz(matrix: Tensor, iterations: int = 24) -> tuple[Tensor, Tensor]:
    """Root and inverse root by the coupled Newton-Schulz iteration.

    Small eigenvalues converge last, their roots from below by a factor of 1.5 an iteration: 24 serve matrices of
    condition 1e6. Unlike eigenvectors, the result is differentiable whatever the eigenvalues.

    Args:
        matrix: `[..., d, d]`; not finite gives NaN.
        iterations: three products of [d, d] matrices each.

    Source: N. Higham, "Functions of Matrices" (2008), equation (6.35).
    """
    if matrix.dtype == torch.float32 and matrix.shape[-1] <= 64 and not torch.is_grad_enabled() and fuses(matrix):
        return triton_module("tokens").newton_schulz(matrix, iterations)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs().sum(-1).amax(-1)[..., None, None].clamp(min=torch.finfo(matrix.dtype).tiny)
    root, inverse = matrix / size, eye
    for _ in range(iterations):
        step = 1.5 * eye - 0.5 * inverse @ root
        root, inverse = root @ step, step @ inverse
    root, inverse = ((part + part.transpose(-1, -2)) / 2 for part in (root, inverse))
    return size.sqrt() * root, inverse / size.sqrt()


def trace(matrix: Tensor) -> Tensor:
    """Trace over the last two dimensions."""
    return torch.diagonal(matrix, dim1=-2, dim2=-1).sum(-1)


def add_diagonal(matrix: Tensor, number: Tensor | float) -> Tensor:
    """Matrices `[..., d, d]` plus a number `[...]` times the identity."""
    total = matrix.clone()
    torch.diagonal(total, dim1=-2, dim2=-1).add_(number.unsqueeze(-1) if isinstance(number, Tensor) else number)
    return total


def joined(pieces: list[Tensor], dim: int) -> Tensor:
    """Pieces put together again; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def row_parts(samples: Tensor, copied: bool = True) -> list[slice]:
    """Rows at a time: so many that they stay in cache on a CPU, and that copies of them stay small elsewhere.

    All at once if they are not `copied`.
    """
    length = samples.shape[-2]
    if not copied or torch.compiler.is_compiling() or samples.numel() == 0:
        return [slice(None)]
    size = 512 if samples.device.type == "cpu" else max(512, 2**26 * length // samples.numel())
    return [slice(start, start + size) for start in range(0, length, size)]
