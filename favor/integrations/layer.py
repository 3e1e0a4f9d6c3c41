"""Which layer a module is, and how often it has run: what its random directions depend on besides the seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from favor.integrations.stored import NAME, restore

_LAYER = "favor_layer"
_CALLS = "favor_calls"
_DECODES = "favor_decodes"
_OLDEST = "favor_oldest_draw"


def number_layers(model: nn.Module) -> None:
    """Numbers the attention modules of a model by their place in `named_modules()`, and marks those of decoders.

    Many models do not number their layers, and some give the same number to two of them (self and cross attention),
    so the modules' own `layer_idx` is not used.
    """
    attention = {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ or hasattr(module, "is_causal")
    }
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for number, (name, module) in enumerate(attention.items()):
        setattr(module, _LAYER, number)
        setattr(module, NAME, name.removeprefix(prefix))
        setattr(module, _DECODES, _stands_in_a_decoder(name, attention))
    restore(model, attention.values())


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Attention modules of a model by layer number."""
    return {getattr(module, _LAYER): module for module in model.modules() if hasattr(module, _LAYER)}


def _stands_in_a_decoder(name: str, attention: dict[str, nn.Module]) -> bool:
    """Whether the nearest other attention is causal: then this is the cross attention of a decoder layer."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        inside = ".".join([*path[:depth], ""]) if depth else ""
        others = [
            module
            for other, module in attention.items()
            if other.startswith(inside) and not f"{name}.".startswith(f"{other}.") and not other.startswith(f"{name}.")
        ]
        if others:
            return any(getattr(module, "is_causal", False) for module in others)
    return False


def decodes(module: nn.Module) -> bool:
    """Whether the queries of a layer are those of a decoder, so that statistics over them would show the future."""
    marks = (getattr(module, _DECODES, False), getattr(module, "is_decoder", False))
    return any(marks) or bool(getattr(module.config, "is_decoder", False))


def is_self_attention(module: nn.Module, is_causal: bool, length: int, key_length: int) -> bool:
    """Whether the queries and keys of a call belong to the same tokens, so that a window has a meaning."""
    return is_causal or (length == key_length and not decodes(module))


def decodes_or_is_causal(module: nn.Module) -> bool:
    """Whether a module is an attention layer whose queries must not see each other's future."""
    if not hasattr(module, _LAYER) or not hasattr(module, "config"):
        return False
    return decodes(module) or bool(getattr(module, "is_causal", False))


def number_layers_of_new_models() -> None:
    """Has every transformers model number its attention modules at the end of its construction."""
    if hasattr(PreTrainedModel.post_init, "__wrapped__"):
        return
    original: Callable[[Any], None] = PreTrainedModel.post_init

    @wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        number_layers(self)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def layer_number(module: nn.Module) -> int:
    """Number of an attention module.

    Raises:
        ValueError: if the module has none, because its model was built before `favor` was imported.
    """
    number = getattr(module, _LAYER, None)
    if number is None:
        raise ValueError(
            f"{type(module).__name__} has no layer number, so its random directions are not defined. Import favor "
            "before building the model, or call favor.configure(model) once."
        )
    return number


def redraw_epoch(module: nn.Module, interval: int) -> int:
    """Which draw of the directions a forward pass uses: 0 in evaluation, 1, 2, ... in training with redraws.

    Raises:
        ValueError: if a backward pass recomputes activations of forward passes that had different directions.
    """
    if not module.training or interval == 0:
        return 0
    calls, oldest = getattr(module, _CALLS, 0), getattr(module, _OLDEST, None)
    # Activation checkpointing runs the forward pass again inside the backward pass: it has to see the same directions,
    # which are known if all passes since the last backward pass had the same.
    if torch._C._current_graph_task_id() != -1:
        epoch = 1 + (calls - 1) // interval
        setattr(module, _OLDEST, None)
        if oldest not in (None, epoch):
            raise ValueError(
                f"redraw_interval={interval} changed the random directions between two forward passes of one backward "
                "pass, and activation checkpointing cannot tell them apart. Call backward after each forward pass, "
                "set redraw_interval=0, or switch gradient checkpointing off."
            )
        return epoch
    epoch = 1 + calls // interval
    setattr(module, _CALLS, calls + 1)
    if oldest is None:
        setattr(module, _OLDEST, epoch)
    return epoch


class RedrawCounter:
    """How often each layer of a model has run in training, for checkpoints.

    Only training with `redraw_interval` > 0 needs it: `accelerator.register_for_checkpointing(RedrawCounter(model))`
    makes a resumed run draw the directions that the uninterrupted run would have drawn.

    Args:
        model: the model, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def _attention(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if hasattr(module, _LAYER)]

    def state_dict(self) -> dict[str, list[int]]:
        """Number of training passes of each attention module, in the order of `model.modules()`."""
        return {"calls": [getattr(module, _CALLS, 0) for module in self._attention()]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: if the model has another number of attention modules.
        """
        modules = self._attention()
        if len(modules) != len(state["calls"]):
            raise ValueError(
                f"expected counts for {len(modules)} attention modules, got {len(state['calls'])}: another model."
            )
        for module, count in zip(modules, state["calls"], strict=True):
            setattr(module, _CALLS, count)
