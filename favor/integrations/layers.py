"""Which layer a module is, and how often it has run: what its random directions depend on besides the seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_LAYER = "favor_layer"
_CALLS = "favor_calls"


def number_layers(model: nn.Module) -> None:
    """Numbers the attention modules of a model by their place in `named_modules()`.

    Many models do not number their layers, and some give the same number to two of them (self and cross attention),
    so the modules' own `layer_idx` is not used.
    """
    attention = (module for module in model.modules() if "Attention" in type(module).__name__)
    for number, module in enumerate(attention):
        setattr(module, _LAYER, number)


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
    """Which draw of the directions a forward pass uses: 0 in evaluation, 1, 2, ... in training with redraws."""
    if not module.training or interval == 0:
        return 0
    calls = getattr(module, _CALLS, 0)
    # Activation checkpointing runs the forward pass again inside the backward pass: it has to see the same directions.
    if torch._C._current_graph_task_id() != -1:
        return 1 + (calls - 1) // interval
    setattr(module, _CALLS, calls + 1)
    return 1 + calls // interval


class RedrawCounter:
    """How often each layer of a model has run in training, for checkpoints.

    Only training with `redraw_interval` > 0 needs it: `accelerator.register_for_checkpointing(RedrawCounter(model))`
    makes a resumed run draw the directions that the uninterrupted run would have drawn.

    Args:
        model: the model, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def _attention(self) -> dict[str, nn.Module]:
        # Numbers, not module names: wrappers change the names.
        return {str(m.favor_layer): m for m in self.model.modules() if hasattr(m, _LAYER)}

    def state_dict(self) -> dict[str, int]:
        """Number of training passes by layer number."""
        return {name: getattr(module, _CALLS, 0) for name, module in self._attention().items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: if the layers are not those of the saved model.
        """
        modules = self._attention()
        if modules.keys() != state.keys():
            raise ValueError(f"expected counts for {len(modules)} attention modules, got {len(state)}: another model.")
        for name, count in state.items():
            setattr(modules[name], _CALLS, count)
