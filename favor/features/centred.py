"""Centred dense features: cDERF, the optimum over all G, Sigma and key shifts, and wDERF, weighted by attention.

These families are not in the FAVOR# paper, which leaves the optimum over all dense-exponential features open. Once the
keys are shifted by b = mean(y) + F mean(x), F = G'G, the mean of z = G x + G^-T (y - b) vanishes, the objective (14)
depends on the covariances C1, C2 of queries and keys alone, and no G has a spectrum of
N = G C1 G' + G^-T C2 G^-1 below that of the geometric mean F = C1^-1 # C2, the positive F with F C1 F = C2.
"""

from __future__ import annotations

from typing import Any

import torch

from favor.features.linalg import add_diagonal, cholesky, eigh, from_spectrum, newton_schulz, trace, without_eigh
from favor.features.moments import Moments
from favor.features.parameters import Parameters
from favor.features.positive import SHARP, Regularised, optimal_sigma
from favor.registry import register

_MOST_QUERIES = 2**14  # each has a logit for each key


@register
class CDERF(Regularised):
    """Centred dense features: the global minimiser of (14) over G, Sigma and the shift of the keys.

    With C1 = R R' (Cholesky) and R'C2 R = U S^2 U' this is G = U S^(1/2) U'R^-1, which makes N = 2 U S U' diagonal in
    the same basis, and Sigma = g(N) as in Theorem 4.3 of FAVOR#. Directions come in opposite pairs, which helps since z
    has mean zero.

    Args:
        alpha: see `RandomFeatures`.
        factorization: "eigh", one eigendecomposition; "cholesky" takes the root by Newton-Schulz iteration and
            Sigma = I + N, which needs matrix products and Cholesky factors only; "auto" (default) is the first on a
            CPU, the second elsewhere.
        regularization, floor: t I is added to both covariances, t = regularization (tr C1 + tr C2)/(2d) + floor;
            defaults 1e-2 and 1e-4.

    Raises:
        ValueError: for an unknown factorization or a negative regularization.

    Example:
        >>> import torch, favor
        >>> favor.features.CDERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "cderf"
    backends = SHARP
    factorizations = ("eigh", "cholesky")
    fused_fit = ("centred", "cholesky")
    learns_matrices = True
    antithetic = True

    def fit_moments(self, moments: Moments) -> Parameters:
        """Takes G and Sigma from the covariances, and the shift from the means."""
        ridge = moments.ridge(self.regularization, self.floor, centred=True)
        moments = moments.regularised(ridge)
        root = cholesky(moments.cov_x)
        product = root.transpose(-1, -2) @ moments.cov_y @ root
        decomposes = without_eigh(self.factorization, product, "cholesky") == "eigh"
        if decomposes:
            values, vectors = eigh(product, ridge.square())  # both covariances are at least t I
            spread = values.sqrt()
            transform = torch.linalg.solve_triangular(
                root, from_spectrum(spread.sqrt(), vectors), upper=False, left=False
            )
            inverse = root @ from_spectrum(spread.rsqrt(), vectors)
            # In the basis of the eigenvectors, so that neither their signs nor their order matter.
            factor = from_spectrum(optimal_sigma(2 * spread).sqrt(), vectors)
        else:
            # 1e-5 of the trace is kept as the least eigenvalue, so that a Cholesky factor exists.
            least = 1e-5 * trace(product).clamp(min=torch.finfo(product.dtype).tiny).sqrt()
            middle = add_diagonal(newton_schulz(product, iterations=14)[0], least)
            upper = cholesky(middle).transpose(-1, -2)
            transform = torch.linalg.solve_triangular(root, upper, upper=False, left=False)
            inverse = torch.linalg.solve_triangular(upper, root, upper=True, left=False)
            second = transform @ moments.cov_x @ transform.transpose(-1, -2)
            second = second + inverse.transpose(-1, -2) @ moments.cov_y @ inverse
            factor = cholesky(add_diagonal(second, 1.0))
        mapped = (transform @ moments.mean_x.unsqueeze(-1)).transpose(-1, -2) @ transform
        shift = moments.mean_y + mapped.squeeze(-2)
        return Parameters(transform, inverse, factor, shift=shift, form="full" if decomposes else "triangular")


@register
class WDERF(CDERF):
    """cDERF with the keys weighted by the attention they receive.

    The objective (14) weighs all pairs alike, but the error of attention comes from the pairs with large weights. So
    mean and covariance of the keys are taken under the mean softmax row of a few queries.

    Args:
        alpha, factorization, regularization, floor: see `CDERF`.
        num_queries: number of queries whose exact attention gives the weights, evenly spaced over those that count;
            default 16. It costs num_queries x S products.

    Raises:
        ValueError: if `num_queries` is less than 1 or more than 16384, or for options that `CDERF` refuses.

    Example:
        >>> import torch, favor
        >>> favor.features.WDERF().fit(torch.randn(5, 8), torch.randn(7, 8)).sigma.shape
        torch.Size([8, 8])
    """

    name = "wderf"
    backends = SHARP
    is_default = True
    fused_fit = ("centred", "cholesky")
    num_queries = 16

    def __init__(self, *, num_queries: int = 16, **options: Any) -> None:
        super().__init__(**options)
        if not 1 <= num_queries <= _MOST_QUERIES:
            raise ValueError(f"num_queries must be from 1 to {_MOST_QUERIES}, got {num_queries}.")
        self.num_queries = num_queries
