"""Parameters of dense-exponential random features (DERF), of which every positive feature of this package is one.

A DERF (FAVOR#, equation (13) and Theorem 4.1) is f_k(w, x) = D exp(w'A w + w'B_k x + x'C_k x) with w ~ N(0, I).
Here it is stored in an equivalent form: an invertible map G, applied as x -> G x and y -> G^-T y, and a factor L of the
covariance Sigma = L L' = I - 4A of a Gaussian proposal u = L w. Then B_1 = L'G, B_2 = L'G^-T, and

    log f_1 = log det(Sigma)/4 + (|w|^2 - |u|^2)/4 + u.(G x)    - |G x|^2/2
    log f_2 = log det(Sigma)/4 + (|w|^2 - |u|^2)/4 + u.(G^-T y) - |G^-T y|^2/2

Any invertible G and L give an unbiased estimate of exp(x . y); the variance is finite if Sigma > I/2, that is 8A < I.

A shift b moves the keys, exp(x . y) = exp(x . (y - b)) exp(x . b): y is replaced by y - b and log f_1 gains x . b. In
normalised attention that factor of the query cancels, so shifted keys cost nothing.

Weights w_m of single features, learned for given directions (`favor.calibrate`), enter as log w_m in log f_2. With them
the estimate is closer to the kernel on data like those they were learned from, and no longer unbiased. The same holds
for directions w_m that are learned themselves (`favor.train.distill`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from favor.features.linalg import add_diagonal, check_onnx, from_spectrum, trace
from favor.features.moments import Moments

_TENSORS = ("transform", "inverse", "factor", "shift", "log_weights", "directions")


@dataclass(frozen=True)
class Parameters:
    """A DERF in proposal form; leading dimensions broadcast against those of the data.

    Attributes:
        transform: G, `[..., d, d]`.
        inverse: G^-1, `[..., d, d]`.
        factor: L, `[..., d, d]`.
        maps: False where G = I, which then need not be applied.
        shift: b, `[..., d]`; None for no shift.
        log_weights: log w, `[..., M]`, of the M directions they were learned for; None for weights of 1.
        form: what is known of L: "identity", "triangular" or "full" (nothing).
        directions: omega, `[..., M, d]`, learned in the place of random ones; None for random ones.

    Example:
        >>> import torch, favor
        >>> x, y = torch.randn(2, 5, 8)
        >>> params = favor.features.get("sderf").fit(x, y)
        >>> torch.equal(params.transform, torch.eye(8))  # sderf maps nothing
        True
    """

    transform: Tensor
    inverse: Tensor
    factor: Tensor
    maps: bool = True
    shift: Tensor | None = None
    log_weights: Tensor | None = None
    form: Literal["identity", "triangular", "full"] = "full"
    directions: Tensor | None = None

    @classmethod
    def identity(cls, head_dim: int, *, dtype: torch.dtype, device: torch.device | str) -> Parameters:
        """Gives G = L = I: the positive features of FAVOR+, which need no statistics."""
        eye = torch.eye(head_dim, dtype=dtype, device=device)
        return cls(eye, eye, eye, maps=False, form="identity")

    @classmethod
    def from_matrices(cls, A: Tensor, B1: Tensor, B2: Tensor, *, tolerance: float = 1e-5) -> Parameters:
        """Makes a general DERF from the matrices of Theorem 4.1; C_1, C_2 and D follow from them.

        Args:
            A: symmetric `[..., d, d]` with 8A < I in the order of symmetric matrices (finite variance).
            B1, B2: `[..., d, d]` with B_1'(I - 4A)^-1 B_2 = I.
            tolerance: largest entry by which A - A' and B_1'(I - 4A)^-1 B_2 - I may differ from zero.

        Raises:
            ValueError: if a shape is wrong or a condition of the theorem does not hold; the message says which one
                and by how much.
        """
        d = A.shape[-1]
        for name, matrix in (("A", A), ("B1", B1), ("B2", B2)):
            if matrix.ndim < 2 or matrix.shape[-2:] != (d, d):
                raise ValueError(f"{name} must be [..., {d}, {d}] like A, got {tuple(matrix.shape)}.")
        eye = torch.eye(d, dtype=A.dtype, device=A.device)
        asymmetry = (A - A.transpose(-1, -2)).abs().max().item()
        if not asymmetry <= tolerance:  # NaN too
            raise ValueError(f"A must be symmetric; the largest entry of A - A' is {asymmetry:.3g}.")
        eigenvalues, eigenvectors = torch.linalg.eigh((A + A.transpose(-1, -2)) / 2)
        largest = eigenvalues.max().item()
        if largest >= 1 / 8:
            raise ValueError(
                f"8A < I must hold for a finite variance (Theorem 4.1), but A has the eigenvalue {largest:.4g} >= 1/8. "
                "Subtract a multiple of the identity from A."
            )
        inverse_sigma = torch.linalg.inv(eye - 4 * A)
        residual = (B1.transpose(-1, -2) @ inverse_sigma @ B2 - eye).abs().max().item()
        if not residual <= tolerance:
            raise ValueError(
                "B1' (I - 4A)^-1 B2 = I must hold (Theorem 4.1), but the largest entry of the difference is "
                f"{residual:.3g}. Given A and B1, take B2 = (I - 4A) inv(B1')."
            )
        factor = from_spectrum((1 - 4 * eigenvalues).sqrt(), eigenvectors)
        transform = torch.linalg.solve(factor, B1)
        return cls(transform, torch.linalg.inv(transform), factor)

    def to(self, like: Tensor) -> Parameters:
        """Converts all parts to the type and the device of another tensor."""
        return self._each(lambda part: part.to(like))

    def corrected(self, correction: Parameters) -> Parameters:
        """Moves these parameters by learned ones: G C, D L and b + c for a correction (C, D, c).

        A correction with C = D = I, c = 0 and no directions changes nothing.
        """
        shift = self.shift
        if correction.shift is not None:
            shift = correction.shift if shift is None else shift + correction.shift
        return replace(
            self,
            transform=self.transform @ correction.transform,
            inverse=correction.inverse @ self.inverse,
            factor=correction.factor @ self.factor,
            maps=True,
            shift=shift,
            form="full",
            directions=self.directions if correction.directions is None else correction.directions,
        )

    def heads(self, heads: Sequence[int]) -> Parameters:
        """Gives the parameters of some heads, given those of all `[Hk, d, d]`."""
        return self._each(lambda part: part[list(heads)])

    def tensors(self) -> list[Tensor]:
        """Gives all tensors that there are."""
        return [getattr(self, name) for name in _TENSORS if getattr(self, name) is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Parameters:
        given = [name for name in _TENSORS if getattr(self, name) is not None]
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in given}
        return replace(self, **changed)

    def split(self) -> list[Parameters]:
        """Splits parameters `[n, Hk, d, d]` along the first of four dimensions into n parameters `[1, Hk, d, d]`."""
        sizes = {"transform": 4, "inverse": 4, "factor": 4, "shift": 3}  # sequences share the directions and weights
        given = {name: getattr(self, name) for name in sizes}
        own = {name: part for name, part in given.items() if part is not None and part.ndim == sizes[name]}
        return [
            replace(self, **{name: part[number : number + 1] for name, part in own.items()})
            for number in range(len(self.factor))
        ]

    @property
    def sigma(self) -> Tensor:
        """Sigma = L L' = I - 4A, up to a rotation of w, `[..., d, d]`."""
        return self.factor @ self.factor.transpose(-1, -2)

    @property
    def log_det_sigma(self) -> Tensor:
        """Log det Sigma, `[...]`."""
        if self.form == "identity":
            return self.factor.new_zeros(self.factor.shape[:-2])
        if self.form == "triangular":  # a decomposition is many launches on a GPU
            return 2 * torch.diagonal(self.factor, dim1=-2, dim2=-1).abs().log().sum(-1)
        check_onnx()
        return 2 * torch.linalg.slogdet(self.factor).logabsdet

    def map_queries(self, x: Tensor) -> Tensor:
        """Computes G x for rows x `[..., L, d]`."""
        return x @ self.transform.transpose(-1, -2)

    def map_keys(self, y: Tensor) -> Tensor:
        """Computes G^-T (y - b) for rows y `[..., S, d]`."""
        return (y if self.shift is None else y - self.shift.unsqueeze(-2)) @ self.inverse

    def log_tilt(self, x: Tensor) -> Tensor | float:
        """Computes x . b, the part of log f_1 that belongs to the shift, `[..., L]`."""
        return 0.0 if self.shift is None else (x @ self.shift.unsqueeze(-1)).squeeze(-1)

    def rho(self, moments: Moments) -> Tensor:
        """Computes the mean over all pairs of log(1 + Var(f_1 f_2) / K^2), from moments alone, `[...]`.

        A diagnostic: an average over M features is usable if rho is at most about log M. Rho is infinite if the
        variance is.
        """
        cholesky, log_ratio, is_infinite = self._precision()
        cov = self.transform @ moments.cov_x @ self.transform.transpose(-1, -2)
        cov = cov + self.inverse.transpose(-1, -2) @ moments.cov_y @ self.inverse
        mean = self.map_queries(moments.mean_x.unsqueeze(-2)) + self.map_keys(moments.mean_y.unsqueeze(-2))
        second = cov + mean.transpose(-1, -2) @ mean
        value = log_ratio + trace(torch.cholesky_solve(second, cholesky))
        return value.masked_fill(is_infinite, torch.inf)

    def _precision(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the Cholesky factor of 2 Sigma - I, log det(Sigma) - log det(2 Sigma - I)/2, and where it has none."""
        cholesky, info = torch.linalg.cholesky_ex(add_diagonal(2 * self.sigma, -1.0))
        log_det = 2 * torch.diagonal(cholesky, dim1=-2, dim2=-1).log().sum(-1)
        return cholesky, self.log_det_sigma - log_det / 2, info != 0

    def log_relative_second_moment(self, z: Tensor) -> Tensor:
        """Computes log(1 + Var(f_1 f_2) / K^2) where z = G x + G^-T (y - b), `[..., d]` -> `[...]`.

        Equals log det(Sigma) - log det(2 Sigma - I)/2 + z'(2 Sigma - I)^-1 z, which is equation (15) divided by K^2.
        It is infinite where 2 Sigma - I is not positive definite.
        """
        cholesky, log_ratio, is_infinite = self._precision()
        batch = torch.broadcast_shapes(z.shape[:-2], cholesky.shape[:-2])
        columns = z.expand(*batch, *z.shape[-2:]).transpose(-1, -2)
        half = torch.linalg.solve_triangular(cholesky.expand(*batch, *cholesky.shape[-2:]), columns, upper=False)
        value = log_ratio.unsqueeze(-1) + half.square().sum(-2)
        return value.masked_fill(is_infinite.unsqueeze(-1), torch.inf)
