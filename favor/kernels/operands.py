"""What every kernel takes and gives, and the parts of a batch that kernels work through one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

from torch import Tensor

Index = tuple[slice, slice, slice]


class Operands(NamedTuple):
    """The tensors of a call of `favor.kernels.linear_attention`.

    Attributes:
        query: `[B, H, L, d]`.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of the type of `query`; H is a multiple of Hk.
        query_directions, key_directions: uq and uk `[n, Hk, M, d]`, contiguous, float32 (float64 for float64 tokens);
            n is the number of sequences, or 1 if they share the directions.
        offset: `[n, Hk, M]`, contiguous.
        key_bias: `[B, Hk, S]`, contiguous; -inf hides a key.
        query_bias: `[B, H, L]`, contiguous, of the weights outside of the window; None without a window.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    key_bias: Tensor
    query_bias: Tensor | None = None


class Geometry(NamedTuple):
    """Which key a query sees, and how.

    Attributes:
        cu_q, cu_k: cumulative lengths `[N + 1]`, int32, of N packed sequences (then B = 1); None if nothing is packed.
        max_q, max_k: the longest sequence of queries and of keys.
        is_causal: whether query i sees keys 0 ... S - L + i only.
        window: tokens of the blocks in which attention is exact; 0 for none.
        scale: of the exact logits.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool = False
    window: int = 0
    scale: float = 1.0

    def sequences(self, batch_size: int) -> int:
        """Number of sequences: those that are packed, or the size of the batch."""
        return batch_size if self.cu_k is None else self.cu_k.shape[0] - 1


class Result(NamedTuple):
    """What a forward pass gives; what the backward pass of its kernel has no use for is empty.

    Attributes:
        out: `[B, H, L, dv]`.
        lse: logarithm of the normaliser `[B, H, L]`.
        weight: logarithm of the weight of each feature summary: `[n, Hk, M]`, or `[b, B, Hk, M]` for b blocks.
        summary: the summaries, weighted means of values: `[n, Hk, M, dv]` or `[b, B, Hk, M, dv]`.
    """

    out: Tensor
    lse: Tensor
    weight: Tensor
    summary: Tensor


class Gradients(NamedTuple):
    """Gradients of `Operands`; empty for directions and offset unless asked for, and for a bias that is not given."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    query_bias: Tensor


@dataclass
class Sequence:
    """One sequence of a packed batch, or a whole batch that is not packed, or some heads of these; views, not copies.

    Attributes:
        query, key, value, query_directions, key_directions, offset, key_bias: as in `favor.kernels.linear_attention`.
        rows, columns: index of its queries and of its keys in the whole batch.
        landmarks: index of its landmarks among those of all sequences.
        directions: index of its directions, offsets and their gradients among those of all sequences and key heads.
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
    directions: tuple[slice, slice]

    def accumulate(self, total: Tensor, update: Tensor) -> None:
        """Adds an update per sequence and key head `[N, ...]` to a total `[n, Hk, ...]` (n = 1: shared by all)."""
        own = total[self.directions]
        update = update.view(-1, *own.shape[1:])
        own += update.sum(0, keepdim=True) if own.shape[0] == 1 else update

    def parts(self, number: int) -> Iterator[Sequence]:
        """At most so many key heads at a time, counting those of all sequences of a batch."""
        batch, heads = self.key.shape[:2]
        together, number = max(1, number // heads), min(number, heads)
        groups = self.query.shape[1] // heads
        for first, head in product(range(0, batch, together), range(0, heads, number)):
            some, own = slice(first, first + together), slice(head, head + number)
            asking = slice(groups * head, groups * (head + number))
            shared = slice(None) if self.offset.shape[0] == 1 else some
            yield replace(
                self,
                query=self.query[some, asking],
                key=self.key[some, own],
                value=self.value[some, own],
                query_directions=self.query_directions[shared, own],
                key_directions=self.key_directions[shared, own],
                offset=self.offset[shared, own],
                key_bias=self.key_bias[some, own],
                rows=(some, asking, self.rows[2]),
                columns=(some, own, self.columns[2]),
                # A packed sequence, which is a batch of one, is told apart by its place in the whole batch.
                landmarks=self.landmarks if batch == 1 else some,
                directions=(self.directions[0] if batch == 1 else shared, own),
            )


def sequences(operands: Operands, geometry: Geometry) -> Iterator[Sequence]:
    """The sequences of a batch; all of it at once if it is not packed."""
    query, key, value, query_directions, key_directions, offset, key_bias, _ = operands
    cu_q, cu_k = geometry.cu_q, geometry.cu_k
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
            (per_sequence, everything),
        )
