"""Bidirectional attention in plain operations, for programs that are exported: one graph for every length.

An exported graph has no loop over blocks whose number depends on the length, and the engines that run it know neither
Triton nor the operators of favor. Here the features of all tokens exist at once: time and memory are linear in the
length, but memory grows with the number of features.

As in the other kernels, a feature holds a log weight and a mean value of the keys, relative to its largest key, and
nothing is added to a normaliser. The keys outside of a block of a window are all keys less those of the block, at the
scale of the largest key of all; only for the block that holds this key they are summed anew. So what is subtracted is
never much larger than what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels.dispatch import is_exporting
from favor.kernels.operands import Geometry, Operands


def blocks_of(length: int, window: int) -> int:
    """Counts the blocks that a sequence is cut into, the last of them padding, so that a tracer can reason about it.

    A tracer treats a single block as a case of its own, so there are at least two. And if nothing is added to the
    quotient, it can reason about multiples of it.
    """
    return (length + 2 * window - 1) // window


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Cuts `[..., L, w]` into blocks `[..., n, size, w]` with zeros at the end, for a tracer too."""
    length = tensor.shape[-2]
    number = blocks_of(length, size) if is_exporting() else -(-length // size)
    return pad(tensor, (0, 0, 0, number * size - length)).unflatten(-2, (number, size))


def first_rows(tensor: Tensor, length: int) -> Tensor:
    """Gives the first rows of a tensor `[..., R, w]`, to a tracer as one piece of memory.

    A slice would have gaps, and a tracer would ask for which lengths there are any.
    """
    if not is_exporting():
        return tensor[..., :length, :]
    return tensor.index_select(-2, torch.arange(length, device=tensor.device))


def attention(operands: Operands, geometry: Geometry) -> Tensor:
    """Computes `favor.kernels.linear_attention` where nothing is causal or packed, `[B, H, L, dv]`."""
    query, key, value, query_directions, key_directions, offset, key_bias, query_bias = operands
    key_heads, dtype, bias = key.shape[1], offset.dtype, key_bias.unsqueeze(-1)
    key, value = (tensor.to(dtype).masked_fill(bias == -torch.inf, 0.0) for tensor in (key, value))
    rows = query.to(dtype).unflatten(1, (key_heads, -1))  # [B, Hk, G, L, d]
    if query_bias is None:
        logits = key @ key_directions.mT + bias
        log_weight, summary = _means(*_sums(logits, value, logits.detach().amax(-2)))
        far = rows.flatten(2, 3) @ query_directions.mT + (log_weight + offset).unsqueeze(-2)
        return (_shares(far) @ summary).view(*query.shape[:3], -1).to(query.dtype)
    length, window = query.shape[2], geometry.window
    blocks = blocks_of(length, window)

    def cut(tensor: Tensor, fill: float = 0.0) -> Tensor:
        return pad(tensor, (0, 0, 0, blocks * window - length), value=fill).unflatten(-2, (-1, window))

    key, value, bias, rows = cut(key), cut(value), cut(bias, -torch.inf), cut(rows)  # [B, Hk, b, C, d]
    log_weight, summary = _outside(key @ key_directions.mT.unsqueeze(2) + bias, value)
    rows = rows.transpose(2, 3).flatten(3, 4)  # [B, Hk, b, G C, d]
    own_bias = cut(query_bias.unflatten(1, (key_heads, -1)).unsqueeze(-1)).transpose(2, 3).flatten(3, 4)
    far = rows @ query_directions.mT.unsqueeze(2) + (log_weight + offset.unsqueeze(2)).unsqueeze(-2)
    near = (geometry.scale * rows @ key.mT - own_bias).masked_fill(bias.mT == -torch.inf, -torch.inf)
    out = _shares(torch.cat([far, near], -1)) @ torch.cat([summary, value], -2)
    out = out.unflatten(3, (-1, window)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return first_rows(out, length).to(query.dtype)


def _sums(logits: Tensor, value: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums the weights of the keys of each feature, `[..., M]`, and their values times weights, `[..., M, dv]`.

    Args:
        logits: of the keys, `[..., S, M]`.
        value: `[..., S, dv]`.
        top: what the logits are relative to, `[..., M]`, returned first; -inf where all of them are.
    """
    weights = (logits - _finite(top).unsqueeze(-2)).exp()
    return top, weights.sum(-2), weights.mT @ value


def _outside(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gives log weight `[B, Hk, b, M]` and mean value `[..., dv]` of each feature over the keys of all other blocks."""
    tops = logits.detach().amax(-2)
    first, holder = tops.max(2, keepdim=True)
    holds = torch.arange(tops.shape[2], device=tops.device).unsqueeze(-1) == holder
    second = tops.masked_fill(holds, -torch.inf).amax(2)
    _, total, sums = _sums(logits, value, first)
    # For the block with the largest key: the other blocks, at their own scale.
    rest = logits.masked_fill(holds.unsqueeze(-2), -torch.inf).flatten(2, 3)
    _, rest_total, rest_sums = _sums(rest, value.flatten(2, 3), second)
    top = torch.where(holds, second.unsqueeze(2), first)
    total = torch.where(holds, rest_total.unsqueeze(2), total.sum(2, keepdim=True) - total)
    sums = torch.where(holds.unsqueeze(-1), rest_sums.unsqueeze(2), sums.sum(2, keepdim=True) - sums)
    return _means(top, total, sums)


def _means(top: Tensor, total: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the log weight `[..., M]` and mean value `[..., M, dv]` from `_sums`; -inf and zeros without a key."""
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    return (_finite(top) + total.log()).masked_fill(nothing, -torch.inf), sums / total.unsqueeze(-1)


def _shares(logits: Tensor) -> Tensor:
    """Computes a softmax; where nothing is visible it gives equal shares, of values that are zeros."""
    unseen = logits.detach().amax(-1, keepdim=True) == -torch.inf
    return torch.softmax(logits.masked_fill(unseen, 0.0), -1)


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)
