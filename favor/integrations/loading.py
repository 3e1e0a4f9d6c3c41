"""Loading and saving by transformers and peft: names of backends are checked, kept, and refused if no layer reads them.

The wrapped methods are private in part. Checked on transformers 5.17 to 5.23; with another version, run
tests/integrations.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AttentionInterface, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

from favor import registry
from favor.config import BACKEND, FavorConfig, warn_once
from favor.integrations.layer import BUFFERS, layer_state
from favor.integrations.modules import (
    asking_layers,
    configs_of,
    dispatches,
    is_attention,
    private_configs,
    silent_layers,
    wrap_once,
)
from favor.integrations.stored import check_parts, number_layers

_logger = logging.getLogger("favor")
_WHOLE = "favor_is_for_all"  # attribute of a model while it is built: every part of it was asked to take the backend
_NOTE = "favor.json"  # beside the adapters of peft
_PLACE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download", "proxies")
_NEVER = (
    'attn_implementation="{backend}": {model} computes its attention itself and never asks transformers for a backend, '
    "so it would stay exact. Keep its own attention; if it is a part of a larger model, name the parts that take "
    'it: attn_implementation={{"text_config": "{backend}"}} when loading, only="text_model" in favor.configure.'
)
_PAGED = (
    "{backend} is not supported for continuous batching, whose pages of keys and values need exact attention; use "
    'model.generate, or attn_implementation="sdpa".'
)


def register_loading() -> None:
    """Makes every model of transformers check the name of its backend, keep it when saved, and use it again."""
    wrap_once(PreTrainedModel, "_check_and_adjust_attn_implementation", _choose)
    wrap_once(PreTrainedModel, "post_init", _built)
    wrap_once(PreTrainedModel, "_move_missing_keys_from_meta_to_device", _refuse_missing)
    wrap_once(PreTrainedModel, "save_pretrained", _save)
    wrap_once(PreTrainedModel, "set_attn_implementation", _switch)
    wrap_once(GenerationMixin, "init_continuous_batching", _refuse_batching)


def _choose(
    original: Any, model: Any, attn_implementation: str | None, is_init_check: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Takes the backend that was asked for, else the one that the model was saved with."""
    name = _saved_name(model, attn_implementation) if is_init_check else attn_implementation
    check_name(name)
    if name in registry.BACKENDS and never_dispatches(type(model)):
        raise ValueError(_NEVER.format(model=type(model).__name__, backend=name))
    if is_init_check and name in registry.BACKENDS:
        vars(model)[_WHOLE] = _asks_for_all(model.config)
    return original(model, name, is_init_check, *args, **kwargs)


def _saved_name(model: PreTrainedModel, name: str | None) -> str | None:
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


def _built(original: Callable[..., Any], model: PreTrainedModel) -> None:
    original(model)
    watch_adapters()
    number_layers(model)
    backend = model.config._attn_implementation
    if backend not in registry.BACKENDS or getattr(model.config, "favor_parts", None):
        return
    # transformers built some parts with another backend, though all are to take this one.
    for part in model.modules() if vars(model).pop(_WHOLE, False) else ():
        if not isinstance(part, PreTrainedModel) or part.config._attn_implementation in registry.BACKENDS:
            continue
        if any(map(dispatches, part.modules())):
            part.config._attn_implementation_internal = backend
            if getattr(model.config, "favor", None) and not getattr(part.config, "favor", None):
                part.config.favor = dict(model.config.favor)
    check_dispatch(model, backend)


def _asks_for_all(config: Any) -> bool:
    """Tells whether a config and those of its parts name a FAVOR backend, or none at all."""
    own = getattr(config, "_attn_implementation", None) or saved_backend(config)
    return (own is None or own in registry.BACKENDS) and all(map(_asks_for_all, _parts(config).values()))


def _parts(config: Any) -> dict[str, Any]:
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return {name: part for name, part in parts.items() if part is not None}


