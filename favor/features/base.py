"""The interface that every family of random features implements, and the random directions omega."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from favor.features.moments import Moments, attention_received
from favor.features.parameters import Parameters
from favor.registry import FAMILIES, Family

Side = Literal["query", "key"]
Factorization = Literal["auto", "eigh", "cholesky", "newton_schulz"]


def draw_omega(
    num_features: int,
    head_dim: int,
    *,
    orthogonal: bool = True,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
    batch_shape: tuple[int, ...] = (),
) -> Tensor:
    """Draws directions omega on the CPU in float64; each row is marginally N(0, I_d).

    Each orthogonal row has an independent chi(d) length. So every row is exactly Gaussian, and every estimator that is
    unbiased with independent rows stays unbiased for any number of rows.

    Args:
        num_features: number of rows M, any positive integer (it need not be a multiple of `head_dim`).
        head_dim: dimension d of the rows.
        orthogonal: rows are orthogonal within consecutive blocks of d; else all rows are independent.
        antithetic: the second half of the rows is the negative of the first half (the last row of an odd M is
            left without its partner). Lowers the variance of features whose inputs are centred.
        generator: CPU generator; the global one by default.
        batch_shape: leading dimensions, for instance `(num_heads,)`; each has its own rows.

    Returns:
        omega `[*batch_shape, num_features, head_dim]`.

    Raises:
        ValueError: if `num_features` or `head_dim` is not a positive integer.

    Source: Choromanski et al., "Rethinking Attention with Performers" (2021), section 3.3.

    Example:
        >>> import torch
        >>> from favor.features import draw_omega
        >>> omega = draw_omega(8, 8, generator=torch.Generator().manual_seed(0))
        >>> gram = omega @ omega.T
        >>> bool((gram - gram.diagonal().diag()).abs().max() < 1e-10)
        True
    """
    for name, size in (("num_features", num_features), ("head_dim", head_dim)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}.")
    if antithetic:
        number = (num_features + 1) // 2
        half = draw_omega(number, head_dim, orthogonal=orthogonal, generator=generator, batch_shape=batch_shape)
        return torch.cat((half, -half), dim=-2)[..., :num_features, :].contiguous()
    if not orthogonal:
        return torch.randn(*batch_shape, num_features, head_dim, dtype=torch.float64, device="cpu", generator=generator)

    shape = (*batch_shape, math.ceil(num_features / head_dim), head_dim, head_dim)
    q, r = torch.linalg.qr(torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator))
    # QR alone is not Haar distributed: the signs of R's diagonal have to be moved into Q.
    q = q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
    lengths = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator).norm(dim=-1, keepdim=True)
    return (q.transpose(-1, -2) * lengths).flatten(-3, -2)[..., :num_features, :].contiguous()


# Ways to draw that most families share, by names that stand in compiled graphs.
DRAWS: dict[str, Callable[..., Tensor]] = {"plain": draw_omega, "antithetic": partial(draw_omega, antithetic=True)}


class RandomFeatures(Family, ABC):
    """A family of random features for the kernel K(x, y) = exp(alpha |x|^2 + x.y + alpha |y|^2).

    Args:
        alpha: scale of the quadratic terms; 0 (default) is the softmax kernel, -1/2 the Gaussian kernel.

    Example:
        >>> import torch, favor
        >>> favor.features.get("pos", alpha=-0.5)
        PosRF(alpha=-0.5)
        >>> favor.features.get("pos").draw(16, 8).shape
        torch.Size([16, 8])
    """

    antithetic: bool = False

    def __init__(self, *, alpha: float = 0.0) -> None:
        self.alpha = alpha

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha})"

    @property
    def draws_like(self) -> str | RandomFeatures:
        """A name that tells how it draws, constant for a compiler; the family itself if it has no such name.

        A family whose options change the way it draws overrides this.
        """
        if type(self).draw is RandomFeatures.draw:
            return "antithetic" if self.antithetic else "plain"
        return self.name if FAMILIES.get(getattr(self, "name", "")) is type(self) else self

    def draw(
        self,
        num_features: int,
        head_dim: int,
        *,
        orthogonal: bool = True,
        antithetic: bool | None = None,
        generator: torch.Generator | None = None,
        batch_shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Draws omega, the random directions; the arguments are those of `favor.features.draw_omega`.

        They come in opposite pairs by default in families that gain from it.

        Returns:
            `[*batch_shape, num_features, head_dim]`, float64, on the CPU.
        """
        return draw_omega(
            num_features,
            head_dim,
            orthogonal=orthogonal,
            antithetic=self.antithetic if antithetic is None else antithetic,
            generator=generator,
            batch_shape=batch_shape,
        )


