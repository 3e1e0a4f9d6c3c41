"""What single attention layers keep in a model: calibrated parameters, heads that stay exact, windows of their own.

The layers are listed in `config.favor_layers`, by their names below the base model, so that `from_pretrained` makes the
buffers before it reads the weights: `{"encoder.layer.0.attention.self": {"family": "wderf", "kind": "calibrated",
"key_heads": 12, "head_dim": 32, "exact_heads": [3], "window": 256}}`. A layer with weights of single features has
`"weights_of": {"num_features": 64, "seed": 0, "orthogonal": true, "window": 0, "exact_heads": [], "layer": 1}`
besides, which says what they were learned for; where G = I and there is no shift, `"maps": false` spares attention the
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from favor.features import Parameters

TRANSFORM, FACTOR, SHIFT, WEIGHTS = "favor_transform", "favor_factor", "favor_shift", "favor_log_weights"
NAME = "favor_name"
WEIGHTS_OF = "weights_of"
_OWN, _KEPT = "favor_own", "favor_kept"


def restore(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Gives attention modules what `config.favor_layers` says they have; parameters that are there stay.

    Args:
        model: the model, whose config is read.
        modules: its attention modules, named.
    """
    layers = getattr(getattr(model, "config", None), "favor_layers", None)
    for module in modules:
        if layers is None and hasattr(module, _OWN):
            continue  # a part that knows of its own, in a model that does not
        own = (layers or {}).get(getattr(module, NAME), {})
        setattr(module, _OWN, own)
        if "family" in own:
            _attach(module, own["key_heads"], own["head_dim"], own.get(WEIGHTS_OF, {}).get("num_features"))


def stored_parameters(module: nn.Module) -> Parameters | None:
    """Parameters of a layer, float32 `[Hk, d, d]`; None if it has none."""
    buffers = [getattr(module, name, None) for name in (TRANSFORM, FACTOR, SHIFT, WEIGHTS)]
    if buffers[0] is None:
        return None
    maps = stored_choice(module).get("maps", True)
    if torch.compiler.is_compiling() or any(buffer is not None and buffer.is_inference() for buffer in buffers):
        return _parameters(buffers, maps)
    # The inverse costs as much as attention itself on short inputs: kept until a buffer changes.
    versions = [maps, *(None if buffer is None else buffer._version for buffer in buffers)]
    kept = getattr(module, _KEPT, None)
    if kept is None or kept[0] != versions or any(own is not seen for own, seen in zip(kept[1], buffers, strict=True)):
        with torch.inference_mode(False):
            kept = (versions, buffers, _parameters(buffers, maps))
        setattr(module, _KEPT, kept)
    return kept[2]


def _parameters(buffers: Sequence[Tensor | None], maps: bool) -> Parameters:
    transform, factor, shift, weights = (None if buffer is None else buffer.float() for buffer in buffers)
    assert transform is not None
    assert factor is not None
    if not maps:
        return Parameters(transform, transform, factor, maps=False, log_weights=weights)
    return Parameters(transform, torch.linalg.inv(transform), factor, shift=shift, log_weights=weights)


def stored_choice(module: nn.Module) -> dict[str, Any]:
    """Entry of a layer in `config.favor_layers`; empty if it has none."""
    return getattr(module, _OWN, {})


