"""Saving with transformers, which does not save the names of backends: they are kept with the options."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from transformers import PretrainedConfig, PreTrainedModel

from favor import registry
from favor.config import BACKEND
from favor.integrations.layer import layer_state
from favor.integrations.modules import configs_of

_logger = logging.getLogger("favor")
_NOTHING = object()


@contextmanager
def backends_kept(model: PreTrainedModel) -> Iterator[None]:
    """Writes into `config.favor` of each config the name of its backend, which transformers does not save."""
    configs = configs_of(model)
    _tell_unsaved(model)
    before = [vars(config).get("favor", _NOTHING) for config in configs]
    names = [getattr(config, "_attn_implementation", None) for config in configs]
    runs = not registry.BACKENDS.keys().isdisjoint(names)
    for config, name in zip(configs, names, strict=True):
        options = getattr(config, "favor", None)
        kept = {option: value for option, value in (options or {}).items() if option != BACKEND}
        if runs and isinstance(name, str):  # parts that stay exact name their backend, too
            config.favor = {**kept, BACKEND: name}
        elif options is not None:
            config.favor = kept
    try:
        yield
    finally:
        for config, options in zip(configs, before, strict=True):
            if options is _NOTHING:
                vars(config).pop("favor", None)
            else:
                config.favor = options


def _tell_unsaved(model: PreTrainedModel) -> None:
    """Warns of parts whose config is a copy that no file holds, if no saved config runs their backend."""
    saved = _saved_configs(model.config)
    kept = {config._attn_implementation for config in saved.values()}
    for module in model.modules():
        state, config = layer_state(module), getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if state is not None and id(config) not in saved and name in registry.BACKENDS and name not in kept:
            _report_unsaved(type(model).__name__, name, state.scope)


def _saved_configs(config: PretrainedConfig) -> dict[int, PretrainedConfig]:
    """Lists by their identity the configs that are saved with one: itself, and those in it."""
    found = {id(config): config}
    for value in vars(config).values():
        found |= _saved_configs(value) if isinstance(value, PretrainedConfig) else {}
    return found


@cache
def _report_unsaved(model: str, backend: str, part: str) -> None:
    _logger.warning(
        "favor: transformers does not save the config of %s in %s, which runs %s, and will load it without this "
        'backend. Call favor.configure(model, "%s", only="%s") again after loading.',
        *(part, model, backend, backend, part),
    )
