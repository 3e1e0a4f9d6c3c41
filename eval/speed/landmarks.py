"""What attention through landmarks must equal, for some query rows: groups of keys first, then float64 formulas."""

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
    """The output of some rows, `[R, dv]`, where keys outside a row's block count as the mean of their group.

    Which keys form a group is chosen in float32, as in the code that is timed: it does not change with the precision
    but where two landmarks are equally far.
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
    """The output of some rows, `[R, dv]`, where keys outside the pages chosen for a row count as means.

    Which pages are chosen is computed in float32, as in the code that is timed. A page size of 0 is the default.
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
    """How a causal layer joins groups, in float32; queries are those of the heads that share keys, `[G, L, d]`."""

    def regroup(rows: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        own = queries[:, rows].flatten(0, 1)
        return Landmarks().cells(own, means.float(), num_landmarks, scale=scale, counts=counts.float())

    return regroup
