"""Distillation: what is learned helps on other text, and the folder is all that is needed afterwards."""

import json
import shutil

import pytest
import torch
from launching import fork
from safetensors.torch import load_file
from stopping import same_weights, stopped_after
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import favor
import favor.models
from favor import features
from favor.integrations.adapt.observe import Observation
from favor.train import distill
from favor.train.common.teacher import AttentionStudent
from favor.train.distill import parse_arguments
from favor.train.text import distill_data
from favor.train.text.distill_data import Texts
from favor.train.text.samples import samples


def arguments(folder, text, out, *more):
    common = ["--num_features", "16", "--window", "8", "--max_length", "32"]
    return ["--model_name_or_path", str(folder), "--train_file", str(text), "--output_dir", str(out), *common, *more]


def held_out_error(model, exact, ids, draws=8):
    """Relative error of the whole model's output, mean over draws of the random features."""
    errors = []
    with torch.no_grad():
        expected = exact(input_ids=ids).logits
        for seed in range(1000, 1000 + draws):
            found = favor.configure(model, seed=seed)(input_ids=ids).logits
            errors.append((found - expected).norm() / expected.norm())
    return torch.stack(errors).mean().item()


def test_each_stage_brings_held_out_text_closer(decoder_folder, text, tmp_path, capsys, monkeypatch):
    """As the program measures it, and as the saved models do on text of their own."""
    monkeypatch.setattr(distill, "ATTENTION_LEARNING_RATE", 1e-2)
    monkeypatch.setattr(distill_data, "HELD_OUT_SAMPLES", 20)
    more = ["--per_device_train_batch_size", "8", "--window", "0", "--model_learning_rate", "3e-3"]
    found, layer = {}, "layers.0.self_attn"
    for steps in ("0", "60"):
        words = arguments(decoder_folder, text, tmp_path / steps, "--attention_steps", steps, "--model_steps", steps)
        found[steps] = distill.main([*words, *more])
        assert found[steps]["layers"][layer]["kind"] == "calibrated"
    errors = found["60"]["errors"]
    assert list(errors) == ["closed form", "attention", "model"]
    assert errors["model"] < 0.9 * errors["attention"] < 0.9 * errors["closed form"]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"after"')]
    assert [line["relative error of hidden states"] for line in printed][-3:] == list(errors.values())
    assert len(found["60"]["attention_loss"]) == 60
    ids = samples(text, AutoTokenizer.from_pretrained(decoder_folder), 32, 30, seed=5)
    exact = LlamaForCausalLM.from_pretrained(decoder_folder).eval()
    start, end = (
        held_out_error(LlamaForCausalLM.from_pretrained(tmp_path / steps).eval(), exact, ids) for steps in found
    )
    assert end < 0.9 * start
    assert json.loads((tmp_path / "60" / "all_results.json").read_text())["arguments"]["window"] == 0


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


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_worst_heads_stay_exact(kind, bert_folder, decoder_folder, text, tmp_path, capsys):
    folder = bert_folder if kind == "encoder" else decoder_folder
    more = ["--attention_steps", "2", "--num_features", "4"]
    results = {
        number: distill.main(arguments(folder, text, tmp_path / number, *more, "--exact_heads", number))
        for number in ("0", "1")
    }
    after = {number: own["errors"] for number, own in results.items()}
    assert list(after["1"]) == ["closed form", "attention", "exact heads"]
    assert '{"exact heads by layer": ' in capsys.readouterr().out
    chosen = {name: own["exact_heads"] for name, own in results["1"]["layers"].items() if "exact_heads" in own}
    assert [len(heads) for heads in chosen.values()] == [1]
    assert after["1"]["exact heads"] < after["1"]["attention"] == after["0"]["attention"]
    with pytest.raises(ValueError, match=r"exact_heads must be less than the \d+ key heads of the model, got 1000"):
        distill.main(arguments(folder, text, tmp_path / "1000", *more, "--exact_heads", "1000"))


def test_layers_whose_heads_are_all_exact_learn_nothing(bert_folder, text, tmp_path):
    more = ["--attention_steps", "2", "--num_features", "1", "--window", "0", "--layers", "auto"]
    results = distill.main(arguments(bert_folder, text, tmp_path, *more, "--flop_budget", "1"))
    assert any(len(own["exact_heads"]) == own["key_heads"] for own in results["layers"].values())
    ids = samples(text, AutoTokenizer.from_pretrained(tmp_path), 32, 2)
    with torch.no_grad():
        assert AutoModel.from_pretrained(tmp_path).eval()(input_ids=ids).last_hidden_state.isfinite().all()


