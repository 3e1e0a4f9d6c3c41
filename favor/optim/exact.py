"""The bound's curvature of a mini-batch, without a majorizer: products in O(m n d), systems by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from favor.optim.bound import BoundCoefficients, bound_coefficients, bound_dense, bound_diagonal, bound_matvec
from favor.optim.majorizers import CHUNK, Kronecker, cholesky, row_weights, second_moment, total

DENSE = 1e9
TOLERANCE = 1e-6
ITERATIONS = 200


def exact(
    logits: Tensor,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    order: str = "ascending",
    reduce: Callable[[Tensor], Tensor] = lambda value: value,
) -> Exact:
    """Makes Sigma = sum_j w_j B_j (x) x_j x_j'.

    Args:
        logits: `[m, n]`.
        x: inputs `[m, d]`.
        weights: `[m]`, default 1/m.
        order: of the labels in each B_j, see `bound_coefficients`.
        reduce: applied to every sum over examples; the mean over processes, for instance. Default: nothing.
    """
    return Exact(x, row_weights(x, weights), bound_coefficients(logits, order), reduce)


@dataclass(frozen=True)
class Exact:
    """Sigma by inputs `[m, d]`, weights `[m]` and the coefficients of B for logits `[m, n]`."""

    x: Tensor
    weights: Tensor
    coefficients: BoundCoefficients
    reduce: Callable[[Tensor], Tensor]

    def matvec(self, v: Tensor) -> Tensor:
        """Computes Sigma v, `[n, d]` for v `[n, d]`."""
        product = bound_matvec(self.coefficients, self.x @ v.T) * self.weights.unsqueeze(-1)
        return self.reduce(product.T @ self.x)

    def dense(self, num_labels: int) -> Tensor:
        """Forms the whole matrix, `[n d, n d]`, from a few examples at a time."""
        n, d = num_labels, self.x.shape[-1]
        matrix = self.x.new_zeros(n * n, d * d)
        labels = bound_dense(self.coefficients).flatten(1) * self.weights.unsqueeze(-1)
        rows = max(1, CHUNK // (d * d))
        for part, x in zip(labels.split(rows), self.x.split(rows), strict=True):
            matrix += part.T @ (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(1)
        return self.reduce(matrix).reshape(n, n, d, d).transpose(1, 2).reshape(n * d, n * d)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        trace = bound_diagonal(self.coefficients).sum(-1) * self.x.square().sum(-1)
        return self.reduce((self.weights * trace).sum()) / (self.coefficients.beta.shape[-1] * self.x.shape[-1])

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """Computes (Sigma + damping I)^{-1} gradient, `[n, d]`.

        Takes a dense Cholesky factorization in float64 if that needs less than 1e9 operations, else conjugate gradients
        to a residual of 1e-6 or 200 iterations, preconditioned by the mean diagonal of B and the second moment of the
        inputs.

        Raises:
            ValueError: if the curvature is not finite.
        """
        size, rows = gradient.numel(), self.reduce(self.x.new_tensor(float(len(self.x)))).item()
        if rows * size**2 + size**3 / 3 <= DENSE:
            factor = cholesky(self._double().dense(len(gradient)), damping)
            return torch.cholesky_solve(gradient.double().reshape(-1, 1), factor).reshape(gradient.shape).to(gradient)
        return self._conjugate_gradients(gradient, damping)

    def _double(self) -> Exact:
        """Converts to float64 from the start: what large inputs lose in float32 is more than the damping."""
        c = self.coefficients
        c = replace(c, beta=c.beta.double(), kappa=c.kappa.double(), rho=c.rho.double())
        return replace(self, x=self.x.double(), weights=self.weights.double(), coefficients=c)

    def _conjugate_gradients(self, gradient: Tensor, damping: float) -> Tensor:
        labels = self.reduce(self.weights @ bound_diagonal(self.coefficients))
        whole = self.reduce(total(self.weights))
        near = Kronecker(labels / whole, self.reduce(second_moment(self.x, self.weights)))
        solution, residual = torch.zeros_like(gradient), gradient.clone()
        if not bool(gradient.any()):
            return solution
        precondition = near.inverse(damping).apply
        direction = precondition(residual)
        product = (residual * direction).sum()
        for _ in range(ITERATIONS):
            image = self.matvec(direction) + damping * direction
            length = product / (direction * image).sum()
            solution += length * direction
            residual -= length * image
            if residual.norm() <= TOLERANCE * gradient.norm():
                break
            preconditioned = precondition(residual)
            product, before = (residual * preconditioned).sum(), product
            direction = preconditioned + product / before * direction
        return solution
