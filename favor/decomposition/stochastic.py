"""Stochastic scale-invariant power iteration over functions of rows: S-SCI-PI."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from favor.decomposition.epochs import Objective, StochasticPower
from favor.decomposition.inputs import check_number
from favor.decomposition.rows import row_source, same_kind_as_rows

GradientFunction = Callable[[Tensor, Tensor], Tensor]


class PowerOfProducts(Objective):
    """f_i(x) = |a_i'x|^p / p, p >= 1 the degree."""

    def __init__(self, degree: float) -> None:
        self.degree = degree

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean gradient over rows at x."""
        products = rows @ x
        return rows.T @ (products.sign() * products.abs() ** (self.degree - 1)) / len(rows)


class MixtureLikelihood(Objective):
    """f_i(x) = log(sum_k a_ik x_k^2): log-likelihood of proportions x^2 for densities a_ik >= 0."""

    degree = 0.0

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean gradient over rows at x."""
        return 2 * x * (rows.T @ (1 / (rows @ x.square()))) / len(rows)

    def value(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean of f_i over rows."""
        return (rows @ x.square()).log().mean()

    def admitted(self, x: Tensor, after: Tensor) -> Tensor:
        """Leaves entries unchanged that noise would make negative."""
        return torch.where(after < 0, x, after)


class FromGradient(Objective):
    """f of some degree (0 if additive), known by the mean gradient `[d]` over rows `[b, d]` at x `[d]`."""

    def __init__(self, function: GradientFunction, degree: float) -> None:
        self.function, self.degree = function, degree

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean gradient over rows at x."""
        found = self.function(rows, x)
        if not isinstance(found, Tensor) or found.shape != x.shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"objective must give the mean gradient, a tensor {tuple(x.shape)}, got {got}.")
        return found.to(x)


