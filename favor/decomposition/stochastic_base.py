"""The scikit-learn side that all estimators by variance-reduced epochs share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from favor.decomposition.epochs import ROUNDING, Climb, Epoch, Landscape, Objective, Point, Rule, climb
from favor.decomposition.inputs import tensor_of
from favor.decomposition.rows import RowSource, batch_rows, gives_tensors, row_source


class StochasticPower(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """What the estimators that climb by variance-reduced epochs share; not for use by itself."""

    n_components: int
    batch_size: float
    eta: Any
    epoch_length: Any
    tol: float
    max_epochs: int
    random_state: Any

    def transform(self, X: Any) -> Any:
        """Products of rows `[n, n_features]` with the components, `[n, n_components]`; a file is read by blocks."""
        check_is_fitted(self)
        source = row_source(self, X, reset=False)
        source.offset = self._offset(source)
        components = tensor_of(self.components_, source.like)
        with torch.no_grad():
            products = torch.cat([self._transformed(block, components) for block in source.blocks()])
        return products if gives_tensors(X) else products.cpu().numpy()

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _transformed(self, rows: Tensor, components: Tensor) -> Tensor:
        return rows @ components.T

    def _offset(self, source: RowSource) -> Tensor | None:
        """What `fit` subtracted from rows."""
        return None

    def _climb_all(
        self, X: Any, source: RowSource, objective: Objective, rules: Callable[[int], Rule], warm_up: int = 0
    ) -> list[Point]:
        """Components one after the other, each in the complement of those before; sets the attributes they share."""
        n, d = len(source), source.width
        if self.n_components > d:
            raise ValueError(f"n_components must be at most the {d} features of X, got {self.n_components}.")
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        generator = torch.Generator().manual_seed(int(seed))
        found, climbs, floor = source.like.new_zeros(0, d), [], 0.0
        for number in range(self.n_components):
            result = climb(
                Landscape(objective, source, found),
                self._start(d, generator).to(source.like),
                rules(number),
                batch=batch_rows(self.batch_size, n),
                tol=self.tol,
                max_epochs=self.max_epochs,
                generator=generator,
                warm_up=warm_up,
                floor=floor,
            )
            found = torch.cat([found, _signed(result.point.x).unsqueeze(0)])
            climbs.append(result)
            floor = max(floor, ROUNDING * torch.finfo(found.dtype).eps * abs(result.point.multiplier))
        self.components_ = found if gives_tensors(X) else found.cpu().numpy()
        self.history_: list[Epoch] = [line for result in climbs for line in result.history]
        self.n_iter_ = sum(len(result.history) - 1 for result in climbs)
        self.passes_ = source.passes
        self._warn(climbs)
        return [result.point for result in climbs]

    def _start(self, d: int, generator: torch.Generator) -> Tensor:
        return torch.randn(d, generator=generator, dtype=torch.float64, device="cpu")

    def _warn(self, climbs: list[Climb]) -> None:
        late = [str(number) for number, result in enumerate(climbs) if not result.converged]
        if late:
            worst = max(result.point.residual for result in climbs)
            warnings.warn(
                f"component {', '.join(late)} did not reach tol={self.tol:g} in max_epochs={self.max_epochs} (residual "
                f"{worst:.1e}): raise max_epochs, batch_size or tol.",
                ConvergenceWarning,
                stacklevel=5,
            )

    def _check_common(self) -> None:
        """Raises ValueError for what is out of range in the parameters that all share."""
        check_integer("n_components", self.n_components)
        check_integer("max_epochs", self.max_epochs)
        if isinstance(self.tol, bool) or not isinstance(self.tol, Real) or not 0 <= self.tol < math.inf:
            raise ValueError(f"tol must be a number, at least 0, got {self.tol!r}.")


def check_integer(name: str, value: Any, alternative: str = "") -> None:
    """Raises ValueError unless it is a positive integer."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer{alternative}, got {value!r}.")


def check_step(eta: Any, *, rule: bool) -> None:
    """Raises ValueError unless eta is in (0, 1], or "rule" where there is one."""
    number = isinstance(eta, Real) and not isinstance(eta, bool) and 0 < float(eta) <= 1
    if not number and not (rule and isinstance(eta, str) and eta == "rule"):
        alternative = " or 'rule'" if rule else ""
        raise ValueError(f"eta must be in (0, 1]{alternative}, got {eta!r}.")


def _signed(x: Tensor) -> Tensor:
    """Of x and -x the one whose largest entry is positive."""
    return -x if x[x.abs().argmax()] < 0 else x
