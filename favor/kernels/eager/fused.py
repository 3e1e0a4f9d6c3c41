"""Softmax attention with its normaliser by PyTorch's fused kernel for CPUs, that of `scaled_dot_product_attention`.

Where it can run it does the work of the loops over blocks of `favor.kernels.eager.bidirectional` in forward passes: its
blocks stay in cache, and tiny exponentials cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from favor.kernels.operands import Sequence

_COPIED = 2**20  # numbers copied at a time, where inputs have to be changed first; more if a thread had no head


def usable(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes such tensors: on a CPU, values as wide as keys."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention `[B, H, L, d]` and the logarithm of its normaliser `[B, H, L]`; there must be a key.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, H, S, d]`, `[B, H, S, d]`, of one type, rows in one piece.
        bias: added to the logits, `[B, H, L, S]`; all but S may be 1. Both results are 0 for a query whose
            biases are all -inf.
        scale: factor of the products.
        is_causal: query i sees keys 0 ... i.
    """
    # Twice as slow with a bias that has gaps.
    mask = None if bias is None else bias.contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def prepared(sequence: Sequence) -> Iterator[Sequence]:
    """A sequence as the kernel can read it, hidden keys and their values zeros, all in the precision of the sums.

    All heads at once if nothing has to be copied for that, else some at a time. In bfloat16 the kernel would be twice
    as fast on some CPUs, but to round the directions changes logits as much as to round queries and keys does.
    """
    hidden, dtype = sequence.key_bias == -torch.inf, sequence.offset.dtype
    any_hidden = bool(hidden.any())
    if not any_hidden and sequence.query.dtype == dtype:
        yield sequence
        return
    groups = sequence.query.shape[1] // sequence.key.shape[1]
    rows = 2 * sequence.key.shape[2] + groups * sequence.query.shape[2]
    together = max(_COPIED // (rows * sequence.key.shape[3]), torch.get_num_threads())
    for part in sequence.parts(together):
        query, key, value = (tensor.to(dtype) for tensor in (part.query, part.key, part.value))
        if any_hidden:
            unseen = (part.key_bias == -torch.inf).unsqueeze(-1)
            key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
        yield replace(part, query=query, key=key, value=value)


def summarise(sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Log weight `[B, Hk, M]` and summary `[B, Hk, M, d]` of the landmarks, see `favor.kernels.eager.bidirectional`."""
    directions = sequence.key_directions.expand(sequence.key.shape[0], -1, -1, -1)
    summary, log_weight = attend(directions, sequence.key, sequence.value, sequence.key_bias.unsqueeze(2))
    return log_weight + sequence.offset, summary


def read(sequence: Sequence, log_weight: Tensor, summary: Tensor) -> Tensor:
    """Output `[B, H, L, d]`."""
    query, directions = sequence.query, sequence.query_directions
    groups = query.shape[1] // sequence.key.shape[1]
    if groups > 1:
        landmarks = (directions, summary, log_weight)
        directions, summary, log_weight = (tensor.repeat_interleave(groups, 1) for tensor in landmarks)
    return attend(query, directions.expand(query.shape[0], -1, -1, -1), summary, log_weight.unsqueeze(2))[0]
