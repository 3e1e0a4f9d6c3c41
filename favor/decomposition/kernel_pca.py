"""Kernel principal components of the L1 norm, with outlier scores, and of the Lp norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from favor.decomposition.inputs import (
    check_flag,
    check_integer,
    check_number,
    generator_of,
    same_kind,
    tensor_of,
    warn_of_end,
)
from favor.decomposition.kernels import KernelDecomposition, check_diagonal, checked_kernel
from favor.decomposition.power import scale_invariant_power

CANDIDATES = 50  # rows among which the best is the start of an Lp component
SHARE = 0.8  # share of the variance that the components behind outlier scores must hold


class L1Components(NamedTuple):
    """Result of `l1_kernel_pca`, of the kind of the kernel matrix.

    Attributes:
        scores: of the n observations on the p components, `[n, p]`; scores @ scores.T is K if p is the rank.
        signs: c of every component, +1 or -1, `[p, n]`.
        alphas: dual coefficients `[n, p]`: component j is sum_i alphas[i, j] Phi(a_i), scores = K alphas,
            alphas' K alphas = I, and a new point has the scores k(new, .) alphas.
        n_iter: number of sign updates of each component, of length p.
    """

    scores: Any
    signs: Any
    alphas: Any
    n_iter: tuple[int, ...]


@torch.no_grad()
def l1_kernel_pca(
    K: Any, n_components: int | None = None, *, max_iter: int = 1000, bit_flips: bool = False
) -> L1Components:
    """Finds unit vectors x of largest sum_i |Phi(a_i)'x|, one after another, each in what the earlier ones leave.

    x is a multiple of sum_i c_i Phi(a_i) with signs c, and c <- sgn(K c) never lowers c'Kc: it ends after finitely many
    steps in a local maximum. The start is the observation that is itself the best direction. This is dispersion
    maximised in the L1 norm; it does not minimise the L1 error of reconstruction. An iteration costs O(n^2).

    Args:
        K: kernel matrix `[n, n]`, symmetric and positive semidefinite; centre it (K - 1K/n - K1/n + 1K1/n^2) for
            dispersion about the mean. Positive semidefiniteness is not checked; without it c'Kc may fall.
        n_components: p, or all (None, default). Fewer are given if the rank of K is lower.
        max_iter: largest number of sign updates per component. Default 1000; they seldom exceed 25.
        bit_flips: whether to flip single signs that raise c'Kc after the updates ended, the best first, and to repeat
            both until neither moves. O(n) per flip; finds better maxima. Default False.

    Returns:
        `L1Components(scores, signs, alphas, n_iter)`.

    Raises:
        ValueError: for a matrix that is not square, symmetric and finite with a diagonal >= 0, or an option out of
            range. A ConvergenceWarning says that a component still moved after max_iter updates.

    References:
        C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), Algorithm 1
        and chapter 2. The thesis leaves sgn(0) open, and 0 would drop an observation for ever: here a tie keeps its
        sign, which is +1 at the start. Observations that deflation has used up are not taken as starts, and all
        tolerances are relative to K. Dual coefficients and flips are not in the thesis.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import l1_kernel_pca
        >>> found = l1_kernel_pca(np.diag([2.0, 1.0, 1.0, 1.0]), 1)
        >>> float((found.scores**2).sum().round(6)), found.signs.tolist()
        (1.4, [[1.0, 1.0, 1.0, 1.0]])
    """
    check_integer("n_components", n_components, None)
    check_integer("max_iter", max_iter)
    check_flag("bit_flips", bit_flips)
    kernel = checked_kernel(K, "K")
    check_diagonal(kernel, "K")
    n = len(kernel)
    tolerance = 1e-12 if kernel.dtype == torch.float64 else 1e-5
    left, trace = kernel.clone(), float(kernel.trace())
    scores, signs, alphas = (kernel.new_zeros(n, 0) for _ in range(3))
    n_iter: list[int] = []
    while len(n_iter) < (n if n_components is None else n_components):
        if not float(left.trace()) > tolerance * trace:
            break
        c, image, count, converged = _component(left, max_iter, bit_flips, tolerance)
        value = float(c @ image)
        if not value > tolerance * trace:
            break
        if not converged:
            warn_of_end(f"component {len(n_iter)} still moved after max_iter={max_iter} sign updates; raise max_iter.")
        score = image / value**0.5
        alpha = (c - alphas @ (scores.T @ c)) / value**0.5
        left -= torch.outer(score, score)
        scores, signs, alphas = (torch.column_stack(pair) for pair in ((scores, score), (signs, c), (alphas, alpha)))
        n_iter.append(count)
    return L1Components(same_kind(scores, K), same_kind(signs.T, K), same_kind(alphas, K), tuple(n_iter))


def _component(K: Tensor, max_iter: int, bit_flips: bool, tolerance: float) -> tuple[Tensor, Tensor, int, bool]:
    """Finds signs c; gives c, K c, the number of updates, and whether they came to rest."""
    c = _start(K)
    image, count = K @ c, 0
    while count < max_iter:
        new = _signs(image, c)
        moved_image = K @ new
        rest = float((c - new) @ (image - moved_image)) <= tolerance * float(new @ moved_image)
        c, image, count = new, moved_image, count + 1
        if rest and not (bit_flips and _flip(K, c, image, tolerance)):
            return c, image, count, True
    return c, image, count, False


def _start(K: Tensor) -> Tensor:
    """Gives the signs of the observation whose direction has the largest dispersion."""
    squares = K.diagonal()
    dispersion = K.abs().sum(0) / squares.clamp(min=torch.finfo(K.dtype).tiny).sqrt()
    dispersion[squares <= 1e-12 * squares.max()] = -torch.inf
    return _signs(K[:, dispersion.argmax()], torch.ones_like(squares))


def _signs(values: Tensor, ties: Tensor) -> Tensor:
    return torch.where(values == 0, ties, values.sign())


def _flip(K: Tensor, c: Tensor, image: Tensor, tolerance: float) -> bool:
    """Flips single signs in place while c'Kc gains, with K c kept up to date; tells whether any was flipped."""
    squares, flipped = K.diagonal(), False
    while True:
        # c'Kc gains 4 times this.
        gain, i = (squares - c * image).max(0)
        if not 4 * float(gain) > tolerance * float(c @ image):
            return flipped
        image -= 2 * c[i] * K[:, i]
        c[i] = -c[i]
        flipped = True


