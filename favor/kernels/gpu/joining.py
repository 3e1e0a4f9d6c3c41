"""What follows from which rows join which group, in Triton, for all sections of a sequence.

Decisions are integers, `[N, J, M + T]`, for J sections of T tokens; `favor.kernels.gpu.deciding` makes them. Entry i of
a section is the new group of group i; after the groups, of which there are at most M, come the tokens. It is M for what
does not count. From them follow, column by column, the means of the groups before each section (`means`) and gradients
of tokens from those of means (`of_tokens`), and the group of any token before any section (`follow`). No sum is atomic:
the same inputs give the same bits, and no section sees a later one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import ceil_divide, interpreted, padded_width

_COLUMNS = 32  # of a program, where columns do not depend on each other


@triton.jit
def count(place, sizes, joins, groups, tokens):
    """Loads how many tokens each place stands for: groups, then tokens of a section; 0 after them."""
    is_token = (place >= groups) & (place < groups + tokens)
    return tl.load(sizes + place, mask=place < groups, other=0.0) + tl.load(
        joins + place - groups, mask=is_token, other=0.0
    )


@triton.jit
def load(begin, sums, sizes, rows, joins, groups, tokens, width, columns, ROWS: tl.constexpr):
    """Loads sums of groups, and after them tokens of a section that count.

    Returns:
        places `[ROWS]`, and which of them exist; how many tokens each stands for `[ROWS]`; rows `[ROWS, COLUMNS]` in
        float32, zeros for what does not count.
    """
    place = begin + tl.arange(0, ROWS)
    is_group, is_token = place < groups, (place >= groups) & (place < groups + tokens)
    counts = count(place, sizes, joins, groups, tokens)
    inside = (columns < width)[None, :]
    old = tl.load(sums + place[:, None] * width + columns[None, :], mask=is_group[:, None] & inside, other=0.0)
    seen = (is_token & (counts > 0))[:, None] & inside
    fresh = tl.load(rows + (place - groups)[:, None] * width + columns[None, :], mask=seen, other=0.0)
    return place, is_group | is_token, counts, old + fresh.to(tl.float32)


@triton.jit
def take_in(
    moved, sums, sizes, rows, joins, new_sums, new_sizes, groups, tokens, after, width, columns, TILE: tl.constexpr
):  # fmt: skip
    """Writes sums and counts of the `after` new groups, given the decisions of a section."""
    for begin in range(0, after, TILE):
        own = begin + tl.arange(0, TILE)
        total = tl.zeros([TILE, columns.shape[0]], tl.float32)
        size = tl.zeros([TILE], tl.float32)
        for first in range(0, groups + tokens, TILE):
            place, inside, counts, r = load(first, sums, sizes, rows, joins, groups, tokens, width, columns, TILE)
            cell = tl.load(moved + place, mask=inside, other=-1)
            joins_it = tl.where(cell[None, :] == own[:, None], 1.0, 0.0)
            total = tl.dot(joins_it, r, acc=total, input_precision="tf32x3")
            size += tl.sum(joins_it * counts[None, :], axis=1)
        there = (own < after)[:, None] & (columns < width)[None, :]
        tl.store(new_sums + own[:, None] * width + columns[None, :], total, mask=there)
        tl.store(new_sizes + own, size, mask=own < after)


def tile() -> int:
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
            tl.store(counts + own, size, mask=own < tl.where(program % pieces == 0, most, 0))
        if section < sections - 1:
            after = tl.minimum(groups + tokens, number)
            take_in(
                moved, old_sums, old_sizes, rows, joins, new_sums, new_sizes, groups, tokens, after, width, columns,
                TILE,
            )  # fmt: skip
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
            TILE=tile(),
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
            place = begin + tl.arange(0, TILE)
            is_group, is_token = place < groups, (place >= groups) & (place < groups + tokens)
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
                TILE=tile(),
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
