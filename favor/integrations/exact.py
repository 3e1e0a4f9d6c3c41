"""Exact attention of a layer: what FAVOR backends run on short inputs, in local layers and in heads kept exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from favor.attention.local import local_attention
from favor.attention.packing import Packing
from favor.attention.padding import Compaction
from favor.integrations.masks import Visibility
from favor.kernels.dispatch import is_tracing

_logger = logging.getLogger("favor")


class Call(NamedTuple):
    """The checked arguments of one call that exact and linear attention share, without queries, keys and values.

    Attributes:
        module: the attention module.
        sees: which keys the queries see.
        scaling: factor of the logits; None for 1/sqrt(d).
        dropout: probability that an attention weight is dropped.
        packing: where packed sequences begin and end; None for a batch of rows.
    """

    module: nn.Module
    sees: Visibility
    scaling: float | None
    dropout: float
    packing: Packing | None


def exact_attention(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes softmax attention `[B, L, H, dv]`, of packed sequences one by one.

    Args:
        call: the arguments that linear attention takes too. Layers that see a window run in linear time.
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        mask: of all pairs, `[B, 1, L, S]`; read if `call.sees.dense`.
    """
    module, sees, scaling, dropout, packing = call
    tensors = (query, key, value)
    if sees.dense:
        return sdpa_attention_forward(module, *tensors, mask, dropout, scaling, False)[0]
    outs = []
    for query, key, value in [tensors] if packing is None else packing.split(*tensors):
        if sees.reach is not None:
            padding = sees.padding if packing is None else None
            out = local_attention(
                query,
                key,
                value,
                sees.reach,
                is_causal=sees.causal,
                key_padding_mask=padding,
                scale=scaling,
                dropout=dropout,
            ).transpose(1, 2)
        else:
            mask = exact_mask(sees.padding, query.shape[2], key.shape[2], sees.causal, query)
            out = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, sees.causal)[0]
        outs.append(out)
    return outs[0] if packing is None else torch.cat(outs, dim=1)


def exact_mask(padding: Tensor | None, length: int, key_length: int, is_causal: bool, like: Tensor) -> Tensor | None:
    """Makes the boolean mask `[B, 1, L, S]` of exact attention, or None where its `is_causal` argument is enough.

    Args:
        padding: boolean `[B, S]`, True for real keys; None without padding.
        length, key_length: L and S; the queries are those of the last tokens.
        is_causal: whether queries see earlier keys only.
        like: a tensor on the device of the mask.
    """
    if not is_causal or length == 1:
        return None if padding is None else padding[:, None, None, :].expand(-1, 1, length, -1)
    if padding is None and length == key_length:
        return None
    triangle = torch.ones(length, key_length, dtype=torch.bool, device=like.device).tril(key_length - length)
    return triangle[None, None] if padding is None else triangle & padding[:, None, None, :]


def key_counts(sees: Visibility, packing: Packing | None, bound: int) -> Sequence[int]:
    """Counts the keys of each row of a batch without its padding, or of each packed sequence.

    Args:
        sees: which keys the queries see.
        packing: where packed sequences begin and end; None for a batch of rows.
        bound: `exact_below`.

    Returns:
        The counts; empty if no row has padding, or if the contents of tensors must not be read, of which the log is
        told.
    """
    if packing is None and sees.padding is None:
        return ()
    if is_tracing():
        _tell_traced(bound)
        return ()
    if packing is not None:
        return packing.key_lengths
    assert sees.padding is not None
    return sees.counts or sees.padding.sum(1).tolist()


@torch.compiler.assume_constant_result
def _tell_traced(bound: int) -> bool:
    return _warn_of_tracing(bound)


@lru_cache
def _warn_of_tracing(bound: int) -> bool:
    """Warns, once, that a traced program does not choose by the keys of each row."""
    _logger.warning(
        "favor: what is compiled, exported or recorded compares the length of a batch, padding included, with "
        "exact_below = %d, and not the keys of each row. So the result of a row can depend on its batch; with "
        "exact_below=0 it does not.",
        bound,
    )
    return True


def by_length(
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    counts: Sequence[int],
    bound: int,
    linear: Callable[[Call, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Computes attention `[B, L, H, dv]`, exact in the rows of a batch, or in the packed sequences, with few keys.

    Args:
        call: the arguments that both kinds of attention take.
        tensors: query `[B, H, L, d]`, key `[B, Hk, S, d]`, value `[B, Hk, S, dv]`.
        counts: keys of each row or sequence.
        bound: rows with fewer keys are exact.
        linear: attention of the others.
    """
    few = [row for row, count in enumerate(counts) if count < bound]
    others = [row for row, count in enumerate(counts) if count >= bound]
    outs: list[Tensor] = []
    attend: Callable[[Call, Tensor, Tensor, Tensor], Tensor]
    for attend, rows in ((exact_attention, few), (linear, others)):
        if not rows:
            continue
        if call.packing is not None:
            parts = call.packing.split(*tensors)
            own = [torch.cat([parts[row][place] for row in rows], dim=2) for place in range(3)]
            out = attend(call._replace(packing=call.packing.only(rows)), *own)
            outs += out.split([parts[row][0].shape[2] for row in rows], dim=1)
        else:
            assert call.sees.padding is not None
            own, sizes = [tensor[rows] for tensor in tensors], [counts[row] for row in rows]
            padding = None if min(sizes) == own[1].shape[2] else call.sees.padding[rows]
            attend = _exact_without_padding if rows is few else attend
            outs += attend(call._replace(sees=call.sees._replace(padding=padding, counts=sizes)), *own).split(1)
    order = [*few, *others]
    return torch.cat([outs[order.index(row)] for row in range(len(counts))], dim=0 if call.packing is None else 1)


def _exact_without_padding(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes exact attention `[B, L, H, dv]` of rows whose padding is moved to the end and cut off.

    Queries of causal layers belong to the last keys, so those of padding are cut off too, and their outputs are zeros.
    Other queries may belong to other tokens.
    """
    padding, counts = call.sees.padding, call.sees.counts
    assert padding is not None
    length, most, moved = query.shape[2], max(1, *counts), Compaction.to_front(padding)
    key, value = (moved.move(tensor)[:, :, :most] for tensor in (key, value))
    is_own = call.sees.causal and length > 1
    query = moved.move(query)[:, :, :most] if is_own else query
    sees = Visibility(call.sees.causal, padding=None if min(counts) == most else moved.mask[:, :most])
    out = exact_attention(call._replace(sees=sees), query, key, value)
    if not is_own:
        return out
    return moved.back(nn.functional.pad(out.transpose(1, 2), (0, 0, 0, padding.shape[1] - most)), length).transpose(
        1, 2
    )
