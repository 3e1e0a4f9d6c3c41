"""The Triton kernels that join groups, section after section, against the definition in float64 and sets of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from truth import error

import favor
from favor.features.moments import evenly_spaced
from favor.kernels import StreamState
from favor.kernels.gpu import deciding, joining
from favor.landmark import causal_selected
from favor.landmark.equal import lines
from favor.landmark.grouping import metric_of

NUMBER, TOKENS, SCALE, QUERIES = 16, 16, 0.3, 8
"""M and T; with T tokens the groups are still tokens."""


def drawn(sections: int = 4, width: int = 12, heads: int = 2, copies: int = 0, hidden: bool = False) -> dict[str, Any]:
    """Queries, keys and which of them count, on the CPU; every `copies` keys come again."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(3)
        query, key = torch.randn(2, heads, sections * TOKENS, width, generator=generator)
        real = torch.ones(heads, sections * TOKENS)
        if copies:
            key = key[:, torch.arange(sections * TOKENS) % copies]
        if hidden:
            real[0, 5:9], real[1, TOKENS : 2 * TOKENS] = 0, 0  # in one head, a section in which nothing counts
            key = key * real.unsqueeze(-1)
        return {"query": query, "key": key, "real": real}


def there(*tensors: Tensor) -> list[Tensor]:
    """Tensors on the device of the kernels."""
    return [tensor.to(torch.empty(0).device) for tensor in tensors]


def decide(query: Tensor, key: Tensor, real: Tensor, number: int = NUMBER) -> Tensor:
    """Decisions of the kernel."""
    rows, own = (tensor.unflatten(1, (-1, TOKENS)) for tensor in (query, real > 0))
    asking, _ = evenly_spaced(rows, own, QUERIES)
    given = (SCALE * asking, metric_of(rows, own), key, real, lines(key.shape[2], rows).t())
    return deciding.decide(*there(*given), number).cpu()


def joined(cells: list[int], groups: list[list[int]], number: int) -> list[list[int]]:
    """Joins sets of tokens, given the number of the new one of each."""
    found: list[list[int]] = [[] for _ in range(number + 1)]
    for cell, group in zip(cells, groups, strict=False):
        found[cell] += group
    return [sorted(group) for group in found[:number]]


def truth(query: Tensor, key: Tensor, real: Tensor, number: int = NUMBER) -> list[list[list[list[int]]]]:
    """By head and section, up to one more than there are: the tokens of each group, by `Landmarks.cells` in float64."""
    family, found = favor.landmark.Landmarks(num_queries=QUERIES), []
    for x, y, own in zip(query.double(), key.double(), real > 0, strict=True):
        groups: list[list[int]] = []
        of_head = [groups]
        for begin in range(0, len(y), TOKENS):
            section = slice(begin, begin + TOKENS)
            groups = [*groups, *([token] if own[token] else [] for token in range(begin, begin + TOKENS))]
            if len(groups) > number:
                counts = torch.tensor([len(group) for group in groups], dtype=torch.float64, device="cpu")
                means = torch.stack([y[group].sum(0) / max(len(group), 1) for group in groups])
                masks = (own[section], counts > 0)
                cells = family.cells(x[section], means, number, *masks, scale=SCALE, counts=counts).tolist()
                groups = joined(cells, groups, number)
            of_head.append(groups)
        found.append(of_head)
    return found


def followed(moved: Tensor, real: Tensor, number: int = NUMBER) -> list[list[list[list[int]]]]:
    """The same from decisions of the kernel."""
    found = []
    for decisions, own in zip(moved, real > 0, strict=True):
        groups: list[list[int]] = []
        of_head = [groups]
        for section, cells in enumerate(decisions.tolist()):
            begin = section * TOKENS
            groups = [*groups, *([token] if own[token] else [] for token in range(begin, begin + TOKENS))]
            after = min(len(groups), number)
            groups = joined(cells, groups, after)
            of_head.append(groups)
        found.append(of_head)
    return found


def partition(groups: list[list[int]]) -> list[list[int]]:
    """The groups that have tokens, in the order in which they stand."""
    return [group for group in groups if group]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "options",
    [
        {"hidden": True},
        {"number": 24, "heads": 1},
        {"number": 7, "sections": 3, "heads": 1},
        {"copies": 13, "heads": 1},
        {"width": 40, "sections": 2, "heads": 1},
    ],
    ids=str,
)
def test_decisions_are_those_of_landmarks(options: dict[str, Any]) -> None:
    number = options.get("number", NUMBER)
    given = drawn(**{name: value for name, value in options.items() if name != "number"})
    moved = decide(**given, number=number)
    found, true = followed(moved, given["real"], number), truth(**given, number=number)
    for own, expected in zip(found, true, strict=True):
        assert [partition(groups) for groups in own] == [partition(groups) for groups in expected]
    assert any(len(group) > 2 for group in found[0][-1])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("more", "dtype"), [(0, torch.bfloat16), (1, torch.float32)], ids=str)
