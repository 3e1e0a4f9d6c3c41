"""Rows of a matrix that need not fit in memory: by blocks and by index, with a count of what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data
from torch import Tensor

from favor.decomposition.inputs import rows_of, same_kind

BLOCK = 2**22  # numbers in a block: 32 MiB of float64
# A share of the rows is at least this many: smaller batches save nothing and are too noisy for long steps.
SMALLEST_SHARE = 64


class RowSource:
    """Rows of X as tensors, less an offset `[d]` if there is one; `read` counts the rows that were read.

    `rows` is a tensor `[n, d]`, or an object with `len` that gives rows by a rising array of numbers.
    """

    def __init__(self, rows: Any, width: int) -> None:
        self.rows, self.width = rows, width
        self.offset: Tensor | None = None
        self.read = 0
        self.like = rows if isinstance(rows, Tensor) else _block(rows[np.arange(min(1, len(rows)))])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def passes(self) -> float:
        """Rows read, in units of the whole."""
        return self.read / len(self)

    def blocks(self) -> Iterator[Tensor]:
        """Gives all rows in order, a block at a time."""
        size = max(1, BLOCK // self.width)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            if isinstance(self.rows, (Tensor, np.ndarray)):
                block = self.rows[start:stop]
            else:
                block = self.rows[np.arange(start, stop)]
            yield self._finished(block)

    def take(self, indices: Tensor) -> Tensor:
        """Gives rows by number `[b]`, in any order and with repetitions: `[b, d]`."""
        if isinstance(self.rows, Tensor):
            return self._finished(self.rows[indices.to(self.rows.device)])
        single, places = np.unique(indices.numpy(), return_inverse=True)  # files on disk need rising numbers, each once
        block = _block(self.rows[single])
        return self._finished(block[torch.from_numpy(places).to(block.device)])

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Gives the mean over all rows of a function that gives the mean over a block of rows."""
        total: Tensor | None = None
        for block in self.blocks():
            part = function(block) * (len(block) / len(self))
            total = part if total is None else total + part
        if total is None:
            raise ValueError("X has no rows.")
        return total

    def _finished(self, block: Any) -> Tensor:
        rows = block if isinstance(block, Tensor) and isinstance(self.rows, Tensor) else _block(block)
        self.read += len(rows)
        return rows if self.offset is None else rows - self.offset


def row_source(estimator: BaseEstimator, X: Any, *, reset: bool, minimum: int = 1) -> RowSource:
    """Opens X by rows: an ordinary array is copied, and a `numpy.memmap` or another sequence is read as needed.

    Checks and errors are those of `rows_of`; for rows that are read later, at that time.
    """
    if not is_stream(X):
        rows = rows_of(estimator, X, reset=reset, minimum=minimum)
        return RowSource(rows, rows.shape[1])
    if len(X) == 0:
        raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
    shape = getattr(X, "shape", None) or (len(X), *np.shape(X[np.arange(1)])[1:])
    # scikit-learn's checks of the shape, on an array without contents.
    empty = np.broadcast_to(np.float64(0), tuple(shape))
    validate_data(estimator, empty, dtype=None, reset=reset, ensure_min_samples=minimum)
    return RowSource(X, shape[1])


def is_stream(X: Any) -> bool:
    """Tells whether rows of X are read as they are needed, and not taken into memory at once."""
    if isinstance(X, np.memmap):
        return X.dtype.kind in "fiub"
    if isinstance(X, (Tensor, np.ndarray, list, tuple, str, bytes, dict)) or issparse(X):
        return False
    table = hasattr(X, "iloc") or hasattr(X, "__dataframe__")
    return hasattr(X, "__len__") and hasattr(X, "__getitem__") and not table


def same_kind_as_rows(result: Tensor, X: Any) -> Any:
    """Gives the result as a tensor if X or its rows are tensors, else as an array."""
    return same_kind(result, X[np.arange(1)] if is_stream(X) else X)


def batch_rows(batch_size: Any, n: int) -> int:
    """Gives the size of a batch: an integer is taken unchanged, up to n; a share of n gives at least 64 rows, or n.

    Raises:
        ValueError: unless it is an integer from 1 or a share in (0, 1].
    """
    if isinstance(batch_size, Integral) and not isinstance(batch_size, bool) and int(batch_size) >= 1:
        return min(int(batch_size), n)
    if isinstance(batch_size, Real) and not isinstance(batch_size, Integral) and 0 < float(batch_size) <= 1:
        return min(max(round(float(batch_size) * n), SMALLEST_SHARE), n)
    raise ValueError(
        f"batch_size must be a number of rows (int >= 1) or a share of them (float in (0, 1]), got {batch_size!r}."
    )


def _block(block: Any) -> Tensor:
    """Gives rows from a file or sequence as a tensor: float32 if they are a float32 tensor, else float64."""
    if isinstance(block, Tensor):
        rows = block if block.dtype == torch.float32 else block.double()
    else:
        rows = torch.from_numpy(np.array(block, dtype=np.float64))
    if not bool(rows.isfinite().all()):
        raise ValueError("Input X contains NaN or infinity.")
    return rows
