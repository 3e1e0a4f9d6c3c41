"""Mixture proportions: iterations and local rates of EM and of scale-invariant power iteration with several shifts.

There are two problems: three normal components that hardly overlap (100, 200 and 300 draws, unit variance, means -6, 0,
6), and uniform likelihoods, 500 rows of 20 components, with Poisson counts. Iterations start at equal weights and are
counted until the objective is within 1e-6 of its maximum, relative to it. Rates are of the distance from the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Dirichlet, Normal

from favor.decomposition import mixture_proportions
from favor.eval.common import report

EM = "EM"
SHIFTS = (1.0, 0.25, 0.05, 0.0)
PROBLEMS = ("separated", "poisson")
GAP = 1e-6
# A rate is measured between these distances: nearer, rounding counts; farther, the iteration is not yet linear.
NEAR, FAR = 1e-12, 1e-3
SUPPORT = 1e-10
AGREE = 0.02

Problem = tuple[Tensor, Tensor]  # likelihoods [n, K], counts [n]


def problem(name: str, seed: int = 0) -> Problem:
    """Makes one of the two problems, in float64."""
    torch.manual_seed(seed)
    if name == "separated":
        means = torch.tensor([-6.0, 0.0, 6.0], dtype=torch.float64)
        draws = torch.randn(600, dtype=torch.float64) + means.repeat_interleave(torch.tensor([100, 200, 300]))
        return Normal(means, 1.0).log_prob(draws.unsqueeze(-1)).exp(), torch.ones(600, dtype=torch.float64)
    likelihoods = torch.rand(500, 20, dtype=torch.float64)
    weights = Dirichlet(torch.ones(20, dtype=torch.float64)).sample()
    return likelihoods, torch.poisson(20 * likelihoods @ weights)


def objective(given: Problem, pi: Tensor) -> float:
    """Computes the sum of v log(L pi) over the sum of v."""
    likelihoods, counts = given
    return float((counts * (likelihoods @ pi).log()).sum() / counts.sum())


def gradient(given: Problem, pi: Tensor) -> Tensor:
    """Computes the normalised gradient g `[K]`, which is 1 on the support of the optimum."""
    likelihoods, counts = given
    return likelihoods.T @ (counts / (likelihoods @ pi)) / counts.sum()


def steps() -> dict[str, Callable[[Problem, Tensor], Tensor]]:
    """Gives one iteration of each method by name; methods with a shift are favor's, without the guard."""

    def shifted(shift: float) -> Callable[[Problem, Tensor], Tensor]:
        def step(given: Problem, pi: Tensor) -> Tensor:
            found = mixture_proportions(*given, shift=shift, guard=False, tol=0, max_iter=1, start=pi)
            return found.proportions

        return step

    return {EM: lambda given, pi: pi * gradient(given, pi)} | {f"shift {shift:g}": shifted(shift) for shift in SHIFTS}


def optimum(given: Problem) -> Tensor:
    """Computes the weights of the maximum `[K]` to the last digits: favor's, then a Newton step on their support."""
    likelihoods, counts = given
    best = mixture_proportions(*given, shift=0.25, tol=1e-13, max_iter=200_000).proportions
    held = best > SUPPORT
    best = best.where(held, 0.0)
    scaled = likelihoods[:, held] * (counts.sqrt() / (likelihoods @ best)).unsqueeze(-1)
    best[held] += torch.linalg.solve(scaled.T @ scaled / counts.sum(), gradient(given, best)[held] - 1)
    return best


def theory(given: Problem, pi: Tensor, shift: float | None) -> float:
    """Computes the local rate at the optimum (less is faster): by eigenvalues on the support, by the gradient off it.

    Args:
        given: the problem.
        pi: the optimum `[K]`.
        shift: shift of the power iteration; None for EM.
    """
    likelihoods, counts = given
    held = pi > SUPPORT
    scaled = likelihoods[:, held] * (counts / counts.sum()).sqrt().unsqueeze(-1) / (likelihoods @ pi).unsqueeze(-1)
    scaled = scaled * pi[held].sqrt()
    # The eigenvalue 1, of sqrt(pi), is the direction that normalisation removes.
    others = torch.linalg.eigvalsh(scaled.T @ scaled - torch.outer(pi[held].sqrt(), pi[held].sqrt()))
    # The removed eigenvalue has become a 0, which belongs to no direction on the simplex.
    others = others[others.abs().argsort()][1:]
    off = gradient(given, pi)[~held]
    rates = (
        [1 - others, off] if shift is None else [1 - 2 * others / (1 + shift), ((shift + off) / (1 + shift)).square()]
    )
    return float(torch.cat(rates).abs().max())


