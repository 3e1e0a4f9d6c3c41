"""Tensors or arrays in, the same kind out: what all estimators of this package share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data
from torch import Tensor


def rows_of(estimator: BaseEstimator, X: Any, *, reset: bool, minimum: int = 1) -> Tensor:
    """Validated rows `[n, n_features]` as a tensor: float64, or float32 if a float32 tensor was given.

    Args:
        estimator: gets `n_features_in_` (and feature names, if the data have them).
        X: tensor, which stays on its device, or anything scikit-learn takes as dense data.
        reset: True in `fit`; otherwise the width must be that of `fit`.
        minimum: smallest number of rows.

    Raises:
        ValueError, TypeError: as scikit-learn's `check_array`.
    """
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
    """A tensor of an array or tensor, in the type and on the device of another if one is given."""
    tensor = array if isinstance(array, Tensor) else torch.tensor(np.asarray(array), device="cpu")
    return tensor if like is None else tensor.to(like)


def same_kind(result: Tensor, given: Any) -> Any:
    """The result as a tensor if a tensor was given, else as an array."""
    return result if isinstance(given, Tensor) else result.cpu().numpy()
