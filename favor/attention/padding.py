"""Padding moved to the end, so that blocks of tokens begin with the first real one wherever the padding is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.dispatch import is_tracing


@dataclass
class Compaction:
    """A permutation of the tokens of each sequence: real ones first, in their order.

    Attributes:
        order: old place of each new token, `[B, S]`.
        mask: boolean `[B, S]`, True for real tokens in their new places.
    """

    order: Tensor
    mask: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Compaction | None:
        """From a padding mask `[B, S]`, True for real tokens; None if the padding is at the end already."""
        if mask.shape[1] < 2 or (not is_tracing() and bool((mask[:, 1:] <= mask[:, :-1]).all())):
            return None
        order = torch.argsort(~mask, dim=1, stable=True)
        return cls(order, mask.gather(1, order))

    def move(self, rows: Tensor) -> Tensor:
        """Rows `[B, H, L, w]` in their new places; fewer rows than tokens are the last ones, after rows of zeros."""
        missing = self.order.shape[1] - rows.shape[2]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0, missing, 0))
        return _gather(rows, self.order)

    def back(self, rows: Tensor, length: int) -> Tensor:
        """The last `length` tokens of `[B, H, S, w]` where they were."""
        return _gather(rows, self.order.argsort(dim=1))[:, :, rows.shape[2] - length :]


def _gather(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(2, order[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))
