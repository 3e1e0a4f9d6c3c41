"""Sums over the keys of blocks of tokens, and of all blocks before and after each; nothing is subtracted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from favor.kernels.chunked import Inputs


class States(NamedTuple):
    """Sums over keys times exp(-top), for each block and feature: `[b, N, M, 1]`, `[b, N, M, 1]`, `[b, N, M, w]`.

    Top is -inf where there is nothing.
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def uninitialised(cls, inputs: Inputs, blocks: int) -> States:
        """Memory for the states of so many blocks."""
        shape = (blocks, inputs.heads, inputs.to_key.shape[1])
        top = inputs.to_key.new_empty(*shape, 1)
        return cls(top, torch.empty_like(top), inputs.to_key.new_empty(*shape, inputs.width))

    def outside(self, *, before: bool, after: bool, values: Tensor | None = None) -> States:
        """For each block the sum over the blocks before it, after it, or both; `values` is memory to use."""
        values = torch.empty_like(self.values) if values is None else values
        result = States(torch.empty_like(self.top), torch.empty_like(self.total), values)
        blocks = self.top.shape[0]
        if not blocks:
            return result
        if before:
            result.clear(0)
            for block in range(1, blocks):
                result.put(block, result, block - 1, self, block - 1)
        running = States(*(torch.empty_like(tensor[:1]) for tensor in self))
        running.clear(0)
        for block in reversed(range(blocks)) if after else ():
            if before:
                result.put(block, result, block, running, 0)
            else:
                result.put(block, running, 0, None, 0)
            running.put(0, running, 0, self, block)
        return result

    def clear(self, index: int) -> None:
        """Leaves nothing in a block."""
        self.top[index], self.total[index], self.values[index] = -torch.inf, 0.0, 0.0

    def put(self, index: int, one: States, first: int, other: States | None, second: int) -> None:
        """Puts the sum of block `first` of one and `second` of another into block `index`, which may be one of them."""
        if other is None:
            for target, tensor in zip(self, one, strict=True):
                target[index] = tensor[first]
            return
        risen = torch.maximum(one.top[first], other.top[second])
        base = risen.masked_fill(risen == -torch.inf, 0.0)
        decay, weight = (one.top[first] - base).exp_(), (other.top[second] - base).exp_()
        torch.mul(one.total[first], decay, out=self.total[index]).addcmul_(other.total[second], weight)
        torch.mul(one.values[first], decay, out=self.values[index]).addcmul_(other.values[second], weight)
        self.top[index] = risen
