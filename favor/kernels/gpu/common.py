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
def mix(weights, values, acc):
    """`acc` + weights `[R, M]` x values `[M, D]`, in the type of the values; weights are float32, at most about 1."""
    if values.dtype == tl.float32:
        return tl.dot(weights, values, acc=acc, input_precision="tf32x3")
    return tl.dot(weights.to(values.dtype), values, acc=acc)


@triton.jit
def contract(left, right):
    """Products left `[R, D]` x right `[M, D]` -> `[R, M]`, float32 sums of products in the type of both."""
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


# Triton's own helpers for these two take microseconds on the host, and every launch asks for several.
def ceil_divide(length: int, size: int) -> int:
    """Pieces of at most `size` that `length` is cut into."""
    return -(-length // size)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def padded_width(width: int) -> int:
    """Width of a block that holds `width` columns: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, power_of_two(width))


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


def within_memory(choices: tuple[Any, ...], tf32: bool, *widths: int) -> tuple[Any, ...]:
    """The choices for products of tf32 with few columns: with four warps, so that no group of warps gets less than 16.

    With 8 columns the tensor cores of Hopper read more of shared memory than Triton sets aside (triton issue 10629),
    which is an illegal access, or garbage.
    """
    return tuple(one._replace(warps=4) if tf32 and min(one.features, *widths) < 32 else one for one in choices)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where there is no device to time a configuration on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Tuned:
    """A kernel with several configurations, of which Triton's autotuner finds the fastest at the first launch.

    The autotuner looks at every argument again in each launch, on the host; this remembers what it found.

    Args:
        kernel: what `triton.jit` returns.
        choices: named tuples of the configurations, `features`, `warps`, `stages` and perhaps `tokens`.
        key: names of the arguments for each of whose values the choice is made anew, as for each type.
    """

    def __init__(self, kernel: Any, choices: tuple[Any, ...], key: tuple[str, ...]) -> None:
        configs = []
        for one in choices:
            blocks = {name.upper(): value for name, value in one._asdict().items() if name in ("tokens", "features")}
            configs.append(triton.Config(blocks, num_warps=one.warps, num_stages=one.stages))
        self.kernel = kernel
        self.tuner = triton.autotune(configs, key=list(key), cache_results=True)(kernel)
        self.places = [(name, kernel.arg_names.index(name)) for name in key]
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **constants: Any) -> None:
        where = tuple(constants[name] if name in constants else args[place] for name, place in self.places)
        case = (*where, *(argument.dtype for argument in args if isinstance(argument, Tensor)))
        if case in self.found:
            self.kernel[grid](*args, **constants, **self.found[case])
            return
        self.tuner[grid](*args, **constants)
        if best := getattr(self.tuner, "best_config", None):
            self.found[case] = best.all_kwargs()


autotuned = functools.cache(Tuned)


def tuned(kernel: Any, choices: dict[int, tuple[Blocks, ...]], *tensors: Tensor) -> Any:
    """`kernel`, choosing its blocks at the first launch for each type and width.

    `choices` lists them by the bytes of the widest row, padded, of `tensors`: wide rows leave room for few of them.
    """
    widths, itemsize = [padded_width(tensor.shape[-1]) for tensor in tensors], tensors[0].element_size()
    fitting = choices[min(limit for limit in choices if limit >= max(widths) * itemsize)]
    key = ("WIDTH", "VALUE_WIDTH")
    if interpreted():
        return autotuned(kernel, (Blocks(32, 32, 4, 1),), key)
    return autotuned(kernel, within_memory(worth_timing(fitting, *tensors), itemsize == 4, *widths), key)


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
