"""The optimizers that `favor.eval.papers.majorization` compares, and the search for the best setting of each.

Step sizes are on half decades, with bounds far from where the search starts; other options have a few values. The
search has the same number of trials for every method. "SoftmaxBound, exact" is missing, because it is "SPFB, damped"
with another unit of damping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from favor import optim
from favor.eval.papers.majorization.data import Problem
from favor.eval.papers.majorization.steps import FullBatch, Newton, Stepper, Stochastic

Configuration = Mapping[str, Any]
HALF_DECADES = 8  # greatest distance of a step size from the start of its search
LARGEST_NEWTON = 3000
LARGEST_SBM = 5000
LARGEST_INPUT = 2000  # features d, for methods that factorise a d x d matrix in every step
LINE_SEARCH = 30  # greatest number of evaluations in an iteration of L-BFGS
LARGEST_SINGLE = 5000  # rows of a data set for which batches of one row are tried


@dataclass(frozen=True)
class Axis:
    """Values of one option, ordered so that neighbours are alike, and the place where the search starts."""

    values: tuple[Any, ...]
    start: int = 0


Score = tuple[float, ...]


def half_decades(start: float) -> Axis:
    """Lists step sizes 10^(k/2) around `start`."""
    middle = round(2 * math.log10(start))
    return Axis(tuple(10 ** (k / 2) for k in range(middle - HALF_DECADES, middle + HALF_DECADES + 1)), HALF_DECADES)


def batches(problem: Problem, sizes: Sequence[int], start: int) -> Axis:
    """Lists batch sizes of at most a third of the rows; one row only for small data sets, or if no other size fits.

    Args:
        problem: the data.
        sizes: batch sizes.
        start: size at which the search starts.
    """
    kept = [m for m in sizes if 3 * m <= problem.rows and (m > 1 or problem.rows <= LARGEST_SINGLE)] or [1]
    return Axis(tuple(kept), min(range(len(kept)), key=lambda i: abs(math.log(kept[i] / start))))


@dataclass(frozen=True)
class Method:
    """One row of the tables.

    Args:
        name: name in tables.
        make: makes the stepper from problem, parameters, configuration and seed.
        axes: options that are tuned, by name.
        obstacle: reason why the method is not possible for a problem; empty if it is possible.
    """

    name: str
    make: Callable[[Problem, nn.Linear, Configuration, int], Stepper]
    axes: Callable[[Problem], dict[str, Axis]] = lambda problem: {}
    obstacle: Callable[[Problem], str] = lambda problem: ""


Axes = Callable[[Problem], dict[str, Axis]]


def tuned(rate: float | Callable[[Problem], float], sizes: Sequence[int], start: int, **options: Axis) -> Axes:
    """Makes the axes of a stochastic method.

    Args:
        rate: step size at which the search starts, or a function that gives it for a problem.
        sizes: batch sizes.
        start: batch size at which the search starts.
        options: further axes.
    """
    return lambda problem: {
        "lr": half_decades(rate(problem) if callable(rate) else rate),
        "batch": batches(problem, sizes, start),
        **options,
    }


def stochastic(build: Callable[..., torch.optim.Optimizer], averaged: bool = False) -> Callable[..., Stochastic]:
    """Makes a `Method.make` from a function of parameters, problem and configuration that makes the optimizer."""

    def make(problem: Problem, head: nn.Linear, configuration: Configuration, seed: int) -> Stochastic:
        optimizer = build(head, problem, configuration)
        factor = step_factor(problem, configuration)
        return Stochastic(problem, head, optimizer, configuration["batch"], seed, factor, averaged)

    return make


def step_factor(problem: Problem, configuration: Configuration) -> Callable[[int], float] | None:
    """Gives the factor of the step size after i steps: tau/(tau + i), or 1/(1 + i) if tau is 0; None: no decay.

    Tau is the option "tau"; with the option "decay" it is the number of steps of an epoch.
    """
    if "tau" in configuration:
        tau = configuration["tau"]
        return lambda i: tau / (tau + i) if tau else 1 / (1 + i)
    if configuration.get("decay"):
        steps = math.ceil(problem.rows / configuration["batch"])
        return lambda i: steps / (steps + i)
    return None


def full(build: Callable[[nn.Linear, Problem, Configuration], torch.optim.Optimizer]) -> Callable[..., FullBatch]:
    """Makes a `Method.make` of favor's full-batch optimizers."""
    return lambda problem, head, configuration, seed: FullBatch(problem, head, build(head, problem, configuration))


