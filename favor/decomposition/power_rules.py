"""Step size, epoch length and momentum of the variance-reduced power methods from eigenvalues and noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Halvings of the interval (0, 1] in which eta is sought: below the last bits of any eta above 1e-40.
HALVINGS = 200
# The estimate of l2 stays below l1 by this share, so that the gap is never 0.
SMALLEST_GAP = 1e-6


class PowerParameters(NamedTuple):
    """Step, momentum and length of one epoch.

    Attributes:
        eta: step size in (0, 1].
        epoch_length: m, steps of an epoch, the first of which is exact.
        beta: weight of the last but one point; None without momentum.
    """

    eta: float
    epoch_length: int
    beta: float | None = None


def power_rule(
    l1: float,
    l2: float,
    sigma2: float,
    batch: int,
    *,
    eta: float | None = None,
    epoch_length: int | None = None,
) -> PowerParameters:
    """Gives the largest step of VR Power that a batch allows, and the epoch that goes with it.

    With them an epoch takes theta = sum_{k>1} E(u_k'x)^2 / E(u_1'x)^2 to at most 3/4 of it.

    Args:
        l1: largest eigenvalue of C.
        l2: second eigenvalue, 0 <= l2 < l1.
        sigma2: E|a a' - C|^2 (spectral norm) over rows a, >= 0.
        batch: |S|, rows per step.
        eta: a step in (0, 1]; None chooses it.
        epoch_length: m >= 1; None chooses it.

    Returns:
        `PowerParameters` without momentum.

    Raises:
        ValueError: for numbers out of range.

    References:
        C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), section 4.3.
        The bisection keeps the ceiling of m, which the closed form leaves out, so that the inequality holds.

    Example:
        >>> from favor.decomposition.power_rules import power_rule
        >>> power_rule(1.0, 0.7, 5.0, 200)
        PowerParameters(eta=1.0, epoch_length=2, beta=None)
    """
    _check_problem(l1, l2, sigma2, batch)

    def length(eta: float) -> int:
        return math.ceil((1 - eta + eta * l1) * math.log(2) / (2 * eta * (l1 - l2)))

    def rows(eta: float, m: int) -> float:
        return 16 * eta**2 * sigma2 * m / (1 - eta + eta * l1) ** 2

    return PowerParameters(*_chosen(length, rows, batch, eta, epoch_length))


def heavy_ball_rule(
    l1: float,
    l2: float,
    sigma2: float,
    batch: int,
    *,
    eta: float | None = None,
    epoch_length: int | None = None,
) -> PowerParameters:
    """Gives the parameters of an epoch of VR HB Power, whose momentum is `heavy_ball_beta`.

    Arguments, errors and source are those of `power_rule`.
    """
    _check_problem(l1, l2, sigma2, batch)

    def slack(eta: float) -> float:
        """Gives l1 Delta (2 (1 - eta) + eta (l1 + l2)), which is q^2 / eta."""
        return (l1 - l2) * (2 * (1 - eta) + eta * (l1 + l2))

    def length(eta: float) -> int:
        q = math.sqrt(eta * slack(eta))
        return math.ceil((1 - eta + eta * l1 + q) / (eta * (l1 - l2) + q) * math.log(8) / 2)

    def rows(eta: float, m: int) -> float:
        return 128 * eta * sigma2 * m / slack(eta)

    eta, m = _chosen(length, rows, batch, eta, epoch_length)
    return PowerParameters(eta, m, heavy_ball_beta(eta, l2))


def heavy_ball_beta(eta: float, l2: float) -> float:
    """Gives beta = (1 - eta + eta l2)^2, with which all directions except the first grow alike."""
    return (1 - eta + eta * l2) ** 2


def second_eigenvalue(point: Tensor, image: Tensor, last: Tensor, last_image: Tensor) -> float | None:
    """Estimates l2 from two points and their images, without another pass over the data.

    It is the Rayleigh quotient of the part of `last` orthogonal to `point`: at most l2 once `point` is u_1, mostly too
    low.

    Args:
        point: x, unit `[d]`.
        image: C x `[d]`.
        last: the point of the epoch before, unit `[d]`.
        last_image: C times it `[d]`.

    Returns:
        The estimate within [0, (1 - 1e-6) x'C x]; None if the points are too near each other to tell.

    References:
        Kim (2020), section 4.4; both bounds and the refusal of near points are additions.
    """
    overlap = torch.dot(last, point).item()
    rest = 1 - overlap**2
    if not rest >= max(1e-14, 4 * torch.finfo(point.dtype).eps):
        return None
    l1 = torch.dot(point, image).item()
    crossed = torch.dot(last, last_image) - 2 * overlap * torch.dot(point, last_image)
    estimate = (crossed.item() + overlap**2 * l1) / rest
    return min(max(estimate, 0.0), l1 * (1 - SMALLEST_GAP))


def row_deviations(rows: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Gives the spectral norms of a a' - C, one for each row a; sigma^2 is the mean of their squares.

    The eigenvalues of a change of rank one are the roots of a secular equation; the two outer ones are bisected.

    Args:
        rows: a `[b, d]`.
        values: eigenvalues of C in rising order `[d]`.
        vectors: its eigenvectors in columns `[d, d]`.

    Returns:
        `[b]`, in float64.
    """
    square = (rows.double() @ vectors.double()).square()
    values = values.double()
    # The positive eigenvalue of a a' - C, if any: sum z^2 / (mu + l) falls and crosses 1 between 0 and |a|^2.
    low, high = torch.zeros_like(square[:, 0]), square.sum(-1)
    for _ in range(60):
        middle = (low + high) / 2
        above = (square / (middle.unsqueeze(-1) + values)).sum(-1) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    positive = low
    # Minus the lowest one lies between l2 and l1, where sum z^2 / (l - nu) rises.
    second = values[-2] if len(values) > 1 else torch.zeros_like(values[-1])
    low, high = second.expand_as(positive), values[-1].expand_as(positive)
    for _ in range(60):
        middle = (low + high) / 2
        above = (square / (values - middle.unsqueeze(-1))).nan_to_num().sum(-1) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.maximum(positive, high)


def _chosen(
    length: Callable[[float], int],
    rows: Callable[[float, int], float],
    batch: int,
    eta: float | None,
    epoch_length: int | None,
) -> tuple[float, int]:
    """Gives eta and m: those given, else the largest eta found for which the batch suffices, and its m."""
    if eta is not None and not 0 < eta <= 1:
        raise ValueError(f"eta must be in (0, 1], got {eta!r}.")
    if epoch_length is not None and epoch_length < 1:
        raise ValueError(f"epoch_length must be at least 1, got {epoch_length!r}.")

    def steps(eta: float) -> int:
        return length(eta) if epoch_length is None else epoch_length

    if eta is None:
        low, high = 0.0, 1.0
        if rows(high, steps(high)) <= batch:
            low = high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if not low < middle < high:
                break
            low, high = (middle, high) if rows(middle, steps(middle)) <= batch else (low, middle)
        eta = low
        if eta == 0:
            raise ValueError("no eta is small enough for this batch: make batch larger, or sigma2 smaller.")
    return eta, steps(eta)


def _check_problem(l1: float, l2: float, sigma2: float, batch: int) -> None:
    if not 0 <= l2 < l1 < math.inf:
        raise ValueError(f"eigenvalues must be finite with 0 <= l2 < l1, got l1 = {l1!r} and l2 = {l2!r}.")
    if not 0 <= sigma2 < math.inf:
        raise ValueError(f"sigma2 must be finite and at least 0, got {sigma2!r}.")
    if batch < 1:
        raise ValueError(f"batch must be at least 1 row, got {batch!r}.")
