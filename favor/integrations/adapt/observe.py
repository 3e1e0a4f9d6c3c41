"""Watching attention layers at work: queries, keys and values of a model that runs with exact attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from favor.integrations.exact import exact_attention
from favor.integrations.layer import is_self_attention, layer_number
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.integrations.modules import configs_of, private_configs
from favor.integrations.stored import number_new_layers

_NAME = "favor_observe"
_callbacks: list[Callable[[Observation], None]] = []


class Observation(NamedTuple):
    """One call of an attention layer.

    Attributes:
        layer: number of the layer, as in `favor.integrations.layer`.
        module: its module.
        query: `[B, H, L, d]`; key and value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        padding: boolean `[B, S]`, True for real keys; None without padding.
        is_causal: whether the layer is causal.
        scale: of the logits.
        output: of exact attention, `[B, H, L, dv]`.
    """

    layer: int
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    is_causal: bool
    scale: float
    output: Tensor

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys belong to the same tokens, so that a window has a meaning."""
        return is_self_attention(self.module, self.is_causal, self.query.shape[2], self.key.shape[2])

    @property
    def query_padding(self) -> Tensor | None:
        """Boolean `[B, L]`, True for the queries that count, where queries and keys are those of the same tokens."""
        return self.padding if self.is_self_attention and self.query.shape[2] == self.key.shape[2] else None


@contextmanager
def observe(model: PreTrainedModel, callback: Callable[[Observation], None]) -> Iterator[None]:
    """Runs a model with exact attention in every layer that FAVOR could replace, and reports each call of one.

    Args:
        model: any transformers model.
        callback: called with an `Observation` in each attention layer, in the order of the forward pass.
    """
    before = [
        (config, config._attn_implementation, getattr(config, "favor_parts", None)) for config in configs_of(model)
    ]
    number_new_layers(model)
    model.set_attn_implementation(_NAME)
    for config in private_configs(model):
        config._attn_implementation_internal = _NAME
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.pop()
        for config, name, parts in before:
            config._attn_implementation = name
            if parts:
                config.favor_parts = parts


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse(kwargs, module)
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("observing attention needs batches with padding, not packed ones (cu_seq_lens_q was given).")
    shape = (query.shape[0], query.shape[2], key.shape[2])
    sees = visibility(module, attention_mask, is_causal, shape, kwargs.get("sliding_window"))
    tensors = (query, key, value)
    out = exact_attention(module, tensors, sees, mask=attention_mask, scaling=scaling, dropout=dropout)
    if sees.reach is not None or sees.dense:
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        seen = (*tensors, sees.padding, sees.causal, scale, out.transpose(1, 2))
        _callbacks[-1](Observation(layer_number(module), module, *seen))
    return out, None


def register_observer() -> None:
    """Makes the observer known to transformers, under a name of its own."""
    AttentionInterface.register(_NAME, _observed)
    AttentionMaskInterface.register(_NAME, favor_mask)
