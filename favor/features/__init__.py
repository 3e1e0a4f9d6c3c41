"""Random features: registry and public classes.

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

from typing import TYPE_CHECKING, Any, Literal, overload

from favor.features.base import PositiveFeatures, RandomFeatures, SignedFeatures
from favor.features.centred import CDERF, WDERF
from favor.features.maps import ELUFeatures, ReLUFeatures
from favor.features.moments import Moments
from favor.features.omega import draw_omega
from favor.features.parameters import Parameters
from favor.features.positive import ADERF, DERF, GERF, SADERF, SDERF, PosRF, optimal_a
from favor.features.trigonometric import TrigRF
from favor.landmark.grouping import Landmarks

if TYPE_CHECKING:
    from favor.sklearn import SoftmaxKernelSampler

REGISTRY: dict[str, type[RandomFeatures | Landmarks]] = {
    family.name: family
    for family in (TrigRF, PosRF, GERF, SADERF, ADERF, SDERF, CDERF, WDERF, ReLUFeatures, ELUFeatures, Landmarks)
}


@overload
def get(name: Literal["landmark"], **options: Any) -> Landmarks: ...
@overload
def get(name: str, **options: Any) -> RandomFeatures: ...
def get(name: str, **options: Any) -> RandomFeatures | Landmarks:
    """A family of features by its registry name.

    Args:
        name: one of "trig", "pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "relu",
            "elu", "landmark".
        **options: keyword arguments of the class, such as `alpha`.

    Raises:
        ValueError: if the name is unknown; the message lists the known ones.
    """
    if name not in REGISTRY:
        raise ValueError(f"features must be one of {', '.join(sorted(REGISTRY))}; got {name!r}.")
    return REGISTRY[name](**options)


def __getattr__(name: str) -> Any:
    # scikit-learn takes a second to import: only for those who want the transformer.
    if name == "SoftmaxKernelSampler":
        from favor.sklearn import SoftmaxKernelSampler

        return SoftmaxKernelSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "Landmarks",
    "Moments",
    "Parameters",
    "PosRF",
    "PositiveFeatures",
    "RandomFeatures",
    "ReLUFeatures",
    "SignedFeatures",
    "SoftmaxKernelSampler",
    "TrigRF",
    "draw_omega",
    "get",
    "optimal_a",
]