def test_errors_of_heads_are_those_of_their_output():
    torch.manual_seed(0)
    sharpness = torch.tensor([0.1, 0.1, 2.0, 2.0]).view(1, 4, 1, 1)  # two query heads of each key head
    query, key, value = torch.randn(3, 4, 20, 8) * sharpness, torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    exact = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    module = torch.nn.Module()
    module.config = LlamaConfig()
    seen = Observation(0, module, query, key, value, None, False, 8**-0.5, exact)
    options = {"num_features": 12, "window": 0, "orthogonal": True, "seed": 0}
    nothing = {"statistics": "batch", **options}
    student = AttentionStudent({0: module}, features.get("wderf"), nothing, {0: (2, 8)})
    quiet = seen._replace(
        query=0.1 * query, output=scaled_dot_product_attention(0.1 * query, key, value, enable_gqa=True)
    )
    found, less = (student.head_errors(own)[0] for own in ([seen], [quiet]))
    torch.testing.assert_close(student.head_errors([seen, quiet])[0], (found + less) / 2)  # a module that runs twice
    estimate = favor.favor_attention(query, key, value, features="wderf", **options)
    expected = [(estimate - exact)[n, h].norm() / exact[n, h].norm() for n in range(3) for h in range(4)]
    torch.testing.assert_close(found, torch.stack(expected).view(3, 2, 2).mean((0, 2)))
    assert found[1] > 2 * found[0]


def test_the_model_steps_train_directions_too(bert_folder, text, tmp_path):
    common = ["--attention_steps", "2", "--checkpointing_steps", "2", "--model_learning_rate", "1e-3"]
    found = {}
    for steps in ("0", "2"):
        own = ["--model_steps", steps, "--ema_decay", "0.5"]
        distill.main(arguments(bert_folder, text, tmp_path / steps, *common, *own))
        model = AutoModel.from_pretrained(tmp_path / steps)
        assert not any(key.endswith("favor_directions") for key, _ in model.named_parameters())
        found[steps] = [own for key, own in model.named_buffers() if key.endswith("favor_directions")]
        assert found[steps]
    assert not any(torch.equal(one, two) for one, two in zip(found["0"], found["2"], strict=True))


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


def test_training_a_model_with_landmarks_brings_its_output_closer(bert_folder, text, tmp_path):
    more = ["--model_steps", "80", "--model_learning_rate", "3e-3", "--features", "landmark"]
    more += ["--num_features", "3", "--selected_keys", "3", "--window", "0"]
    losses = distill.main(arguments(bert_folder, text, tmp_path, *more))["model_loss"]
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
        (["--exact_heads", "1", "--attention_steps", "0"], "exact_heads are chosen after the attention steps"),
        (["--exact_heads", "1", "--layers", "auto"], "layers auto chooses exact heads itself"),
        (["--exact_heads", "1", "--features", "landmark"], "which landmarks and feature_weights do not have"),
        (["--ema_decay", "1"], "ema_decay must be at least 0 and less than 1"),
        (
            ["--model_steps", "1", "--hidden_weight", "0", "--logits_weight", "0"],
            "nothing of the exact model is matched",
        ),
        (["--task_weight", "-1"], "task_weight must be at least 0"),
        (["--lengths", "3", "8"], "lengths must be at least 4"),
        (["--lengths", "8", "64"], r"lengths must be at most max_length, 32, got \[8, 64\]"),
        (["--pair_probability", "1.5"], "pair_probability must be at least 0 and at most 1"),
        (["--model_steps", "1", "--task_weight", "1"], "and PerformerBertModel predicts none: set task_weight to 0"),
        (["--model_steps", "1", "--hidden_weight", "0"], "makes no predictions"),
        (["--feature_weights", "True", "--attention_steps", "3"], "feature_weights learns calibrated parameters"),
        (["--features", "landmark", "--attention_steps", "3"], "landmarks have no parameters to learn"),
        (["--attn_implementation", "favor+", "--attention_steps", "0"], "or favor\\+ with learn_directions or"),
    ],
)
def test_bad_arguments(more, message, bert_folder, text, tmp_path):
    with pytest.raises(ValueError, match=message):
        distill.main(arguments(bert_folder, text, tmp_path, *more))


