"""Exact attention of a layer: what FAVOR backends run on short inputs, in local layers and in heads kept exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from favor.attention.functional import HEAD_GROUPS, SEQUENCE_GROUPS
from favor.attention.local import local_attention
from favor.attention.packing import Compaction, Packing
from favor.attention.positions import ALL, Place, take
from favor.config import warn_once
from favor.features import Parameters
from favor.integrations.masks import Visibility
from favor.kernels.dispatch import is_tracing


class Call(NamedTuple):
    """The checked arguments of one call that exact and linear attention share, without queries, keys and values.

    Attributes:
        relative: `Clipped` or `Sinusoidal` positions, or biases `[B, H, L, S]`; None for none.
        share: the heads that are at hand, if it is known that they are not all.
    """

    module: nn.Module
    sees: Visibility
    scaling: float | None
    dropout: float
    packing: Packing | None
    relative: Any = None
    share: Share | None = None


def exact_attention(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes softmax attention `[B, L, H, dv]`, of packed sequences one by one, and of windows in linear time.

    The mask `[B, 1, L, S]`, of all pairs, is read if `call.sees.dense`.
    """
    module, sees, scaling, dropout, packing, relative, share = call
    if SEQUENCE_GROUPS or (HEAD_GROUPS and share is None):
        raise ValueError(
            f"inside sequence_parallel {type(module).__name__} would be exact, and see its own piece of the sequence "
            "alone. Set exact_below=0, keep no exact heads or parts, and use models without local layers."
        )
    tensors = (query, key, value)
    if sees.dense:
        return sdpa_attention_forward(module, *tensors, mask, dropout, scaling, False)[0]
    outs = []
    for query, key, value in [tensors] if packing is None else packing.split(*tensors):
        if sees.reach is not None:
            padding = sees.padding if packing is None else None
            options: Any = {"key_padding_mask": padding, "scale": scaling, "dropout": dropout}
            out = local_attention(query, key, value, sees.reach, is_causal=sees.causal, **options).transpose(1, 2)
        else:
            mask = _mask(sees.padding, query.shape[2], key.shape[2], sees.causal, query, relative is not None)
            if relative is not None:
                bias = relative if isinstance(relative, Tensor) else relative.dense(query.shape[2], key.shape[2])
                bias = bias.to(query.dtype)
                mask = bias if mask is None else torch.where(mask, bias, torch.finfo(bias.dtype).min)
            is_causal = sees.causal and relative is None
            out = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal)[0]
        outs.append(out)
    return outs[0] if packing is None else torch.cat(outs, dim=1)


def _mask(
    padding: Tensor | None, length: int, key_length: int, is_causal: bool, like: Tensor, whole: bool
) -> Tensor | None:
    """Makes the boolean mask `[B, 1, L, S]` of exact attention; None where, unless `whole`, `is_causal` says enough."""
    if not is_causal or length == 1:
        return None if padding is None else padding[:, None, None, :].expand(-1, 1, length, -1)
    if padding is None and length == key_length and not whole:
        return None
    triangle = torch.ones(length, key_length, dtype=torch.bool, device=like.device).tril(key_length - length)
    return triangle[None, None] if padding is None else triangle & padding[:, None, None, :]


def key_counts(sees: Visibility, packing: Packing | None, bound: int) -> Sequence[int]:
    """Counts the keys of each row of a batch without its padding, or of each packed sequence.

    Empty if no row has padding, or if tensors must not be read, of which the log is told; `bound` is exact_below.
    """
    if packing is None and sees.padding is None:
        return ()
    if is_tracing():
        _warn_of_tracing(bound)
        return ()
    if packing is not None:
        return packing.key_lengths
    assert sees.padding is not None
    return sees.counts or sees.padding.sum(1).tolist()


