"""The kernel of selected keys in plain torch, against its formula over all pairs in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from favor.kernels.operands import SelectedOperands
from favor.kernels.selected import selected_attention
from tests.kernels.selected_problem import naive, problem

CASES: list[dict[str, Any]] = [
    {},
    {"first": 0},
    {"near": 0, "first": -1},
    {"pages": 0},
    {"sections": 1, "blocks": 6, "per_head": 3, "first": 2, "near": 14},
    {"rows": 1, "blocks": 2, "per_head": 1, "first": 7},
    {"rows": 1, "blocks": 2, "per_head": 1, "first": -1, "sections": 1},
    {"rows": 1, "blocks": 2, "per_head": 1, "first": -1, "sections": 1, "page_size": 1, "near": 0, "value_width": 2},
    {"rows": 1, "blocks": 2, "per_head": 1, "first": -1, "sections": 1, "pages": 0},
    {"rows": 1, "blocks": 2, "per_head": 1, "first": -1, "sections": 1, "norm": 12.0},
    {"page_size": 1, "pages": 9},
    {"width": 8, "value_width": 2, "keys": 64, "pages": 9, "groups": 12, "seed": 3},
    {"norm": 12.0},
    {"norm": 12.0, "first": 0},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    given = problem(**options)
    places = [place for place in (0, 2, 3, 5, 6, 7, 8) if given[place].numel()]
    leaves = [given[place].clone().requires_grad_() for place in places]

    def attended(function: Any) -> Any:
        own = given._replace(**{given._fields[place]: leaf for place, leaf in zip(places, leaves, strict=True)})
        return function(own)

    found, truth = attended(selected_attention), attended(naive)
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-11)
    grad = torch.randn_like(truth)

    def gradients(out: Any) -> Any:
        return torch.autograd.grad(out, leaves, grad, materialize_grads=True)

    pairs = zip(gradients(found), gradients(truth), strict=True)
    for own, true in pairs:
        torch.testing.assert_close(own, true, rtol=1e-8, atol=1e-10)


def test_work_in_many_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(heads=1, sections=3, blocks=6, per_head=3)
    whole = selected_attention(given)
    monkeypatch.setattr("favor.kernels.eager.selected._NUMBERS", 1)
    torch.testing.assert_close(selected_attention(given), whole)


def test_rows_may_stand_apart_in_memory() -> None:
    given = problem(keys=24)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (given.key, given.value)]
    torch.testing.assert_close(selected_attention(given._replace(key=apart[0], value=apart[1])), naive(given))


def test_large_norms_stay_finite() -> None:
    given = problem(dtype=torch.float32, norm=1e3, first=0)
    leaves = [given[place].clone().requires_grad_() for place in (0, 7, 8)]
    own = given._replace(query=leaves[0], key=leaves[1], value=leaves[2])
    out = selected_attention(own)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_rows_that_see_nothing_give_zeros_without_gradient() -> None:
    given = problem(near=0)
    given = given._replace(counts=torch.zeros_like(given.counts), cell=torch.full_like(given.cell, -1))
    query = given.query.clone().requires_grad_()
    out = selected_attention(given._replace(query=query))
    assert out.eq(0).all()
    out.sum().backward()
    assert query.grad is not None
    assert query.grad.eq(0).all()


def test_torch_takes_it_for_an_operator() -> None:
    given: SelectedOperands = problem()
    torch.library.opcheck(torch.ops.favor.selected_attention.default, (*given, "auto"))


def test_a_page_that_no_row_of_a_long_block_sees() -> None:
    given = problem(heads=1, sections=1, blocks=1, per_head=1, rows=40_000, pages=2)
    hidden = given._replace(since=torch.tensor([0, 40_000]).view(1, 1, 1, 2))
    size = given.page_size
    without = hidden._replace(pages=given.pages[..., :1], cell=given.cell[..., :size], since=hidden.since[..., :1])
    torch.testing.assert_close(selected_attention(hidden), selected_attention(without))


def test_a_large_key_that_nobody_reads_changes_no_bit() -> None:
    """Logits are judged by norms; a row may be judged only by the keys that it sees."""
    given = problem(dtype=torch.float32, first=0, keys=200)
    key = given.key.clone()
    size = given.page_size
    for head, pages in enumerate(given.pages.flatten(1)):
        is_read = torch.zeros(-(-key.shape[1] // size), dtype=torch.bool)
        is_read[pages] = True
        unread = ~is_read.repeat_interleave(size)[: key.shape[1]]
        assert unread.any()
        key[head, unread] *= 1e6
    changed = given._replace(key=key)
    assert torch.equal(selected_attention(changed), selected_attention(given))