@dataclass(eq=False, repr=False)
class StochasticSCIPI(StochasticPower):
    """Maximises a mean of scale-invariant functions of rows on the unit sphere by variance-reduced power steps.

    max (1/n) sum_i f_i(x) with |x| = 1, where f_i(c x) = |c|^p f_i(x) for all i, or f_i(c x) = f_i(x) + b log|c|
    (degree 0). It follows the gradient itself, which needs an f that is convex, or of degree 0. With p = 2 it is
    `VRPower`. Rows are not changed: subtract means first if they should be centred.

    An epoch that lowers the objective is undone, and eta is halved; so the end is a local maximum, for degree 0 and
    proportions the global one.

    Args:
        objective: "lp" (default): f_i = |a_i'x|^p / p, whose maxima are principal components of the p-norm.
            "mixture": f_i = log(sum_k a_ik x_k^2) for rows a_i >= 0, likelihoods of n observations under
            n_features components; degree 0. Or a function of rows `[b, n_features]` and x `[n_features]`, both tensors,
            that gives the mean of grad f_i(x) over these rows.
        n_components: directions, each in the complement of those before; 1 for "mixture". Default 1.
        degree: p >= 1 of "lp", or the degree of a function, 0 if it is additive; "mixture" has degree 0. Default None:
            3 for "lp", while a function needs a number.
        batch_size: as in `VRPower`. Default 0.01.
        eta: step in (0, 1]; gradients are divided by x'grad f(x), so that it does not depend on the scale of f.
            Default 1.
        epoch_length: m. Default 25.
        tol: directions are final when |grad f(x) - l x| <= tol l with l = x'grad f(x). Default 1e-6.
        max_epochs: largest number of epochs per direction. Default 100.
        random_state: int, RandomState or None, for start and batches.

    Attributes:
        components_: unit rows `[n_components, n_features]`, whose largest entry is positive.
        proportions_: x^2 of "mixture", which sum to 1, `[n_features]`; missing for other objectives.
        values_: the objective at the components, `[n_components]`; NaN for a function of degree 0, for which it is not
            known. Then epochs are not undone either.
        n_iter_: epochs of all components.
        passes_: rows read divided by the number of rows, the check of likelihoods included. A step on a batch takes two
            gradients of each of its rows.
        history_: `favor.decomposition.epochs.Epoch` for the start and after each epoch.

    Raises:
        ValueError: from `fit`, for parameters out of range, for data that are not finite or all zero, and for "mixture"
            if an entry is negative or a row is 0. A ConvergenceWarning says that tol is not reached.

    Notes:
        `transform` gives products with the components; for "mixture" responsibilities, the probabilities
        a_ik proportions_k / sum_l a_il proportions_l of the components for each row, `[n, n_features]`.

        Source: C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020),
        Algorithm 5. The printed factor of the full gradient lacks the sign of x_t'x_0, without which noise does not
        vanish where that is negative. Steps are normalised, which changes no direction, and the multiplier is divided
        out, which makes eta independent of scale. Entries of "mixture" that a step would make negative stay as they
        were, where the thesis refuses the whole step: a component whose proportion tends to 0 could then stop all
        others.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import StochasticSCIPI
        >>> means, source = np.array([-2.0, 0.0, 3.0]), np.random.default_rng(0)
        >>> data = source.normal(means[source.choice(3, 4000, p=[0.5, 0.2, 0.3])])
        >>> likelihoods = np.exp(-((data[:, None] - means) ** 2) / 2)
        >>> StochasticSCIPI("mixture", random_state=0).fit(likelihoods).proportions_.round(1).tolist()
        [0.5, 0.2, 0.3]
    """

    objective: str | GradientFunction = "lp"
    n_components: int = 1
    _: KW_ONLY
    degree: float | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = self._is_mixture
        return tags

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> StochasticSCIPI:
        """Finds the directions for rows `[n, n_features]`, of the kinds that `VRPower.fit` takes; y is ignored."""
        objective = self._checked_objective()
        source = row_source(self, X, reset=True)
        if self._is_mixture:
            for block in source.blocks():
                check_likelihoods(block)
        points = self._climb_all(X, source, objective)
        values = source.like.new_tensor([math.nan if point.value is None else point.value for point in points])
        self.values_ = same_kind_as_rows(values, X)
        if self._is_mixture:
            self.proportions_ = self.components_[0] ** 2
        return self

    @property
    def _is_mixture(self) -> bool:
        return isinstance(self.objective, str) and self.objective == "mixture"

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[1] if self._is_mixture else len(self.components_)

    def _transformed(self, rows: Tensor, components: Tensor) -> Tensor:
        if not self._is_mixture:
            return rows @ components.T
        check_likelihoods(rows)
        parts = rows * components.square()
        return parts / parts.sum(-1, keepdim=True)

    def _start(self, d: int, generator: torch.Generator) -> Tensor:
        # Proportions must start positive, and equal ones are as good as any for a problem with one maximum.
        return torch.ones(d, dtype=torch.float64, device="cpu") if self._is_mixture else super()._start(d, generator)

    def _checked_objective(self) -> Objective:
        self._check_common()
        check_number("degree", self.degree, None)
        given = self.degree
        if self._is_mixture:
            if given:
                raise ValueError(f"degree of objective='mixture' is 0: leave it out, got {given!r}.")
            if self.n_components != 1:
                raise ValueError(f"n_components must be 1 for objective='mixture', got {self.n_components}.")
            return MixtureLikelihood()
        if isinstance(self.objective, str) and self.objective == "lp":
            if given is not None and given < 1:
                raise ValueError(f"degree must be at least 1 for objective='lp', got {given!r}.")
            return PowerOfProducts(3.0 if given is None else float(given))
        if callable(self.objective):
            if given is None:
                raise ValueError("degree must be given for an objective that is a function (0 if it is additive).")
            return FromGradient(self.objective, float(given))
        raise ValueError(f"objective must be 'lp', 'mixture' or a function, got {self.objective!r}.")


def check_likelihoods(rows: Tensor) -> None:
    """Raises ValueError for a negative entry or a row of zeros."""
    if bool((rows < 0).any()):
        raise ValueError("Negative values in data passed to StochasticSCIPI: likelihoods must be at least 0.")
    if not bool((rows > 0).any(-1).all()):
        raise ValueError("X has a row of zeros, an observation that is impossible under every component: remove it.")
