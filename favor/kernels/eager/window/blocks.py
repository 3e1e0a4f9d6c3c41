"""A sequence cut into blocks of tokens, for the torch kernel of windowed attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from favor.kernels.eager.common import Inputs
from favor.kernels.operands import Geometry, Operands, Sequence, sequences

# Numbers in the logits of the blocks that are worked on together. The fused kernel holds no logits, only summaries of
# every block, copies of rows and masks, which are smaller; and it is slower with less work at a time.
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
        geometry: the window is the number of tokens of a block. If it is causal, later blocks and later keys of the
            same block are hidden.
        first: where these blocks begin among those of all sequences.
        budget: numbers in the logits of a span.
    """

    inputs: Inputs
    geometry: Geometry
    first: int
    budget: int

    @classmethod
    def parts(cls, operands: Operands, geometry: Geometry, budget: int) -> Iterator[Blocks]:
        """Cuts a batch into sequences, some heads at a time: few enough for one span, whose tokens then lie together.

        On a GPU takes all heads at once.
        """
        heads = operands.key.shape[0] * operands.key.shape[1]
        for index, sequence in enumerate(sequences(operands, geometry)):
            # Packed sequence i leaves room for i partial blocks.
            first = 0 if geometry.cu_k is None else int(geometry.cu_k[index]) // geometry.window + index
            tokens = max(sequence.operands.key.shape[2], 1)
            numbers = operands.groups * tokens * (operands.offset.shape[-1] + geometry.window)
            together = max(1, budget // numbers) if operands.key.device.type == "cpu" else heads
            for part in sequence.parts(together):
                yield cls(Inputs.of(part), geometry, first, budget)

    @property
    def sequence(self) -> Sequence:
        """The part of the batch that is cut into blocks."""
        return self.inputs.sequence

    @property
    def prefix(self) -> int:
        """Keys before the first query."""
        return self.inputs.prefix if self.geometry.is_causal else 0

    @property
    def number(self) -> int:
        """Blocks of the sequence."""
        return -(-self.inputs.key.shape[2] // self.geometry.window)

    def spans(self) -> list[Span]:
        """Cuts the whole sequence, in order."""
        size, prefix, length = self.geometry.window, self.prefix, self.inputs.key.shape[2]
        rows = self.inputs.heads * self.inputs.groups * size
        step = max(1, self.budget // (rows * (self.inputs.key_directions.shape[1] + size)))
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
        """Gives the rows of a tensor `[B, Hk, S, w]` as `[N, tokens, w]`; hidden ones are zeros."""
        return self.inputs.keys(tensor, *span.keys)

    def queries(self, tensor: Tensor, span: Span) -> Tensor:
        """Gives the rows of a tensor `[B, H, L, w]` as `[N, tokens, w]`, those of one block together."""
        if self.inputs.groups == 1:
            return self.inputs.queries(tensor, *span.queries)
        rows = self._grouped(tensor[:, :, slice(*span.queries)], span)
        return rows.to(self.inputs.offset.dtype).reshape(self.inputs.heads, -1, tensor.shape[-1])

    def write_queries(self, target: Tensor, rows: Tensor, span: Span) -> None:
        """Writes rows, as `queries` gives them, into a tensor `[B, H, L, ...]`."""
        block = target[:, :, slice(*span.queries)]
        if self.inputs.groups > 1:
            block = self._grouped(block, span)
        block.copy_(rows.reshape(block.shape))

    def _grouped(self, rows: Tensor, span: Span) -> Tensor:
        """Gives a view `[B, Hk, s, G, tokens, ...]`."""
        return rows.unflatten(2, (span.number, -1)).unflatten(1, (-1, self.inputs.groups)).transpose(2, 3)

    def apart(self, rows: Tensor, span: Span) -> Tensor:
        """Gives the rows of a span `[N, ..., w]` as `[N s, ..., w]`, block by block."""
        return rows.reshape(rows.shape[0] * span.number, -1, rows.shape[-1])

    def keys_and_values(self, span: Span) -> tuple[Tensor, Tensor]:
        """Gives the keys and values of a span, block by block, `[N s, tokens, w]`; hidden ones are zeros."""
        keys, values = (self.apart(self.keys(t, span), span) for t in (self.inputs.key, self.inputs.value))
        return keys, values

    def unseen(self, span: Span) -> Tensor | None:
        """Marks keys of the own block that a query does not see, `[1 or N s, rows, tokens]`; None if it sees all."""
        hidden, tokens = self.inputs.hidden, (span.keys[1] - span.keys[0]) // span.number
        mask = None if hidden is None else self.apart(hidden[:, slice(*span.keys)], span).transpose(1, 2)
        if self.geometry.is_causal:
            device = self.inputs.offset.device
            own = torch.arange(span.skipped, tokens, device=device).repeat(self.inputs.groups)
            later = torch.arange(tokens, device=device) > own.unsqueeze(1)
            mask = later[None] if mask is None else mask | later
        return mask
