"""Kernel principal components of the L_p norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from favor.decomposition.inputs import check_integer, check_number, generator_of, warn_of_end
from favor.decomposition.kernels import KernelDecomposition
from favor.decomposition.power import check_options, scale_invariant_power

# Rows among which the best is the start of a component.
CANDIDATES = 50


class LpKernelPCA(KernelDecomposition):
    """Kernel PCA that maximises the mean of |score|^p: p < 2 heeds outliers less than PCA, p > 2 seeks heavy tails.

    Components are orthonormal in feature space, found one after another by `scale_invariant_power`, each from the best
    of 50 rows drawn at random. With p >= 1 the objective is convex and no step lowers it; what is found is a local
    maximum, for p = 2 in general the global one.

    Args:
        n_components: number of components, default 1; fewer are found if the kernel has a lower rank.
        p: of the norm, at least 1. Default 3. 2 is PCA; for 1, `L1KernelPCA` finds better maxima by bit_flips and
            needs no eigenvectors.
        kernel: "linear" (default), "rbf" exp(-gamma |x - y|^2), "precomputed", or a function of two tensors `[m, d]`
            and `[n, d]` that gives `[m, n]`, positive semidefinite.
        gamma: of "rbf". Default None, 1 / n_features.
        center: whether to centre in feature space, default True.
        shift: added to every step in units of the multiplier, see `scale_invariant_power`. Default 0.
        tol: a component is found when a step turns it by less than 1 - cos = tol. Default 1e-10.
        max_iter: largest number of steps per component, default 1000.
        random_state: int, RandomState or None, for the rows to start from.

    Attributes:
        scores_: of the training rows, `[n, n_components_]`; the largest of each component is positive.
        components_: for the linear kernel, orthonormal vectors `[n_components_, n_features]`.
        mean_: for the linear kernel, means of the columns `[n_features]`; zeros if center is False.
        alphas_: for other kernels, dual coefficients on the centred training rows, `[n, n_components_]`.
        X_fit_: training rows, for "rbf" and functions. gamma_: the gamma used.
        kernel_means_, kernel_mean_: means of the columns of the training kernel, and their mean, for kernels other than
            the linear one, if center is True.
        n_iter_: largest number of steps of a component.
        n_components_: number of components found.
        n_features_in_: number of columns seen by `fit`.
        feature_names_in_: their names, if the data had names.

    Raises:
        ValueError: from `fit`, for parameters out of range, or rows that are all equal.

    Warns:
        ConvergenceWarning: if a component still moved after max_iter steps.

    See Also:
        L1KernelPCA: p = 1 by sign updates, with outlier scores.
        sklearn.decomposition.KernelPCA: p = 2.

    Notes:
        With the linear kernel a step costs O(n d). Other kernels are factored once by eigenvectors, O(n^3).
        Source: C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020),
        section 3.1 for the problem and Algorithm 2 for the steps. Several components, by projecting out those found,
        are an addition of this package.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import LpKernelPCA
        >>> X = np.random.default_rng(0).normal(size=(200, 3)) * [1.0, 3.0, 0.5]
        >>> pca = LpKernelPCA(p=4, random_state=0).fit(X)
        >>> bool(abs(pca.components_[0, 1]) > 0.99)
        True

    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        p: float = 3.0,
        kernel: str | Callable[[Tensor, Tensor], Any] = "linear",
        gamma: float | None = None,
        center: bool = True,
        shift: float = 0.0,
        tol: float = 1e-10,
        max_iter: int = 1000,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.p = p
        self.kernel = kernel
        self.gamma = gamma
        self.center = center
        self.shift = shift
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> LpKernelPCA:
        """Finds the components.

        Args:
            X: rows `[n, n_features]`, or for kernel="precomputed" their kernel matrix `[n, n]`.
            y: ignored; pipelines pass it.

        Returns:
            The estimator itself.
        """
        self._check_parameters()
        rows = self._training_rows(X)
        if self.kernel == "linear":
            directions = self._directions(rows)
            self._keep(X, rows @ directions, None, directions.T)
        else:
            factor, back = _factored(self._training_kernel(rows, X))
            directions = self._directions(factor)
            self._keep(X, factor @ directions, back @ directions, None)
        return self

    def _directions(self, factor: Tensor) -> Tensor:
        """Finds orthonormal columns `[r, n_components_]` of large mean |factor @ column|^p, for a factor `[n, r]`."""
        generator = generator_of(self.random_state)
        whole = float(factor.norm())
        tolerance = whole * (1e-10 if factor.dtype == torch.float64 else 1e-5)
        left, found = factor, factor.new_zeros(factor.shape[1], 0)
        counts: list[int] = []
        while len(counts) < self.n_components and float(left.norm()) > tolerance:
            start = _start(left, float(self.p), generator)
            result = scale_invariant_power(
                _gradient(left, float(self.p)), start, shift=self.shift, tol=self.tol, max_iter=self.max_iter
            )
            if not result.converged:
                warn_of_end(
                    f"component {len(counts)} still moved after max_iter={self.max_iter} steps; raise max_iter or tol."
                )
            x = result.x - found @ (found.T @ result.x)
            x = x / x.norm()
            score = factor @ x
            x = torch.where(score[score.abs().argmax()] < 0, -x, x)
            found = torch.column_stack((found, x))
            left = left - torch.outer(left @ x, x)
            counts.append(result.n_iter)
        self.n_iter_ = max(counts, default=0)
        return found

    def _check_parameters(self) -> None:
        check_integer("n_components", self.n_components)
        check_options(self.shift, self.tol, self.max_iter)
        # Below 1 steps may lower the objective.
        check_number("p", self.p, expected="a finite number of at least 1", allowed=lambda p: 1 <= p < math.inf)


def _gradient(factor: Tensor, p: float) -> Callable[[Tensor], Tensor]:
    """Gives a positive multiple of the gradient of mean |factor @ x|^p."""

    def gradient(x: Tensor) -> Tensor:
        scores = factor @ x
        # In units of the largest score powers do not overflow. With p = 1 a score of 0 counts as positive: otherwise
        # its row would be lost for ever.
        scores = scores / scores.abs().max()
        return factor.T @ torch.where(scores < 0, -1.0, 1.0).to(scores).mul(scores.abs() ** (p - 1))

    return gradient


def _start(factor: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Gives a row `[r]` of largest mean |factor @ x|^p, x its direction, of `CANDIDATES` rows drawn by squared norm."""
    drawn = torch.multinomial(factor.square().sum(1).double().cpu(), CANDIDATES, replacement=True, generator=generator)
    rows = factor[drawn.to(factor.device)]
    rows = rows / rows.norm(dim=1, keepdim=True)
    scores = (factor @ rows.T).abs()
    return rows[(scores / scores.max()).pow(p).sum(0).argmax()]


def _factored(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Gives F `[n, r]` with F F' = K and B with F = K B, r the rank: x in R^r has the dual coefficients B x."""
    values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    roots, vectors = values[kept].sqrt(), vectors[:, kept]
    return vectors * roots, vectors / roots