class PositiveFeatures(RandomFeatures):
    """Positive random features: a DERF whose parameters come in closed form from statistics of the data.

    A subclass says how by `fit_moments`; all of them share everything else.

    Args:
        alpha: see `RandomFeatures`.
        factorization: one of the `factorizations` of the class, or "auto" (default), the fastest one on the device.

    Raises:
        ValueError: for another factorization.

    Example:
        >>> import torch, favor
        >>> x, y = torch.randn(2, 5, 8)
        >>> features = favor.features.get("gerf")
        >>> params = features.fit(x, y)
        >>> bool(features.objective(x, y, params) <= features.objective(x, y, favor.features.PosRF().fit(x, y)))
        True
    """

    needs_statistics = True
    takes_parameters = True
    supports_window = True
    supports_state = True
    has_kernel = True
    # The kind of `favor.kernels.gpu.fits` that computes `fit_moments` of one factorization, and which. Not inherited.
    fused_fit: tuple[str, str] | None = None
    num_queries = 0  # whose softmax rows weigh the keys in the moments; 0 weighs all keys equally

    def __init__(self, *, alpha: float = 0.0, factorization: Factorization = "auto") -> None:
        super().__init__(alpha=alpha)
        allowed = ("auto", *self.factorizations)
        if factorization not in allowed:
            raise ValueError(f"factorization must be one of {', '.join(map(repr, allowed))}; got {factorization!r}.")
        self.factorization = factorization

    def moments(
        self,
        x: Tensor,
        y: Tensor,
        x_mask: Tensor | None = None,
        y_mask: Tensor | None = None,
        *,
        scale: float = 1.0,
        is_causal: bool = False,
    ) -> Moments:
        """Computes the statistics from which the parameters come.

        Args:
            x, y: queries `[..., L, d]` and keys `[..., S, d]`.
            x_mask, y_mask: boolean `[..., L]`, `[..., S]`; False rows are left out of every statistic.
            scale: the statistics are those of sqrt(scale) x and sqrt(scale) y.
            is_causal: whether query i attends to keys 0 ... S - L + i only, for statistics weighted by attention.
        """
        weights, number = None, self.num_queries
        if number:
            weights = attention_received(x, y, x_mask, y_mask, number, scale=scale, is_causal=is_causal)
        return Moments.from_samples(x, y, x_mask, y_mask, weights).scaled(scale)

    def fit_moments(self, moments: Moments) -> Parameters:
        """Gives the parameters that minimise the objective (14) of FAVOR# in this family, from moments alone.

        Families without statistics have G = L = I, whatever the data, unless they say otherwise.
        """
        if self.needs_statistics:
            raise NotImplementedError(f"{type(self).__name__} needs statistics, and has no fit_moments for them.")
        mean = moments.mean_x
        return Parameters.identity(mean.shape[-1], dtype=mean.dtype, device=mean.device)

    @torch.no_grad()
    def fit(self, x: Tensor, y: Tensor, *, x_mask: Tensor | None = None, y_mask: Tensor | None = None) -> Parameters:
        """Fits parameters in closed form to queries x `[..., L, d]` and keys y `[..., S, d]`.

        The optimum does not depend on alpha. No gradient passes: any parameters keep the estimate unbiased, so they
        are constants of the estimator.

        Args:
            x, y: samples; half precision is raised to float32.
            x_mask, y_mask: boolean `[..., L]`, `[..., S]`; False rows are left out of every statistic.
        """
        return self.fit_moments(self.moments(x, y, x_mask, y_mask))

    def directions(self, omega: Tensor, params: Parameters, root: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the three tensors per head that attention needs besides the key bias.

        Up to terms that depend on the query alone, log(f_1 f_2) = x . uq_m + y . uk_m + offset_m + bias(y).

        Args:
            omega: `[..., M, d]` from `draw`, times `root`.
            params: from `fit`.
            root: factor of omega, and so of both directions: with the root of the scale of the logits, directions apply
                to queries and keys instead of x and y.

        Returns:
            query directions `[..., M, d]`, key directions `[..., M, d]` and offsets `[..., M]`.
        """
        if params.form == "identity":
            u, offset = omega, omega.new_zeros(omega.shape[:-1])
        else:
            u = omega @ params.factor.transpose(-1, -2)
            offset = (omega.square().sum(-1) - u.square().sum(-1)) / (2 * root**2)
        to_query, to_key = u, u
        if params.maps:
            to_query, to_key = u @ params.transform, u @ params.inverse.transpose(-1, -2)
        if params.shift is not None:
            offset = offset - (to_key @ params.shift.unsqueeze(-1)).squeeze(-1) / root
        return to_query, to_key, self._weighted(offset, params)

    def key_bias(self, y: Tensor, params: Parameters) -> Tensor:
        """Gives the quadratic term of the keys, -|G^-T (y - b)|^2/2 + alpha |y|^2, `[..., S]`."""
        return self._quadratic(y, params.map_keys(y))

    def log_phi(self, x: Tensor, omega: Tensor, params: Parameters, side: Side = "query") -> Tensor:
        """Computes log f_1 (side "query") or log f_2 (side "key"), equation (13) of FAVOR#.

        mean over m of exp(log_phi(x, side="query") + log_phi(y, side="key")) is an unbiased estimate of K(x, y), unless
        the parameters hold weights, which belong to log f_2.

        Args:
            x: `[..., L, d]`.
            omega: `[..., M, d]` from `draw`.
            params: from `fit`.
            side: which of the two functions.

        Returns:
            `[..., L, M]`.
        """
        if side not in ("query", "key"):
            raise ValueError(f'side must be "query" or "key", got {side!r}.')
        u = omega @ params.factor.transpose(-1, -2)
        mapped = params.map_queries(x) if side == "query" else params.map_keys(x)
        quadratic = self._quadratic(x, mapped) + (params.log_tilt(x) if side == "query" else 0.0)
        weight = (omega.square().sum(-1) - u.square().sum(-1)) / 4 + params.log_det_sigma[..., None] / 4
        if side == "key":
            weight = self._weighted(weight, params)
        return mapped @ u.transpose(-1, -2) + weight.unsqueeze(-2) + quadratic.unsqueeze(-1)

    def kernel(self, x: Tensor, y: Tensor, omega: Tensor, params: Parameters) -> Tensor:
        """Estimates K for all pairs, `[..., L, S]`."""
        log_x = self.log_phi(x, omega, params, side="query")
        log_y = self.log_phi(y, omega, params, side="key")
        top_x, top_y = log_x.amax(-1, keepdim=True), log_y.amax(-1, keepdim=True)
        product = (log_x - top_x).exp() @ (log_y - top_y).exp().transpose(-1, -2)
        return product * (top_x + top_y.transpose(-1, -2)).exp() / omega.shape[-2]

    def log_second_moment(self, x: Tensor, y: Tensor, params: Parameters) -> Tensor:
        """Computes log E[(f_1(x_i) f_2(y_j))^2], the first term of equation (15), for all pairs `[..., L, S]`."""
        return 2 * self._log_kernel(x, y) + self.log_relative_second_moment(x, y, params)

    def log_variance(self, x: Tensor, y: Tensor, params: Parameters) -> Tensor:
        """Computes log Var(f_1(x_i) f_2(y_j)), equation (15), for all pairs `[..., L, S]`; -inf where it is zero."""
        relative = self.log_relative_second_moment(x, y, params)
        # log(expm1(r)) without overflow for large r.
        return 2 * self._log_kernel(x, y) + relative + torch.log(-torch.expm1(-relative))

    def log_relative_second_moment(self, x: Tensor, y: Tensor, params: Parameters) -> Tensor:
        """Computes log(1 + Var / K^2) for all pairs `[..., L, S]`; does not depend on alpha."""
        z = params.map_queries(x).unsqueeze(-2) + params.map_keys(y).unsqueeze(-3)
        return params.log_relative_second_moment(z.flatten(-3, -2)).unflatten(-1, (x.shape[-2], y.shape[-2]))

    def objective(self, x: Tensor, y: Tensor, params: Parameters) -> Tensor:
        """Computes the shifted log-variance, equation (14): mean over all pairs of log E[(f_1 f_2)^2], `[...]`."""
        return self.log_second_moment(x, y, params).mean((-1, -2))

    @staticmethod
    def _weighted(logs: Tensor, params: Parameters) -> Tensor:
        """Multiplies features by their weights, in logarithms `[..., M]`."""
        weights = params.log_weights
        if weights is None:
            return logs
        if weights.shape[-1] != logs.shape[-1]:
            raise ValueError(
                f"the parameters hold weights of {weights.shape[-1]} features, and there are {logs.shape[-1]}; weights "
                "are learned for given directions and cannot be used with others."
            )
        return logs + weights

    def _log_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
        return x @ y.transpose(-1, -2) + self.alpha * squares

    def _quadratic(self, x: Tensor, mapped: Tensor) -> Tensor:
        value = -mapped.square().sum(-1) / 2
        return value if self.alpha == 0 else value + self.alpha * x.square().sum(-1)


class SignedFeatures(RandomFeatures):
    """Features that may have any sign or are not exponentials: the baselines of the papers.

    They have no parameters. Attention uses phi(x) exp(log_scale(x)) and cancels what depends on the query alone.

    Args:
        alpha: see `RandomFeatures`.

    Example:
        >>> import favor
        >>> isinstance(favor.features.get("trig"), favor.features.SignedFeatures)
        True
    """

    @abstractmethod
    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """Computes the feature values without their scale, `[..., L, F]`."""

    def log_scale(self, x: Tensor) -> Tensor:
        """Gives the log of a positive factor of all features of a row, `[..., L]`; zero if not overridden."""
        return x.new_zeros(x.shape[:-1])
