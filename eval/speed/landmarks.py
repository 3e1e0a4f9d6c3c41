"""What attention through landmarks must equal, for some query rows: groups of keys first, then float64 formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.eval.speed.reference import Rows, Sample, softmax_of
from favor.features import Landmarks
from favor.landmark.causal import BLOCK
from favor.landmark.naive import bidirectional_logits, causal_logits
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

    def regroup(rows: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        own = queries[:, rows].flatten(0, 1)
        return Landmarks().cells(own, means.float(), num_landmarks, scale=scale, counts=counts.float())

    if sample.causal:
        logits = causal_logits(query, sample.key, sample.rows, num_landmarks, window or BLOCK, regroup)
        return softmax_of(logits, sample), 1.0
    cells = Landmarks().cells(queries.flatten(0, 1), sample.key.detach().float(), num_landmarks, scale=scale)
    blocks = (sample.rows // window, torch.arange(len(cells), device=cells.device) // window) if window else ()
    return softmax_of(bidirectional_logits(query, sample.key, cells, *blocks), sample), 1.0


def selected_rows(sample: Sample, num_landmarks: int, keys: int) -> Rows:
    """The output of some rows, `[R, dv]`, where keys outside the pages chosen for a row's block count as means.

    Which pages are chosen is computed in float32, as in the code that is timed. Bidirectional attention only.
    """
    scale, size, length = sample.query.shape[-1] ** -0.5, PAGE_SIZE[False], len(sample.key)
    key, queries = sample.key.detach().float(), sample.all_queries.view(-1, length, sample.key.shape[1]).float()
    cells = Landmarks().cells(queries.flatten(0, 1), key, num_landmarks, scale=scale)
    own = filled(queries[sample.head % len(queries)], QUERY_BLOCK[False]).unflatten(0, (-1, QUERY_BLOCK[False]))
    pages = Pages.of(key.unsqueeze(0), torch.ones_like(cells, dtype=torch.bool).unsqueeze(0), size)
    chosen = choose(pages, own.unsqueeze(0), -(-keys // size))[0][0, sample.rows // QUERY_BLOCK[False]]
    of_keys = torch.arange(length, device=key.device) // size
    is_chosen = torch.zeros(len(chosen), int(of_keys[-1]) + 1, dtype=torch.bool, device=key.device)
    is_chosen = is_chosen.scatter(1, chosen, True)[:, of_keys]
    query = scale * sample.query
    logits = torch.where(is_chosen, query @ sample.key.T, bidirectional_logits(query, sample.key, cells))
    return softmax_of(logits, sample), 1.0
