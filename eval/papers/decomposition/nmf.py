"""KL-NMF: the objective by sweeps and by processor time, of `KLNMF` and scikit-learn's multiplicative updates (MU).

Every method is started anew for every number of sweeps with tol=0, from equal factors: uniform factors after one sweep
of MU. A time is that of the whole `fit_transform` with one thread, with its checks of the data and its last evaluation
of the objective (`KLNMF` evaluates it every ten sweeps, for its guard). For equal time, `KLNMF` gets as many sweeps as
fit into the time of MU; both times are the shortest of three runs in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.decomposition import NMF

from favor.decomposition import KLNMF
from favor.eval.common import report

MU = "sklearn MU"
SHIFTS = (0.0, 0.05, 0.25, 1.0)
DEFAULT = "KLNMF, shift 0.05"
CLAIM_SETS, CLAIM_SWEEPS = ("digits", "planted"), 50
# Thesis, chapter 5: entries are Poisson with the mean -log(1 - density), so that this fraction of them is not zero.
DENSITIES = {"poisson .9": 0.9, "poisson .1": 0.1, "poisson .1, sparse": 0.1}
TRIES = 4  # attempts to find the number of sweeps for a time
REPEATS = 3

Start = tuple[np.ndarray, np.ndarray]
Run = tuple[float, float]  # objective, seconds


def problem(name: str) -> tuple[Any, int]:
    """Makes a nonnegative matrix, dense or CSR, and the number of components."""
    source = np.random.default_rng(0)
    if name == "digits":
        pixels = load_digits().data
        return pixels[:, pixels.any(0)], 20
    if name == "planted":
        means = source.gamma(1, 1, (300, 10)) @ source.gamma(1, 1, (10, 200))
        return source.poisson(means).astype(float), 10
    counts = source.poisson(-np.log1p(-DENSITIES[name]), (500, 500)).astype(float)
    return (sparse.csr_matrix(counts) if name.endswith("sparse") else counts), 20


def divergence(V: Any, W: np.ndarray, H: np.ndarray) -> float:
    """Computes the sum of V log(V / WH) - V + WH."""
    dense = V.toarray() if sparse.issparse(V) else V
    product = W @ H
    there = dense > 0
    return float((dense[there] * np.log(dense[there] / product[there])).sum() - dense.sum() + product.sum())


def start(V: Any, count: int, seed: int) -> Start:
    """Draws uniform factors and updates them by one sweep of MU, H before W."""
    dense = V.toarray() if sparse.issparse(V) else V
    source = np.random.default_rng(seed)
    W, H = source.uniform(size=(dense.shape[0], count)), source.uniform(size=(count, dense.shape[1]))
    H = H * (W.T @ (dense / (W @ H))) / W.sum(0)[:, None]
    W = W * ((dense / (W @ H)) @ H.T) / H.sum(1)
    return W, H


def sklearn_mu(count: int, sweeps: int) -> NMF:
    """Makes scikit-learn's solver for `sweeps` sweeps."""
    loss = "kullback-leibler"
    return NMF(count, init="custom", solver="mu", beta_loss=loss, tol=0, max_iter=sweeps)


def ours(shift: float) -> Callable[[int, int], KLNMF]:
    """Gives a function that makes `KLNMF` for a number of components and of sweeps."""
    return lambda count, sweeps: KLNMF(count, init="custom", shift=shift, tol=0, max_iter=sweeps)


def methods() -> dict[str, Callable[[int, int], Any]]:
    """Lists all methods by name."""
    return {MU: sklearn_mu} | {f"KLNMF, shift {shift:g}": ours(shift) for shift in SHIFTS}


def run(make: Callable[[int, int], Any], V: Any, count: int, sweeps: int, first: Start) -> Run:
    """Runs one fit; gives its objective and seconds.

    Args:
        make: makes the solver.
        V: the matrix.
        count: number of components.
        sweeps: number of sweeps.
        first: factors to start from.
    """
    W, H = first[0].copy(), first[1].copy()
    model = make(count, sweeps)
    clock = time.process_time()
    W = model.fit_transform(V, W=W, H=H)
    seconds = time.process_time() - clock
    return divergence(V, W, model.components_), seconds


def in_time(V: Any, count: int, sweeps: int, first: Start) -> dict[str, Any]:
    """Runs MU for a number of sweeps, and the default of `KLNMF` for at most as many seconds.

    Args:
        V: the matrix.
        count: number of components.
        sweeps: sweeps of MU.
        first: factors to start from.
    """
    makes = methods()

    def both(number: int) -> tuple[Run, Run]:
        """Runs MU for `sweeps` sweeps and the default of `KLNMF` for `number` sweeps."""
        pairs = [
            (run(makes[MU], V, count, sweeps, first), run(makes[DEFAULT], V, count, number, first))
            for _ in range(REPEATS)
        ]
        mu, own = (min(runs, key=lambda found: found[1]) for runs in zip(*pairs, strict=True))
        return mu, own

    mu, own = both(sweeps)
    number = sweeps
    for _ in range(TRIES):
        # A little less than fits exactly, because times vary.
        number = max(1, int(0.98 * number * mu[1] / own[1]))
        mu, own = both(number)
        if own[1] <= mu[1]:
            break
    return {"mu": mu[0], "mu_seconds": mu[1], "ours": own[0], "ours_seconds": own[1], "sweeps": number}


