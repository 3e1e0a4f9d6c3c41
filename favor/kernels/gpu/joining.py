"""Groups of keys that take in one section of tokens after another, in Triton: no launch for each section.

`decide` finds which rows join which group, with one program for each head, which goes through the sections: what a
section does depends on the one before. It is `favor.landmark.grouping.Landmarks.cells` of the groups so far and the
tokens of the section. Given its decisions, which are integers, the means of the groups before each section follow
column by column (`means`), so do gradients of tokens from those of means (`of_tokens`), and the group of any token
before any section (`follow`). No sum is atomic: the same inputs give the same bits, and no section sees a later one.

Decisions are `[N, J, M + T]`, for J sections of T tokens. Entry i of a section is the new group of group i; after the
groups, of which there are at most M, come the tokens. It is M for what does not count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LOG2E,
    absorb,
    ceil_divide,
    contract,
    finite,
    interpreted,
    padded_width,
    power_of_two,
)

_WARPS = 8
_COLUMNS = 32  # of a program, where columns do not depend on each other


@triton.jit
def _place(begin, groups, tokens, ROWS: tl.constexpr):
    """Gives places among groups and then tokens of a section, which are groups, and which are tokens."""
    place = begin + tl.arange(0, ROWS)
    return place, place < groups, (place >= groups) & (place < groups + tokens)


@triton.jit
def _counts(sizes, joins, place, is_group, is_token, groups):
    """Loads how many tokens each place stands for, `[ROWS]`."""
    return tl.load(sizes + place, mask=is_group, other=0.0) + tl.load(joins + place - groups, mask=is_token, other=0.0)


@triton.jit
def _rows(sums, rows, place, is_group, is_token, counts, groups, width, columns):
    """Loads sums of groups, and tokens that count, `[ROWS, COLUMNS]` in float32."""
    inside = (columns < width)[None, :]
    old = tl.load(sums + place[:, None] * width + columns[None, :], mask=is_group[:, None] & inside, other=0.0)
    seen = (is_token & (counts > 0))[:, None] & inside
    fresh = tl.load(rows + (place - groups)[:, None] * width + columns[None, :], mask=seen, other=0.0)
    return old + fresh.to(tl.float32)


@triton.jit
def _joined(moved, sums, sizes, rows, joins, begin, groups, tokens, width, columns, TILE: tl.constexpr):
    """Sums rows and counts over what joins the new groups from `begin` on: `[TILE, COLUMNS]` and `[TILE]`."""
    own = begin + tl.arange(0, TILE)
    total = tl.zeros([TILE, columns.shape[0]], tl.float32)
    size = tl.zeros([TILE], tl.float32)
    for first in range(0, groups + tokens, TILE):
        place, is_group, is_token = _place(first, groups, tokens, TILE)
        counts = _counts(sizes, joins, place, is_group, is_token, groups)
        r = _rows(sums, rows, place, is_group, is_token, counts, groups, width, columns)
        cell = tl.load(moved + place, mask=is_group | is_token, other=-1)
        joins_it = tl.where(cell[None, :] == own[:, None], 1.0, 0.0)
        total = tl.dot(joins_it, r, acc=total, input_precision="tf32x3")
        size += tl.sum(joins_it * counts[None, :], axis=1)
    return own, total, size


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
            place, is_group, is_token = _place(begin, groups, tokens, TILE)
            counts = _counts(sizes, joins, place, is_group, is_token, groups)
            r = _rows(sums, key, place, is_group, is_token, counts, groups, width, columns)
            mean = r / tl.maximum(counts, 1.0)[:, None]
            bias = tl.where(counts > 0, tl.log2(tl.maximum(counts, 1.0)), float("-inf"))
            logits = contract(q, mean) * factor + bias[None, :]
            if turn == 0:
                top, total, _, _ = absorb(logits, top, total)
                norm = tl.zeros([TILE], tl.float32)
                for line in tl.static_range(LINES):
                    direction = tl.load(lines + line * width + columns, mask=columns < width, other=0.0)
                    coordinate = tl.sum(mean * direction[None, :], axis=1)
                    tl.store(along + line * room + place, coordinate, mask=is_group | is_token)
                    norm += coordinate * coordinate
                allowed = (16.0 + counts) * 1.1920928955078125e-07 * tl.sqrt(norm)
                tl.store(reach + place, allowed, mask=is_group | is_token)
            else:
                weights = tl.exp2(logits - finite(top)[:, None]) / tl.where(total > 0, total, 1.0)[:, None]
                weights = tl.where(asks[:, None], weights, 0.0)
                tl.store(share + place, tl.sum(weights, axis=0) / queries, mask=is_group | is_token)


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
        place, is_group, is_token = _place(begin, groups, tokens, TILE)
        there = _counts(sizes, joins, place, is_group, is_token, groups) > 0
        inside = is_group | is_token
        allowed = tl.load(reach + place, mask=inside, other=0.0)
        found = place
        for start in range(0, begin + TILE, TILE):
            other, others_group, others_token = _place(start, groups, tokens, TILE)
            others_there = _counts(sizes, joins, other, others_group, others_token, groups) > 0
            apart = tl.zeros([TILE, TILE], tl.float32)
            for line in tl.static_range(LINES):
                mine = tl.load(along + line * room + place, mask=inside, other=0.0)
                theirs = tl.load(along + line * room + other, mask=others_group | others_token, other=0.0)
                difference = mine[:, None] - theirs[None, :]
                apart += difference * difference
            limit = tl.load(reach + other, mask=others_group | others_token, other=0.0)
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
        place, is_group, is_token = _place(begin, groups, tokens, TILE)
        inside = is_group | is_token
        there = _counts(sizes, joins, place, is_group, is_token, groups) > 0
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
        place, is_group, is_token = _place(begin, groups, tokens, TILE)
        counts = _counts(sizes, joins, place, is_group, is_token, groups)
        r = _rows(sums, key, place, is_group, is_token, counts, groups, width, columns)
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
        mine = tl.load(own + place, mask=is_group | is_token, other=-1)
        cell = tl.where(mine >= 0, mine, cell)
        tl.store(moved + place, tl.where(counts > 0, cell, number), mask=is_group | is_token)
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
                place, is_group, is_token = _place(begin, groups, tokens, TILE)
                counts = _counts(old_sizes, joins, place, is_group, is_token, groups)
                r = _rows(old_sums, key, place, is_group, is_token, counts, groups, width, columns)
                mean = r / tl.maximum(counts, 1.0)[:, None]
                mine = tl.load(own + place, mask=is_group | is_token, other=-1)
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
        for begin in range(0, after, TILE):
            mine, total, size = _joined(
                moved, old_sums, old_sizes, key, joins, begin, groups, tokens, width, columns, TILE
            )
            there = (mine < after)[:, None] & (columns < width)[None, :]
            tl.store(new_sums + mine[:, None] * width + columns[None, :], total, mask=there)
            tl.store(new_sizes + mine, size, mask=mine < after)
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
            TILE=_tile(),
            CHUNK=16 if width > 128 else min(64, padded_width(width)),
            ROOM=room,
            num_warps=_WARPS,
            num_stages=1,
        )
    return moved


def _tile() -> int:
    """Gives the rows of a tile."""
    return 16 if interpreted() else 32


@triton.jit(do_not_specialize=["sections", "number", "tokens", "most", "decided"])
def _means(
    moved, rows, joins, sums, sizes, counts, means,
    sections, decided, number, tokens, most,
    width: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes counts and means of the groups before each section of one head, for some columns."""
    pieces = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    head, columns = program // pieces, (program % pieces).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    moved += head * decided * (number + tokens)
    rows += head * decided * tokens * width
    joins += head * decided * tokens
    sums += head * 2 * number * width
    sizes += program * 2 * number
    counts += head * sections * most
    means += head * sections * most * width
    groups = 0
    for section in range(sections):
        turn = (section % 2) * number
        old_sums, old_sizes = sums + turn * width, sizes + turn
        new_sums, new_sizes = sums + (number - turn) * width, sizes + (number - turn)
        for begin in range(0, most, TILE):
            own = begin + tl.arange(0, TILE)
            size = tl.load(old_sizes + own, mask=own < groups, other=0.0)
            mask = (columns < width)[None, :]
            there = own[:, None] * width + columns[None, :]
            total = tl.load(old_sums + there, mask=(own < groups)[:, None] & mask, other=0.0)
            mean = total / tl.maximum(size, 1.0)[:, None]
            tl.store(means + there, mean.to(means.dtype.element_ty), mask=(own < most)[:, None] & mask)
            tl.store(counts + own, size, mask=(own < most) & (tl.min(columns, 0) == 0))
        if section < sections - 1:
            after = tl.minimum(groups + tokens, number)
            for begin in range(0, after, TILE):
                own, total, size = _joined(
                    moved, old_sums, old_sizes, rows, joins, begin, groups, tokens, width, columns, TILE
                )
                there = (own < after)[:, None] & (columns < width)[None, :]
                tl.store(new_sums + own[:, None] * width + columns[None, :], total, mask=there)
                tl.store(new_sizes + own, size, mask=own < after)
            groups = after
        tl.debug_barrier()
        moved += number + tokens
        rows += tokens * width
        joins += tokens
        counts += most
        means += most * width