def lbfgs(problem: Problem, head: nn.Linear, configuration: Configuration, seed: int) -> FullBatch:
    """Makes a stepper with one iteration of torch's L-BFGS per step.

    Args:
        problem: the data.
        head: the parameters.
        configuration: not used.
        seed: not used.
    """
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=1,
        max_eval=LINE_SEARCH,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    return FullBatch(problem, head, optimizer, regularised=True)


def bound(curvature: str) -> Callable[..., Stochastic]:
    """Makes a `Method.make` of SoftmaxBound."""
    return stochastic(
        lambda head, p, c: optim.SoftmaxBound(
            head, lr=c["lr"], weight_decay=p.lam, damping=c["damping"], curvature=curvature
        )
    )


def lspfb(rule: str) -> Callable[..., Stochastic]:
    """Makes a `Method.make` of LSPFB."""
    return stochastic(lambda head, p, c: optim.LSPFB(head, lr=c["lr"], weight_decay=p.lam, rank=c["rank"], rule=rule))


def sbm(variant: str) -> Callable[..., Stochastic]:
    """Makes a `Method.make` of SBM."""
    return stochastic(lambda head, p, c: optim.SBM(head, p.rows, lr=c["lr"], weight_decay=p.lam, variant=variant))


def spfb_literal(head: nn.Linear, problem: Problem, configuration: Configuration) -> torch.optim.Optimizer:
    """Makes the optimizer SPFB as published."""
    return optim.SPFB(head, lr=configuration["lr"], weight_decay=problem.lam, literal=True)


def parameters_up_to(limit: int) -> Callable[[Problem], str]:
    """Makes a `Method.obstacle` for methods that need a D x D matrix."""
    return lambda p: f"D = {p.size} > {limit}: no dense curvature" if p.size > limit else ""


def inputs_up_to(limit: int) -> Callable[[Problem], str]:
    """Makes a `Method.obstacle` for methods that need a d x d matrix."""
    return lambda p: f"d = {p.x.shape[1]} > {limit}: d x d matrix in every step" if p.x.shape[1] > limit else ""


def natural(factor: float) -> Callable[[Problem], float]:
    """Gives the step size of gradient descent: `factor` divided by the mean of |x|^2."""
    return lambda problem: factor / problem.mean_square


DECAY = Axis((False, True))
DAMPINGS = (1e-3, 1e-2, 1e-1)
RANK = Axis((1, 5))
MANY = (10, 100, 1000)
FEW = (1, 10, 100)
SPFB_AXES = tuned(1.0, MANY, 100, decay=DECAY, damping=Axis(DAMPINGS, 1))
BOUND_AXES = tuned(1.0, MANY, 100, decay=DECAY, damping=Axis(DAMPINGS, 2))
FEATURES = inputs_up_to(LARGEST_INPUT)

