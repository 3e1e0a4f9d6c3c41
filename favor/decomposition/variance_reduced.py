"""Leading principal components from mini-batches with reduced variance: VR Power and VR HB Power."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favor.decomposition.epochs import Point, Quadratic, Rule
from favor.decomposition.inputs import check_flag, check_number, tensor_of
from favor.decomposition.power_rules import (
    PowerParameters,
    heavy_ball_rule,
    power_rule,
    row_deviations,
    second_eigenvalue,
)
from favor.decomposition.rows import RowSource, batch_rows, row_source, same_kind_as_rows
from favor.decomposition.stochastic_base import StochasticPower

# Exact steps from which eigenvalues are first estimated.
WARM_UP = 5
# An epoch whose length comes from estimates reads at most this many passes: a gap estimated as 0 has no finite length.
LONGEST = 10
# The ratio l2 / l1 while there is no estimate yet.
UNKNOWN_RATIO = 0.5


class VRPower(StochasticPower):
    """Leading principal components by variance-reduced stochastic power iteration (VR Power).

    One exact product with C = X'X / n starts an epoch of steps on mini-batches of rows, whose noise is proportional to
    the distance from where the epoch started and so dies out: the error falls by a constant factor for every pass over
    the data, and if the gap is small, by a far larger factor than a pass of power iteration gives. X may be larger than
    memory.

    C is the second moment, not centred, unless `center`. An epoch that lowers x'C x is undone, and eta is halved.

    Args:
        n_components: components, found one after the other in the complement of those before. Default 1.
        batch_size: |S|, rows of a mini-batch, drawn with replacement: int, or a share of the rows (float), which is at
            least 64 rows. Default 0.01. With all rows, steps are those of power iteration.
        eta: step in (0, 1], for rows divided by sqrt(l1), so that results do not depend on the scale of X; "rule" for
            the largest step that section 4.3 allows for |S| and `variance`. Default 1.
        epoch_length: m, steps of an epoch, or "rule". Default 25.
        eigenvalues: None (default): a step is scaled by x'C x, and "rule" cannot be used. A sequence of the
            n_components + 1 largest eigenvalues of C: used for the scale and for rules. "estimate": l1 and l2 from the
            gradients at the starts of epochs, after 5 exact steps (the parameter-free form).
        variance: sigma^2 of the rules. None (default): the mean of |a|^2 / l1 over rows a, as in the experiments of the
            thesis; "exact": E|a a' - C|^2 / l1^2, for which C is formed in O(n d^2); or a number for E|a a' - C|^2.
        center: whether the mean is subtracted from rows. Default False.
        tol: components are final when |C x - l x| <= tol l with l = x'C x; the sine of the angle to the true one is
            then at most about tol / (1 - l2/l1). Default 1e-6; no less than 64 units of rounding.
        max_epochs: largest number of epochs per component. Default 100.
        random_state: int, RandomState or None, for start and batches.

    Attributes:
        components_: unit rows `[n_components, n_features]`, whose largest entry is positive.
        explained_variance_: their Rayleigh quotients, `[n_components]`.
        mean_: mean of X if `center`, else zeros, `[n_features]`.
        n_iter_: epochs of all components.
        passes_: rows read divided by the number of rows, those for the mean and for sigma^2 included.
        history_: `favor.decomposition.epochs.Epoch` for the start and after each epoch.
        n_features_in_: columns seen by `fit`.
        feature_names_in_: their names, if the data had names.

    Raises:
        ValueError: from `fit`, for parameters out of range, and for data that are not finite, all zero or, for
            `center`, all equal.

    Warns:
        ConvergenceWarning: if tol is not reached.

    See Also:
        sklearn.decomposition.PCA: exact where d is a few hundred or less, and then faster: C costs about d/4 passes.
        VRHeavyBallPower: VR Power with momentum.

    Notes:
        Source: C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020),
        Algorithm 3 and sections 4.3 and 4.4. Differences: (1 - eta) I + eta C means another step for every scale of the
        data, so rows are divided by sqrt(l1) here. The rules are proven for sigma^2 of the definition, with which steps
        are far too small. The mean of |a|^2, which the experiments use, does not even have its units and is still
        conservative. Hence the defaults eta = 1, m = 25, and the halving. Lengths of epochs that come from estimates
        are cut at 10 passes.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import VRPower
        >>> X = np.random.default_rng(0).normal(size=(2000, 5)) * [2, 1, 1, 1, 1]
        >>> VRPower(random_state=0).fit(X).components_.round(1).tolist()[0][0]
        1.0

    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        batch_size: float = 0.01,
        eta: float | str = 1.0,
        epoch_length: int | str = 25,
        eigenvalues: Any = None,
        variance: float | str | None = None,
        center: bool = False,
        tol: float = 1e-6,
        max_epochs: int = 100,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.batch_size = batch_size
        self.eta = eta
        self.epoch_length = epoch_length
        self.eigenvalues = eigenvalues
        self.variance = variance
        self.center = center
        self.tol = tol
        self.max_epochs = max_epochs
        self.random_state = random_state

    _power_rule = staticmethod(power_rule)

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> VRPower:
        """Finds the components.

        Args:
            X: rows `[n, n_features]`: tensor, array, or what is read as needed: a `numpy.memmap` or any object with
                `len` that gives rows for a rising array of integers.
            y: ignored; pipelines pass it.

        Returns:
            The estimator itself.
        """
        self._check_parameters()
        source = row_source(self, X, reset=True, minimum=2 if self.center else 1)
        mean = source.like.new_zeros(source.width)
        if self.center:
            mean = source.mean(lambda rows: rows.mean(0))
            source.offset = mean
        noise = self._noise(source)
        points = self._climb_all(
            X,
            source,
            Quadratic(),
            lambda number: self._rule(number, len(source), noise),
            warm_up=WARM_UP if self._estimates else 0,
        )
        variances = mean.new_tensor([point.multiplier for point in points])
        self.explained_variance_ = same_kind_as_rows(variances, X)
        self.mean_ = same_kind_as_rows(mean, X)
        return self

    def _offset(self, source: RowSource) -> Tensor | None:
        return tensor_of(self.mean_, source.like) if self.center else None

    @property
    def _estimates(self) -> bool:
        return isinstance(self.eigenvalues, str)

    def _rule(self, number: int, n: int, noise: Callable[[float], float] | None) -> Rule:
        """Gives the parameters of each epoch of a component; keeps the estimate of l2/l1 between epochs."""
        batch = batch_rows(self.batch_size, n)
        known = None if self.eigenvalues is None or self._estimates else np.asarray(self.eigenvalues, dtype=float)
        ratio = UNKNOWN_RATIO if known is None else known[number + 1] / known[number]

        def rule(point: Point, last: Point | None, factor: float) -> tuple[PowerParameters, float]:
            nonlocal ratio
            l1 = point.multiplier if known is None else float(known[number])
            if self._estimates and last is not None:
                l2 = second_eigenvalue(point.x, point.gradient, last.x, last.gradient)
                ratio = ratio if l2 is None else l2 / l1
            sigma2 = 0.0 if noise is None else noise(l1)
            parameters = self._parameters(min(ratio, 1 - 1e-12), sigma2, batch, factor)
            if self.epoch_length == "rule" and self._estimates:
                longest = 1 + math.ceil(LONGEST * n / batch)
                parameters = parameters._replace(epoch_length=min(parameters.epoch_length, longest))
            return parameters, l1

        return rule

    def _parameters(self, ratio: float, sigma2: float, batch: int, factor: float) -> PowerParameters:
        """Gives the parameters of an epoch for l1 = 1 and l2 = ratio, with eta times a factor."""
        m = None if self.epoch_length == "rule" else int(self.epoch_length)
        eta = self._power_rule(1.0, ratio, sigma2, batch, epoch_length=m).eta if self.eta == "rule" else float(self.eta)
        return self._power_rule(1.0, ratio, sigma2, batch, eta=eta * factor, epoch_length=m)

    def _noise(self, source: RowSource) -> Callable[[float], float] | None:
        """Gives sigma^2 of rows divided by sqrt(l1) as a function of l1; None if no rule asks for it."""
        if self.eta != "rule" or batch_rows(self.batch_size, len(source)) == len(source):
            # With all rows there is no noise.
            return None
        if self.variance is None:
            square = source.mean(lambda rows: rows.square().sum(-1).mean()).item()
            return lambda l1: square / l1
        variance = float(self.variance) if self.variance != "exact" else exact_variance(source)
        return lambda l1: variance / l1**2

    def _check_parameters(self) -> None:
        self._check_common("rule")
        check_flag("center", self.center)
        check_number("variance", self.variance, None, "exact")
        self._check_eigenvalues()

    def _check_eigenvalues(self) -> None:
        if self.eigenvalues is None:
            asked = self._asks_for_eigenvalues()
            if asked:
                raise ValueError(
                    f"{asked}='rule' needs eigenvalues: give the {self.n_components + 1} largest, or 'estimate'."
                )
            return
        if self._estimates and self.eigenvalues == "estimate":
            return
        try:
            values = np.asarray(self.eigenvalues, dtype=float)
        except (TypeError, ValueError):
            values = np.zeros(0)
        falling = values.shape == (self.n_components + 1,) and (np.diff(values) < 0).all() and values[-1] >= 0
        if not falling or not np.isfinite(values).all():
            raise ValueError(
                f"eigenvalues must be None, 'estimate' or {self.n_components + 1} falling numbers, at least 0, got "
                f"{self.eigenvalues!r}."
            )

    def _asks_for_eigenvalues(self) -> str | None:
        """Gives the name of a parameter that is set to "rule"."""
        return next((name for name in ("eta", "epoch_length") if getattr(self, name) == "rule"), None)


