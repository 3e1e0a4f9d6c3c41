"""Random features: the public classes, and `get`, which makes one by its name.

Example:
    >>> import torch, favor
    >>> features = favor.features.get("sderf")
    >>> x, y = torch.randn(5, 8) / 4, torch.randn(7, 8) / 4
    >>> params = features.fit(x, y)
    >>> omega = features.draw(4096, 8, generator=torch.Generator().manual_seed(0)).float()
    >>> error = features.kernel(x, y, omega, params) / (x @ y.T).exp() - 1
    >>> bool(error.abs().max() < 0.2)
    True

"""

from __future__ import annotations

from favor.features.base import PositiveFeatures, RandomFeatures, SignedFeatures, draw_omega
from favor.features.centred import CDERF, WDERF
from favor.features.moments import Moments
from favor.features.parameters import Parameters
from favor.features.positive import ADERF, DERF, GERF, SADERF, SDERF, PosRF, optimal_a
from favor.features.signed import ELUFeatures, ReLUFeatures, TrigRF
from favor.registry import FAMILIES as REGISTRY
from favor.registry import get

__all__ = [
    "ADERF",
    "CDERF",
    "DERF",
    "GERF",
    "REGISTRY",
    "SADERF",
    "SDERF",
    "WDERF",
    "ELUFeatures",
    "Moments",
    "Parameters",
    "PosRF",
    "PositiveFeatures",
    "RandomFeatures",
    "ReLUFeatures",
    "SignedFeatures",
    "TrigRF",
    "draw_omega",
    "get",
    "optimal_a",
]
