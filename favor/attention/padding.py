"""Padding moved to the end, so that blocks of tokens begin with the first real one."""

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
        places: new place of each old token, `[B, S]`.
        mask: boolean `[B, S]`, True for real tokens in their new places.
    """

    order: Tensor
    places: Tensor
    mask: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Compaction | None:
        """Makes a permutation for a mask `[B, S]`, True for real tokens; None if all padding is at the end."""
        if not is_tracing(mask) and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return None
        return cls.to_front(mask)

    @classmethod
    def to_front(cls, mask: Tensor) -> Compaction:
        """Makes a permutation for a mask `[B, S]` without a look at its contents, for which a GPU would wait."""
        real = mask.cumsum(1)
        places = torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(1) - 1)
        tokens = torch.arange(mask.shape[1], device=mask.device).expand_as(places)
        order = torch.empty_like(places).scatter(1, places, tokens)
        return cls(order, places, mask.gather(1, order))

    def move(self, rows: Tensor) -> Tensor:
        """Puts rows `[B, H, L, w]` in their new places; fewer rows than tokens are the last ones, after zeros."""
        missing = self.order.shape[1] - rows.shape[2]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0, missing, 0))
        return _gather(rows, self.order)

    def back(self, rows: Tensor, length: int) -> Tensor:
        """Puts the last `length` tokens of `[B, H, S, w]` back in their old places."""
        return _gather(rows, self.places)[:, :, rows.shape[2] - length :]


def _gather(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(2, order[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))
