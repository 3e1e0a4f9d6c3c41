"""CTC on the encoder of a Whisper in the training program: its parts, saving, resuming, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file
from stopping import whole_and_resumed

from favor.eval import asr as evaluation
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperForCTC

SETTINGS = {"architecture": "ctc", "tokenizer_type": "char", "per_device_train_batch_seconds": 24}
SETTINGS |= {"max_train_steps": 4, "learning_rate": 2e-3, "encoder_learning_rate": 4e-4}


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(one, other):
    return {name for name in other if not torch.equal(one[name], other[name])}


def test_a_frozen_encoder_stays_and_a_trained_one_changes(train, whisper, tmp_path, corpus):
    """First the head alone, then all, and the evaluation finds the words of the training."""
    first = train("head", encoder_learning_rate=0, ema_decay=0)
    before = {name.removeprefix("model."): one for name, one in weights(whisper).items()}
    head = weights(tmp_path / "head")
    encoder = {name: one for name, one in before.items() if name.startswith("encoder.")}
    assert changed(head, encoder) == set()
    assert first["train_loss"] > 0
    rest = {"tokenizer_type": None, "architecture": None, "model_name_or_path": tmp_path / "head"}
    whole = train("all", max_train_steps=12, ema_decay=0.5, **rest)
    assert whole["train_loss"] < first["train_loss"]
    kept = {name for name in encoder if "embed_positions" in name or "k_proj.bias" in name}
    assert changed(weights(tmp_path / "all"), encoder) >= set(encoder) - kept - {"encoder.layers.0.fc2.bias"}
    words = ["--model_name_or_path", str(tmp_path / "all"), "--data_dir", str(corpus), "--eval_splits", "dev"]
    assert evaluation.main([*words, "--output_dir", str(tmp_path / "errors"), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "errors" / "asr.json").read_text())
    assert found["architecture"] == "WhisperForCTC"
    assert found["splits"]["dev"]["searches"]["greedy"]["wer"] == pytest.approx(whole["metrics"]["dev_wer"])


def test_resume_repeats_the_uninterrupted_run(train, tmp_path):
    settings = {"max_train_steps": 5, "checkpointing_steps": 2, "dropout": 0.2}
    whole_and_resumed(train, tmp_path, 4, **settings)
    assert WhisperCTCConfig.from_pretrained(tmp_path / "whole").head_dropout == 0.2


def test_a_linear_backend_is_trained_and_kept(train, tmp_path):
    results = train(attn_implementation="landmark", num_features=16, selected_keys=8, exact_below=0)
    assert results["attn_implementation"] == "landmark"
    again = WhisperForCTC.from_pretrained(tmp_path / "run")
    assert again.config._attn_implementation == "landmark"
    assert (again.config.favor["num_features"], again.config.favor["selected_keys"]) == (16, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_learning_rate": None}, "a learning rate of 0.002 destroys the pretrained encoder"),
        ({"encoder_learning_rate": -1}, "encoder_learning_rate must be at least 0, got -1"),
        ({"preset": "tiny"}, "preset has no effect, because --model_name_or_path already decides it"),
        ({"num_features": 16}, "num_features: options of FAVOR attention, not of sdpa"),
    ],
)
def test_what_cannot_be_is_refused(train, options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_a_saved_model_is_no_transducer(train, tmp_path):
    train(max_train_steps=1)
    path = {"model_name_or_path": tmp_path / "run", "tokenizer_type": None}
    with pytest.raises(ValueError, match=r"architecture transducer does not fit: .* CTC on the encoder of a Whisper"):
        train("other", architecture="transducer", **path)
    with pytest.raises(ValueError, match="tokenizer_type has no effect"):
        train("other", architecture=None, **{**path, "tokenizer_type": "char"})
