"""Scale-invariant power methods: robust decompositions, mixture weights, stochastic principal components."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from favor._parts import needs

# Imported when asked for: the estimators need scikit-learn, which takes a second to import.
_HOMES = {
    "KLNMF": "kl_nmf",
    "L1KernelPCA": "kernel_pca",
    "LpKernelPCA": "kernel_pca",
    "StochasticSCIPI": "stochastic",
    "VRHeavyBallPower": "variance_reduced",
    "VRPower": "variance_reduced",
    "block_power": "power",
    "l1_kernel_pca": "kernel_pca",
    "mixture_proportions": "mixture",
    "scale_invariant_power": "power",
}

_PLAIN = ("mixture", "power")  # these need neither scikit-learn nor SciPy

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if _HOMES[name] not in _PLAIN:
            needs("sklearn", "sklearn", "scipy")
        return getattr(import_module(f"favor.decomposition.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
