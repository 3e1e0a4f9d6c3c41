"""Pieces that the kernels of windowed attention share: where a block lies in memory, and how to launch them.

Queries stand beside the last keys: query i of a causal sequence with L queries and S keys has position S - L + i, and
block b of w tokens holds the keys and the queries with positions [b w, (b + 1) w). Without causality L = S. Exponents
are in base 2.

Whatever is kept per block is stored `[slots, B, Hk, M, ...]`, see `chunked_window.empty_landmarks`: block b of a packed
sequence has slot cu_k[sequence] // w + sequence + b, that of a batch slot b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    Blocks,
    autotuned,
    bounds,
    ceil_divide,
    interpreted,
    padded_width,
    within_memory,
    worth_timing,
)

# Float32 products are sums of three, and need their registers: small blocks, whatever the kernel.
_PRECISE = {
    128: (Blocks(64, 32, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2)),
    256: (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 2)),
    512: (Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 1)),
    1024: (Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1)),
}


_KEY = ("window", "WIDTH", "VALUE_WIDTH", "IS_CAUSAL")


@dataclass
class Problem:
    """Inputs of the attention, shapes as in `favor.kernels.gpu.window.op.forward`, and how they are cut up.

    Attributes:
        max_q, max_k: longest sequences; window: tokens of a block; scale: of the exact logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    key_bias: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    query_bias: Tensor
    window: int
    scale: float
    is_causal: bool
    max_q: int
    max_k: int

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.query.shape[0] if self.cu_k is None else self.cu_k.numel() - 1

    @property
    def slots(self) -> int:
        """Blocks to make room for."""
        return self.key.shape[2] // self.window + (1 if self.cu_k is None else self.sequences)

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence."""
        return ceil_divide(self.max_k, self.window)

    @property
    def query_blocks(self) -> int:
        """Blocks with queries, of the sequence with most of them."""
        return min(self.blocks, ceil_divide(self.max_q, self.window) + self.is_causal)

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return min(self.window, self.max_k)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of batch, heads and rows of query, key and value."""
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3])

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Where sequences start, how long they are together, rows of the batch, and the size of a block."""
        batch, _, queries = self.query.shape[:3]
        return self.cu_q, self.cu_k, queries, self.key.shape[2], batch, self.window

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        key_heads, features, width = self.query_directions.shape[-3:]
        return {
            "M": features,
            "HK": key_heads,
            "GROUP": self.query.shape[1] // key_heads,
            "width": width,
            "value_width": self.value.shape[-1],
            "OWN": int(self.offset.shape[0] > 1),
            "IS_CAUSAL": self.is_causal,
            "WIDTH": padded_width(width),
            "VALUE_WIDTH": padded_width(self.value.shape[-1]),
        }

    def tuned(self, kernel: Any, choices: dict[int, tuple[Blocks, ...]]) -> Any:
        """`kernel`, choosing its blocks at the first launch for each window, type, width and kind of masking.

        `choices` lists those for half precision by the bytes of the widest row, padded. Tiles of tokens are no longer
        than a window.
        """
        if self.query.element_size() == 4:
            choices = _PRECISE
        widths = [padded_width(tensor.shape[-1]) for tensor in (self.query, self.value)]
        fitting = choices[min(limit for limit in choices if limit >= max(widths) * self.query.element_size())]
        longest = padded_width(self.window)
        if interpreted():
            fitting = (Blocks(32, 32, 4, 1),)
        else:
            given = worth_timing(fitting, self.query, self.key)
            fitting = within_memory(given, self.query.dtype != torch.bfloat16, *widths, longest)
        fitting = tuple(dict.fromkeys(x._replace(tokens=min(x.tokens, longest)) for x in fitting))
        return autotuned(kernel, fitting, _KEY)


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, window, IS_CAUSAL: tl.constexpr):
    """Where a sequence lies.

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
    """Where the tile of queries, or of keys, of this program lies; tiles that share landmarks come one after another.

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