@dataclass(eq=False, repr=False)
class L1KernelPCA(KernelDecomposition):
    """Kernel PCA that maximises the mean absolute score instead of the mean square, so that outliers count less.

    Components are found one after another, each in what the earlier ones leave of feature space; each is a signed sum
    of the training rows, found by sign updates on the kernel matrix without eigenvectors. The result is deterministic.

    Args:
        n_components: number of components, or all (None, default); fewer are found if the kernel has a lower rank.
        kernel: "linear" (default), "rbf" exp(-gamma |x - y|^2), "precomputed", or a function of two tensors `[m, d]`
            and `[n, d]` that gives `[m, n]`, positive semidefinite.
        gamma: of "rbf". Default None, 1 / n_features; a width sigma is gamma = 1 / (2 sigma^2), and the thesis has
            sigma = n_features on standardised columns.
        center: whether to centre in feature space, default True.
        bit_flips: whether to improve each component by flips of single signs, default False.
        max_iter: largest number of sign updates per component, default 1000.

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
            hold 80 % of it; none if nothing varies, as with equal rows and center=False.
        outlier_means_, outlier_variances_: of the training scores on these components.
        n_iter_: largest number of sign updates of a component.
        n_components_: number of components found.

    Raises:
        ValueError: from `fit`, for parameters out of range, or rows that are all equal. A ConvergenceWarning says that
            a component still moved after max_iter updates.

    Notes:
        Time and memory are O(n^2), for the linear kernel too; each sign update is a product with the kernel matrix.
        The components are local maxima; `bit_flips` finds better ones. Source: C. Kim, Optimization Methods for Scale
        Invariant Problems in Machine Learning (Northwestern, 2020), chapter 2. The thesis centres its data but does not
        say whether in feature space, nor how new rows are projected: here by dual coefficients.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import L1KernelPCA
        >>> X = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1.0, 2.0]])
        >>> pca = L1KernelPCA(n_components=1).fit(X)
        >>> np.abs(pca.components_).round(2).tolist(), np.abs(pca.transform([[3.0, 3.0]])).round(2).tolist()
        ([[0.63, 0.77]], [[2.1]])
    """

    n_components: int | None = None
    _: KW_ONLY
    bit_flips: bool = False

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> L1KernelPCA:
        """Finds the components of rows `[n, n_features]`, or of their kernel matrix `[n, n]`; y is ignored."""
        rows = self._training_rows(X)
        kernel = self._training_kernel(rows, X)
        found = l1_kernel_pca(kernel, self.n_components, max_iter=self.max_iter, bit_flips=self.bit_flips)
        linear = self.kernel == "linear"
        self._keep(X, found.scores, found.alphas, found.alphas.T @ rows if linear else None)
        self.signs_ = same_kind(found.signs, X)
        self.n_iter_ = max(found.n_iter)
        means, variances = found.scores.mean(0), found.scores.var(0, correction=0)
        # Only rounding is left of scores that are all equal.
        rounding = 64 * torch.finfo(variances.dtype).eps
        variances[variances <= rounding**2 * found.scores.square().mean(0)] = 0
        largest = variances.sort(descending=True).values
        # The largest threshold at which the components above it hold the share, so that equal ones stay together.
        enough = int((largest.cumsum(0) < SHARE * largest.sum()).sum())
        chosen = ((variances >= largest[enough]) & (variances > 0)).nonzero().flatten()
        self.outlier_components_ = same_kind(chosen, X)
        self.outlier_means_ = same_kind(means[chosen], X)
        self.outlier_variances_ = same_kind(variances[chosen], X)
        return self

    @torch.no_grad()
    def outlier_score(self, X: Any) -> Any:
        """Gives squared distances of rows from the training mean along main components, in units of their variances.

        Fit with all components (n_components=None) for the model of the thesis, section 2.5: the 80 % are of the
        variance of the components found.

        Args:
            X: rows as for `transform`, `[m, ...]`.

        Returns:
            `[m]`, larger for likelier outliers, of the kind of X; 0 if no training scores varied.
        """
        scores = self._project(X)
        chosen = tensor_of(self.outlier_components_).to(scores.device)
        means, variances = (tensor_of(each, scores) for each in (self.outlier_means_, self.outlier_variances_))
        return same_kind(((scores[:, chosen] - means).square() / variances).sum(1), X)


