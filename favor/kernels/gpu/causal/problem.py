"""Pieces that the causal kernels share: how a call is cut into chunks, and where a chunk lies in memory.

Queries belong to the last keys. Positions are those of the keys: query i of a sequence with L queries and S keys has
position S - L + i, and chunk c holds the keys and the queries with positions [c C, (c + 1) C).
Exponents are kept in base 2.

States are stored per chunk, those of the key heads of a chunk together. The chunks of a packed sequence start at slot
cu_k[sequence] // C + sequence: far enough apart, and known without counting the chunks of the sequences before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu import common
from favor.kernels.gpu.common import LOG2E, Blocks, bounds, ceil_divide, padded_width, strides
from favor.kernels.operands import Geometry, Operands

# Logits (base 2) may rise by this much in a chunk, above what its first query sees, before the fast kernels refuse it.
STEEP = tl.constexpr(57.0)

# For float32, in every kernel.
_PRECISE = {
    256: (Blocks(None, 16, 8, 2), Blocks(None, 16, 4, 2), Blocks(None, 32, 8, 2)),
    512: (Blocks(None, 16, 8, 2), Blocks(None, 16, 8, 1)),
    1024: (Blocks(None, 16, 8, 1),),
}


@dataclass(frozen=True)
class Problem(common.Problem):
    """A call of causal attention, cut into chunks.

    Attributes:
        chunk: tokens in a chunk, C.
        segments: parts into which the pass over the chunks is cut; None to choose.
    """

    chunk: int
    segments: int | None = None

    precise = _PRECISE
    key = ("CHUNK", "WIDTH", "VALUE_WIDTH")

    @classmethod
    def of(
        cls, operands: Operands, geometry: Geometry, chunk_size: int | None = None, segments: int | None = None
    ) -> Problem:
        """Describes a call with chunks of this size; None chooses the size."""
        if chunk_size is None:
            # Wide rows leave room for short chunks only, in registers and shared memory; float16 is multiplied as tf32.
            query, value = operands.query, operands.value
            row = query.element_size() * max(padded_width(tensor.shape[-1]) for tensor in (query, value))
            chunk_size = max(16, min(64 if query.dtype == torch.float16 else 128, 2**14 // row))
        return cls(operands, geometry, chunk_size, segments)

    @property
    def chunks(self) -> int:
        """Chunks of the longest sequence."""
        return ceil_divide(self.max_k, self.chunk)

    @property
    def slots(self) -> int:
        """States to make room for."""
        if self.geometry.cu_k is None:
            return self.sequences * self.chunks
        return self.operands.key.shape[2] // self.chunk + self.sequences

    def programs(self, heads: int) -> int:
        """Counts the programs: one for each chunk of each sequence and head."""
        return self.sequences * heads * self.chunks

    @property
    def sizes(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Where sequences start, or how long they are."""
        return (*self.geometry[:2], self.operands.query.shape[2], self.operands.key.shape[2], self.chunks)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for which kernels are compiled."""
        return super().constants | {"CHUNK": self.chunk}

    def launch(
        self, kernel: Any, programs: int, tensors: tuple[Any, ...], strided: tuple[Tensor, ...], **constants: int
    ) -> None:
        """Launches a kernel that takes the inputs, `tensors`, where chunks lie, and strides, also of `strided`."""
        arguments = (*self.tensors, *tensors, *self.sizes, *self.strides, *strides(*strided))
        kernel[(programs,)](*arguments, **self.constants, **constants)


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Gives the batch row, first query, number of queries, first key, number of keys and first slot of a sequence."""
    slot = sequence * chunks
    if cu_k is not None:
        slot = tl.load(cu_k + sequence).to(tl.int64) // CHUNK + sequence
    batch, first_query, query_count = bounds(cu_q, sequence, queries)
    _, first_key, key_count = bounds(cu_k, sequence, keys)
    return batch, first_query, query_count, first_key, key_count, slot


@triton.jit
def locate_chunk(program, heads, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Locates the chunk of a program.

    Returns:
        head, sequence, batch row, slot; row of the tensor of queries of the first position, number of the query there
        (negative before the first one) and number of queries; row of the tensor of keys, and number of keys from it on.
    """
    chunk, program = program % chunks, program // chunks
    head, sequence = (program % heads).to(tl.int64), (program // heads).to(tl.int64)
    batch, first_query, query_count, first_key, key_count, slot = locate(
        sequence, cu_q, cu_k, queries, keys, chunks, CHUNK
    )
    number = chunk * CHUNK - (key_count - query_count)
    key_row = first_key + chunk * CHUNK
    return (
        head,
        sequence,
        batch,
        slot + chunk,
        first_query + number,
        number,
        query_count,
        key_row,
        key_count - chunk * CHUNK,
    )


@triton.jit
def load_logit(base, there, CHUNK: tl.constexpr):
    """Loads the bias of the keys of a chunk, in base 2; -inf where there is no key."""
    return tl.load(base + tl.arange(0, CHUNK), mask=there, other=float("-inf")) * LOG2E


@triton.jit
def load_features(base, features, count):
    """Loads one number for each feature, -inf for those past the last one."""
    return tl.load(base + features, mask=features < count, other=float("-inf"))


@triton.jit
def after_first(shown, CHUNK: tl.constexpr):
    """Marks the rows from the first visible key of a chunk on.

    Rows before it see only the past, whose weights may be far below the anchor.
    """
    index = tl.arange(0, CHUNK)
    return index >= tl.min(tl.where(shown, index, CHUNK), axis=0)
