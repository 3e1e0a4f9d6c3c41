"""Causal landmarks with selected keys, piece by piece: a state that keeps all keys and values.

A token reads the groups of earlier sections, the chosen pages of them, and its own section. Whole sequences are in
`favor.landmark.causal_selected`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels import StreamState
from favor.kernels.dispatch import read
from favor.kernels.operands import SelectedOperands
from favor.kernels.selected import selected_attention
from favor.landmark.causal import Groups, Tokens, joined_tokens, length_of, regrouped, split_complete
from favor.landmark.grouping import Landmarks
from favor.landmark.growth import choose_growing, choose_next
from favor.landmark.pages import Pages
from favor.landmark.selected import Selection


@dataclass
class Kept(Groups):
    """Groups of earlier tokens, and these tokens themselves.

    Attributes:
        tokens_key, tokens_value: of complete sections, `[B, Hk, S, d]` and `[B, Hk, S, dv]`.
        cells: their groups, `[B, Hk, S]`; -1 for tokens that do not count.
        page_mean, page_there: their pages, `[B, Hk, p, d]` and `[B, Hk, p]`.
        chosen, since: pages that the block of the last query has chosen, and the first rows that see them,
            `[B, Hk, G, n]`; n is 0 where that is not known.
        last_query: queries of the last complete section, `[B, Hk, G, T, d]`, so that its tokens can be forgotten; T is
            0 where that is not possible.
        before_counts, before_key, before_value, before_cells: the groups before that section, and the group of each
            token in them.
    """

    tokens_key: Tensor
    tokens_value: Tensor
    cells: Tensor
    page_mean: Tensor
    page_there: Tensor
    chosen: Tensor
    since: Tensor
    last_query: Tensor
    before_counts: Tensor
    before_key: Tensor
    before_value: Tensor
    before_cells: Tensor

    @property
    def pages(self) -> Pages:
        """Gives the pages, with all heads in one dimension."""
        return Pages(self.page_mean.flatten(0, 1), self.page_there.flatten(0, 1))


@dataclass(frozen=True)
class Setting:
    """Options of a sequence: the family, how keys are selected, M, the scale and the length of a section."""

    features: Landmarks
    selection: Selection
    number: int
    scale: float
    block: int


def numbered(counts: Tensor, first: int) -> Tensor:
    """Numbers tokens as groups of their own, from `first` on; -1 for tokens that do not count."""
    cells = first + torch.arange(counts.shape[2], device=counts.device).expand(counts.shape)
    return cells.masked_fill(counts == 0, -1)


def grown(setting: Setting, groups: Groups, cells: Tensor, tokens: Tokens) -> tuple[Groups, Tensor, Tensor | None]:
    """Gives the groups with a complete section in them, the group of each token, and what `regrouped` moved where."""
    cells = torch.cat([cells, numbered(tokens[1], groups.counts.shape[2])], 2)
    groups, moved = regrouped(setting.features, groups, tokens, setting.number, setting.scale)
    if moved is not None:
        found = moved.gather(2, cells.clamp(min=0))
        cells = found.masked_fill((cells < 0) | (found == setting.number), -1)
    return groups, cells, moved


def before(groups: Groups, cells: Tensor, last_query: Tensor) -> dict[str, Tensor]:
    """Gives the fields of `Kept` by which the tokens of the last complete section can be forgotten.

    Args:
        groups: before that section.
        cells: the group of each token in them, `[B, Hk, S]`.
        last_query: queries of that section, `[B, Hk, G, T, d]`, T = 0 if its tokens cannot be forgotten.
    """
    found = {"counts": groups.counts, "key": groups.key, "value": groups.value, "cells": cells}
    if not last_query.shape[3]:
        found = {name: tensor[:, :, :0] for name, tensor in found.items()}
    return {"last_query": last_query} | {f"before_{name}": tensor for name, tensor in found.items()}


def indexed(selection: Selection, kept: Kept) -> Kept:
    """Gives the kept tokens with pages over them; if other tokens lie between them, moves the kept ones together."""
    length = kept.tokens_key.shape[2]
    cells = kept.cells[:, :, :length]
    real = cells >= 0
    if not read(real.all(), otherwise=True):
        # Of a batch of different lengths: the tokens that count come first, so that pages are those of each sequence.
        longest = int(real[:, 0].sum(1).max())
        order = (~real[:, 0]).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        place = order[:, None].expand(-1, real.shape[1], -1)
        cells, real = cells.gather(2, place), real.gather(2, place)
        key, value = (
            tensor.gather(2, place.unsqueeze(-1).expand(-1, -1, -1, tensor.shape[-1]))
            for tensor in (kept.tokens_key, kept.tokens_value)
        )
        kept = replace(kept, tokens_key=key, tokens_value=value)
    pages = Pages.of(kept.tokens_key.flatten(0, 1), real.flatten(0, 1), selection.size)
    lead = cells.shape[:2]
    indexed = {"page_mean": pages.mean.unflatten(0, lead), "page_there": pages.there.unflatten(0, lead)}
    return replace(kept, cells=cells, **indexed)


@torch.no_grad()
def attend_next(setting: Setting, fresh: Tokens, state: StreamState) -> Tensor:
    """Attends with tokens that come after those of a state."""
    begun, kept, block = state.block, state.memory, setting.block
    if not isinstance(kept, Kept) or kept.counts.shape[:2] != fresh[1].shape[:2] or length_of(begun) >= block:
        raise ValueError(
            "the state was begun with other options, longer blocks or another batch; begin again with a new "
            "StreamState()."
        )
    outs, start, length = [], 0, fresh[0].shape[3]
    while start < length:
        stop = min(start + block - length_of(begun), length)
        now = (fresh[0][:, :, :, start:stop], *(tensor[:, :, start:stop] for tensor in fresh[1:]))
        tokens = tuple(map(joined_tokens, begun, now)) if begun else tuple(tensor.clone() for tensor in now)
        if stop - start == 1 and kept.chosen.shape[-1] > 0:
            out, chosen, since = _read_one(setting, kept, tokens)
        else:
            out, chosen, since = _read_many(setting, kept, tokens, stop - start)
        outs.append(out)
        kept, begun = replace(kept, chosen=chosen, since=since), tokens
        if length_of(tokens) == block:
            done, begun = split_complete(tokens, block) if state.is_ragged else (tokens, ())
            kept = _extended(setting, kept, done, state.is_ragged)
        start = stop
    state.memory, state.block = kept, begun
    return torch.cat(outs, 3)


def _extended(setting: Setting, kept: Kept, tokens: Tokens, is_ragged: bool) -> Kept:
    """Gives the kept tokens and one more section."""
    groups, cells, _ = grown(setting, kept, kept.cells, tokens)
    earlier = before(kept, kept.cells, tokens[0][:, :, :, :0] if is_ragged else tokens[0])
    key, value = torch.cat([kept.tokens_key, tokens[2]], 2), torch.cat([kept.tokens_value, tokens[3]], 2)
    grouped = {"counts": groups.counts, "key": groups.key, "value": groups.value}
    longer = replace(kept, **grouped, **earlier, tokens_key=key, tokens_value=value, cells=cells)
    return indexed(setting.selection, longer)


def _operands(
    setting: Setting, kept: Kept, query: Tensor, near: tuple[Tensor, Tensor, Tensor], chosen: tuple[Tensor, Tensor]
) -> SelectedOperands:
    """Makes the operands for blocks of queries `[N, Z, R, d]` in one section, which all see the near keys."""
    counts, key, value = (tensor.flatten(0, 1).unsqueeze(1) for tensor in near)
    if not kept.cells.shape[2]:  # there is no page yet
        chosen = (chosen[0][..., :0], chosen[1][..., :0])
    cell = setting.selection.cells(kept.cells.flatten(0, 1), chosen[0])
    return SelectedOperands(
        query=query.unsqueeze(1),
        counts=kept.counts.flatten(0, 1).unsqueeze(1),
        far_key=kept.mean(kept.key, key.dtype).flatten(0, 1).unsqueeze(1),
        far_value=kept.mean(kept.value, key.dtype).flatten(0, 1).unsqueeze(1),
        near_counts=counts,
        near_key=key,
        near_value=value,
        key=kept.tokens_key.flatten(0, 1).to(key.dtype),
        value=kept.tokens_value.flatten(0, 1).to(key.dtype),
        pages=chosen[0].unsqueeze(1),
        cell=cell.unsqueeze(1),
        since=chosen[1].unsqueeze(1),
        page_size=setting.selection.size,
        per_head=1,
        first=-1,
        scale=setting.scale,
    )


def _read_one(setting: Setting, kept: Kept, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the output of one more token `[B, Hk, G, 1, dv]`, with what its block has chosen so far."""
    query, counts, key, value = tokens
    selection, rows = setting.selection, setting.selection.rows
    now = query[:, :, :, -1]  # [B, Hk, G, d]
    rank = (counts > 0).sum(2) - 1  # [B, Hk]
    row = (rank.clamp(min=0) % rows).flatten().unsqueeze(1).expand(-1, now.shape[2])
    pages = kept.pages
    missing = min(selection.growth.number, max(pages.mean.shape[1], 1)) - kept.chosen.shape[-1]  # there were fewer
    held = pad(kept.chosen, (0, missing)).flatten(0, 1), pad(kept.since, (0, missing), value=rows).flatten(0, 1)
    chosen, since = choose_next(pages, now.flatten(0, 1), row, selection.growth, held, rows)
    there = (counts[:, :, -1] > 0).flatten().view(-1, 1, 1)
    chosen, since = torch.where(there, chosen, held[0]), torch.where(there, since, held[1])
    given = _operands(
        setting, kept, now.flatten(0, 1).unsqueeze(2), (counts, key, value), (chosen, (since >= rows).long())
    )
    out = selected_attention(given, selection.kernel)  # [N, 1, G, 1, dv]
    lead = counts.shape[:2]
    return out.squeeze(1).unflatten(0, lead), chosen.unflatten(0, lead), since.unflatten(0, lead)


