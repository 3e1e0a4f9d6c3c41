"""The optimizers that `favor.eval.papers.majorization` compares: the problem, their steps, and their options.

Every method trains one `torch.nn.Linear` without bias. Stochastic methods go through a new random order of the rows in
every epoch. ASGD evaluates the mean of all iterates after the first epoch, and before that the iterate itself. Passes
over the data: a mini-batch of m rows is m/T, an evaluation of loss and gradient by a full-batch method is 1, also in a
line search. Other computations of a method (the exact Hessian, a bound) are not passes, but their seconds count.

Step sizes are on half decades, with bounds far from where the search starts; other options have a few values.
"SoftmaxBound, exact" is missing, because it is "SPFB, damped" with another unit of damping.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from favor.optim import BBM, LSPFB, SBM, SPFB, ProxBoundSGD, SoftmaxBound

SUFFICIENT_DECREASE = 1e-4
HALF_DECADES = 8  # greatest distance of a step size from the start of its search
LARGEST_NEWTON = 3000
LARGEST_SBM = 5000
LARGEST_INPUT = 2000  # features d, for methods that factorise a d x d matrix in every step
LINE_SEARCH = 30  # greatest number of evaluations in an iteration of L-BFGS
LARGEST_SINGLE = 5000  # rows of a data set for which batches of one row are tried


@dataclass(frozen=True)
class Problem:
    """The objective F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2, and rows to test on.

    Inputs x `[T, d]` have a column of ones at the end, W is `[n, d]` for n `classes`, and `lam_sum` is lam * T.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    lam_sum: float

    @property
    def rows(self) -> int:
        """Number of training examples T."""
        return len(self.y)

    @property
    def size(self) -> int:
        """Number of parameters D = n d."""
        return self.classes * self.x.shape[1]

    @property
    def lam(self) -> float:
        """The regularisation lam of the MEAN convention."""
        return self.lam_sum / self.rows

    @cached_property
    def mean_square(self) -> float:
        """Mean of |x_j|^2."""
        return float(self.x.square().sum(-1, dtype=torch.float64).mean())

    @cached_property
    def doubles(self) -> tuple[Tensor, Tensor]:
        """The inputs and the one-hot labels in double precision."""
        return self.x.double(), nn.functional.one_hot(self.y, self.classes).double()

    @torch.no_grad()
    def objective(self, weight: Tensor) -> float:
        """Computes F."""
        loss = cross_entropy(self.x @ weight.T, self.y)
        return float(loss) + self.lam / 2 * float(weight.square().sum())

    def gradient(self, weight: Tensor) -> tuple[float, Tensor, Tensor]:
        """Computes F, its gradient, and the probabilities `[T, n]`, all in double precision."""
        x, onehot = self.doubles
        log_p = (x @ weight.T).log_softmax(-1)
        value = -(log_p * onehot).sum() / self.rows + self.lam / 2 * weight.square().sum()
        p = log_p.exp()
        return float(value), (p - onehot).T @ x / self.rows + self.lam * weight, p

    @torch.no_grad()
    def error(self, weight: Tensor) -> float:
        """Computes the fraction of test rows with a wrong label."""
        return float(((self.x_test @ weight.T).argmax(-1) != self.y_test).double().mean())


@dataclass(frozen=True)
class Optimum:
    """The minimum of F, the test error at the minimum, and |gradient|^2 / (2 lam), an upper bound of F - F*."""

    objective: float
    error: float
    excess: float


def minimise(problem: Problem) -> Optimum:
    """Finds the minimum of a problem by scipy's L-BFGS in double precision."""
    shape = (problem.classes, problem.x.shape[1])

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, _ = problem.gradient(torch.from_numpy(flat).view(shape))
        return value, gradient.numpy().ravel()

    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 30, "ftol": 0.0, "gtol": 1e-11}
    start = np.zeros(problem.size)
    found = optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    weight = torch.from_numpy(found.x).view(shape).to(problem.x)
    return Optimum(float(found.fun), problem.error(weight), float(found.jac @ found.jac) / (2 * problem.lam))


def initial_head(problem: Problem, seed: int) -> nn.Linear:
    """Makes a linear layer near 0: initial logits have a standard deviation of about 0.1."""
    head = nn.Linear(problem.x.shape[1], problem.classes, bias=False, dtype=problem.x.dtype)
    draw = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    head.weight.data.copy_(0.1 / math.sqrt(problem.mean_square) * draw)
    return head


