"""The attention layers of a model: their numbers, and what the model keeps for each of them.

What is kept are calibrated parameters, heads that stay exact, and options of a layer's own: `window`, `num_features`
and `selected_keys`. It is listed in `config.favor_layers`, by the names of the layers below the base model, so that
`from_pretrained` makes the buffers before it reads the weights: `{"encoder.layer.0.attention.self": {"family": "wderf",
"kind": "calibrated", "key_heads": 12, "head_dim": 32, "exact_heads": [3], "window": 256}}`. A layer with weights of
features also has `"weights_of": {"num_features": 64, "seed": 0, "orthogonal": true, "window": 0, "exact_heads": [],
"layer": 1}`, which says for what the weights were learned; if G = I and there is no shift, `"maps": false` saves
attention this work. `"directions": 64` says that the layer has that many learned directions in each head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from favor.config import FavorConfig
from favor.features import Parameters
from favor.integrations.entries import check_entries, check_parts
from favor.integrations.layer import (
    DIRECTIONS,
    FACTOR,
    OWN_OPTIONS,
    SHIFT,
    TRANSFORM,
    WEIGHTS,
    WEIGHTS_OF,
    FirstPass,
    change_state,
    layer_state,
    stored_choice,
)
from favor.integrations.modules import asking_layers, attention_names, configs_of, in_decoders


def number_layers(model: nn.Module) -> None:
    """Gives each attention module of a model its `LayerState`, and the buffers that `config.favor_layers` lists.

    Layers are numbered by their place in `named_modules()`. Many models do not number their layers, and some give the
    same number to two of them (self and cross attention), so the modules' own `layer_idx` is not used. A module that
    has a state keeps its counts, and its parameters where the config lists buffers of the same shapes.

    Args:
        model: any model; the config of a transformers model is read.

    Raises:
        ValueError, TypeError: for options or entries of layers in the config that are malformed, naming the field.
    """
    attention = attention_names(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    config = getattr(model, "config", None)
    FavorConfig.from_dict(getattr(config, "favor", None))
    entries = getattr(config, "favor_layers", None)
    check_entries(entries)
    check_parts(getattr(config, "favor_parts", None))
    asking = asking_layers(attention)
    numbers = frozenset(number for number, path in enumerate(attention) if path in asking)
    first_pass = FirstPass(type(model).__name__, numbers)
    decoding = in_decoders(attention)
    scopes = _scopes({path.removeprefix(prefix): module for path, module in attention.items()})
    for number, (path, module) in enumerate(attention.items()):
        name = path.removeprefix(prefix)
        scope = scopes.get(id(getattr(module, "config", None)), "")
        place = {"number": number, "name": name, "scope": scope, "first_pass": first_pass}
        place["decodes"] = path in decoding
        if entries is None and layer_state(module) is not None:
            change_state(module, **place)  # a part with entries of its own, in a model without entries
            continue
        own = (entries or {}).get(name, {})
        change_state(module, **place, choice=own)
        if "family" in own:
            features = {WEIGHTS: own.get(WEIGHTS_OF, {}).get("num_features"), DIRECTIONS: own.get("directions")}
            _attach(module, own["key_heads"], own["head_dim"], features)


def number_new_layers(model: nn.Module) -> None:
    """Numbers the layers of a model if one of them has no number. A part of a numbered model keeps its own."""
    if any(layer_state(module) is None for module in attention_names(model).values()):
        number_layers(model)


def _scopes(attention: Mapping[str, nn.Module]) -> dict[int, str]:
    """Gives, for each config by its identity, the smallest part of the model that holds all layers that share it."""
    scopes: dict[int, list[str]] = {}
    for name, module in attention.items():
        path, config = name.split("."), id(getattr(module, "config", None))
        common = scopes.get(config, path)
        equal = [a == b for a, b in zip(common, path, strict=False)]
        scopes[config] = common[: equal.index(False) if False in equal else len(equal)]
    return {config: ".".join(path) for config, path in scopes.items()}


def weights_of(choice: Mapping[str, Any], window: int, options: Any, layer: int) -> dict[str, Any]:
    """Lists what weights of features were learned for: their directions, and the part of attention that is exact.

    Args:
        choice: entry of the layer, see `stored_choice`.
        window: of the layers that have none of their own.
        options: holds num_features, seed and orthogonal.
        layer: number of the layer, whose directions they are.
    """
    own = {name: getattr(options, name) for name in ("num_features", "seed", "orthogonal")}
    exact = {"window": choice.get("window", window), "exact_heads": list(choice.get("exact_heads", ()))}
    return {**own, **exact, "layer": layer}


def store_parameters(
    model: nn.Module,
    parameters: Mapping[int, Parameters],
    family: str,
    kind: str = "calibrated",
    weights: Mapping[int, Mapping[str, Any]] | None = None,
) -> None:
    """Puts parameters into the attention modules as buffers, and their shapes into the config.

    Args:
        model: a model with numbered layers.
        parameters: by layer number, `[Hk, d, d]` and `[Hk, d]`.
        family: registry name of the features they belong to.
        kind: "calibrated" for parameters, "corrected" for a correction of those of each sequence.
        weights: what the weights are for, by layer number, see `weights_of`; None if the parameters have no weights.
    """
    shapes: dict[int, dict[str, Any]] = {
        number: {"family": family, "kind": kind, "key_heads": own.factor.shape[0], "head_dim": own.factor.shape[-1]}
        for number, own in parameters.items()
    }
    for number, shape in shapes.items():
        fitted = parameters[number]
        shape[WEIGHTS_OF] = None if weights is None else dict(weights[number])
        shape["maps"] = None if fitted.maps or fitted.shift is not None else False
        shape["directions"] = None if fitted.directions is None else fitted.directions.shape[-2]
    update_choices(model, shapes)
    for module in model.modules():
        state = layer_state(module)
        own = None if state is None else parameters.get(state.number)
        if own is None:
            continue
        key_heads, head_dim = own.factor.shape[:2]
        features = {
            WEIGHTS: None if own.log_weights is None else own.log_weights.shape[-1],
            DIRECTIONS: None if own.directions is None else own.directions.shape[-2],
        }
        _attach(module, key_heads, head_dim, features)
        like = getattr(module, FACTOR)
        eye = torch.eye(own.factor.shape[-1], dtype=like.dtype, device=like.device)
        _set(module, TRANSFORM, own.transform.to(like).expand_as(like) if own.maps else eye.expand_as(like))
        _set(module, FACTOR, own.factor.to(like))
        _set(module, SHIFT, torch.zeros_like(like[..., 0]) if own.shift is None else own.shift.to(like))
        for name, value in ((WEIGHTS, own.log_weights), (DIRECTIONS, own.directions)):
            if value is not None:
                _set(module, name, value.to(like))


def train_directions(model: nn.Module) -> list[nn.Parameter]:
    """Makes the learned directions of a model parameters, which an optimizer can train, and returns them."""
    found = []
    for module in model.modules():
        directions = getattr(module, DIRECTIONS, None)
        if directions is not None:
            delattr(module, DIRECTIONS)
            found.append(nn.Parameter(directions))
            module.register_parameter(DIRECTIONS, found[-1])
    return found


def fix_directions(model: nn.Module) -> None:
    """Makes directions that `train_directions` has made parameters buffers again."""
    for module in model.modules():
        directions = getattr(module, DIRECTIONS, None)
        if isinstance(directions, nn.Parameter):
            delattr(module, DIRECTIONS)
            module.register_buffer(DIRECTIONS, directions.detach())


def update_choices(model: nn.Module, choices: Mapping[int, Mapping[str, Any]]) -> None:
    """Merges entries, by layer number, into the modules and into `config.favor_layers`; None removes a value."""
    for module in model.modules():
        state = layer_state(module)
        added = None if state is None else choices.get(state.number)
        if added is not None:
            merged = {**stored_choice(module), **added}
            change_state(module, choice={key: value for key, value in merged.items() if value is not None})
    _write(model)


def clear_choices(model: nn.Module) -> None:
    """Forgets which heads stay exact and which options layers have of their own; parameters stay."""
    for module in model.modules():
        own = stored_choice(module)
        if own:
            kept = {key: own[key] for key in own if key not in ("exact_heads", *OWN_OPTIONS)}
            change_state(module, choice=kept if "family" in kept else {})
    _write(model)


def drop_own(model: nn.Module, numbers: Collection[int], options: Collection[str]) -> None:
    """Forgets layers' own values of options that are set for all of them now.

    Args:
        model: a model, or a part of one.
        numbers: of the layers.
        options: names of the options; those that no layer has of its own change nothing.
    """
    states = [state for state in map(layer_state, model.modules()) if state is not None and state.number in numbers]
    dropped = {state.number: set(OWN_OPTIONS).intersection(options, state.choice) for state in states}
    if any(dropped.values()):
        update_choices(model, {number: dict.fromkeys(names) for number, names in dropped.items()})


def _write(model: nn.Module) -> None:
    """Puts the entries of the layers into every config of the model that has or needs a list of them."""
    states = [state for state in map(layer_state, model.modules()) if state is not None]
    names, layers = {state.name for state in states}, {state.name: state.choice for state in states if state.choice}
    for config in configs_of(model):
        # A part of a model does not know the other layers of its config.
        before = getattr(config, "favor_layers", None)
        if layers or before is not None:
            config.favor_layers = {k: v for k, v in (before or {}).items() if k not in names} | layers


def _attach(module: nn.Module, key_heads: int, head_dim: int, numbers: Mapping[str, int | None]) -> None:
    """Makes buffers with the parameters of FAVOR+, which need no data, unless the module has buffers of that shape.

    Args:
        module: the attention module.
        key_heads, head_dim: of the layer.
        numbers: how many features the buffers `WEIGHTS` and `DIRECTIONS` are for; None for no such buffer.
    """
    device = next((p.device for p in module.parameters()), None)
    for name, number in numbers.items():
        present = getattr(module, name, None)
        shape = (key_heads, number, head_dim)[: 3 if name == DIRECTIONS else 2]
        if number is None and present is not None:
            delattr(module, name)
        elif number is not None and (present is None or present.shape != shape):
            module.register_buffer(name, torch.zeros(shape, device=device))  # type: ignore[arg-type]
    if getattr(module, FACTOR, torch.empty(0)).shape == (key_heads, head_dim, head_dim):
        return
    eye = torch.eye(head_dim, device=device).repeat(key_heads, 1, 1)
    module.register_buffer(TRANSFORM, eye)
    module.register_buffer(FACTOR, eye.clone())
    module.register_buffer(SHIFT, torch.zeros(key_heads, head_dim, device=device))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        getattr(module, name).copy_(value)
