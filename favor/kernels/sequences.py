"""Packed batches: sequences of different lengths one after another, with their cumulative lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

Index = tuple[slice, slice, slice]


@dataclass
class Sequence:
    """One sequence of a packed batch, or a whole batch that is not packed; views, not copies.

    Attributes:
        query, key, value, query_directions, key_directions, offset, key_bias: as in `favor.kernels.linear_attention`.
        rows, columns: index of its queries and of its keys in the whole batch.
        landmarks: index of its landmarks among those of all sequences.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    key_bias: Tensor
    rows: Index
    columns: Index
    landmarks: slice

    def accumulate(self, total: Tensor, update: Tensor) -> None:
        """Adds an update per sequence and key head `[N, ...]` to a total `[n, Hk, ...]` (n = 1: shared by all)."""
        update = update.view(-1, *total.shape[1:])
        if total.shape[0] == 1:
            total += update.sum(0, keepdim=True)
        else:
            total[self.landmarks] += update


def sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> Iterator[Sequence]:
    """The sequences of a batch; all of it at once if it is not packed."""
    everything = slice(None)
    if cu_q is None or cu_k is None:
        bounds = [(everything, everything)]
    else:
        ends = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        bounds = [(slice(*rows), slice(*columns)) for rows, columns in ends]
    for index, (rows, columns) in enumerate(bounds):
        own = slice(index, index + 1) if cu_q is not None else everything
        per_sequence = own if query_directions.shape[0] > 1 else everything
        yield Sequence(
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            query_directions[per_sequence],
            key_directions[per_sequence],
            offset[per_sequence],
            key_bias[:, :, columns],
            (everything, everything, rows),
            (everything, everything, columns),
            own,
        )
