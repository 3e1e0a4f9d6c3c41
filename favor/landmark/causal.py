"""Causal attention by landmarks of tokens that are all at hand: prefill and training.

A query reads exactly: its own section up to itself, the first keys, what its block chose, and what it chose itself. All
other keys of closed sections stand under one mean a section. A block chooses by the sum of four queries, every 16th,
the last of them its own first one, so that no query depends on a later one, and a cache keeps few queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall
from favor.kernels.chosen import choose, chosen_attention, log_left
from favor.kernels.dispatch import is_exporting
from favor.kernels.exported import first_rows, in_blocks
from favor.kernels.landmarks import section_attention
from favor.kernels.operands import ChosenOperands, SectionOptions

# Measured in docs/papers/landmark_form.md.
SECTION = 256  # tokens
BLOCK = 64  # queries that share a choice
STEP = 16  # every so many queries one votes
SINK = 4  # first keys, exact for all queries
SHARE = 16  # a query chooses one key for itself for so many of its block
PART = 4  # a query searches one coordinate of so many


@dataclass
class Past:
    """Holds what queries read; tables have room for S tokens, whatever lies behind the last one.

    Attributes:
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`.
        far_key, far_value: their sums over each section, `[B, Hk, F, d]` and `[B, Hk, F, dv]`.
        samples: every 16th query, `[B, H, S/16, d]`; there may be one place more, for nothing.
        coordinates: those in which queries search, int64 `[B, H, r]`.
        index: these coordinates of the keys, `[B, H, S, r]`.
    """

    key: Tensor
    value: Tensor
    far_key: Tensor
    far_value: Tensor
    samples: Tensor
    coordinates: Tensor
    index: Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, *, selected: int, scale: float, kernel: str
) -> Tensor:
    """Computes causal attention.

    Args:
        query: `[B, H, L, d]`, padding at the end.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, padding at the end.
        past: how many keys come before the first query, int64 `[B]`; read only if L is less than S.
        selected: K, keys that a block chooses.
        scale: of the logits.
        kernel: "auto", "torch" or "triton".

    Returns:
        `[B, H, L, dv]`.
    """
    is_whole = query.shape[2] == key.shape[2]
    past = torch.zeros_like(past) if is_whole else past
    return read_past(past_of(query, key, value, past, is_whole), query, past, is_whole, selected, scale, kernel)


def options_of(call: AttentionCall) -> SectionOptions:
    """Gives the numbers of a call as kernels of whole landmarks take them."""
    numbers = {"section": SECTION, "block": BLOCK, "step": STEP, "sink": SINK, "share": SHARE, "part": PART}
    return SectionOptions(selected=call.selected_keys, scale=call.scale, **numbers)


def fused(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Past]:
    """Computes attention of whole sequences by one operator, and what later queries read."""
    out, kept, index, far_key, far_value = section_attention(query, key, value, options_of(call), call.kernel)
    return out, Past(key, value, far_key, far_value, query[:, :, ::STEP], kept, index)


def past_of(query: Tensor, key: Tensor, value: Tensor, past: Tensor, is_whole: bool) -> Past:
    """Gathers what queries read of tokens that are all at hand; the arguments are those of `attention`."""
    batch, heads, length, width = query.shape
    slots = (key.shape[2] + STEP - 1) // STEP
    with torch.no_grad():
        if is_whole:
            samples = in_blocks(query, STEP)[..., 0, :] if is_exporting() else query[:, :, ::STEP]
            voting = _first(query, BLOCK, STEP)
        else:
            # A query before those given is not known: the first one given also votes in the place of its block's first.
            place = past.unsqueeze(1) + torch.arange(length, device=key.device)
            slot = torch.where(place % STEP == 0, place // STEP, slots)
            samples = query.new_zeros(batch, heads, slots + 1, width)
            write(samples, slot, query)
            voting = query[:, :, :1]
            write(samples, past.unsqueeze(1) // BLOCK * (BLOCK // STEP), voting)
    return past_with(samples, voting, key, value)


def past_with(samples: Tensor, voting: Tensor, key: Tensor, value: Tensor) -> Past:
    """Gathers what queries read, given the samples, and those that choose coordinates."""
    with torch.no_grad():
        kept = coordinates(voting, _first(key, BLOCK))
        index = indexed(key, kept)
    precision = torch.promote_types(key.dtype, torch.float32)
    far_key, far_value = (in_blocks(tensor, SECTION).sum(3, dtype=precision) for tensor in (key, value))
    return Past(key, value, far_key, far_value, samples, kept, index)


def _first(rows: Tensor, number: int, step: int = 1) -> Tensor:
    if not is_exporting():
        return rows[:, :, :number:step]
    place = torch.arange(0, number, step, device=rows.device)  # a slice would ask a tracer if there are as many
    return rows.index_select(2, place.clamp(max=rows.shape[2] - 1))


def coordinates(samples: Tensor, key: Tensor) -> Tensor:
    """Finds the coordinates that vary most in the logits, `[B, H, r]`, of samples `[B, H, n, d]`, keys `[B, Hk, m, d]`.

    By hand as good as the best directions, and without a decomposition (docs/papers/landmark_form.md).
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    of_query, of_key = samples.to(precision).square().mean(2), key.to(precision).var(2, correction=0)
    weight = of_query.unflatten(1, (key.shape[1], -1)) * of_key.unsqueeze(2)
    return weight.flatten(1, 2).topk(max(key.shape[3] // PART, 1)).indices.sort().values


def indexed(key: Tensor, kept: Tensor) -> Tensor:
    """Gives coordinates `[B, H, r]` of keys `[B, Hk, S, d]`: `[B, H, S, r]`."""
    batch, heads, rank = kept.shape
    index = kept.view(batch, key.shape[1], -1).unsqueeze(2).expand(-1, -1, key.shape[2], -1)
    found = key.gather(3, index).unflatten(3, (-1, rank))
    return found.transpose(2, 3).reshape(batch, heads, key.shape[2], rank)


def write(table: Tensor, place: Tensor, rows: Tensor) -> None:
    """Writes rows `[B, H, L, w]` into a table `[B, H, S, w]` at places `[B, L]`."""
    table.scatter_(2, place[:, None, :, None].expand(-1, *rows.shape[1:2], -1, rows.shape[3]), rows.to(table.dtype))


def read_past(
    known: Past, query: Tensor, past: Tensor, is_whole: bool, selected: int, scale: float, kernel: str
) -> Tensor:
    """Attends with queries `[B, H, L, d]` behind `past` `[B]` tokens, in blocks that begin at multiples of 64."""
    batch, heads, length, width = query.shape
    if is_whole:
        rows, start = in_blocks(query, BLOCK), past
    else:
        start = past // BLOCK * BLOCK
        number = -(-(length + BLOCK - 1) // BLOCK) * BLOCK
        source = start.unsqueeze(1) + torch.arange(number, device=query.device) - past.unsqueeze(1)
        source = source.clamp(0, length - 1)[:, None, :, None].expand(-1, heads, -1, width)
        rows = query.gather(2, source).unflatten(2, (-1, BLOCK))
    blocks = rows.flatten(0, 1)  # [N, Z, 64, d]
    place = start.unsqueeze(1) + torch.arange(blocks.shape[1], device=query.device) * BLOCK  # [B, Z]
    place = place.clamp(max=known.key.shape[2] - 1)  # the last block may be behind all
    seen = place // SECTION * SECTION
    shared = votes(known.samples, known.key, place, per_head(seen, heads), selected, kernel)
    out = read_blocks(known, blocks, start, seen, shared, scale, kernel)
    out = out.flatten(1, 2).unflatten(0, (batch, heads))
    if is_whole:
        return first_rows(out, length)
    place = (past - start).unsqueeze(1) + torch.arange(length, device=query.device)
    return out.gather(2, place[:, None, :, None].expand(-1, heads, -1, out.shape[3]))


def per_head(numbers: Tensor, heads: int) -> Tensor:
    """Repeats numbers `[B, ...]` for all heads, int32 `[B H, ...]`."""
    return numbers.to(torch.int32).repeat_interleave(heads, 0)


@torch.no_grad()
def votes(samples: Tensor, key: Tensor, place: Tensor, seen: Tensor, selected: int, kernel: str) -> Tensor:
    """Chooses keys for blocks that begin at places `[B, Z]`, by four samples; the first keys too, int32 `[N, Z, K]`.

    Samples and keys are those of `Past`; a block sees the first `seen` keys, int32 `[N, Z]`. With fewer than K keys
    there is one place for each.
    """
    every = BLOCK // STEP
    selected = selected if is_exporting() else min(selected, key.shape[2])
    heads = samples.shape[1]
    slot = place.unsqueeze(-1) // STEP - torch.arange(every, device=place.device)
    there = (slot >= 0) & (slot < samples.shape[2])
    index = slot.clamp(0, samples.shape[2] - 1).flatten(1)[:, None, :, None].expand(-1, heads, -1, samples.shape[3])
    rows = samples.gather(2, index).unflatten(2, (place.shape[1], every))
    voters = (rows * there[:, None, :, :, None].to(rows.dtype)).sum(3, keepdim=True).flatten(0, 1)
    shared = choose(voters, key.flatten(0, 1), seen, selected, kernel=kernel).squeeze(2)
    sink = torch.arange(min(SINK, selected), device=place.device, dtype=torch.int32)
    return torch.cat([torch.where(seen.unsqueeze(-1) > sink, sink, -1), shared[..., sink.shape[0] :]], 2)


def read_blocks(
    known: Past, blocks: Tensor, start: Tensor, seen: Tensor, shared: Tensor, scale: float, kernel: str
) -> Tensor:
    """Attends with blocks to what they choose, their own sections and the means of all earlier ones, `[N, Z, R, dv]`.

    Blocks are `[N, Z, R, d]`, with their first query at place `start` `[B]`; they see `seen` `[B, Z]` keys in closed
    sections before them, and chose `shared`, int32 `[N, Z, K]`.
    """
    heads, sections = known.samples.shape[1], known.far_key.shape[2]
    limit = per_head(seen, heads)
    with torch.no_grad():
        kept = known.coordinates.flatten(0, 1)[:, None, None].expand(*blocks.shape[:3], -1)
        index = known.index.flatten(0, 1)
        own = choose(blocks.gather(3, kept), index, limit, shared.shape[2] // SHARE, taken=shared, kernel=kernel)
    far_key, far_value = ((t / SECTION).to(blocks.dtype).flatten(0, 1) for t in (known.far_key, known.far_value))
    run, span = torch.ones_like(limit[:, 0]), torch.full_like(limit[:, 0], SECTION)
    given = ChosenOperands(
        query=blocks,
        key=known.key.flatten(0, 1),
        value=known.value.flatten(0, 1),
        shared=shared,
        own=own,
        seen=limit,
        far_key=far_key,
        far_value=far_value,
        far_log=log_left(shared, limit, run, span, sections, known.far_key.dtype),
        first=per_head(start, heads),
        run=run,
        section=SECTION,
        most=shared.shape[2],
        scale=scale,
    )
    return chosen_attention(given, kernel)
