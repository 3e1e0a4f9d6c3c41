"""Configurations that keep their attention backend: transformers itself does not save it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from favor import FavorConfig

DEFAULT_BACKEND = "favor#"


class StoredBackend(PreTrainedConfig):
    """Mixin of the zoo's configurations: backend and options go to `config.json` and come back.

    The class that uses it declares `favor: dict[str, Any] | None = None`.
    """

    favor: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills in the default backend and checks the options."""
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = DEFAULT_BACKEND
        if self.favor is not None:
            self.favor = FavorConfig.from_dict(self.favor).to_dict()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, except that `favor={...}` is merged into the options of `config_dict`."""
        if kwargs.get("favor") is not None:
            config_dict = {**config_dict, "favor": {**(config_dict.get("favor") or {}), **kwargs.pop("favor")}}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """All fields, the attention backend included."""
        return {**super().to_dict(), "attn_implementation": self._attn_implementation}
