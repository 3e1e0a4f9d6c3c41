"""Pieces that the causal kernels share: where a chunk lies in memory, and products that need a wide range.

Queries stand beside the last keys. Positions are those of the keys: query i of a sequence with L queries and S keys has
position S - L + i, and chunk c holds the keys and the queries with positions [c C, (c + 1) C).
Exponents are kept in base 2.

States are stored per chunk, those of the key heads of a chunk together. The chunks of a packed sequence start at slot
cu_k[sequence] // C + sequence: far enough apart, and known without counting the chunks of the sequences before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import (
    LOG2E,
    autotuned,
    bounds,
    ceil_divide,
    interpreted,
    padded_width,
    within_memory,
    worth_timing,
)

# Logits (base 2) may rise by this much in a chunk, over what its first query sees, before the fast kernels refuse it.
STEEP = tl.constexpr(57.0)


class Blocks(NamedTuple):
    """One way to run a kernel: features in a block, warps and stages of the software pipeline."""

    features: int
    warps: int
    stages: int


# Float32 products are sums of three, and need their registers: small blocks, whatever the kernel.
_PRECISE = {
    256: (Blocks(16, 8, 2), Blocks(16, 4, 2), Blocks(32, 8, 2)),
    512: (Blocks(16, 8, 2), Blocks(16, 8, 1)),
    1024: (Blocks(16, 8, 1),),
}


_KEY = ("CHUNK", "WIDTH", "VALUE_WIDTH")


@dataclass
class Problem:
    """Inputs of the attention, shapes as in `favor.kernels.gpu.causal.op.forward`, and how they are cut up.

    Attributes:
        max_k: longest sequence of keys; chunk: C; segments: of the pass over the chunks, None to choose.
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
    max_k: int
    chunk: int
    segments: int | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.query.shape[0] if self.cu_k is None else self.cu_k.numel() - 1

    @property
    def chunks(self) -> int:
        """Chunks of the longest sequence."""
        return ceil_divide(self.max_k, self.chunk)

    @property
    def slots(self) -> int:
        """States to make room for."""
        if self.cu_k is None:
            return self.sequences * self.chunks
        return self.key.shape[2] // self.chunk + self.sequences

    def programs(self, heads: int) -> int:
        """One for each chunk of each sequence and head."""
        return self.sequences * heads * self.chunks

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, in the order in which kernels take them; directions in the type of the tokens."""
        directions = (x.to(self.query.dtype) for x in (self.query_directions, self.key_directions))
        return (self.query, self.key, self.value, *directions, self.offset, self.key_bias)

    @property
    def sizes(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Where sequences start, or how long they are."""
        return self.cu_q, self.cu_k, self.query.shape[2], self.key.shape[2], self.chunks

    @property
    def strides(self) -> tuple[int, ...]:
        """Of batch, heads and rows of query, key and value."""
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3])

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
            "CHUNK": self.chunk,
            "WIDTH": padded_width(width),
            "VALUE_WIDTH": padded_width(self.value.shape[-1]),
        }

    def tuned(self, kernel: Any, choices: dict[int, tuple[Blocks, ...]]) -> Any:
        """`kernel`, choosing its blocks at the first launch for each type and width.

        `choices` lists those for half precision by the bytes of the widest row, padded: wide rows leave room for few.
        """
        if self.query.element_size() == 4:
            choices = _PRECISE
        widths = [padded_width(tensor.shape[-1]) for tensor in (self.query, self.value)]
        fitting = choices[min(limit for limit in choices if limit >= max(widths) * self.query.element_size())]
        if interpreted():
            return autotuned(kernel, (Blocks(32, 4, 1),), _KEY)
        given = worth_timing(fitting, self.query, self.key)
        return autotuned(kernel, within_memory(given, self.query.dtype != torch.bfloat16, *widths), _KEY)


@triton.jit
def locate(sequence, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Batch row, first query, number of queries, first key, number of keys and first slot of a sequence."""
    slot = sequence * chunks
    if cu_k is not None:
        slot = tl.load(cu_k + sequence).to(tl.int64) // CHUNK + sequence
    batch, first_query, query_count = bounds(cu_q, sequence, queries)
    _, first_key, key_count = bounds(cu_k, sequence, keys)
    return batch, first_query, query_count, first_key, key_count, slot


@triton.jit
def locate_chunk(program, heads, cu_q, cu_k, queries, keys, chunks, CHUNK: tl.constexpr):
    """Where the chunk of a program lies.

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
def corner(base, batch, head, row, stride_batch, stride_head, stride_row):
    """Address of a row of one head; all three are int64."""
    return base + batch * stride_batch + head * stride_head + row * stride_row


@triton.jit
def load_logit(base, there, CHUNK: tl.constexpr):
    """Bias of the keys of a chunk, in base 2; -inf where there is none."""
    return tl.load(base + tl.arange(0, CHUNK), mask=there, other=float("-inf")) * LOG2E


@triton.jit
def load_features(base, features, count):
    """One number for each feature, -inf for those past the last one."""
    return tl.load(base + features, mask=features < count, other=float("-inf"))


@triton.jit
def after_first(shown, CHUNK: tl.constexpr):
    """Rows from the first visible key of a chunk on.

    Those before see the past only, whose weights may be far below the anchor.
    """
    index = tl.arange(0, CHUNK)
    return index >= tl.min(tl.where(shown, index, CHUNK), axis=0)


@triton.jit
def narrow(factor, like):
    """A factor of `wide` in the type in which it is multiplied for inputs of the type of `like`."""
    half: tl.constexpr = like.dtype == tl.bfloat16
    return factor.to(tl.bfloat16 if half else tl.float32)


@triton.jit
def wide(left, right, acc, like):
    """`acc` + left x right for factors that float16 cannot hold: far above 1, or far below and still of weight."""
    if like.dtype == tl.bfloat16:
        return tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), acc=acc)
    elif like.dtype == tl.float16:  # not a second `if`: Triton compiles what follows a return
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc=acc, input_precision="tf32")
    else:
        return tl.dot(left, right, acc=acc, input_precision="tf32x3")