METHODS: dict[str, Method] = {
    "sgd": Method(
        "SGD",
        stochastic(lambda head, p, c: torch.optim.SGD(head.parameters(), lr=c["lr"], weight_decay=p.lam)),
        tuned(natural(1), FEW, 10),
    ),
    "asgd_tau": Method(
        "ASGD, tau/(tau + i)",
        stochastic(lambda head, p, c: torch.optim.SGD(head.parameters(), lr=c["lr"], weight_decay=p.lam), True),
        tuned(natural(1), FEW, 10, tau=Axis((10, 100, 1000, 10_000, 100_000), 2)),
    ),
    "asgd": Method(
        "ASGD, 1/i",
        stochastic(lambda head, p, c: torch.optim.SGD(head.parameters(), lr=c["lr"], weight_decay=p.lam), True),
        tuned(natural(10), FEW, 10, tau=Axis((0,))),
    ),
    "adam": Method(
        "Adam",
        stochastic(lambda head, p, c: torch.optim.Adam(head.parameters(), lr=c["lr"], weight_decay=p.lam)),
        tuned(0.01, FEW, 10, decay=DECAY),
    ),
    "lbfgs": Method("L-BFGS", lbfgs),
    "newton": Method(
        "Newton", lambda problem, head, c, seed: Newton(problem, head), obstacle=parameters_up_to(LARGEST_NEWTON)
    ),
    "bbm": Method(
        "BBM",
        full(lambda head, p, c: optim.BBM(head, lr=c["lr"], weight_decay=p.lam, order=c["order"])),
        lambda problem: {"lr": Axis((1.0, 1.9), 1), "order": Axis(("ascending", "descending"))},
        FEATURES,
    ),
    "bbm_cheap": Method(
        "BBM, cheaper K",
        full(lambda head, p, c: optim.BBM(head, lr=c["lr"], weight_decay=p.lam, curvature=c["curvature"])),
        lambda problem: {"lr": Axis((1.0, 1.9), 1), "curvature": Axis(("block", "bohning", "kfac"), 1)},
        FEATURES,
    ),
    "sbm": Method("SBM, online", sbm("online"), tuned(1.0, FEW, 10), parameters_up_to(LARGEST_SBM)),
    "sbm_accumulated": Method(
        "SBM, accumulated", sbm("accumulated"), tuned(1.0, FEW, 10), parameters_up_to(LARGEST_SBM)
    ),
    "spfb_one": Method("SPFB as published, m = 1", stochastic(spfb_literal), tuned(1.0, (1,), 1)),
    "spfb_literal": Method("SPFB as published", stochastic(spfb_literal), tuned(1.0, MANY, 100), FEATURES),
    "spfb": Method(
        "SPFB, damped",
        stochastic(lambda head, p, c: optim.SPFB(head, lr=c["lr"], weight_decay=p.lam, damping=c["damping"])),
        SPFB_AXES,
        FEATURES,
    ),
    "prox": Method(
        "ProxBoundSGD",
        stochastic(lambda head, p, c: optim.ProxBoundSGD(head, lr=c["lr"], weight_decay=p.lam)),
        tuned(natural(3), (1,), 1, decay=DECAY),
    ),
    "lspfb": Method("LSPFB", lspfb("exact"), tuned(3.0, MANY, 100, rank=RANK, decay=DECAY)),
    "lspfb_repaired": Method("LSPFB, repaired", lspfb("repaired"), tuned(10.0, MANY, 100, rank=RANK, decay=DECAY)),
    "bound_bohning": Method("SoftmaxBound, bohning", bound("bohning"), BOUND_AXES, FEATURES),
    "bound_diag": Method("SoftmaxBound, diag", bound("diag"), BOUND_AXES, FEATURES),
    "bound_block": Method("SoftmaxBound, block", bound("block"), BOUND_AXES, FEATURES),
    "bound_kfac": Method("SoftmaxBound, kfac", bound("kfac"), BOUND_AXES, FEATURES),
}


def search(
    axes: Mapping[str, Axis],
    score: Callable[[Configuration], Score],
    trials: int,
    over: Callable[[], bool] = lambda: False,
) -> tuple[Configuration, bool, int]:
    """Searches, axis by axis, for the configuration with the smallest score.

    The search begins at the start of every axis. It moves along one axis after the other, up and then down, while the
    score gets smaller, until no neighbour is better or the trials are used up.

    Args:
        axes: by option.
        score: gives the score of a configuration.
        trials: greatest number of calls of `score`.
        over: tells whether to stop for another reason.

    Returns:
        The best configuration; whether a neighbour of its step size has not been tried or lies outside the axis (only
        if the first axis is that of step sizes, else False); the number of trials.
    """
    tried: dict[tuple[int, ...], Score] = {}

    def configuration(place: tuple[int, ...]) -> Configuration:
        return {name: axis.values[i] for (name, axis), i in zip(axes.items(), place, strict=True)}

    def neighbour(place: tuple[int, ...], number: int, side: int) -> tuple[int, ...] | None:
        moved = place[number] + side
        inside = 0 <= moved < len(list(axes.values())[number].values)
        return (*place[:number], moved, *place[number + 1 :]) if inside else None

    def visit(place: tuple[int, ...] | None) -> Score:
        if place is None or (place not in tried and tried and (len(tried) >= trials or over())):
            return (math.inf,)
        if place not in tried:
            tried[place] = score(configuration(place))
        return tried[place]

    best = tuple(axis.start for axis in axes.values())
    visit(best)
    improved = bool(axes)
    while improved and len(tried) < trials:
        improved = False
        for number in range(len(axes)):
            for side in (1, -1):
                while (place := neighbour(best, number, side)) and visit(place) < tried[best]:
                    best, improved = place, True
    free = bool(axes) and len(next(iter(axes.values())).values) > 2 * HALF_DECADES
    edge = free and any(neighbour(best, 0, side) not in tried for side in (1, -1))
    return configuration(best), edge, len(tried)