class Stepper(abc.ABC):
    """Takes steps of a method."""

    full_batch = True
    passes = 0.0

    def __init__(self, problem: Problem, head: nn.Linear) -> None:
        self.problem, self.head = problem, head

    @property
    def weight(self) -> Tensor:
        """Gives the weights that are evaluated."""
        return self.head.weight.detach()

    @abc.abstractmethod
    def advance(self) -> None:
        """Takes one step."""


class Stochastic(Stepper):
    """Steps of an optimizer on mini-batches, of which the last of an epoch may be smaller."""

    full_batch = False

    def __init__(
        self, problem: Problem, head: nn.Linear, optimizer: Optimizer, options: Mapping[str, Any], seed: int, mean: bool
    ) -> None:
        super().__init__(problem, head)
        self.optimizer, self.batch = optimizer, options["batch"]
        factor = step_factor(problem, options)
        self.scheduler = LambdaLR(optimizer, factor) if factor else None
        self.generator = torch.Generator().manual_seed(seed)
        self.averaged, self.number, self.mean = mean, 0, head.weight.detach().clone()
        self.epoch, self.position = -1, problem.rows

    @property
    def weight(self) -> Tensor:
        """Gives the weights that are evaluated."""
        return self.mean if self.number else super().weight

    def advance(self) -> None:
        """Takes one step on a mini-batch."""
        if self.position >= self.problem.rows:
            order = torch.randperm(self.problem.rows, generator=self.generator)
            self.x, self.y = self.problem.x[order], self.problem.y[order]
            self.epoch, self.position = self.epoch + 1, 0
        rows = slice(self.position, self.position + self.batch)
        cross_entropy(self.head(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        self.position = min(self.position + self.batch, self.problem.rows)
        self.passes = self.epoch + self.position / self.problem.rows
        if self.averaged and self.epoch > 0:
            self.number += 1
            self.mean.lerp_(self.head.weight.detach(), 1 / self.number)


def step_factor(problem: Problem, options: Mapping[str, Any]) -> Callable[[int], float] | None:
    """Gives the factor of the step size after i steps: tau/(tau + i), or 1/(1 + i) if tau is 0; None: no decay.

    Tau is the option "tau"; with the option "decay" it is the number of steps of an epoch.
    """
    if "tau" in options:
        tau = options["tau"]
        return lambda i: tau / (tau + i) if tau else 1 / (1 + i)
    if options.get("decay"):
        steps = math.ceil(problem.rows / options["batch"])
        return lambda i: steps / (steps + i)
    return None


class FullBatch(Stepper):
    """Steps of an optimizer with a closure.

    If it is `regularised`, the closure adds lam/2 |W|^2, which an optimizer of torch needs. It then does not evaluate
    again at the parameters of its last evaluation: torch's L-BFGS calls it twice there.
    """

    def __init__(self, problem: Problem, head: nn.Linear, optimizer: Optimizer, regularised: bool = False) -> None:
        super().__init__(problem, head)
        self.optimizer, self.regularised = optimizer, regularised
        self.loss = 0.0
        self.point: Tensor | None = None

    def closure(self) -> float:
        """Computes the loss at the parameters, and stores its gradient."""
        if self.regularised and self.point is not None and torch.equal(self.point, self.weight):
            return self.loss
        self.optimizer.zero_grad()
        loss = cross_entropy(self.head(self.problem.x), self.problem.y)
        if self.regularised:
            loss = loss + self.problem.lam / 2 * self.head.weight.square().sum()
            self.point = self.weight.clone()
        loss.backward()
        self.loss = loss.item()
        self.passes += 1
        return self.loss

    def advance(self) -> None:
        """Takes one step; a step without evaluation counts as a pass, so that a run ends."""
        before = self.passes
        self.optimizer.step(self.closure)
        self.passes = max(self.passes, before + 1)


class Newton(Stepper):
    """Newton's method with the exact Hessian; it halves the step until F decreases enough."""

    at: tuple[Tensor, float, Tensor, Tensor] | None = None

    def evaluate(self, weight: Tensor) -> tuple[Tensor, float, Tensor, Tensor]:
        """Evaluates a point; gives the point itself, F, the gradient, and the probabilities `[T, n]`."""
        self.passes += 1
        return weight, *self.problem.gradient(weight)

    def hessian(self, p: Tensor) -> Tensor:
        """Computes the Hessian of F, `[D, D]`."""
        x = self.problem.doubles[0]
        classes, features = p.shape[1], x.shape[1]
        blocks = x.new_zeros(classes, features, classes, features)
        for a in range(classes):
            for b in range(a + 1):
                share = p[:, a] * (float(a == b) - p[:, b])
                block = (x * share.unsqueeze(-1)).T @ x / self.problem.rows
                blocks[a, :, b], blocks[b, :, a] = block, block
        hessian = blocks.view(classes * features, classes * features)
        hessian.diagonal().add_(self.problem.lam)
        return hessian

    def advance(self) -> None:
        """Takes one step."""
        if self.at is None:
            self.at = self.evaluate(self.weight.double())
        weight, value, gradient, p = self.at
        factor = torch.linalg.cholesky(self.hessian(p))
        direction = torch.cholesky_solve(gradient.reshape(-1, 1), factor).view_as(gradient)
        decrease = float((gradient * direction).sum())
        share = 1.0
        while True:
            self.at = self.evaluate(weight - share * direction)
            if self.at[1] <= value - SUFFICIENT_DECREASE * share * decrease or share < 1e-6:
                break
            share /= 2
        self.head.weight.data.copy_(self.at[0])


@dataclass(frozen=True)
class Axis:
    """Values of one option, ordered so that neighbours are alike, and the place where the search starts."""

    values: tuple[Any, ...]
    start: int = 0


Axes = Callable[[Problem], dict[str, Axis]]
Build = Callable[..., Optimizer]  # from parameters, problem and options
Make = Callable[[Problem, nn.Linear, Mapping[str, Any], int], Stepper]  # and a seed


@dataclass(frozen=True)
class Method:
    """One row of the tables."""

    name: str
    make: Make
    axes: Axes = lambda problem: {}
    obstacle: Callable[[Problem], str] = lambda problem: ""


def half_decades(start: float) -> Axis:
    """Lists step sizes 10^(k/2) around `start`."""
    middle = round(2 * math.log10(start))
    return Axis(tuple(10 ** (k / 2) for k in range(middle - HALF_DECADES, middle + HALF_DECADES + 1)), HALF_DECADES)


def tuned(rate: float, sizes: Sequence[int], start: int, natural: bool = False, **options: Axis) -> Axes:
    """Makes the axes of a stochastic method: its step size, its batch size, and further `options`.

    The search starts at `rate`, if it is `natural` divided by the mean of |x|^2, as for gradient descent, and at the
    batch size `start`. Of the `sizes`, at most a third of the rows is tried, and one row only for small data sets.
    """

    def axes(problem: Problem) -> dict[str, Axis]:
        kept = [m for m in sizes if 3 * m <= problem.rows and (m > 1 or problem.rows <= LARGEST_SINGLE)] or [1]
        batch = Axis(tuple(kept), min(range(len(kept)), key=lambda i: abs(math.log(kept[i] / start))))
        return {"lr": half_decades(rate / (problem.mean_square if natural else 1)), "batch": batch, **options}

    return axes


def stochastic(build: Build, averaged: bool = False) -> Make:
    """Makes a `Method.make` of an optimizer on mini-batches."""
    return lambda problem, head, options, seed: Stochastic(
        problem, head, build(head, problem, options), options, seed, averaged
    )


def full(build: Build, regularised: bool = False) -> Make:
    """Makes a `Method.make` of a full-batch optimizer."""
    return lambda problem, head, options, seed: FullBatch(problem, head, build(head, problem, options), regularised)


def lbfgs(head: nn.Linear, problem: Problem, options: Mapping[str, Any]) -> Optimizer:
    """Is a `Build` of torch's L-BFGS, with one iteration per step."""
    still: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    return LBFGS(head.parameters(), max_iter=1, max_eval=LINE_SEARCH, **still)


def with_options(kind: Build, *names: str, **fixed: Any) -> Build:
    """Makes a `Build` of one of favor's optimizers: lr and these options are tuned, others fixed."""
    return lambda head, problem, options: kind(
        head, lr=options["lr"], weight_decay=problem.lam, **{name: options[name] for name in names}, **fixed
    )


def of_torch(kind: Build) -> Build:
    """Makes a `Build` of one of torch's optimizers."""
    return lambda head, problem, options: kind(head.parameters(), lr=options["lr"], weight_decay=problem.lam)


def sbm(variant: str) -> Make:
    """Makes a `Method.make` of SBM."""
    return stochastic(lambda head, p, o: SBM(head, p.rows, lr=o["lr"], weight_decay=p.lam, variant=variant))


def parameters_up_to(limit: int) -> Callable[[Problem], str]:
    """Makes a `Method.obstacle` for methods that need a D x D matrix."""
    return lambda p: f"D = {p.size} > {limit}: no dense curvature" if p.size > limit else ""


def features(p: Problem) -> str:
    """Is a `Method.obstacle` for methods that need a d x d matrix."""
    return f"d = {p.x.shape[1]} > {LARGEST_INPUT}: d x d matrix in every step" if p.x.shape[1] > LARGEST_INPUT else ""


DECAY = Axis((False, True))
DAMPINGS = (1e-3, 1e-2, 1e-1)
RANK = Axis((1, 5))
RATE = Axis((1.0, 1.9), 1)
MANY = (10, 100, 1000)
FEW = (1, 10, 100)
BOUND_AXES = tuned(1.0, MANY, 100, decay=DECAY, damping=Axis(DAMPINGS, 2))
SPFB_AXES = tuned(1.0, MANY, 100, decay=DECAY, damping=Axis(DAMPINGS, 1))
TAUS, ORDERS = Axis((10, 100, 1000, 10_000, 100_000), 2), Axis(("ascending", "descending"))
CURVATURES, CHEAP = Axis(("block", "bohning", "kfac"), 1), full(with_options(BBM, "curvature"))
PLAIN, MEAN = stochastic(of_torch(SGD)), stochastic(of_torch(SGD), averaged=True)
LITERAL = stochastic(with_options(SPFB, literal=True))
REPAIRED = stochastic(with_options(LSPFB, "rank", rule="repaired"))
DENSE, NEWTON = parameters_up_to(LARGEST_SBM), parameters_up_to(LARGEST_NEWTON)
LSPFB_AXES = {lr: tuned(lr, MANY, 100, rank=RANK, decay=DECAY) for lr in (3.0, 10.0)}

METHODS: dict[str, Method] = {
    "sgd": Method("SGD", PLAIN, tuned(1, FEW, 10, True)),
    "asgd_tau": Method("ASGD, tau/(tau + i)", MEAN, tuned(1, FEW, 10, True, tau=TAUS)),
    "asgd": Method("ASGD, 1/i", MEAN, tuned(10, FEW, 10, True, tau=Axis((0,)))),
    "adam": Method("Adam", stochastic(of_torch(Adam)), tuned(0.01, FEW, 10, decay=DECAY)),
    "lbfgs": Method("L-BFGS", full(lbfgs, regularised=True)),
    "newton": Method("Newton", lambda p, head, options, seed: Newton(p, head), obstacle=NEWTON),
    "bbm": Method("BBM", full(with_options(BBM, "order")), lambda p: {"lr": RATE, "order": ORDERS}, features),
    "bbm_cheap": Method("BBM, cheaper K", CHEAP, lambda p: {"lr": RATE, "curvature": CURVATURES}, features),
    "sbm": Method("SBM, online", sbm("online"), tuned(1.0, FEW, 10), DENSE),
    "sbm_accumulated": Method("SBM, accumulated", sbm("accumulated"), tuned(1.0, FEW, 10), DENSE),
    "spfb_one": Method("SPFB as published, m = 1", LITERAL, tuned(1.0, (1,), 1)),
    "spfb_literal": Method("SPFB as published", LITERAL, tuned(1.0, MANY, 100), features),
    "spfb": Method("SPFB, damped", stochastic(with_options(SPFB, "damping")), SPFB_AXES, features),
    "prox": Method("ProxBoundSGD", stochastic(with_options(ProxBoundSGD)), tuned(3, (1,), 1, True, decay=DECAY)),
    "lspfb": Method("LSPFB", stochastic(with_options(LSPFB, "rank")), LSPFB_AXES[3.0]),
    "lspfb_repaired": Method("LSPFB, repaired", REPAIRED, LSPFB_AXES[10.0]),
}
for _curvature in ("bohning", "diag", "block", "kfac"):
    _make = stochastic(with_options(SoftmaxBound, "damping", curvature=_curvature))
    METHODS[f"bound_{_curvature}"] = Method(f"SoftmaxBound, {_curvature}", _make, BOUND_AXES, features)
