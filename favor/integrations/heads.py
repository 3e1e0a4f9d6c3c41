"""Layers whose processes hold pieces of sequences, and exchange them for whole sequences of some heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from favor.attention.functional import HEAD_GROUPS, SEQUENCE_GROUPS
from favor.attention.parallel import exchanged, gathered_mask
from favor.integrations.cache import CACHE_LAYER
from favor.integrations.exact import Share, share_of
from favor.integrations.masks import Visibility, record, visibility
from favor.integrations.piece_length import warn_of_convolutions
from favor.integrations.positions import relative_of
from favor.kernels.dispatch import is_tracing

_WHOLE = "favor_whole_visibility"  # attribute of the mask of a piece: that of the whole sequences


def with_whole_sequences(
    attend: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes the piece `[B, l, H, dv]` of the output of a layer: `attend` gets whole sequences, and some heads.

    Args:
        attend: takes queries, keys, values, mask and the arguments of an attention function.
        tensors: queries `[B, H, l, d]`, keys and values, of the tokens of this process.
        mask, kwargs: as `favor.integrations.backend.favor_attention_forward` takes them; of this piece, but for
            lengths of packed sequences, which are those of whole sequences.

    Raises:
        ValueError: if heads cannot be shared out, and with a cache or a mask of all pairs.
    """
    warn_of_convolutions(module)
    group, number = HEAD_GROUPS[-1], tensors[1].shape[1]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if number % size:
        raise ValueError(
            f"sequence_parallel(heads=True) gives each process equally many key heads, and {type(module).__name__} has "
            f"{number} for {size} processes. Take a number of processes that divides them, or leave heads=True out."
        )
    sees = _whole_visibility(module, tensors, mask, kwargs, group)
    around, own = share_of(module, number) or Share(0, number, number), number // size
    share = Share(around.first + rank * own, own, around.total)
    bias = kwargs.pop("position_bias", None)
    if relative_of(module, bias) is not None:
        kwargs["position_bias"] = _positions(bias, tensors[0], rank, group)
    query, key, value = (exchanged(tensor, group) for tensor in tensors)
    shown = torch.ones(1, dtype=torch.bool, device=key.device).expand(len(key), 1, 1, key.shape[2])
    out = attend(query, key, value, record(shown, sees), favor_share=share, **kwargs)[0]
    return exchanged(out, group)


def _whole_visibility(
    module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kwargs: dict[str, Any], group: Any
) -> Visibility:
    """Tells which keys whole sequences see, from the mask of a piece, which keeps the answer for other layers."""
    query, key, _ = tensors
    packed = kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None
    shape = (len(query), query.shape[2], key.shape[2])
    sees = visibility(module, mask, kwargs["is_causal"], shape, kwargs.get("sliding_window"), packed)
    has_past = hasattr(key, CACHE_LAYER) or kwargs.get("favor_state") is not None
    has_past = has_past or (sees.causal and shape[1] < shape[2])
    if has_past or sees.dense:
        what = "a cache or state" if has_past else "a mask of all pairs of tokens"
        raise ValueError(
            f"sequence_parallel(heads=True) joins pieces of sequences, and {type(module).__name__} got {what}, which "
            "belongs to one piece. Leave it out, or run whole sequences in one process."
        )
    known: Visibility | None = sees if packed else getattr(mask, _WHOLE, None)
    if known is not None:
        return known
    real = torch.ones(shape[::2], dtype=torch.bool, device=key.device) if sees.padding is None else sees.padding
    real = gathered_mask(real, group)
    counts = () if is_tracing(real) else real.sum(1).tolist()  # a GPU waits here, once per mask
    is_full = bool(counts) and min(counts) == real.shape[1] and (sees.padding is None or not SEQUENCE_GROUPS)
    sees = sees._replace(padding=None if is_full else real, counts=counts)
    if hasattr(mask, "favor_visibility"):  # `favor_mask` made it for this forward pass
        setattr(mask, _WHOLE, sees)
    return sees


def _positions(relative: Any, query: Tensor, rank: int, group: Any) -> Any:
    """Gives relative positions of all tokens and some heads."""
    if isinstance(relative, Tensor):
        raise ValueError(
            "sequence_parallel(heads=True) joins pieces of sequences, and a position bias for each pair of tokens "
            "belongs to one piece. Take a model whose positions are a table, as those of T5, or rotary."
        )
    own = query.shape[1] // dist.get_world_size(group)
    part = relative.part(heads=slice(rank * own, (rank + 1) * own))
    is_of_tokens = relative.query.shape[1:3] == query.shape[1:3]
    return part._replace(query=exchanged(relative.query, group)) if is_of_tokens else part