def test_a_stopped_run_ends_with_the_same_weights(bert_folder, text, tmp_path):
    more = ["--attention_steps", "4", "--model_steps", "4", "--checkpointing_steps", "2", "--ema_decay", "0.9"]
    more += ["--lengths", "8", "32", "--pair_probability", "0.5", "--exact_heads", "1", "--model_learning_rate", "1e-3"]
    whole = distill.main(arguments(bert_folder, text, tmp_path / "whole", *more))
    for stage, step in (("attention", 2), ("attention", 4), ("model", 2)):
        stopped = tmp_path / f"{stage} {step}"
        words = arguments(bert_folder, text, stopped, *more)
        with stopped_after(step, stage):
            distill.main(words)
        assert not (stopped / "all_results.json").exists()
        resumed = distill.main([*words, "--resume"])
        for name in ("attention_loss", "model_loss", "errors"):
            assert resumed[name] == whole[name]
        assert same_weights(tmp_path / "whole", stopped)
    again = distill.main([*words, "--resume"])
    assert again["seconds"] == resumed["seconds"]  # a finished run is not run again
    with pytest.raises(ValueError, match="holds a run already"):
        distill.main(words)
    with pytest.raises(ValueError, match=r"cannot resume .* with other settings: model_learning_rate"):
        distill.main([*words[:-1], "1e-4", "--resume"])


def test_samples_have_the_lengths_that_are_drawn(bert_folder, text, tmp_path, monkeypatch):
    seen, tokenizer = [], AutoTokenizer.from_pretrained(bert_folder)
    shaped = Texts.shaped

    def note(self, batch, step):
        found = shaped(self, batch, step)
        seen.append(found["input_ids"])
        return found

    monkeypatch.setattr(Texts, "shaped", note)
    more = ["--attention_steps", "0", "--model_steps", "6", "--lengths", "8", "16"]
    distill.main(arguments(bert_folder, text, tmp_path, *more))
    assert {ids.shape[1] for ids in seen} == {8, 16}
    assert all((ids[:, -1] == tokenizer.sep_token_id).all() for ids in seen)


def test_a_short_sample_without_masked_words_says_its_first(bert_folder, text, tmp_path):
    words = arguments(bert_folder, text, tmp_path, "--lengths", "4", "--task_weight", "1")
    texts = Texts(parse_arguments(words), AutoTokenizer.from_pretrained(bert_folder), 1, 4)
    batch = next(iter(texts.loader(labels=True, decoder=False)))
    short = texts.shaped({name: own.clone() for name, own in batch.items()}, 0)
    assert short["labels"].shape == (2, 4)
    counts = (short["labels"] != -100).sum(1)
    assert counts.min() == 1
    kept = torch.cat([batch["labels"][:, :3], batch["labels"][:, -1:]], 1)
    masked = kept != -100
    assert torch.equal(short["labels"][masked], kept[masked])
    lost = ~masked.any(1)
    assert torch.equal(short["labels"][lost, 1], batch["input_ids"][lost, 1])


def test_one_sample_is_enough_and_starting_again_takes_nothing_else_away(bert_folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", 1)
    shutil.copytree(bert_folder, tmp_path / "model")
    more = ["--attention_steps", "0", "--model_steps", "1", "--per_device_train_batch_size", "1"]
    more += ["--overwrite_output_dir", "True"]
    for _ in range(2):
        assert distill.main(arguments(tmp_path / "model", text, tmp_path, *more))["samples"] == 1
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["next words", "masked words"])
def test_words_can_be_learned_too(kind, bert_folder, decoder_folder, text, tmp_path):
    folder = decoder_folder if kind == "next words" else tmp_path / "mlm"
    if kind == "masked words":
        torch.manual_seed(0)  # the checkpoint has no head for words
        BertForMaskedLM.from_pretrained(bert_folder).save_pretrained(folder)
        AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    more = ["--attention_steps", "0", "--model_steps", "40", "--model_learning_rate", "1e-2"]
    more += ["--hidden_weight", "0", "--logits_weight", "1e-6", "--task_weight", "1"]
    losses = distill.main(arguments(folder, text, tmp_path / "out", *more))["model_loss"]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


