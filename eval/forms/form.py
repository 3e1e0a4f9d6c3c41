"""Forms of landmark attention: which keys a query reads exactly. Dense sketches, to compare before one is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SECTION = 256  # queries of a causal layer that see the same closed keys, which have one mean; own ones are exact
SINK = 4  # first keys, exact for all queries of a causal layer
VOTERS = (-48, -32, -16, 0)  # queries that choose for a block of a causal layer, from its first one on
SEEN = 64  # first tokens that give the coordinates of a search
NODES = 256  # means of an encoder
CENTRES = 256  # rows that others are sorted by
SAMPLED = 64  # rows of the other side whose products say which rows are alike


@dataclass(frozen=True)
class Form:
    """One way to choose the keys that a query reads exactly; all others stand in means, counted as often as they are.

    Attributes:
        page: neighbouring keys that a block chooses together, by the logit of their mean with the mean of its voters,
            and twice its standard deviation (a diagonal one); 0: all keys of a mean.
        block: queries that share a choice.
        shared: keys that a block reads. Its voters are its queries, and in a causal layer `VOTERS`.
        own: further keys that each query chooses for itself.
        bins: takes the best in each of as many bins, in place of the best of all; neighbours are in different bins.
        rank: a query searches for its own keys in head_dim / rank coordinates, see `coordinates`.
        heads: query heads of one key head share these coordinates.
        is_sorted: alike keys and alike queries of an encoder are neighbours, see `alike`.
    """

    page: int = 0
    block: int = 16
    shared: int = 768
    own: int = 0
    bins: bool = False
    rank: int = 1
    heads: bool = False
    is_sorted: bool = True


ENCODER = Form()
CAUSAL = Form(page=1, block=64, shared=1024, own=64, bins=True, rank=4, is_sorted=False)
ENCODER_FORMS = {
    "768 keys in whole nodes, blocks of 16": ENCODER,
    "640 keys": replace(ENCODER, shared=640),
    "1,024 keys": replace(ENCODER, shared=1024),
    "512 keys in pages of 4": replace(ENCODER, page=4, shared=512),
    "640 single keys, best of bins": replace(ENCODER, page=1, shared=640, bins=True),
    "blocks of 32": replace(ENCODER, block=32),
    "not sorted": replace(ENCODER, is_sorted=False),
}
CAUSAL_FORMS = {
    "1,024 keys of the block, 64 of each query": CAUSAL,
    "512 keys of the block": replace(CAUSAL, shared=512),
    "none of the block": replace(CAUSAL, shared=0),
    "32 of each query": replace(CAUSAL, own=32),
    "none of each query": replace(CAUSAL, own=0),
    "coordinates of a key head": replace(CAUSAL, heads=True),
    "all coordinates": replace(CAUSAL, rank=1),
    "best of all, not of bins": replace(CAUSAL, bins=False),
}


class Part(NamedTuple):
    """What the queries of one block meet: `[H, B, d]` queries and voters, and keys.

    `searched` are the queries in the coordinates of their search. The first `closed` keys stand in nodes, whose means
    are `far_key` and `far_value`; of all keys, those that are `always` read are marked, `[1 or B, S]`.
    """

    query: Tensor
    searched: Tensor
    voters: Tensor
    key: Tensor
    value: Tensor
    far_key: Tensor
    far_value: Tensor
    closed: int
    always: Tensor
    places: Tensor


def coordinates(form: Form, query: Tensor, key: Tensor) -> Tensor:
    """Marks the coordinates of queries that make up most of their products with keys, in the first 64 tokens.

    Args:
        form: says how many, and whether heads share them.
        query: `[H, L, d]`.
        key: `[h, L, d]`.

    Returns:
        Those with the largest mean square of queries times the variance of keys, `[H, 1, d]`.
    """
    squares = query[:, :SEEN].square().mean(1).unflatten(0, (len(key), -1))
    if form.heads:
        squares = squares.mean(1, keepdim=True).expand_as(squares)
    weight = (squares * key[:, :SEEN].var(1)[:, None]).flatten(0, 1)
    return best(weight, max(1, query.shape[-1] // form.rank))[:, None]


def split(points: Tensor) -> Tensor:
    """Orders points `[h, n, r]`, n a power of two, by splits at medians; returns indices `[h, n]`.

    Each part is halved along its coordinate of the largest variance, again and again.
    """
    order = torch.arange(size := points.shape[1]).expand(points.shape[:2])
    while size > 1:
        cells = points.unflatten(1, (-1, size))
        axis = cells.var(2).argmax(-1)[:, :, None, None].expand(-1, -1, size, 1)
        inner = cells.gather(3, axis).squeeze(3).argsort(-1)
        order = order.unflatten(1, (-1, size)).gather(2, inner).flatten(1)
        points = cells.gather(2, inner[..., None].expand_as(cells)).flatten(1, 2)
        size //= 2
    return order


def alike(x: Tensor, others: Tensor) -> Tensor:
    """Orders queries or keys `[h, n, d]` so that neighbours are alike; returns indices `[h, n]`.

    Alike ones have alike products with sampled rows of the other side. They are sorted by the nearest of some sampled
    rows, then by the second nearest; these are in the order of `split`.
    """
    points = x @ sampled(others, SAMPLED).mT
    centres = sampled(points, CENTRES)
    nearness = points @ centres.mT - centres.square().sum(-1)[:, None] / 2
    first, second = nearness.topk(2, -1).indices.unbind(-1)
    rank = split(centres).argsort(-1)
    return (rank.gather(1, first) * CENTRES + rank.gather(1, second)).argsort(dim=-1, stable=True)


def sampled(x: Tensor, number: int) -> Tensor:
    """Takes evenly spaced rows of `[h, n, d]`, the first and the last among them."""
    return x[:, torch.linspace(0, x.shape[1] - 1, number).long()]


def take(x: Tensor, order: Tensor) -> Tensor:
    """Takes rows of `[h, n, d]` in an order `[h, n]`."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def means(x: Tensor, node: int) -> Tensor:
    """Computes the means of nodes, `[h, n / node, d]`, of rows `[h, n, d]`."""
    return x.unflatten(1, (-1, node)).mean(2)


