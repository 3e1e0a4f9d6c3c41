"""Blocks that are complete in some sequences of a batch but not yet in others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Waiting:
    """The tokens of incomplete blocks, when sequences have different lengths.

    Attributes:
        kept: boolean `[B, T]`, True for these tokens.
        order: their places in order, `[B, n]`, n the largest number of them in a sequence; if a sequence has fewer,
            places of other tokens come first.
    """

    kept: Tensor
    order: Tensor

    @classmethod
    def of(cls, real: Tensor, block: int) -> Waiting:
        """Finds these tokens from a mask of real ones `[B, T]` and the length of a block; the first begins a block."""
        rank = real.cumsum(1)
        kept = real & (rank > rank[:, -1:] // block * block)
        longest = int(kept.sum(1).max())
        return cls(kept, kept.to(torch.uint8).argsort(dim=1, stable=True)[:, kept.shape[1] - longest :])

    @property
    def is_there(self) -> Tensor:
        """Boolean `[B, n]`, False for places of other tokens."""
        return self.kept.gather(1, self.order)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Takes these tokens from a tensor `[B, ..., T, ...]`, whose dimension `dim` is that of the tokens."""
        others = tensor.ndim - dim - 1
        order = self.order.view(len(self.order), *[1] * (dim - 1), -1, *[1] * others)
        return torch.take_along_dim(tensor, order, dim)
