"""The scikit-learn side that all estimators by variance-reduced epochs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from favor.decomposition.epochs import ROUNDING, Climb, Epoch, Landscape, Objective, Point, Rule, climb
from favor.decomposition.inputs import check_integer, check_number, generator_of, tensor_of, warn_of_end
from favor.decomposition.rows import RowSource, batch_rows, row_source, same_kind_as_rows


class StochasticPower(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base of the estimators that climb by variance-reduced epochs; not for use by itself."""

    n_components: int
    batch_size: float
    eta: Any
    epoch_length: Any
    tol: float
    max_epochs: int
    random_state: Any

    def transform(self, X: Any) -> Any:
        """Multiplies rows `[n, n_features]` with the components, `[n, n_components]`; a file is read by blocks."""
        check_is_fitted(self)
        source = row_source(self, X, reset=False)
        source.offset = self._offset(source)
        components = tensor_of(self.components_, source.like)
        with torch.no_grad():
            products = torch.cat([self._transformed(block, components) for block in source.blocks()])
        return same_kind_as_rows(products, X)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _transformed(self, rows: Tensor, components: Tensor) -> Tensor:
        return rows @ components.T

    def _offset(self, source: RowSource) -> Tensor | None:
        """Gives the vector that `fit` subtracted from rows."""
        return None

    def _climb_all(
        self, X: Any, source: RowSource, objective: Objective, rules: Callable[[int], Rule], warm_up: int = 0
    ) -> list[Point]:
        """Finds components one after the other, each in the complement of those before; sets common attributes."""
        n, d = len(source), source.width
        if self.n_components > d:
            raise ValueError(f"n_components must be at most the {d} features of X, got {self.n_components}.")
        generator = generator_of(self.random_state)
        found, climbs, floor = source.like.new_zeros(0, d), [], 0.0
        if source.offset is not None:
            # Only rounding is left of equal rows, less their mean.
            floor = (8 * torch.finfo(found.dtype).eps * source.offset.norm().item()) ** 2
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
            if number == 0 and len(result.history) == 1 and result.point.gradient.norm().item() <= floor:
                raise ValueError(
                    f"X must have rows that {'are not zero' if source.offset is None else 'differ'}: the gradient of "
                    "the objective at a random start is zero, and no direction is better than another."
                )
            found = torch.cat([found, _signed(result.point.x).unsqueeze(0)])
            climbs.append(result)
            floor = max(floor, ROUNDING * torch.finfo(found.dtype).eps * abs(result.point.multiplier))
        self.components_ = same_kind_as_rows(found, X)
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
            warn_of_end(
                f"component {', '.join(late)} did not reach tol={self.tol:g} in max_epochs={self.max_epochs} (residual "
                f"{worst:.1e}): raise max_epochs, batch_size or tol."
            )

    def _check_common(self, *words: str) -> None:
        """Raises ValueError for common parameters out of range; eta and m may be words, too."""
        check_integer("n_components", self.n_components)
        check_integer("max_epochs", self.max_epochs)
        check_number("eta", self.eta, *words, expected="in (0, 1]", allowed=lambda eta: 0 < eta <= 1)
        check_integer("epoch_length", self.epoch_length, *words)
        check_number("tol", self.tol)


def _signed(x: Tensor) -> Tensor:
    """Gives x or -x, the one whose entry of largest size is positive."""
    return -x if x[x.abs().argmax()] < 0 else x
