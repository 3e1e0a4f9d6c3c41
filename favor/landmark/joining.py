"""Groups that take in one section of tokens after another, and the way back through them.

The sums of a group are sums of rows: of earlier groups, and of the tokens of a section. Which rows join which group is
decided once, by `Joined`. `replay` makes the sums again from these decisions, for some heads, and `replay_backward` is
its transpose: it takes gradients of sums to gradients of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.landmark.causal import Groups, Tokens
from favor.landmark.grouping import sums_of
from favor.landmark.kept import Setting, grown


class Joined:
    """Groups that take in one section after another.

    Args:
        setting: options of the sequence, a `Setting`.
        groups: before the first section.
        cells: the group of each token in them, `[B, Hk, S]`.
        parts, joining: tokens of the sections, and which of them join the groups, see `favor.landmark.causal.cut`.
        takes_notes: whether there will be a backward pass.
        keeps_before: whether the last section may have to be taken out again.

    Attributes:
        before: groups, and the group of each token in them, before the last section was taken in.
        number: of sections taken in.
        moved: the new group of each group and of each token of a section, one for each section taken in, None if no
            group has changed; empty if there will be no backward pass.
    """

    def __init__(
        self,
        setting: Setting,
        groups: Groups,
        cells: Tensor,
        parts: list[Tokens],
        joining: list[Tensor],
        takes_notes: bool,
        keeps_before: bool,
    ) -> None:
        self.setting, self.groups, self.cells, self.takes_notes = setting, groups, cells, takes_notes
        self.keeps_before, self.before = keeps_before, (groups, cells)
        self.parts, self.joining, self.number = parts, joining, 0
        self.moved: list[Tensor | None] = []

    def up_to(self, number: int) -> None:
        """Takes in the sections before `number`."""
        while self.number < number:
            (query, _, key, value), own = self.parts[self.number], self.joining[self.number]
            if self.keeps_before:
                self.before = (self.groups, self.cells)
            self.groups, self.cells, moved = grown(self.setting, self.groups, self.cells, (query, own, key, value))
            if self.takes_notes:
                self.moved.append(moved)
            self.number += 1


@dataclass(frozen=True)
class Joins:
    """Which rows joined which group, in a part of the heads.

    Attributes:
        moved: for each section taken in, the new group of each group and of each token of the section, `[N, m + T]`, M
            for tokens that do not count; None if no group has changed.
        number: of groups, M.
        past: tokens before the first section.
        block: length T of a section.
    """

    moved: list[Tensor | None]
    number: int
    past: int
    block: int

    def tokens(self, number: int) -> slice:
        """Gives the places of the tokens of a section."""
        return slice(self.past + number * self.block, self.past + (number + 1) * self.block)

    def replay(self, rows: Tensor, sections: int) -> Iterator[Tensor]:
        """Makes the sums of the groups before each of the first sections, `[N, m, w]`, from rows `[N, S, w]`."""
        sums = rows[:, : self.past]
        for number in range(sections):
            yield sums
            if number < len(self.moved):
                sums, moved = torch.cat([sums, rows[:, self.tokens(number)]], 1), self.moved[number]
                if moved is not None:
                    (sums,) = sums_of(moved, self.number, sums)

    def replay_backward(self, of_sums: list[Tensor], length: int) -> Tensor:
        """Computes the gradient of the rows of `replay`, `[N, S, w]`, from those of all its sums."""
        found = of_sums[0].new_zeros(len(of_sums[0]), length, of_sums[0].shape[2])
        later: Tensor | None = None  # gradient of the sums after a section
        for number, own in reversed(list(enumerate(of_sums))):
            if later is None:
                later = own
                continue
            moved = self.moved[number]
            if moved is not None:  # tokens that do not count have the place after the last group
                later = pad(later, (0, 0, 0, 1)).gather(1, moved.unsqueeze(-1).expand(-1, -1, later.shape[2]))
            found[:, self.tokens(number)] = later[:, own.shape[1] :]
            later = later[:, : own.shape[1]] + own
        if later is not None:
            found[:, : self.past] = later
        return found
