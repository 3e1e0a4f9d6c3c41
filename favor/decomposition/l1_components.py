"""Components of largest L1 dispersion in the feature space of a kernel, from its matrix alone."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from favor.decomposition.inputs import same_kind
from favor.decomposition.kernels import check_count, check_diagonal, checked_kernel


class L1Components(NamedTuple):
    """What `l1_kernel_pca` found, of the kind of the kernel matrix.

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
    """Unit vectors x of largest sum_i |Phi(a_i)'x|, one after another, each in what the earlier ones leave.

    x is a multiple of sum_i c_i Phi(a_i) with signs c, and c <- sgn(K c) never lowers c'Kc: it ends after finitely many
    steps in a local maximum. The start is the observation that is itself the best direction. This is dispersion
    maximised in the L1 norm; it does not minimise the L1 error of reconstruction. An iteration costs O(n^2).

    Args:
        K: kernel matrix `[n, n]`, symmetric and positive semidefinite; centre it (K - 1K/n - K1/n + 1K1/n^2) for
            dispersion about the mean. Positive semidefiniteness is not checked; without it c'Kc may fall.
        n_components: p, or all (None, default). Fewer are given where the rank of K is lower.
        max_iter: largest number of sign updates a component. Default 1000; they seldom exceed 25.
        bit_flips: whether to flip single signs that raise c'Kc after the updates ended, the best first, and to repeat
            both until neither moves. O(n) a flip; finds better maxima. Default False.

    Returns:
        `L1Components(scores, signs, alphas, n_iter)`.

    Raises:
        ValueError: for a matrix that is not square, symmetric and finite with a diagonal >= 0, or an option out of
            range.

    Warns:
        ConvergenceWarning: if a component still moved after max_iter updates.

    References:
        C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), Algorithm 1
        and chapter 2. There sgn(0) is left open, and 0 would drop an observation for good: here a tie keeps its sign,
        at the start it is +1. Observations that deflation has used up are no starts, and all tolerances are relative
        to K. Dual coefficients and flips are not in the thesis.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import l1_kernel_pca
        >>> found = l1_kernel_pca(np.diag([2.0, 1.0, 1.0, 1.0]), 1)
        >>> float((found.scores**2).sum().round(6)), found.signs.tolist()
        (1.4, [[1.0, 1.0, 1.0, 1.0]])
    """
    check_count("n_components", n_components, optional=True)
    check_count("max_iter", max_iter)
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
            warnings.warn(
                f"component {len(n_iter)} still moved after max_iter={max_iter} sign updates; raise max_iter.",
                ConvergenceWarning,
                stacklevel=2,
            )
        score = image / value**0.5
        alpha = (c - alphas @ (scores.T @ c)) / value**0.5
        left -= torch.outer(score, score)
        scores, signs, alphas = (torch.column_stack(pair) for pair in ((scores, score), (signs, c), (alphas, alpha)))
        n_iter.append(count)
    return L1Components(same_kind(scores, K), same_kind(signs.T, K), same_kind(alphas, K), tuple(n_iter))


def _component(K: Tensor, max_iter: int, bit_flips: bool, tolerance: float) -> tuple[Tensor, Tensor, int, bool]:
    """Signs c, K c, the number of updates, and whether they came to rest."""
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
    """Signs of the observation whose direction has the largest dispersion."""
    squares = K.diagonal()
    dispersion = K.abs().sum(0) / squares.clamp(min=torch.finfo(K.dtype).tiny).sqrt()
    dispersion[squares <= 1e-12 * squares.max()] = -torch.inf
    return _signs(K[:, dispersion.argmax()], torch.ones_like(squares))


def _signs(values: Tensor, ties: Tensor) -> Tensor:
    return torch.where(values == 0, ties, values.sign())


def _flip(K: Tensor, c: Tensor, image: Tensor, tolerance: float) -> bool:
    """Flips single signs in place while c'Kc gains, with K c kept up to date; whether any was flipped."""
    squares, flipped = K.diagonal(), False
    while True:
        # c'Kc gains 4 times this.
        gain, i = (squares - c * image).max(0)
        if not 4 * float(gain) > tolerance * float(c @ image):
            return flipped
        image -= 2 * c[i] * K[:, i]
        c[i] = -c[i]
        flipped = True