def weights_of(choice: Mapping[str, Any], window: int, options: Any, layer: int) -> dict[str, Any]:
    """What weights of single features are for: their directions, and the part of attention that is exact.

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
    update_choices(model, shapes)
    for module in model.modules():
        own = parameters.get(getattr(module, "favor_layer", -1))
        if own is None:
            continue
        key_heads, head_dim = own.factor.shape[:2]
        _attach(module, key_heads, head_dim, None if own.log_weights is None else own.log_weights.shape[-1])
        like = getattr(module, FACTOR)
        eye = torch.eye(own.factor.shape[-1], dtype=like.dtype, device=like.device)
        _set(module, TRANSFORM, own.transform.to(like).expand_as(like) if own.maps else eye.expand_as(like))
        _set(module, FACTOR, own.factor.to(like))
        _set(module, SHIFT, torch.zeros_like(like[..., 0]) if own.shift is None else own.shift.to(like))
        if own.log_weights is not None:
            _set(module, WEIGHTS, own.log_weights.to(like))


def update_choices(model: nn.Module, choices: Mapping[int, Mapping[str, Any]]) -> None:
    """Merges entries, by layer number, into the modules and into `config.favor_layers`; None takes one out."""
    for module in model.modules():
        added = choices.get(getattr(module, "favor_layer", -1))
        if added is not None:
            merged = {**stored_choice(module), **added}
            setattr(module, _OWN, {key: value for key, value in merged.items() if value is not None})
    _write(model)


def clear_choices(model: nn.Module) -> None:
    """Forgets which heads stay exact and which windows layers have of their own; parameters stay."""
    for module in model.modules():
        if stored_choice(module):
            own = {key: value for key, value in stored_choice(module).items() if key not in ("exact_heads", "window")}
            setattr(module, _OWN, own)
    _write(model)


def _write(model: nn.Module) -> None:
    layers = {getattr(module, NAME): stored_choice(module) for module in model.modules() if stored_choice(module)}
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
    for config in configs.values():
        if layers or hasattr(config, "favor_layers"):
            config.favor_layers = layers


def by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters | None,
    exact_heads: Sequence[int],
    exact: Callable[[Tensor, Tensor, Tensor], Tensor],
    linear: Callable[[Tensor, Tensor, Tensor, Parameters | None], Tensor],
) -> Tensor:
    """Attention `[B, L, H, dv]` with some key heads exact, and the query heads that belong to them.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        parameters: of all key heads, or None.
        exact_heads: numbers of key heads.
        exact, linear: both kinds of attention, for any number of heads.
    """
    if not exact_heads:
        return linear(query, key, value, parameters)
    number = key.shape[1]
    linear_heads = [head for head in range(number) if head not in exact_heads]
    if not linear_heads:
        return exact(query, key, value)

    def part(tensor: Tensor, heads: Sequence[int]) -> Tensor:
        return tensor.unflatten(1, (number, -1))[:, list(heads)].flatten(1, 2)

    def both(heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return part(query, heads), part(key, heads), part(value, heads)

    own = None if parameters is None else parameters.heads(linear_heads)
    outs = [exact(*both(exact_heads)), linear(*both(linear_heads), own)]
    groups = query.shape[1] // number
    joined = torch.cat([out.unflatten(2, (-1, groups)) for out in outs], dim=2)
    order = torch.tensor([*exact_heads, *linear_heads], device=query.device).argsort()
    return joined[:, :, order].flatten(2, 3)


def _attach(module: nn.Module, key_heads: int, head_dim: int, num_features: int | None) -> None:
    """Buffers of the parameters of FAVOR+, which need no data, unless buffers of that shape are there."""
    present = getattr(module, WEIGHTS, None)
    if num_features is None:
        if present is not None:
            delattr(module, WEIGHTS)
    elif present is None or present.shape != (key_heads, num_features):
        device = next((p.device for p in module.parameters()), None)
        module.register_buffer(WEIGHTS, torch.zeros(key_heads, num_features, device=device))
    if getattr(module, FACTOR, torch.empty(0)).shape == (key_heads, head_dim, head_dim):
        return
    device = next((p.device for p in module.parameters()), None)
    eye = torch.eye(head_dim, device=device).repeat(key_heads, 1, 1)
    module.register_buffer(TRANSFORM, eye)
    module.register_buffer(FACTOR, eye.clone())
    module.register_buffer(SHIFT, torch.zeros(key_heads, head_dim, device=device))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        getattr(module, name).copy_(value)
