"""Tokens in blocks for windowed attention: a sequence cut into blocks, and sums over the blocks before and after each.

Nothing is subtracted from a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from favor.kernels.eager.common import Inputs, exp2
from favor.kernels.operands import Geometry, Operands, Sequence, sequences

# Numbers in the logits of the blocks that are worked on together. The fused kernel holds no logits, only summaries of
# every block, copies of rows and masks, which are smaller; and it is slower with less work at a time.
SPAN, FUSED_SPAN = 2**20, 2**22
WIDEST = 72.0  # blocks whose tops differ by less, for every feature, are brought to one scale without loss
_TOGETHER = 16


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


class States(NamedTuple):
    """Sums over keys times 2^-top, for each block and feature: `[N, b, M]`, `[N, b, M]`, `[N, b, M, w]`.

    Top is -inf where there is nothing.
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def uninitialised(cls, inputs: Inputs, blocks: int) -> States:
        """Makes uninitialised memory for the states of a number of blocks."""
        top = inputs.offset.new_empty(inputs.heads, blocks, inputs.offset.shape[-1])
        return cls(top, torch.empty_like(top), top.new_empty(*top.shape, inputs.value.shape[-1]))

    def write(self, blocks: tuple[int, int], *, total: Tensor, top: Tensor | None = None) -> None:
        """Writes tops and totals of a range of blocks, `[N s, 1, M]` or `[N s, M]`."""
        for target, given in ((self.top, top), (self.total, total)):
            if given is not None:
                own = target[:, slice(*blocks)]
                own.copy_(given.view(own.shape))

    def write_values(self, blocks: tuple[int, int], weights: Tensor, values: Tensor) -> None:
        """Writes the values of a range of blocks: weights `[N s, M, tokens]` times values `[N s, tokens, w]`."""
        own = self.values[:, slice(*blocks)]
        if own.is_contiguous():
            torch.bmm(weights, values, out=own.view(-1, *own.shape[2:]))
        else:
            own.copy_((weights @ values).view(own.shape))

    def outside(self, *, before: bool, after: bool, values: Tensor | None = None) -> States:
        """Sums, for each block, over the blocks before it, after it, or both; overwrites these states.

        Args:
            before, after: which blocks.
            values: memory for the sums of values.
        """
        values = torch.empty_like(self.values) if values is None else values
        result = States(torch.empty_like(self.top), torch.empty_like(self.total), values)
        blocks = self.top.shape[1]
        if not blocks:
            return result
        if before and after and self._level():
            _others(self.total, result.total)
            _others(self.values.flatten(2), result.values.flatten(2))
            seen = self.top > -torch.inf
            result.top.copy_(self.top.amax(1, keepdim=True).expand_as(self.top))
            result.top.masked_fill_(seen.sum(1, keepdim=True) - seen.long() == 0, -torch.inf)
            return result
        self._sweep(result, list(range(blocks)) if before else list(reversed(range(blocks))))
        if before and after:
            later = States(*(torch.empty_like(tensor) for tensor in self))
            self._sweep(later, list(reversed(range(blocks))))
            risen = torch.maximum(result.top, later.top)
            base = risen.masked_fill(risen == -torch.inf, 0.0)
            for states in (result, later):
                decay = exp2(states.top - base)
                states.total.mul_(decay)
                states.values.mul_(decay.unsqueeze(-1))
            result.top.copy_(risen)
            result.total.add_(later.total)
            result.values.add_(later.values)
        return result

    def _sweep(self, result: States, order: list[int]) -> None:
        """Puts into each block of `result` the sum over those that come earlier in `order`.

        Its scale is the largest top among these, so that a block depends on no other.
        """
        first, *others = order
        highest = self.top[:, order].cummax(1).values[:, :-1]
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        weights = exp2(self.top[:, order[:-1]] - base)
        result.top[:, first], result.total[:, first], result.values[:, first] = -torch.inf, 0.0, 0.0
        result.top[:, others] = highest
        decays = exp2(result.top[:, order[:-1]] - base)
        for index, (last, block) in enumerate(pairwise(order)):
            decay, weight = decays[:, index], weights[:, index]
            torch.mul(result.total[:, last], decay, out=result.total[:, block]).addcmul_(self.total[:, last], weight)
            decay, weight = decay.unsqueeze(-1), weight.unsqueeze(-1)
            torch.mul(result.values[:, last], decay, out=result.values[:, block])
            result.values[:, block].addcmul_(self.values[:, last], weight)

    def _level(self) -> bool:
        """Brings all blocks to the largest top of each feature, if that loses nothing."""
        highest = self.top.amax(1, keepdim=True)
        lower = (self.top - highest).masked_fill_(self.top == -torch.inf, 0.0)
        if bool((lower < -WIDEST).any()):
            return False
        decay = exp2(lower)
        self.total.mul_(decay)
        self.values.mul_(decay.unsqueeze(-1))
        return True


def _others(rows: Tensor, out: Tensor) -> None:
    """Sums, for each block of `[N, b, n]`, all other blocks, without subtraction: products with zeros and ones."""
    blocks = rows.shape[1]
    ones = rows.new_ones(min(blocks, _TOGETHER), min(blocks, _TOGETHER))
    others = ones.clone().fill_diagonal_(0.0)
    for own, target in zip(rows, out, strict=True):
        if blocks <= _TOGETHER:
            torch.mm(others, own, out=target)
            continue
        groups = own.split(_TOGETHER)
        sums = torch.cat([ones[:1, : group.shape[0]] @ group for group in groups])
        rest = torch.empty_like(sums)
        _others(sums[None], rest[None])
        for group, beyond, part in zip(groups, rest, target.split(_TOGETHER), strict=True):
            size = group.shape[0]
            torch.addmm(beyond, others[:size, :size], group, out=part)
