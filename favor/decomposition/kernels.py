"""Base of the decompositions of this package in feature space: kernels, centring, projection of new rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from favor.decomposition.inputs import check_flag, check_number, rows_of, same_kind, tensor_of

KERNELS = ("linear", "rbf", "precomputed")


@dataclass(eq=False, repr=False, kw_only=True)
class KernelDecomposition(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Directions in the feature space of a kernel, centred on the training rows.

    The linear kernel works in input space: its rows are centred before the kernel is taken, which keeps their
    digits, and its components are vectors there. Other kernels are centred as scikit-learn's `KernelCenterer` does.

    The `fit` of a subclass calls `_training_rows`, `_training_kernel` and `_keep`.
    """

    kernel: str | Callable[[Tensor, Tensor], Any] = "linear"
    gamma: float | None = None
    center: bool = True
    max_iter: int = 1000

    def transform(self, X: Any) -> Any:
        """Gives the scores of rows on the components.

        Args:
            X: rows `[m, n_features]`, or for kernel="precomputed" their kernel with the training rows `[m, n]`.

        Returns:
            `[m, n_components_]`, of the kind of X.
        """
        return same_kind(self._project(X), X)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fits, and gives the scores `[n, n_components_]` of the training rows, of the kind of X; y is ignored."""
        return self.fit(X).scores_  # type: ignore[attr-defined]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self.kernel == "precomputed"
        return tags

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components_)

    def _project(self, X: Any) -> Tensor:
        check_is_fitted(self)
        rows = rows_of(self, X, reset=False)
        if self.kernel == "linear":
            return (rows - tensor_of(self.mean_, rows)) @ tensor_of(self.components_, rows).T
        training = rows if self.kernel == "precomputed" else tensor_of(self.X_fit_, rows)
        kernel = self._kernel(rows, training)
        if self.center:
            means, mean = tensor_of(self.kernel_means_, rows), self.kernel_mean_
            kernel = kernel - means - kernel.mean(1, keepdim=True) + mean
        return kernel @ tensor_of(self.alphas_, rows)

    def _training_rows(self, X: Any) -> Tensor:
        """Checks the parameters of the kernel and X, and keeps what new rows will need of X."""
        if not callable(self.kernel) and not (isinstance(self.kernel, str) and self.kernel in KERNELS):
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)} or a function; got {self.kernel!r}.")
        check_number("gamma", self.gamma, None, expected="a positive number", allowed=lambda g: 0 < g < math.inf)
        check_flag("center", self.center)
        rows = rows_of(self, X, reset=True, minimum=2 if self.center else 1)
        if self.kernel == "linear":
            mean = rows.mean(0) if self.center else torch.zeros_like(rows[0])
            self.mean_ = same_kind(mean, X)
            centred = rows - mean
            # Only rounding is left of constant columns.
            constant = centred.abs().amax(0) <= 8 * torch.finfo(rows.dtype).eps * mean.abs()
            return centred.masked_fill(constant, 0)
        if self.kernel != "precomputed":
            self.gamma_ = 1 / rows.shape[1] if self.gamma is None else float(self.gamma)
            self.X_fit_ = same_kind(rows.clone(), X)
        return rows

    def _training_kernel(self, rows: Tensor, X: Any) -> Tensor:
        """Gives the kernel `[n, n]` of the rows that `_training_rows` gave, centred."""
        kernel = self._kernel(rows, rows)
        if self.kernel == "linear":
            return kernel
        name = "X" if self.kernel == "precomputed" else "the matrix of kernel"
        kernel = checked_kernel(kernel, name)
        if not self.center:
            check_diagonal(kernel, name)
            return kernel
        means = kernel.mean(0)
        self.kernel_means_, self.kernel_mean_ = same_kind(means, X), float(means.mean())
        centred = kernel - means - kernel.mean(1, keepdim=True) + means.mean()
        # Only rounding is left of rows that are all equal.
        rounding = 16 * torch.finfo(rows.dtype).eps * kernel.abs().max()
        if centred.abs().max() <= rounding:
            return torch.zeros_like(centred)
        check_diagonal(centred, f"{name}, centred,")
        return centred

    def _keep(self, X: Any, scores: Tensor, alphas: Tensor | None, components: Tensor | None) -> None:
        """Stores the components; raises ValueError if there are none."""
        if not scores.shape[1]:
            raise ValueError(
                "X must have rows that differ (for center=False, that are not zero): its kernel matrix is zero, and "
                "no direction has any dispersion."
            )
        self.n_components_ = scores.shape[1]
        self.scores_ = same_kind(scores, X)
        if alphas is not None:
            self.alphas_ = same_kind(alphas, X)
        if components is not None:
            self.components_ = same_kind(components, X)

    def _kernel(self, rows: Tensor, training: Tensor) -> Tensor:
        """Computes k(rows, training) `[m, n]`, not centred."""
        if self.kernel == "precomputed":
            return rows
        if self.kernel == "linear":
            return rows @ training.T
        if self.kernel == "rbf":
            # By differences: exact on equal rows, and symmetric.
            distance = torch.cdist(rows, training, compute_mode="donot_use_mm_for_euclid_dist")
            return (-self.gamma_ * distance.square()).exp()
        assert callable(self.kernel)
        kernel = tensor_of(self.kernel(rows, training), rows).detach()
        if kernel.shape != (len(rows), len(training)):
            raise ValueError(f"kernel must give [{len(rows)}, {len(training)}], got {list(kernel.shape)}.")
        if not bool(kernel.isfinite().all()):
            raise ValueError("kernel gave NaN or infinity; it must be finite for all pairs of rows.")
        return kernel


def checked_kernel(K: Any, name: str) -> Tensor:
    """Gives a kernel matrix `[n, n]` as float64, or float32 if it is that; raises ValueError if it cannot be one."""
    kernel = tensor_of(K).detach()
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or not len(kernel) or kernel.is_complex():
        raise ValueError(
            f"{name} must be a square matrix [n, n] of real numbers, got shape {tuple(kernel.shape)} of {kernel.dtype}."
        )
    kernel = kernel if kernel.dtype in (torch.float32, torch.float64) else kernel.double()
    if not bool(kernel.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity.")
    slack = (1e-8 if kernel.dtype == torch.float64 else 1e-4) * float(kernel.abs().max())
    gap = float((kernel - kernel.T).abs().max())
    if gap > slack:
        raise ValueError(f"{name} must be symmetric, got entries that differ by {gap:.3g} from their mirror images.")
    return kernel


def check_diagonal(kernel: Tensor, name: str) -> None:
    """Raises ValueError for a kernel matrix with a clearly negative diagonal."""
    slack = (1e-8 if kernel.dtype == torch.float64 else 1e-4) * float(kernel.abs().max())
    least = float(kernel.diagonal().min())
    if least < -slack:
        raise ValueError(f"{name} must be positive semidefinite, got {least:.3g} on its diagonal.")
