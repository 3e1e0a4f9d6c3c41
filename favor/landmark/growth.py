"""The choice of pages in causal layers: the set of a block of queries grows with each of them.

The first query of a block chooses its best pages, each later one adds the best that the set lacks. A query sees the
pages that it and the queries before it chose, so no query depends on a later one.

The search is most of the work of a long sequence, so a later query looks at fewer pages: pages are put into classes in
turn, and of each class the query sees the best page only. Neighbours, which often matter together, are in different
classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels.dispatch import has_shape_only, read, triton_module
from favor.kernels.eager.common import Buffer
from favor.landmark.pages import Pages

LOOKS = 2  # pages that a later query looks at for each page that it may add
_CLASSES, _LEAST = 4, 32  # for each of these pages, and at least
_PLACE_BITS = 11  # of a score that tell its place, which leaves 12 bits to compare in float32


@dataclass(frozen=True)
class Growth:
    """How the pages of a block are shared out among its queries.

    The first one takes all pages if there are no more than `number`.

    Attributes:
        number: of pages that a block reads at most.
        first, later: that the first query chooses, and that each later one adds at most.
    """

    number: int
    first: int
    later: int

    @classmethod
    def of(cls, number: int, rows: int) -> Growth:
        """Gives a quarter of the pages to the first of `rows` queries, and more if the rest cannot be divided evenly.

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

    @property
    def looks(self) -> int:
        """Number of pages that a later query looks at."""
        return LOOKS * self.later

    @property
    def classes(self) -> tuple[int, int]:
        """Numbers of classes for the first query and for later ones, powers of two: page p is in class p mod this."""
        least = (max(_CLASSES * self.first, self.number, _LEAST), max(_CLASSES * self.looks, _LEAST))
        return 1 << (least[0] - 1).bit_length(), 1 << (least[1] - 1).bit_length()

    def slots(self, row: int) -> tuple[int, int]:
        """Tells where the pages that a row adds stand among those of its block: begin and end."""
        return (0, self.first) if row == 0 else (self.first + (row - 1) * self.later, self.first + row * self.later)


