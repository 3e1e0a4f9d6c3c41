"""Random directions as a pure function of a few numbers: the same on every device, and in no state dict."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from favor.features import RandomFeatures
from favor.features.base import DRAWS
from favor.kernels.dispatch import operator
from favor.registry import get


class Draw(NamedTuple):
    """All that random directions depend on.

    Attributes:
        source: the family, its name, or a name of `favor.features.base.DRAWS`; a compiler can treat names as
            constants.
        num_features, head_dim, num_heads: M, d and Hk.
        root: factor of the result.
    """

    source: str | RandomFeatures
    num_features: int
    head_dim: int
    num_heads: int
    orthogonal: bool
    seed: int
    layer: int
    redraw: int
    device: torch.device
    dtype: torch.dtype
    root: float = 1.0


def _omega(draw: Draw, generator: torch.Generator | None = None) -> Tensor:
    """Draws omega `[num_heads, M, d]`, float64, on the CPU."""
    source = get(draw.source) if isinstance(draw.source, str) and draw.source not in DRAWS else draw.source
    draw_omega = DRAWS[source] if isinstance(source, str) else source.draw
    shape = (draw.num_features, draw.head_dim)
    return draw_omega(*shape, orthogonal=draw.orthogonal, generator=generator, batch_shape=(draw.num_heads,))


def shape_of(draw: Draw) -> torch.Size:
    """Gives the shape of `directions`, which must not be drawn where tensors are fake: they are kept."""
    return _omega(draw).shape


@lru_cache(maxsize=128)
def directions(draw: Draw) -> Tensor:
    """Gives omega times `root`, `[num_heads, M, d]`, drawn on the CPU and kept on the device."""
    digest = hashlib.sha256(f"{draw.seed},{draw.layer},{draw.redraw}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # A tensor made in inference mode could not be used in training later.
    # A transform of torch.func would refuse or change the draw, so it must not see it.
    with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
        return (draw.root * _omega(draw, generator)).to(device=draw.device, dtype=draw.dtype)


@torch.compiler.assume_constant_result
def exported_directions(*numbers: Any) -> Tensor:
    """Gives `directions` as a constant of an exported program, drawn where nothing traces it."""
    with _disable_current_modes():
        return directions(Draw(*numbers))


# `directions` for a compiler, which can treat a name as a constant and sees operators only. It may write into what an
# operator returns, so it gets a copy.
compiled_directions = operator(
    "directions",
    "(str name, SymInt num_features, SymInt head_dim, SymInt num_heads, bool orthogonal, SymInt seed, "
    "SymInt layer, SymInt redraw, Device device, ScalarType dtype, float root=1.) -> Tensor",
    lambda *numbers: directions(Draw(*numbers)).clone(),
    lambda *numbers: torch.empty(shape_of(draw := Draw(*numbers)), device=draw.device, dtype=draw.dtype),
)
