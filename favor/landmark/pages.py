"""The index in which keys are searched: pages of a few neighbouring keys, and the choice of those that matter.

A page is found by the logit of its mean key. Neighbours need no sorting and lie side by side in memory, and new pages
are appended to old ones. Pages are known from Quest (Tang et al., 2024), which bounds the logits inside a page one
coordinate after another. On the models measured for docs/selected_keys.md, pages of 4 found the needles by their means
alone; a bound (mean plus spread) did not choose better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels.dispatch import read

# Scores of pages at a time: few launches on a GPU; on a CPU as many as stay in cache and take little memory.
_SCORES, _SCORES_OF_GPU = 2**20, 2**27


def filled(rows: Tensor, size: int) -> Tensor:
    """Gives rows `[..., T, w]`, with zeros (False) at the end if their number is not a multiple of `size`."""
    missing = -rows.shape[-2] % size
    return pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass
class Pages:
    """The pages of a sequence.

    Attributes:
        mean: of the keys of each page, `[N, p, d]`, at least float32.
        there: False for pages without a key that counts, `[N, p]`.
    """

    mean: Tensor
    there: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, key: Tensor, real: Tensor, size: int) -> Pages:
        """Cuts keys `[N, S, d]` into pages of `size`; `real` is `[N, S]`, True for the keys that count."""
        weights = filled(real.unsqueeze(-1), size).reshape(len(real), -1, 1, size)
        weights = weights.to(torch.promote_types(key.dtype, torch.float32))
        counts = weights.sum((2, 3))
        rows = filled(key, size).unflatten(1, (-1, size)).to(weights.dtype)
        total = (weights @ rows).squeeze(2)
        return cls(total / counts.clamp(min=1).unsqueeze(-1), counts > 0)

    @property
    def scores_at_a_time(self) -> int:
        """Gives how many scores to hold at a time."""
        return min(_SCORES, 2 * self.mean.numel()) if self.mean.device.type == "cpu" else _SCORES_OF_GPU

    def scores(self, query: Tensor) -> Tensor:
        """Multiplies queries `[N, n, d]` with the means of the pages, `[N, n, p]`; -inf for absent pages."""
        found = query.to(self.mean.dtype) @ self.mean.transpose(1, 2)
        absent = ~self.there.unsqueeze(1)
        return found.masked_fill_(absent, -torch.inf) if read(absent.any(), otherwise=True) else found


@torch.no_grad()
def choose(
    pages: Pages, query: Tensor, number: int, near: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses pages for each block of queries together, by the mean of its queries.

    Args:
        pages: of the keys.
        query: `[N, Z, R, d]`, zeros for queries that do not count.
        number: of pages.
        near: pages from which no block chooses, begin and end, `[Z]`: their tokens are exact already.

    Returns:
        The pages of each block, `[N, Z, n]`, and the first row that sees each: 0, or R for absent pages.
    """
    heads, blocks, rows, _ = query.shape
    every = pages.mean.shape[1]
    if number >= every:
        chosen = torch.arange(every, device=query.device).expand(heads, blocks, every)
        return chosen, torch.where(pages.there.unsqueeze(1).expand_as(chosen), 0, rows)
    together = max(pages.scores_at_a_time // (heads * every), 1)
    best, place = [], torch.arange(every, device=query.device)
    for first in range(0, blocks, together):
        part = slice(first, first + together)
        scores = pages.scores(query[:, part].to(pages.mean.dtype).sum(2))  # their number does not matter
        if near is not None:
            begin, end = (edge[part].unsqueeze(-1) for edge in near)
            scores.masked_fill_((place >= begin) & (place < end), -torch.inf)
        best.append(scores.topk(number, -1, sorted=False))
    values, chosen = (torch.cat(part, 1) for part in zip(*best, strict=True))
    return chosen, torch.where(values > -torch.inf, 0, rows)