@torch.compiler.assume_constant_result
def _warn_of_tracing(bound: int) -> bool:
    warn_once(
        "what is compiled, exported or recorded compares the length of a batch, padding included, with "
        f"exact_below = {bound}, and not the keys of each row. So the result of a row can depend on its batch; with "
        "exact_below=0 it does not."
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

    `counts` are the keys of each row or sequence; those with fewer than `bound` are exact, and `linear` does the rest.
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
            attend = _exact_without_padding if rows is few and call.relative is None else attend
            of_rows = call._replace(sees=call.sees._replace(padding=padding, counts=sizes), relative=_part(call, rows))
            outs += attend(of_rows, *own).split(1)
    order = [*few, *others]
    return torch.cat([outs[order.index(row)] for row in range(len(counts))], dim=0 if call.packing is None else 1)


def _part(call: Call, rows: Place = ALL, heads: Place = ALL) -> Any:
    relative = call.relative
    if relative is None or isinstance(relative, Tensor):
        return None if relative is None else take(relative, rows, heads)
    return relative.part(rows, heads)


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
    out = nn.functional.pad(out.transpose(1, 2), (0, 0, 0, padding.shape[1] - most))
    return moved.back(out, length).transpose(1, 2)


def by_head(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters | None,
    exact_heads: Sequence[int],
    linear: Callable[[Call, Tensor, Tensor, Tensor, Parameters | None], Tensor],
) -> Tensor:
    """Computes attention `[B, L, H, dv]` with some key heads exact, and the query heads that belong to them.

    `parameters` are those of all key heads; `linear` takes any number of heads.
    """
    number = key.shape[1]
    if max(exact_heads) >= number:
        raise ValueError(f"exact_heads must be key heads from 0 to {number - 1}, got {list(exact_heads)}.")
    linear_heads = [head for head in range(number) if head not in exact_heads]
    if not linear_heads:
        return exact_attention(call, query, key, value)
    groups = query.shape[1] // number

    def part(tensor: Tensor, heads: Sequence[int]) -> Tensor:
        return tensor.unflatten(1, (number, -1))[:, list(heads)].flatten(1, 2)

    def of(heads: Sequence[int]) -> tuple[Call, Tensor, Tensor, Tensor]:
        asking = [head * groups + place for head in heads for place in range(groups)]
        own = call._replace(relative=_part(call, heads=asking))
        return own, part(query, heads), part(key, heads), part(value, heads)

    own = None if parameters is None else parameters.heads(linear_heads)
    outs = [exact_attention(*of(exact_heads)), linear(*of(linear_heads), own)]
    joined = torch.cat([out.unflatten(2, (-1, groups)) for out in outs], dim=2)
    order = torch.tensor([*exact_heads, *linear_heads], device=query.device).argsort()
    return joined[:, :, order].flatten(2, 3)


class Share(NamedTuple):
    """The key heads of a layer that this process has: the number of its first one, how many, and of how many."""

    first: int
    number: int
    total: int

    def parameters(self, stored: Parameters | None) -> Parameters | None:
        """Gives its part of the parameters of all key heads."""
        return None if stored is None else stored.heads(range(self.first, self.first + self.number))

    def exact_heads(self, exact: Sequence[int]) -> list[int]:
        """Gives its key heads that stay exact, counted from its own first one."""
        return [head - self.first for head in exact if 0 <= head - self.first < self.number]

    def drawn(self, exact: Sequence[int]) -> tuple[int, int]:
        """Gives the number of its first key head with directions, and how many such heads the layer has."""
        return self.first - sum(head < self.first for head in exact), self.total - len(exact)


def share_of(module: nn.Module, key_heads: int) -> Share | None:
    """Tells which heads of an attention module this process has; None if it has all, or nothing is shared out.

    Raises a ValueError if the heads are shared out unevenly. `key_heads` are at hand.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and missing in some builds of torch

    config = module.config
    total = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    for parameter in module.parameters() if total != key_heads else ():
        if not isinstance(parameter, DTensor):
            continue
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():
                processes, rank = parameter.device_mesh.size(dimension), parameter.device_mesh.get_local_rank(dimension)
                if total != processes * key_heads:
                    raise ValueError(
                        f"{type(module).__name__} has {key_heads} of {total} key heads in one of {processes} processes "
                        "of tensor parallelism, and favor attention needs equally many in each. Take a number of "
                        'processes that divides the key heads, or attn_implementation="sdpa".'
                    )
                return Share(rank * key_heads, key_heads, total)
    return None
