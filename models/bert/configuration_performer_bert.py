"""Configuration of Performer BERT."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from favor.models.stored_backend import StoredBackend


@strict
class PerformerBertConfig(StoredBackend, BertConfig):
    """BERT's configuration plus an attention backend and its options, both written to `config.json`.

    Every field of `BertConfig` keeps its name and default. A `config.json` of plain BERT is read unchanged.

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

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a `config.json`; one of plain BERT is read as one of Performer BERT, without a warning."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        if config_dict.get("model_type") == BertConfig.model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, unused