def measured_rate(distances: Sequence[float]) -> float:
    """Computes the mean factor per iteration over the last third of the linear part; NaN if there is no such part."""
    linear = [number for number, value in enumerate(distances) if NEAR <= value <= FAR]
    if len(linear) < 2:
        return math.nan
    first, last = linear[2 * len(linear) // 3 if len(linear) > 4 else 0], linear[-1]
    return (distances[last] / distances[first]) ** (1 / (last - first)) if last > first else math.nan


def follow(
    given: Problem, best: Tensor, step: Callable[[Problem, Tensor], Tensor], limit: int
) -> tuple[list[float], list[float]]:
    """Iterates until the distance from the optimum is small; gives relative gaps of the objective, and distances.

    Args:
        given: the problem.
        best: the optimum.
        step: one iteration.
        limit: greatest number of iterations.
    """
    top = objective(given, best)
    pi = torch.full_like(best, 1 / len(best))
    gaps, distances = [], []
    for _ in range(limit + 1):
        gaps.append((top - objective(given, pi)) / abs(top))
        distances.append(float((pi - best).norm()))
        if distances[-1] < NEAR:
            break
        pi = step(given, pi)
    return gaps, distances


def iterations(gaps: Sequence[float]) -> float:
    """Counts the iterations until the gap is small; infinite if it never is."""
    return next((float(number) for number, gap in enumerate(gaps) if gap <= GAP), math.inf)


def thinned(gaps: Sequence[float], points: int = 100) -> list[tuple[int, float]]:
    """Gives iterations and gaps, about evenly spaced on a logarithmic axis."""
    shown = {0, *(round(len(gaps) ** (i / points)) - 1 for i in range(points + 1))}
    return [(number, gaps[number]) for number in sorted(shown)]


def measure(limit: int) -> dict[str, Any]:
    """Measures iterations and rates of every method on both problems, and the gaps by iteration."""
    found: dict[str, Any] = {"limit": limit, "problems": {}}
    for name in PROBLEMS:
        given = problem(name)
        best = optimum(given)
        cells = {}
        for method, step in steps().items():
            shift = None if method == EM else float(method.removeprefix("shift "))
            gaps, distances = follow(given, best, step, limit)
            cells[method] = {
                "iterations": iterations(gaps),
                "rate": measured_rate(distances),
                "theory": theory(given, best, shift),
                "curve": thinned(gaps),
            }
        found["problems"][name] = {"support": int((best > SUPPORT).sum()), "components": len(best), "methods": cells}
        print(f"mixture, {name}: " + ", ".join(f"{m} {c['iterations']:g}" for m, c in cells.items()), flush=True)
    return found


def lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    rows = []
    for name, found in result["problems"].items():
        for method, cell in found["methods"].items():
            count = f"{cell['iterations']:g}" if math.isfinite(cell["iterations"]) else f">{result['limit']}"
            rows.append([name, method, count, f"{cell['rate']:.5f}", f"{cell['theory']:.5f}"])
    sizes = ", ".join(f"{n}: {f['support']} of {f['components']}" for n, f in result["problems"].items())
    return [
        "## Mixture proportions",
        "",
        "Iterations from equal weights to a relative gap of 1e-6, and the factor by which the distance from the "
        "optimum falls an iteration near it, measured and by theory: the largest of |1 - w| for EM and "
        "|1 - 2 w / (1 + s)| for shift s, w the eigenvalues of the problem on the support of the optimum; off it "
        f"weights fall by g and ((s + g) / (1 + s))^2. Weights that are not 0 at the optimum: {sizes}. Guard off.",
        "",
        *report.table(["problem", "method", "iterations", "rate", "theory"], rows),
        "",
    ]


def checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks the statements of theory about rates and about shift 0."""
    found = []
    for name, given in result["problems"].items():
        cells = given["methods"]
        off = {m: abs(math.log(cell["rate"]) / math.log(cell["theory"]) - 1) for m, cell in cells.items()}
        worst = max(off, key=lambda method: math.inf if math.isnan(off[method]) else off[method])
        found.append(
            report.Check(
                f"mixture, {name}: logarithms of measured rates are those of theory within 2 %",
                f"worst, {worst}: {cells[worst]['rate']:.5f} and {cells[worst]['theory']:.5f}",
                off[worst] <= AGREE,
            )
        )
    cells = result["problems"]["poisson"]["methods"]
    em, zero, default = (cells[method]["iterations"] for method in (EM, "shift 0", "shift 0.05"))
    found.append(
        report.Check(
            "mixture, poisson: shifts 0 and .05 need at most 55 % of the iterations of EM",
            f"{zero:g} and {default:g} of {em:g}",
            math.isfinite(em) and max(zero, default) <= 0.55 * em,
        )
    )
    return found
