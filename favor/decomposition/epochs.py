"""Epochs of variance-reduced power steps, which all stochastic estimators of this package run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from favor.decomposition.power_rules import PowerParameters
from favor.decomposition.rows import RowSource

# Values that differ by fewer units of rounding than this count as equal.
ROUNDING = 64


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
        """Gives the mean gradient over rows at x; see `Objective`."""
        return rows.T @ (rows @ x) / len(rows)

    def difference(self, rows: Tensor, x: Tensor, anchor: Tensor, weight: Tensor) -> Tensor:
        """Computes the difference with one product to the rows and one back; see `Objective`."""
        return rows.T @ (rows @ (x - weight * anchor)) / len(rows)


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
    """Where `climb` ended, the lines of its history, and whether the residual was small enough."""

    point: Point
    history: list[Epoch]
    converged: bool


Rule = Callable[[Point, "Point | None", float], tuple[PowerParameters, float]]


def anchor_weight(x: Tensor, anchor: Tensor, degree: float) -> Tensor:
    """Gives the factor by which a gradient at the anchor becomes that at the projection of x on it, ().

    sign(c) |c|^(p-1) / |anchor|^(2(p-1)) with c = x'anchor. The thesis (Algorithm 5) leaves out the sign, without which
    noise does not vanish for x opposite to the anchor.
    """
    c = torch.dot(x, anchor)
    return c.sign() * (c.abs() / torch.dot(anchor, anchor)) ** (degree - 1)


def reduced_gradient(objective: Objective, rows: Tensor, x: Tensor, anchor: Tensor, anchor_gradient: Tensor) -> Tensor:
    """Estimates grad f(x) from a batch: unbiased if rows are drawn uniformly, and exact for x along the anchor.

    Args:
        objective: f.
        rows: the batch `[b, d]`.
        x: `[d]`.
        anchor: x_0 `[d]`.
        anchor_gradient: grad f(x_0) over all rows `[d]`.

    Returns:
        `[d]`.
    """
    weight = anchor_weight(x, anchor, objective.degree)
    return objective.difference(rows, x, anchor, weight) + weight * anchor_gradient


def run_epoch(
    estimate: Callable[[Tensor, Tensor | None], Tensor],
    anchor: Tensor,
    anchor_gradient: Tensor,
    batches: Iterable[Tensor | None],
    parameters: PowerParameters,
    scale: float = 1.0,
    admitted: Callable[[Tensor, Tensor], Tensor] = lambda x, after: after,
) -> Tensor:
    """Runs an epoch and gives its last point, a unit vector `[d]`.

    x_1 = (1 - eta) x_0 + eta grad f(x_0), then x_{t+1} = (1 - eta) x_t + eta g_t, or with momentum
    2 ((1 - eta) x_t + eta g_t) - beta x_{t-1}. Every step is divided by its norm, and with momentum the point before is
    divided by the same norm, which does not change directions.

    Args:
        estimate: g of a unit vector `[d]` and a batch.
        anchor: x_0, unit.
        anchor_gradient: grad f(x_0).
        batches: row numbers for each of the steps after the first.
        parameters: eta and beta; the number of steps is that of `batches` plus one.
        scale: gradients are divided by it, so that eta does not depend on the scale of the data.
        admitted: changes steps that leave the domain of f.

    References:
        Kim (2020), Algorithms 3, 4 and 5.
    """
    eta, beta = parameters.eta, parameters.beta
    # The gradient of the first step is known.
    before, x = _normed(anchor, admitted(anchor, (1 - eta) * anchor + (eta / scale) * anchor_gradient))
    for batch in batches:
        after = (1 - eta) * x + (eta / scale) * estimate(x, batch)
        if beta is not None:
            after = 2 * after - beta * before
        before, x = _normed(x, admitted(x, after))
    return x


def _normed(x: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Divides both by the norm of the second."""
    norm = after.norm().clamp_min(torch.finfo(after.dtype).tiny)
    return x / norm, after / norm


class Landscape:
    """f on the complement of components found before, with its two costs: a pass over all rows, or a batch.

    Args:
        objective: f.
        source: the rows.
        found: orthonormal components `[k, d]`, k >= 0.
    """

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
        """Runs an epoch from a point and gives its end; see `run_epoch`."""
        estimate, admitted = partial(self.estimate, point=point), self.objective.admitted
        return run_epoch(estimate, point.x, point.gradient, batches, parameters, scale, admitted)

    def line(self, point: Point, eta: float, accepted: bool) -> Epoch:
        """Gives one line of the history."""
        return Epoch(len(self.found), self.source.passes, point.value, point.residual, eta, accepted)


def climb(
    landscape: Landscape,
    start: Tensor,
    rule: Rule,
    *,
    batch: int,
    tol: float,
    max_epochs: int,
    generator: torch.Generator,
    warm_up: int = 0,
    floor: float = 0.0,
) -> Climb:
    """Runs epochs from a start until the residual is small.

    An epoch after which the value is lower is undone, and eta is halved from there on.

    Args:
        landscape: f and the rows.
        start: `[d]`, not 0.
        rule: parameters and scale of an epoch by the point it starts from, the point of the epoch before (None at the
            first) and the factor of eta.
        batch: rows of a batch; all rows if there are no more, which makes steps exact.
        tol: of `Point.residual`; no less than the rounding of the data allows.
        max_epochs: largest number of epochs.
        generator: of batches, on the CPU.
        warm_up: exact power steps before the first epoch.
        floor: a gradient no longer than this is 0: what is left of the data is rounding.
    """
    rounding, n = ROUNDING * torch.finfo(start.dtype).eps, len(landscape.source)

    def done(point: Point) -> bool:
        return point.residual <= max(tol, rounding) or point.gradient.norm().item() <= floor

    def batches(steps: int) -> Iterator[Tensor | None]:
        for _ in range(steps):
            yield torch.randint(n, (batch,), generator=generator, device="cpu") if batch < n else None

    point, last, factor = landscape.survey(start), None, 1.0
    for _ in range(warm_up):
        if done(point):
            break
        last, point = point, landscape.survey(point.gradient)
    history = [landscape.line(point, math.nan, True)]
    while not done(point) and len(history) <= max_epochs:
        parameters, scale = rule(point, last, factor)
        end = landscape.survey(landscape.epoch(point, batches(parameters.epoch_length - 1), parameters, scale))
        accepted = not _fell(point, end, rounding)
        history.append(landscape.line(end, parameters.eta, accepted))
        if accepted:
            point, last = end, point
        else:
            factor /= 2
    return Climb(point, history, done(point))


def _fell(point: Point, end: Point, rounding: float) -> bool:
    """Tells whether the value is lower by more than rounding, or is no longer a number."""
    if not math.isfinite(end.multiplier):
        return True
    if end.value is None or point.value is None:
        return False
    return not end.value >= point.value - rounding * max(abs(point.value), abs(point.multiplier))
