"""Triton kernels of chosen keys against a formula over all pairs in float64, and the choice against brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_problem import (
    CASES,
    CAUSAL,
    CHOICES,
    RUNS,
    choice,
    converted,
    errors,
    poisoned_where_unread,
    problem,
    results,
)
from torch import Tensor

from favor.kernels.chosen import choose, chosen_attention
from favor.kernels.operands import ChosenOperands


def attend(given: ChosenOperands) -> Tensor:
    """Computes it by the kernel, on its device."""
    device = torch.empty(0).device
    return chosen_attention(converted(given, lambda tensor: tensor.to(device)), "triton").cpu()


def by_torch(given: ChosenOperands) -> Tensor:
    """Computes it by plain torch, on the CPU."""
    return chosen_attention(given, "torch")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    given = problem(**options)
    found = errors(attend, given)
    assert max(found.values()) <= 5e-6, found
    clean, other = results(attend, given), results(attend, poisoned_where_unread(given))
    for name in clean:
        torch.testing.assert_close(other[name], clean[name], msg=name)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("options", "dtype"), [(CAUSAL, torch.float16), (RUNS, torch.bfloat16)], ids=str)
def test_half_precision_is_as_good_as_plain_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = problem(dtype=dtype, **options)
    found, others = errors(attend, given), errors(by_torch, given)
    for name, own in found.items():
        assert own <= 2 * others[name], (name, own, others[name])
        assert own <= {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], (name, own)


@pytest.mark.usefixtures("poisoned")
def test_rows_that_see_nothing_give_zeros_without_gradient() -> None:
    found = results(attend, problem(rows=8, seen=(0, 9), chosen=2, owns=2, means=3))
    for name in ("out", "query"):
        assert found[name][:, 0].eq(0).all()
        assert found[name][:, 1].ne(0).any()
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_norms_stay_finite(dtype: torch.dtype) -> None:
    given = problem(dtype=dtype, rows=8, seen=(9, 30), chosen=2, owns=2, means=3)
    given = given._replace(query=given.query * (1e3 if dtype == torch.float32 else 30), key=given.key * 30)
    assert all(tensor.isfinite().all() for tensor in results(attend, given).values())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_the_best_key_of_each_bin_is_found(case: Any) -> None:
    given, taken, truth = choice(*case)
    device = torch.empty(0).device
    taken = None if taken is None else taken.to(device)
    found = choose(*(tensor.to(device) for tensor in given), truth.shape[3], taken=taken, kernel="triton")
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu(), truth)
