"""Loading with transformers: names of backends are checked, used again, and refused if no layer reads them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor import registry
from favor.config import BACKEND
from favor.integrations._private import (
    after_construction,
    after_switch,
    around_saving,
    at_choice_of_backend,
    at_missing_weights,
)
from favor.integrations.adapters import watch_adapters
from favor.integrations.layer import BUFFERS
from favor.integrations.modules import (
    asking_layers,
    configs_of,
    dispatches,
    is_attention,
    private_configs,
    silent_layers,
)
from favor.integrations.saving import backends_kept
from favor.integrations.stored import number_layers

_logger = logging.getLogger("favor")
_WHOLE = "favor_is_for_all"  # attribute of a model while it is built: every part of it was asked to take the backend


def register_loading() -> None:
    """Makes every model of transformers check the name of its backend, keep it when saved, and use it again."""
    at_choice_of_backend(_choose)
    after_construction(_built)
    at_missing_weights(_refuse_missing)
    around_saving(backends_kept)
    after_switch(_switched)


def _choose(model: PreTrainedModel, name: str | None, is_built: bool) -> str | None:
    """Gives the backend that a model takes: the one asked for, else the one that it was saved with."""
    if is_built:
        name = _take_up(model, name)
    check_name(name)
    if name in registry.BACKENDS and never_dispatches(type(model)):
        raise ValueError(_NEVER.format(model=type(model).__name__, backend=name))
    if is_built and name in registry.BACKENDS:
        vars(model)[_WHOLE] = _asks_for_all(model.config)
    return name


def _take_up(model: PreTrainedModel, name: str | None) -> str | None:
    """Gives the backend that a model was saved with, unless another one was asked for; removes it from the config."""
    config: Any = model.config
    saved = saved_backend(config)
    if saved is None:
        return name
    config.favor = {option: value for option, value in config.favor.items() if option != BACKEND}
    if name is not None:
        config.favor_parts = None  # of the saved backend
        return name
    if saved in registry.BACKENDS:
        _logger.info("favor: %s was saved with %s and takes it up again.", type(model).__name__, saved)
    return saved


def _built(model: PreTrainedModel) -> None:
    watch_adapters()
    number_layers(model)
    if model.config._attn_implementation in registry.BACKENDS and not getattr(model.config, "favor_parts", None):
        if vars(model).pop(_WHOLE, False):
            _spread(model)
        check_dispatch(model, model.config._attn_implementation)


def _spread(model: PreTrainedModel) -> None:
    """Gives the backend of a model to parts that transformers built with another one, if all parts are to take it."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.config._attn_implementation in registry.BACKENDS:
            continue
        if any(map(dispatches, part.modules())):
            part.config._attn_implementation_internal = model.config._attn_implementation
            if getattr(model.config, "favor", None) and not getattr(part.config, "favor", None):
                part.config.favor = dict(model.config.favor)


def _asks_for_all(config: Any) -> bool:
    """Tells whether a config and those of its parts name a FAVOR backend, or none at all."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    own = getattr(config, "_attn_implementation", None) or saved_backend(config)
    return (own is None or own in registry.BACKENDS) and all(_asks_for_all(part) for part in parts if part is not None)


def _refuse_missing(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Raises a ValueError for parameters that `config.favor_layers` lists and the weights do not have."""
    ours = sorted(name for name in missing if name.rpartition(".")[2] in BUFFERS)
    if ours:
        raise ValueError(
            f"config.favor_layers of {type(model).__name__} lists stored parameters that the weights do not have: "
            f"{', '.join(ours[:3])}{', ...' if len(ours) > 3 else ''}. Load the weights that were saved with this "
            "config, or remove favor_layers from it and call favor.calibrate."
        )


def _switched(model: PreTrainedModel, name: Any) -> None:
    """Replaces backends of parts by one that is set for the whole config, and switches copies of the config too."""
    for config in configs_of(model):
        if getattr(config, "favor_parts", None):
            config.favor_parts = None
    for config in private_configs(model) if isinstance(name, str) else ():
        if not registry.BACKENDS.keys().isdisjoint((name, config._attn_implementation)):
            config._attn_implementation_internal = model.config._attn_implementation


def saved_backend(config: Any) -> str | None:
    """Gives the backend that a model was saved with; None if no part of it ran a FAVOR backend then."""
    saved = getattr(config, "favor", None)
    name = saved.get(BACKEND) if isinstance(saved, dict) else None
    return name if name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) else None


def check_name(name: Any) -> None:
    """Raises a ValueError for an unknown name that looks like a FAVOR backend; transformers checks the others."""
    if not isinstance(name, str) or "/" in name or name == "eager" or name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return  # names with a slash are kernels of the hub
    if name.startswith("paged|") and (base := name.removeprefix("paged|")) in registry.BACKENDS:
        raise ValueError(
            f"{base} is not supported for continuous batching, which keeps keys in pages. "
            'Use attn_implementation="sdpa".'
        )
    near = get_close_matches(name.lower().replace("favour", "favor"), registry.BACKENDS, n=1)
    if near or "favo" in name.lower():
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(map(repr, registry.BACKENDS))
        raise ValueError(f'attn_implementation="{name}" is no backend; {hint}The FAVOR backends are {known}.')


def never_dispatches(model_class: type[PreTrainedModel]) -> bool:
    """Tells whether the file of a model has attention layers of its own, none of which asks for a backend."""
    modules = [sys.modules.get(base.__module__) for base in model_class.__mro__ if _is_a_models_own(base)]
    spaces = [vars(module) for module in modules if module is not None]
    values = [value for space in spaces for value in space.values()]
    if any(isinstance(value, dict) and "eager" in value and all(map(is_attention, value.values())) for value in values):
        return True  # a table of classes by backend, without FAVOR backends
    if any(isinstance(value, AttentionInterface) for value in values):
        return False
    own = {space["__name__"] for space in spaces}
    return any(is_attention(value) and value.__module__ in own for value in values)


def _is_a_models_own(base: type) -> bool:
    return issubclass(base, PreTrainedModel) and base is not PreTrainedModel


def check_dispatch(model: nn.Module, backend: str) -> None:
    """Raises a ValueError if no attention layer of a built model asks for a backend; logs it if only some do not."""
    attention = {name: module for name, module in model.named_modules() if is_attention(type(module))}
    if attention and not asking_layers(attention):
        raise ValueError(_NEVER.format(model=type(model).__name__, backend=backend))
    alone = {type(module).__name__ for module in silent_layers(attention).values()}
    if alone:
        _report(type(model).__name__, ", ".join(sorted(alone)), backend)


@cache
def _report(model: str, layers: str, backend: str) -> None:
    _logger.warning(
        "favor: in %s, %s never ask for a backend and stay exact; other layers run %s.", model, layers, backend
    )


_NEVER = (
    'attn_implementation="{backend}": {model} computes its attention itself and never asks transformers for a backend, '
    "so it would stay exact. Keep its own attention; if it is a part of a larger model, name the parts that take "
    'it: attn_implementation={{"text_config": "{backend}"}} when loading, only="text_model" in favor.configure.'
)
