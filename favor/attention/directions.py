"""Random directions as a pure function of a few numbers: the same on every device, and in no state dict."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from favor import features as families
from favor.features import RandomFeatures


def directions(
    features: str | RandomFeatures,
    num_features: int,
    head_dim: int,
    num_heads: int,
    orthogonal: bool,
    seed: int,
    layer: int,
    redraw: int,
    device: torch.device,
    dtype: torch.dtype,
    root: float = 1.0,
) -> Tensor:
    """Omega times `root`, `[num_heads, M, d]`, drawn on the CPU and cached on the device."""
    numbers = (num_features, head_dim, num_heads, orthogonal, seed, layer, redraw, device, dtype, root)
    if isinstance(features, str) and torch.compiler.is_compiling():
        return _draw(features, *numbers)
    return _cached(features, *numbers)


@lru_cache(maxsize=128)
def _cached(
    features: str | RandomFeatures,
    num_features: int,
    head_dim: int,
    num_heads: int,
    orthogonal: bool,
    seed: int,
    layer: int,
    redraw: int,
    device: torch.device,
    dtype: torch.dtype,
    root: float = 1.0,
) -> Tensor:
    if isinstance(features, str):
        features = families.get(features)
    digest = hashlib.sha256(f"{seed},{layer},{redraw}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # A tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        omega = features.draw(
            num_features, head_dim, orthogonal=orthogonal, generator=generator, batch_shape=(num_heads,)
        )
        return (root * omega).to(device=device, dtype=dtype)


@torch.library.custom_op("favor::directions", mutates_args=())
def _draw(
    name: str,
    num_features: int,
    head_dim: int,
    num_heads: int,
    orthogonal: bool,
    seed: int,
    layer: int,
    redraw: int,
    device: torch.device,
    dtype: torch.dtype,
    root: float = 1.0,
) -> Tensor:
    # A compiler may write into what an operator returns, so it gets a copy.
    return _cached(
        name, num_features, head_dim, num_heads, orthogonal, seed, layer, redraw, device, dtype, root
    ).clone()


@_draw.register_fake
def _(
    name: str,
    num_features: int,
    head_dim: int,
    num_heads: int,
    orthogonal: bool,
    seed: int,
    layer: int,
    redraw: int,
    device: torch.device,
    dtype: torch.dtype,
    root: float = 1.0,
) -> Tensor:
    omega = families.get(name).draw(num_features, head_dim, orthogonal=orthogonal, batch_shape=(num_heads,))
    return omega.new_empty(omega.shape, device=device, dtype=dtype)
