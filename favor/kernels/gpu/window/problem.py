"""Pieces that the kernels of windowed attention share: where a block lies in memory, and how to launch them.

Queries belong to the last keys: query i of a causal sequence with L queries and S keys has position S - L + i, and
block b of w tokens holds the keys and the queries with positions [b w, (b + 1) w). Without causality L = S. Exponents
are in base 2.

Whatever is kept per block is stored `[slots, B, Hk, M, ...]`, see `favor.kernels.eager.window.op`: block b of a packed
sequence has slot cu_k[sequence] // w + sequence + b, that of a batch slot b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu import common
from favor.kernels.gpu.common import LOG2E, Blocks, bounds, ceil_divide, contract, load_tile, strides

# For float32, in every kernel.
_PRECISE = {
    128: (Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2)),
    256: (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 2)),
    512: (Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 1)),
    1024: (Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1)),
}


@dataclass(frozen=True)
class Problem(common.Problem):
    """A call of windowed attention, cut into blocks; there is a bias of the queries."""

    precise = _PRECISE
    key = ("window", "WIDTH", "VALUE_WIDTH", "IS_CAUSAL")

    @property
    def window(self) -> int:
        """Tokens of a block, w."""
        return self.geometry.window

    @property
    def longest_tile(self) -> int:
        """Tokens that a tile may have: those of a block."""
        return self.window

    @property
    def slots(self) -> int:
        """Blocks to make room for."""
        return self.operands.key.shape[2] // self.window + (1 if self.geometry.cu_k is None else self.sequences)

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return ceil_divide(self.max_k, self.window)

    @property
    def query_blocks(self) -> int:
        """Blocks with queries, of the sequence with most of them."""
        return min(self.blocks, ceil_divide(self.max_q, self.window) + self.geometry.is_causal)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return min(self.window, self.max_k)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Where sequences start, how long they are together, rows of the batch, and the size of a block."""
        batch, _, queries = self.operands.query.shape[:3]
        return (*self.geometry[:2], queries, self.operands.key.shape[2], batch, self.window)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for which kernels are compiled."""
        return super().constants | {"IS_CAUSAL": self.geometry.is_causal}

    def launch(
        self, kernel: Any, heads: int, blocks: int, tensors: tuple[Any, ...], strided: tuple[Tensor, ...]
    ) -> None:
        """Launches a kernel that takes `tensors`, and strides of the inputs and of `strided`, for tiles of blocks."""
        count = self.sequences * heads * blocks
        if count:
            sizes = (*self.sizes, blocks, self.longest, self.geometry.scale)
            kernel[lambda block: (count * ceil_divide(self.longest, block["TOKENS"]),)](
                *tensors, *sizes, *self.strides, *strides(*strided), **self.constants
            )


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL: tl.constexpr):
    """Tells where a sequence lies.

    Returns:
        batch row, first query, number of queries, first key, number of keys, position of the first query, first slot.
    """
    batch, first_query, query_count = bounds(cu_q, sequence, queries)
    _, first_key, key_count = bounds(cu_k, sequence, keys)
    prefix = key_count - query_count if IS_CAUSAL else query_count * 0
    if cu_k is None:
        return batch, first_query, query_count, first_key, key_count, prefix, sequence * 0
    else:
        return batch, first_query, query_count, first_key, key_count, prefix, first_key // window + sequence


@triton.jit
def locate_tile(
    cu_q,
    cu_k,
    queries,
    keys,
    window,
    blocks,
    longest,
    HK: tl.constexpr,
    MEMBERS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Locates the tile of queries, or of keys, of this program; tiles that share summaries come one after another.

    Returns:
        head, key head, sequence, batch row and slot; rows of the tensors of queries and of keys at position 0; position
        of the tile, of the first token of its block, of the first query there, and of the end of the block; whether
        there are tokens outside of the block that it exchanges something with.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(longest, TOKENS)
    tile, program = program % tiles, program // tiles
    member, program = program % MEMBERS, program // MEMBERS
    block, program = program % blocks, program // blocks
    source, sequence = (program % HK).to(tl.int64), (program // HK).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, prefix, slot = locate(
        sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL
    )
    if OF_QUERIES:
        block += prefix // window
    first = block * window
    start = tl.maximum(first, prefix)
    stop = tl.minimum(tl.minimum(first + window, key_count), prefix + query_count)
    head = source * MEMBERS + member
    position = first + tile * TOKENS
    before, after = first > 0, first + window < key_count
    if not IS_CAUSAL:
        before = before | after
        after = before
    return (
        head,
        source,
        sequence,
        batch,
        slot + block,
        first_query - prefix,
        first_key,
        position,
        first,
        start,
        stop,
        before if OF_QUERIES else after,
    )


@triton.jit
def load_keys(
    q, own, place, begin, last, scale, key, value, key_bias, batch, source, key_zero,
    key_batch, key_head, key_row, value_batch, value_head, value_row,
    width: tl.constexpr, value_width: tl.constexpr, VALUE_WIDTH: tl.constexpr, IS_CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loads some keys of a block, as a tile of queries sees them.

    Args:
        q, own, place: queries `[R, WIDTH]`, what to subtract from their logits in base 2, and their positions `[R]`.
        begin, last: the first position, and the one at which to stop.

    Returns:
        keys `[COLUMNS, WIDTH]`, values `[COLUMNS, VALUE_WIDTH]`, and logits `[R, COLUMNS]` in base 2.
    """
    column = begin + tl.arange(0, COLUMNS)
    shown = tl.load(key_bias + column, mask=column < last, other=float("-inf")) > float("-inf")
    row = key_zero + begin
    k = load_tile(key, batch, source, row, key_batch, key_head, key_row, shown, width, q.shape[1])
    v = load_tile(value, batch, source, row, value_batch, value_head, value_row, shown, value_width, VALUE_WIDTH)
    logits = contract(q, k) * (scale * LOG2E) - own[:, None]
    logits += tl.where(shown, 0.0, float("-inf"))[None, :]
    if IS_CAUSAL:
        logits = tl.where(column[None, :] <= place[:, None], logits, float("-inf"))
    return k, v, logits
