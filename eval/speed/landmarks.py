"""The right output of attention through landmarks, for some query rows: groups of keys, then float64 formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.eval.speed.reference import Rows, Sample, softmax_of
from favor.features import Landmarks
from favor.landmark.causal import BLOCK
from favor.landmark.growth import Growth, choose_growing
from favor.landmark.naive import Regroup, bidirectional_logits, causal_logits
from favor.landmark.pages import Pages, choose, filled
from favor.landmark.selected import PAGE_SIZE, QUERY_BLOCK


def landmark_rows(sample: Sample, num_landmarks: int, window: int) -> Rows:
    """Computes the output of some rows, `[R, dv]`, if keys outside a row's block count as the mean of their group.

    Groups are chosen in float32, as in the code that is timed. They depend on the precision only if two landmarks are
    equally far.

    Args:
        sample: the rows.
        num_landmarks: number of groups.
        window: tokens of exact blocks, 0 for no blocks.
    """
    scale = sample.query.shape[-1] ** -0.5
    queries = sample.all_queries.view(-1, len(sample.key), sample.key.shape[1]).float()
    query = scale * sample.query

    if sample.causal:
        regroup = _regroup(queries, num_landmarks, scale)
        logits = causal_logits(query, sample.key, sample.rows, num_landmarks, window or BLOCK, regroup)
        return softmax_of(logits, sample), 1.0
    cells = Landmarks().cells(queries.flatten(0, 1), sample.key.detach().float(), num_landmarks, scale=scale)
    blocks = (sample.rows // window, torch.arange(len(cells), device=cells.device) // window) if window else ()
    return softmax_of(bidirectional_logits(query, sample.key, cells, *blocks), sample), 1.0


def selected_rows(sample: Sample, num_landmarks: int, keys: int, page_size: int) -> Rows:
    """Computes the output of some rows, `[R, dv]`, if keys outside the chosen pages of a row count as means.

    Pages are chosen in float32, as in the code that is timed.

    Args:
        sample: the rows.
        num_landmarks: number of groups.
        keys: number of selected keys.
        page_size: keys of a page; 0 is the default of the method.
    """
    scale, length = sample.query.shape[-1] ** -0.5, len(sample.key)
    size, together = page_size or PAGE_SIZE[sample.causal], QUERY_BLOCK[sample.causal]
    key, queries = sample.key.detach().float(), sample.all_queries.view(-1, length, sample.key.shape[1]).float()
    own = queries[sample.head % len(queries)]
    pages = Pages.of(key.unsqueeze(0), key.new_ones(1, length, dtype=torch.bool), size)
    block, number, query = sample.rows // together, -(-keys // size), scale * sample.query
    if sample.causal:
        sections = filled(own, BLOCK).unflatten(0, (-1, BLOCK // together, together))
        before = BLOCK * torch.arange(len(sections), device=key.device) // size
        chosen, since = choose_growing(pages, sections.unsqueeze(0), before, Growth.of(number, together))
        chosen, since = chosen.flatten(1, 2)[0, block], since.flatten(1, 2)[0, block]
        chosen = chosen.masked_fill(since > (sample.rows % together).unsqueeze(-1), pages.mean.shape[1])
        regroup = _regroup(queries, num_landmarks, scale)
        logits = causal_logits(query, sample.key, sample.rows, num_landmarks, BLOCK, regroup)
    else:
        blocks = filled(own, together).unflatten(0, (-1, together))
        chosen = choose(pages, blocks.unsqueeze(0), number)[0][0, block]
        cells = Landmarks().cells(queries.flatten(0, 1), key, num_landmarks, scale=scale)
        logits = bidirectional_logits(query, sample.key, cells)
    is_chosen = torch.zeros(len(chosen), pages.mean.shape[1] + 1, dtype=torch.bool, device=key.device)
    is_chosen = is_chosen.scatter(1, chosen, True)[:, torch.arange(length, device=key.device) // size]
    return softmax_of(torch.where(is_chosen, query @ sample.key.T, logits), sample), 1.0


def _regroup(queries: Tensor, num_landmarks: int, scale: float) -> Regroup:
    """Gives the function by which a causal layer joins groups, in float32.

    Args:
        queries: those of the heads that share keys, `[G, L, d]`.
        num_landmarks: number of groups.
        scale: of the logits.
    """

    def regroup(rows: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        own = queries[:, rows].flatten(0, 1)
        return Landmarks().cells(own, means.float(), num_landmarks, scale=scale, counts=counts.float())

    return regroup
