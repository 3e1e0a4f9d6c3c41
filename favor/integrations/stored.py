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

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from favor import registry
from favor.config import BACKEND, MOST_FEATURES, MOST_HEADS, MOST_TOKENS, FavorConfig
from favor.features import Parameters
from favor.integrations.layer import (
    DIRECTIONS,
    FACTOR,
    OWN_OPTIONS,
    SHIFT,
    TRANSFORM,
    WEIGHTS,
    WEIGHTS_OF,
    FirstPass,
    attention_modules,
    change_state,
    layer_state,
    stored_choice,
)
from favor.integrations.modules import asking_layers, attention_names, configs_of, in_decoders
from favor.integrations.positions import adopt

# What the fields of an entry may be: one of some values, or an integer between two.
_CHOICES: dict[str, Collection[Any]] = {
    "family": registry.FAMILIES,
    "kind": ("calibrated", "corrected"),
    "orthogonal": (True, False),
    "maps": (True, False),
}
_RANGES: dict[str, tuple[float, float]] = {
    "key_heads": (1, MOST_HEADS),
    "head_dim": (1, 2**14),
    "num_features": (1, MOST_FEATURES),
    "directions": (1, MOST_FEATURES),
    "window": (0, MOST_TOKENS),
    "selected_keys": (0, MOST_TOKENS),
    "layer": (0, MOST_TOKENS),
    "seed": (-math.inf, math.inf),
}


def number_layers(model: nn.Module) -> None:
    """Gives each attention module of a model its `LayerState`, and the buffers that `config.favor_layers` lists.

    Layers are numbered by their place in `named_modules()`. Many models do not number their layers, and some give the
    same number to two of them (self and cross attention), so the modules' own `layer_idx` is not used. A module that
    has a state keeps its counts, and its parameters where the config lists buffers of the same shapes.

    Raises a ValueError or TypeError for options or entries of layers in the config that are malformed.
    """
    adopt(model)
    attention, config = attention_names(model), getattr(model, "config", None)
    entries = getattr(config, "favor_layers", None)
    FavorConfig.from_dict(getattr(config, "favor", None))
    _check_entries(entries)
    check_parts(getattr(config, "favor_parts", None))
    asking, decoding = asking_layers(attention), in_decoders(attention)
    first_pass = FirstPass(type(model).__name__, frozenset(n for n, path in enumerate(attention) if path in asking))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    scopes = _scopes({path.removeprefix(prefix): module for path, module in attention.items()})
    for number, (path, module) in enumerate(attention.items()):
        name, scope = path.removeprefix(prefix), scopes.get(id(getattr(module, "config", None)), "")
        own = (entries or {}).get(name, {})
        # A part with entries of its own, in a model without entries, keeps them.
        choice = {} if entries is None and layer_state(module) is not None else {"choice": own}
        place = {"number": number, "name": name, "scope": scope, "decodes": path in decoding, "first_pass": first_pass}
        change_state(module, **place, **choice)
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
    """Lists what weights of features were learned for: the directions of a layer, and what is exact in it."""
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
    """Puts parameters of a family into the numbered attention modules as buffers, and their shapes into the config.

    All are by layer number: parameters `[Hk, d, d]` and `[Hk, d]` (of kind "corrected", a correction of those of each
    sequence), and what the weights are for, see `weights_of`; None if the parameters have no weights.
    """
    modules, entries = attention_modules(model), dict[int, dict[str, Any]]()
    for number, own in parameters.items():
        entries[number] = {
            "family": family,
            "kind": kind,
            "key_heads": own.factor.shape[0],
            "head_dim": own.factor.shape[-1],
            WEIGHTS_OF: None if weights is None else dict(weights[number]),
            "maps": None if own.maps or own.shift is not None else False,
            "directions": None if own.directions is None else own.directions.shape[-2],
        }
    update_choices(model, entries)
    for number, own in parameters.items():
        weighted = None if own.log_weights is None else own.log_weights.shape[-1]
        features = {WEIGHTS: weighted, DIRECTIONS: entries[number]["directions"]}
        _attach(modules[number], own.factor.shape[0], own.factor.shape[-1], features)
        values = {
            TRANSFORM: own.transform if own.maps else torch.eye(own.factor.shape[-1]),
            FACTOR: own.factor,
            SHIFT: torch.zeros(()) if own.shift is None else own.shift,
            WEIGHTS: own.log_weights,
            DIRECTIONS: own.directions,
        }
        with torch.no_grad():
            for name, value in values.items():
                if value is not None:
                    getattr(modules[number], name).copy_(value)


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
    for number, module in attention_modules(model).items():
        if number in choices:
            merged = {**stored_choice(module), **choices[number]}
            change_state(module, choice={key: value for key, value in merged.items() if value is not None})
    _write(model)