def test_means_are_those_of_the_groups(more: int, dtype: torch.dtype) -> None:
    given = drawn(sections=3, width=40, hidden=True)
    key, real, moved = given["key"].to(dtype), given["real"], decide(**given)
    sections = 3 + more
    counts, means, sums = (own.cpu() for own in joining.means(*there(moved, key, real), NUMBER, sections))
    assert means.dtype == dtype
    for head, of_head in enumerate(followed(moved, real)):
        for section in range(sections):
            groups = of_head[section]
            assert counts[head, section, : len(groups)].tolist() == [len(group) for group in groups]
            assert counts[head, section, len(groups) :].eq(0).all()
            expected = torch.stack([key[head, own].double().sum(0) for own in groups] or [key[0, 0].double() * 0])
            if section >= sections - 2:
                assert error(sums[head, section % 2, : len(groups)], expected) <= 1e-6
            sizes = counts[head, section, : len(groups)].clamp(min=1).double().unsqueeze(-1)
            limit = 1e-6 if dtype == torch.float32 else 4e-3
            assert error(means[head, section, : len(groups)], expected / sizes) <= limit


@pytest.mark.usefixtures("poisoned")
def test_gradients_of_tokens_are_the_transpose_of_sums() -> None:
    given = drawn(sections=3, width=40, hidden=True)
    real, moved = given["real"], decide(**given)
    groups = followed(moved, real)
    with torch.device("cpu"):
        of_sums = torch.randn(2, 4, NUMBER, 40, generator=torch.Generator().manual_seed(4))
    found = joining.of_tokens(*there(moved, of_sums), NUMBER).cpu()
    expected = torch.zeros_like(found, dtype=torch.float64)
    for head in range(2):
        for section in range(4):
            for number, group in enumerate(groups[head][section]):
                expected[head, group] += of_sums[head, section, number].double()
    counted = real.unsqueeze(-1) > 0
    assert error(found.masked_fill(~counted, 0), expected) <= 1e-6


@pytest.mark.usefixtures("poisoned")
def test_keys_are_followed_to_their_groups() -> None:
    given = drawn(hidden=True)
    real, moved = given["real"], decide(**given)
    groups, size = followed(moved, real), 4
    with torch.device("cpu"):
        pages = torch.randint(0, real.shape[1] // size, (2, 5, 3), generator=torch.Generator().manual_seed(5))
        section = torch.tensor([0, 1, 2, 3, 4])
    found = joining.follow(*there(moved, real, pages, section), size, NUMBER).cpu()
    assert found.ge(0).any()
    for head in range(2):
        for block in range(5):
            of_token = {token: m for m, group in enumerate(groups[head][section[block]]) for token in group}
            tokens = [int(page) * size + i for page in pages[head, block] for i in range(size)]
            assert found[head, block].tolist() == [of_token.get(token, -1) for token in tokens]


@pytest.mark.usefixtures("poisoned")
def test_a_chain_of_nearly_equal_rows_is_followed_to_its_first() -> None:
    """The first and the last row are too far apart to be equal, and both equal what lies between them."""
    given = drawn(sections=3)
    key, near = given["key"], given["key"][:, 3] / given["key"][:, 3].norm(dim=-1, keepdim=True)
    for place, step in ((0, -25), (32, 25), *((place, 0) for place in range(1, 25))):
        key[:, place] = near * (1 + step * 2.0**-23)
    for own in followed(decide(**given), given["real"]):
        (group,) = (group for group in own[-1] if 1 in group)
        assert {*range(25), 32} <= set(group)


OPTIONS = {"window": TOKENS, "selected_keys": 8, "page_size": 2, "query_block": 4}
OPTIONS |= {"features": "landmark", "is_causal": True}


def kept(state: StreamState) -> list[Tensor]:
    """What a state has after whole sections."""
    memory = state.memory
    return [memory.counts, memory.key, memory.value, memory.cells.float(), memory.before_key]


@pytest.mark.parametrize("length", [5, TOKENS, 2 * TOKENS], ids=str)
def test_a_state_of_few_sections(length: int) -> None:
    """Also if the last section is complete, with another width of values and two query heads."""
    given = drawn(sections=2, width=16)
    query, key = (own[:, :length].unsqueeze(0) for own in there(given["query"], given["key"]))
    found = []
    for kernel in ("triton", "torch"):
        state = StreamState()
        tensors = query, key[:, :1], key[:, 1:, :, :10]
        out = favor.favor_attention(*tensors, num_features=11, **OPTIONS, kernel=kernel, state=state)
        found.append([out, *kept(state)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_attention_is_that_of_the_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a state, which keeps what the last section did, and without; one of the sequences is padded."""
    given, length, decided, seen = drawn(sections=4, width=16), 3 * TOKENS + 5, causal_selected.at_once, []
    query, key = (own.unsqueeze(1) for own in there(given["query"], given["key"]))
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, :7] = False

    def note(*arguments: Any) -> bool:
        seen.append(decided(*arguments))
        return seen[-1]

    def attend(kernel: str) -> list[Tensor]:
        options = OPTIONS | {"num_features": NUMBER, "kernel": kernel}
        leaves = [own[:, :, :length].clone().requires_grad_() for own in (query, key, key.flip(-1))]
        out = favor.favor_attention(*leaves, **options, key_padding_mask=mask)
        found, state = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)], StreamState(is_ragged=True)
        with torch.no_grad():
            for part in (slice(2 * TOKENS), slice(2 * TOKENS, length)):
                now = (own[:, :, part] for own in leaves)
                found.append(favor.favor_attention(*now, **options, key_padding_mask=mask[:, part], state=state))
        return [*found, *kept(state), state.memory.before_cells.float()]

    monkeypatch.setattr(causal_selected, "at_once", note)
    for own, expected in zip(attend("triton"), attend("torch"), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    assert seen == [True, True, False, False]
