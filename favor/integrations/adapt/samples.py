"""Queries and keys that attention layers meet: a sample of sequences, kept for learning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from favor.integrations.adapt.observe import Observation
from favor.integrations.layer import stored_choice

SEQUENCES = 16  # of a layer, at most
ROWS = 128  # queries of a sequence, at most


@dataclass(frozen=True)
class Sample:
    """Queries and keys of a layer in one sequence, without padding, times the root of the scale of the logits.

    Attributes:
        x: `[Hk, G, R, d]`: of the G query heads of each key head, R queries, evenly spaced.
        y: `[Hk, S, d]`.
        places: the positions of the queries among the keys, `[R]`.
        window: length of exact blocks, 0 for none.
        is_causal: whether queries see earlier keys only.
    """

    x: Tensor
    y: Tensor
    places: Tensor
    window: int
    is_causal: bool

    @classmethod
    def of(cls, seen: Observation, number: int, window: int) -> Sample | None:
        """Takes one sequence, by its number, from a call of a layer to the CPU; gives None if it has no tokens."""
        x, y = (rows[number] for rows in (seen.query, seen.key))
        if seen.padding is not None:
            y = y[:, seen.padding[number]]
        if seen.query_padding is not None:
            x = x[:, seen.query_padding[number]]
        if min(x.shape[1], y.shape[1]) == 0:
            return None
        step = max(1.0, x.shape[1] / ROWS)
        rows = (torch.arange(min(x.shape[1], ROWS)) * step).long()
        # Queries are those of the last tokens.
        places = rows + y.shape[1] - x.shape[1]
        x = x[:, rows.to(x.device)].unflatten(0, (y.shape[0], -1))
        x, y = ((seen.scale**0.5 * part.float()).cpu() for part in (x, y))
        return cls(x, y, places, window if seen.is_self_attention else 0, seen.is_causal)

    def of_heads(self, heads: Sequence[int], device: torch.device | str) -> Sample:
        """Takes some key heads of the sample, on a device."""
        x, y = (part[list(heads)].to(device) for part in (self.x, self.y))
        return replace(self, x=x, y=y, places=self.places.to(device))

    @property
    def visible(self) -> Tensor | None:
        """Boolean `[R, S]`: which keys a query sees; None for all."""
        if not self.is_causal:
            return None
        return torch.arange(self.y.shape[1], device=self.y.device) <= self.places.unsqueeze(-1)

    @property
    def near(self) -> Tensor | None:
        """Boolean `[R, S]`: which keys are in the block of a query; None without a window."""
        if not self.window:
            return None
        blocks = torch.arange(self.y.shape[1], device=self.y.device) // self.window
        same = blocks == (self.places // self.window).unsqueeze(-1)
        return same if self.visible is None else same & self.visible

    def logits(self) -> Tensor:
        """Computes x . y, `[Hk, G, R, S]`, -inf where hidden."""
        logits = self.x @ self.y.unsqueeze(1).transpose(-1, -2)
        return logits if self.visible is None else logits.masked_fill(~self.visible, -torch.inf)


class Samples:
    """Some sequences of each layer, as a callback of `favor.integrations.adapt.observe.observe`.

    Every sequence of every call of a layer has the same chance to be kept, so that a layer used at several depths
    is seen at all of them.

    Args:
        window: length of exact blocks of the layers that have none of their own.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.layers: dict[int, list[Sample]] = {}
        self._calls: dict[int, int] = {}
        self._random = random.Random(0)

    def __call__(self, seen: Observation) -> None:
        """Keeps or drops each sequence of one call of a layer."""
        samples, window = self.layers.setdefault(seen.layer, []), stored_choice(seen.module).get("window", self.window)
        for number in range(seen.key.shape[0]):
            before = self._calls.get(seen.layer, 0)
            place = before if before < SEQUENCES else self._random.randrange(before + 1)
            if place >= SEQUENCES:
                self._calls[seen.layer] = before + 1
                continue
            sample = Sample.of(seen, number, window)
            if sample is not None:
                samples[place : place + 1] = [sample]
                self._calls[seen.layer] = before + 1