def measure(names: Sequence[str], sweeps: Sequence[int], starts: int) -> dict[str, Any]:
    """Measures objectives and seconds by data set, method, start and number of sweeps.

    Args:
        names: data sets.
        sweeps: numbers of sweeps.
        starts: number of starts.
    """
    found: dict[str, Any] = {"sweeps": list(sweeps), "starts": starts, "sets": {}}
    for name in names:
        V, count = problem(name)
        firsts = [start(V, count, seed) for seed in range(starts)]
        makes = methods()
        for make in makes.values():  # what the first call loads is not timed
            run(make, V, count, 1, firsts[0])
        runs: dict[str, list[list[Run]]] = {method: [] for method in makes}
        for first in firsts:
            for method, make in makes.items():
                runs[method].append([run(make, V, count, number, first) for number in sweeps])
        limits = [number for number in (CLAIM_SWEEPS, max(sweeps)) if number <= max(sweeps)]
        equal = {str(number): [in_time(V, count, number, first) for first in firsts] for number in limits}
        found["sets"][name] = {
            "shape": list(V.shape),
            "components": count,
            "objective": {method: [[one for one, _ in line] for line in lists] for method, lists in runs.items()},
            "seconds": {method: [[one for _, one in line] for line in lists] for method, lists in runs.items()},
            "equal_time": equal,
        }
        last = {method: round(float(np.mean([line[-1][0] for line in lists]))) for method, lists in runs.items()}
        print(f"nmf, {name}: after {max(sweeps)} sweeps {last}", flush=True)
    return found


def mean_objective(result: Mapping[str, Any], method: str, sweeps: int, counts: Sequence[int]) -> float:
    """Computes the mean objective over starts.

    Args:
        result: of one data set.
        method: name of the method.
        sweeps: number of sweeps.
        counts: all numbers of sweeps.
    """
    return float(np.mean([line[counts.index(sweeps)] for line in result["objective"][method]]))


def lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    counts, sets = result["sweeps"], result["sets"]
    shown = [number for number in (10, CLAIM_SWEEPS, 100, max(counts)) if number in counts] or [max(counts)]
    shown = list(dict.fromkeys(shown))
    text = [
        "## KL-NMF",
        "",
        "Divergence of X from WH, mean over "
        f"{result['starts']} starts (uniform factors, one sweep of MU, the same for all methods), after "
        f'{", ".join(map(str, shown))} sweeps. scikit-learn: NMF(solver="mu", beta_loss="kullback-leibler", tol=0), '
        "run anew for each number of sweeps. ms is processor time of a sweep, one thread.",
        "",
    ]
    rows = []
    for name, found in sets.items():
        for method in found["objective"]:
            values = [f"{mean_objective(found, method, number, counts):.0f}" for number in shown]
            cost = 1e3 * float(np.median([line[-1] for line in found["seconds"][method]])) / max(counts)
            size = f"{name}, {found['shape'][0]} x {found['shape'][1]}, K = {found['components']}"
            rows.append([size, method, *values, f"{cost:.2f}"])
    text += report.table(["data", "method", *(f"{n} sweeps" for n in shown), "ms"], rows)
    text += [
        "",
        "At equal time: MU for 50 and for all sweeps, and KLNMF with its default shift for as many sweeps as take no "
        "more seconds (means over starts; lower: starts in which KLNMF ends lower).",
        "",
    ]
    rows = []
    for name, found in sets.items():
        for number, runs in found["equal_time"].items():
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            lower = sum(run["ours"] <= run["mu"] for run in runs)
            seconds = f"{mean['mu_seconds']:.3g} / {mean['ours_seconds']:.3g}"
            cells = [f"{mean['mu']:.0f}", f"{mean['ours']:.0f}", f"{mean['sweeps']:.0f}", seconds]
            rows.append([name, number, *cells, f"{lower} of {len(runs)}"])
    header = ["data", "MU sweeps", "MU", "KLNMF", "KLNMF sweeps", "seconds MU / KLNMF", "lower"]
    return [*text, *report.table(header, rows), ""]


def checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks the two claims, for each of their data sets."""
    found, counts = [], result["sweeps"]
    for name in CLAIM_SETS:
        if name not in result["sets"]:
            continue
        here = result["sets"][name]
        if CLAIM_SWEEPS in counts:
            mu, own = (mean_objective(here, method, CLAIM_SWEEPS, counts) for method in (MU, DEFAULT))
            statement = (
                f"KL-NMF, {name}: lower objective than sklearn's MU after {CLAIM_SWEEPS} sweeps (mean over starts)"
            )
            found.append(report.Check(statement, f"{own:.0f} and {mu:.0f}", own < mu))
        for number, runs in here["equal_time"].items():
            mu, own = (float(np.mean([run[key] for run in runs])) for key in ("mu", "ours"))
            late = [run for run in runs if run["ours_seconds"] > run["mu_seconds"]]
            statement = f"KL-NMF, {name}: not higher in the time of {number} sweeps of sklearn's MU (means)"
            numbers = f"{own:.0f} and {mu:.0f}" + (f"; {len(late)} starts took longer" if late else "")
            found.append(report.Check(statement, numbers, own <= mu and not late))
    return found
