"""Pieces that the Triton kernels share."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.operands import Geometry, Operands

# Exponents are kept in base 2, which is what the hardware computes.
LOG2E = tl.constexpr(1.0 / math.log(2.0))
LN2 = tl.constexpr(math.log(2.0))

# Programs that stand in for the multiprocessors of a GPU where there is none.
_CPU_PROGRAMS = 4


@triton.jit
def mix(weights, values, acc):
    """Adds weights `[R, M]` x values `[M, D]`, in the type of the values, to `acc`; weights: float32, up to about 1."""
    if values.dtype == tl.float32:
        return tl.dot(weights, values, acc=acc, input_precision="tf32x3")
    return tl.dot(weights.to(values.dtype), values, acc=acc)


@triton.jit
def contract(left, right):
    """Multiplies left `[R, D]` x right `[M, D]` -> `[R, M]`, float32 sums of products in the type of both."""
    if left.dtype == tl.float32:
        return tl.dot(left, tl.trans(right), input_precision="tf32x3")
    return tl.dot(left, tl.trans(right))


@triton.jit
def narrow(factor, like):
    """Gives a factor of `wide` in the type in which it is multiplied for inputs of the type of `like`."""
    half: tl.constexpr = like.dtype == tl.bfloat16
    return factor.to(tl.bfloat16 if half else tl.float32)


@triton.jit
def wide(left, right, acc, like):
    """Adds left x right to `acc`, for factors that float16 cannot hold: far above 1, or far below but relevant."""
    if like.dtype == tl.bfloat16:
        return tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), acc=acc)
    elif like.dtype == tl.float16:  # not a second `if`: Triton compiles what follows a return
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc=acc, input_precision="tf32")
    else:
        return tl.dot(left, right, acc=acc, input_precision="tf32x3")


@triton.jit
def finite(top):
    """Gives a maximum to subtract: 0 where nothing was seen, so that -inf minus it is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def absorb(logits, top, total):
    """Takes one step of a softmax over columns that come in blocks; all logarithms are in base 2.

    Args:
        logits: `[R, C]`, those of the next columns.
        top, total: `[R]`, the largest logit so far, and the sum of all weights so far relative to it.

    Returns:
        the new `top` and `total`, the weights `[R, C]` of the next columns relative to the new `top`, and the factor
        `[R]` by which all that was weighted relative to the old one is to be multiplied.
    """
    risen = tl.maximum(top, tl.max(logits, axis=1))
    base = finite(risen)
    weights = tl.exp2(logits - base[:, None])
    decay = tl.exp2(top - base)
    return risen, total * decay + tl.sum(weights, axis=1), weights, decay


@triton.jit
def empty_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Starts a softmax: maximum `[ROWS]`, sum of the weights, of shares, and of values `[ROWS, WIDTH]`."""
    zeros = tl.zeros([ROWS], tl.float32)
    return tl.full([ROWS], float("-inf"), tl.float32), zeros, zeros, tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def settled(top, total):
    """Gives the logarithm of a sum from its maximum and the rest, and 1 / rest; -inf and 0 for an empty sum."""
    empty = total == 0.0
    rest = tl.where(empty, 1.0, total)
    return tl.where(empty, float("-inf"), top + tl.log2(rest)), tl.where(empty, 0.0, 1.0 / rest)


@triton.jit
def bounds(cumulative, sequence, length):
    """Gives batch row, first token (both int64) and number of tokens of a sequence; packed if there is `cumulative`."""
    if cumulative is None:
        return sequence, sequence * 0, length
    else:
        start = tl.load(cumulative + sequence).to(tl.int64)
        stop = tl.load(cumulative + sequence + 1).to(tl.int64)
        return sequence * 0, start, (stop - start).to(tl.int32)


@triton.jit
def load_rows(base, stride, seen, width: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Loads `[ROWS, WIDTH]` rows from `base` on, `stride` apart; zeros in rows not `seen` and past `width`."""
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


