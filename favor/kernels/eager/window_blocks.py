"""A sequence cut into blocks of tokens, for the torch kernel of windowed attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from favor.kernels.eager.bidirectional import Inputs
from favor.kernels.operands import Sequence

# Numbers in the logits of the blocks that are worked on together. The fused kernel does not hold them, but landmarks of
# every block, copies of rows and masks, which are smaller, and it is slower the less it gets at a time.
SPAN, FUSED_SPAN = 2**20, 2**22


@dataclass
class Span:
    """Neighbouring blocks with equally many tokens.

    Attributes:
        blocks: their range.
        keys, queries: ranges of their tokens; there are no queries in blocks before the first one.
        skipped: tokens of the block before its first query.
    """

    blocks: tuple[int, int]
    keys: tuple[int, int]
    queries: tuple[int, int]
    skipped: int

    @property
    def number(self) -> int:
        """How many blocks it has."""
        return self.blocks[1] - self.blocks[0]


@dataclass
class Blocks:
    """A sequence, or some heads of a batch, cut into blocks.

    Tensors of one span are `[N, rows, w]` or, block by block, `[N s, rows, w]`, for N = batch x key heads and s blocks;
    the G query heads of a key head are rows of it.

    Attributes:
        inputs: the sequence.
        size: tokens of a block.
        is_causal: whether later blocks, and later keys of the same block, are out of sight.
        budget: numbers in the logits of a span.
    """

    inputs: Inputs
    size: int
    is_causal: bool
    budget: int

    @classmethod
    def parts(cls, sequence: Sequence, size: int, is_causal: bool, budget: int) -> Iterator[tuple[Sequence, Blocks]]:
        """A sequence, some heads at a time: few enough for one span, whose tokens then lie together in memory.

        On a GPU all heads at once.
        """
        groups, tokens = sequence.query.shape[1] // sequence.key.shape[1], max(sequence.key.shape[2], 1)
        together = max(1, budget // (groups * tokens * (sequence.offset.shape[-1] + size)))
        if sequence.key.device.type != "cpu":
            together = sequence.key.shape[0] * sequence.key.shape[1]
        for part in sequence.parts(together):
            yield part, cls(Inputs.of(part), size, is_causal, budget)

    @property
    def prefix(self) -> int:
        """Keys before the first query."""
        return self.inputs.key.shape[2] - self.inputs.query.shape[2] if self.is_causal else 0

    @property
    def number(self) -> int:
        """Blocks of the sequence."""
        return -(-self.inputs.key.shape[2] // self.size)

    def spans(self) -> list[Span]:
        """The whole sequence, in order."""
        size, prefix, length = self.size, self.prefix, self.inputs.key.shape[2]
        rows = self.inputs.heads * self.inputs.groups * size
        step = max(1, self.budget // (rows * (self.inputs.to_key.shape[1] + size)))
        # Where the number of tokens may change: the first query, and the end.
        cuts = sorted({0, prefix // size, -(-prefix // size), length // size, self.number})
        found = []
        for low, high in pairwise(cuts):
            pieces = -(-(high - low) // step)
            for piece in range(pieces):
                first, last = (low + (high - low) * end // pieces for end in (piece, piece + 1))
                keys = (first * size, min(last * size, length))
                queries = (max(keys[0] - prefix, 0), max(keys[1] - prefix, 0))
                found.append(Span((first, last), keys, queries, max(prefix - keys[0], 0)))
        return found

    def keys(self, tensor: Tensor, span: Span) -> Tensor:
        """Rows of a tensor `[B, Hk, S, w]` as `[N, tokens, w]`; hidden ones are zeros."""
        return self.inputs.keys(tensor, *span.keys)

    def queries(self, tensor: Tensor, span: Span) -> Tensor:
        """Rows of a tensor `[B, H, L, w]` as `[N, tokens, w]`, those of one block together."""
        if self.inputs.groups == 1:
            return self.inputs.queries(tensor, *span.queries)
        rows = self._grouped(tensor[:, :, slice(*span.queries)], span)
        return rows.to(self.inputs.to_query.dtype).reshape(self.inputs.heads, -1, tensor.shape[-1])

    def write_queries(self, target: Tensor, rows: Tensor, span: Span) -> None:
        """Writes rows, as `queries` gives them, into a tensor `[B, H, L, ...]`."""
        block = target[:, :, slice(*span.queries)]
        if self.inputs.groups > 1:
            block = self._grouped(block, span)
        block.copy_(rows.reshape(block.shape))

    def _grouped(self, rows: Tensor, span: Span) -> Tensor:
        """`[B, Hk, s, G, tokens, ...]`, a view."""
        return rows.unflatten(2, (span.number, -1)).unflatten(1, (-1, self.inputs.groups)).transpose(2, 3)

    def apart(self, rows: Tensor, span: Span) -> Tensor:
        """Rows of a span `[N, ..., w]` as `[N s, ..., w]`, block by block."""
        return rows.reshape(rows.shape[0] * span.number, -1, rows.shape[-1])

    def unseen(self, span: Span) -> Tensor | None:
        """True for keys of its own block that a query does not see, `[1 or N s, rows, tokens]`; None if it sees all."""
        hidden, tokens = self.inputs.hidden, (span.keys[1] - span.keys[0]) // span.number
        mask = None if hidden is None else self.apart(hidden[:, slice(*span.keys)], span).transpose(1, 2)
        if self.is_causal:
            device = self.inputs.to_query.device
            own = torch.arange(span.skipped, tokens, device=device).repeat(self.inputs.groups)
            later = torch.arange(tokens, device=device) > own.unsqueeze(1)
            mask = later[None] if mask is None else mask | later
        return mask
