"""Causal attention through landmarks with selected keys, of whole sequences.

A section of tokens is exact, as in `favor.landmark.causal`. The queries of a block inside it choose pages of earlier
sections one after another, see `favor.landmark.growth`, and see the other earlier keys through groups.

The forward pass takes a few sections at a time. It notes which groups it joined and which pages it chose. From these
notes the backward pass makes the means of the groups again, for a few heads at a time, so that neither pass holds the
groups of all sections and heads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels import StreamState
from favor.kernels.operands import SelectedOperands
from favor.kernels.selected import selected_backward, selected_forward
from favor.landmark.causal import Groups, Pieces, Tokens, checkpointed, cut
from favor.landmark.growth import choose_growing
from favor.landmark.joining import Joined, JoinedAtOnce, Joins, JoinsAtOnce, at_once
from favor.landmark.kept import Kept, Setting, attend_next, before, indexed, numbered
from favor.landmark.pages import Pages, filled

# On a CPU: parts of the sections forward, and of the heads backward, one at a time. A GPU wants few launches.
SHARES, _SHARES_OF_HEADS = 16, 8


def attention(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, counts: Tensor, state: StreamState | None
) -> Tensor:
    """Attends from each token to its own section up to itself, to chosen earlier keys and to groups of the others.

    Args:
        setting: options of the sequence, a `Setting`.
        query: `[B, Hk, G, L, d]`.
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`, S >= L; hidden ones zeros, and at the end if S is L.
        counts: 1 for keys that count and 0 for others, `[B, Hk, S]`.
        state: what earlier tokens left, changed in place; it keeps all keys. Only the first piece gets gradients.

    Returns:
        `[B, Hk, G, L, dv]`.

    Raises:
        ValueError: if the state was begun with other options or another batch.
    """
    if state is not None and state.memory is not None:
        return attend_next(setting, (query, counts, key, value), state)
    past = key.shape[2] - query.shape[3]
    if state is not None and query.shape[3] < setting.block:  # the only section is not complete, and is exact
        groups, *_, rest = cut((query.detach(), counts, key.detach(), value.detach()), setting.block, state)
        grouped = (groups, numbered(counts[:, :, :0], 0))
        _leave(setting, state, 0, (query, key, value), (grouped, grouped), rest)
        return checkpointed(query, groups, (query, counts, key, value), setting.scale)
    missing = -past % setting.selection.size
    if missing:  # a page ends where the first section begins
        key, value = (pad(tensor, (0, 0, missing, 0)) for tensor in (key, value))
        counts, past = pad(counts, (missing, 0)), past + missing
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    sections = _Sections(setting, counts, past, state, needs_grad)
    outs = []
    if past:  # to the first section, all earlier keys are groups of their own
        groups, parts, *_ = cut((query, counts, key, value), setting.block, None)
        outs.append(checkpointed(parts[0][0], groups, parts[0], setting.scale))
    if needs_grad:
        outs.append(_Differentiable.apply(query, key, value, sections))
    else:
        outs.append(sections.forward(query, key, value))
    return torch.cat(outs, 3) if past else outs[0]


@dataclass
class _Notes:
    """Decisions of the forward pass in some sections, which the backward pass needs.

    Attributes:
        counts: of the groups that each section saw, `[N, F, M]`.
        pages: the choice of each block, `[N, F, Z, n]`.
        cell: the groups of the chosen keys, `[N, F, Z, nP]`.
        since: the first rows that see the pages, `[N, F, Z, n]`.
        lse: logarithms of the normalisers, `[N, F, Z, R]`.
    """

    counts: Tensor
    pages: Tensor
    cell: Tensor
    since: Tensor
    lse: Tensor

    @property
    def choice(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gives pages, groups and first rows as the kernels take them."""
        return self.pages.long(), self.cell.int(), self.since.long()

    def of_heads(self, heads: slice) -> _Notes:
        """Gives the notes of some heads."""
        return _Notes(*(tensor[heads] for tensor in vars(self).values()))


class _Sections:
    """The sections of a sequence after those that see no groups yet, forward and backward.

    Args:
        setting: options of the sequence, a `Setting`.
        counts: 1 for keys that count and 0 for others, `[B, Hk, S]`.
        past: keys before the first section. If there are any, the first section is left out.
        state: gets what the sequence leaves behind, if it is given.
        takes_notes: whether there will be a backward pass.
    """

    def __init__(
        self, setting: Setting, counts: Tensor, past: int, state: StreamState | None, takes_notes: bool
    ) -> None:
        self.setting, self.counts, self.past, self.state = setting, counts, past, state
        self.first, self.takes_notes = int(past > 0), takes_notes
        self.start = past + self.first * setting.block  # of the first section that is not left out
        self.at_once = False  # whether kernels for a GPU join all sections
        self.moved: list[Tensor | None] = []  # the new group of each group and token, for each section that joined them
        self.notes: list[_Notes] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes the output of all sections but those left out, `[B, Hk, G, l, dv]`; see `attention`."""
        setting, counts, block = self.setting, self.counts, self.setting.block
        groups, parts, joining, rest = cut((query, counts, key, value), block, self.state)
        tokens = counts.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        pages = Pages.of(tokens[1], tokens[0] > 0, setting.selection.size)
        outs = Pieces(query.shape[3] - self.first * block)
        self.at_once = at_once(setting, tokens, self.past)
        kind = JoinedAtOnce if self.at_once else Joined
        every = (query, counts, key, value)
        joined = kind(setting, groups, every, parts, joining, self.takes_notes, self.state is not None)
        self.moved = joined.moved
        together = -(-len(parts) // SHARES) if key.device.type == "cpu" and not self.at_once else len(parts)
        for begin in range(self.first, len(parts), together):
            share = range(begin, min(begin + together, len(parts)))
            joined.up_to(begin)  # while there is little else in memory
            rows = query[:, :, :, begin * block : share.stop * block].flatten(0, 1)
            outs.append(self._share(share, joined, rows, tokens, pages).unflatten(0, query.shape[:2]))
        if self.state is not None:
            joined.up_to(query.shape[3] // block)
            grouped = ((joined.groups, joined.cells), joined.before)
            _leave(setting, self.state, joined.number * block, (query, key, value), grouped, rest)
        return outs.joined()

    def _share(
        self, share: range, joined: Joined, query: Tensor, tokens: tuple[Tensor, Tensor, Tensor], pages: Pages
    ) -> Tensor:
        """Computes the output `[N, G, l, dv]` of some sections; the queries are `[N, G, l, d]`."""
        setting, begin = self.setting, self.past + share.start * self.setting.block
        before = torch.arange(begin, begin + len(share) * setting.block, setting.block, device=query.device)
        rows = self._blocks(query)
        until, growth = before // setting.selection.size, setting.selection.growth
        chosen, since = choose_growing(pages, rows, until, growth, self.at_once)
        far, cell = joined.seen(share, chosen)
        choice = (chosen, cell, since)
        out, lse = selected_forward(*self._operands(rows, tokens, far, choice, begin), setting.selection.kernel)
        if self.takes_notes:
            narrow = torch.int16 if max(setting.number, pages.mean.shape[1]) < 2**15 else torch.int32
            own, cells, since = (tensor.to(narrow) for tensor in choice)
            self.notes.append(_Notes(far[0], own, cells, since, lse))
        return self._tokens(out, *query.shape[1:3])

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        notes: _Notes,
        moved: list[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the gradients of query, key and value, `inputs`, from what `hand_over` gave."""
        query, key, value = inputs
        counts, skipped = self.counts.flatten(0, 1), self.first * self.setting.block
        rows, (grad, out) = query[:, :, :, skipped:].flatten(0, 1), (tensor.flatten(0, 1) for tensor in (grad, out))
        key, value, lead = key.flatten(0, 1), value.flatten(0, 1), query.shape[:2]
        found = [torch.zeros_like(tensor) for tensor in (query.flatten(0, 1), key, value)]
        kind = JoinsAtOnce if self.at_once else Joins
        together = -(-len(rows) // _SHARES_OF_HEADS) if rows.device.type == "cpu" else len(rows)
        for begin in range(0, len(rows), together):
            heads = slice(begin, begin + together)
            tokens, own = (counts[heads], key[heads], value[heads]), notes.of_heads(heads)
            of_heads = [None if each is None else each.flatten(0, 1)[heads] for each in moved]
            joins = kind(of_heads, self.setting.number, self.past, self.setting.block)
            far = joins.means(tokens, own.counts, self.first)
            given = self._operands(self._blocks(rows[heads]), tokens, far, own.choice, self.start)
            of_rows, far_key, far_value, near_key, near_value, of_key, of_value = selected_backward(
                self._blocks(grad[heads]),
                self._blocks(out[heads]),
                own.lse,
                *given,
                self.setting.selection.kernel,
            )
            found[0][heads, :, skipped:] = self._tokens(of_rows, rows.shape[1], rows.shape[2])
            for whole, near in ((of_key, near_key), (of_value, near_value)):
                part = whole[:, self.start :]
                part += near.flatten(1, 2)[:, : part.shape[1]]
            of_both = joins.of_tokens((far_key, far_value), own.counts, self.first, key.shape[1])
            of_tokens = of_both.split((key.shape[2], value.shape[2]), -1)
            found[1][heads] = of_key + of_tokens[0].to(of_key.dtype)
            found[2][heads] = of_value + of_tokens[1].to(of_value.dtype)
        of_query, of_key, of_value = (tensor.unflatten(0, lead) for tensor in found)
        return of_query, of_key, of_value

    def _blocks(self, rows: Tensor) -> Tensor:
        """Cuts rows `[N, G, l, w]`, from the begin of a section on, into `[N, F, Z, R, w]`."""
        sections = filled(rows, self.setting.block).unflatten(2, (-1, self.setting.block))
        return self.setting.selection.blocks(sections).transpose(1, 2).flatten(2, 3)

    def _tokens(self, rows: Tensor, groups: int, length: int) -> Tensor:
        """Puts rows `[N, F, Z, R, w]` together to `[N, G, l, w]`."""
        own = rows.unflatten(2, (groups, -1)).flatten(3, 4)[:, :, :, : self.setting.block]
        return own.transpose(1, 2).flatten(2, 3)[:, :, :length]

    def _operands(
        self,
        rows: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor],
        far: tuple[Tensor, Tensor, Tensor],
        choice: tuple[Tensor, Tensor, Tensor],
        start: int,
    ) -> SelectedOperands:
        """Gives the operands for queries `[N, F, Z, R, d]` of sections that begin at key `start`."""
        block, (counts, key, value) = self.setting.block, tokens
        near = (
            filled(own[:, start : start + rows.shape[1] * block], block) for own in (counts.unsqueeze(-1), *tokens[1:])
        )
        near_counts, near_key, near_value = (own.unflatten(1, (-1, block)) for own in near)
        return SelectedOperands(
            query=rows,
            counts=far[0],
            far_key=far[1],
            far_value=far[2],
            near_counts=near_counts.squeeze(-1),
            near_key=near_key,
            near_value=near_value,
            key=key,
            value=value,
            pages=choice[0],
            cell=choice[1],
            since=choice[2],
            page_size=self.setting.selection.size,
            per_head=-(-block // self.setting.selection.rows),
            first=0,
            scale=self.setting.scale,
        )

    def hand_over(self) -> tuple[_Notes, list[Tensor | None]]:
        """Gives the notes of all sections in one, and which groups were joined, and keeps them no longer."""
        most = self.notes[-1].counts.shape[2]
        for notes in self.notes:
            notes.counts = pad(notes.counts, (0, most - notes.counts.shape[2]))
        every = [torch.cat(own, 1) for own in zip(*(vars(notes).values() for notes in self.notes), strict=True)]
        moved, self.notes, self.moved = self.moved, [], []
        return _Notes(*every), moved


@torch.no_grad()
def _leave(
    setting: Setting,
    state: StreamState,
    complete: int,
    tokens: tuple[Tensor, Tensor, Tensor],
    grouped: tuple[tuple[Groups, Tensor], tuple[Groups, Tensor]],
    rest: Tokens,
) -> None:
    """Writes what the first piece of a sequence leaves behind into its state.

    Args:
        setting: options of the sequence.
        state: changed in place.
        complete: number of tokens in complete sections.
        tokens: query, key and value.
        grouped: groups of complete sections, and the group of each token in them; the same without the last section.
        rest: tokens of the incomplete section.
    """
    query, (key, value) = tokens[0], (tensor[:, :, :complete].contiguous() for tensor in tokens[1:])
    groups, cells = grouped[0]
    nothing = cells.new_zeros(*query.shape[:3], 0)
    begin = complete if state.is_ragged else max(complete - setting.block, 0)
    kept = Kept(
        counts=groups.counts,
        key=groups.key,
        value=groups.value,
        tokens_key=key,
        tokens_value=value,
        cells=cells,
        page_mean=key[:, :, :0],
        page_there=cells[:, :, :0] > 0,
        chosen=nothing,
        since=nothing,
        **before(*grouped[1], query[:, :, :, begin:complete].contiguous()),
    )
    state.memory = indexed(setting.selection, kept)
    state.block = tuple(tensor.detach().clone() for tensor in rest)


class _Differentiable(torch.autograd.Function):
    """`_Sections.forward` and `_Sections.backward`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sections: _Sections) -> Tensor:
        out = sections.forward(query, key, value)
        notes, moved = sections.hand_over()
        # All of it is freed after the backward pass, as what is kept on `ctx` is not.
        ctx.save_for_backward(query, key, value, out, *vars(notes).values(), *moved)
        ctx.sections = sections
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        notes, moved = _Notes(*kept[: len(fields(_Notes))]), kept[len(fields(_Notes)) :]
        return (*ctx.sections.backward(grad, (query, key, value), out, notes, moved), None)
