"""Random features as a scikit-learn transformer."""

from __future__ import annotations

import math
import warnings
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favor._parts import needs
from favor.config import MOST_FEATURES
from favor.features import Parameters, PositiveFeatures, RandomFeatures, TrigRF
from favor.features.base import Side
from favor.registry import FAMILIES

needs("sklearn", "sklearn", "scipy")

from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin  # noqa: E402  after the check
from sklearn.utils import check_array, check_random_state  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

__all__ = ["SoftmaxKernelSampler"]

ALPHA = {"softmax": 0.0, "gaussian": -0.5}
LARGEST_LOG = 350.0  # products of two features of exp(350), summed over 10^4 of them, are still finite in float64


@dataclass(eq=False, repr=False)
class SoftmaxKernelSampler(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Approximates the softmax or the Gaussian kernel by random features of the FAVOR family.

    `transform(X) @ transform(Y).T` is an unbiased estimate of exp(scale x.y) (kernel "softmax") or of
    exp(-scale |x - y|^2/2) (kernel "gaussian") for all pairs of rows, so that a linear model on the features
    approximates a model with that kernel. The parameters of the features are the closed-form optimum for the data given
    to `fit`.

    By default one set of data plays both roles of the kernel, and one map serves both. For a kernel between two sets of
    different kinds, give the second set to `fit` too: the parameters are then fitted to the pair, and `transform(X) @
    transform_keys(Y).T` estimates the kernel. For "trig", "pos", "gerf" and "sderf" the two methods are always the same
    map. "saderf" and "aderf" gain only from two sets; with one set they equal "gerf".

    Args:
        features: "trig" (values of any sign: sin/cos pairs, or cosines with random phases if n_components is odd),
            "pos", "gerf", "saderf", "aderf", "sderf" (default) or "cderf", which is centred and the optimum of all
            except "trig".
        n_components: number of features, default 100.
        scale: positive factor of x.y or of |x - y|^2/2, default 1. With kernel="gaussian", scale = 2 gamma of
            scikit-learn's RBFSampler.
        kernel: "softmax" (default) or "gaussian".
        orthogonal: whether directions are orthogonal in blocks (default), which lowers the variance, or independent.
        random_state: int, RandomState or None, for the directions.

    Attributes:
        omega_: directions, `[n_components, n_features]`; for "trig" half as many, or with a column of phases.
        parameters_: `favor.features.Parameters` in float64; None for "trig".
        center_, key_center_: means of X and of the keys, times sqrt(scale), for "cderf"; else zeros. `[n_features]`.
        n_features_in_: number of columns seen by `fit`.
        feature_names_in_: their names, if the data had names.

    Raises:
        ValueError: from `fit`, for parameters out of range.

    Warns:
        RuntimeWarning: features whose logarithm exceeds 350 are cut there, so that products of features stay finite;
            the estimate is then wrong for those rows. This happens only to rows for which exp(scale x.y) comes near the
            largest float64, or to sets that are that far apart. Lower `scale`, or standardise the data.

    See Also:
        sklearn.kernel_approximation.RBFSampler: independent directions with a random phase, Gaussian kernel only.

    Notes:
        The variance of positive features grows with exp(scale |x + y|^2): where scale |x|^2 is far above 1 features
        underflow to 0 and no number of them suffices. Where features may be negative, "trig" often has the smaller
        error for the Gaussian kernel. Sources: FAVOR# (Likhosherstov et al.), equations (11) to (20) and Theorems 4.2
        and 4.3; "cderf" is an addition of this package.

    Example:
        >>> import numpy as np
        >>> from favor.sklearn import SoftmaxKernelSampler
        >>> X = np.random.default_rng(0).normal(size=(50, 3)) / 3
        >>> sampler = SoftmaxKernelSampler(n_components=2000, random_state=0)
        >>> Z = sampler.fit_transform(X)
        >>> bool(np.abs(Z @ Z.T - np.exp(X @ X.T)).max() < 0.2)
        True
    """

    features: str = "sderf"
    n_components: int = 100
    _: KW_ONLY
    scale: float = 1.0
    kernel: str = "softmax"
    orthogonal: bool = True
    random_state: Any = None

    def fit(self, X: Any, y: Any = None, keys: Any = None) -> SoftmaxKernelSampler:
        """Draws the directions and fits the parameters.

        Args:
            X: rows `[n, n_features]`.
            y: ignored; pipelines pass it.
            keys: rows `[m, n_features]` of the second set, if `transform_keys` will be used on data of another kind.

        Returns:
            The sampler itself.
        """
        self._check_parameters()
        rows = self._scaled(validate_data(self, X, dtype=np.float64))
        if keys is not None:
            keys = check_array(keys, dtype=np.float64, input_name="keys")
            if keys.shape[1] != rows.shape[1]:
                raise ValueError(f"keys must have {rows.shape[1]} features as X has, got {keys.shape[1]}.")
        family = self._family()
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        options: Any = {"orthogonal": bool(self.orthogonal), "generator": torch.Generator().manual_seed(int(seed))}
        self.omega_ = family.draw(int(self.n_components), rows.shape[1], **options).numpy()
        self.center_, self.key_center_ = np.zeros((2, rows.shape[1]))
        self.parameters_: Parameters | None = None
        if isinstance(family, PositiveFeatures):
            others = rows if keys is None else self._scaled(keys)
            params = family.fit(rows, others)
            if params.shift is not None:
                # Subtracting each set's own mean gives the same estimator, with features of even size on both sides.
                self.center_, self.key_center_ = rows.mean(0).numpy(), others.mean(0).numpy()
                params = replace(params, shift=None)
            if keys is None:
                # Then G is a rotation, which can be applied to the directions instead: one map serves both sides.
                eye = torch.eye(rows.shape[1], dtype=rows.dtype, device="cpu")
                params = Parameters(eye, eye, params.transform.T @ params.factor, maps=False)
            self.parameters_ = params
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Computes the features `[n, n_components]` of rows `[n, n_features]`, float64."""
        return self._features(X, "query")

    def transform_keys(self, X: Any) -> np.ndarray:
        """Computes `[m, n_components]` for the kernel's second argument; as `transform` unless `fit` was given keys."""
        return self._features(X, "key")

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    def _features(self, X: Any, side: Side) -> np.ndarray:
        check_is_fitted(self)
        rows = self._scaled(validate_data(self, X, dtype=np.float64, reset=False))
        family, omega = self._family(), torch.tensor(self.omega_, device="cpu")
        if isinstance(family, TrigRF):
            logs, values = family.log_scale(rows).unsqueeze(-1), family.phi(rows, omega)
        else:
            logs, values = self._log_phi(rows, omega, side), torch.ones((), dtype=rows.dtype, device="cpu")
        logs = logs - math.log(omega.shape[0]) / 2
        if logs.numel() and logs.max() > LARGEST_LOG:
            message = (
                f"features up to exp({logs.max():.0f}) are cut at exp({LARGEST_LOG:.0f}), beyond which their products "
                "are not finite; estimates are wrong for these rows. Lower scale, or standardise the data."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return (logs.clamp(max=LARGEST_LOG).exp() * values).numpy()

    def _log_phi(self, rows: Tensor, omega: Tensor, side: Side) -> Tensor:
        """Computes logarithms of positive features: those of centred rows, plus what centring took from x.y.

        x.y = (x - a).(y - b) + (x.b - a.b/2) + (y.a - a.b/2). The Gaussian kernel does not depend on the origin, so the
        origin is put between a and b.
        """
        own, other = (torch.tensor(center, device="cpu") for center in (self.center_, self.key_center_))
        if side == "key":
            own, other = other, own
        if self.kernel == "gaussian":
            origin = (own + other) / 2
            rows, own, other = rows - origin, own - origin, other - origin
        family = _families()[self.features]()
        assert isinstance(family, PositiveFeatures)
        assert self.parameters_ is not None
        tilt = rows @ other - own @ other / 2 + ALPHA[self.kernel] * rows.square().sum(-1)
        return family.log_phi(rows - own, omega, self.parameters_, side) + tilt.unsqueeze(-1)

    def _scaled(self, X: np.ndarray) -> Tensor:
        return torch.tensor(X, dtype=torch.float64, device="cpu") * float(self.scale) ** 0.5

    def _family(self) -> RandomFeatures:
        alpha = ALPHA[self.kernel]
        if self.features == TrigRF.name:
            return TrigRF(alpha=alpha, form="phase" if self.n_components % 2 else "sincos")
        return _families()[self.features](alpha=alpha)

    def _check_parameters(self) -> None:
        if self.features not in _families():
            raise ValueError(f"features must be one of {', '.join(_families())}; got {self.features!r}.")
        if self.kernel not in ALPHA:
            raise ValueError(f"kernel must be one of {', '.join(ALPHA)}; got {self.kernel!r}.")
        if not isinstance(self.n_components, Integral) or not 1 <= self.n_components <= MOST_FEATURES:
            raise ValueError(f"n_components must be an integer from 1 to {MOST_FEATURES}, got {self.n_components!r}.")
        if not isinstance(self.scale, Real) or not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {self.scale!r}.")


def _families() -> dict[str, type[RandomFeatures]]:
    """Lists families that estimate the kernel for all pairs of rows alike: no weights by attention, no baselines."""
    positive = [own for own in FAMILIES.values() if issubclass(own, PositiveFeatures) and not own.num_queries]
    return {TrigRF.name: TrigRF} | {own.name: own for own in positive if own.moments is PositiveFeatures.moments}
