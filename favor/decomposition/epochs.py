"""Epochs of variance-reduced power steps, and the base of the estimators that run them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from favor.decomposition.inputs import check_integer, check_number, generator_of, tensor_of, warn_of_end
from favor.decomposition.rows import RowSource, batch_rows, row_source, same_kind_as_rows

ROUNDING = 64  # values that differ by fewer units of rounding than this count as equal


class PowerParameters(NamedTuple):
    """Step eta in (0, 1], steps m of an epoch, the first of which is exact, and the weight of momentum, if any."""

    eta: float
    epoch_length: int
    beta: float | None = None


class Objective(ABC):
    """f, the mean over rows of functions f_i that are scale invariant of the same degree.

    Attributes:
        degree: p of f(c x) = |c|^p f(x); 0 for f(c x) = f(x) + log|c| times a constant.
    """

    degree: float = 2.0

    @abstractmethod
    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean gradient `[d]` over rows `[b, d]` at x `[d]`."""

    def difference(self, rows: Tensor, x: Tensor, anchor: Tensor, weight: Tensor) -> Tensor:
        """Gives the mean of grad f_i(x) - weight grad f_i(anchor) over rows."""
        return self.gradient(rows, x) - weight * self.gradient(rows, anchor)

    def value(self, rows: Tensor, x: Tensor) -> Tensor | None:
        """Gives the mean of f_i over rows, (); None where x'grad f / p is the value, or the value is not known."""
        return None

    def admitted(self, x: Tensor, after: Tensor) -> Tensor:
        """Gives the step that is allowed; this class allows any."""
        return after


class Quadratic(Objective):
    """f_i(x) = (a_i'x)^2 / 2, whose mean has the gradient C x."""

    def gradient(self, rows: Tensor, x: Tensor) -> Tensor:
        """Gives the mean gradient over rows at x."""
        return rows.T @ (rows @ x) / len(rows)

    def difference(self, rows: Tensor, x: Tensor, anchor: Tensor, weight: Tensor) -> Tensor:
        """Computes the difference with one product to the rows and one back."""
        return self.gradient(rows, x - weight * anchor)


class Point(NamedTuple):
    """A unit vector and what one pass over the data tells about it.

    Attributes:
        x: `[d]`.
        gradient: `[d]`, without its part along components found before.
        multiplier: x'gradient; the Rayleigh quotient if f is quadratic.
        value: f(x) for `Objective.value`, else multiplier / p; None if unknown.
    """

    x: Tensor
    gradient: Tensor
    multiplier: float
    value: float | None

    @property
    def residual(self) -> float:
        """|gradient - multiplier x| / |multiplier|, 0 at a stationary point and where the gradient is 0."""
        if self.multiplier == 0 and not bool(self.gradient.any()):
            return 0.0
        rest = (self.gradient - self.multiplier * self.x).norm().item()
        return rest / max(abs(self.multiplier), torch.finfo(torch.float64).tiny)


class Epoch(NamedTuple):
    """A line of the history: the point that an epoch starts from.

    Attributes:
        component: number of the component that is sought, from 0.
        passes: data passes so far, this point's included.
        value: see `Point`.
        residual: see `Point`.
        eta: step size of the epoch that led here; NaN for the start.
        accepted: False if the value fell, so that the epoch was undone and eta halved.
    """

    component: int
    passes: float
    value: float | None
    residual: float
    eta: float
    accepted: bool


class Climb(NamedTuple):
    """Where the epochs ended, the lines of its history, and whether the residual was small enough."""

    point: Point
    history: list[Epoch]
    converged: bool


# Parameters and scale of an epoch by the point it starts from, that of the epoch before, if any, and the factor of eta.
Rule = Callable[[Point, "Point | None", float], tuple[PowerParameters, float]]


def reduced_gradient(objective: Objective, rows: Tensor, x: Tensor, anchor: Tensor, anchor_gradient: Tensor) -> Tensor:
    """Estimates grad f(x) `[d]` from a batch: unbiased for uniform rows, and exact for x along the anchor.

    The weight makes of a gradient at the anchor that at the projection of x on it: sign(c) (|c| / |anchor|^2)^(p-1),
    c = x'anchor. The thesis (Algorithm 5) leaves out the sign, without which noise does not vanish for x opposite to
    the anchor.
    """
    c = torch.dot(x, anchor)
    weight = c.sign() * (c.abs() / torch.dot(anchor, anchor)) ** (objective.degree - 1)
    return objective.difference(rows, x, anchor, weight) + weight * anchor_gradient


