"""Sums over the keys of blocks of tokens, and of all blocks before and after each; nothing is subtracted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from favor.kernels.chunked import Inputs

# Blocks whose tops differ by less, for every feature, are brought to one scale without loss.
_WIDEST = 50.0
_TOGETHER = 16


class States(NamedTuple):
    """Sums over keys times exp(-top), for each block and feature: `[N, b, M]`, `[N, b, M]`, `[N, b, M, w]`.

    Top is -inf where there is nothing.
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def uninitialised(cls, inputs: Inputs, blocks: int) -> States:
        """Memory for the states of so many blocks."""
        top = inputs.to_key.new_empty(inputs.heads, blocks, inputs.to_key.shape[1])
        return cls(top, torch.empty_like(top), top.new_empty(*top.shape, inputs.width))

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
        """For each block the sum over the blocks before it, after it, or both; overwrites these states.

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
        if before:
            result._clear(0)
            for block in range(1, blocks):
                result._put(block, result, block - 1, self, block - 1)
        running = States(*(torch.empty_like(tensor[:, :1]) for tensor in self))
        running._clear(0)
        for block in reversed(range(blocks)) if after else ():
            if before:
                result._put(block, result, block, running, 0)
            else:
                for target, tensor in zip(result, running, strict=True):
                    target[:, block] = tensor[:, 0]
            running._put(0, running, 0, self, block)
        return result

    def _level(self) -> bool:
        """Brings all blocks to the largest top of each feature, if that loses nothing."""
        highest = self.top.amax(1, keepdim=True)
        lower = (self.top - highest).masked_fill_(self.top == -torch.inf, 0.0)
        if bool((lower < -_WIDEST).any()):
            return False
        decay = lower.exp_()
        self.total.mul_(decay)
        self.values.mul_(decay.unsqueeze(-1))
        return True

    def _clear(self, block: int) -> None:
        """Leaves nothing in a block."""
        self.top[:, block], self.total[:, block], self.values[:, block] = -torch.inf, 0.0, 0.0

    def _put(self, block: int, one: States, first: int, other: States, second: int) -> None:
        """Puts the sum of block `first` of one and `second` of another into a block, which may be one of them."""
        risen = torch.maximum(one.top[:, first], other.top[:, second])
        base = risen.masked_fill(risen == -torch.inf, 0.0)
        decay, weight = (one.top[:, first] - base).exp_(), (other.top[:, second] - base).exp_()
        torch.mul(one.total[:, first], decay, out=self.total[:, block]).addcmul_(other.total[:, second], weight)
        decay, weight = decay.unsqueeze(-1), weight.unsqueeze(-1)
        torch.mul(one.values[:, first], decay, out=self.values[:, block]).addcmul_(other.values[:, second], weight)
        self.top[:, block] = risen


def _others(rows: Tensor, out: Tensor) -> None:
    """For each block of `[N, b, n]` the sum of all others, without subtraction: products with zeros and ones."""
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