@torch.no_grad()
def choose_growing(
    pages: Pages, query: Tensor, until: Tensor, growth: Growth, at_once: bool = False
) -> tuple[Tensor, Tensor]:
    """Chooses pages query by query.

    Args:
        pages: of the keys.
        query: `[N, F, Z, R, d]`: F sections of Z blocks.
        until: how many pages each section may choose from, those before it, `[F]` or `[N, F]`, not falling.
        growth: how many pages each query adds.
        at_once: whether a kernel for a GPU searches for all sections; else one section is searched after another.

    Returns:
        The pages of each block, `[N, F, Z, n]`, n = `growth.number` if there are more pages, and the first row that
        sees each, R for none.
    """
    heads, sections, blocks, rows, _ = query.shape
    until = until.expand(heads, sections)
    if pages.mean.shape[1] <= growth.number:
        return _all(pages, until, blocks, rows)
    if at_once:
        found = _candidates_at_once(pages, query, until, growth)
    else:
        memory = Buffer(pages.mean)
        # The last section first: it needs most memory.
        looks = [_candidates(pages, query[:, f], until[:, f], growth, memory) for f in reversed(range(sections))]
        found = [torch.stack(part[::-1], 1) for part in zip(*looks, strict=True)]
    # Blocks last and numbers short, which makes the loop below several times as fast.
    is_there, first, is_fresh, best = (part.flatten(0, 2) for part in found)
    # The first query of a block; where few pages are there it takes them all.
    all_fit = (until <= growth.number).repeat_interleave(blocks, 1).flatten()
    slot = torch.arange(growth.number, device=query.device).unsqueeze(-1)
    since = torch.where((all_fit | (slot < growth.first)) & is_there.t(), 0, rows)
    chosen = first.t().to(torch.int32).masked_fill(since == rows, -1)
    if rows > 1 and not read(all_fit.all(), otherwise=False):
        best = best.permute(1, 2, 0).to(torch.int32, memory_format=torch.contiguous_format)
        is_fresh = is_fresh.permute(1, 2, 0).contiguous() & ~all_fit
        for row in range(1, rows):
            slots = slice(*growth.slots(row))
            own = _added(chosen[: slots.start], best[row - 1], is_fresh[row - 1], growth.later)
            chosen[slots] = torch.where(all_fit, chosen[slots], own)
            since[slots] = torch.where(all_fit, since[slots], torch.where(own >= 0, row, rows))
    shape = (heads, sections, blocks, growth.number)
    return chosen.clamp_(min=0).t().long().reshape(shape), since.t().reshape(shape)


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
        held: what the rows before it chose, pages and first rows `[N, Z, n]`; n as in the result of `choose_growing`.
        rows: R.

    Returns:
        Pages and first rows with those that this query adds.
    """
    until = torch.full_like(row[:, 0], pages.mean.shape[1])
    if pages.mean.shape[1] <= growth.number:
        found = _all(pages, until.unsqueeze(1), row.shape[1], rows)
        return found[0].squeeze(1), found[1].squeeze(1)
    chosen, since = held
    # A block begins with a row of 0 and forgets what the last one chose.
    is_first = (row == 0).unsqueeze(-1)
    is_there, first, is_fresh, best = _candidates(pages, query.unsqueeze(2), until, growth, Buffer(pages.mean))
    all_fit = pages.there.sum(1).view(-1, 1, 1) <= growth.number
    slot = torch.arange(growth.number, device=query.device)
    begun = torch.where(is_there & (all_fit | (slot < growth.first)), 0, rows)
    if rows == 1:
        return first, begun
    seen = chosen.masked_fill(since == rows, -1)
    seen, best, is_fresh = (tensor.movedim(-1, 0) for tensor in (seen, best.squeeze(2), is_fresh.squeeze(2)))
    own = _added(seen, best, is_fresh, growth.later).movedim(0, -1)
    place = slot - (growth.first + (row.unsqueeze(-1) - 1) * growth.later)
    is_own = (place >= 0) & (place < growth.later) & ~all_fit
    place = place.clamp(min=0, max=growth.later - 1)
    own = own.gather(-1, place)
    added = is_own & (own >= 0)
    since = torch.where(added, row.unsqueeze(-1), torch.where(is_own, rows, since))
    chosen = torch.where(added, own, chosen)
    return torch.where(is_first, first, chosen), torch.where(is_first, begun, since)


def _all(pages: Pages, until: Tensor, blocks: int, rows: int) -> tuple[Tensor, Tensor]:
    """Gives each block all pages before `until` `[N, F]`, `[N, F, Z, n]`, n >= 1, and the first rows that see them."""
    (heads, every), sections = pages.there.shape, until.shape[1]
    there = pad(pages.there, (0, max(1 - every, 0)))  # one that is not there, if there is none
    place = torch.arange(there.shape[1], device=until.device)
    is_seen = (there.unsqueeze(1) & (place < until.unsqueeze(-1))).unsqueeze(2)
    since = torch.where(is_seen, 0, rows).expand(-1, -1, blocks, -1)
    return place.expand(heads, sections, blocks, -1), since


def _candidates(
    pages: Pages, query: Tensor, until: Tensor, growth: Growth, memory: Buffer
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the best pages of queries `[N, Z, R, d]`, best first, among the first `until` `[N]`.

    Returns:
        For the first query of each block, which pages there are and the pages, `[N, Z, n]`; for the later ones (if
        there is one query, for the same) the best of the best of each class, the same way, `[N, Z, R - 1, looks]`.
    """
    heads, _, rows, width = query.shape
    most = pages.mean.shape[1] if has_shape_only(until) else int(until.max())
    lowest = torch.finfo(pages.mean.dtype).min
    every = -(-max(most, 1) // max(growth.classes)) * max(growth.classes)
    mean, is_absent = pages.mean[:, :every], ~pages.there[:, :most]
    missing = every - mean.shape[1]
    if read((until < most).any(), otherwise=True):
        is_absent = is_absent | (torch.arange(most, device=query.device) >= until.unsqueeze(-1))
    lacks, found = read(is_absent.any(), otherwise=True), []
    for part in query.split(max(pages.scores_at_a_time // (heads * rows * every), 1), 1):
        scores = memory.product(part.reshape(heads, -1, width).to(mean.dtype), mean.transpose(1, 2))
        scores = pad(scores, (0, missing)) if missing else scores
        scores[:, :, most:] = lowest
        if lacks:
            scores[:, :, :most].masked_fill_(is_absent.unsqueeze(1), lowest)
        scores = scores.unflatten(1, (-1, rows))
        first = _best_of_classes(scores[:, :, 0].contiguous(), growth.classes[0], growth.number)
        later = _best_of_classes(scores, growth.classes[1], growth.looks)
        found.append((*first, *(tensor[:, :, min(1, rows - 1) :] for tensor in later)))
    is_there, chosen, is_fresh, best = (torch.cat(own, 1) for own in zip(*found, strict=True))
    return is_there, chosen, is_fresh, best


def _candidates_at_once(pages: Pages, query: Tensor, until: Tensor, growth: Growth) -> list[Tensor]:
    """Finds the same for queries `[N, F, Z, R, d]` of all sections, by a kernel for a GPU; `until` is `[N, F]`."""
    found, blocks = [], query.shape[2]
    later = query[:, :, :, min(1, query.shape[3] - 1) :].flatten(2, 3)
    choices = ((query[:, :, :, 0], growth.classes[0], growth.number), (later, growth.classes[1], growth.looks))
    for rows, classes, number in choices:
        given = (pages.mean, pages.there, until, classes, max(growth.classes), _PLACE_BITS)
        values, places = triton_module("search").best_of_classes(rows, *given)
        values, own = values.topk(number, -1)
        is_there = values > torch.finfo(values.dtype).min / 2
        found += [is_there, places.gather(-1, own).long().masked_fill_(~is_there, 0)]
    return [*found[:2], *(own.unflatten(2, (blocks, -1)) for own in found[2:])]


def _best_of_classes(scores: Tensor, classes: int, number: int) -> tuple[Tensor, Tensor]:
    """Finds the `number` largest of the largest scores of each class, `[..., number]`: which exist, and their places.

    The maximum of a class finds its place too, in one pass over all scores: the place is written into the last bits
    of each score, in place.
    """
    members = scores.shape[-1] // classes
    low = (1 << max(_PLACE_BITS, (members - 1).bit_length())) - 1
    bits = scores.view(torch.int64 if scores.dtype == torch.float64 else torch.int32)
    place = torch.arange(members, dtype=bits.dtype, device=bits.device).repeat_interleave(classes)
    bits.bitwise_and_(~low).bitwise_or_(place)
    values, own = scores.unflatten(-1, (members, classes)).amax(-2).topk(number, -1)
    is_there = values > torch.finfo(values.dtype).min / 2  # its last bits have changed
    places = (values.view(bits.dtype) & low).long() * classes + own
    return is_there, places.masked_fill_(~is_there, 0)


def _added(seen: Tensor, best: Tensor, is_fresh: Tensor, number: int) -> Tensor:
    """Gives the first `number` best pages `[looks, ...]` that are not among those seen `[slots, ...]`; -1 for none."""
    is_fresh = is_fresh & ~(best == seen.unsqueeze(1)).any(0)
    place = torch.where(is_fresh, is_fresh.cumsum(0) - 1, number).clamp(max=number)
    return best.new_full((number + 1, *best.shape[1:]), -1).scatter(0, place, best)[:number]
