"""Padding: what it holds is harmless, and moved to the end blocks of tokens begin with the first real one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.dispatch import is_tracing


def finite_padding(query: Tensor, mask: Tensor) -> Tensor:
    """Puts 0 in place of NaN and infinity in padded queries, whose finite numbers stay.

    Nobody reads their outputs, but a product of NaN with their gradient, which is 0, would reach every key.

    Args:
        query: `[B, H, L, d]`.
        mask: boolean `[B, L]`, True for real queries.
    """
    return torch.where(mask[:, None, :, None], query, query.nan_to_num(0.0, 0.0, 0.0))


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
