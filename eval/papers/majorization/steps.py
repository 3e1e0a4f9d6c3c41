"""Steps and runs of the methods of `favor.eval.papers.majorization`: mini-batches, full batches, Newton's method.

Every method trains one `torch.nn.Linear` without bias. Stochastic methods go through a new random order of the rows in
every epoch. ASGD evaluates the mean of all iterates after the first epoch, and before that the iterate itself. Passes
over the data: a mini-batch of m rows is m/T, an evaluation of loss and gradient by a full-batch method is 1, also in a
line search. Other computations of a method (the exact Hessian, a bound) are not passes, but their seconds count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from favor.eval.papers.majorization.data import Optimum, Problem

SUFFICIENT_DECREASE = 1e-4
FULL_BATCH_FACTOR = 5
CONVERGED = 1e-6
DIVERGED = 1e3


def initial_head(problem: Problem, seed: int) -> nn.Linear:
    """Makes a linear layer near 0: initial logits have a standard deviation of about 0.1."""
    head = nn.Linear(problem.x.shape[1], problem.classes, bias=False, dtype=problem.x.dtype)
    draw = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    head.weight.data.copy_(0.1 / math.sqrt(problem.mean_square) * draw)
    return head


class Stochastic:
    """Steps of an optimizer on mini-batches.

    Args:
        problem: the problem to minimise.
        head: the parameters.
        optimizer: optimizer of `head`.
        batch: rows of a batch; the last of an epoch may be smaller.
        seed: draws the order of rows.
        factor: factor of the step size, a function of the number of earlier steps; None: constant.
        averaged: whether iterates are averaged from the second epoch on.
    """

    full_batch = False

    def __init__(
        self,
        problem: Problem,
        head: nn.Linear,
        optimizer: torch.optim.Optimizer,
        batch: int,
        seed: int,
        factor: Callable[[int], float] | None = None,
        averaged: bool = False,
    ) -> None:
        self.problem, self.head, self.optimizer, self.batch = problem, head, optimizer, batch
        self.scheduler = LambdaLR(optimizer, factor) if factor else None
        self.generator = torch.Generator().manual_seed(seed)
        self.averaged, self.number = averaged, 0
        self.mean: Tensor | None = None
        self.epoch, self.position = -1, problem.rows

    @property
    def passes(self) -> float:
        """Passes over the data so far."""
        return max(0.0, self.epoch + self.position / self.problem.rows)

    @property
    def weight(self) -> Tensor:
        """Gives the weights that are evaluated."""
        return self.head.weight.detach() if self.mean is None else self.mean

    def advance(self) -> None:
        """Takes one step."""
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
        if self.averaged and self.epoch > 0:
            self.number += 1
            if self.mean is None:
                self.mean = self.head.weight.detach().clone()
            self.mean.lerp_(self.head.weight.detach(), 1 / self.number)


class FullBatch:
    """Steps of an optimizer with a closure.

    Args:
        problem: the problem to minimise.
        head: the parameters.
        optimizer: optimizer of `head`.
        regularised: whether the closure adds lam/2 |W|^2, which an optimizer of torch needs. The closure then does not
            evaluate again at the parameters of its last evaluation: torch's L-BFGS calls it twice there.
    """

    full_batch = True

    def __init__(
        self, problem: Problem, head: nn.Linear, optimizer: torch.optim.Optimizer, regularised: bool = False
    ) -> None:
        self.problem, self.head, self.optimizer, self.regularised = problem, head, optimizer, regularised
        self.passes = 0.0
        self.loss = 0.0
        self.point: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Gives the weights that are evaluated."""
        return self.head.weight.detach()

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


