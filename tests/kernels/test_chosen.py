"""Chosen keys of both kernels against a formula over all pairs in float64, and the choice against brute force."""

from __future__ import annotations

from collections.abc import Callable
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
    exact,
    poisoned_where_unread,
    problem,
    results,
)
from torch import Tensor

from favor.kernels.chosen import choose, chosen_attention, log_left
from favor.kernels.operands import ChosenOperands

both_kernels = pytest.mark.parametrize("kernel", ["torch", "triton"])
of_causal_layers_and_encoders = pytest.mark.parametrize("options", [CAUSAL, RUNS], ids=str)


def by(kernel: str) -> Callable[[ChosenOperands], Tensor]:
    """Computes it by a kernel, on its device."""
    device = torch.empty(0).device if kernel == "triton" else "cpu"
    return lambda given: chosen_attention(converted(given, lambda tensor: tensor.to(device)), kernel).cpu()


@pytest.mark.usefixtures("poisoned")
@both_kernels
@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options: dict[str, Any], kernel: str) -> None:
    given = problem(**options)
    found = errors(by(kernel), exact(given) if kernel == "torch" else given)
    assert max(found.values()) <= (1e-12 if kernel == "torch" else 5e-6), found
    if kernel == "triton":  # what no row sees is not even read
        clean, other = results(by(kernel), given), results(by(kernel), poisoned_where_unread(given))
        for name in clean:
            torch.testing.assert_close(other[name], clean[name], msg=name)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("options", "dtype"), [(CAUSAL, torch.float16), (RUNS, torch.bfloat16)], ids=str)
def test_triton_in_half_precision_is_as_good_as_plain_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = problem(dtype=dtype, **options)
    found, others = errors(by("triton"), given), errors(by("torch"), given)
    for name, own in found.items():
        assert own <= 2 * others[name], (name, own, others[name])
        assert own <= {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], (name, own)


@of_causal_layers_and_encoders
def test_work_in_many_parts_changes_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = exact(problem(**options))
    whole = results(by("torch"), given)
    monkeypatch.setattr("favor.kernels.eager.chosen._NUMBERS", 1)
    for name, own in results(by("torch"), given).items():
        torch.testing.assert_close(own, whole[name], msg=name)


@of_causal_layers_and_encoders
def test_rows_may_stand_apart_in_memory(options: dict[str, Any]) -> None:
    given = exact(problem(**options))
    names = ("query", "key", "value", "far_key", "far_value")
    apart = {name: getattr(given, name).mT.contiguous().mT for name in names}
    torch.testing.assert_close(by("torch")(given._replace(**apart)), by("torch")(given))


@pytest.mark.usefixtures("poisoned")
@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_norms_stay_finite(dtype: torch.dtype, kernel: str) -> None:
    given = problem(dtype=dtype, rows=8, seen=(9, 30), chosen=2, owns=2, means=3)
    given = given._replace(query=given.query * (1e3 if dtype == torch.float32 else 30), key=given.key * 30)
    assert all(tensor.isfinite().all() for tensor in results(by(kernel), given).values())


@pytest.mark.usefixtures("poisoned")
@both_kernels
def test_rows_that_see_nothing_give_zeros_without_gradient(kernel: str) -> None:
    found = results(by(kernel), problem(rows=8, seen=(0, 9), chosen=2, owns=2, means=3))
    for name in ("out", "query"):
        assert found[name][:, 0].eq(0).all()
        assert found[name][:, 1].ne(0).any()
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_triton_finds_the_best_key_of_each_bin(case: Any) -> None:
    given, taken, truth = choice(*case)
    device = torch.empty(0).device
    taken = None if taken is None else taken.to(device)
    found = choose(*(tensor.to(device) for tensor in given), truth.shape[3], taken=taken, kernel="triton")
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu(), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("numbers", [1, 2**19])
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_torch_finds_the_best_key_of_each_bin(
    case: Any, numbers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("favor.kernels.eager.chosen._NUMBERS", numbers)
    (query, key, seen), taken, truth = choice(*case)
    number = truth.shape[3]
    found = choose(query.to(dtype), key.to(dtype), seen, number, taken=taken, kernel="torch")
    assert found.dtype == torch.int32
    # A block that sees no more keys than it has bins took all of them, which the case does not know.
    blocks = torch.ones_like(seen, dtype=torch.bool) if taken is None else seen > taken.shape[-1]
    keys = key.repeat_interleave(len(query) // len(key), 0)
    scores = torch.nn.functional.pad(query @ keys.unsqueeze(1).mT, (0, 1), value=-torch.inf)
    best = [scores.gather(3, own.long() % scores.shape[3])[blocks] for own in (found, truth)]  # -1: the last one
    if dtype == torch.float64:
        assert torch.equal(found[blocks], truth[blocks])
    # In float32 the place takes the last digits of a score, so another one of equal keys may be found.
    torch.testing.assert_close(*best, rtol=1e-4, atol=1e-3)
    assert ((found < 0) | (found % number == torch.arange(number)))[blocks].all()


def test_what_a_block_chose_is_taken_from_the_means() -> None:
    """By counting keys one by one: keys of runs, and whole runs that are means."""
    for run, span, keys in ((1, 16, 70), (8, 8, 70), (8, 16, 64)):
        number = -(-keys // span)
        shared = torch.tensor([[[3, 0, -1], [keys // run - 1, 2, 1]]], dtype=torch.int32)
        seen = torch.tensor([[keys - 5, keys]], dtype=torch.int32)
        facts = (torch.tensor([size], dtype=torch.int32) for size in (run, span))
        found = log_left(shared, seen, *facts, number, torch.float64).exp()
        for block in range(2):
            chosen = {int(p) * run + j for p in shared[0, block] if p >= 0 for j in range(run)}
            left = [j for j in range(int(seen[0, block])) if j not in chosen]
            count = torch.bincount(torch.tensor(left) // span, minlength=number).double()
            torch.testing.assert_close(found[0, block], count)


def test_torch_takes_them_for_operators() -> None:
    given = problem(rows=3, seen=(9, 30), chosen=2, owns=2, means=3, first=(0,), keys=32)
    torch.library.opcheck(torch.ops.favor.chosen_attention.default, (*given, "torch"))
    facts = (given.query, given.key, given.seen, given.shared, 4, "torch")
    torch.library.opcheck(torch.ops.favor.choose_keys.default, facts)
    facts = (given.shared, given.seen, given.run, given.run * 8, 4, torch.float32)
    torch.library.opcheck(torch.ops.favor.log_of_keys_left.default, facts)
