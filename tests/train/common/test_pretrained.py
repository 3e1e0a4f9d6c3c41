"""Which class a checkpoint is loaded with: transformers' own, or its counterpart of the zoo."""

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
)

import favor.models
from favor.models.bert import PerformerBertConfig, PerformerBertForMaskedLM, PerformerBertModel
from favor.models.conformer import ConformerConfig
from favor.models.stored_backend import keeps_backend, zoo_configuration, zoo_model
from favor.train.common.pretrained import load_exact

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_the_zoo_is_found_by_what_its_classes_extend():
    assert zoo_configuration(BertConfig) is PerformerBertConfig
    assert zoo_configuration(PerformerBertConfig) is zoo_configuration(LlamaConfig) is None
    assert zoo_configuration(WhisperConfig) is None  # WhisperForCTC is another model than a Whisper
    assert zoo_model(BertForMaskedLM) is PerformerBertForMaskedLM
    assert zoo_model(LlamaForCausalLM) is None
    assert keeps_backend("performer_bert")
    assert keeps_backend(ConformerConfig.model_type)
    assert not keeps_backend("bert")


def test_checkpoints_are_loaded_with_the_class_they_name_or_that_of_the_zoo(tmp_path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    assert type(load_exact(tmp_path / "plain")) is BertModel
    own = load_exact(tmp_path / "plain", performer=True)
    assert type(own) is PerformerBertModel
    own.save_pretrained(tmp_path / "own")
    assert type(load_exact(tmp_path / "own")) is PerformerBertModel
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(tmp_path / "head")
    assert (
        type(load_exact(tmp_path / "head", performer=True)) is favor.models.bert.PerformerBertForSequenceClassification
    )


def test_a_head_that_the_zoo_lacks_is_refused(tmp_path):
    BertForNextSentencePrediction(BertConfig(**SIZES)).save_pretrained(tmp_path)
    assert type(load_exact(tmp_path)) is BertForNextSentencePrediction
    with pytest.raises(ValueError, match="holds a BertForNextSentencePrediction, and there is no class"):
        load_exact(tmp_path, performer=True)
