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
SMALL = [case | {"heads": 1} for case in CASES if "norm" not in case and (case.get("rows") != 1 or "page_size" in case)]
# More rows, groups, near and chosen keys than a tile has, and widths that fill one or do not.
ONE = {"heads": 1, "sections": 1, "blocks": 2}
LONG: list[dict[str, Any]] = [
    {"rows": 40, "groups": 40, "near": 90, "first": 1, "width": 16, "value_width": 16, **ONE},
    {"rows": 16, "keys": 90, "pages": 14, "page_size": 3, "width": 64, "value_width": 64, "norm": 0.5, **ONE},
    {"rows": 2, "first": 3, "width": 256, "value_width": 80, "norm": 0.3, **ONE},
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
@pytest.mark.parametrize("options", [*SMALL, *LONG], ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    check(drawn(dtype=torch.float32, **options))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("options", "dtype"), [*((case, torch.bfloat16) for case in LONG), (LONG[0], torch.float16)], ids=str
)
def test_half_precision(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(drawn(dtype=dtype, **options))


@pytest.mark.usefixtures("poisoned")
def test_what_is_hidden_is_not_read() -> None:
    given = drawn(dtype=torch.float32, first=0, pages=6, sections=1)
    given = given._replace(cell=given.cell.masked_fill(given.pages.repeat_interleave(4, -1) < 2, -1))
    given.counts[:, :, 0] = 0  # chosen keys of this group take nothing from it
    check(given)
    missing = {
        "far": given.counts == 0,
        "near": given.near_counts == 0,
        "": torch.arange(given.key.shape[1], device="cpu").expand(2, -1) < 8,
    }
    poison = {}
    for name, hidden in missing.items():
        for kind in ("key", "value"):
            field = f"{name}_{kind}".strip("_")
            poison[field] = getattr(given, field).masked_fill(hidden.unsqueeze(-1), torch.nan)
    grad = torch.ones(*given.query.shape[:-1], given.value.shape[-1], device="cpu")
    pairs = zip(results(attend, given._replace(**poison), grad), results(attend, given, grad), strict=True)
    for found, clean in pairs:
        torch.testing.assert_close(found, clean)


@pytest.mark.usefixtures("poisoned")
def test_rows_that_see_nothing_give_zeros_without_gradient() -> None:
    given = drawn(dtype=torch.float32, first=0, sections=1)
    empty = given._replace(counts=torch.zeros_like(given.counts), cell=torch.full_like(given.cell, -1))
    empty.near_counts[:, :, :3] = 0
    grad = torch.ones(*given.query.shape[:-1], given.value.shape[-1], device="cpu")
    out, of_query, *others = results(attend, empty, grad)
    # Rows 0, 1 and 2 of the first block of each head see no near key; the fourth sees key 3, if that counts.
    assert out[:, :, ::2, :3].eq(0).all()
    assert of_query[:, :, ::2, :3].eq(0).all()
    assert all(tensor.isfinite().all() for tensor in (out, of_query, *others))
    assert out.ne(0).any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_norms_stay_finite(dtype: torch.dtype) -> None:
    given = drawn(dtype=dtype, norm=1e3 if dtype == torch.float32 else 30.0, first=0, sections=1)
    grad = torch.ones(*given.query.shape[:-1], given.value.shape[-1], device="cpu")
    assert all(tensor.isfinite().all() for tensor in results(attend, given, grad))


@pytest.mark.skipif(torch.cuda.is_available(), reason="one device is enough")
def test_torch_takes_it_for_an_operator() -> None:
    given = problem(dtype=torch.float32, sections=1, blocks=2)
    torch.library.opcheck(torch.ops.favor.selected_attention.default, (*given, "triton"))
