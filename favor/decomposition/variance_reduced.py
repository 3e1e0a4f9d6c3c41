"""Leading principal components from mini-batches with reduced variance: VR Power and VR HB Power."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favor.decomposition.epochs import Point, PowerParameters, Quadratic, Rule, StochasticPower
from favor.decomposition.inputs import check_flag, check_number, tensor_of
from favor.decomposition.rows import RowSource, row_source, same_kind_as_rows

WARM_UP = 5  # exact steps from which eigenvalues are first estimated
UNKNOWN_RATIO = 0.5  # the ratio l2 / l1 while there is no estimate yet
SMALLEST_GAP = 1e-6  # the estimate of l2 stays below l1 by this share, so that the gap is never 0


def second_eigenvalue(point: Tensor, image: Tensor, last: Tensor, last_image: Tensor) -> float | None:
    """Estimates l2 from a point x and the one before, unit `[d]`, and their images C x, without another pass.

    It is the Rayleigh quotient of the part of `last` orthogonal to `point`: at most l2 once `point` is u_1, mostly too
    low. It is within [0, (1 - 1e-6) x'C x], and None if the points are too near each other to tell. Kim (2020), section
    4.4; both bounds and the refusal of near points are additions.
    """
    overlap = torch.dot(last, point).item()
    rest = 1 - overlap**2
    if not rest >= max(1e-14, 4 * torch.finfo(point.dtype).eps):
        return None
    l1 = torch.dot(point, image).item()
    crossed = torch.dot(last, last_image) - 2 * overlap * torch.dot(point, last_image)
    estimate = (crossed.item() + overlap**2 * l1) / rest
    return min(max(estimate, 0.0), l1 * (1 - SMALLEST_GAP))


@dataclass(eq=False, repr=False)
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
        eta: step in (0, 1], for rows divided by sqrt(x'C x), so that results do not depend on the scale of X. Default
            1.
        epoch_length: m, steps of an epoch. Default 25.
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
        passes_: rows read divided by the number of rows, those for the mean included.
        history_: `favor.decomposition.epochs.Epoch` for the start and after each epoch.

    Raises:
        ValueError: from `fit`, for parameters out of range, and for data that are not finite, all zero or, for
            `center`, all equal. A ConvergenceWarning says that tol is not reached.

    See Also:
        sklearn.decomposition.PCA: exact where d is a few hundred or less, and then faster: C costs about d/4 passes.

    Notes:
        Source: C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020),
        Algorithm 3. Differences: (1 - eta) I + eta C means another step for every scale of the data, so rows are
        divided by sqrt(x'C x) here. The rules of section 4.3 for eta and m are not offered: they are proven, but their
        steps are far too small. Hence the defaults eta = 1, m = 25, and the halving.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import VRPower
        >>> X = np.random.default_rng(0).normal(size=(2000, 5)) * [2, 1, 1, 1, 1]
        >>> VRPower(random_state=0).fit(X).components_.round(1).tolist()[0][0]
        1.0
    """

    n_components: int = 1
    _: KW_ONLY
    center: bool = False

    @torch.no_grad()
    def fit(self, X: Any, y: Any = None) -> VRPower:
        """Finds the components; y is ignored.

        Args:
            X: rows `[n, n_features]`: tensor, array, or what is read as needed: a `numpy.memmap` or any object with
                `len` that gives rows for a rising array of integers.
            y: ignored.
        """
        self._check_parameters()
        source = row_source(self, X, reset=True, minimum=2 if self.center else 1)
        mean = source.like.new_zeros(source.width)
        if self.center:
            mean = source.mean(lambda rows: rows.mean(0))
            source.offset = mean
        points = self._climb_all(X, source, Quadratic())
        variances = mean.new_tensor([point.multiplier for point in points])
        self.explained_variance_ = same_kind_as_rows(variances, X)
        self.mean_ = same_kind_as_rows(mean, X)
        return self

    def _offset(self, source: RowSource) -> Tensor | None:
        return tensor_of(self.mean_, source.like) if self.center else None

    def _check_parameters(self) -> None:
        self._check_common()
        check_flag("center", self.center)


@dataclass(eq=False, repr=False)
class VRHeavyBallPower(VRPower):
    """Leading principal components by variance-reduced power iteration with momentum (VR HB Power).

    Works like `VRPower`, with x_{t+1} = 2 ((1 - eta) x_t + eta g_t) - beta x_{t-1} within an epoch. Momentum gains most
    where gradients are nearly exact: with eta = 1 it fails for small batches and small gaps, so a small step is the
    default.

    Args:
        n_components, batch_size, epoch_length, center, tol, max_epochs, random_state: as in `VRPower`.
        eta: as in `VRPower`, but by default 0.1.
        beta: weight of momentum in [0, 1), or "rule" (default) for (1 - eta + eta l2/l1)^2, with which all directions
            except the first grow alike.
        eigenvalues: None (default): l1 and l2 are estimated from the gradients at the starts of epochs, after 5 exact
            steps. A sequence of the n_components + 1 largest eigenvalues of C: used for the scale and for beta.

    Attributes:
        components_: and all others as in `VRPower`.

    Notes:
        Source: Kim (2020), Algorithm 4 and section 4.4; `VRPower` names the differences. The estimate of l2 is mostly
        too low, so that beta is too small: give eigenvalues if they are known.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import VRHeavyBallPower
        >>> X = np.random.default_rng(0).normal(size=(2000, 5)) * [2, 1, 1, 1, 1]
        >>> VRHeavyBallPower(random_state=0).fit(X).components_.round(1).tolist()[0][0]
        1.0
    """

    _: KW_ONLY
    eta: float = 0.1
    beta: float | str = "rule"
    eigenvalues: Any = None

    @property
    def _warm_up(self) -> int:
        return WARM_UP if self.beta == "rule" and self.eigenvalues is None else 0

    def _rule(self, number: int) -> Rule:
        """Keeps the estimate of l2/l1 between epochs."""
        known = None if self.eigenvalues is None else np.asarray(self.eigenvalues, dtype=float)
        ratio = UNKNOWN_RATIO if known is None else float(known[number + 1] / known[number])
        plain = super()._rule(number)

        def rule(point: Point, last: Point | None, factor: float) -> tuple[PowerParameters, float]:
            nonlocal ratio
            parameters, l1 = plain(point, last, factor)
            if known is not None:
                l1 = float(known[number])
            elif last is not None:
                l2 = second_eigenvalue(point.x, point.gradient, last.x, last.gradient)
                ratio = ratio if l2 is None else l2 / l1
            eta = parameters.eta
            beta = (1 - eta + eta * ratio) ** 2 if self.beta == "rule" else float(self.beta)
            return parameters._replace(beta=beta), l1

        return rule

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_number("beta", self.beta, "rule", expected="in [0, 1)", allowed=lambda beta: 0 <= beta < 1)
        if self.eigenvalues is None:
            return
        try:
            values = np.asarray(self.eigenvalues, dtype=float)
        except (TypeError, ValueError):
            values = np.zeros(0)
        falling = values.shape == (self.n_components + 1,) and (np.diff(values) < 0).all() and values[-1] >= 0
        if not falling or not np.isfinite(values).all():
            raise ValueError(
                f"eigenvalues must be None or {self.n_components + 1} falling numbers, at least 0, got "
                f"{self.eigenvalues!r}."
            )
