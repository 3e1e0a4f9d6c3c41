"""The Triton kernel of selected keys against its formula over all pairs in float64: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from truth import error

from favor.kernels.operands import SelectedOperands
from favor.kernels.selected import selected_attention
from tests.kernels.eager.test_selected import CASES
from tests.kernels.selected_problem import naive, problem

# Query, far key and value, near key and value, key, value.
PLACES = (0, 2, 3, 5, 6, 7, 8)
# More rows, groups, near and chosen keys than a tile has, and widths that fill one or do not.
LONG: list[dict[str, Any]] = [
    {"rows": 40, "groups": 40, "near": 90, "first": 2, "width": 16, "value_width": 16, "heads": 1, "sections": 1},
    {"rows": 16, "keys": 90, "pages": 12, "blocks": 2, "width": 64, "value_width": 64, "norm": 0.5},
    {"rows": 2, "blocks": 2, "first": 3, "width": 256, "value_width": 80, "heads": 1, "sections": 1, "norm": 0.3},
]
# Relative to the size of all numbers; the unit of rounding is 3.9e-3 and 4.9e-4.
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def converted(given: SelectedOperands, convert: Callable[[Tensor], Tensor]) -> SelectedOperands:
    """The operands with all their tensors converted."""
    return SelectedOperands._make(convert(part) if isinstance(part, Tensor) else part for part in given)


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64."""
    return tensor.double() if tensor.is_floating_point() else tensor


def attend(given: SelectedOperands) -> Tensor:
    """Computes it by the kernel, on its device, from operands that are drawn on the CPU."""
    device = torch.empty(0).device
    return selected_attention(converted(given, lambda tensor: tensor.to(device)), "triton").cpu()


def results(function: Callable[[SelectedOperands], Tensor], given: SelectedOperands, grad: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = {given._fields[place]: given[place].clone().requires_grad_() for place in PLACES}
    out = function(given._replace(**leaves))
    gradients = torch.autograd.grad(out, tuple(leaves.values()), grad.to(out.dtype), materialize_grads=True)
    return [out.detach(), *gradients]


def check(given: SelectedOperands) -> None:
    """Compares outputs and gradients with those of the formula for the same numbers."""
    dtype = given.query.dtype
    generator = torch.Generator("cpu").manual_seed(1)
    grad = torch.randn(*given.query.shape[:-1], given.value.shape[-1], generator=generator, device="cpu").to(dtype)
    found, truth = results(attend, given, grad), results(naive, converted(given, exact), grad)
    for name, own, true in zip(("out", *(given._fields[place] for place in PLACES)), found, truth, strict=True):
        assert own.dtype == dtype
        assert error(own, true) <= LIMITS[dtype], (name, error(own, true))


def drawn(**options: Any) -> SelectedOperands:
    with torch.device("cpu"):
        return problem(**options)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", [*CASES, *LONG], ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    check(drawn(dtype=torch.float32, **options))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{"first": 0}, *LONG], ids=str)
def test_half_precision(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(drawn(dtype=dtype, **options))