def clear_choices(model: nn.Module) -> None:
    """Forgets which heads stay exact and which options layers have of their own; parameters stay."""
    for module in attention_modules(model).values():
        own = stored_choice(module)
        kept = {key: own[key] for key in own if key not in ("exact_heads", *OWN_OPTIONS)}
        change_state(module, choice=kept if "family" in kept else {})
    _write(model)


def drop_own(model: nn.Module, numbers: Collection[int], options: Collection[str]) -> None:
    """Forgets the own values that some layers, by number, have of options that are set for all of them now."""
    modules = {number: module for number, module in attention_modules(model).items() if number in numbers}
    dropped = {n: set(OWN_OPTIONS).intersection(options, stored_choice(module)) for n, module in modules.items()}
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

    `numbers`: how many features the buffers `WEIGHTS` and `DIRECTIONS` are for; None for no such buffer.
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


def _check_entries(entries: Any) -> None:
    """Raises a ValueError for a malformed `config.favor_layers`, naming layer and field; None is fine."""
    if entries is not None and not isinstance(entries, Mapping):
        raise ValueError(f"config.favor_layers must be a dictionary of layers by name, got {entries!r}.")
    for layer, entry in (entries or {}).items():
        stores = isinstance(entry, Mapping) and "family" in entry
        _check_fields(f'config.favor_layers["{layer}"]', entry, ("kind", "key_heads", "head_dim") if stores else ())


def check_parts(parts: Any) -> None:
    """Raises a ValueError for a malformed `config.favor_parts`, naming the part; None is fine."""
    if parts is not None and not isinstance(parts, Mapping):
        raise ValueError(f"config.favor_parts must be a dictionary of options by part, got {parts!r}.")
    for part, options in (parts or {}).items():
        if not isinstance(options, Mapping) or not isinstance(options.get(BACKEND), str):
            raise ValueError(f'config.favor_parts["{part}"] must be a dictionary with {BACKEND}, got {options!r}.')
        FavorConfig.from_dict(options)


def _check_fields(where: str, entry: Any, needed: Collection[str]) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dictionary, got {entry!r}.")
    missing = [name for name in needed if name not in entry]
    if missing:
        raise ValueError(f"{where} needs {', '.join(needed)}; {', '.join(missing)} is missing.")
    for name, value in entry.items():
        if name == WEIGHTS_OF:
            _check_fields(f"{where}.{name}", value, ("num_features", "layer"))
            continue
        if name == "exact_heads":
            heads: Any = entry.get("key_heads")
            most = heads - 1 if _is_between(heads, 1, MOST_HEADS) else MOST_HEADS - 1
            expected = f"a list of different key heads from 0 to {most}"
            fits = isinstance(value, list | tuple) and all(_is_between(head, 0, most) for head in value)
            fits = fits and len(set(value)) == len(value)
        elif name in _CHOICES:
            expected = " or ".join(map(repr, _CHOICES[name]))
            fits = isinstance(value, str | bool) and value in _CHOICES[name]
        elif name in _RANGES:
            expected = "an integer from {} to {}".format(*_RANGES[name])
            fits = _is_between(value, *_RANGES[name])
        else:
            known = (*_CHOICES, *_RANGES, "exact_heads", WEIGHTS_OF)
            hint = registry.did_you_mean(name, known)
            raise ValueError(f"{where} has an unknown field, {name}; the fields are {', '.join(known)}.{hint}")
        if not fits:
            raise ValueError(f"{where}.{name} must be {expected}, got {value!r}.")


def _is_between(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
