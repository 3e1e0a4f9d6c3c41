"""What the bidirectional and the causal forms share.

Shapes inside `favor.attention`: keys are `[B, H, S, d]`, with H the number of key heads. The queries of the G heads
that share a key head are rows of it, `[B, H, L, G, d]`, so that grouped-query attention never repeats a key.
"""

from __future__ import annotations

import torch
from torch import Tensor


def append_one(value: Tensor) -> Tensor:
    """Value columns and a column of ones `[..., dv + 1]`: one product then gives numerator and normaliser."""
    return torch.cat((value, value.new_ones(*value.shape[:-1], 1)), dim=-1)


def normalise(sums: Tensor) -> Tensor:
    """Numerator over normaliser, `[..., dv + 1]` -> `[..., dv]`; rows without a key give zeros and no gradient."""
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1.0)


def finite_max(values: Tensor, dim: int) -> Tensor:
    """Maximum kept as a dimension, without gradient; 0 where everything is -inf, so that -inf - max is -inf.

    Subtracting it is an identity of the normalised result, so it is a constant for the gradient.
    """
    if values.shape[dim] == 0:
        shape = list(values.shape)
        shape[dim] = 1
        return values.new_zeros(shape)
    top = values.detach().amax(dim, keepdim=True)
    return top.masked_fill(top == -torch.inf, 0.0)
