"""Performer BERT: transformers' BERT, parameter for parameter, under a configuration that keeps its backend."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizer,
)

from favor.models.bert.configuration_performer_bert import PerformerBertConfig


class PerformerBertModel(BertModel):
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


class PerformerBertForMaskedLM(BertForMaskedLM):
    """BERT with its masked language modelling head.

    Example:
        >>> from favor.models.bert import PerformerBertConfig, PerformerBertForMaskedLM
        >>> config = PerformerBertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = PerformerBertForMaskedLM(config)
        >>> model.config._attn_implementation
        'favor#'
    """

    config_class = PerformerBertConfig


class PerformerBertForSequenceClassification(BertForSequenceClassification):
    """BERT with a classification or regression head on the pooled output.

    Example:
        >>> from favor.models.bert import PerformerBertConfig, PerformerBertForSequenceClassification
        >>> config = PerformerBertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = PerformerBertForSequenceClassification(config)
        >>> model.config._attn_implementation
        'favor#'
    """

    config_class = PerformerBertConfig


class PerformerBertForTokenClassification(BertForTokenClassification):
    """BERT with a classification head on every token.

    Example:
        >>> from favor.models.bert import PerformerBertConfig, PerformerBertForTokenClassification
        >>> config = PerformerBertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = PerformerBertForTokenClassification(config)
        >>> model.config._attn_implementation
        'favor#'
    """

    config_class = PerformerBertConfig


class PerformerBertForQuestionAnswering(BertForQuestionAnswering):
    """BERT with a head for the start and the end of an answer span.

    Example:
        >>> from favor.models.bert import PerformerBertConfig, PerformerBertForQuestionAnswering
        >>> config = PerformerBertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = PerformerBertForQuestionAnswering(config)
        >>> model.config._attn_implementation
        'favor#'
    """

    config_class = PerformerBertConfig


AutoConfig.register(PerformerBertConfig.model_type, PerformerBertConfig, exist_ok=True)
AutoTokenizer.register(PerformerBertConfig, fast_tokenizer_class=BertTokenizer, exist_ok=True)
AutoModel.register(PerformerBertConfig, PerformerBertModel, exist_ok=True)
AutoModelForMaskedLM.register(PerformerBertConfig, PerformerBertForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(PerformerBertConfig, PerformerBertForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(PerformerBertConfig, PerformerBertForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(PerformerBertConfig, PerformerBertForQuestionAnswering, exist_ok=True)