def means(moved: Tensor, rows: Tensor, joins: Tensor, number: int, sections: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes counts and means of the groups before each of some sections, at most one more than are decided.

    Args:
        moved: decisions, `[N, J, M + T]`.
        rows: of the tokens, `[N, J T, w]`, float32 or half precision.
        joins: 1 for tokens that count and 0 for others, `[N, J T]` float32.
        number: M.
        sections: F, J or J + 1.

    Returns:
        counts `[N, F, m]`, m at most M; means `[N, F, m, w]` in the type of the rows; sums of the groups before the
        last two sections, `[N, 2, M, w]` float32, those before section f at place f mod 2.
    """
    (heads, decided, every), width = moved.shape, rows.shape[2]
    tokens = every - number
    most = max(min(number, (sections - 1) * tokens), 1)
    counts = joins.new_empty(heads, sections, most)
    found = rows.new_empty(heads, sections, most, width)
    pieces = ceil_divide(width, _COLUMNS)
    sums = joins.new_zeros(heads, 2, number, width)
    with torch.cuda.device_of(rows):
        _means[(heads * pieces,)](
            *(moved, rows.contiguous(), joins.contiguous(), sums, joins.new_empty(heads * pieces, 2, number)),
            *(counts, found, sections, decided, number, tokens, most),
            width=width,
            COLUMNS=_COLUMNS,
            TILE=_tile(),
        )
    return counts, found, sums


@triton.jit(do_not_specialize=["sections", "number", "tokens", "most", "decided"])
def _of_tokens(
    moved, of_sums, later, found,
    sections, decided, number, tokens, most,
    width: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Goes back through the sections of one head, for some columns; of `later` there are two, which take turns."""
    pieces = tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    head, columns = program // pieces, (program % pieces).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < width)[None, :]
    moved += head * decided * (number + tokens)
    of_sums += head * sections * most * width
    found += head * decided * tokens * width
    later += head * 2 * number * width
    for back in range(decided):
        section = decided - 1 - back
        groups = tl.minimum(section * tokens, number)
        after = tl.minimum(groups + tokens, number)
        mine, theirs = later + (back % 2) * number * width, later + (1 - back % 2) * number * width
        # `theirs` are the gradients of the sums after this section, `mine` those before it.
        for begin in range(0, groups + tokens, TILE):
            place, is_group, is_token = _place(begin, groups, tokens, TILE)
            cell = tl.load(moved + section * (number + tokens) + place, mask=is_group | is_token, other=number)
            there = cell[:, None] * width + columns[None, :]
            joined = (cell < after)[:, None] & inside
            g = tl.zeros([TILE, COLUMNS], tl.float32)
            if back > 0:
                g = tl.load(theirs + there, mask=joined, other=0.0)
            elif decided < sections:
                g = tl.load(of_sums + decided * most * width + there, mask=joined, other=0.0)
            token = section * tokens + place - groups
            tl.store(found + token[:, None] * width + columns[None, :], g, mask=is_token[:, None] & inside)
            own = place[:, None] * width + columns[None, :]
            g += tl.load(of_sums + section * most * width + own, mask=is_group[:, None] & inside, other=0.0)
            tl.store(mine + own, g, mask=is_group[:, None] & inside)
        tl.debug_barrier()


def of_tokens(moved: Tensor, of_sums: Tensor, number: int) -> Tensor:
    """Computes the gradient of tokens `[N, J T, w]` float32 from those of the sums before each section.

    Args:
        moved: decisions, `[N, J, M + T]`.
        of_sums: `[N, F, m, w]` float32, F either J or J + 1; see `means`.
        number: M.
    """
    (heads, decided, every), (sections, most, width) = moved.shape, of_sums.shape[1:]
    found = of_sums.new_empty(heads, decided * (every - number), width)
    if found.numel():
        later = of_sums.new_empty(heads, 2, number, width)
        with torch.cuda.device_of(of_sums):
            _of_tokens[(heads * ceil_divide(width, _COLUMNS),)](
                *(moved, of_sums.contiguous(), later, found, sections, decided, number, every - number, most),
                width=width,
                COLUMNS=_COLUMNS,
                TILE=_tile(),
            )
    return found


@triton.jit(do_not_specialize=["decided", "number", "tokens", "keys", "length", "blocks"])
def _follow(
    moved, joins, pages, section, found, decided, number, tokens, keys, length, blocks,
    page_size: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Follows the keys of some pages from the section in which they joined the groups to that of their block."""
    pieces = tl.cdiv(keys, TILE)
    program = tl.program_id(0).to(tl.int64)
    block = program // pieces
    head = block // blocks
    index = (program % pieces).to(tl.int32) * TILE + tl.arange(0, TILE)
    page = tl.load(pages + block * (keys // page_size) + index // page_size, mask=index < keys, other=0)
    token = page.to(tl.int32) * page_size + index % page_size
    until = tl.load(section + block % blocks)
    began = token // tokens
    there = (index < keys) & (token < length) & (began < until)
    there = there & (tl.load(joins + head * length + token, mask=there, other=0.0) > 0)
    moved += head * decided * (number + tokens)
    cell = tl.full([TILE], -1, tl.int32)
    for now in range(tl.min(tl.where(there, began, until), 0), until):
        groups = tl.minimum(now * tokens, number)
        place = tl.where(began == now, groups + token - now * tokens, cell)
        moves = there & (began <= now)
        cell = tl.where(moves, tl.load(moved + now * (number + tokens) + place, mask=moves, other=-1), cell)
    tl.store(found + block * keys + index, cell, mask=index < keys)


def follow(moved: Tensor, joins: Tensor, pages: Tensor, section: Tensor, page_size: int, number: int) -> Tensor:
    """Finds the groups of the keys of pages, before the section of each block of queries.

    Args:
        moved: decisions, `[N, J, M + T]`.
        joins: 1 for tokens that count and 0 for others, `[N, S]` float32, S at least J T.
        pages: `[N, Z, n]`, int64.
        section: of each block, `[Z]`, at most J.
        page_size: P; page p has keys p P ... (p + 1) P - 1.
        number: M.

    Returns:
        `[N, Z, n P]`, int32; -1 for keys that do not count, and for those not yet in a group.
    """
    (heads, blocks, chosen), tokens = pages.shape, moved.shape[2] - number
    found = torch.empty(heads, blocks, chosen * page_size, dtype=torch.int32, device=pages.device)
    if not moved.shape[1]:
        return found.fill_(-1)
    if found.numel():
        tile = min(256, padded_width(chosen * page_size))
        with torch.cuda.device_of(pages):
            _follow[(heads * blocks * ceil_divide(chosen * page_size, tile),)](
                *(moved, joins.contiguous(), pages.contiguous(), section.to(torch.int32), found),
                *(moved.shape[1], number, tokens, chosen * page_size, joins.shape[1], blocks),
                page_size=page_size,
                TILE=tile,
            )
    return found