@dataclass(eq=False, repr=False)
class LpKernelPCA(KernelDecomposition):
    """Kernel PCA that maximises the mean of |score|^p: p < 2 heeds outliers less than PCA, p > 2 seeks heavy tails.

    Components are orthonormal in feature space, found one after another by `scale_invariant_power`, each from the best
    of 50 rows drawn at random. With p >= 1 the objective is convex and no step lowers it; what is found is a local
    maximum, for p = 2 in general the global one.

    Args:
        n_components: number of components, default 1; fewer are found if the kernel has a lower rank.
        p: of the norm, at least 1. Default 3. 2 is PCA; for 1, `L1KernelPCA` finds better maxima by bit_flips and
            needs no eigenvectors.
        kernel: as in `L1KernelPCA`. Default "linear".
        gamma: of "rbf". Default None, 1 / n_features.
        center: whether to centre in feature space, default True.
        shift: added to every step in units of the multiplier, see `scale_invariant_power`. Default 0.
        tol: a component is found when a step turns it by less than 1 - cos = tol. Default 1e-10.
        max_iter: largest number of steps per component, default 1000.
        random_state: int, RandomState or None, for the rows to start from.

    Attributes:
        scores_: of the training rows, `[n, n_components_]`; the largest of each component is positive.
        components_: for the linear kernel, orthonormal vectors `[n_components_, n_features]`.
        alphas_: for other kernels, dual coefficients on the centred training rows, `[n, n_components_]`.
        n_iter_: largest number of steps of a component.
        n_components_: number of components found; mean_, X_fit_, gamma_ and kernel means as in `L1KernelPCA`.

    Raises:
        ValueError: from `fit`, for parameters out of range, or rows that are all equal. A ConvergenceWarning says that
            a component still moved after max_iter steps.

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

    n_components: int = 1
    _: KW_ONLY
    p: float = 3.0
    shift: float = 0.0
    tol: float = 1e-10
    random_state: Any = None

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> LpKernelPCA:
        """Finds the components of rows `[n, n_features]`, or of their kernel matrix `[n, n]`; y is ignored."""
        check_integer("n_components", self.n_components)
        # Below 1 steps may lower the objective.
        check_number("p", self.p, expected="a finite number of at least 1", allowed=lambda p: 1 <= p < math.inf)
        rows = self._training_rows(X)
        if self.kernel == "linear":
            directions = self._directions(rows)
            self._keep(X, rows @ directions, None, directions.T)
        else:
            # F `[n, r]` with F F' = K and B with F = K B, r the rank: x in R^r has the dual coefficients B x.
            kernel = self._training_kernel(rows, X)
            values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
            kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
            roots, vectors = values[kept].sqrt(), vectors[:, kept]
            factor, back = vectors * roots, vectors / roots
            directions = self._directions(factor)
            self._keep(X, factor @ directions, back @ directions, None)
        return self

    def _directions(self, factor: Tensor) -> Tensor:
        """Finds orthonormal columns `[r, n_components_]` of large mean |factor @ column|^p, for a factor `[n, r]`."""
        generator = generator_of(self.random_state)
        tolerance = float(factor.norm()) * (1e-10 if factor.dtype == torch.float64 else 1e-5)
        left, found = factor, factor.new_zeros(factor.shape[1], 0)
        counts: list[int] = []
        while len(counts) < self.n_components and float(left.norm()) > tolerance:
            start = _best_row(left, float(self.p), generator)
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


def _gradient(factor: Tensor, p: float) -> Callable[[Tensor], Tensor]:
    """Gives a positive multiple of the gradient of mean |factor @ x|^p."""

    def gradient(x: Tensor) -> Tensor:
        scores = factor @ x
        # In units of the largest score powers do not overflow. With p = 1 a score of 0 counts as positive: otherwise
        # its row would be lost for ever.
        scores = scores / scores.abs().max()
        return factor.T @ torch.where(scores < 0, -1.0, 1.0).to(scores).mul(scores.abs() ** (p - 1))

    return gradient


def _best_row(factor: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Gives a row `[r]` of largest mean |factor @ x|^p, x its direction, of `CANDIDATES` rows drawn by squared norm."""
    drawn = torch.multinomial(factor.square().sum(1).double().cpu(), CANDIDATES, replacement=True, generator=generator)
    rows = factor[drawn.to(factor.device)]
    rows = rows / rows.norm(dim=1, keepdim=True)
    scores = (factor @ rows.T).abs()
    return rows[(scores / scores.max()).pow(p).sum(0).argmax()]
