"""Positive random features: PosRF (FAVOR+), GERF (FAVOR++), SADERF, ADERF, SDERF (FAVOR#), and the general DERF.

Each family is the DERF of `favor.features.parameters` with a restricted G and Sigma. Its `fit_moments` is the global
minimiser of the shifted log-variance (14) in that family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favor.features.base import PositiveFeatures
from favor.features.linalg import add_diagonal, cholesky, eigh, from_spectrum, newton_schulz, trace, without_eigh
from favor.features.moments import Moments
from favor.features.parameters import Parameters
from favor.registry import register

SHARP = ("favor#", "favor_sharp")  # the backend that the families of FAVOR# share


def optimal_a(phi: Tensor) -> Tensor:
    """Finds the minimiser over A < 1/8 of log(1 - 4A) - log(1 - 8A)/2 + phi/(1 - 8A), phi >= 0 (FAVOR#, Lemma A.1).

    Args:
        phi: numbers of any shape; mean |x + y|^2 / d in GERF.

    Returns:
        A, in the shape of `phi`.

    Example:
        >>> import torch, favor
        >>> favor.features.optimal_a(torch.tensor([0.0, 1.0]))
        tensor([ 0.0000, -0.3202])
    """
    return (1 - _inverse_gamma(phi)) / 8


def optimal_sigma(phi: Tensor) -> Tensor:
    """Computes 1 - 4 A with A = `optimal_a(phi)`: the variance of the proposal along one direction."""
    return (1 + _inverse_gamma(phi)) / 2


def _inverse_gamma(phi: Tensor) -> Tensor:
    phi = phi.clamp(min=0)  # phi is a mean of squares; rounding may put it below zero
    return (2 * phi + 1 + ((2 * phi + 1).square() + 8 * phi).sqrt()) / 2


@register
class PosRF(PositiveFeatures):
    """Positive features of FAVOR+: f(w, x) = exp(w.x - |x|^2/2).

    Relative variance exp(|x + y|^2) - 1. Source: Choromanski et al., "Rethinking Attention with Performers" (2021),
    Lemma 1.

    Args:
        alpha, factorization: see `PositiveFeatures`.

    Example:
        >>> import torch, favor
        >>> favor.features.PosRF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "pos"
    backends = ("favor+", "favor_plus")
    needs_statistics = False  # G = L = I


@register
class GERF(PositiveFeatures):
    """Generalised exponential features of FAVOR++: f(w, x) = D exp(A |w|^2 + B w.x - |x|^2/2).

    B = sqrt(1 - 4A), D = (1 - 4A)^(d/4), and A = optimal_a(mean |x + y|^2 / d), one number for all directions.
    Source: Likhosherstov et al., "Chefs' Random Tables" (2022), Theorem 3.1; FAVOR#, equations (11) to (13), where the
    printed C |x|^2/2 has to read C |x|^2.

    Args:
        alpha, factorization: see `PositiveFeatures`.

    Example:
        >>> import torch, favor
        >>> favor.features.GERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "gerf"
    backends = ("favor++", "favor_plus_plus")
    fused_fit = ("isotropic", "auto")

    def fit_moments(self, moments: Moments) -> Parameters:
        """Takes A from the mean squared norm of x + y, which follows from traces and means."""
        eye = torch.eye(moments.head_dim, dtype=moments.mean_x.dtype, device=moments.mean_x.device)
        phi = (moments.trace_sum + 2 * moments.cross) / moments.head_dim
        return Parameters(eye, eye, optimal_sigma(phi).sqrt()[..., None, None] * eye, maps=False, form="triangular")


class Regularised(PositiveFeatures):
    """Families that divide by second moments and so need them regular.

    Args:
        alpha, factorization: see `PositiveFeatures`.
        regularization: t I is added to both second moments, t = regularization (tr M1 + tr M2)/(2d) + floor.
            Default 1e-2; 0 with floor 0 is the paper's formula, which is undefined for singular data.
        floor: absolute part of t, default 1e-4.
    """

    pooled_options = {"regularization": 0.1}  # noqa: RUF012

    def __init__(self, *, regularization: float = 1e-2, floor: float = 1e-4, **options: Any) -> None:
        super().__init__(**options)
        if regularization < 0 or floor < 0:
            raise ValueError(f"regularization and floor must not be negative, got {regularization} and {floor}.")
        self.regularization = regularization
        self.floor = floor


@register
class SADERF(Regularised):
    """Simplified asymmetric features of FAVOR#: GERF on Psi x and Psi^-1 y with a diagonal Psi.

    Psi_ll = (mean y_l^2 / mean x_l^2)^(1/4), equation (20) of FAVOR#.

    Args:
        alpha, factorization, regularization, floor: see `Regularised`.

    Example:
        >>> import torch, favor
        >>> favor.features.SADERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "saderf"
    backends = SHARP
    factorizations = ("eigh",)
    fused_fit = ("diagonal", "eigh")

    def fit_moments(self, moments: Moments) -> Parameters:
        """Takes Psi from the diagonals of the second moments, then A as in GERF."""
        moments = moments.regularised(moments.ridge(self.regularization, self.floor))
        diag_x = torch.diagonal(moments.second_x, dim1=-2, dim2=-1)
        diag_y = torch.diagonal(moments.second_y, dim1=-2, dim2=-1)
        psi = (diag_y / diag_x).pow(0.25)
        scaled = (psi.square() * diag_x).sum(-1) + (diag_y / psi.square()).sum(-1)
        sigma = optimal_sigma((scaled + 2 * moments.cross) / moments.head_dim)
        eye = torch.eye(moments.head_dim, dtype=psi.dtype, device=psi.device)
        factor = sigma.sqrt()[..., None, None] * eye
        return Parameters(torch.diag_embed(psi), torch.diag_embed(1 / psi), factor, form="triangular")


@register
class ADERF(Regularised):
    """Asymmetric features of FAVOR# (Theorem 4.2): A a multiple of the identity, B_1 and B_2 dense.

    G'G is the geometric mean of M_1^-1 and M_2, the only symmetric positive F with F M_1 F = M_2; this is Theorem 4.2
    up to a rotation of w.

    Args:
        alpha, regularization, floor: see `Regularised`.
        factorization: how roots of matrices are taken, "eigh" or "newton_schulz", by matrix products alone; "auto"
            (default) is the first on a CPU, the second elsewhere.

    Raises:
        ValueError: for an unknown factorization or a negative regularization.

    Example:
        >>> import torch, favor
        >>> favor.features.ADERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "aderf"
    backends = SHARP
    factorizations = ("eigh", "newton_schulz")
    fused_fit = ("asymmetric", "newton_schulz")

    def fit_moments(self, moments: Moments) -> Parameters:
        """Computes G by the roots of three matrices, then A as in GERF on the transformed data."""
        moments = moments.regularised(moments.ridge(self.regularization, self.floor))
        form = without_eigh(self.factorization, moments.second_x, "newton_schulz")
        roots = newton_schulz if form == "newton_schulz" else _roots
        root, inverse_root = roots(moments.second_x)
        product = root @ moments.second_y @ root
        if form == "newton_schulz":  # it diverges if rounding brought an eigenvalue below zero
            product = add_diagonal(product, torch.finfo(product.dtype).eps * trace(product))
        mean = inverse_root @ roots(product)[0] @ inverse_root
        # tr(G M_1 G') = tr(G^-T M_2 G^-1) = tr(F M_1) is the sum of the singular values in Theorem 4.2.
        nuclear = trace(mean @ moments.second_x)
        sigma = optimal_sigma((2 * nuclear + 2 * moments.cross) / moments.head_dim)
        eye = torch.eye(moments.head_dim, dtype=mean.dtype, device=mean.device)
        return Parameters(*roots(mean), sigma.sqrt()[..., None, None] * eye, form="triangular")


@register
class SDERF(PositiveFeatures):
    """Symmetric features of FAVOR# (Theorem 4.3): G = I and a dense A with the eigenvectors of N.

    N = mean over pairs of (x + y)(x + y)'. No matrix of the data is inverted, so any data are valid: one token, fewer
    tokens than dimensions, zeros.

    Args:
        alpha: see `RandomFeatures`.
        factorization: "eigh" is the optimum of the theorem. "newton_schulz" is the same optimum without an
            eigendecomposition, by matrix products alone; "auto" (default) is the first on a CPU, the second elsewhere.
            "cholesky" takes Sigma = I + N, which exceeds the optimal objective by at most 0.0071 per direction.

    Raises:
        ValueError: for an unknown factorization.

    Example:
        >>> import torch, favor
        >>> favor.features.SDERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "sderf"
    backends = SHARP
    factorizations = ("eigh", "newton_schulz", "cholesky")
    fused_fit = ("symmetric", "newton_schulz")

    def fit_moments(self, moments: Moments) -> Parameters:
        """Computes Sigma = g(N) as a function of the matrix, or I + N."""
        second = moments.pair_second_moment
        eye = torch.eye(moments.head_dim, dtype=second.dtype, device=second.device)
        form = without_eigh(self.factorization, second, "newton_schulz")
        if form != "eigh":
            # Large moments of few tokens may have eigenvalues below zero by rounding: there is no Cholesky factor then,
            # and the iteration would blow them up.
            second = add_diagonal(second, 2 * torch.finfo(second.dtype).eps * trace(second))
        if form == "cholesky":
            factor = cholesky(eye + second)
        elif form == "newton_schulz":
            factor = _sigma_root(second, eye)
        else:
            values, vectors = eigh(second)
            # The symmetric root does not depend on signs or order of eigenvectors, which differ between devices.
            factor = from_spectrum(optimal_sigma(values).sqrt(), vectors)
        return Parameters(eye, eye, factor, maps=False, form="triangular" if form == "cholesky" else "full")


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = eigh(matrix)
    return from_spectrum(values.sqrt(), vectors), from_spectrum(values.rsqrt(), vectors)


def _sigma_root(second: Tensor, eye: Tensor) -> Tensor:
    """Computes the root of `optimal_sigma` as a function of a matrix N, without its eigenvectors.

    It takes R = (4 N^2 + 12 N + I)^(1/2), the product of the commuting roots of 2 N + (3 - 8^(1/2)) I and
    2 N + (3 + 8^(1/2)) I: each of these matrices has the condition of N and not of its square.
    """
    low, high = (newton_schulz(2 * second + (3 + sign * 8**0.5) * eye)[0] for sign in (-1, 1))
    root = (low @ high + high @ low) / 2
    return newton_schulz(3 * eye / 4 + second / 2 + root / 4)[0]


class DERF(PositiveFeatures):
    """Dense-exponential features with parameters given by the user (FAVOR#, Theorem 4.1).

    Args:
        A, B1, B2: `[..., d, d]`, validated by `Parameters.from_matrices`.
        alpha: see `RandomFeatures`.

    Raises:
        ValueError: if the conditions of Theorem 4.1 do not hold.

    Example:
        >>> import torch, favor
        >>> eye = torch.eye(8)
        >>> features = favor.features.DERF(0 * eye, eye, eye)  # A = 0 and B = I are FAVOR+
        >>> x = torch.randn(5, 8)
        >>> bool(features.fit(x, x).shift is None)
        True
    """

    name = "derf"
    needs_statistics = False

    def __init__(self, A: Tensor, B1: Tensor, B2: Tensor, *, alpha: float = 0.0) -> None:
        super().__init__(alpha=alpha)
        self.parameters = Parameters.from_matrices(A, B1, B2)

    def fit_moments(self, moments: Moments) -> Parameters:
        """Gives the parameters of the user, in the type and on the device of the data."""
        return self.parameters.to(moments.mean_x)
