"""Performer BERT: transformers' BERT, parameter for parameter, and a configuration that keeps its backend."""

from __future__ import annotations

from typing import Any

import transformers
from huggingface_hub.dataclasses import strict

from favor.models.stored_backend import StoredBackend


@strict
class PerformerBertConfig(StoredBackend, transformers.BertConfig):
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
        if config_dict.get("model_type") == transformers.BertConfig.model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, unused


class PerformerBertModel(transformers.BertModel):
    """BERT's encoder with a pooler.

    Any BERT checkpoint loads unchanged, in this class and in the others of Performer BERT:

        model = PerformerBertModel.from_pretrained(path, favor={"num_features": 128})

    `AutoModel.from_pretrained(folder)` reads back what `save_pretrained` wrote, with backend and options.

    Example:
        >>> from favor.models.bert import PerformerBertConfig, PerformerBertModel
        >>> config = PerformerBertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = PerformerBertModel(config)
        >>> model.config._attn_implementation
        'favor#'
    """

    config_class = PerformerBertConfig


class PerformerBertForMaskedLM(transformers.BertForMaskedLM):
    """BERT with its masked language modelling head."""

    config_class = PerformerBertConfig


class PerformerBertForSequenceClassification(transformers.BertForSequenceClassification):
    """BERT with a classification or regression head on the pooled output."""

    config_class = PerformerBertConfig


class PerformerBertForTokenClassification(transformers.BertForTokenClassification):
    """BERT with a classification head on every token."""

    config_class = PerformerBertConfig


class PerformerBertForQuestionAnswering(transformers.BertForQuestionAnswering):
    """BERT with a head for the start and the end of an answer span."""

    config_class = PerformerBertConfig


transformers.AutoConfig.register(PerformerBertConfig.model_type, PerformerBertConfig, exist_ok=True)
transformers.AutoTokenizer.register(PerformerBertConfig, fast_tokenizer_class=transformers.BertTokenizer, exist_ok=True)
for auto, kind in (
    (transformers.AutoModel, PerformerBertModel),
    (transformers.AutoModelForMaskedLM, PerformerBertForMaskedLM),
    (transformers.AutoModelForSequenceClassification, PerformerBertForSequenceClassification),
    (transformers.AutoModelForTokenClassification, PerformerBertForTokenClassification),
    (transformers.AutoModelForQuestionAnswering, PerformerBertForQuestionAnswering),
):
    auto.register(PerformerBertConfig, kind, exist_ok=True)
