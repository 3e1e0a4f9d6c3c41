"""One attention module: its `LayerState`, under one attribute, and the parameters that its buffers hold.

The states are made when a model is built (`favor.integrations.stored`); the functions below read them.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from favor import registry
from favor.config import BACKEND
from favor.features import Parameters
from favor.features.linalg import inverse

# Names in checkpoints.
TRANSFORM, FACTOR, SHIFT, WEIGHTS = "favor_transform", "favor_factor", "favor_shift", "favor_log_weights"
DIRECTIONS = "favor_directions"
BUFFERS = (TRANSFORM, FACTOR, SHIFT, WEIGHTS, DIRECTIONS)
WEIGHTS_OF = "weights_of"
ALL_EXACT = "all its heads are kept exact"  # in accounts
LINEAR = "linear: "  # begins the account of a layer that runs as asked
# Options that a layer may have of its own, in its entry of `config.favor_layers`.
OWN_OPTIONS = ("window", "num_features", "selected_keys")


@dataclass(eq=False)
class LayerState:
    """All that favor knows about an attention module; it is the attribute `favor_layer` of the module.

    A state never changes: `change_state` gives the module a new one. So copies of a module, such as the replicas of
    `nn.DataParallel`, do not share counts. It is not declared frozen, because torch.compile would then guard every
    field and compile again whenever one of them differs.

    Attributes:
        number: of the layer in its model; the random directions depend on it.
        name: of the module below the base model, its key in `config.favor_layers`.
        scope: name of the part of the model whose layers share the config of this one; empty for the whole model.
        decodes: whether the module is the cross attention of a decoder layer.
        choice: entry of the layer in `config.favor_layers`, see `favor.integrations.stored`; empty if it has none.
        calls: forward passes in training with redraws, without those that recompute activations.
        oldest_draw: draw of the first such pass since the last recomputation; None if there was none.
        prepared: the buffers, how often each was written, and the parameters made of them; None until they are needed.
        first_pass: of the model, for the log.
    """

    number: int
    name: str
    scope: str
    decodes: bool
    choice: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    oldest_draw: int | None = None
    prepared: tuple[Sequence[Tensor | None], Sequence[Any], Parameters] | None = None
    first_pass: FirstPass | None = None


@dataclass(eq=False)
class FirstPass:
    """Account of the first forward pass of a model; its layers share it.

    Attributes:
        expected: numbers of the layers that ask for a backend.
        seen: by layer number, what ran and why, and the thread that it ran in.
        keys: the most keys of a layer.
    """

    model: str
    expected: frozenset[int]
    seen: dict[int, tuple[str, int]] = field(default_factory=dict)
    keys: int = 0
    is_told: bool = False

    def note(self, layer: int, account: str, keys: int) -> None:
        """Records what a layer ran, and tells the log when all layers of the model have run, or one has run again."""
        thread = threading.get_ident()
        if layer not in self.seen:
            self.seen[layer], self.keys = (account, thread), max(self.keys, keys)
            if not self.expected <= self.seen.keys():
                return
        elif self.seen[layer][1] != thread:
            return  # a replica of nn.DataParallel, in the same pass
        self.is_told = True
        counts = Counter(account for account, _ in self.seen.values())
        layers = "; ".join(f"{count} layer{'s' if count > 1 else ''} {account}" for account, count in counts.items())
        # A layer without linear attention makes the line a warning, which the log shows by default.
        as_asked = all(account.startswith(LINEAR) for account in counts)
        logging.getLogger("favor").log(
            logging.INFO if as_asked else logging.WARNING,
            "favor: first forward pass of %s, up to %d keys: %s. favor.describe(model, length) has the details.",
            *(self.model, self.keys, layers),
        )


def layer_state(module: nn.Module) -> LayerState | None:
    """Gives the state of an attention module; None for other modules, and before `favor` has seen the model."""
    state = getattr(module, "favor_layer", None)
    return state if isinstance(state, LayerState) else None  # a module pickled by version 0.1.0 has a number there


def change_state(module: nn.Module, **changes: Any) -> None:
    """Gives an attention module a state with some fields changed, or its first one."""
    state = layer_state(module)
    module.favor_layer = LayerState(**changes) if state is None else replace(state, **changes)  # type: ignore[assignment]


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Lists the attention modules of a model by layer number."""
    states = ((layer_state(module), module) for module in model.modules())
    return {state.number: module for state, module in states if state is not None}


def layer_number(module: nn.Module) -> int:
    """Gives the number of an attention module; raises a ValueError if its model was built before the import."""
    state = layer_state(module)
    if state is None:
        raise ValueError(
            f"{type(module).__name__} has no layer number, so its random directions are not defined. Import favor "
            "before building the model, or call favor.configure(model) once."
        )
    return state.number


def decodes(module: nn.Module) -> bool:
    """Tells whether the queries are those of a decoder, so that statistics over them would show the future."""
    state = layer_state(module)
    marks = (state is not None and state.decodes, getattr(module, "is_decoder", False))
    return any(marks) or bool(getattr(module.config, "is_decoder", False))


def is_self_attention(module: nn.Module, is_causal: bool, length: int, key_length: int) -> bool:
    """Tells whether the queries and keys of a call belong to the same tokens, so that a window has a meaning."""
    return is_causal or (length == key_length and not decodes(module))


def decodes_or_is_causal(module: nn.Module) -> bool:
    """Tells whether a module is an attention layer whose queries must not see each other's future."""
    if layer_state(module) is None or not hasattr(module, "config"):
        return False
    return decodes(module) or bool(getattr(module, "is_causal", False))


