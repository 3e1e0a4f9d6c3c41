"""Distillation on recordings: the encoder of a Whisper, or a Conformer, comes close to its exact self."""

import json

import pytest
import torch
from safetensors.torch import load_file
from speech_corpus import few_and_short, make_processor, save
from transformers import AutoProcessor, WhisperForConditionalGeneration

from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train import distill
from favor.train.text import distill_data as text_data

OPTIONS = ["--num_features", "16"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    few_and_short(monkeypatch, 2, 4.0)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("whisper"), make_processor())
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():  # attention that matters
        for layer in model.model.encoder.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


def run(folder, corpus, out, *more):
    words = ["--model_name_or_path", str(folder), "--audio_dir", str(corpus), "--split", "train"]
    return distill.main([*words, "--output_dir", str(out), *OPTIONS, *more])


def test_the_encoder_of_a_whisper_learns_and_nothing_else(whisper, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "ATTENTION_LEARNING_RATE", 1e-2)
    more = "--attention_steps 30 --model_steps 20 --model_learning_rate 1e-3"
    errors = run(whisper, corpus, tmp_path, *more.split())["errors"]
    assert list(errors) == ["closed form", "attention", "model"]
    assert errors["model"] < 0.9 * errors["closed form"]
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert model.model.encoder.config._attn_implementation == "favor#"
    before, after = (load_file(path / "model.safetensors") for path in (whisper, tmp_path))
    changed = {name for name, weights in before.items() if not torch.equal(weights, after[name])}
    assert changed
    assert all(name.startswith("model.encoder.") for name in changed)
    processor = AutoProcessor.from_pretrained(tmp_path)
    with torch.no_grad():
        inputs = processor(torch.randn(16000).numpy(), sampling_rate=16000, return_tensors="pt").input_features
        assert model.eval().model.encoder(inputs).last_hidden_state.isfinite().all()
    assert processor.tokenizer is not None


def test_a_conformer_learns_in_batches_with_padding(corpus, tmp_path):
    folder, tokenizer = tmp_path / "conformer", train_tokenizer(["A BAD CAFE"], "char")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    ConformerForCTC(ConformerConfig(**sizes, num_mel_bins=10, vocab_size=len(tokenizer))).save_pretrained(folder)
    ConformerProcessor(ConformerFeatureExtractor(feature_size=10), tokenizer).save_pretrained(folder)
    more = ["--attention_steps", "2", "--model_steps", "20", "--model_learning_rate", "1e-3"]
    results = run(folder, corpus, tmp_path / "out", *more, "--per_device_train_batch_size", "3")
    losses = results["model_loss"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    model = ConformerForCTC.from_pretrained(tmp_path / "out")
    assert model.config._attn_implementation == "favor#"
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["model_loss"] == losses


def test_what_is_refused(whisper, bert_folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(text_data, "HELD_OUT_SAMPLES", 50)
    for folder, more, message in (
        (whisper, ["--train_file", "book.txt"], "one of them"),
        (whisper, ["--lengths", "8"], "lengths, pair_probability, task_weight are for text"),
        (whisper, [], "50 are held out, are too few"),
        (bert_folder, [], r"--audio_dir needs a model whose processor gives .*; the input of"),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, corpus, tmp_path / folder.name, *more)
