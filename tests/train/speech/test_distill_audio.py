"""Distillation on recordings: the encoder of a Whisper, or a Conformer, comes close to its exact self."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_whisper import make_processor, save
from transformers import AutoFeatureExtractor, AutoProcessor, WhisperForConditionalGeneration

from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train import distill
from favor.train.speech import loaders
from favor.train.text import distill_data as text_data

OPTIONS = ["--num_features", "16"]


@pytest.fixture(autouse=True)
def few_and_short(monkeypatch):
    """Makes the samples of the corpus, which is small, shorter and fewer."""
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", 2)
    monkeypatch.setattr(loaders, "JOIN_SECONDS", 4.0)
    for module in (loaders, text_data):
        monkeypatch.setattr(module, "HELD_OUT_SAMPLES", 2)


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
    more = ["--attention_steps", "30", "--model_steps", "20"]
    results = run(whisper, corpus, tmp_path, *more, "--model_learning_rate", "1e-3")
    errors = results["errors"]
    assert list(errors) == ["closed form", "attention", "model"]
    assert errors["model"] < 0.9 * errors["closed form"]
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert model.model.encoder.config._attn_implementation == "favor#"
    before, after = (load_file(path / "model.safetensors") for path in (whisper, tmp_path))
    changed = {name for name, weights in before.items() if not torch.equal(weights, after[name])}
    assert changed
    assert all(name.startswith("model.encoder.") for name in changed)
    features = AutoFeatureExtractor.from_pretrained(whisper)(torch.randn(16000).numpy(), sampling_rate=16000)
    inputs = torch.tensor(features.input_features[0]).unsqueeze(0)
    with torch.no_grad():
        found = model.eval().model.encoder(inputs).last_hidden_state
    assert found.isfinite().all()
    assert AutoProcessor.from_pretrained(tmp_path).tokenizer is not None


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train_file", "book.txt"], "one of them"),
        (["--lengths", "8"], "lengths, pair_probability, task_weight are for text"),
    ],
)
def test_bad_arguments(more, message, whisper, corpus, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(whisper, corpus, tmp_path / "out", *more)


def test_too_few_recordings_are_refused(whisper, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(text_data, "HELD_OUT_SAMPLES", 50)
    with pytest.raises(ValueError, match="50 are held out, are too few"):
        run(whisper, corpus, tmp_path / "out")


def test_a_model_of_text_is_refused(bert_folder, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"--audio_dir needs a model whose processor gives .*; the input of"):
        run(bert_folder, corpus, tmp_path / "out")
