"""Watching attention layers at work: queries, keys and values of a model that runs with exact attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from favor.integrations.exact import Call, exact_attention
from favor.integrations.layer import is_self_attention, layer_number
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.integrations.modules import configs_of, evaluating, private_configs
from favor.integrations.positions import OBSERVER, relative_of
from favor.integrations.stored import number_new_layers

_callbacks: list[Callable[[Observation], None]] = []


class Observation(NamedTuple):
    """One call of an attention layer, and the output of exact attention `[B, H, L, dv]`.

    Attributes:
        layer: number of the layer, as in `favor.integrations.layer`.
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        padding: boolean `[B, S]`, True for real keys; None without padding.
        scale: of the logits.
        relative: positions, see `favor.integrations.exact.Call`.
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
    relative: Any = None

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys belong to the same tokens, so that a window has a meaning."""
        return is_self_attention(self.module, self.is_causal, self.query.shape[2], self.key.shape[2])

    @property
    def query_padding(self) -> Tensor | None:
        """Boolean `[B, L]`, True for the queries that count, where queries and keys are those of the same tokens."""
        return self.padding if self.is_self_attention and self.query.shape[2] == self.key.shape[2] else None


def relative_error(output: Tensor, seen: Observation, places: Tensor | None = None) -> Tensor:
    """Divides the Frobenius norm of output - exact by that of exact, per sequence and head `[B, H]`; less is better.

    The output `[B, H, n, dv]` is that of the n queries at `places`, or of all; rows of padding do not count.
    """
    exact, mask = seen.output, seen.query_padding
    if places is not None:
        exact, mask = exact[:, :, places], None if mask is None else mask[:, places]
    dtype = torch.promote_types(exact.dtype, torch.float32)
    exact = exact.to(dtype)
    difference = output.to(dtype) - exact
    if mask is not None:
        rows = mask[:, None, :, None]
        difference, exact = difference * rows, exact * rows
    return difference.flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1).clamp(min=1e-12)


@contextmanager
def observe(model: PreTrainedModel, callback: Callable[[Observation], None]) -> Iterator[None]:
    """Runs a model with exact attention in every layer that FAVOR could replace.

    The callback gets an `Observation` of each call of such a layer, in the order of the forward pass.
    """
    before = [(own, own._attn_implementation, getattr(own, "favor_parts", None)) for own in configs_of(model)]
    number_new_layers(model)
    _callbacks.append(callback)
    try:
        model.set_attn_implementation(OBSERVER)
        for config in private_configs(model):
            config._attn_implementation_internal = OBSERVER
        yield
    finally:
        _callbacks.pop()
        for config, name, parts in before:
            config._attn_implementation = name
            if parts:
                config.favor_parts = parts


@torch.no_grad()
def observe_batches(
    model: PreTrainedModel,
    dataloader: Iterable[Any],
    callbacks: Iterable[Callable[[Observation], None]],
    max_batches: int | None = None,
) -> None:
    """Runs a model in evaluation mode over data, as for `favor.calibrate`, and reports each call as `observe` does.

    Raises a ValueError if there is no batch, or no attention layer ran.
    """
    device, batches, layers = next(model.parameters()).device, 0, set()

    def note(seen: Observation) -> None:
        layers.add(seen.layer)
        for callback in callbacks:
            callback(seen)

    with evaluating(model), observe(model, note):
        for batch in islice(dataloader, max_batches):
            # A head may want more than tokens, such as choices or an end of the text, and has no attention.
            reads = model if isinstance(batch, Mapping) else model.base_model
            reads(**_inputs(batch, device))
            batches += 1
    if not layers:
        raise ValueError(
            f"no attention layer of {type(model).__name__} ran in {batches} batches; pass a dataloader of batches, "
            "each a tensor of input_ids or a dictionary of the model's arguments."
        )


def _inputs(batch: Any, device: torch.device) -> dict[str, Tensor]:
    """Takes the model's arguments, without labels, from a dictionary, a tensor of input_ids or a 1-tuple of it."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        (batch,) = batch
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping) or not all(isinstance(tensor, Tensor) for tensor in batch.values()):
        raise ValueError(
            "a batch must be a tensor of input_ids or a dictionary of tensors with the model's arguments, got "
            f"{type(batch).__name__}{list(batch) if isinstance(batch, Mapping) else ''}."
        )
    return {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}


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
    bias = kwargs.pop("position_bias", None)
    relative = None if bias is None else relative_of(module, bias)
    refuse(kwargs, module)
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("observing attention needs batches with padding, not packed ones (cu_seq_lens_q was given).")
    shape = (query.shape[0], query.shape[2], key.shape[2])
    sees = visibility(module, attention_mask, is_causal, shape, kwargs.get("sliding_window"))
    tensors = (query, key, value)
    out = exact_attention(Call(module, sees, scaling, dropout, None, relative), *tensors, attention_mask)
    if sees.reach is not None or sees.dense:
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        seen = (*tensors, sees.padding, sees.causal, scale, out.transpose(1, 2), relative)
        _callbacks[-1](Observation(layer_number(module), module, *seen))
    return out, None


def register_observer() -> None:
    """Makes the observer known to transformers, under a name of its own."""
    AttentionInterface.register(OBSERVER, _observed)
    AttentionMaskInterface.register(OBSERVER, favor_mask)
