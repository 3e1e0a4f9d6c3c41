"""Performer BERT: BERT whose saved checkpoints remember their attention backend and its options."""

from favor.models.bert.modeling_performer_bert import (
    PerformerBertConfig,
    PerformerBertForMaskedLM,
    PerformerBertForQuestionAnswering,
    PerformerBertForSequenceClassification,
    PerformerBertForTokenClassification,
    PerformerBertModel,
)

__all__ = [
    "PerformerBertConfig",
    "PerformerBertForMaskedLM",
    "PerformerBertForQuestionAnswering",
    "PerformerBertForSequenceClassification",
    "PerformerBertForTokenClassification",
    "PerformerBertModel",
]
