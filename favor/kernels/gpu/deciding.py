"""Which rows join which group, section after section, in Triton: one program for each head.

What a section does depends on the one before, so a program goes through the sections. It is
`favor.landmark.grouping.Landmarks.cells` of the groups so far and the tokens of the section. Decisions are as
`favor.kernels.gpu.joining` describes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import LOG2E, absorb, contract, finite, padded_width, power_of_two
from favor.kernels.gpu.joining import count, load, take_in, tile

_WARPS = 8
_MOST_NUMBERS = 2**14  # of the queries whose attention is looked at: one program holds them all


@triton.jit
def _received(
    asking, sums, sizes, key, joins, share, along, reach, lines, groups, tokens, factor, queries,
    width: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    room,
):  # fmt: skip
    """Writes the attention that each row receives, its coordinates along some lines, and how far equal rows lie."""
    columns, row = tl.arange(0, WIDTH), tl.arange(0, QUERIES)
    asks = row < queries
    q = tl.load(
        asking + row[:, None] * width + columns[None, :], mask=asks[:, None] & (columns < width)[None, :], other=0.0
    )
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for turn in range(2):
        for begin in range(0, groups + tokens, TILE):
            place, inside, counts, r = load(begin, sums, sizes, key, joins, groups, tokens, width, columns, TILE)
            mean = r / tl.maximum(counts, 1.0)[:, None]
            bias = tl.where(counts > 0, tl.log2(tl.maximum(counts, 1.0)), float("-inf"))
            logits = contract(q, mean) * factor + bias[None, :]
            if turn == 0:
                top, total, _, _ = absorb(logits, top, total)
                norm = tl.zeros([TILE], tl.float32)
                for line in tl.static_range(LINES):
                    direction = tl.load(lines + line * width + columns, mask=columns < width, other=0.0)
                    coordinate = tl.sum(mean * direction[None, :], axis=1)
                    tl.store(along + line * room + place, coordinate, mask=inside)
                    norm += coordinate * coordinate
                allowed = (16.0 + counts) * 1.1920928955078125e-07 * tl.sqrt(norm)
                tl.store(reach + place, allowed, mask=inside)
            else:
                weights = tl.exp2(logits - finite(top)[:, None]) / tl.where(total > 0, total, 1.0)[:, None]
                weights = tl.where(asks[:, None], weights, 0.0)
                tl.store(share + place, tl.sum(weights, axis=0) / queries, mask=inside)


@triton.jit
def _find_equal(
    along, reach, sizes, joins, first, groups, tokens, LINES: tl.constexpr, TILE: tl.constexpr, room
):  # fmt: skip
    """Writes the place of the first row equal to each. Returns how many rows equal an earlier one.

    All pairs are compared. `favor.landmark.equal.first_equal` compares neighbours on a sorted line: a row between two
    that are hardly equal may join these there, and only itself to the first of them here.
    """
    copies = 0
    for begin in range(0, groups + tokens, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < groups + tokens
        there = count(place, sizes, joins, groups, tokens) > 0
        allowed = tl.load(reach + place, mask=inside, other=0.0)
        found = place
        for start in range(0, begin + TILE, TILE):
            other = start + tl.arange(0, TILE)
            others_there = count(other, sizes, joins, groups, tokens) > 0
            apart = tl.zeros([TILE, TILE], tl.float32)
            for line in tl.static_range(LINES):
                mine = tl.load(along + line * room + place, mask=inside, other=0.0)
                theirs = tl.load(along + line * room + other, mask=other < groups + tokens, other=0.0)
                difference = mine[:, None] - theirs[None, :]
                apart += difference * difference
            limit = tl.load(reach + other, mask=other < groups + tokens, other=0.0)
            equal = tl.sqrt(apart) <= tl.maximum(allowed[:, None], limit[None, :])
            equal = equal & there[:, None] & others_there[None, :] & (other[None, :] < place[:, None])
            found = tl.minimum(found, tl.min(tl.where(equal, other[None, :], place[:, None]), axis=1))
        tl.store(first + place, found, mask=inside)
        copies += tl.sum((inside & (found < place)).to(tl.int32))
    return copies


@triton.jit
def _find_roots(first, every, TILE: tl.constexpr):
    """Follows each row to the first one in a chain of equal rows; stores on the way change no end of a chain."""
    for begin in range(0, every, TILE):
        place = begin + tl.arange(0, TILE)
        found = tl.load(first + place, mask=place < every, other=0)
        earlier = tl.load(first + found)
        while tl.max(found - earlier, 0) > 0:
            found = earlier
            earlier = tl.load(first + found)
        tl.store(first + place, found, mask=place < every)


@triton.jit
def _score(share, first, sizes, joins, score, groups, tokens, copies, TILE: tl.constexpr):
    """Writes the attention that each row and its copies receive; -1 for copies and -2 for what does not count."""
    for begin in range(0, groups + tokens, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < groups + tokens
        there = count(place, sizes, joins, groups, tokens) > 0
        own = tl.load(share + place, mask=inside, other=0.0)
        if copies > 0:
            own = tl.zeros([TILE], tl.float32)
            for start in range(0, groups + tokens, TILE):
                other = start + tl.arange(0, TILE)
                theirs = tl.load(first + other, mask=other < groups + tokens, other=-1)
                received = tl.load(share + other, mask=other < groups + tokens, other=0.0)
                own += tl.sum(tl.where(theirs[None, :] == place[:, None], received[None, :], 0.0), axis=1)
            own = tl.where(tl.load(first + place, mask=inside, other=0) < place, -1.0, own)
        tl.store(score + place, tl.where(there, own, -2.0), mask=inside)


@triton.jit
def _choose(score, rank, number, groups, tokens, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Chooses landmarks: half by score, the others evenly spaced in the rest. `rank` is written and read.

    Returns:
        places `[ROOM]`, the number of each as a landmark (-1 for others), and how many landmarks there are.
    """
    every = groups + tokens
    for begin in range(0, every, TILE):
        place = begin + tl.arange(0, TILE)
        mine = tl.load(score + place, mask=place < every, other=-3.0)
        above = tl.zeros([TILE], tl.int32)
        for start in range(0, every, TILE):
            other = start + tl.arange(0, TILE)
            theirs = tl.load(score + other, mask=other < every, other=-3.0)
            is_above = (theirs[None, :] > mine[:, None]) | (
                (theirs[None, :] == mine[:, None]) & (other[None, :] < place[:, None])
            )
            above += tl.sum(is_above.to(tl.int32), axis=1)
        tl.store(rank + place, above, mask=place < every)
    tl.debug_barrier()
    place = tl.arange(0, ROOM)
    scores = tl.load(score + place, mask=place < every, other=-3.0)
    heavy = (tl.load(rank + place, mask=place < every, other=every) < number // 2) & (scores >= -1.0)
    rest, copy = (scores >= 0.0) & ~heavy, (scores == -1.0) & ~heavy
    spaced, left = number - number // 2, tl.sum(rest.to(tl.int32))
    # The rest in order, then copies.
    turn = tl.where(rest, tl.cumsum(rest.to(tl.int32), 0) - 1, left + tl.cumsum(copy.to(tl.int32), 0) - 1)
    if left < spaced:
        taken = (rest | copy) & (turn < spaced)
    else:
        # The smallest s with (2 s + 1) left / (2 spaced) >= turn: is it one of the spaced ones, and is that its turn?
        step = (tl.maximum(2 * spaced * turn - left, 0) + 2 * left - 1) // (2 * left)
        taken = rest & (step < spaced) & ((2 * step + 1) * left // (2 * spaced) == turn)
    chosen = heavy | taken
    own = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, -1)
    return place, own, tl.sum(chosen.to(tl.int32))


@triton.jit
def _direct(
    chosen, metric, direction, half, number, landmarks,
    width: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes A c for each landmark c and the metric A, and c'A c / 2; infinity if there are fewer landmarks."""
    columns = tl.arange(0, WIDTH)
    for begin in range(0, number, TILE):
        own = begin + tl.arange(0, TILE)
        seen = own < landmarks
        c = tl.load(
            chosen + own[:, None] * width + columns[None, :], mask=seen[:, None] & (columns < width)[None, :], other=0.0
        )
        square = tl.zeros([TILE], tl.float32)
        for start in range(0, WIDTH, CHUNK):
            part = start + tl.arange(0, CHUNK)
            inside = (columns < width)[:, None] & (part < width)[None, :]
            a = tl.load(metric + columns[:, None] * width + part[None, :], mask=inside, other=0.0)
            along = tl.dot(c, a, input_precision="tf32x3")
            there = own[:, None] * width + part[None, :]
            mask = seen[:, None] & (part < width)[None, :]
            square += tl.sum(along * tl.load(chosen + there, mask=mask, other=0.0), axis=1)
            tl.store(direction + there, along, mask=mask)
        tl.store(half + own, tl.where(seen, square / 2, float("inf")), mask=own < number)


@triton.jit
def _assign(
    moved, own, first, sums, sizes, key, joins, direction, half, number, landmarks, groups, tokens, copies,
    width: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the nearest landmark of each row, and those of copies: what the first of them has."""
    columns = tl.arange(0, WIDTH)
    for begin in range(0, groups + tokens, TILE):
        place, inside, counts, r = load(begin, sums, sizes, key, joins, groups, tokens, width, columns, TILE)
        mean = r / tl.maximum(counts, 1.0)[:, None]
        best = tl.full([TILE], float("-inf"), tl.float32)
        cell = tl.zeros([TILE], tl.int32)
        for start in range(0, landmarks, TILE):
            other = start + tl.arange(0, TILE)
            mask = (other < landmarks)[:, None] & (columns < width)[None, :]
            d = tl.load(direction + other[:, None] * width + columns[None, :], mask=mask, other=0.0)
            score = contract(mean, d) - tl.load(half + other, mask=other < landmarks, other=float("inf"))[None, :]
            largest, index = tl.max(score, axis=1, return_indices=True)
            cell = tl.where(largest > best, start + index, cell)
            best = tl.maximum(best, largest)
        mine = tl.load(own + place, mask=inside, other=-1)
        cell = tl.where(mine >= 0, mine, cell)
        tl.store(moved + place, tl.where(counts > 0, cell, number), mask=inside)
    tl.debug_barrier()
    if copies > 0:
        for begin in range(0, groups + tokens, TILE):
            place = begin + tl.arange(0, TILE)
            inside = place < groups + tokens
            earliest = tl.load(first + place, mask=inside, other=0)
            is_copy = inside & (earliest < place) & (tl.load(own + place, mask=inside, other=0) < 0)
            cell = tl.load(moved + earliest, mask=is_copy, other=0)
            tl.store(moved + place, cell, mask=is_copy)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["sections", "number", "tokens", "queries"])
def _decide(
    asking, metrics, key, joins, lines, moved, sums, sizes, chosen, direction, floats, places,
    sections, number, tokens, queries,
    width: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Goes through the sections of one head. Of `sums` and `sizes` there are two, which take turns."""
    head = tl.program_id(0).to(tl.int64)
    key += head * sections * tokens * width
    joins += head * sections * tokens
    moved += head * sections * (number + tokens)
    asking += head * sections * queries * width
    metrics += head * sections * width * width
    sums += head * 2 * number * width
    sizes += head * 2 * number
    chosen += head * number * width
    direction += head * number * width
    floats += head * (LINES + 4) * ROOM
    places += head * 3 * ROOM
    share, reach, score, half, along = floats, floats + ROOM, floats + 2 * ROOM, floats + 3 * ROOM, floats + 4 * ROOM
    first, rank, own = places, places + ROOM, places + 2 * ROOM
    columns = tl.arange(0, WIDTH)
    groups = 0
    for section in range(sections):
        turn = (section % 2) * number
        old_sums, old_sizes = sums + turn * width, sizes + turn
        new_sums, new_sizes = sums + (number - turn) * width, sizes + (number - turn)
        if groups + tokens > number:
            _received(
                asking, old_sums, old_sizes, key, joins, share, along, reach, lines, groups, tokens, LOG2E, queries,
                width, WIDTH, QUERIES, LINES, TILE, ROOM,
            )  # fmt: skip
            tl.debug_barrier()
            copies = _find_equal(along, reach, old_sizes, joins, first, groups, tokens, LINES, TILE, ROOM)
            tl.debug_barrier()
            if copies > 0:
                _find_roots(first, groups + tokens, TILE)
                tl.debug_barrier()
            _score(share, first, old_sizes, joins, score, groups, tokens, copies, TILE)
            tl.debug_barrier()
            every, as_landmark, landmarks = _choose(score, rank, number, groups, tokens, TILE, ROOM)
            tl.store(own + every, as_landmark, mask=every < groups + tokens)
            tl.debug_barrier()
            for begin in range(0, groups + tokens, TILE):
                place, inside, counts, r = load(
                    begin, old_sums, old_sizes, key, joins, groups, tokens, width, columns, TILE
                )
                mean = r / tl.maximum(counts, 1.0)[:, None]
                mine = tl.load(own + place, mask=inside, other=-1)
                there = (mine >= 0)[:, None] & (columns < width)[None, :]
                tl.store(chosen + mine[:, None] * width + columns[None, :], mean, mask=there)
            tl.debug_barrier()
            _direct(chosen, metrics, direction, half, number, landmarks, width, WIDTH, CHUNK, TILE)
            tl.debug_barrier()
            _assign(
                moved, own, first, old_sums, old_sizes, key, joins, direction, half, number, landmarks, groups, tokens,
                copies, width, WIDTH, TILE,
            )  # fmt: skip
        else:
            every = tl.arange(0, ROOM)
            tl.store(moved + every, every, mask=every < groups + tokens)
            tl.debug_barrier()
        after = tl.minimum(groups + tokens, number)
        take_in(
            moved, old_sums, old_sizes, key, joins, new_sums, new_sizes, groups, tokens, after, width, columns, TILE
        )  # fmt: skip
        tl.debug_barrier()
        groups = after
        key += tokens * width
        joins += tokens
        moved += number + tokens
        asking += queries * width
        metrics += width * width


def decide(asking: Tensor, metric: Tensor, key: Tensor, joins: Tensor, lines: Tensor, number: int) -> Tensor:
    """Decides which groups and tokens join which group, section after section.

    Args:
        asking: queries of each section whose attention tells which keys matter, `[N, J, n, d]` float32, with the scale.
        metric: of each section, `[N, J, d, d]` float32.
        key: `[N, J T, d]`.
        joins: 1 for tokens that count and 0 for others, `[N, J T]` float32.
        lines: along which equal rows are found, `[lines, d]`.
        number: M.

    Returns:
        Decisions, `[N, J, M + T]`.
    """
    heads, sections, queries, width = asking.shape
    tokens = key.shape[1] // max(sections, 1)
    moved = torch.empty(heads, sections, number + tokens, dtype=torch.int32, device=key.device)
    if not moved.numel():
        return moved
    room = power_of_two(number + tokens)
    floats = [metric.new_empty(heads, *shape) for shape in ((2, number, width), (2, number))]
    floats += [metric.new_empty(heads, number, width) for _ in range(2)]
    floats.append(metric.new_empty(heads, len(lines) + 4, room))
    with torch.cuda.device_of(key):
        _decide[(heads,)](
            *(tensor.contiguous() for tensor in (asking, metric, key, joins, lines)),
            *(moved, *floats, moved.new_empty(heads, 3, room)),
            *(sections, number, tokens, queries),
            width=width,
            WIDTH=padded_width(width),
            QUERIES=padded_width(queries),
            LINES=len(lines),
            TILE=tile(),
            CHUNK=16 if width > 128 else min(64, padded_width(width)),
            ROOM=room,
            num_warps=_WARPS,
            num_stages=1,
        )
    return moved


def takes(num_queries: int, width: int) -> bool:
    """Tells whether a program can hold so many queries of this width."""
    return padded_width(num_queries) * padded_width(width) <= _MOST_NUMBERS