def layer_options(module: nn.Module, backend: str) -> tuple[str | None, dict[str, Any]]:
    """Gives the backend and the options of a layer: those of its part of the model, or else of its config.

    A layer's own numbers of features and of selected keys take the place of those. Its own window is read where
    attention runs; the length from which a layer is linear depends on the window that layers share. The name is None
    for a layer that stays exact.
    """
    parts, options = getattr(module.config, "favor_parts", None), getattr(module.config, "favor", None) or {}
    if parts and backend in registry.BACKENDS:
        state = layer_state(module)
        around = [part for part in parts if is_inside("" if state is None else state.name, part)]
        if not around:
            return None, {}
        options = parts[max(around, key=len)]
        backend = options[BACKEND]
    own = {name: value for name, value in stored_choice(module).items() if name in OWN_OPTIONS and name != "window"}
    return (backend if backend in registry.BACKENDS else None), {**options, **own}


def is_inside(name: str, part: str) -> bool:
    """Tells whether a module, by its dotted name, is a part of a model or in it; "" is the whole model."""
    return part in ("", name) or name.startswith(f"{part}.")


def stored_choice(module: nn.Module) -> dict[str, Any]:
    """Gives the entry of a layer in `config.favor_layers`; empty if the layer has none."""
    state = layer_state(module)
    return {} if state is None else state.choice


def all_exact(choice: Mapping[str, Any]) -> bool:
    """Tells whether an entry of a layer keeps all its heads exact."""
    return bool(choice.get("exact_heads")) and len(choice["exact_heads"]) == choice.get("key_heads")


def stored_parameters(module: nn.Module) -> Parameters | None:
    """Gives the parameters that a layer stores, float32 `[Hk, d, d]`; None if it stores none."""
    buffers = [getattr(module, name, None) for name in BUFFERS]
    if buffers[0] is None:
        return None
    maps = stored_choice(module).get("maps", True)
    if torch.compiler.is_compiling() or any(buffer is not None and buffer.is_inference() for buffer in buffers):
        return _parameters(buffers, maps)
    # The inverse costs as much as attention itself on short inputs, so it is kept until a buffer changes.
    versions = [maps, *(None if buffer is None else buffer._version for buffer in buffers)]
    state = layer_state(module)
    kept = None if state is None else state.prepared
    if kept is not None and kept[1] == versions and all(map(operator.is_, kept[0], buffers)):
        return kept[2]
    with torch.inference_mode(False):
        parameters = _parameters(buffers, maps)
    if state is not None:
        change_state(module, prepared=(buffers, versions, parameters))
    return parameters


def _parameters(buffers: Sequence[Tensor | None], maps: bool) -> Parameters:
    transform, factor, shift, weights, directions = (None if buffer is None else buffer.float() for buffer in buffers)
    assert transform is not None
    assert factor is not None
    inverted, shift = (inverse(transform), shift) if maps else (transform, None)
    return Parameters(transform, inverted, factor, maps, shift, weights, directions=directions)


def redraw_epoch(module: nn.Module, interval: int) -> int:
    """Counts a forward pass and gives its draw of the directions: 0 in evaluation, 1, 2, ... in training with redraws.

    Raises a ValueError if a backward pass recomputes activations of forward passes that had different directions.
    """
    if not module.training or interval == 0:
        return 0
    state = layer_state(module)
    assert state is not None
    # Activation checkpointing runs the forward pass again inside the backward pass: it has to see the same directions,
    # which are known if all passes since the last backward pass had the same.
    if torch._C._current_graph_task_id() != -1:
        epoch = 1 + (state.calls - 1) // interval
        change_state(module, oldest_draw=None)
        if state.oldest_draw not in (None, epoch):
            raise ValueError(
                f"redraw_interval={interval} changed the random directions between two forward passes of one backward "
                "pass, and activation checkpointing cannot tell them apart. Call backward after each forward pass, "
                "set redraw_interval=0, or switch gradient checkpointing off."
            )
        return epoch
    epoch = 1 + state.calls // interval
    change_state(module, calls=state.calls + 1, oldest_draw=epoch if state.oldest_draw is None else state.oldest_draw)
    return epoch


class RedrawCounter:
    """Saves and restores how often each layer of a model has run in training.

    Only training with `redraw_interval` > 0 needs it: `accelerator.register_for_checkpointing(RedrawCounter(model))`
    makes a resumed run draw the directions that the uninterrupted run would have drawn.

    Args:
        model: the model, wrapped or not.

    Example:
        >>> import favor
        >>> from transformers import BertConfig, BertModel
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = favor.configure(BertModel(tiny), "favor+", redraw_interval=10)
        >>> counter = favor.RedrawCounter(model)
        >>> counter.load_state_dict(counter.state_dict())
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, list[int]]:
        """Gives the training passes of each attention module, in the order of `model.modules()`."""
        return {"calls": [state.calls for state in map(layer_state, self.model.modules()) if state is not None]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Restores what `state_dict` returned; raises a ValueError for another number of attention modules."""
        modules = [module for module in self.model.modules() if layer_state(module) is not None]
        if len(modules) != len(state["calls"]):
            raise ValueError(
                f"counts of {len(state['calls'])} layers are of another model, not of these {len(modules)}."
            )
        for module, count in zip(modules, state["calls"], strict=True):
            change_state(module, calls=count)
