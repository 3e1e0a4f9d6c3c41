"""Performer BERT: saved and loaded by the Auto classes alone, and any BERT checkpoint into it."""

import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertModel

from favor.models import bert as zoo

KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
PAIRS = {f"Auto{'Model' * (kind != 'Model')}{kind}": getattr(zoo, f"PerformerBert{kind}") for kind in KINDS}
OPTIONS = {"num_features": 12, "features": "saderf", "exact_below": 0, "seed": 5}


def tiny_config(**changes) -> zoo.PerformerBertConfig:
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return zoo.PerformerBertConfig(**sizes, intermediate_size=32, max_position_embeddings=40, **changes)


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 17:] = 0
    return {"input_ids": torch.randint(5, 19, (3, 24), generator=generator), "attention_mask": mask}


@pytest.mark.parametrize("auto", PAIRS)
def test_auto_class_restores_class_backend_and_options(auto, tmp_path):
    saved = PAIRS[auto](tiny_config(favor=OPTIONS, attn_implementation="favor++" if auto == "AutoModel" else None))
    saved.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(loaded) is PAIRS[auto]
    assert loaded.config._attn_implementation == ("favor++" if auto == "AutoModel" else "favor#")
    assert {name: loaded.config.favor[name] for name in OPTIONS} == OPTIONS
    expected, found = saved.eval()(**inputs()).to_tuple(), loaded.eval()(**inputs()).to_tuple()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("auto", PAIRS)
def test_plain_bert_checkpoint_loads_unchanged(auto, bert_folder):
    model, info = PAIRS[auto].from_pretrained(bert_folder, output_loading_info=True)
    assert all(name.split(".")[0] in ("cls", "classifier", "qa_outputs") for name in info["missing_keys"])
    assert all("pooler" in name for name in info["unexpected_keys"])
    weights, loaded = load_file(bert_folder / "model.safetensors"), dict(model.base_model.named_parameters())
    assert len(weights.keys() & loaded.keys()) >= len(weights) - 2
    assert all(torch.equal(weights[name], loaded[name]) for name in weights.keys() & loaded.keys())
    assert model.config._attn_implementation == "favor#"


def test_plain_bert_checkpoint_is_read_without_a_warning_about_its_type(bert_folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    zoo.PerformerBertConfig.from_pretrained(bert_folder)
    assert "model of type" not in caplog.text
    transformers.RobertaConfig().save_pretrained(tmp_path)
    zoo.PerformerBertConfig.from_pretrained(tmp_path)
    assert "roberta" in caplog.text


def test_exact_attention_in_performer_bert_is_bert(bert_folder):
    performer = zoo.PerformerBertModel.from_pretrained(bert_folder, attn_implementation="sdpa").eval()
    bert = BertModel.from_pretrained(bert_folder, attn_implementation="sdpa").eval()
    expected = bert(**inputs())[0]
    assert torch.equal(performer(**inputs())[0], expected)
    model = zoo.PerformerBertModel.from_pretrained(bert_folder, favor={"num_features": 8, "exact_below": 24}).eval()
    assert not torch.allclose(model(**inputs())[0], expected, atol=1e-6)
    short = {name: tensor[:, :20] for name, tensor in inputs().items()}
    torch.testing.assert_close(model(**short)[0], bert(**short)[0])


def test_options_given_to_from_pretrained_are_merged_into_the_saved_ones(tmp_path):
    zoo.PerformerBertModel(tiny_config(favor=OPTIONS)).save_pretrained(tmp_path)
    for load in (AutoModel.from_pretrained, zoo.PerformerBertModel.from_pretrained):
        options = load(tmp_path, favor={"num_features": 20}).config.favor
        assert {name: options[name] for name in OPTIONS} == {**OPTIONS, "num_features": 20}


def test_explicit_backend_wins_and_is_what_the_next_save_writes(tmp_path):
    zoo.PerformerBertForSequenceClassification(tiny_config(favor=OPTIONS)).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    again.set_attn_implementation("favor+")
    again.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (type(config), config._attn_implementation) == (zoo.PerformerBertConfig, "favor+")
    assert AutoModel.from_config(config).config._attn_implementation == "favor+"
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes"]))
    assert AutoTokenizer.from_pretrained(tmp_path)("yes").input_ids == [2, 5, 3]