def _refuse_missing(original: Any, model: Any, missing_keys: Collection[str], *args: Any, **kwargs: Any) -> Any:
    """Raises a ValueError for parameters that `config.favor_layers` lists and the weights do not have."""
    ours = sorted(name for name in missing_keys if name.rpartition(".")[2] in BUFFERS)
    if ours:
        raise ValueError(
            f"config.favor_layers of {type(model).__name__} lists stored parameters that the weights do not have: "
            f"{', '.join(ours[:3])}{', ...' if len(ours) > 3 else ''}. Load the weights that were saved with this "
            "config, or remove favor_layers from it and call favor.calibrate."
        )
    return original(model, missing_keys, *args, **kwargs)


def _switch(original: Any, model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces backends of parts by one that is set for the whole config, and switches copies of the config too."""
    result = original(model, attn_implementation, *args, **kwargs)
    for config in configs_of(model):
        if getattr(config, "favor_parts", None):
            config.favor_parts = None
    for config in private_configs(model) if isinstance(attn_implementation, str) else ():
        if not registry.BACKENDS.keys().isdisjoint((attn_implementation, config._attn_implementation)):
            config._attn_implementation_internal = model.config._attn_implementation
    return result


def _refuse_batching(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises a ValueError where transformers would switch a backend to flash attention, if that is installed."""
    for config in configs_of(model):
        if getattr(config, "_attn_implementation", None) in registry.BACKENDS:
            raise ValueError(_PAGED.format(backend=config._attn_implementation))
    return original(model, *args, **kwargs)


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
        raise ValueError(_PAGED.format(backend=base))
    near = get_close_matches(name.lower().replace("favour", "favor"), registry.BACKENDS, n=1)
    if near or "favo" in name.lower():
        hint, known = f"did you mean {near[0]!r}? " if near else "", ", ".join(map(repr, registry.BACKENDS))
        raise ValueError(f'attn_implementation="{name}" is no backend; {hint}The FAVOR backends are {known}.')


def never_dispatches(model_class: type[PreTrainedModel]) -> bool:
    """Tells whether the file of a model has attention layers of its own, none of which asks for a backend."""
    bases = [b for b in model_class.__mro__ if issubclass(b, PreTrainedModel) and b is not PreTrainedModel]
    spaces = [vars(sys.modules[base.__module__]) for base in bases if base.__module__ in sys.modules]
    values = [value for space in spaces for value in space.values()]
    if any(isinstance(value, dict) and "eager" in value and all(map(is_attention, value.values())) for value in values):
        return True  # a table of classes by backend, without FAVOR backends
    if any(isinstance(value, AttentionInterface) for value in values):
        return False
    own = {space["__name__"] for space in spaces}
    return any(is_attention(value) and value.__module__ in own for value in values)


def check_dispatch(model: nn.Module, backend: str) -> None:
    """Raises a ValueError if no attention layer of a built model asks for a backend; logs it if only some do not."""
    name, attention = type(model).__name__, {n: m for n, m in model.named_modules() if is_attention(type(m))}
    if attention and not asking_layers(attention):
        raise ValueError(_NEVER.format(model=name, backend=backend))
    alone = ", ".join(sorted({type(module).__name__ for module in silent_layers(attention).values()}))
    if alone:
        warn_once(f"in {name}, {alone} never ask for a backend and stay exact; other layers run {backend}.")


def _save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves with the name of its backend in `config.favor` of each config; transformers does not save these names."""
    configs = configs_of(model)
    _tell_unsaved(model)
    before = [("favor" in vars(config), getattr(config, "favor", None)) for config in configs]
    names = [getattr(config, "_attn_implementation", None) for config in configs]
    runs = not registry.BACKENDS.keys().isdisjoint(names)
    for config, name, (_, options) in zip(configs, names, before, strict=True):
        kept = {option: value for option, value in (options or {}).items() if option != BACKEND}
        if runs and isinstance(name, str):  # parts that stay exact name their backend, too
            config.favor = {**kept, BACKEND: name}
        elif options is not None:
            config.favor = kept
    try:
        return original(model, *args, **kwargs)
    finally:
        for config, (had, options) in zip(configs, before, strict=True):
            config.favor = options
            if not had:
                vars(config).pop("favor")


def _tell_unsaved(model: PreTrainedModel) -> None:
    """Warns of parts whose config is a copy that no file holds, if no saved config runs their backend."""
    saved = _saved_configs(model.config)
    kept = {config._attn_implementation for config in saved.values()}
    for module in model.modules():
        state, config = layer_state(module), getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if state is not None and id(config) not in saved and name in registry.BACKENDS and name not in kept:
            warn_once(
                f"transformers does not save the config of {state.scope} in {type(model).__name__}, which runs {name}, "
                f'and will load it without this backend. Call favor.configure(model, "{name}", only="{state.scope}") '
                "again after loading."
            )


def _saved_configs(config: PretrainedConfig) -> dict[int, PretrainedConfig]:
    """Lists by their identity the configs that are saved with one: itself, and those in it."""
    found = {id(config): config}
    for value in vars(config).values():
        found |= _saved_configs(value) if isinstance(value, PretrainedConfig) else {}
    return found


def watch_adapters() -> None:
    """Makes peft, if it is imported, save the backend of a model beside its adapters, and use it again with them.

    peft saves only the adapters and loads their base model anew, which would otherwise run exact attention.
    """
    peft_model: Any = getattr(sys.modules.get("peft"), "PeftModel", None)  # None while peft is being imported
    if peft_model is not None:
        wrap_once(peft_model, "save_pretrained", _save_adapters)
        wrap_once(peft_model, "from_pretrained", _load_adapters)


def _save_adapters(original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, save_directory, *args, **kwargs)
    settings = {name: own for name, config in _configs(self.get_base_model()).items() if (own := _settings(config))}
    saved = kwargs.get("selected_adapters") or list(self.peft_config)
    for name in saved if kwargs.get("is_main_process", True) else ():
        note = Path(save_directory, "" if name == "default" else name, _NOTE)
        if settings:
            note.write_text(json.dumps(settings, indent=2) + "\n")
        else:
            note.unlink(missing_ok=True)
    return result


def _load_adapters(original: Any, cls: type, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    options = {name: kwargs[name] for name in _PLACE if kwargs.get(name)}
    for what in ("missing_entries", "connection_errors", "gated_repo"):
        options[f"_raise_exceptions_for_{what}"] = False
    path = cached_file(str(model_id), _NOTE, **options)
    if path is not None:
        _take_up(model, json.loads(Path(path).read_text()))
    return original(cls, model, model_id, *args, **kwargs)


def _configs(model: Any) -> dict[str, Any]:
    """Lists the config of a model, under "", and those of its parts."""
    config = getattr(model, "config", None)
    return {"": config, **_parts(config)} if isinstance(config, PretrainedConfig) else {}


def _settings(config: Any) -> dict[str, Any]:
    if getattr(config, "_attn_implementation", None) not in registry.BACKENDS:
        return {}
    kept = {name: getattr(config, name) for name in ("favor", "favor_parts") if getattr(config, name, None)}
    return {BACKEND: config._attn_implementation, **kept}


def _take_up(model: Any, settings: Any) -> None:
    """Gives the configs of a base model the backends that adapters were trained with, where it has no FAVOR backend."""
    if not isinstance(settings, dict) or not all(isinstance(own, dict) for own in settings.values()):
        raise ValueError(f"{_NOTE} of the adapter must hold a dictionary of settings by config, got {settings!r}.")
    for name, config in _configs(model).items():
        own, present = settings.get(name), config._attn_implementation
        if not own or present in registry.BACKENDS:
            continue
        backend = own.get(BACKEND)
        if backend not in registry.BACKENDS:
            raise ValueError(f"{_NOTE} of the adapter names the backend {backend!r}, which is not a FAVOR backend.")
        _logger.warning(
            "favor: the adapter was trained in a model with %s, and the base model with %s: it now takes %s. "
            'Call set_attn_implementation("sdpa") for exact attention.',
            *(backend, present, backend),
        )
        check_parts(own.get("favor_parts"))
        config.favor = FavorConfig.from_dict(own.get("favor")).to_dict()
        if own.get("favor_parts"):
            config.favor_parts = own["favor_parts"]
        config._attn_implementation_internal = backend  # of this config alone, not of its parts
