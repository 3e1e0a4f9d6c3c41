"""The family `landmark`, and where a call enters: padding is at the end here, and heads are those of the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall, method
from favor.kernels.landmarks import is_fused
from favor.landmark import bidirectional, causal, kept
from favor.landmark.kept import counted
from favor.registry import Family, register


@register
class Landmarks(Family):
    """Attends exactly to the keys that matter to a block of queries, and to means of all others, under one softmax.

    Encoders put alike keys into M nodes. A block of 16 alike queries reads about K keys exactly, in whole nodes; every
    other node stands under its mean key and mean value, as often as it has keys (`favor.landmark.bidirectional`).
    In causal layers a query reads its own section of 256 tokens, K keys that its block of 64 chose and K/16 that it
    chose itself; every section of 256 tokens has one mean, and M is not read (`favor.landmark.causal`). No query
    depends on a later one. With K or M (in encoders) at least the number of keys this is softmax attention. Gradients
    take the choice for a constant.

    Reading what a search found, and all else by means, is known from Routing Transformers (Roy et al., 2021) and
    clustered attention (Vyas et al., 2020). docs/papers/landmark_form.md compares the forms that were tried.

    Example:
        >>> import torch, favor
        >>> query, key, value = torch.randn(3, 1, 2, 50, 8)
        >>> out = favor.favor_attention(query, key, value, features="landmark", num_features=8, selected_keys=16)
        >>> out.shape
        torch.Size([1, 2, 50, 8])
    """

    name = "landmark"
    # Under favor# by its older spelling, features="landmark".
    backends: tuple[str, ...] = ("landmark", "favor#", "favor_sharp")
    supports_state = True
    operations = 4  # the logits of the means, and their values
    is_drawn = False
    has_kernel = True
    selects_keys = True
    default_selected = (768, 1024)  # docs/papers/landmark_form.md
    # Both passes on a CPU, 2,417 and 4,942 keys rounded up (eval/results/speed); not measured on a GPU.
    crossover_keys = {"cpu": (2560, 5120), "cuda": (24576, 524288)}  # noqa: RUF012

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@method(Landmarks)
def attend(family: Landmarks, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` through landmarks.

    Half precision is raised to float32 on a CPU, as for other features.

    Raises:
        ValueError: if the number of landmarks is less than 1.
    """
    if call.packing is not None:
        return call.packing.each(attend, family, query, key, value, call)
    if call.num_features < 1:
        raise ValueError(f"num_features must be a positive integer, got {call.num_features}.")
    (batch, heads, length), (key_heads, keys) = query.shape[:3], key.shape[1:3]
    if 0 in (batch, length, keys):
        zeros = query[..., :0].sum(-1, keepdim=True) + key[..., :0].sum() + value[..., :0].sum()  # a part of the graph
        return zeros.expand(-1, -1, -1, value.shape[-1])
    is_one_operator = is_fused(call.kernel, query, value)
    if is_one_operator and not call.is_causal:
        return bidirectional.fused(query, key, value, call)
    query, key, value = ready(query, key, value, call)
    if call.state is not None:
        return kept.attention(query, key, value, call)
    if is_one_operator and length == keys:
        return causal.fused(query, key, value, call)[0]
    counts = counted(call.query_padding(length, keys), query), counted(call.key_mask, key)
    if call.is_causal:
        options: Any = {"selected": call.selected_keys, "scale": call.scale, "kernel": call.kernel}
        return causal.attention(query, key, value, counts[1] - counts[0], **options)
    out = bidirectional.attention(
        query.unflatten(1, (key_heads, -1)).flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        (counts[0].repeat_interleave(key_heads), counts[1].repeat_interleave(key_heads)),
        means=call.num_features,
        selected=call.selected_keys,
        scale=call.scale,
        together=call.use_statistics,
        is_padded=call.key_mask is not None,
        kernel=call.kernel,
    )
    return out.view(batch, heads, length, -1)


def ready(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Puts zeros for padded keys and values, and raises half precision on a CPU."""
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)  # whatever padding holds
    if query.device.type == "cpu":
        raised = torch.promote_types(query.dtype, torch.float32)
        query, key, value = query.to(raised), key.to(raised), value.to(raised)
    return query, key, value
