"""Groups that take in one section of tokens after another, and the way back through them.

The sums of a group are sums of rows: of earlier groups, and of the tokens of a section. Which rows join which group is
decided once, by `Joined`. `Joins` makes the sums again from these decisions, for some heads, and is their transpose
too: it takes gradients of means to gradients of tokens.

On a GPU `JoinedAtOnce` and `JoinsAtOnce` do the same for all sections in a few launches, see
`favor.kernels.gpu.deciding` and `favor.kernels.gpu.joining`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.features.moments import evenly_spaced
from favor.kernels.dispatch import pick, plain, triton_module
from favor.landmark.causal import Groups, Tokens
from favor.landmark.equal import lines
from favor.landmark.grouping import Landmarks, metric_of, sums_of
from favor.landmark.kept import Setting, grown, numbered

# Counts `[N, F, M]` and means of keys and values `[N, F, M, w]` of the groups that F sections see.
Far = tuple[Tensor, Tensor, Tensor]


class Joined:
    """Groups that take in one section after another.

    Args:
        setting: options of the sequence, a `Setting`.
        groups: before the first section.
        tokens: queries `[B, Hk, G, L, d]`, and counts, keys and values of all tokens, `[B, Hk, S]` and `[B, Hk, S, w]`,
            those of the groups first.
        parts, joining: tokens of the sections, and which of them join the groups, see `favor.landmark.causal.cut`.
        takes_notes: whether there will be a backward pass.
        keeps_before: whether the last section may have to be taken out again.

    Attributes:
        cells: the group of each token in the groups, `[B, Hk, S]`.
        before: groups, and the group of each token in them, before the last section was taken in.
        number: of sections taken in.
        moved: the new group of each group and of each token of a section, one for each section taken in, None if no
            group has changed; empty if there will be no backward pass.
    """

    def __init__(
        self,
        setting: Setting,
        groups: Groups,
        tokens: Tokens,
        parts: list[Tokens],
        joining: list[Tensor],
        takes_notes: bool,
        keeps_before: bool,
    ) -> None:
        self.setting, self.groups, self.tokens, self.takes_notes = setting, groups, tokens, takes_notes
        self.past = groups.counts.shape[2]
        self.cells = numbered(tokens[1][:, :, : self.past], 0)
        self.keeps_before, self.before = keeps_before, (groups, self.cells)
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

    def seen(self, sections: range, pages: Tensor) -> tuple[Far, Tensor]:
        """Gives what some sections see, and the groups of the keys of their pages `[N, F, Z, n]`, `[N, F, Z, nP]`."""
        self.up_to(sections.start)  # while there is little else in memory
        most = min(self.setting.number, self.past + (sections.stop - 1) * self.setting.block)
        far, cell = _room([tensor.flatten(0, 1) for tensor in self.tokens[1:]], len(sections), most), []
        for place, number in enumerate(sections):
            self.up_to(number)
            groups = self.groups
            _see(far, place, *(own.flatten(0, 1) for own in (groups.counts, groups.key, groups.value)))
            cells = pad(self.cells, (0, self.tokens[1].shape[2] - self.cells.shape[2]), value=-1)
            cell.append(self.setting.selection.cells(cells.flatten(0, 1), pages[:, place]))
        return far, torch.stack(cell, 1)


class JoinedAtOnce(Joined):
    """`Joined` by kernels for a GPU, if groups begin with none; `moved` holds the decisions of all sections."""

    def seen(self, sections: range, pages: Tensor) -> tuple[Far, Tensor]:
        """Gives what all sections see, and the groups of the keys of their pages; see `Joined.seen`."""
        assert sections.start == self.past == 0, "all sections come at once, and no token before them"
        kernels, setting, lead = triton_module("joining"), self.setting, self.cells.shape[:2]
        number, length = len(sections) - 1, (len(sections) - 1) * setting.block
        query = self.tokens[0].flatten(0, 1)[:, :, :length]
        real = torch.cat(self.joining, 2).flatten(0, 1)[:, :length]
        key, value = (tensor.flatten(0, 1)[:, :length] for tensor in self.tokens[2:])
        moved = self._decide(query, real, key, number)
        counts, far_key, sums_key = kernels.means(moved, key, real, setting.number, number + 1)
        _, far_value, sums_value = kernels.means(moved, value, real, setting.number, number + 1)

        def found(own: Tensor, section: Tensor, size: int) -> Tensor:
            cells: Tensor = kernels.follow(moved, real, own, section, size, setting.number)
            return cells

        def groups_before(section: int) -> tuple[Groups, Tensor]:
            tokens = torch.arange(section * setting.block, device=key.device).expand(len(key), 1, -1)
            own = (counts[:, section], *(both[:, section % 2] for both in (sums_key, sums_value)))
            there = min(section * setting.block, setting.number)
            cells = found(tokens, tokens.new_full((1,), section), 1).squeeze(1).long()
            groups = Groups(*(tensor[:, :there].unflatten(0, lead).clone() for tensor in own))  # no view of them all
            return groups, cells.unflatten(0, lead)

        if self.keeps_before:
            self.before = groups_before(max(number - 1, 0))
            self.groups, self.cells = groups_before(number)
        self.number = number
        if self.takes_notes:
            self.moved.append(moved.unflatten(0, lead))
        of_blocks = torch.arange(number + 1, device=key.device).repeat_interleave(pages.shape[2])
        cell = found(pages.flatten(1, 2), of_blocks, setting.selection.size)
        return (counts, far_key, far_value), cell.unflatten(1, pages.shape[1:3])

    def _decide(self, query: Tensor, real: Tensor, key: Tensor, number: int) -> Tensor:
        """Decides what joins what, for the tokens `[N, G, l, d]`, `[N, l]` and `[N, l, d]` of `number` sections."""
        setting, (heads, groups, _, width) = self.setting, query.shape
        rows = query.reshape(heads, groups, number, setting.block, width).transpose(1, 2).flatten(2, 3).float()
        asks = (real > 0).view(heads, number, setting.block).repeat(1, 1, groups)
        asking, _ = evenly_spaced(rows, asks, setting.features.num_queries)
        along = lines(width, rows).t()
        decided: Tensor = triton_module("deciding").decide(
            setting.scale * asking, metric_of(rows, asks), key, real, along, setting.number
        )
        return decided


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

    def means(self, tokens: tuple[Tensor, Tensor, Tensor], counts: Tensor, first: int) -> Far:
        """Makes what sections see again.

        Args:
            tokens: counts, keys and values, `[N, S]` and `[N, S, w]`.
            counts: of the groups that each section sees, `[N, F, M]`.
            first: how many sections there are before these.
        """
        far = _room(tokens, counts.shape[1], counts.shape[2])
        rows = torch.cat(tokens[1:], -1).to(counts.dtype)
        sums = rows[:, : self.past]
        for number in range(first + counts.shape[1]):
            if number >= first:
                own = counts[:, number - first, : sums.shape[1]]
                _see(far, number - first, own, *sums.split([part.shape[2] for part in tokens[1:]], -1))
            if number < len(self.moved):
                sums, moved = torch.cat([sums, rows[:, self._tokens(number)]], 1), self.moved[number]
                if moved is not None:
                    (sums,) = sums_of(moved, self.number, sums)
        return far

    def of_tokens(self, of_means: tuple[Tensor, Tensor], counts: Tensor, first: int, length: int) -> Tensor:
        """Computes the gradient of keys and values side by side, `[N, S, d + dv]`, from those of `means`."""
        of_sums = torch.cat(of_means, -1).to(counts.dtype).div_(counts.clamp(min=1).unsqueeze(-1))
        found = of_sums.new_zeros(len(of_sums), length, of_sums.shape[3])
        later: Tensor | None = None  # gradient of the sums after a section
        for number in reversed(range(first + counts.shape[1])):
            size = min(self.number, self.past + number * self.block) if number else self.past
            own = of_sums[:, number - first, :size] if number >= first else of_sums.new_zeros(1, size, 1)
            if later is None:
                later = own
                continue
            moved = self.moved[number]
            if moved is not None:  # tokens that do not count have the place after the last group
                later = pad(later, (0, 0, 0, 1)).gather(1, moved.unsqueeze(-1).expand(-1, -1, later.shape[2]))
            found[:, self._tokens(number)] = later[:, size:]
            later = later[:, :size] + own
        if later is not None:
            found[:, : self.past] = later
        return found

    def _tokens(self, number: int) -> slice:
        """Gives the places of the tokens of a section."""
        return slice(self.past + number * self.block, self.past + (number + 1) * self.block)


@dataclass(frozen=True)
class JoinsAtOnce(Joins):
    """`Joins` by kernels for a GPU."""

    def means(self, tokens: tuple[Tensor, Tensor, Tensor], counts: Tensor, first: int) -> Far:
        """Makes what all sections see again; see `Joins.means`."""
        kernels, moved, sections = triton_module("joining"), self._decided, counts.shape[1]
        real, *rows = (tensor[:, : moved.shape[1] * self.block] for tensor in tokens)
        key, value = (kernels.means(moved, own, real, self.number, sections)[1] for own in rows)
        return counts, key, value

    def of_tokens(self, of_means: tuple[Tensor, Tensor], counts: Tensor, first: int, length: int) -> Tensor:
        """Computes the gradient of keys and values side by side; see `Joins.of_tokens`."""
        of_sums = torch.cat(of_means, -1).to(counts.dtype).div_(counts.clamp(min=1).unsqueeze(-1))
        found = triton_module("joining").of_tokens(self._decided, of_sums, self.number)
        return pad(found, (0, 0, 0, length - found.shape[1]))

    @property
    def _decided(self) -> Tensor:
        """Gives the decisions of all sections but the last, `[N, F - 1, M + T]`."""
        assert self.moved[0] is not None
        return self.moved[0]


def at_once(setting: Setting, tokens: tuple[Tensor, Tensor, Tensor], past: int) -> bool:
    """Tells whether kernels for a GPU take all sections at once: if none comes before them, and no compiler runs.

    They have room for M groups in each section, so there must be more tokens.
    """
    _, key, value = tokens
    fits = past == 0 and type(setting.features).cells is Landmarks.cells and plain(*tokens)
    if not fits or setting.number >= key.shape[1] or pick(setting.selection.kernel, key, value) != "triton":
        return False
    taken: bool = triton_module("deciding").takes(setting.features.num_queries, key.shape[-1])
    return taken


def _room(tokens: Sequence[Tensor], sections: int, most: int) -> Far:
    """Makes room for what sections see, given counts, keys and values of all tokens, `[N, S]` and `[N, S, w]`."""
    counts, key, value = tokens
    lead = (len(counts), sections, max(most, 1))
    return counts.new_zeros(lead), key.new_zeros(*lead, key.shape[2]), value.new_zeros(*lead, value.shape[2])


def _see(far: Far, place: int, counts: Tensor, *sums: Tensor) -> None:
    """Writes what one section sees, given the counts `[N, m]` and sums `[N, m, w]` of the groups."""
    far[0][:, place, : counts.shape[1]] = counts
    for means, own in zip(far[1:], sums, strict=True):
        means[:, place, : counts.shape[1]] = own / counts.clamp(min=1).unsqueeze(-1)
