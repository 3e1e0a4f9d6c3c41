"""What attention through landmarks must equal, for some query rows: groups of keys first, then float64 formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.eval.speed.reference import Rows, Sample, softmax_of
from favor.features import Landmarks
from favor.landmark.causal import BLOCK


def landmark_rows(sample: Sample, num_landmarks: int, window: int) -> Rows:
    """The output of some rows, `[R, dv]`, where keys outside a row's block count as the mean of their group.

    Which keys form a group is chosen in float32, as in the code that is timed: it does not change with the precision
    but where two landmarks are equally far.
    """
    scale = sample.query.shape[-1] ** -0.5
    queries = sample.all_queries.view(-1, len(sample.key), sample.key.shape[1]).float()
    rows = _causal if sample.causal else _bidirectional
    return softmax_of(rows(sample, queries, num_landmarks, window, scale), sample), 1.0


def _bidirectional(sample: Sample, queries: Tensor, number: int, window: int, scale: float) -> Tensor:
    cells = Landmarks().cells(queries.flatten(0, 1), sample.key.detach().float(), number, scale=scale)
    if not window:
        return (scale * sample.query @ _means(sample.key, cells, number).T)[:, cells]
    block = torch.arange(len(cells), device=cells.device) // window
    exact = scale * sample.query @ sample.key.T
    logits, row_block = torch.empty_like(exact), sample.rows // window
    for own in row_block.unique():
        here, near = row_block == own, block == own
        far = (scale * sample.query[here] @ _means(sample.key, cells, number, ~near).T)[:, cells]
        logits[here] = torch.where(near, exact[here], far)
    return logits


def _causal(sample: Sample, queries: Tensor, number: int, window: int, scale: float) -> Tensor:
    length, size = len(sample.key), window or BLOCK
    logits, order = [], []
    group = torch.arange(0, device=sample.key.device)  # of each earlier key
    for start in range(0, length, size):
        stop, count = min(start + size, length), int(group.max()) + 1 if start else 0
        means = _means(sample.key[:start], group, count)
        here = (sample.rows >= start) & (sample.rows < stop)
        if here.any():
            query = scale * sample.query[here]
            logits.append(torch.cat([(query @ means.T)[:, group], query @ sample.key[start:].T], 1))
            order.append(here.nonzero().flatten())
        group = torch.cat([group, count + torch.arange(stop - start, device=group.device)])
        if count + stop - start > number:
            every = torch.cat([means, sample.key[start:stop]]).detach().float()
            counts = torch.bincount(group).float()
            cells = Landmarks().cells(queries[:, start:stop].flatten(0, 1), every, number, scale=scale, counts=counts)
            group = cells[group]
    return torch.cat(logits)[torch.cat(order).argsort()]


def _means(rows: Tensor, cells: Tensor, number: int, keep: Tensor | None = None) -> Tensor:
    """Mean of the rows of each cell, `[number, d]`; only of those to keep."""
    keep = torch.ones_like(cells, dtype=torch.bool) if keep is None else keep
    counts = torch.bincount(cells[keep], minlength=number).clamp(min=1).to(rows.dtype)
    return rows.new_zeros(number, rows.shape[1]).index_add(0, cells[keep], rows[keep]) / counts[:, None]
