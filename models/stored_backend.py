"""Configurations that keep their attention backend, which transformers itself does not save; which models have one."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

from favor import FavorConfig

DEFAULT_BACKEND = "favor#"
# Greatest sizes that a `config.json` may ask for, by the end of their names; the first that fits counts.
MOST = {
    "layers": 1 << 10,
    "vocab_size|positions|embeddings|cells": 1 << 24,
    "size|dim|d_model|heads|channels|bins|stride|hop_length|width": 1 << 16,
}


class StoredBackend(PreTrainedConfig):
    """Mixin of the zoo's configurations: backend and options go to `config.json` and come back.

    The class that uses it declares `favor: dict[str, Any] | None = None`.
    """

    favor: dict[str, Any] | None
    is_counterpart: ClassVar[bool] = True  # of the configuration of transformers that it extends, for the same models

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = DEFAULT_BACKEND
        if self.favor is not None:
            self.favor = FavorConfig.from_dict(self.favor).to_dict()
        super().__post_init__(**kwargs)
        for name, value in vars(self).items():
            most = next((most for end, most in MOST.items() if re.search(f"({end})$", name)), None)
            if most is not None and isinstance(value, int) and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}.")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Makes a configuration as transformers does, and merges `favor={...}` into the options of `config_dict`."""
        if kwargs.get("favor") is not None:
            config_dict = {**config_dict, "favor": {**(config_dict.get("favor") or {}), **kwargs.pop("favor")}}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Gives all fields, the attention backend included."""
        return {**super().to_dict(), "attn_implementation": self._attn_implementation}


def zoo_configuration(plain: type[PreTrainedConfig]) -> type[StoredBackend] | None:
    """Finds the zoo's configuration for the models of one of transformers; None if the zoo has no such models."""
    return next((own for own in StoredBackend.__subclasses__() if own.is_counterpart and plain in own.__bases__), None)


def zoo_model(plain: type[PreTrainedModel]) -> type[PreTrainedModel] | None:
    """Finds the zoo's subclass of a model class of transformers, whose saved folder remembers the backend, or None."""
    known = plain.__subclasses__()
    return next((own for own in known if own.config_class and issubclass(own.config_class, StoredBackend)), None)


def keeps_backend(model_type: str) -> bool:
    """Tells whether saved models of a type reload with their backend by themselves."""
    return any(own.model_type == model_type for own in StoredBackend.__subclasses__())
