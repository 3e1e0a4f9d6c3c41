"""Tensors or arrays in, the same kind out; checks of parameters, and warnings, for this whole package."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

_INNER = ("favor", "sklearn", "torch")  # the packages whose frames lie between a warning and the line that it is about


def rows_of(estimator: BaseEstimator, X: Any, *, reset: bool, minimum: int = 1) -> Tensor:
    """Checks rows `[n, n_features]` and gives a tensor: float64, or float32 if a float32 tensor was given.

    A tensor stays on its device. The estimator gets `n_features_in_` and names if `reset`, as in `fit`; otherwise the
    width must be that of `fit`. Errors are those of scikit-learn's `check_array`.
    """
    # Not at the top: mixture proportions do without scikit-learn, which takes a second to import.
    from sklearn.utils.validation import validate_data

    if isinstance(X, Tensor):
        # The checks of shape and kind are scikit-learn's, on a tensor of the same shape without contents.
        validate_data(
            estimator, np.broadcast_to(np.float64(0), X.shape), dtype=None, reset=reset, ensure_min_samples=minimum
        )
        if X.is_complex():
            raise ValueError("Complex data not supported.")
        if not bool(X.isfinite().all()):
            raise ValueError("Input X contains NaN or infinity.")
        return X.detach() if X.dtype == torch.float32 else X.detach().double()
    checked = validate_data(estimator, X, dtype=np.float64, reset=reset, ensure_min_samples=minimum)
    return tensor_of(checked)


def tensor_of(array: Any, like: Tensor | None = None) -> Tensor:
    """Makes a tensor of an array or tensor, in the type and on the device of another one if that is given."""
    tensor = array if isinstance(array, Tensor) else torch.tensor(np.asarray(array), device="cpu")
    return tensor if like is None else tensor.to(like)


def same_kind(result: Tensor, given: Any) -> Any:
    """Gives the result as a tensor if a tensor was given, else as an array."""
    return result if isinstance(given, Tensor) else result.cpu().numpy()


def generator_of(random_state: Any) -> torch.Generator:
    """Makes a CPU generator seeded as scikit-learn's estimators are: int, RandomState or None."""
    from sklearn.utils import check_random_state

    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(np.iinfo(np.int32).max)))


def check_integer(name: str, value: Any, *others: str | None) -> None:
    """Raises ValueError unless a parameter is a positive integer, or one of the others."""
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    _check(name, value, "a positive integer", integer and value > 0, others)


def check_number(
    name: str,
    value: Any,
    *others: str | None,
    expected: str = "a number of at least 0",
    allowed: Callable[[float], bool] = lambda number: 0 <= number < math.inf,
) -> None:
    """Raises ValueError unless a parameter is a real number that is allowed, or one of the others."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    _check(name, value, expected, number and allowed(float(value)), others)


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless a parameter is a boolean."""
    _check(name, value, "True or False", isinstance(value, (bool, np.bool_)), ())


def _check(name: str, value: Any, expected: str, fits: bool, others: tuple[str | None, ...]) -> None:
    # The kind is tested first, since == on arrays has no single answer.
    if not fits and not ((value is None or isinstance(value, str)) and value in others):
        raise ValueError(f"{name} must be {' or '.join([expected, *map(repr, others)])}, got {value!r}.")


def warn_of_end(message: str) -> None:
    """Issues a ConvergenceWarning at the line that called this package, past the wrappers of scikit-learn and torch."""
    from sklearn.exceptions import ConvergenceWarning

    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConvergenceWarning, stacklevel=level)
