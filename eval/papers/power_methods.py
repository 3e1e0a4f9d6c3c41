"""How fast the power methods of `favor.decomposition` are: mixture proportions and first principal components.

Both are parts of `favor.eval.papers.decomposition`.

Mixture proportions: iterations and local rates of EM and of scale-invariant power iteration with several shifts. There
are two problems: three normal components that hardly overlap (100, 200 and 300 draws, unit variance, means -6, 0, 6),
and uniform likelihoods, 500 rows of 20 components, with Poisson counts. Iterations start at equal weights and are
counted until the objective is within 1e-6 of its maximum, relative to it. Rates are of the distance from the optimum.

Principal components: passes over the data until the first component is found. Rows have an exact spectrum: 1, 1 - gap,
and 48 values evenly spaced from .6 to .01. The error of x is 1 - (x'u)^2, u the first eigenvector. Passes are those
that led to x. The pass in which an estimator sees that x is good enough is not counted, since other methods have no
such pass. Every seed has other rows, another start and other batches.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.distributions import Dirichlet, Normal

from favor.decomposition import VRHeavyBallPower, VRPower, mixture_proportions
from favor.decomposition.epochs import Point, PowerParameters, Rule
from favor.eval.common import report
from favor.eval.papers.common import panels, save

EM = "EM"
SHIFTS = (1.0, 0.25, 0.05, 0.0)
ITERATIONS = 20_000
GAP = 1e-6
# A rate is measured between these distances: nearer, rounding counts; farther, the iteration is not yet linear.
NEAR, FAR = 1e-12, 1e-3
SUPPORT = 1e-10
AGREE = 0.02

ROWS, FEATURES, SEEDS = 20_000, 50, 3
GAPS = (0.3, 0.05, 0.02)  # 1 - l2/l1
PASSES = 80
# Exact methods need more passes: they may use this many times those of the others.
PATIENCE = 5
TARGETS = (1e-4, 1e-8)
# Oja: steps c / (t + 300) with c = 3 / (l1 - l2).
OJA = (3.0, 300)
CLAIM_GAP, CLAIM_PASSES, CLAIM_POWER = 0.05, 25, 150
POWER, VR_POWER = "power iteration", "VRPower, default"

Problem = tuple[Tensor, Tensor]  # likelihoods [n, K], counts [n]
Passes = list[tuple[float, float]]  # passes, error


def problem(name: str) -> Problem:
    """Makes one of the two problems, "separated" or "poisson", in float64."""
    torch.manual_seed(0)
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


def step(given: Problem, pi: Tensor, shift: float | None) -> Tensor:
    """Takes one iteration, without the guard; shift None is EM."""
    if shift is None:
        return pi * gradient(given, pi)
    return mixture_proportions(*given, shift=shift, guard=False, tol=0, max_iter=1, start=pi).proportions


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
    """Computes the local rate at the optimum, by eigenvalues on the support and by the gradient off it."""
    likelihoods, counts = given
    held = pi > SUPPORT
    scaled = likelihoods[:, held] * (counts / counts.sum()).sqrt().unsqueeze(-1) / (likelihoods @ pi).unsqueeze(-1)
    scaled = scaled * pi[held].sqrt()
    # The eigenvalue 1, of sqrt(pi), is the direction that normalisation removes.
    others = torch.linalg.eigvalsh(scaled.T @ scaled - torch.outer(pi[held].sqrt(), pi[held].sqrt()))
    # The removed eigenvalue has become a 0, which belongs to no direction on the simplex.
    others, off = others[others.abs().argsort()][1:], gradient(given, pi)[~held]
    if shift is None:
        return float(torch.cat((1 - others, off)).abs().max())
    return float(torch.cat((1 - 2 * others / (1 + shift), ((shift + off) / (1 + shift)).square())).abs().max())


def measured_rate(distances: Sequence[float]) -> float:
    """Computes the mean factor per iteration over the last third of the linear part; NaN if there is no such part."""
    linear = [number for number, value in enumerate(distances) if NEAR <= value <= FAR]
    if len(linear) < 2:
        return math.nan
    first, last = linear[2 * len(linear) // 3 if len(linear) > 4 else 0], linear[-1]
    return (distances[last] / distances[first]) ** (1 / (last - first)) if last > first else math.nan


def follow(given: Problem, best: Tensor, shift: float | None) -> tuple[list[float], list[float]]:
    """Iterates until the distance from the optimum is small; gives relative gaps of the objective, and distances."""
    top = objective(given, best)
    pi = torch.full_like(best, 1 / len(best))
    gaps: list[float] = []
    distances: list[float] = []
    while len(gaps) <= ITERATIONS and (not gaps or distances[-1] >= NEAR):
        pi = step(given, pi, shift) if gaps else pi
        gaps.append((top - objective(given, pi)) / abs(top))
        distances.append(float((pi - best).norm()))
    return gaps, distances


def thinned(gaps: Sequence[float], points: int = 100) -> list[tuple[int, float]]:
    """Gives iterations and gaps, about evenly spaced on a logarithmic axis."""
    shown = {0, *(round(len(gaps) ** (i / points)) - 1 for i in range(points + 1))}
    return [(number, gaps[number]) for number in sorted(shown)]


def measure_mixture() -> dict[str, Any]:
    """Measures iterations and rates of every method on both problems, and the gaps by iteration."""
    found: dict[str, Any] = {"limit": ITERATIONS, "problems": {}}
    for name in ("separated", "poisson"):
        given = problem(name)
        best = optimum(given)
        cells = {}
        for shift in (None, *SHIFTS):
            gaps, distances = follow(given, best, shift)
            cells[EM if shift is None else f"shift {shift:g}"] = {
                "iterations": next((float(number) for number, gap in enumerate(gaps) if gap <= GAP), math.inf),
                "rate": measured_rate(distances),
                "theory": theory(given, best, shift),
                "curve": thinned(gaps),
            }
        found["problems"][name] = {"support": int((best > SUPPORT).sum()), "components": len(best), "methods": cells}
    return found


def mixture_lines(result: Mapping[str, Any]) -> list[str]:
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
    ]


def mixture_checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks the statements of theory about rates and about shift 0."""
    found = []
    for name, given in result["problems"].items():
        cells = given["methods"]
        off = {m: abs(math.log(cell["rate"]) / math.log(cell["theory"]) - 1) for m, cell in cells.items()}
        worst = max(off, key=lambda method: math.inf if math.isnan(off[method]) else off[method])
        statement = f"mixture, {name}: logarithms of measured rates are those of theory within 2 %"
        numbers = f"worst, {worst}: {cells[worst]['rate']:.5f} and {cells[worst]['theory']:.5f}"
        found.append(report.Check(statement, numbers, off[worst] <= AGREE))
    cells = result["problems"]["poisson"]["methods"]
    em, zero, default = (cells[method]["iterations"] for method in (EM, "shift 0", "shift 0.05"))
    statement = "mixture, poisson: shifts 0 and .05 need at most 55 % of the iterations of EM"
    holds = math.isfinite(em) and max(zero, default) <= 0.55 * em
    return [*found, report.Check(statement, f"{zero:g} and {default:g} of {em:g}", holds)]


