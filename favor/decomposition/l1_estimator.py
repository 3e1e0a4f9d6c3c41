"""Kernel principal components of the L1 norm, and outlier scores by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from favor.decomposition.inputs import same_kind, tensor_of
from favor.decomposition.kernels import KernelDecomposition, check_count
from favor.decomposition.l1_components import l1_kernel_pca

# Share of the variance that the components behind outlier scores must hold.
SHARE = 0.8


class L1KernelPCA(KernelDecomposition):
    """Kernel PCA that maximises the mean absolute score instead of the mean square, so that outliers count less.

    Components are found one after another, each in what the earlier ones leave of feature space; each is a signed sum
    of the training rows, found by sign updates on the kernel matrix without eigenvectors. All is deterministic.

    Args:
        n_components: number of components, or all (None, default); fewer are found where the kernel has a lower rank.
        kernel: "linear" (default), "rbf" exp(-gamma |x - y|^2), "precomputed", or a function of two tensors `[m, d]`
            and `[n, d]` that gives `[m, n]`, positive semidefinite.
        gamma: of "rbf". Default None, 1 / n_features; a width sigma is gamma = 1 / (2 sigma^2), and the thesis has
            sigma = n_features on standardised columns.
        center: whether to centre in feature space, default True.
        bit_flips: whether to improve each component by flips of single signs, default False.
        max_iter: largest number of sign updates a component, default 1000.

    Attributes:
        scores_: of the training rows, `[n, n_components_]`.
        signs_: +1 or -1 of every training row in every component, `[n_components_, n]`.
        alphas_: dual coefficients of the components on the centred training rows, `[n, n_components_]`.
        components_: for the linear kernel, orthonormal vectors `[n_components_, n_features]`.
        mean_: for the linear kernel, means of the columns `[n_features]`; zeros if center is False.
        X_fit_: training rows, for "rbf" and functions. gamma_: the gamma used.
        kernel_means_, kernel_mean_: means of the columns of the training kernel, and their mean, for kernels other than
            the linear one, if center is True.
        outlier_components_: indices of the components behind `outlier_score`, those of largest variance which together
            hold 80 % of it.
        outlier_means_, outlier_variances_: of the training scores on these components.
        n_iter_: largest number of sign updates of a component.
        n_components_: number of components found.
        n_features_in_: number of columns seen by `fit`.
        feature_names_in_: their names, if the data had names.

    Raises:
        ValueError: from `fit`, for parameters out of range, or rows that are all the same.

    Warns:
        ConvergenceWarning: if a component still moved after max_iter updates.

    See Also:
        favor.decomposition.l1_kernel_pca: the same on a kernel matrix.
        sklearn.decomposition.KernelPCA: the L2 norm.

    Notes:
        Time and memory are O(n^2), for the linear kernel too; each sign update is a product with the kernel matrix.
        The components are local maxima; `bit_flips` finds better ones. Source: C. Kim, Optimization Methods for Scale
        Invariant Problems in Machine Learning (Northwestern, 2020), chapter 2. It centres its data but does not say
        whether it does so in feature space, nor how new rows are projected: the latter is by dual coefficients here.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import L1KernelPCA
        >>> X = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1.0, 2.0]])
        >>> pca = L1KernelPCA(n_components=1).fit(X)
        >>> np.abs(pca.components_).round(2).tolist(), np.abs(pca.transform([[3.0, 3.0]])).round(2).tolist()
        ([[0.63, 0.77]], [[2.1]])

    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        kernel: str | Callable[[Tensor, Tensor], Any] = "linear",
        gamma: float | None = None,
        center: bool = True,
        bit_flips: bool = False,
        max_iter: int = 1000,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.gamma = gamma
        self.center = center
        self.bit_flips = bit_flips
        self.max_iter = max_iter

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> L1KernelPCA:
        """Finds the components.

        Args:
            X: rows `[n, n_features]`, or for kernel="precomputed" their kernel matrix `[n, n]`.
            y: ignored; here for pipelines.

        Returns:
            The estimator itself.
        """
        check_count("n_components", self.n_components, optional=True)
        check_count("max_iter", self.max_iter)
        rows = self._training_rows(X)
        kernel = self._training_kernel(rows, X)
        found = l1_kernel_pca(kernel, self.n_components, max_iter=self.max_iter, bit_flips=bool(self.bit_flips))
        linear = self.kernel == "linear"
        self._keep(X, found.scores, found.alphas, found.alphas.T @ rows if linear else None)
        self.signs_ = same_kind(found.signs, X)
        self.n_iter_ = max(found.n_iter)
        means, variances = found.scores.mean(0), found.scores.var(0, correction=0)
        largest = variances.sort(descending=True).values
        # The largest threshold at which the components above it hold the share, so that equal ones stay together.
        enough = int((largest.cumsum(0) < SHARE * largest.sum()).sum())
        chosen = (variances >= largest[enough]).nonzero().flatten()
        self.outlier_components_ = same_kind(chosen, X)
        self.outlier_means_ = same_kind(means[chosen], X)
        self.outlier_variances_ = same_kind(variances[chosen], X)
        return self

    @torch.no_grad()
    def outlier_score(self, X: Any) -> Any:
        """Squared distance of rows from the training mean along the main components, each in units of its variance.

        Fit with all components (n_components=None) for the model of the thesis, section 2.5: 80 % is of the variance
        of those found.

        Args:
            X: rows as for `transform`, `[m, ...]`.

        Returns:
            `[m]`, larger for likelier outliers, of the kind of X.
        """
        scores = self._project(X)
        chosen = tensor_of(self.outlier_components_).to(scores.device)
        means, variances = (tensor_of(each, scores) for each in (self.outlier_means_, self.outlier_variances_))
        return same_kind(((scores[:, chosen] - means).square() / variances).sum(1), X)
