"""The two sums over a Transducer's lattice in Triton: one program per sequence, which holds one diagonal at a time.

The functions take the tensors of those in `favor.models.speech.transducer.lattice`. Neighbours on a diagonal reach
each other by `tl.gather`; log probabilities are loaded one step ahead, since nothing else keeps a step waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from favor.kernels.gpu.common import finite


@triton.jit
def _log_add(first, second):
    top = tl.maximum(first, second)
    base = finite(top)
    total = tl.exp(first - base) + tl.exp(second - base)
    # 0 only where both are -inf, and then so is `top`.
    return top + tl.log(tl.where(total == 0.0, 1.0, total))


@triton.jit
def _ways_to(blank, label, ways, steps, batch, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    u = tl.arange(0, BLOCK)
    seen = u < width
    before = tl.maximum(u - 1, 0)
    here = tl.where(u == 0, 0.0, float("-inf")).to(tl.float64)
    read = row.to(tl.int64) * width + u
    write = row.to(tl.int64) * (width + 1) + u + 1
    stay = tl.load(blank + read, mask=seen, other=float("-inf"))
    move = tl.load(label + read, mask=seen, other=float("-inf"))
    for step in range(steps):
        tl.store(ways + write, here, mask=seen)
        read += batch * width
        write += batch * (width + 1)
        more = u < tl.where(step + 1 < steps, width, 0)
        next_stay = tl.load(blank + read, mask=more, other=float("-inf"))
        next_move = tl.load(label + read, mask=more, other=float("-inf"))
        # Nothing leads to u = 0 by a label: `move` is -inf there.
        here = _log_add(here + stay, tl.gather(here, before, 0) + move)
        stay = next_stay
        move = next_move
    tl.store(ways + write, here, mask=seen)


@triton.jit
def _add_ways_from(blank, label, steps, last, batch, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    u = tl.arange(0, BLOCK)
    seen = u < width
    after = tl.minimum(u + 1, BLOCK - 1)
    there = tl.where(u == width - 1, 0.0, float("-inf")).to(tl.float64)
    place = row.to(tl.int64) * width + u + last
    stay = tl.load(blank + place, mask=seen, other=float("-inf"))
    move = tl.load(label + place, mask=seen, other=float("-inf"))
    for step in range(steps):
        earlier = place - batch * width
        more = u < tl.where(step + 1 < steps, width, 0)
        next_stay = tl.load(blank + earlier, mask=more, other=float("-inf"))
        next_move = tl.load(label + earlier, mask=more, other=float("-inf"))
        stay += there
        move += there
        tl.store(blank + place, stay, mask=seen)
        tl.store(label + place, move, mask=seen)
        there = _log_add(stay, tl.where(u + 1 < width, tl.gather(move, after, 0), float("-inf")))
        stay = next_stay
        move = next_move
        place = earlier


def ways_to(blank: Tensor, label: Tensor) -> Tensor:
    """Computes `lattice.ways_to` for contiguous float64 tensors."""
    steps, batch, width = blank.shape
    ways = blank.new_empty((steps + 1, batch, width + 1))
    ways[:, :, 0] = -torch.inf
    block = triton.next_power_of_2(width)
    _ways_to[(batch,)](blank, label, ways, steps, batch, width, BLOCK=block, num_warps=_warps(block))
    return ways


def add_ways_from(blank: Tensor, label: Tensor) -> None:
    """Computes `lattice.add_ways_from` for contiguous float64 tensors."""
    steps, batch, width = blank.shape
    block = triton.next_power_of_2(width)
    last = (steps - 1) * batch * width
    _add_ways_from[(batch,)](blank, label, steps, last, batch, width, BLOCK=block, num_warps=_warps(block))


def _warps(block: int) -> int:
    return max(1, min(8, block // 64))
