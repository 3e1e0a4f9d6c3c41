"""The search for pages in Triton: the best page of each class, for all queries of all sections in one launch.

It is the first half of `favor.landmark.growth`: page p is in class p mod C, and of each class a query keeps the page
with the largest logit, among those before its section. No scores of all pages are held.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import ceil_divide, contract, interpreted, load_rows, padded_width

LOWEST = torch.finfo(torch.float32).min
_ROWS = 32


@triton.jit(do_not_specialize=["sections", "rows", "pages", "classes", "widest"])
def _best(
    query, mean, there, until, values, places,
    sections, rows, pages, classes, widest, lowest,
    width: tl.constexpr, WIDTH: tl.constexpr, PLACE_BITS: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Finds the best pages of some queries of a section, for some classes."""
    chunks, tiles = tl.cdiv(classes, CLASSES), tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = (program % chunks).to(tl.int32), (program // chunks % tiles).to(tl.int32)
    section = program // chunks // tiles
    row, own = tile * ROWS + tl.arange(0, ROWS), chunk * CLASSES + tl.arange(0, CLASSES)
    query += (section * rows + tile * ROWS) * width
    mean += section // sections * pages * width
    there += section // sections * pages
    q = load_rows(query, width, row < rows, width, ROWS, WIDTH).to(tl.float32)
    last = tl.load(until + section).to(tl.int32)
    # Bits that tell the place of a page among those of its class: as many as the pages before this section need.
    members = tl.cdiv(tl.maximum(last, 1), widest) * (widest // classes)
    low = tl.full([], 1 << PLACE_BITS, tl.int32)
    while low < members:
        low = low * 2
    low = low - 1
    best = tl.full([ROWS, CLASSES], float("-inf"), tl.float32)
    for member in range(0, members):
        page = member * classes + own
        seen = (page < last) & (own < classes)
        seen = seen & (tl.load(there + page, mask=seen, other=0) != 0)
        columns = tl.arange(0, WIDTH)
        pointers = mean + page[:, None].to(tl.int64) * width + columns[None, :]
        k = tl.load(pointers, mask=seen[:, None] & (columns < width)[None, :], other=0.0)
        score = tl.where(seen[None, :], contract(q, k), lowest)
        bits = (score.to(tl.int32, bitcast=True) & ~low) | member
        best = tl.maximum(best, bits.to(tl.float32, bitcast=True))
    place = (best.to(tl.int32, bitcast=True) & low) * classes + own[None, :]
    pointers = (section * rows + row)[:, None] * classes + own[None, :]
    mask = (row < rows)[:, None] & (own < classes)[None, :]
    tl.store(values + pointers, best, mask=mask)
    tl.store(places + pointers, place, mask=mask)


def best_of_classes(
    query: Tensor, mean: Tensor, there: Tensor, until: Tensor, classes: int, widest: int, place_bits: int
) -> tuple[Tensor, Tensor]:
    """Finds the best page of each class.

    Args:
        query: `[N, F, r, d]`, those of each section.
        mean: of the keys of each page, `[N, p, d]` float32.
        there: which pages have a key that counts, boolean `[N, p]`.
        until: how many pages come before each section, `[N, F]`.
        classes: C, a power of two.
        widest: the largest number of classes in this search, a multiple of C.
        place_bits: bits of a score that tell the place of its page in the class, if that is enough.

    Returns:
        The largest logits, with the place of the page in their last bits, `[N, F, r, C]` float32, about `LOWEST` for
        none; the pages, int32.
    """
    heads, sections, rows, width = query.shape
    values = mean.new_empty(heads, sections, rows, classes)
    places = torch.empty(values.shape, dtype=torch.int32, device=mean.device)
    if values.numel():
        row_tile, most = (16, 16) if interpreted() else (_ROWS, 64 if width <= 128 else 32)
        class_tile = min(most, padded_width(classes))
        programs = heads * sections * ceil_divide(rows, row_tile) * ceil_divide(classes, class_tile)
        with torch.cuda.device_of(query):
            _best[(programs,)](
                *(tensor.contiguous() for tensor in (query, mean, there.to(torch.uint8), until)),
                *(values, places, sections, rows, mean.shape[1], classes, widest, LOWEST),
                width=width,
                WIDTH=padded_width(width),
                PLACE_BITS=place_bits,
                ROWS=row_tile,
                CLASSES=class_tile,
            )
    return values, places
