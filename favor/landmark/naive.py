"""Attention by landmarks from its definition, over all pairs of tokens: the truth for tests and benchmarks.

A landmark is a group of n keys with the mean c. Every key of the group has the weight of the mean:

    w_ij = exp(scale q_i.k_j)     for keys j in the block of query i, if there are blocks
    w_ij = exp(scale q_i.c_ij)    for other keys, c_ij the mean of the keys in the group of j outside the block of i

    out_i = sum_j w_ij v_j / sum_j w_ij,    0 if the query sees no key,

so a group counts n times. Causal attention always has blocks; a group then holds keys of earlier blocks. At first each
of these is a group of its own. At the end of a block its keys join them, and where there are then more groups than
landmarks, groups are joined to larger ones. A key that is selected for query i has the weight exp(scale q_i.k_j), too;
see `chosen_keys` and `growing_keys`. Memory and time are quadratic in the length.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

from favor.landmark.causal import BLOCK
from favor.landmark.grouping import Landmarks
from favor.landmark.growth import Growth
from favor.landmark.selected import PAGE_SIZE, QUERY_BLOCK

# From positions of queries, means of groups `[n, d]` and their counts `[n]` to the new group of each, `[n]`.
Regroup = Callable[[Tensor, Tensor, Tensor], Tensor]


def naive_landmark_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int,
    *,
    is_causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    selected_keys: int = 0,
    page_size: int = 0,
    query_block: int = 0,
) -> Tensor:
    """Computes `favor.favor_attention` with `features="landmark"` from its definition, for tokens without padding.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of one type; float64 gives the truth.
        num_landmarks: M.
        is_causal: query i sees keys 0 ... S - L + i.
        window: length of the blocks; 0 for none, or if causal for those of `favor.landmark.causal.BLOCK` tokens.
        scale: of the logits, 1/sqrt(d) by default.
        selected_keys, page_size, query_block: as in `favor.favor_attention`.

    Returns:
        `[B, H, L, dv]`.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    groups, past = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    size, together = page_size or PAGE_SIZE[is_causal], query_block or QUERY_BLOCK[is_causal]
    for place in torch.cartesian_prod(torch.arange(key.shape[0]), torch.arange(key.shape[1])).tolist():
        heads = (place[0], slice(place[1] * groups, (place[1] + 1) * groups))
        x, y = query[heads], key[tuple(place)]

        def regroup(rows: Tensor, means: Tensor, counts: Tensor, x: Tensor = x) -> Tensor:
            own = x[:, rows].flatten(0, 1)
            return Landmarks().cells(own, means, num_landmarks, scale=scale, counts=counts.to(means.dtype))

        if is_causal:
            rows, block = torch.arange(past, key.shape[2]).repeat(groups), window or BLOCK
            logits = causal_logits(scale * x.flatten(0, 1), y, rows, num_landmarks, block, regroup, first=past)
            logits = logits.masked_fill(torch.arange(key.shape[2]) > rows[:, None], -torch.inf)
        else:
            cells = Landmarks().cells(x.flatten(0, 1), y, num_landmarks, scale=scale)
            block_of = torch.arange(key.shape[2]) // window if window else None
            of_rows = None if block_of is None else block_of.repeat(groups)
            logits = bidirectional_logits(scale * x.flatten(0, 1), y, cells, of_rows, block_of)
        if selected_keys:
            section = (window or BLOCK) if is_causal else window
            size = gcd(size, section) if is_causal else size
            number = -(-selected_keys // size)
            if is_causal and not query_block:
                together = min(together, number)
            choose, options = growing_keys if is_causal else chosen_keys, (number, size, together)
            chosen = torch.cat([choose(own, y, *options, section) for own in x])
            logits = torch.where(chosen & (logits > -torch.inf), scale * x.flatten(0, 1) @ y.T, logits)
        out[heads] = (logits.softmax(-1) @ value[tuple(place)]).unflatten(0, (groups, -1))
    return out


def bidirectional_logits(
    query: Tensor, key: Tensor, cells: Tensor, of_rows: Tensor | None = None, of_keys: Tensor | None = None
) -> Tensor:
    """Computes logits `[R, S]`, in which a key outside of the block of the query counts as the mean of its group.

    Args:
        query, key: `[R, d]` and `[S, d]`, of one head; queries times the scale.
        cells: the group of each key, `[S]`.
        of_rows, of_keys: the block of each query and key, `[R]` and `[S]`; None if there are none.
    """
    if of_rows is None or of_keys is None:
        return (query @ _means(key, cells).T)[:, cells]
    exact = query @ key.T
    logits = torch.empty_like(exact)
    for block in of_rows.unique():
        here, near = of_rows == block, of_keys == block
        logits[here] = torch.where(near, exact[here], (query[here] @ _means(key, cells, ~near).T)[:, cells])
    return logits


def causal_logits(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    number: int,
    block: int,
    regroup: Regroup,
    *,
    first: int = 0,
    real: Tensor | None = None,
) -> Tensor:
    """Gives logits `[R, S]`, in which keys of earlier blocks count as the mean of their group; hides no later keys.

    Args:
        query, key: `[R, d]` and `[S, d]`, of one head; queries times the scale.
        rows: the places of the queries among the keys, `[R]`.
        number: of landmarks.
        block: length of the blocks, which begin at key `first`.
        regroup: joins groups, for queries given by their place after `first`.
        first: keys before it are groups of their own from the start.
        real: False for padding, `[S]`, whose keys are in no group. If `first` is 0, blocks are counted without it.
    """
    real = torch.ones(len(key), dtype=torch.bool, device=key.device) if real is None else real
    tokens = real.nonzero().flatten()
    cells = torch.full((len(key),), -1, device=key.device)  # of keys in groups

    def join(fresh: Tensor) -> None:
        cells[fresh] = cells.max() + 1 + torch.arange(len(fresh), device=key.device)

    if first:
        join(tokens[tokens < first])
        tokens = torch.arange(first, len(key), device=key.device)
    logits = query @ key.T
    for own in tokens.split(block):
        here = torch.isin(rows, own).nonzero().flatten()
        earlier = (cells >= 0).nonzero().flatten()
        means = _means(key[earlier], cells[earlier])
        if len(here) and len(earlier):
            far = (query[here] @ means.T)[:, cells[earlier]]
            logits = logits.index_put((here[:, None], earlier), far)
        fresh = own[real[own]]
        join(fresh)
        if len(means) + len(fresh) > number and len(fresh):
            means, grouped = torch.cat([means, key[fresh]]), cells >= 0
            cells[grouped] = regroup(fresh - first, means.detach(), torch.bincount(cells[grouped]))[cells[grouped]]
    return logits


def chosen_keys(
    query: Tensor,
    key: Tensor,
    number: int,
    size: int,
    together: int,
    window: int = 0,
    real: Tensor | None = None,
) -> Tensor:
    """Gives the keys that each query of bidirectional attention selects, boolean `[L, S]`.

    Every `together` queries (of the same window, if there are windows) choose the pages with the largest sum of logits.

    Args:
        query, key: `[L, d]` and `[S, d]`, of one query head.
        number: of pages.
        size: keys of a page.
        together: queries that choose together.
        window: pages that lie inside the window of the queries are not chosen; 0 for none.
        real: False for padding, `[S]`.
    """
    chosen, pages = torch.zeros(len(query), len(key), dtype=torch.bool), _pages(len(key), size, real)
    logits = {page: (query @ key[keys].mean(0)).tolist() for page, keys in pages.items() if keys}
    for begin in range(0, len(query), window or len(query)):
        end = min(begin + (window or len(query)), len(query))
        for first in range(begin, end, together):
            block = range(first, min(first + together, end))
            inside = {page for page in pages if window and begin <= page * size and (page + 1) * size <= begin + window}
            scores = {page: sum(own[i] for i in block) for page, own in logits.items() if page not in inside}
            for page in sorted(scores, key=lambda page: -scores[page])[:number]:
                chosen[first : block.stop, pages[page]] = True
    return chosen


def growing_keys(
    query: Tensor, key: Tensor, number: int, size: int, together: int, section: int, real: Tensor | None = None
) -> Tensor:
    """Gives the keys that each query of causal attention selects, boolean `[L, S]`, among the pages before its section.

    Pages end where the first section begins. In each block of `together` queries of a section, the first one chooses
    the best pages, and each later one adds the best that are not chosen yet. It looks at some pages, see
    `favor.landmark.growth.Growth`: the best of those that are best in their class.

    Args:
        query, key: `[L, d]` and `[S, d]`, of one query head; the queries are those of the last keys.
        number, size, together, real: as in `chosen_keys`.
        section: its length; the first one begins with the first query.
    """
    growth, past = Growth.of(number, together), len(key) - len(query)
    chosen, pages = torch.zeros(len(query), len(key), dtype=torch.bool), _pages(len(key), size, real, past % size)
    logits = {page: (query @ key[keys].mean(0)).tolist() for page, keys in pages.items() if keys}
    held: list[int] = []
    for i in range(len(query)):
        begin = i // section * section
        row = (i - begin) % together
        before = [page for page in pages if page * size + (past % size or size) <= past + begin]
        best = sorted((page for page in before if page in logits), key=lambda page: -logits[page][i])
        if len(before) <= number:
            held = best if row == 0 else held
        else:
            classes = [page % growth.classes[row > 0] for page in best]
            best = [page for n, page in enumerate(best) if classes[n] not in classes[:n]]
            own = best[: growth.first] if row == 0 else [page for page in best[: growth.looks] if page not in held]
            held = own if row == 0 else held + own[: growth.later]
        chosen[i, [key for page in held for key in pages[page]]] = True
    return chosen


def _pages(length: int, size: int, real: Tensor | None, shorter: int = 0) -> dict[int, list[int]]:
    """Gives the keys of each page that count; the first page may have fewer keys than the others."""
    pages: dict[int, list[int]] = {}
    for j in range(length):
        own = pages.setdefault((j + -shorter % size) // size, [])
        if real is None or real[j]:
            own.append(j)
    return pages


def _means(rows: Tensor, cells: Tensor, keep: Tensor | None = None) -> Tensor:
    """Gives the mean of the rows of each cell, `[n, d]`; only of those to keep."""
    keep = torch.ones_like(cells, dtype=torch.bool) if keep is None else keep
    number = int(cells.max()) + 1 if len(cells) else 0
    counts = torch.bincount(cells[keep], minlength=number).clamp(min=1).to(rows.dtype)
    return rows.new_zeros(number, rows.shape[1]).index_add(0, cells[keep], rows[keep]) / counts[:, None]
