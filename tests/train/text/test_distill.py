"""Distillation: what is learned helps on other text, and the folder is all that is needed afterwards."""

import json

import pytest
import torch
from launching import fork
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import favor
import favor.models
from favor import features
from favor.train import distill
from favor.train.text.attention_student import AttentionStudent
from favor.train.text.samples import samples


@pytest.fixture(scope="module")
def decoder_folder(bert_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=24, initializer_range=0.4)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def arguments(folder, text, out, *more):
    common = ["--num_features", "16", "--window", "8", "--max_length", "32", "--calibration_samples", "4"]
    return ["--model_name_or_path", str(folder), "--train_file", str(text), "--output_dir", str(out), *common, *more]


def held_out_error(model, exact, ids, draws=20):
    """Relative error of the whole model's output, mean over draws of the random features."""
    errors = []
    with torch.no_grad():
        expected = exact(input_ids=ids).logits
        for seed in range(1000, 1000 + draws):
            found = favor.configure(model, seed=seed)(input_ids=ids).logits
            errors.append((found - expected).norm() / expected.norm())
    return torch.stack(errors).mean().item()


def test_fixed_parameters_are_learned(decoder_folder, text, tmp_path):
    more = ("--attention_learning_rate", "1e-2", "--per_device_train_batch_size", "8")
    results = distill.main(arguments(decoder_folder, text, tmp_path / "out", "--attention_steps", "200", *more))
    start = distill.main(arguments(decoder_folder, text, tmp_path / "start", "--attention_steps", "0"))
    layer = "layers.0.self_attn"
    assert results["layers"][layer]["kind"] == start["layers"][layer]["kind"] == "calibrated"
    assert len(results["attention_loss"]) == 200
    ids = samples(text, AutoTokenizer.from_pretrained(decoder_folder), 32, 30, seed=5)
    exact = LlamaForCausalLM.from_pretrained(decoder_folder).eval()
    errors = {}
    for name in ("start", "out"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / name, attn_implementation="favor#").eval()
        errors[name] = held_out_error(model, exact, ids)
    assert errors["out"] < 0.98 * errors["start"]
    assert json.loads((tmp_path / "out" / "distillation.json").read_text())["arguments"]["window"] == 8


def test_corrections_of_encoders_load_with_the_auto_class(bert_folder, text, tmp_path):
    results = distill.main(arguments(bert_folder, text, tmp_path, "--attention_steps", "3", "--layers", "all"))
    assert {own["kind"] for own in results["layers"].values()} == {"corrected"}
    model = AutoModel.from_pretrained(tmp_path).eval()
    assert (type(model).__name__, model.config._attn_implementation) == ("PerformerBertModel", "favor#")
    assert model.config.favor["statistics"] == "corrected"
    ids = samples(text, AutoTokenizer.from_pretrained(tmp_path), 32, 2)
    with torch.no_grad():
        corrected = model(input_ids=ids).last_hidden_state
        plain = favor.configure(model, statistics="batch")(input_ids=ids).last_hidden_state
    assert not torch.equal(corrected, plain)
    assert (corrected - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("layers", ["all", "auto"])
def test_weights_of_features_are_learned_and_kept(layers, bert_folder, text, tmp_path):
    more = ("--feature_weights", "True", "--layers", layers, "--flop_budget", "2", "--model_steps", "2")
    results = distill.main(arguments(bert_folder, text, tmp_path, *more))
    assert results["attention_loss"] == []
    assert len(results["model_loss"]) == 2
    for own in results["layers"].values():
        exact = {"window": own.get("window", 8), "exact_heads": own.get("exact_heads", [])}
        expected = {"num_features": 16, "seed": 0, "orthogonal": True} | exact
        assert {name: own["weights_of"][name] for name in expected} == expected
    model = AutoModel.from_pretrained(tmp_path).eval()
    assert model.config.favor["statistics"] == "calibrated"
    weights = [buffer for name, buffer in model.named_buffers() if name.endswith("favor_log_weights")]
    assert len(weights) == len(results["layers"])
    assert all(buffer.std() > 0.01 for buffer in weights)
    with torch.no_grad():
        assert model(input_ids=samples(text, AutoTokenizer.from_pretrained(tmp_path), 32, 2))[0].isfinite().all()


def test_an_untrained_correction_changes_nothing():
    inputs = [torch.randn(2, 4, 20, 8) for _ in range(3)]
    nothing = AttentionStudent(
        {0: torch.nn.Module()}, features.get("wderf"), {"statistics": "batch"}, {0: (4, 8)}
    ).correction(0)
    options = {"features": "wderf", "num_features": 12, "window": 8}
    torch.testing.assert_close(
        favor.favor_attention(*inputs, correction=nothing, **options), favor.favor_attention(*inputs, **options)
    )


@pytest.mark.parametrize("kind", ["hidden states", "logits"])
@pytest.mark.parametrize("features", ["wderf", "landmark"])
def test_training_the_model_brings_its_output_closer(kind, features, bert_folder, decoder_folder, text, tmp_path):
    folder = bert_folder if kind == "hidden states" else decoder_folder
    more = ["--model_steps", "80", "--model_learning_rate", "3e-3", "--features", features]
    more += ["--attention_steps", "0"] if features == "wderf" else ["--num_features", "3", "--window", "3"]
    losses = distill.main(arguments(folder, text, tmp_path, *more))["model_loss"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_samples_have_the_special_tokens_of_the_tokenizer(bert_folder, text):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = samples(text, tokenizer, 20, 7)
    assert ids.shape == (7, 20)
    assert set(ids[:, 0].tolist()) == {tokenizer.cls_token_id}
    assert set(ids[:, -1].tolist()) == {tokenizer.sep_token_id}
    assert len(samples(text, tokenizer, 20, None)) == 4000 // 18
    with pytest.raises(ValueError, match="too few for one sample of 9000"):
        samples(text, tokenizer, 9000, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--attention_steps", "-1"], "attention_steps must not be negative"),
        (["--statistics", "batch"], "statistics must be calibrated or corrected"),
        (["--exact_below", "often"], "exact_below must be"),
        (["--feature_weights", "True", "--attention_steps", "3"], "feature_weights learns calibrated parameters"),
        (["--feature_weights", "True", "--statistics", "corrected"], "feature_weights learns calibrated parameters"),
        (["--features", "landmark", "--attention_steps", "3"], "landmarks have no parameters to learn"),
        (["--features", "landmark", "--statistics", "calibrated"], "landmarks have no parameters to learn"),
        (["--attn_implementation", "favor+"], "or favor\\+ with feature_weights"),
    ],
)
def test_bad_arguments(more, message, bert_folder, text, tmp_path):
    with pytest.raises(ValueError, match=message):
        distill.main(arguments(bert_folder, text, tmp_path, *more))


@pytest.mark.slow
def test_two_processes_learn_both_stages(bert_folder, text, tmp_path):
    """The pooler has no part in the loss, which distributed training must be told."""
    words = arguments(bert_folder, text, tmp_path, "--attention_steps", "3", "--model_steps", "3")
    fork("favor.train.distill", *words, processes=2)
    results = json.loads((tmp_path / "distillation.json").read_text())
    assert (len(results["attention_loss"]), len(results["model_loss"])) == (3, 3)
    assert AutoModel.from_pretrained(tmp_path).config.favor["statistics"] == "corrected"
