"""Pieces the Triton kernels share."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Exponents are kept in base 2, which is what the hardware computes.
LOG2E = tl.constexpr(1.0 / math.log(2.0))
LN2 = tl.constexpr(math.log(2.0))

# Programs that stand in for the multiprocessors of a GPU where there is none.
_CPU_PROGRAMS = 4


@triton.jit
def project(tokens, directions):
    """Logits tokens `[R, D]` x directions `[M, D]` -> `[R, M]`, in float32 accuracy whatever the tokens are.

    Directions are float32. For half-precision tokens they enter as a sum of two half-precision parts, so that the
    exponents keep about 16 bits (bfloat16) or 22 bits (float16) of the directions and the products run on tensor cores.
    """
    if tokens.dtype == tl.float32:
        return tl.dot(tokens, tl.trans(directions), input_precision="tf32x3")
    high = directions.to(tokens.dtype)
    low = (directions - high.to(tl.float32)).to(tokens.dtype)
    return tl.dot(tokens, tl.trans(high), acc=tl.dot(tokens, tl.trans(low)))


@triton.jit
def mix(weights, values, acc):
    """`acc` + weights `[R, M]` x values `[M, D]`, in the type of the values; weights are float32, at most about 1."""
    if values.dtype == tl.float32:
        return tl.dot(weights, values, acc=acc, input_precision="tf32x3")
    return tl.dot(weights.to(values.dtype), values, acc=acc)


@triton.jit
def contract(left, right):
    """Products `[R, D]` x right `[M, D]` -> `[R, M]`, float32 sums of products in the type of both."""
    if left.dtype == tl.float32:
        return tl.dot(left, tl.trans(right), input_precision="tf32x3")
    return tl.dot(left, tl.trans(right))


@triton.jit
def finite(top):
    """A maximum to subtract: 0 where nothing was seen, so that -inf minus it is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def bounds(cumulative, sequence, length):
    """Batch row, first token (both int64) and number of tokens of a sequence; packed if there is `cumulative`."""
    if cumulative is None:
        return sequence, sequence * 0, length
    else:
        start = tl.load(cumulative + sequence).to(tl.int64)
        stop = tl.load(cumulative + sequence + 1).to(tl.int64)
        return sequence * 0, start, (stop - start).to(tl.int32)


@triton.jit
def load_rows(base, stride, seen, width: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`[ROWS, WIDTH]` rows from `base` on, `stride` apart; zeros in rows not `seen` and in columns past `width`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    mask = seen[:, None] if width == WIDTH else seen[:, None] & (columns < width)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, stride, rows, seen, width: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes `rows` `[ROWS, WIDTH]`, the counterpart of `load_rows`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    tl.store(pointers, rows.to(base.dtype.element_ty), mask=seen[:, None] & (columns < width)[None, :])


def padded_width(width: int) -> int:
    """Width of a block that holds `width` columns: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(width))


class Blocks(NamedTuple):
    """One way to run a kernel: tokens and features in a block, warps and stages of the software pipeline."""

    tokens: int
    features: int
    warps: int
    stages: int


# Rows, of tokens times heads, with which timings would tell of launches and not of the work.
FEW_ROWS = 2**16


def worth_timing(choices: tuple[Any, ...], *tensors: Tensor) -> tuple[Any, ...]:
    """The choices to time; for little work the first one alone, which is then taken as it is.

    What is chosen once is kept for all lengths, and on the disk.
    """
    return choices if max(tensor.shape[:-1].numel() for tensor in tensors) > FEW_ROWS else choices[:1]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where there is no device to time a configuration on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _tuned(kernel: Any, choices: tuple[Blocks, ...]) -> Any:
    configs = [
        triton.Config({"TOKENS": one.tokens, "FEATURES": one.features}, num_warps=one.warps, num_stages=one.stages)
        for one in choices
    ]
    return triton.autotune(configs, key=["WIDTH", "VALUE_WIDTH"], cache_results=True)(kernel)


def tuned(kernel: Any, choices: dict[int, tuple[Blocks, ...]], *tensors: Tensor) -> Any:
    """`kernel`, choosing its blocks at the first launch for each type and width.

    `choices` lists them by the bytes of the widest row, padded, of `tensors`: wide rows leave room for few of them.
    """
    size = max(padded_width(tensor.shape[-1]) * tensor.element_size() for tensor in tensors)
    fitting = choices[min(limit for limit in choices if limit >= size)]
    return _tuned(kernel, (Blocks(32, 32, 4, 1),) if interpreted() else worth_timing(fitting, *tensors))


def processors(device: torch.device) -> int:
    """Programs that run at the same time, for choosing how finely to split work."""
    if device.type != "cuda":
        return _CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_count(programs: int, length: int, device: torch.device, shortest: int = 256) -> int:
    """Into how many pieces of at least `shortest` tokens `programs` sequences of work should be cut.

    Enough of them that the device is full, two programs at a time on each processor, and the last round is not much
    emptier than the others; few, because the pieces must be put together again.
    """
    return _pieces(programs, length, 2 * processors(device), shortest)


@functools.cache
def _pieces(programs: int, length: int, slots: int, shortest: int) -> int:
    most = max(1, min(length // shortest, 4 * slots // max(programs, 1)))
    if most * programs <= slots:
        return most if programs else 1

    def idle(pieces: int) -> float:
        rounds = pieces * programs / slots
        return round(1.0 - rounds / math.ceil(rounds), 1)

    return min(range(1, most + 1), key=lambda pieces: (idle(pieces), pieces))


@triton.jit
def _halve(directions, parts, total, BLOCK: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(directions + where, mask=where < total, other=0.0) * LOG2E
    high = scaled.to(parts.dtype.element_ty)
    tl.store(parts + where, high, mask=where < total)
    if high.dtype != tl.float32:
        low = (scaled - high.to(tl.float32)).to(high.dtype)
        tl.store(parts + total + where, low, mask=where < total)


def halves(directions: Tensor, dtype: torch.dtype) -> Tensor:
    """Directions for logits in base 2, `[2, n, Hk, M, d]`: `dtype` and the rest; `[1, n, Hk, M, d]` for float32."""
    parts = directions.new_empty((1 if dtype == torch.float32 else 2, *directions.shape), dtype=dtype)
    total = directions.numel()
    if total:
        _halve[(triton.cdiv(total, 1024),)](directions, parts, total, BLOCK=1024)
    return parts


@triton.jit
def project_halves(tokens, directions, rest, seen, width: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """Logits `[R, M]` as `project`, with a block of what `halves` made; also the larger part `[M, D]`.

    `directions` points to the block and `rest` is how far behind it the smaller part lies.
    """
    high = load_rows(directions, width, seen, width, FEATURES, WIDTH)
    if tokens.dtype == tl.float32:
        logits = contract(tokens, high)
    else:
        low = load_rows(directions + rest, width, seen, width, FEATURES, WIDTH)
        logits = tl.dot(tokens, tl.trans(high), acc=tl.dot(tokens, tl.trans(low)))
    return logits, high