def test_an_average_of_the_weights_is_saved(bert_folder, text, tmp_path):
    more = ["--attention_steps", "0", "--model_steps", "6", "--model_learning_rate", "1e-2"]
    for decay in ("0", "0.99"):
        distill.main(arguments(bert_folder, text, tmp_path / decay, *more, "--ema_decay", decay))
    first, start = load_file(tmp_path / "0" / "model.safetensors"), load_file(bert_folder / "model.safetensors")
    average = load_file(tmp_path / "0.99" / "model.safetensors")
    name = next(name for name in first if name.endswith("layer.0.output.dense.weight"))
    own = next(key for key in start if key.endswith(name.removeprefix("bert.")))
    moved, less = ((weights[name] - start[own]).norm() for weights in (first, average))
    assert 0 < less < moved


@pytest.mark.slow
def test_two_processes_learn_both_stages(bert_folder, text, tmp_path):
    """The pooler has no part in the loss, which distributed training must be told."""
    words = arguments(bert_folder, text, tmp_path, "--attention_steps", "3", "--model_steps", "3")
    fork("favor.train.distill", *words, processes=2)
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert (len(results["attention_loss"]), len(results["model_loss"])) == (3, 3)
    assert AutoModel.from_pretrained(tmp_path).config.favor["statistics"] == "corrected"


def test_mixed_precision_changes_the_steps_and_not_how_errors_are_measured(
    bert_folder, text, tmp_path, fresh_accelerator
):
    steps = ("--attention_steps", "3", "--model_steps", "3", "--model_learning_rate", "1e-3")
    found = {}
    for precision in ("no", "bf16"):
        more = (*steps, "--mixed_precision", precision)
        found[precision] = distill.main(arguments(bert_folder, text, tmp_path / precision, *more))
        fresh_accelerator()
    full, low = (found[precision] for precision in ("no", "bf16"))
    assert full["errors"]["closed form"] == low["errors"]["closed form"]
    for name in ("attention_loss", "model_loss"):
        assert full[name] != low[name]
        assert full[name] == pytest.approx(low[name], rel=0.5)
    assert full["errors"]["model"] == pytest.approx(low["errors"]["model"], rel=0.5)
    weights = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {own.dtype for own in weights.values() if own.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(("kind", "backend"), [("encoder", "favor+"), ("decoder", "favor++")])
def test_learned_directions_help_and_are_loaded(kind, backend, bert_folder, decoder_folder, text, tmp_path):
    folder = bert_folder if kind == "encoder" else decoder_folder
    more = ["--attn_implementation", backend, "--attention_steps", "60", "--per_device_train_batch_size", "8"]
    losses = distill.main(arguments(folder, text, tmp_path / "learned", *more))["attention_loss"]
    before = losses[:10]
    if backend != "favor+":  # it has no other parameters to learn
        words = (*more, "--learn_directions", "False")
        before = distill.main(arguments(folder, text, tmp_path / "drawn", *words))["attention_loss"][-10:]
    assert sum(losses[-10:]) < 0.95 * sum(before)

    model = AutoModel.from_pretrained(tmp_path / "learned").eval()
    entry = next(iter(model.config.favor_layers.values()))
    assert entry["directions"] == 16
    ids = samples(text, AutoTokenizer.from_pretrained(folder), 32, 4, seed=5)
    exact = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        goal, out = (own(input_ids=ids).last_hidden_state for own in (exact, model))
        again = favor.configure(model, seed=7)(input_ids=ids).last_hidden_state
        torch.testing.assert_close(again, out)  # nothing is drawn
    assert (out - goal).norm() < goal.norm()
    for wrong in ({"num_features": 32}, {"redraw_interval": 2}):
        with pytest.raises(ValueError, match="16 learned directions in each head, and num_features is"):
            favor.configure(model, **{"num_features": 16, "redraw_interval": 0} | wrong)(input_ids=ids)


def test_without_directions_a_model_forgets_them(bert_folder, text, tmp_path):
    distill.main(arguments(bert_folder, text, tmp_path, "--attention_steps", "2"))
    model = AutoModel.from_pretrained(tmp_path)
    ids = samples(text, AutoTokenizer.from_pretrained(bert_folder), 32, 2)
    favor.calibrate(model, [{"input_ids": ids}], attn_implementation="favor#", num_features=24)
    assert not any("directions" in name for name in model.state_dict())
    assert all("directions" not in entry for entry in model.config.favor_layers.values())
    favor.configure(model, num_features=24)(input_ids=ids)