class Landscape:
    """f on the complement of components `[k, d]`, with its two costs: a pass over all rows, or a batch."""

    def __init__(self, objective: Objective, source: RowSource, found: Tensor) -> None:
        self.objective, self.source, self.found = objective, source, found

    def projected(self, vector: Tensor) -> Tensor:
        """Gives a vector without its part along found components."""
        return vector - self.found.T @ (self.found @ vector) if len(self.found) else vector

    def survey(self, vector: Tensor) -> Point:
        """Gives the unit vector along a vector, with its gradient and value from one pass over all rows."""
        vector = self.projected(vector)
        x = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)

        def both(rows: Tensor) -> Tensor:
            value = self.objective.value(rows, x)
            gradient = self.objective.gradient(rows, x)
            return torch.cat([gradient, gradient.new_full((1,), math.nan) if value is None else value.reshape(1)])

        mean = self.source.mean(both)
        gradient, value = self.projected(mean[:-1]), mean[-1].item()
        multiplier = torch.dot(x, gradient).item()
        if math.isnan(value):
            return Point(x, gradient, multiplier, multiplier / self.objective.degree if self.objective.degree else None)
        return Point(x, gradient, multiplier, value)

    def estimate(self, x: Tensor, indices: Tensor | None, point: Point) -> Tensor:
        """Gives the gradient `[d]` at x from a batch and the point surveyed last, or exactly if there is no batch."""
        if indices is None:
            return self.projected(self.source.mean(lambda rows: self.objective.gradient(rows, x)))
        return self.projected(reduced_gradient(self.objective, self.source.take(indices), x, point.x, point.gradient))

    def epoch(
        self, point: Point, batches: Iterable[Tensor | None], parameters: PowerParameters, scale: float
    ) -> Tensor:
        """Runs an epoch from a point x_0 and gives its last point, a unit vector `[d]`: Kim (2020), Algorithms 3 to 5.

        x_1 = (1 - eta) x_0 + eta grad f(x_0), then x_{t+1} = (1 - eta) x_t + eta g_t, or with momentum
        2 ((1 - eta) x_t + eta g_t) - beta x_{t-1}, gradients divided by `scale`, so that eta does not depend on that of
        the data. Every step is divided by its norm, and with momentum the point before is divided by the same norm,
        which does not change directions.
        """
        eta, beta = parameters.eta, parameters.beta
        # The gradient of the first step is known.
        before, x = self._stepped(point.x, (1 - eta) * point.x + (eta / scale) * point.gradient)
        for batch in batches:
            after = (1 - eta) * x + (eta / scale) * self.estimate(x, batch, point)
            before, x = self._stepped(x, after if beta is None else 2 * after - beta * before)
        return x

    def _stepped(self, x: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Divides both by the norm of the second, as far as the objective admits it."""
        after = self.objective.admitted(x, after)
        norm = after.norm().clamp_min(torch.finfo(after.dtype).tiny)
        return x / norm, after / norm


def _fell(point: Point, end: Point, rounding: float) -> bool:
    """Tells whether the value is lower by more than rounding, or is no longer a number."""
    if not math.isfinite(end.multiplier):
        return True
    if end.value is None or point.value is None:
        return False
    return not end.value >= point.value - rounding * max(abs(point.value), abs(point.multiplier))


@dataclass(eq=False, repr=False, kw_only=True)
class StochasticPower(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base of the estimators that climb by variance-reduced epochs; a subclass has `n_components`."""

    batch_size: float = 0.01
    eta: float = 1.0
    epoch_length: int = 25
    tol: float = 1e-6
    max_epochs: int = 100
    random_state: Any = None

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

    @property
    def _warm_up(self) -> int:
        """Exact steps before the first epoch."""
        return 0

    def _transformed(self, rows: Tensor, components: Tensor) -> Tensor:
        return rows @ components.T

    def _offset(self, source: RowSource) -> Tensor | None:
        """Gives the vector that `fit` subtracted from rows."""
        return None

    def _climb_all(self, X: Any, source: RowSource, objective: Objective) -> list[Point]:
        """Finds components one after the other, each in the complement of those before; sets common attributes."""
        d = source.width
        if self.n_components > d:
            raise ValueError(f"n_components must be at most the {d} features of X, got {self.n_components}.")
        generator = generator_of(self.random_state)
        found, climbs, floor = source.like.new_zeros(0, d), [], 0.0
        if source.offset is not None:
            # Only rounding is left of equal rows, less their mean.
            floor = (8 * torch.finfo(found.dtype).eps * source.offset.norm().item()) ** 2
        for number in range(self.n_components):
            landscape, start = Landscape(objective, source, found), self._start(d, generator).to(source.like)
            result = self._climb(landscape, start, self._rule(number), generator, floor)
            x = result.point.x
            if number == 0 and len(result.history) == 1 and result.point.gradient.norm().item() <= floor:
                raise ValueError(
                    f"X must have rows that {'are not zero' if source.offset is None else 'differ'}: the gradient of "
                    "the objective at a random start is zero, and no direction is better than another."
                )
            found = torch.cat([found, (-x if x[x.abs().argmax()] < 0 else x).unsqueeze(0)])
            climbs.append(result)
            floor = max(floor, ROUNDING * torch.finfo(found.dtype).eps * abs(result.point.multiplier))
        self.components_ = same_kind_as_rows(found, X)
        self.history_: list[Epoch] = [line for result in climbs for line in result.history]
        self.n_iter_ = sum(len(result.history) - 1 for result in climbs)
        self.passes_ = source.passes
        late = [str(number) for number, result in enumerate(climbs) if not result.converged]
        if late:
            worst = max(result.point.residual for result in climbs)
            warn_of_end(
                f"component {', '.join(late)} did not reach tol={self.tol:g} in max_epochs={self.max_epochs} (residual "
                f"{worst:.1e}): raise max_epochs, batch_size or tol."
            )
        return [result.point for result in climbs]

    def _climb(
        self, landscape: Landscape, start: Tensor, rule: Rule, generator: torch.Generator, floor: float
    ) -> Climb:
        """Runs epochs from a start until the residual is small, after `_warm_up` exact power steps.

        An epoch after which the value is lower is undone, and eta is halved from there on. Steps on all rows are exact.
        The tolerance is no less than the rounding of the data allows; a gradient no longer than `floor` is 0, since
        only rounding is left of the data.
        """
        rounding, source = ROUNDING * torch.finfo(start.dtype).eps, landscape.source
        batch = batch_rows(self.batch_size, len(source))

        def done(point: Point) -> bool:
            return point.residual <= max(self.tol, rounding) or point.gradient.norm().item() <= floor

        def batches(steps: int) -> Iterator[Tensor | None]:
            for _ in range(steps):
                exact = batch >= len(source)
                yield None if exact else torch.randint(len(source), (batch,), generator=generator, device="cpu")

        def line(point: Point, eta: float, accepted: bool) -> Epoch:
            return Epoch(len(landscape.found), source.passes, point.value, point.residual, eta, accepted)

        point, last, factor = landscape.survey(start), None, 1.0
        for _ in range(self._warm_up):
            if done(point):
                break
            last, point = point, landscape.survey(point.gradient)
        history = [line(point, math.nan, True)]
        while not done(point) and len(history) <= self.max_epochs:
            parameters, scale = rule(point, last, factor)
            end = landscape.survey(landscape.epoch(point, batches(parameters.epoch_length - 1), parameters, scale))
            accepted = not _fell(point, end, rounding)
            history.append(line(end, parameters.eta, accepted))
            if accepted:
                point, last = end, point
            else:
                factor /= 2
        return Climb(point, history, done(point))

    def _rule(self, number: int) -> Rule:
        """Gives the parameters of each epoch of a component; gradients are divided by the multiplier."""

        def rule(point: Point, last: Point | None, factor: float) -> tuple[PowerParameters, float]:
            return PowerParameters(factor * float(self.eta), int(self.epoch_length)), abs(point.multiplier)

        return rule

    def _start(self, d: int, generator: torch.Generator) -> Tensor:
        return torch.randn(d, generator=generator, dtype=torch.float64, device="cpu")

    def _check_common(self) -> None:
        check_integer("n_components", self.n_components)
        check_integer("max_epochs", self.max_epochs)
        check_number("eta", self.eta, expected="in (0, 1]", allowed=lambda eta: 0 < eta <= 1)
        check_integer("epoch_length", self.epoch_length)
        check_number("tol", self.tol)