@triton.jit
def corner(base, batch, head, row, stride_batch, stride_head, stride_row):
    """Gives the address of a row of one head; batch, head and row are int64."""
    return base + batch * stride_batch + head * stride_head + row * stride_row


@triton.jit
def load_tile(
    base, batch, head, row, stride_batch, stride_head, stride_row, seen, width: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Loads `[R, WIDTH]` rows of one head from `row` on; zeros, and nothing read, where not `seen` `[R]`."""
    there = corner(base, batch, head, row, stride_batch, stride_head, stride_row)
    return load_rows(there, stride_row, seen, width, seen.shape[0], WIDTH)


@triton.jit
def store_tile(
    base, batch, head, row, stride_batch, stride_head, stride_row, rows, seen, width: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes `rows` `[R, WIDTH]` of one head from `row` on, the counterpart of `load_tile`."""
    there = corner(base, batch, head, row, stride_batch, stride_head, stride_row)
    store_rows(there, stride_row, rows, seen, width, seen.shape[0], WIDTH)


# Triton's own helpers for these two take microseconds on the host, and every launch calls several.
def ceil_divide(length: int, size: int) -> int:
    """Counts the pieces of at most `size` into which `length` is cut."""
    return -(-length // size)


def power_of_two(number: int) -> int:
    """Gives the smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def padded_width(width: int) -> int:
    """Gives the width of a block that holds `width` columns: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, power_of_two(width))


def width_constants(width: int, value_width: int) -> dict[str, int]:
    """Gives the constants of a kernel that say how wide its rows are, in memory and in registers."""
    padded = {"WIDTH": padded_width(width), "VALUE_WIDTH": padded_width(value_width)}
    return {"width": width, "value_width": value_width, **padded}


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Gives the strides of the batch, the heads and the rows of each tensor, one tensor after the other."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def shared_stride(directions: Tensor) -> int:
    """Gives the step from the directions of one sequence to those of the next; 0 if all sequences share them."""
    return 0 if directions.shape[0] == 1 else directions.stride(0)


class Blocks(NamedTuple):
    """One way to run a kernel.

    Attributes:
        tokens: tokens in a block; None where the launch decides on them.
        features: features in a block.
        warps, stages: those of the software pipeline.
    """

    tokens: int | None
    features: int
    warps: int
    stages: int


# With so few rows (tokens times heads), timings would measure launches and not the work.
FEW_ROWS = 2**16


def worth_timing(choices: tuple[Any, ...], *tensors: Tensor) -> tuple[Any, ...]:
    """Gives the choices to time; for little work the first alone, untimed, as a choice is kept for all lengths."""
    return choices if max(tensor.shape[:-1].numel() for tensor in tensors) > FEW_ROWS else choices[:1]


def within_memory(choices: tuple[Any, ...], tf32: bool, *widths: int) -> tuple[Any, ...]:
    """Gives the choices, with four warps for products of tf32 with few columns: no group of warps gets less than 16.

    With 8 columns the tensor cores of Hopper read more of shared memory than Triton sets aside (triton issue 10629),
    which is an illegal access, or garbage.
    """
    return tuple(one._replace(warps=4) if tf32 and min(one.features, *widths) < 32 else one for one in choices)


def interpreted() -> bool:
    """Tells whether kernels run in Triton's interpreter, where there is no device to time a configuration on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Tuned:
    """A kernel with several configurations, of which Triton's autotuner finds the fastest at the first launch.

    The autotuner looks at every argument again in each launch, on the host; this class remembers what it found.

    Args:
        kernel: what `triton.jit` returns.
        choices: the configurations.
        key: names of arguments; the choice is made anew for each of their values, and for each type.
    """

    def __init__(self, kernel: Any, choices: tuple[Blocks, ...], key: tuple[str, ...]) -> None:
        configs = []
        for one in choices:
            blocks = {"FEATURES": one.features} | ({} if one.tokens is None else {"TOKENS": one.tokens})
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


def tuned(
    kernel: Any,
    choices: dict[int, tuple[Blocks, ...]],
    widths: tuple[int, int],
    *tokens: Tensor,
    tf32: bool | None = None,
    key: tuple[str, ...] = ("WIDTH", "VALUE_WIDTH"),
    longest: int | None = None,
) -> Any:
    """Gives `kernel` with blocks chosen at the first launch for each type and each value of the arguments in `key`.

    Args:
        choices: blocks by the bytes of the widest row, padded: wide rows leave room for small blocks only.
        widths: of queries and keys, and of values.
        tokens: tensors whose rows the kernel works through.
        tf32: whether it multiplies in tf32; by default, for float32.
        key: names of arguments of the kernel.
        longest: no tile of tokens needs to be longer; None for no bound.
    """
    itemsize, padded = tokens[0].element_size(), [padded_width(width) for width in widths]
    fitting = choices[min(limit for limit in choices if limit >= max(padded) * itemsize)]
    if interpreted():
        fitting = (Blocks(None if fitting[0].tokens is None else 32, 32, 4, 1),)
    else:
        narrowest = padded if longest is None else [*padded, padded_width(longest)]
        fitting = within_memory(worth_timing(fitting, *tokens), itemsize == 4 if tf32 is None else tf32, *narrowest)
    if longest is not None:
        tile = padded_width(longest)
        fitting = tuple(one._replace(tokens=min(one.tokens or tile, tile)) for one in fitting)
    return autotuned(kernel, tuple(dict.fromkeys(fitting)), key)


@dataclass(frozen=True)
class Problem:
    """One call of attention: its inputs, and what every kernel is told.

    Attributes:
        operands, geometry: as the host functions take them.
    """

    operands: Operands
    geometry: Geometry

    # For products of float32, the blocks of every kernel; they are sums of three, and need their registers.
    precise: ClassVar[dict[int, tuple[Blocks, ...]]]
    key: ClassVar[tuple[str, ...]]

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.geometry.sequences(self.operands.query.shape[0])

    @property
    def longest_tile(self) -> int | None:
        """Tokens that a tile may have; None for no bound."""
        return None

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, in the order in which kernels take them; directions in the type of the tokens."""
        query, key, value, query_directions, key_directions, offset, key_bias, _ = self.operands
        directions = (x.to(query.dtype) for x in (query_directions, key_directions))
        return (query, key, value, *directions, offset, key_bias)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of batch, heads and rows of query, key and value."""
        return strides(*self.operands[:3])

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for which kernels are compiled."""
        key_heads, features, width = self.operands.query_directions.shape[-3:]
        return {
            "M": features,
            "HK": key_heads,
            "GROUP": self.operands.query.shape[1] // key_heads,
            "OWN": int(self.operands.offset.shape[0] > 1),
            **width_constants(width, self.operands.value.shape[-1]),
        }

    def tuned(self, kernel: Any, choices: dict[int, tuple[Blocks, ...]]) -> Any:
        """Gives `kernel` with blocks chosen at the first launch; `choices` are for half precision, see `tuned`."""
        query, key, value = self.operands[:3]
        return tuned(
            kernel,
            self.precise if query.element_size() == 4 else choices,
            (query.shape[-1], value.shape[-1]),
            query,
            key,
            # float16 is multiplied in tf32, too, where its range is too narrow.
            tf32=query.dtype != torch.bfloat16,
            key=self.key,
            longest=self.longest_tile,
        )


def processors(device: torch.device) -> int:
    """Gives the number of multiprocessors, which run two programs at a time, for choosing how finely to split work."""
    if device.type != "cuda":
        return _CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def split_count(programs: int, length: int, slots: int, shortest: int = 256) -> int:
    """Tells into how many pieces of at least `shortest` tokens `programs` sequences of work should be cut.

    They fill the slots of a device, those of the last round too; but they are few, since they are joined.
    """
    most = max(1, min(length // shortest, 4 * slots // max(programs, 1)))
    if most * programs <= slots:
        return most if programs else 1

    def idle(pieces: int) -> float:
        rounds = pieces * programs / slots
        return round(1.0 - rounds / math.ceil(rounds), 1)

    return min(range(1, most + 1), key=lambda pieces: (idle(pieces), pieces))
