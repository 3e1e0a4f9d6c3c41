"""Sums over the keys of blocks of tokens, and of all blocks before and after each; nothing is subtracted."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from favor.kernels.eager.common import Inputs, exp2

# Blocks whose tops differ by less, for every feature, are brought to one scale without loss.
WIDEST = 72.0
_TOGETHER = 16


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
