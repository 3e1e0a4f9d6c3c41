"""Forms of landmark attention: which keys a query reads exactly. Dense sketches, to compare before one is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

SECTION = 256  # queries of a causal layer that see the same closed keys; keys of the own section are exact
SINK = 4  # first keys, exact for all queries of a causal layer
BASIS = 2048  # first tokens that give the directions of a search
SAMPLED = 64  # queries whose logits are the coordinates of keys to sort, and keys for those of queries


@dataclass(frozen=True)
class Form:
    """One way to choose the keys that a query reads exactly; all others stand in means.

    Pages are scored for a query by the logit of their mean key, and twice its standard deviation (a diagonal one).

    Attributes:
        page: neighbouring keys that are chosen together.
        block: queries that share a choice.
        shared: keys that a block reads: its pages with the largest weight, summed over the voters. Voters are the
            queries of the block, and in a causal layer those of the block before, which no query of the block precedes.
        step: neighbouring voters that have one voice: their mean, and the mean of their squares.
        own: further keys that each query chooses for itself.
        own_page: keys of a page of these, a multiple of `page`.
        rank: each query searches head_dim / rank directions of the keys alone, see `directions`.
        bins: a query takes the best page in each of as many bins as it takes pages, in place of the best of all.
        union: queries of a block also read what the earlier ones of it (an encoder: all of it) chose for themselves.
        node: keys of a mean of the far field.
        order: "position", "split" (at medians of the sampled logit of the largest variance, again and again) or
            "centres" (by the nearest of 256 keys, these in the order of "split"). Causal layers sort in sections.
        heads: query heads of one key head share the choice of their block.
    """

    page: int = 4
    block: int = 16
    shared: int = 384
    step: int = 1
    own: int = 0
    own_page: int = 4
    rank: int = 1
    bins: bool = False
    union: bool = False
    node: int = 16
    order: str = "split"
    heads: bool = False


ENCODER = Form(step=16)
CAUSAL = Form(page=1, block=64, shared=512, step=16, own=32, own_page=1, rank=4, node=64, order="position")
PAGES = replace(CAUSAL, page=4, own_page=4, shared=1024, rank=1)
UNION = replace(PAGES, shared=0, own=64, union=True)
ENCODER_FORMS = {
    "pages of 4, by the mean of a block of 16": ENCODER,
    "by each query of the block": replace(ENCODER, step=1),
    "by means of 4 queries": replace(ENCODER, step=4),
    "256 keys": replace(ENCODER, shared=256),
    "512 keys": replace(ENCODER, shared=512),
    "pages of 1": replace(ENCODER, page=1),
    "pages of 1, 256 keys": replace(ENCODER, page=1, shared=256),
    "pages of 1, 256 keys, and 32 of each query, rank 1/4": replace(
        ENCODER, page=1, shared=256, own=32, own_page=1, rank=4
    ),
    "pages of 16": replace(ENCODER, page=16),
    "pages of 16, 512 keys": replace(ENCODER, page=16, shared=512),
    "blocks of 64, 512 keys": replace(ENCODER, block=64, shared=512),
    "nodes of 64": replace(ENCODER, node=64),
    "sorted by centres": replace(ENCODER, order="centres"),
    "by position": replace(ENCODER, order="position"),
    "by position, pages of 1, 64 of each query, rank 1/4": replace(CAUSAL, block=16, own=64, node=16),
    "union of 64 keys of each query": replace(ENCODER, shared=0, own=64, union=True),
    "64 keys of each query, no union": replace(ENCODER, shared=0, own=64),
}
CAUSAL_FORMS = {
    "512 keys of the block, 32 of each query, rank 1/4": CAUSAL,
    "rank 1": replace(CAUSAL, rank=1),
    "rank 1/8": replace(CAUSAL, rank=8),
    "one choice for the heads of a key head": replace(CAUSAL, heads=True),
    "best of bins": replace(CAUSAL, bins=True),
    "256 keys of the block": replace(CAUSAL, shared=256),
    "1,024 keys of the block": replace(CAUSAL, shared=1024),
    "none of the block": replace(CAUSAL, shared=0),
    "16 of each query": replace(CAUSAL, own=16),
    "64 of each query": replace(CAUSAL, own=64),
    "none of each query": replace(CAUSAL, own=0),
    "blocks of 16": replace(CAUSAL, block=16),
    "nodes of 256": replace(CAUSAL, node=256),
    "768 keys of the block, pages of 8 of each query, rank 1": replace(CAUSAL, shared=768, own_page=8, rank=1),
    "768 keys of the block, pages of 8, 64 of each query": replace(CAUSAL, shared=768, own=64, own_page=8, rank=1),
    "768 keys of the block, pages of 16, 64 of each query": replace(CAUSAL, shared=768, own=64, own_page=16, rank=1),
    "pages of 4, rank 1, 1,024 keys of the block": PAGES,
    "pages of 4, 64 of each query": replace(PAGES, own=64),
    "pages of 4, by 64 voters": replace(PAGES, step=1),
    "pages of 4, sorted in sections of 256": replace(PAGES, order="split"),
    "pages of 16": replace(PAGES, page=16, own_page=16),
    "union of 64 keys of each query": UNION,
    "union, and 512 keys of the block": replace(UNION, shared=512),
}


class Part(NamedTuple):
    """What the queries of one block meet: `[H, B, d]` queries and voters, keys that stand in pages, and exact keys.

    `searched` and `found` are the queries and the keys of the pages in the directions of `directions`.
    """

    query: Tensor
    searched: Tensor
    voters: Tensor
    key: Tensor
    found: Tensor
    value: Tensor
    sink: Tensor
    near_key: Tensor
    near_value: Tensor
    hidden: Tensor
    places: Tensor


def directions(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Finds the directions of queries and keys that make up most of their products.

    Those are the first singular vectors of Cq^(1/2) Ck^(1/2), where Cq and Ck are the second moments of the queries and
    of the keys less their mean, of the first 2,048 tokens: products of the projections are closest to q'k then.

    Args:
        query: `[h, L, d]`; key: the same of the keys.
        rank: d / rank directions are kept.

    Returns:
        projections of queries and of keys, `[h, d, d / rank]`.
    """
    roots = []
    for x in (query[:, :BASIS], key[:, :BASIS] - key[:, :BASIS].mean(1, keepdim=True)):
        values, vectors = torch.linalg.eigh((x.mT @ x / x.shape[1]).double())
        values = values.clamp(min=values.amax(-1, keepdim=True) * 1e-6).sqrt()[:, None]
        roots.append(((vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT))
    left, sizes, right = torch.linalg.svd(roots[0][0] @ roots[1][0])
    kept = max(1, query.shape[-1] // rank)
    scales = sizes[:, None, :kept].sqrt()
    of_queries, of_keys = roots[0][1] @ left[..., :kept] * scales, roots[1][1] @ right.mT[..., :kept] * scales
    return of_queries.float(), of_keys.float()


def split(points: Tensor, leaf: int) -> Tensor:
    """Orders points `[h, n, r]` so that neighbours are alike; n must be leaf times a power of two.

    Args:
        points: coordinates.
        leaf: points that are not split further.

    Returns:
        Their indices, `[h, n]`.
    """
    order = torch.arange(points.shape[1]).expand(points.shape[:2])
    size = points.shape[1]
    while size > leaf:
        cells = points.unflatten(1, (-1, size))
        axis = cells.var(2).argmax(-1)[:, :, None, None].expand(-1, -1, size, 1)
        inner = cells.gather(3, axis).squeeze(3).argsort(-1)
        order = order.unflatten(1, (-1, size)).gather(2, inner).flatten(1)
        points = cells.gather(2, inner[..., None].expand_as(cells)).flatten(1, 2)
        size //= 2
    return order


def by_centres(points: Tensor, number: int = 256) -> Tensor:
    """Orders points `[h, n, r]` by the nearest of some of them, and these by `split`; returns indices `[h, n]`."""
    centres = points[:, torch.linspace(0, points.shape[1] - 1, number).long()]
    nearness = points @ centres.mT - centres.square().sum(-1)[:, None] / 2
    first, second = nearness.topk(2, -1).indices.unbind(-1)
    rank = split(centres, 1).argsort(-1)
    return (rank.gather(1, first) * number + rank.gather(1, second)).argsort(-1)


def order_of(form: Form, x: Tensor, others: Tensor, scale: float, leaf: int) -> Tensor:
    """Orders queries or keys `[h, n, d]` by logits with evenly spaced ones of the other side; returns `[h, n]`."""
    if form.order == "position":
        return torch.arange(x.shape[1]).expand(x.shape[:2])
    logits = (x @ others[:, torch.linspace(0, others.shape[1] - 1, SAMPLED).long()].mT) * scale
    return split(logits, leaf) if form.order == "split" else by_centres(logits)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Takes rows of `[h, n, d]` in an order `[h, n]`."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


def encoder_parts(
    form: Form, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Iterable[int]
) -> Iterator[Part]:
    """Yields the blocks of alike queries of an encoder, `[h, L, d]`, that start at some places of their order."""
    of_queries, of_keys = directions(query, key, form.rank)
    order = order_of(form, key, query, scale, min(form.page, form.node))
    key, value, places = take(key, order), take(value, order), order_of(form, query, key, scale, form.block)
    query = take(query, places)
    searched, found, sink = query @ of_queries, key @ of_keys, torch.zeros(key.shape[:2], dtype=torch.bool)
    nothing = (key[:, :0], value[:, :0], sink[:, None, :0])
    for start in starts:
        rows = slice(start, start + form.block)
        own = query[:, rows]
        yield Part(own, searched[:, rows], own, key, found, value, sink, *nothing, places[:, rows])


def causal_parts(
    form: Form, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Iterable[int]
) -> Iterator[Part]:
    """Yields the blocks of a causal layer, `[h, L, d]`, that start at some places, at least `SECTION`."""
    (heads, length), (of_queries, of_keys) = query.shape[:2], directions(query, key, form.rank)
    if form.order != "position":
        cut = lambda x: x.unflatten(1, (-1, SECTION)).flatten(0, 1)  # noqa: E731
        inner = order_of(form, cut(key), cut(query), scale, min(form.page, form.node)).unflatten(0, (heads, -1))
        order = (inner + torch.arange(0, length, SECTION)[:, None]).flatten(1)
    else:
        order = torch.arange(length).expand(heads, length)
    sorted_key, sorted_value = take(key, order), take(value, order)
    searched, found = query @ of_queries, sorted_key @ of_keys
    for start in starts:
        closed, end = start // SECTION * SECTION, start + form.block
        rows = torch.arange(start, end)
        hidden = torch.arange(closed, end)[None] > rows[:, None]
        yield Part(
            query[:, start:end],
            searched[:, start:end],
            query[:, start - form.block : start],
            sorted_key[:, :closed],
            found[:, :closed],
            sorted_value[:, :closed],
            order[:, :closed] < SINK,
            key[:, closed:end],
            value[:, closed:end],
            hidden,
            rows.expand(heads, -1),
        )


def attend(form: Form, part: Part, scale: float, groups: int) -> tuple[Tensor, float]:
    """Computes the output of a block `[H, B, dv]`: exact for chosen keys, by means of nodes for all others.

    Returns it with the number of chosen keys that the last query of the block reads, mean over heads.

    Args:
        form: how keys are chosen.
        part: the block.
        scale: of the logits.
        groups: query heads of one key head.
    """
    read = part.sink.unflatten(1, (-1, form.page)).any(-1)[:, None]
    if form.shared:
        votes = (
            bounds(part.voters.unflatten(1, (-1, form.step)), part.key, form.page, scale).log_softmax(-1).logsumexp(1)
        )
        if form.heads:
            votes = votes.unflatten(0, (-1, groups)).logsumexp(1).repeat_interleave(groups, 0)
        read = read | best(votes, form.shared // form.page)[:, None]
    if form.own:
        within = form.own_page // form.page
        known = read.unflatten(-1, (-1, within)).all(-1)
        score = bounds(part.searched[:, :, None], part.found, form.own_page, scale).masked_fill(known, -torch.inf)
        number = form.own // form.own_page
        own = best_of_bins(score, number) if form.bins else best(score, number)
        if form.union:
            shows = torch.ones(own.shape[1], own.shape[1])  # which query reads what which other chose
            own = (shows.tril() if part.near_key.shape[1] else shows) @ own.float() > 0
        read = read | own.repeat_interleave(within, -1)
    exact = part.query @ part.key.mT
    far = part.query @ part.key.unflatten(1, (-1, form.node)).mean(2).mT
    logits = torch.where(read.repeat_interleave(form.page, -1), exact, far.repeat_interleave(form.node, -1))
    near = (part.query @ part.near_key.mT).masked_fill(part.hidden, -torch.inf)
    output = (torch.cat([logits, near], -1) * scale).softmax(-1) @ torch.cat([part.value, part.near_value], 1)
    return output, float(read[:, -1].sum(-1).float().mean()) * form.page


def bounds(runs: Tensor, key: Tensor, page: int, scale: float) -> Tensor:
    """Computes mean plus twice the standard deviation of the logits in each page, `[h, n, pages]`.

    Args:
        runs: queries that are scored together, `[h, n, step, d]`: their mean, and the mean of their squares.
        key: `[h, S, d]`.
        page: keys of a page.
        scale: of the logits.
    """
    pages = key.unflatten(1, (-1, page))
    deviation = (runs.square().mean(2) @ pages.var(2, correction=0).mT).sqrt()
    return scale * (runs.mean(2) @ pages.mean(2).mT + 2 * deviation)


def best(score: Tensor, number: int) -> Tensor:
    """Marks the greatest `number` along the last dimension."""
    found = score.topk(min(number, score.shape[-1]), -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, found, True)


def best_of_bins(score: Tensor, bins: int) -> Tensor:
    """Marks the greatest of every `bins`-th along the last dimension; neighbours stand in different bins."""
    padded = torch.nn.functional.pad(score, (0, -score.shape[-1] % bins), value=-torch.inf)
    marks = torch.zeros_like(padded, dtype=torch.bool).unflatten(-1, (-1, bins))
    found = padded.unflatten(-1, (-1, bins)).argmax(-2, keepdim=True)
    return marks.scatter(-2, found, True).flatten(-2)[..., : score.shape[-1]]


def counted(form: Form, length: int, is_causal: bool, read: float) -> tuple[float, float]:
    """Counts products of two vectors for each query: of the search (sorting too), and of attention (values too).

    Args:
        form: to count.
        length: number of keys; a causal query sees half of them.
        is_causal: whether it is.
        read: chosen keys, as `attend` gives them.
    """
    seen = length / 2 if is_causal else length
    products = {page: (1 if page == 1 else 2) * seen / page for page in (form.page, form.own_page)}  # a deviation too
    search = products[form.page] / form.step if form.shared else 0
    search += products[form.own_page] / form.rank if form.own else 0
    search += 0 if form.order == "position" else 2 * SAMPLED
    return search, 2 * (read + seen / form.node + (SECTION / 2 if is_causal else 0))