class VRHeavyBallPower(VRPower):
    """Leading principal components by variance-reduced power iteration with momentum (VR HB Power).

    Works like `VRPower`, with x_{t+1} = 2 ((1 - eta) x_t + eta g_t) - beta x_{t-1} within an epoch. Momentum gains most
    where gradients are nearly exact: with eta = 1 it fails for small batches and small gaps, so a small step is the
    default.

    Args:
        n_components: as in `VRPower`. Default 1.
        batch_size: as in `VRPower`. Default 0.01.
        eta: as in `VRPower`, but by default 0.1.
        epoch_length: as in `VRPower`. Default 25.
        beta: weight of momentum in [0, 1), or "rule" (default) for (1 - eta + eta l2/l1)^2.
        eigenvalues: as in `VRPower`, but by default "estimate".
        variance: as in `VRPower`.
        center: as in `VRPower`.
        tol: as in `VRPower`.
        max_epochs: as in `VRPower`.
        random_state: as in `VRPower`.

    Attributes:
        components_: and all others as in `VRPower`.

    Notes:
        Source: Kim (2020), Algorithm 4 and sections 4.3 and 4.4; `VRPower` names the differences. The
        estimate of l2 is mostly too low, so that beta is too small: give eigenvalues if they are known.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import VRHeavyBallPower
        >>> X = np.random.default_rng(0).normal(size=(2000, 5)) * [2, 1, 1, 1, 1]
        >>> VRHeavyBallPower(random_state=0).fit(X).components_.round(1).tolist()[0][0]
        1.0

    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        batch_size: float = 0.01,
        eta: float | str = 0.1,
        epoch_length: int | str = 25,
        beta: float | str = "rule",
        eigenvalues: Any = "estimate",
        variance: float | str | None = None,
        center: bool = False,
        tol: float = 1e-6,
        max_epochs: int = 100,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            n_components,
            batch_size=batch_size,
            eta=eta,
            epoch_length=epoch_length,
            eigenvalues=eigenvalues,
            variance=variance,
            center=center,
            tol=tol,
            max_epochs=max_epochs,
            random_state=random_state,
        )
        self.beta = beta

    _power_rule = staticmethod(heavy_ball_rule)

    def _parameters(self, ratio: float, sigma2: float, batch: int, factor: float) -> PowerParameters:
        chosen = super()._parameters(ratio, sigma2, batch, factor)
        return chosen if self.beta == "rule" else chosen._replace(beta=float(self.beta))

    def _check_parameters(self) -> None:
        check_number("beta", self.beta, "rule", expected="in [0, 1)", allowed=lambda beta: 0 <= beta < 1)
        super()._check_parameters()

    def _asks_for_eigenvalues(self) -> str | None:
        return "beta" if self.beta == "rule" else super()._asks_for_eigenvalues()


def exact_variance(source: RowSource) -> float:
    """Computes sigma^2 = E|a a' - C|^2 with the spectral norm; C `[d, d]` is formed."""
    second = source.mean(lambda rows: rows.T @ rows / len(rows))
    values, vectors = torch.linalg.eigh(second)
    values = values.clamp_min(0)
    return source.mean(lambda rows: row_deviations(rows, values, vectors).square().mean()).item()
