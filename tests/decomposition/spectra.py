"""Rows with a known spectrum, Algorithms 3 and 4 as printed, and a kernel, for the tests of decompositions."""

import numpy as np
import torch

from favor.decomposition.epochs import Landscape, PowerParameters, Quadratic
from favor.decomposition.rows import RowSource

GAP5 = np.r_[1.0, np.full(5, 0.95), np.linspace(0.6, 0.01, 44)]


def rows_with(values, n, seed=0):
    """Rows `[n, d]` for which X'X / n has exactly these eigenvalues, and the eigenvectors in columns."""
    source, d = np.random.default_rng(seed), len(values)
    left = np.linalg.qr(source.normal(size=(n, d)))[0]
    right = np.linalg.qr(source.normal(size=(d, d)))[0]
    return (left * np.sqrt(n * np.asarray(values))) @ right.T, right


def error(x, true):
    return 1 - np.dot(x, true) ** 2 / np.dot(x, x)


def printed_epoch(X, anchor, batches, eta, beta=None):
    """x_0 ... x_m of Algorithm 3, or of 4 with beta, without any normalisation; batches for steps 1 to m - 1."""
    full = X.T @ (X @ anchor) / len(X)
    path = [anchor, (1 - eta) * anchor + eta * full]
    for batch in batches:
        x, rows = path[-1], X[batch]
        a = x @ anchor / (anchor @ anchor)
        g = rows.T @ (rows @ (x - a * anchor)) / len(rows) + a * full
        step = (1 - eta) * x + eta * g
        path.append(step if beta is None else 2 * step - beta * path[-2])
    return path


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def unit(x):
    return x / np.linalg.norm(x)


def epoch_of(X, anchor, batches, eta, beta=None):
    """The package's epoch."""
    rows = tensor(X)
    landscape = Landscape(Quadratic(), RowSource(rows, rows.shape[1]), rows.new_zeros(0, rows.shape[1]))
    parameters = PowerParameters(eta, len(batches) + 1, beta)
    return landscape.epoch(landscape.survey(tensor(anchor)), map(tensor, batches), parameters, 1.0).numpy()


def laplacian(x, y):
    """A kernel, as a function of tensors."""
    return torch.exp(-torch.cdist(x, y, p=1) / 4)


class Lazy:
    """What gives rows by rising numbers and nothing else, and remembers the most that were asked for at once."""

    def __init__(self, rows, kind=np.asarray):
        self.rows, self.kind, self.most, self.shape = rows, kind, 0, rows.shape

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, numbers):
        assert isinstance(numbers, np.ndarray)
        assert (np.diff(numbers) > 0).all()
        self.most = max(self.most, len(numbers))
        return self.kind(self.rows[numbers])