def encoder_parts(form: Form, query: Tensor, key: Tensor, value: Tensor, starts: Iterable[int]) -> Iterator[Part]:
    """Yields the blocks of queries of an encoder, `[H, L, d]`, that start at some places of their order."""
    (heads, length), always = query.shape[:2], torch.zeros(1, key.shape[1], dtype=torch.bool)
    key, value = (x.repeat_interleave(heads // len(x), 0) for x in (key, value))
    places = torch.arange(length).expand(heads, -1)
    if form.is_sorted:
        order, places = alike(key, query), alike(query, key)
        key, value, query = take(key, order), take(value, order), take(query, places)
    node = length // NODES
    far_key, far_value = means(key, node), means(value, node)
    for start in starts:
        rows = slice(start, start + form.block)
        own = query[:, rows]
        yield Part(own, own, own, key, value, far_key, far_value, length, always, places[:, rows])


def causal_parts(form: Form, query: Tensor, key: Tensor, value: Tensor, starts: Iterable[int]) -> Iterator[Part]:
    """Yields the blocks of a causal layer, `[H, L, d]`, that start at some places, at least `SECTION`."""
    searched, heads = query * coordinates(form, query, key), len(query)
    key, value = (x.repeat_interleave(heads // len(x), 0) for x in (key, value))
    far_key, far_value = means(key, SECTION), means(value, SECTION)
    for start in starts:
        closed, end = start // SECTION * SECTION, start + form.block
        rows, keys = torch.arange(start, end), torch.arange(end)
        yield Part(
            query[:, start:end],
            searched[:, start:end],
            query[:, [start + place for place in VOTERS]],
            key[:, :end],
            value[:, :end],
            far_key[:, : closed // SECTION],
            far_value[:, : closed // SECTION],
            closed,
            (keys < SINK) | (keys >= closed) & (keys <= rows[:, None]),
            rows.expand(heads, -1),
        )


def attend(form: Form, part: Part, scale: float) -> tuple[Tensor, float]:
    """Computes the output of a block `[H, B, dv]`: exact for chosen keys, by means of nodes for all others.

    Returns it with the number of chosen keys that the last query of the block reads, mean over heads. Means count as
    often as they have keys that the block did not choose; what a query chooses for itself is not subtracted.
    """
    key, node = part.key[:, : part.closed], part.closed // part.far_key.shape[1]
    first = part.always[None, :1, : part.closed]
    shared = chosen(form, part.voters[:, None], key, form.page or node, form.shared, first)
    read = chosen(form, part.searched[:, :, None], key, 1, form.own, shared)
    left = node - shared.unflatten(-1, (-1, node)).sum(-1)
    exact = part.always | pad(read, (0, part.key.shape[1] - part.closed))
    logits = (scale * part.query @ part.key.mT).masked_fill(~exact, -torch.inf)
    far = scale * part.query @ part.far_key.mT + left.log()
    output = torch.cat([logits, far], -1).softmax(-1) @ torch.cat([part.value, part.far_value], 1)
    return output, float(read[:, -1].sum(-1).float().mean())


def chosen(form: Form, voters: Tensor, key: Tensor, page: int, number: int, known: Tensor) -> Tensor:
    """Marks keys of the best pages, beside known ones.

    Args:
        form: says whether bins are searched.
        voters: queries that choose together, `[h, n, voters, d]`.
        key: `[h, S, d]`.
        page: keys of a page.
        number: keys that are chosen.
        known: `[1 or h, 1, S]`.

    Returns:
        `[h, n, S]`, or the known ones if none is chosen.
    """
    if not number:
        return known
    score = voters.mean(2) @ (means(key, page) if page > 1 else key).mT
    if page > 1:
        variance = key.unflatten(1, (-1, page)).var(2, correction=0)
        score += 2 * (voters.square().mean(2) @ variance.mT).sqrt()
    score = score.masked_fill(known.unflatten(-1, (-1, page)).all(-1), -torch.inf)
    return known | best(score, number // page, form.bins).repeat_interleave(page, -1)


def best(score: Tensor, number: int, bins: bool = False) -> Tensor:
    """Marks the greatest `number` along the last dimension, or the greatest in each of as many bins."""
    size = score.shape[-1]
    if bins:
        cells = pad(score, (0, -size % number), value=-torch.inf).unflatten(-1, (-1, number))
        found = (cells.argmax(-2) * number + torch.arange(number)).clamp(max=size - 1)
    else:
        found = score.topk(min(number, size), -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, found, True)


def counted(form: Form, length: int, is_causal: bool, read: float) -> tuple[float, float]:
    """Counts products of two vectors for each query: of the search (sorting too), and of attention (values too).

    Args:
        form: to count.
        length: number of keys; a causal query sees half of them.
        is_causal: whether it is.
        read: chosen keys, as `attend` gives them.
    """
    seen, node = (length / 2, SECTION) if is_causal else (length, length // NODES)
    page = form.page or node
    search = (1 if page == 1 else 2) * seen / page / form.block if form.shared else 0  # a deviation too
    search += seen / form.rank if form.own else 0
    search += 2 * CENTRES if form.is_sorted else 0
    return search, 2 * (read + seen / node + (SECTION / 2 if is_causal else 0))
