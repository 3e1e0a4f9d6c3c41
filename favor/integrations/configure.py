"""`favor.configure`: the backend and the options of a live model, or of one of its parts."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from favor import registry
from favor.config import BACKEND, FavorConfig, feature_family
from favor.integrations.layer import LayerState, is_inside, layer_state
from favor.integrations.loading import check_dispatch, check_name
from favor.integrations.modules import attention_names, configs_of
from favor.integrations.stored import drop_own, number_new_layers


def configure(
    model: PreTrainedModel,
    attn_implementation: str | dict[str, str] | None = None,
    *,
    only: str | None = None,
    **options: Any,
) -> Any:
    """Sets FAVOR options on a live model or a part of it, and the backend if one is given.

    Args:
        model: any transformers model; or a part of one that is itself a model, such as the encoder of an
            encoder-decoder; then no other part changes.
        attn_implementation: as in `model.set_attn_implementation`; None keeps the current one. In a dictionary, "" is
            the outermost config alone, and parts that are not named keep their backend. (In `from_pretrained` parts
            have no backend yet and take that of "", so name the parts that must stay exact.)
        only: name of a part of the model, as in `model.named_modules()`, such as "encoder": no other part changes.
            Default None: the whole model.
        **options: fields of `FavorConfig`; options that are not named keep their values. Named ones reach all layers,
            also those that `favor.convert` gave values of their own. They are stored in
            `model.config.favor` (and in the configs of sub-models), so `save_pretrained` and `from_pretrained` keep
            them. Parts that share a config, as in BART and Whisper, have their options in `config.favor_parts`.

    Returns:
        The model.

    Raises:
        ValueError, TypeError: for an unknown option, a bad value, one that the backend does not read, an unknown part,
            or a model that is not of transformers or never asks for a backend; nothing is changed then.

    Warns:
        UserWarning: if options are set and no FAVOR backend runs.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> import favor
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = favor.configure(BertModel(tiny), "favor#", num_features=64, exact_below=0)
        >>> model.config.favor["num_features"]
        64
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"favor.configure takes a model of transformers, got {type(model).__name__}. Load one with "
            "AutoModel.from_pretrained; in modules of your own, call favor.favor_attention."
        )
    for new in attn_implementation.values() if isinstance(attn_implementation, dict) else (attn_implementation,):
        check_name(new)
    number_new_layers(model)
    part, layers = _part(model, only)
    if part and isinstance(attn_implementation, dict):
        raise ValueError(f"a part takes one backend by name, got {attn_implementation!r} for {part!r}.")
    if isinstance(attn_implementation, str) and attn_implementation in registry.BACKENDS:
        meant = {module for _, module in layers}
        for inner in model.modules():  # no model in the part may be one that never asks for a backend
            if isinstance(inner, PreTrainedModel) and meant.issuperset(attention_names(inner).values()):
                check_dispatch(inner, attn_implementation)
    configured = [(state, module.config) for state, module in layers if hasattr(module, "config")]
    scopes = {id(config): state.scope for state, config in configured}
    configs: dict[int, Any] = {id(config): config for _, config in configured}
    if not part:
        configs |= {id(config): config for config in configs_of(model)}
    name = attn_implementation if isinstance(attn_implementation, str) else None
    shared = {key for key in configs if part and not is_inside(scopes[key], part)}
    changes = [_Change(config, part if key in shared else "") for key, config in configs.items()]
    for change in changes:
        change.merge(name, options)
    if attn_implementation is not None and not part:
        model.set_attn_implementation(attn_implementation)
        for inner in model.modules() if name else ():  # transformers 5.17 passes over copies of the config, as in T5
            if isinstance(inner, PreTrainedModel) and type(inner.config) is type(model.config):
                inner.config._attn_implementation_internal = model.config._attn_implementation
    for change in changes:
        change.apply(model, name, part)
    drop_own(model, {state.number for state, _ in layers}, options)
    running = {config._attn_implementation for config in configs.values()}
    if options and running.isdisjoint(registry.BACKENDS):
        warnings.warn(
            f"favor.configure stored {', '.join(options)}, which no layer reads: the backend is "
            f"{' and '.join(map(repr, running))}. Pass a FAVOR backend too, as in "
            'favor.configure(model, "landmark", ...).',
            stacklevel=2,
        )
    return model


def _part(model: PreTrainedModel, only: str | None) -> tuple[str, list[tuple[LayerState, nn.Module]]]:
    """Finds the part of the whole model that is meant, "" for all of it, and its attention layers."""
    layers = {
        path: (state, module) for path, module in attention_names(model).items() if (state := layer_state(module))
    }
    # A part of a model keeps the names that the whole model gave to its layers.
    named = [(f".{state.name}", f".{path}") for path, (state, _) in layers.items()]
    wholes = [name.removesuffix(path).lstrip(".") for name, path in named if name.endswith(path)]
    part = wholes[0] if wholes else ""
    if only is not None:
        part = f"{part}.{only}".lstrip(".").removeprefix(f"{model.base_model_prefix}.")
        part = "" if part == model.base_model_prefix else part
    inside = [(state, module) for state, module in layers.values() if is_inside(state.name, part)]
    if only is not None and not inside:
        known = ", ".join(sorted({state.name.partition(".")[0] for state, _ in layers.values()}))
        raise ValueError(f"only must name a part with attention layers, such as one in {known}; got {only!r}.")
    return part, inside


class _Change:
    """Change of one config: of its own options, or of those of a part, by name, whose config others share."""

    def __init__(self, config: Any, part: str) -> None:
        self.config, self.part = config, part
        self.own: dict[str, Any] = getattr(config, "favor", None) or {}
        self.parts: dict[str, dict[str, Any]] = dict(getattr(config, "favor_parts", None) or {})
        if part and not self.parts and config._attn_implementation in registry.BACKENDS:
            self.parts[""] = {**self.own, BACKEND: config._attn_implementation}  # the rest stays as it was
        self.merged: dict[str, dict[str, Any]] = {}

    def merge(self, name: str | None, options: dict[str, Any]) -> None:
        """Checks the new options; nothing is changed."""
        whole = self.parts if name is None else {}
        befores = {self.part: self.parts.get(self.part, self.own)} if self.part else {"": self.own, **whole}
        for part, before in befores.items():
            backend = name or before.get(BACKEND) or self.config._attn_implementation
            merged = FavorConfig.from_dict({**before, **options})
            if backend in registry.BACKENDS:  # a backend from a dictionary is checked when it runs
                feature_family(backend, merged, options)
            self.merged[part] = {**merged.to_dict(), BACKEND: backend}

    def apply(self, model: PreTrainedModel, name: str | None, part: str) -> None:
        if self.part:
            parts = {other: kept for other, kept in self.parts.items() if not is_inside(other, self.part)} | self.merged
            running = [own[BACKEND] for own in parts.values() if own[BACKEND] in registry.BACKENDS]
            self.config.favor_parts = parts if running else None
            new = running[0] if running else model.get_correct_attn_implementation(self.merged[self.part][BACKEND])
            self.config._attn_implementation_internal = new
            return
        self.config.favor = {key: value for key, value in self.merged.pop("").items() if key != BACKEND}
        if part and name is not None:
            self.config._attn_implementation_internal = model.get_correct_attn_implementation(name)
        if name is not None and self.parts:
            self.config.favor_parts = None  # the change is for the whole model
        elif self.merged:
            self.config.favor_parts = self.merged