class Newton:
    """Newton's method with the exact Hessian; it halves the step until F decreases enough."""

    full_batch = True

    def __init__(self, problem: Problem, head: nn.Linear) -> None:
        self.problem, self.head, self.passes = problem, head, 0.0
        self.x = problem.x.double()
        self.onehot = nn.functional.one_hot(problem.y, problem.classes).double()
        self.at: tuple[Tensor, float, Tensor, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        """Gives the weights that are evaluated."""
        return self.head.weight.detach()

    def evaluate(self, weight: Tensor) -> tuple[Tensor, float, Tensor, Tensor]:
        """Evaluates a point; gives the point itself, F, the gradient, and the probabilities `[T, n]`."""
        self.passes += 1
        logits = self.x @ weight.T
        log_p = logits.log_softmax(-1)
        value = -(log_p * self.onehot).sum() / self.problem.rows + self.problem.lam / 2 * weight.square().sum()
        p = log_p.exp()
        gradient = (p - self.onehot).T @ self.x / self.problem.rows + self.problem.lam * weight
        return weight, float(value), gradient, p

    def hessian(self, p: Tensor) -> Tensor:
        """Computes the Hessian of F, `[D, D]`."""
        classes, features = p.shape[1], self.x.shape[1]
        blocks = self.x.new_zeros(classes, features, classes, features)
        for a in range(classes):
            for b in range(a + 1):
                share = p[:, a] * (float(a == b) - p[:, b])
                block = (self.x * share.unsqueeze(-1)).T @ self.x / self.problem.rows
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


Stepper = Stochastic | FullBatch | Newton


@dataclass
class Trace:
    """One run: numbers at each evaluation, also before the first step, and the reason for its end."""

    passes: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    end: str = ""

    def add(self, passes: float, seconds: float, objective: float, error: float) -> None:
        """Adds an evaluation.

        Args:
            passes: passes over the data so far.
            seconds: seconds so far.
            objective: F.
            error: test error.
        """
        self.passes.append(passes)
        self.seconds.append(seconds)
        self.objective.append(objective)
        self.error.append(error)

    @property
    def diverged(self) -> bool:
        """Tells whether F is not finite any more, or has grown too large."""
        return not self.objective[-1] <= DIVERGED * self.objective[0]


def next_evaluation(passes: float) -> float:
    """Says after how many passes a stochastic method is evaluated next."""
    for end, step in ((0.2, 0.05), (1.0, 0.1), (5.0, 0.25)):
        if passes < end - 1e-9:
            return passes + step
    return passes + max(1.0, 0.05 * passes)


def run(stepper: Stepper, problem: Problem, optimum: Optimum, epochs: float, seconds: float) -> Trace:
    """Takes steps until the passes or the seconds are used up, or F is at its minimum or has diverged.

    Args:
        stepper: takes the steps.
        problem: the problem to minimise.
        optimum: its minimum.
        epochs: passes over the data; a full-batch method gets five times as many.
        seconds: processor time of the steps.
    """
    trace, spent = Trace(), 0.0
    epochs *= FULL_BATCH_FACTOR if stepper.full_batch else 1
    trace.add(0.0, 0.0, problem.objective(stepper.weight), problem.error(stepper.weight))
    while True:
        due = 0.0 if stepper.full_batch else min(epochs, next_evaluation(stepper.passes))
        failure, took = advance(stepper, due, seconds - spent)
        spent += took
        trace.add(stepper.passes, spent, problem.objective(stepper.weight), problem.error(stepper.weight))
        if trace.diverged:
            trace.end = "diverged"
        elif failure is not None:
            if isinstance(failure, ValueError):
                raise failure
            trace.end = "matrix not positive definite"
        elif trace.objective[-1] <= (1 + CONVERGED) * optimum.objective:
            trace.end = "converged"
        elif spent >= seconds:
            trace.end = "time limit"
        elif stepper.passes >= epochs - 1e-9:
            trace.end = "passes"
        if trace.end:
            return trace


def advance(stepper: Stepper, due: float, seconds: float) -> tuple[Exception | None, float]:
    """Takes at least one step, until a number of passes or seconds; returns the error, if any, and the seconds.

    Args:
        stepper: takes the steps.
        due: number of passes since the start of the run.
        seconds: greatest processor time.
    """
    start = time.process_time()
    failure = None
    try:
        while True:
            stepper.advance()
            if stepper.passes >= due - 1e-9 or time.process_time() - start >= seconds:
                break
    except (ValueError, FloatingPointError, torch.linalg.LinAlgError) as error:
        failure = error
    return failure, time.process_time() - start
