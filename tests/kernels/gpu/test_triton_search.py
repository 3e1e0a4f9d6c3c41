"""The Triton kernel that searches for pages, against all logits in float64, and the choice that follows from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from favor.kernels.gpu import search
from favor.landmark.growth import Growth, choose_growing
from favor.landmark.pages import Pages

HEADS, WIDTH, PLACE_BITS = 2, 20, 11


def drawn(rows: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Pages]:
    """Queries of four sections, and pages of which some have no key that counts."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(6)
        query = torch.randn(HEADS, 4, rows, WIDTH, generator=generator).to(dtype)
        mean = torch.randn(HEADS, count, WIDTH, generator=generator)
        there = torch.rand(HEADS, count, generator=generator) > 0.1
    device = torch.empty(0).device
    return query.to(device), Pages(mean.to(device), there.to(device))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("count", "classes", "widest"), [(70, 8, 32), (70, 32, 32), (5, 4, 8), (40, 40, 40)], ids=str)
def test_the_best_page_of_each_class_is_found(count: int, classes: int, widest: int) -> None:
    query, pages = drawn(rows=19, count=count)
    until = torch.tensor([[0, 3, count // 2, count], [1, 2, 3, 4]])
    given = (query, pages.mean, pages.there, until, classes, widest, PLACE_BITS)
    values, found = search.best_of_classes(*given)
    logits = (query.double() @ pages.mean.double().transpose(1, 2).unsqueeze(1)).cpu()
    for head in range(HEADS):
        for section in range(4):
            for own in range(classes):
                page = torch.arange(int(until[head, section]), device="cpu")[own::classes]
                page = page[pages.there[head].cpu()[page]]
                value, place = (tensor[head, section, :, own].cpu() for tensor in (values, found))
                if not len(page):
                    assert (value < search.LOWEST / 2).all()
                    continue
                assert torch.isin(place.long(), page).all()
                largest = logits[head, section][:, page].max(1).values
                chosen = logits[head, section].gather(1, place.long().unsqueeze(1)).squeeze(1)
                # What the place of the page takes from a score.
                limit = largest.abs() * 2.0 ** (PLACE_BITS - 22) + 1e-6
                assert (largest - chosen <= limit).all()
                assert (value - chosen).abs().le(limit).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "rows"), [(12, 4), (9, 1), (40, 8)], ids=str)
def test_the_choice_is_that_of_one_section_after_another(number: int, rows: int, dtype: torch.dtype) -> None:
    query, pages = drawn(rows=3 * rows, count=90, dtype=dtype)
    blocks, until = query.unflatten(2, (3, rows)), torch.tensor([0, 25, 51, 90])
    growth = Growth.of(number, rows)
    chosen, since = choose_growing(pages, blocks, until, growth, at_once=True)
    expected, first = choose_growing(pages, blocks, until, growth)
    assert torch.equal(since, first)
    seen = since < rows
    assert torch.equal(chosen[seen], expected[seen])
    assert seen[:, 1:].any(-1).all()
