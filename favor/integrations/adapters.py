"""Adapters of peft: a file beside them names the backend of the model in which they were trained."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import cached_file

from favor import registry
from favor.config import BACKEND, FavorConfig
from favor.integrations._private import wrap_once
from favor.integrations.entries import check_parts

_logger = logging.getLogger("favor")
_FILE = "favor.json"


def watch_adapters() -> None:
    """Makes peft, if it is imported, save the backend of a model beside its adapters, and use it again with them.

    peft saves only the adapters and loads their base model anew, which would otherwise run exact attention. Only the
    first call after the import has an effect.
    """
    peft = sys.modules.get("peft")
    model_class: Any = getattr(peft, "PeftModel", None)  # None while peft is being imported
    if model_class is not None:
        wrap_once(model_class, "save_pretrained", _save_pretrained)
        wrap_once(model_class, "from_pretrained", _from_pretrained)


def _save_pretrained(original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, save_directory, *args, **kwargs)
    settings = {name: own for name, config in _configs(self.get_base_model()).items() if (own := _settings(config))}
    saved = kwargs.get("selected_adapters") or list(self.peft_config)
    for name in saved if kwargs.get("is_main_process", True) else ():
        note = Path(save_directory, "" if name == "default" else name, _FILE)
        if settings:
            note.write_text(json.dumps(settings, indent=2) + "\n")
        else:
            note.unlink(missing_ok=True)
    return result


def _from_pretrained(
    original: Callable[..., Any], cls: type, model: Any, model_id: Any, *args: Any, **kwargs: Any
) -> Any:
    place = {name: kwargs[name] for name in _PLACE if kwargs.get(name)}
    missing = {f"_raise_exceptions_for_{what}": False for what in _MAY_FAIL}
    path = cached_file(str(model_id), _FILE, **place, **missing)
    if path is not None:
        _take_up(model, json.loads(Path(path).read_text()))
    return original(cls, model, model_id, *args, **kwargs)


_PLACE = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download", "proxies")
_MAY_FAIL = ("missing_entries", "connection_errors", "gated_repo")


def _configs(model: Any) -> dict[str, Any]:
    """Lists the config of a model, under "", and those of its parts."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return {}
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return {"": config, **{name: part for name, part in parts.items() if part is not None}}


def _settings(config: Any) -> dict[str, Any]:
    if getattr(config, "_attn_implementation", None) not in registry.BACKENDS:
        return {}
    names = ("favor", "favor_parts")
    kept = {name: getattr(config, name) for name in names if getattr(config, name, None)}
    return {BACKEND: config._attn_implementation, **kept}


def _take_up(model: Any, settings: Any) -> None:
    """Gives the configs of a base model the backends that adapters were trained with, where it has no FAVOR backend.

    Raises:
        ValueError, TypeError: for a backend or options that are malformed.
    """
    if not isinstance(settings, dict) or not all(isinstance(own, dict) for own in settings.values()):
        raise ValueError(f"{_FILE} of the adapter must hold a dictionary of settings by config, got {settings!r}.")
    for name, config in _configs(model).items():
        own = settings.get(name)
        if not own or config._attn_implementation in registry.BACKENDS:
            continue
        if own.get(BACKEND) not in registry.BACKENDS:
            raise ValueError(
                f"{_FILE} of the adapter names the backend {own.get(BACKEND)!r}, which is not a FAVOR backend."
            )
        _logger.warning(
            "favor: the adapter was trained in a model with %s, and the base model with %s: it now takes %s. "
            'Call set_attn_implementation("sdpa") for exact attention.',
            own[BACKEND],
            config._attn_implementation,
            own[BACKEND],
        )
        check_parts(own.get("favor_parts"))
        config.favor = FavorConfig.from_dict(own.get("favor")).to_dict()
        if own.get("favor_parts"):
            config.favor_parts = own["favor_parts"]
        config._attn_implementation_internal = own[BACKEND]  # of this config alone, not of its parts
