"""Configuration of Performer BERT."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from favor import FavorConfig

DEFAULT_BACKEND = "favor#"


@strict
class PerformerBertConfig(BertConfig):
    """BERT's configuration plus an attention backend and its options, both written to `config.json`.

    Every field of `BertConfig` keeps its name and default. A `config.json` of plain BERT is read as it is.

    Args:
        favor: options of the FAVOR backends as a plain dictionary with the fields of `favor.FavorConfig`. None
            (default) and absent fields take that class's defaults. Given to `from_pretrained`, the options are merged
            into the saved ones.
        attn_implementation: a FAVOR backend, "sdpa" or "eager". Default: the saved one, else "favor#".

    Raises:
        ValueError, TypeError: for an unknown option or a bad value in `favor`.

    Example:
        >>> from favor.models.bert import PerformerBertConfig
        >>> PerformerBertConfig(favor={"num_features": 64}).to_dict()["attn_implementation"]
        'favor#'
    """

    model_type = "performer_bert"

    favor: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills in the default backend and checks the options."""
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = DEFAULT_BACKEND
        if self.favor is not None:
            self.favor = FavorConfig.from_dict(self.favor).to_dict()
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a `config.json`; one of plain BERT is taken for what it becomes, without a warning about its type."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        if config_dict.get("model_type") == BertConfig.model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, except that `favor={...}` is merged into the options of `config_dict`."""
        if kwargs.get("favor") is not None:
            config_dict = {**config_dict, "favor": {**(config_dict.get("favor") or {}), **kwargs.pop("favor")}}
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """All fields, the attention backend included: transformers itself does not save it."""
        return {**super().to_dict(), "attn_implementation": self._attn_implementation}