def plot_mixture(result: Mapping[str, Any], path: Path) -> None:
    """Draws a panel per problem: relative gap by iteration."""
    figure, grid = panels(1, len(result["problems"]), 5, 3.4)
    for axes, (name, found) in zip(grid[0], result["problems"].items(), strict=True):
        for method, cell in found["methods"].items():
            style = {"color": "black", "linestyle": "--"} if method == EM else {}
            shown = [(number, gap) for number, gap in cell["curve"] if gap > NEAR]
            axes.plot(*zip(*shown, strict=True), label=method, **style)
        axes.set(title=name, yscale="log", xlabel="iteration")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, None)
    grid[0, 0].set_ylabel("relative gap of the objective")
    save(figure, path, axes)


def spectrum(gap: float) -> np.ndarray:
    """Gives the eigenvalues `[d]`, in falling order."""
    return np.r_[1.0, 1.0 - gap, np.linspace(0.6, 0.01, FEATURES - 2)]


def rows_with(values: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows `[n, d]` for which X'X / n has exactly these eigenvalues; also gives the first eigenvector `[d]`."""
    source, d = np.random.default_rng(seed), len(values)
    left = np.linalg.qr(source.normal(size=(count, d)))[0]
    right = np.linalg.qr(source.normal(size=(d, d)))[0]
    return np.ascontiguousarray((left * np.sqrt(count * values)) @ right.T), right[:, 0]


def error(x: np.ndarray, true: np.ndarray) -> float:
    """Computes 1 - (x'u)^2 for x divided by its norm, without cancellation."""
    x = x / np.linalg.norm(x)
    return float(np.square(x - (x @ true) * true).sum())


def power(X: np.ndarray, x: np.ndarray, beta: float = 0.0) -> Iterator[np.ndarray]:
    """Runs the power iteration x_{t+1} = C x_t - beta x_{t-1} from x; yields a point per pass."""
    before = np.zeros_like(x)
    while True:
        after = X.T @ (X @ x) / len(X) - beta * before
        size = np.linalg.norm(after)
        before, x = x / size, after / size
        yield x


def oja(X: np.ndarray, x: np.ndarray, c: float, seed: int) -> Iterator[np.ndarray]:
    """Runs Oja's rule x <- x + c / (t + 300) a (a'x) over the rows a in random order; yields a point per pass."""
    source, t = np.random.default_rng((seed, 2)), OJA[1]
    x = x / np.linalg.norm(x)
    while True:
        for i in source.permutation(len(X)):
            row = X[i]
            x += (c / t * (row @ x)) * row
            t += 1
            if t % 16 == 0:
                x /= np.linalg.norm(x)
        yield x.copy()


def path_of(points: Iterator[np.ndarray], true: np.ndarray, passes: int) -> Passes:
    """Computes the errors of a method after every pass, until the last target is met or the passes are used up."""
    path: Passes = []
    while len(path) < passes and (not path or path[-1][1] > TARGETS[-1]):
        path.append((float(len(path) + 1), error(next(points), true)))
    return path


class _Watched(VRPower):
    """Keeps the points `[d]` at which epochs start."""

    def _rule(self, number: int) -> Rule:
        rule = super()._rule(number)
        self.points_: list[np.ndarray] = []

        def keeping(point: Point, last: Point | None, factor: float) -> tuple[PowerParameters, float]:
            self.points_.append(point.x.numpy())
            return rule(point, last, factor)

        return keeping


class _WatchedHeavyBall(_Watched, VRHeavyBallPower):
    pass


def estimator_path(estimator: _Watched, X: np.ndarray, true: np.ndarray, passes: int) -> Passes:
    """Computes the errors at the ends of the epochs that end within `passes` passes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(X)
    points = [*estimator.points_, estimator.components_[0]]
    # One of the passes computed the gradient at the point: it did not lead there.
    path = [(line.passes - 1, error(x, true)) for line, x in zip(estimator.history_, points, strict=True)]
    return [place for place in path if place[0] <= passes]


def paths(X: np.ndarray, true: np.ndarray, gap: float, seed: int) -> dict[str, Passes]:
    """Runs every method once; gives their paths by name."""
    start = np.random.default_rng((seed, 1)).normal(size=(X.shape[1],))
    l1, l2 = spectrum(gap)[:2].tolist()
    # Residuals are at least about gap * sqrt(error).
    common: dict[str, Any] = {"random_state": seed, "max_epochs": PASSES + 1, "tol": 0.1 * gap * math.sqrt(TARGETS[-1])}
    heavy_ball = _WatchedHeavyBall(eigenvalues=(l1, l2), **common)
    return {
        POWER: path_of(power(X, start), true, PATIENCE * PASSES),
        "power, momentum l2^2/4": path_of(power(X, start, l2**2 / 4), true, PATIENCE * PASSES),
        "Oja, 3/(l1-l2)/(t+300)": path_of(oja(X, start, OJA[0] / (l1 - l2), seed), true, PASSES),
        VR_POWER: estimator_path(_Watched(**common), X, true, PASSES),
        "VRHeavyBallPower, default (estimated)": estimator_path(_WatchedHeavyBall(**common), X, true, PASSES),
        "VRHeavyBallPower, true eigenvalues": estimator_path(heavy_ball, X, true, PASSES),
    }


def passes_to(path: Passes, target: float) -> float:
    """Counts the passes until the error is at most the target; infinite if it never is."""
    return next((passes for passes, value in path if value <= target), math.inf)


def measure_pca() -> dict[str, Any]:
    """Measures the passes to each target for every gap and method, medians over seeds; keeps paths of the first."""
    found: dict[str, Any] = {"rows": ROWS, "features": FEATURES, "limit": PASSES, "seeds": SEEDS, "gaps": {}}
    for gap in GAPS:
        runs = [paths(*rows_with(spectrum(gap), ROWS, seed), gap, seed) for seed in range(SEEDS)]
        counts = {name: [[passes_to(run[name], t) for run in runs] for t in TARGETS] for name in runs[0]}
        found["gaps"][f"{gap:g}"] = {
            name: {"passes": list(map(statistics.median, of)), "seeds": of, "path": runs[0][name]}
            for name, of in counts.items()
        }
    return found


def pca_lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    gaps, limit = result["gaps"], result["limit"]

    def cell(name: str, found: Mapping[str, Any]) -> str:
        most = PATIENCE * limit if name.startswith("power") else limit
        return " / ".join(f"{p:.3g}" if math.isfinite(p) else f">{most}" for p in found["passes"])

    names = list(next(iter(gaps.values())))
    rows = [[name, *(cell(name, found[name]) for found in gaps.values())] for name in names]
    return [
        "## Passes to the first principal component",
        "",
        f"n = {result['rows']}, d = {result['features']}, eigenvalues 1, 1 - gap, and 48 from .6 to .01; passes over "
        f"the data to an error 1 - (x'u)^2 of 1e-4 / 1e-8, medians of {result['seeds']} seeds (rows, start, batches). "
        'Batches are 1 % of the rows, at least 64. Momentum, Oja\'s step and what is not "estimated" are given the '
        "true l1 and l2 (VRPower needs neither). What is read for estimates (five exact steps) is counted. VR methods "
        "have a point at the end of each epoch only. Oja: a point a pass. Estimators draw starts of their own, those "
        "above them share theirs. The curve is of the first seed.",
        "",
        *report.table(["method", *(f"gap {gap}" for gap in gaps)], rows),
    ]


def pca_checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks the claim."""
    found = result["gaps"][f"{CLAIM_GAP:g}"]
    power_passes, vr_passes = (found[name]["passes"][-1] for name in (POWER, VR_POWER))
    seeds = (", ".join(f"{passes:.3g}" for passes in found[name]["seeds"][-1]) for name in (VR_POWER, POWER))
    statement = (
        f"VRPower reaches an error of 1e-8 in at most {CLAIM_PASSES} passes where power iteration needs over "
        f"{CLAIM_POWER} (gap .05, medians)"
    )
    numbers = f"{vr_passes:.3g} and {power_passes:.3g}; by seed: {' and '.join(seeds)}"
    return [report.Check(statement, numbers, vr_passes <= CLAIM_PASSES and power_passes > CLAIM_POWER)]


def plot_pca(result: Mapping[str, Any], path: Path) -> None:
    """Draws the error by passes at the gap of the claim."""
    figure, ((axes,),) = panels(1, 1, 9, 6)
    for name, cell in result["gaps"][f"{CLAIM_GAP:g}"].items():
        passes, errors = ([place[i] for place in cell["path"]] for i in (0, 1))
        axes.plot(passes, errors, "." + ("-" if name.startswith("VR") else "--"), linewidth=1, markersize=4, label=name)
    axes.set(yscale="log", ylim=(TARGETS[-1] / 100, 2), title=f"gap {CLAIM_GAP:g}")
    axes.set_xscale("symlog", linthresh=10)
    axes.set(xlim=(0, None), xlabel="passes over the data", ylabel="1 - (x'u)^2")
    save(figure, path, axes, columns=3)


MIXTURE = (measure_mixture, mixture_lines, mixture_checks, plot_mixture)
PCA = (measure_pca, pca_lines, pca_checks, plot_pca)
