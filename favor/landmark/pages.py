"""The index in which keys are searched: pages of a few neighbouring keys, and the choice of those that matter.

A page is found by the logit of its mean key. Neighbours need no sorting and lie side by side in memory, and new pages
are appended to old ones. Pages are known from Quest (Tang et al., 2024), which bounds the logits inside a page one
coordinate after another. On the models measured for docs/selected_keys.md, pages of 4 found the needles by their mean
alone, and a bound, mean plus spread, chose no better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Scores of pages at a time: little memory on a CPU, few launches on a GPU.
_SCORES, _SCORES_OF_GPU = 2**23, 2**27
LOOKS = 2  # pages that a later query looks at for each page that it may add
_PARTS = 16


def filled(rows: Tensor, size: int) -> Tensor:
    """Rows `[..., T, w]`, with zeros (False) at the end if their number is no multiple of `size`."""
    missing = -rows.shape[-2] % size
    return pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass
class Pages:
    """The pages of a sequence.

    Attributes:
        mean: of the keys of each page, `[N, p, d]`, at least float32.
        there: False for pages without a key that counts, `[N, p]`.
    """

    mean: Tensor
    there: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, key: Tensor, real: Tensor, size: int) -> Pages:
        """Cuts keys `[N, S, d]` into pages of `size`; `real` is `[N, S]`, True for the keys that count."""
        weights = filled(real.unsqueeze(-1), size).reshape(len(real), -1, 1, size)
        weights = weights.to(torch.promote_types(key.dtype, torch.float32))
        counts = weights.sum((2, 3))
        rows = filled(key, size).unflatten(1, (-1, size)).to(weights.dtype)
        total = (weights @ rows).squeeze(2)
        return cls(total / counts.clamp(min=1).unsqueeze(-1), counts > 0)

    def scores(self, query: Tensor, until: int | None = None) -> Tensor:
        """Products of queries `[N, n, d]` with the means of the first pages, `[N, n, until]`; -inf for absent pages."""
        found = query.to(self.mean.dtype) @ self.mean[:, :until].transpose(1, 2)
        absent = ~self.there[:, :until].unsqueeze(1)
        return found.masked_fill_(absent, -torch.inf) if bool(absent.any()) else found


@torch.no_grad()
def choose(
    pages: Pages, query: Tensor, number: int, near: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses pages for each block of queries together, by the mean of its queries.

    Args:
        pages: of the keys.
        query: `[N, Z, R, d]`, zeros for queries that do not count.
        number: of pages.
        near: pages that each block does not choose from, begin and end, `[Z]`: their tokens are exact as it is.

    Returns:
        The pages of each block, `[N, Z, n]`, and the first row that sees each: 0, or R for absent pages.
    """
    heads, blocks, rows, _ = query.shape
    every = pages.mean.shape[1]
    if number >= every:
        chosen = torch.arange(every, device=query.device).expand(heads, blocks, every)
        return chosen, torch.where(pages.there.unsqueeze(1).expand_as(chosen), 0, rows)
    together = max(_limit(query) // (heads * every), 1)
    best, place = [], torch.arange(every, device=query.device)
    for first in range(0, blocks, together):
        part = slice(first, first + together)
        scores = pages.scores(query[:, part].to(pages.mean.dtype).sum(2))  # their number does not matter
        if near is not None:
            begin, end = (edge[part].unsqueeze(-1) for edge in near)
            scores.masked_fill_((place >= begin) & (place < end), -torch.inf)
        best.append(scores.topk(number, -1, sorted=False))
    values, chosen = (torch.cat(part, 1) for part in zip(*best, strict=True))
    return chosen, torch.where(values > -torch.inf, 0, rows)


@dataclass(frozen=True)
class Growth:
    """How the pages of a causal block grow: its first query chooses `first` of them, each later one up to `later` more.

    A query sees the pages that it and the queries before it chose, so nothing of a later query shows. The first one
    takes all pages if there are no more than `number`.

    Attributes:
        number: of pages that a block reads at most.
        first, later: how they are shared out.
    """

    number: int
    first: int
    later: int

    @classmethod
    def of(cls, number: int, rows: int) -> Growth:
        """A quarter for the first of so many rows, and more where the rest cannot be shared out evenly.

        Raises:
            ValueError: if there are fewer pages than rows.
        """
        if number < rows:
            raise ValueError(
                f"each query of a block adds at least one page: {number} pages are too few for {rows} queries. Give "
                "more selected_keys, or a smaller page_size or query_block."
            )
        later = max(number * 3 // 4 // (rows - 1), 1) if rows > 1 else 0
        return cls(number, number - (rows - 1) * later, later)

    def slots(self, row: int) -> tuple[int, int]:
        """Where the pages that a row adds stand among those of its block: begin and end."""
        return (0, self.first) if row == 0 else (self.first + (row - 1) * self.later, self.first + row * self.later)


@torch.no_grad()
def choose_growing(pages: Pages, query: Tensor, until: Tensor, growth: Growth) -> tuple[Tensor, Tensor]:
    """Chooses pages query by query for causal blocks: the set of a block grows with each of its queries.

    A later query looks at its best pages, `LOOKS` for each that it may add, and adds the best that are not in the set.

    Args:
        pages: of the keys.
        query: `[N, F, Z, R, d]`: F sections of Z blocks.
        until: how many pages each section may choose from, those before it, `[F]` or `[N, F]`, not falling.
        growth: how many.

    Returns:
        The pages of each block, `[N, F, Z, n]`, n = `growth.number`, and the first row that sees each, R for none.
    """
    heads, sections, _, rows, _ = query.shape
    until = until.expand(heads, sections)
    looks = [_candidates(pages, query[:, f], until[:, f], growth) for f in range(sections)]
    values, chosen = (torch.stack(part, 1) for part in zip(*[first for first, _ in looks], strict=True))
    # The first query of a block; where few pages are there it takes them all.
    all_fit = (until <= growth.number).view(heads, sections, 1, 1)
    takes = (all_fit | (torch.arange(growth.number, device=query.device) < growth.first)) & (values > -torch.inf)
    since = torch.where(takes, 0, rows)
    if rows == 1 or bool(all_fit.all()):
        return chosen, since
    values, best = (torch.stack(part, 1) for part in zip(*[later for _, later in looks], strict=True))
    for row in range(1, rows):
        begin, end = growth.slots(row)
        own, fresh = best[:, :, :, row - 1], values[:, :, :, row - 1] > -torch.inf
        seen = since[..., :begin] < rows
        known = ((own.unsqueeze(-1) == chosen[..., None, :begin]) & seen.unsqueeze(-2)).any(-1)
        own, takes = _fresh(own, fresh & ~known, end - begin)
        chosen[..., begin:end] = torch.where(all_fit, chosen[..., begin:end], own)
        since[..., begin:end] = torch.where(all_fit, since[..., begin:end], torch.where(takes, row, rows))
    return chosen, since


_Best = tuple[Tensor, Tensor]  # scores and pages


def _candidates(pages: Pages, query: Tensor, until: Tensor, growth: Growth) -> tuple[_Best, _Best]:
    """The best pages of the first query of each block, `[N, Z, n]`, and of the later ones, `[N, Z, R - 1, looks]`.

    Where there are fewer, the scores of the others are -inf.
    """
    heads, _, rows, width = query.shape
    every, looks = int(until.max()), LOOKS * growth.later
    together = max(_limit(query) // max(heads * rows * every, 1), 1)
    found = []
    for part in query.split(together, 1):
        scores = pages.scores(part.reshape(heads, -1, width), every).unflatten(1, (-1, rows))
        if bool((until < every).any()):
            place = torch.arange(every, device=query.device)
            scores.masked_fill_((place >= until.unsqueeze(-1))[:, None, None], -torch.inf)
        found.append((*_top(scores[:, :, 0], growth.number), *_top(scores[:, :, 1:], looks)))
    values, best, later_values, later = (torch.cat(own, 1) for own in zip(*found, strict=True))
    return (values, best), (later_values, later)


def _top(scores: Tensor, number: int) -> _Best:
    """The largest of each row, `[..., number]`, and their places; -inf at place 0 where there are fewer.

    Long rows are searched by the maxima of 16 parts of them, which hold the largest ones: that is many times as fast.
    """
    every = scores.shape[-1]
    if every < number:
        values, places = scores.topk(every, -1)
        return pad(values, (0, number - every), value=-torch.inf), pad(places, (0, number - every))
    columns = every // _PARTS
    if columns < 2 * number:
        return scores.topk(number, -1)
    maxima = scores[..., : columns * _PARTS].unflatten(-1, (_PARTS, columns)).amax(-2)
    parts = columns * torch.arange(_PARTS, device=scores.device).unsqueeze(-1)
    places = (maxima.topk(number, -1, sorted=False).indices.unsqueeze(-2) + parts).flatten(-2)
    rest = torch.arange(columns * _PARTS, every, device=scores.device).expand(*places.shape[:-1], -1)
    places = torch.cat([places, rest], -1)
    values, index = scores.gather(-1, places).topk(number, -1)
    return values, places.gather(-1, index)


def _fresh(pages: Tensor, fresh: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The first `number` pages that are fresh, `[..., number]`, and which of them there are."""
    order = (~fresh).to(torch.uint8).argsort(dim=-1, stable=True)[..., :number]
    return pages.gather(-1, order), fresh.gather(-1, order)


def _limit(like: Tensor) -> int:
    return _SCORES if like.device.type == "cpu" else _SCORES_OF_GPU


@torch.no_grad()
def choose_next(
    pages: Pages, query: Tensor, row: Tensor, growth: Growth, held: tuple[Tensor, Tensor], rows: int
) -> tuple[Tensor, Tensor]:
    """Goes on where `choose_growing` stopped, by one query, which may choose from all pages.

    Args:
        pages: of the keys.
        query: `[N, Z, d]`.
        row: the place of this query in its block, `[N, Z]`.
        growth: how many pages.
        held: what the rows before it chose, pages and first rows `[N, Z, n]`.
        rows: R.

    Returns:
        Pages and first rows with those that this query adds.
    """
    chosen, since = held
    every = pages.mean.shape[1]
    if every == 0:
        return chosen, torch.full_like(since, rows)
    values, best = _top(pages.scores(query), min(max(growth.number, LOOKS * growth.later), every))
    place = torch.arange(best.shape[-1], device=query.device)
    is_first, all_fit = (row == 0).unsqueeze(-1), pages.there.sum(1).view(-1, 1, 1) <= growth.number
    # A block begins with a row of 0 and forgets what the last one chose.
    in_set = ((best.unsqueeze(-1) == chosen.unsqueeze(-2)) & (since < rows).unsqueeze(-2)).any(-1)
    looks = torch.where(is_first, all_fit | (place < growth.first), ~in_set & (place < LOOKS * growth.later))
    own, takes = _fresh(best, looks & (values > -torch.inf), min(growth.number, best.shape[-1]))
    slot = torch.arange(chosen.shape[-1], device=query.device)
    begin = torch.where(is_first, 0, growth.first + (row.unsqueeze(-1) - 1) * growth.later)
    count = torch.where(is_first, chosen.shape[-1], torch.where(all_fit, 0, growth.later))
    at = (slot - begin).clamp(min=0, max=own.shape[-1] - 1)
    inside = (slot >= begin) & (slot < begin + count) & (slot - begin < own.shape[-1])
    added = inside & takes.gather(-1, at)
    chosen = torch.where(added, own.gather(-1, at), chosen)
    since = torch.where(added, row.unsqueeze(-1), torch.where(is_first | inside, rows, since))
    return chosen, since