def _read_many(setting: Setting, kept: Kept, tokens: Tokens, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the output of the last tokens of a section `[B, Hk, G, l, dv]`, and what the last block has chosen."""
    query, counts, key, value = tokens
    selection, rows, lead = setting.selection, setting.selection.rows, counts.shape[:2]
    real = counts[:, 0] > 0
    # Blocks begin with the first token of the section, in each sequence.
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)

    def moved(tensor: Tensor, dim: int) -> Tensor:
        index = order.view(len(order), *[1] * (dim - 1), -1, *[1] * (tensor.ndim - dim - 1))
        return torch.take_along_dim(tensor, index, dim)

    blocks = selection.blocks(moved(query, 3))  # [B, Hk, G, n, R, d]
    flat = blocks.flatten(0, 1).flatten(1, 2)
    pages = kept.pages
    until = pages.there.sum(1, keepdim=True)
    chosen, since = (own.squeeze(1) for own in choose_growing(pages, flat.unsqueeze(1), until, selection.growth))
    near = (moved(counts, 2), moved(key, 2), moved(value, 2))
    given = _operands(setting, kept, flat, near, (chosen, since))._replace(per_head=blocks.shape[3], first=0)
    out = selected_attention(given, selection.kernel).squeeze(1).unflatten(0, lead)
    out = out.unflatten(2, (query.shape[2], -1)).flatten(3, 4)
    place = (real.cumsum(1) - 1).clamp(min=0)[:, -number:].view(len(real), 1, 1, -1, 1)
    last = (real.sum(1) - 1).clamp(min=0).view(-1, 1, 1, 1, 1)

    def of_last(tensor: Tensor) -> Tensor:
        own = tensor.unflatten(0, lead).unflatten(2, (query.shape[2], -1))  # [B, Hk, G, n, pages]
        return torch.take_along_dim(own, last // rows, 3).squeeze(3)

    since = of_last(since)
    since = since.masked_fill(since > (last % rows).squeeze(-1), rows)
    return torch.take_along_dim(out, place, 3), of_last(chosen), since


def crop(state: StreamState, tokens: int) -> bool:
    """Forgets the last tokens of a state that keeps all keys: of the incomplete section, and of the one before it.

    In a batch of different lengths the last section has joined the groups for good, and each sequence must have as many
    tokens that have not joined them.

    Args:
        state: changed in place.
        tokens: how many are forgotten.

    Returns:
        Whether they could be forgotten.
    """
    if not isinstance(state.memory, Kept) or tokens > state.shown:
        return False
    waiting, forgotten = length_of(state.block), tokens
    if tokens > waiting:
        if tokens > waiting + state.memory.last_query.shape[3]:
            return False
        _take_out(state, state.memory)
        tokens, waiting = tokens - waiting, length_of(state.block)
    if state.is_ragged and not bool((state.block[1][:, :, waiting - tokens :] > 0).all()):
        return False
    query, *others = state.block
    left = waiting - tokens
    state.block = (query[:, :, :, :left], *(tensor[:, :, :left] for tensor in others)) if left else ()
    nothing = state.memory.chosen[..., :0]
    state.memory = replace(state.memory, chosen=nothing, since=nothing)
    state.shown -= forgotten
    return True


def _take_out(state: StreamState, kept: Kept) -> None:
    """Makes the last complete section the incomplete one, instead of the tokens after it."""
    query, length, every = kept.last_query, kept.tokens_key.shape[2], kept.page_mean.shape[2]
    left = length - query.shape[3]
    own = [tensor[:, :, left:] for tensor in (kept.tokens_key, kept.tokens_value)]
    state.block = (query, kept.counts.new_ones(own[0].shape[:3]), *own)
    groups = Groups(kept.before_counts, kept.before_key, kept.before_value)
    state.memory = replace(
        kept,
        counts=groups.counts,
        key=groups.key,
        value=groups.value,
        cells=kept.before_cells,
        tokens_key=kept.tokens_key[:, :, :left],
        tokens_value=kept.tokens_value[:, :, :left],
        page_mean=kept.page_mean[:, :, : every * left // length],
        page_there=kept.page_there[:, :, : every * left // length],
        **before(groups, kept.before_cells, query[:, :, :, :0]),
    )
