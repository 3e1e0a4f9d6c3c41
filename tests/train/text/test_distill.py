"""Distillation: what is learned helps on other text, the folder is all that is needed, samples may be pairs."""

import json
import shutil

import pytest
import torch
from launching import caller, fork, options
from safetensors.torch import load_file
from stopping import same_weights, stopped_after
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM, LlamaConfig
from transformers import PreTrainedTokenizerFast as Words

import favor
import favor.models
from favor import features
from favor.integrations.adapt import calibrate
from favor.integrations.adapt.observe import Observation
from favor.train import distill
from favor.train.common.teacher import AttentionStudent
from favor.train.text import distill_data
from favor.train.text.distill_data import IGNORED, Pairs, Texts
from favor.train.text.samples import samples


@pytest.fixture
def settings(bert_folder, text):
    common = {"num_features": 16, "window": 8, "max_length": 32}
    return {"model_name_or_path": bert_folder, "train_file": text, **common}


@pytest.fixture
def run(settings, tmp_path):
    """Calls the program on the tiny BERT and text; a `name=value` argument each."""
    return caller(distill.main, tmp_path, settings)


@pytest.fixture
def some_text(bert_folder, text):
    """Samples that are no others of the tests."""
    return samples(text, AutoTokenizer.from_pretrained(bert_folder), 32, 4, seed=5)


def states(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).last_hidden_state


def test_each_stage_brings_held_out_text_closer(run, decoder_folder, text, tmp_path, capsys, monkeypatch):
    """As the program measures it, and as the saved models do on text of their own."""
    monkeypatch.setattr(distill, "ATTENTION_LEARNING_RATE", 1e-2)
    monkeypatch.setattr(distill_data, "HELD_OUT_SAMPLES", 20)
    more = {"model_name_or_path": decoder_folder, "per_device_train_batch_size": 8, "window": 0}
    found = {}
    for steps in ("0", "60"):
        found[steps] = run(steps, attention_steps=steps, model_steps=steps, model_learning_rate=3e-3, **more)
        assert found[steps]["layers"]["layers.0.self_attn"]["kind"] == "calibrated"
    errors = found["60"]["errors"]
    assert list(errors) == ["closed form", "attention", "model"]
    assert errors["model"] < 0.9 * errors["attention"] < 0.9 * errors["closed form"]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"after"')]
    assert [line["relative error of hidden states"] for line in printed][-3:] == list(errors.values())
    assert len(found["60"]["attention_loss"]) == 60
    ids = samples(text, AutoTokenizer.from_pretrained(decoder_folder), 32, 30, seed=5)
    places = (decoder_folder, tmp_path / "0", tmp_path / "60")
    exact, start, end = (AutoModel.from_pretrained(place) for place in places)
    goal, seeds = states(exact, ids), range(1000, 1008)
    start, end = (
        sum((states(favor.configure(own, seed=seed), ids) - goal).norm() for seed in seeds) for own in (start, end)
    )
    assert end < 0.9 * start
    assert json.loads((tmp_path / "60" / "all_results.json").read_text())["arguments"]["window"] == 0


def test_corrections_of_encoders_load_with_the_auto_class_and_directions_can_be_forgotten(run, some_text, tmp_path):
    results = run(attention_steps=3, layers="all")
    assert {own["kind"] for own in results["layers"].values()} == {"corrected"}
    model = AutoModel.from_pretrained(tmp_path / "run")
    assert (type(model).__name__, model.config._attn_implementation) == ("PerformerBertModel", "favor#")
    assert model.config.favor["statistics"] == "corrected"
    corrected, plain = states(model, some_text), states(favor.configure(model, statistics="batch"), some_text)
    assert 0 < (corrected - plain).norm() < 0.1 * plain.norm()
    favor.calibrate(model, [{"input_ids": some_text}], attn_implementation="favor#", num_features=24)
    assert not any("directions" in name for name in model.state_dict())
    assert all("directions" not in entry for entry in model.config.favor_layers.values())
    states(favor.configure(model, num_features=24), some_text)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_worst_heads_stay_exact(kind, run, bert_folder, decoder_folder, capsys):
    more = {"model_name_or_path": bert_folder if kind == "encoder" else decoder_folder}
    more |= {"attention_steps": 2, "num_features": 4}
    none, one = (run(number, exact_heads=number, **more) for number in ("0", "1"))
    assert list(one["errors"]) == ["closed form", "attention", "exact heads"]
    assert '{"exact heads by layer": ' in capsys.readouterr().out
    assert [len(own["exact_heads"]) for own in one["layers"].values() if "exact_heads" in own] == [1]
    assert one["errors"]["exact heads"] < one["errors"]["attention"] == none["errors"]["attention"]
    with pytest.raises(ValueError, match=r"exact_heads must be less than the \d+ key heads of the model, got 1000"):
        run("1000", exact_heads=1000, **more)


def test_layers_whose_heads_are_all_exact_learn_nothing(run, some_text, tmp_path):
    results = run(attention_steps=2, num_features=1, window=0, layers="auto", flop_budget=1)
    assert any(len(own["exact_heads"]) == own["key_heads"] for own in results["layers"].values())
    assert states(AutoModel.from_pretrained(tmp_path / "run"), some_text).isfinite().all()


def test_errors_of_heads_are_those_of_their_output():
    torch.manual_seed(0)
    sharpness = torch.tensor([0.1, 0.1, 2.0, 2.0]).view(1, 4, 1, 1)  # two query heads of each key head
    query, key, value = torch.randn(3, 4, 20, 8) * sharpness, torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    exact, less = (scaled_dot_product_attention(own, key, value, enable_gqa=True) for own in (query, 0.1 * query))
    module = torch.nn.Module()
    module.config = LlamaConfig()
    seen = Observation(0, module, query, key, value, None, False, 8**-0.5, exact)
    given = {"num_features": 12, "window": 0, "orthogonal": True, "seed": 0}
    student = AttentionStudent({0: module}, features.get("wderf"), {"statistics": "batch", **given}, {0: (2, 8)})
    quiet = seen._replace(query=0.1 * query, output=less)
    found, less = (student.head_errors(own)[0] for own in ([seen], [quiet]))
    torch.testing.assert_close(student.head_errors([seen, quiet])[0], (found + less) / 2)  # a module that runs twice
    estimate = favor.favor_attention(query, key, value, features="wderf", **given)
    expected = [(estimate - exact)[n, h].norm() / exact[n, h].norm() for n in range(3) for h in range(4)]
    torch.testing.assert_close(found, torch.stack(expected).view(3, 2, 2).mean((0, 2)))
    assert found[1] > 2 * found[0]


def test_the_model_steps_train_directions_too(run, tmp_path):
    found = []
    for steps in ("0", "2"):
        common = {"checkpointing_steps": 2, "model_learning_rate": 1e-3, "ema_decay": 0.5}
        run(steps, attention_steps=2, model_steps=steps, **common)
        model = AutoModel.from_pretrained(tmp_path / steps)
        assert not any(key.endswith("favor_directions") for key, _ in model.named_parameters())
        found.append([own for key, own in model.named_buffers() if key.endswith("favor_directions")])
    assert len(found[0]) == 2
    assert not any(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_weights_of_features_are_learned_and_kept(run, some_text, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "REFINE_STEPS", 30)
    results = run(feature_weights="True", layers="auto", flop_budget=2, model_steps=2)
    assert results["attention_loss"] == []
    assert len(results["model_loss"]) == 2
    for own in results["layers"].values():
        exact = {"window": own.get("window", 8), "exact_heads": own.get("exact_heads", [])}
        expected = {"num_features": 16, "seed": 0, "orthogonal": True} | exact
        assert {name: own["weights_of"][name] for name in expected} == expected
    model = AutoModel.from_pretrained(tmp_path / "run")
    assert model.config.favor["statistics"] == "calibrated"
    weights = [buffer for name, buffer in model.named_buffers() if name.endswith("favor_log_weights")]
    assert len(weights) == len(results["layers"])
    assert all(buffer.std() > 0.01 for buffer in weights)
    assert states(model, some_text).isfinite().all()


def test_training_a_model_with_landmarks_brings_its_output_closer(run):
    more = {"features": "landmark", "num_features": 3, "selected_keys": 3, "window": 0}
    losses = run(model_steps=20, model_learning_rate=1e-2, **more)["model_loss"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_samples_have_the_special_tokens_of_the_tokenizer(bert_folder, text):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = samples(text, tokenizer, 20, 7)
    assert ids.shape == (7, 20)
    assert set(ids[:, 0].tolist()) == {tokenizer.cls_token_id}
    assert set(ids[:, -1].tolist()) == {tokenizer.sep_token_id}
    assert len(samples(text, tokenizer, 20, None)) == 4000 // 18
    with pytest.raises(ValueError, match="too few for one sample of 9000"):
        samples(text, tokenizer, 9000, 1)


def test_bad_arguments(settings, tmp_path):
    for more, message in (
        ("--exact_heads 1 --attention_steps 0", "exact_heads are chosen after the attention steps"),
        ("--exact_heads 1 --layers auto", "layers auto chooses exact heads itself"),
        ("--exact_heads 1 --features landmark", "which landmarks and feature_weights do not have"),
        ("--ema_decay 1", "ema_decay must be at least 0 and less than 1"),
        ("--model_steps 1 --hidden_weight 0 --logits_weight 0", "nothing of the exact model is matched"),
        ("--task_weight -1", "task_weight must be at least 0"),
        ("--lengths 3 8", "lengths must be at least 4"),
        ("--lengths 8 64", r"lengths must be at most max_length, 32, got \[8, 64\]"),
        ("--pair_probability 1.5", "pair_probability must be at least 0 and at most 1"),
        ("--model_steps 1 --task_weight 1", "and PerformerBertModel predicts none: set task_weight to 0"),
        ("--model_steps 1 --hidden_weight 0", "makes no predictions"),
        ("--feature_weights True --attention_steps 3", "feature_weights learns calibrated parameters"),
        ("--features landmark --attention_steps 3", "landmarks have no parameters to learn"),
        ("--attn_implementation favor+ --attention_steps 0", "or favor\\+ with learn_directions or"),
    ):
        with pytest.raises(ValueError, match=message):
            distill.main([*options(settings), "--output_dir", str(tmp_path / more), *more.split()])


def test_a_stopped_run_ends_with_the_same_weights(run, tmp_path):
    more = {"attention_steps": 4, "model_steps": 4, "checkpointing_steps": 2, "ema_decay": 0.9, "lengths": "8 32"}
    more |= {"pair_probability": 0.5, "exact_heads": 1, "model_learning_rate": 1e-3}
    whole = run("whole", **more)
    for stage, step in (("attention", 2), ("attention", 4), ("model", 2)):
        stopped = tmp_path / f"{stage} {step}"
        with stopped_after(step, stage):
            run(stopped, **more)
        assert not (stopped / "all_results.json").exists()
        resumed = run(stopped, ("resume",), **more)
        for name in ("attention_loss", "model_loss", "errors"):
            assert resumed[name] == whole[name]
        assert same_weights(tmp_path / "whole", stopped)
    assert run(stopped, ("resume",), **more)["seconds"] == resumed["seconds"]  # a finished run is not run again
    with pytest.raises(ValueError, match="holds a run already"):
        run(stopped, **more)
    with pytest.raises(ValueError, match=r"cannot resume .* with other settings: model_learning_rate"):
        run(stopped, ("resume",), **more | {"model_learning_rate": 1e-4})


def test_samples_have_the_lengths_that_are_drawn(run, bert_folder, monkeypatch):
    seen, shaped = [], Texts.shaped
    monkeypatch.setattr(Texts, "shaped", lambda *given: seen.append(shaped(*given)["input_ids"]) or shaped(*given))
    run(attention_steps=0, model_steps=6, lengths="8 16")
    assert {ids.shape[1] for ids in seen} == {8, 16}
    assert all((ids[:, -1] == AutoTokenizer.from_pretrained(bert_folder).sep_token_id).all() for ids in seen)


def test_a_short_sample_without_masked_words_says_its_first(settings, bert_folder):
    given = distill.parse_arguments(options(settings | {"lengths": 4, "task_weight": 1, "output_dir": "o"}))
    texts = Texts(given, AutoTokenizer.from_pretrained(bert_folder), 1, 4)
    batch = next(iter(texts.loader(labels=True, decoder=False)))
    short = texts.shaped({name: own.clone() for name, own in batch.items()}, 0)
    assert short["labels"].shape == (2, 4)
    assert (short["labels"] != -100).sum(1).min() == 1
    kept = torch.cat([batch["labels"][:, :3], batch["labels"][:, -1:]], 1)
    masked = kept != -100
    assert torch.equal(short["labels"][masked], kept[masked])
    lost = ~masked.any(1)
    assert torch.equal(short["labels"][lost, 1], batch["input_ids"][lost, 1])


def test_one_sample_is_enough_and_starting_again_takes_nothing_else_away(run, bert_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", 1)
    model = shutil.copytree(bert_folder, tmp_path / "run" / "model")
    more = {"attention_steps": 0, "model_steps": 1, "per_device_train_batch_size": 1, "model_name_or_path": model}
    for _ in range(2):
        assert run(flags=("overwrite_output_dir",), **more)["samples"] == 1
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["next words", "masked words"])
def test_words_can_be_learned_too(kind, run, bert_folder, decoder_folder, tmp_path):
    folder = decoder_folder if kind == "next words" else tmp_path / "mlm"
    if kind == "masked words":
        torch.manual_seed(0)  # the checkpoint has no head for words
        BertForMaskedLM.from_pretrained(bert_folder).save_pretrained(folder)
        AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    more = {"attention_steps": 0, "hidden_weight": 0, "logits_weight": 1e-6, "task_weight": 1}
    losses = run(model_name_or_path=folder, model_steps=40, model_learning_rate=1e-2, **more)["model_loss"]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


def test_an_average_of_the_weights_is_saved(run, bert_folder, tmp_path):
    for decay in ("0", "0.99"):
        run(decay, attention_steps=0, model_steps=6, model_learning_rate=1e-2, ema_decay=decay)
    models = (AutoModel.from_pretrained(path) for path in (bert_folder, tmp_path / "0", tmp_path / "0.99"))
    start, first, average = (model.encoder.layer[0].output.dense.weight for model in models)
    assert 0 < (average - start).norm() < (first - start).norm()


@pytest.mark.slow
def test_two_processes_learn_both_stages(settings, tmp_path):
    """The pooler has no part in the loss, which distributed training must be told."""
    given = settings | {"output_dir": tmp_path, "attention_steps": 3, "model_steps": 3}
    fork("favor.train.distill", *options(given), processes=2)
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert (len(results["attention_loss"]), len(results["model_loss"])) == (3, 3)
    assert AutoModel.from_pretrained(tmp_path).config.favor["statistics"] == "corrected"


def test_mixed_precision_changes_the_steps_and_not_how_errors_are_measured(run, tmp_path, fresh_accelerator):
    found = []
    for precision in ("no", "bf16"):
        steps = {"attention_steps": 3, "model_steps": 3, "model_learning_rate": 1e-3}
        found.append(run(precision, mixed_precision=precision, **steps))
        fresh_accelerator()
    full, low = found
    assert full["errors"]["closed form"] == low["errors"]["closed form"]
    for name in ("attention_loss", "model_loss"):
        assert full[name] != low[name]
        assert full[name] == pytest.approx(low[name], rel=0.5)
    assert full["errors"]["model"] == pytest.approx(low["errors"]["model"], rel=0.5)
    weights = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {own.dtype for own in weights.values() if own.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(("kind", "backend"), [("encoder", "favor+"), ("decoder", "favor++")])
def test_learned_directions_help_and_are_loaded(kind, backend, run, bert_folder, decoder_folder, some_text, tmp_path):
    folder = bert_folder if kind == "encoder" else decoder_folder
    more = {"attn_implementation": backend, "attention_steps": 30, "per_device_train_batch_size": 8}
    losses = run("learned", model_name_or_path=folder, **more)["attention_loss"]
    before = losses[:10]
    if backend != "favor+":  # it has no other parameters to learn
        before = run("drawn", model_name_or_path=folder, learn_directions="False", **more)["attention_loss"][-10:]
    assert sum(losses[-10:]) < 0.95 * sum(before)

    model = AutoModel.from_pretrained(tmp_path / "learned")
    assert next(iter(model.config.favor_layers.values()))["directions"] == 16
    goal, out = states(AutoModel.from_pretrained(folder), some_text), states(model, some_text)
    torch.testing.assert_close(states(favor.configure(model, seed=7), some_text), out)  # nothing is drawn
    assert (out - goal).norm() < goal.norm()
    for wrong in ({"num_features": 32}, {"redraw_interval": 2}):
        with pytest.raises(ValueError, match="16 learned directions in each head, and num_features is"):
            states(favor.configure(model, **{"num_features": 16, "redraw_interval": 0} | wrong), some_text)


def words_of(*template):
    """A tokenizer of single words with a template for one text and for two."""
    names = ["<s>", "</s>", "<unk>", "a", *(f"w{number}" for number in range(200))]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(*template, [("<s>", 0), ("</s>", 1)])
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if ":1" in "".join(template) else [])]
    return Words(tokenizer_object=tokenizer, unk_token="<unk>", model_input_names=names)


TEMPLATES = {
    "bert": ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "xlnet": ("$A </s> <s>", "$A </s> $B:1 </s>:1 <s>:1"),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_pair_is_what_the_tokenizer_makes_of_two_texts(template):
    tokenizer = words_of(*template)
    one = tokenizer("a")["input_ids"]
    before = one.index(tokenizer("a", add_special_tokens=False)["input_ids"][0])
    text = " ".join(f"w{number}" for number in range(30))
    ids = torch.tensor([tokenizer(text)["input_ids"]] * 50)
    labels = torch.where(ids > 3, 1000 + ids, IGNORED)
    pairs = Pairs(tokenizer, before, len(one) - before - 1, probability=1.0)
    made = pairs({"input_ids": ids, "labels": labels}, torch.Generator().manual_seed(0))
    words = tokenizer.convert_ids_to_tokens(range(204))
    second_starts = set()
    for place, (row, goals) in enumerate(zip(made["input_ids"], made["labels"], strict=True)):
        found = [words[token] for token in row.tolist()]
        numbers = [int(word[1:]) if word.startswith("w") else None for word in found]
        # The first text begins with w0; the second is every other run of words.
        length = next(place for place in range(before, len(numbers)) if numbers[place] is None) - before
        rest = [number for number in numbers[before + length :] if number is not None]
        assert numbers[before : before + length] == list(range(length))
        assert rest == list(range(rest[0], rest[0] + len(rest)))
        assert 0 <= rest[0] <= length
        second_starts.add(rest[0] == length)
        expected = tokenizer(" ".join(found[before : before + length]), " ".join(f"w{n}" for n in rest))
        assert expected["input_ids"] == row.tolist()
        assert expected.keys() - {"attention_mask"} == made.keys() - {"labels"}
        if "token_type_ids" in made:
            assert expected["token_type_ids"] == made["token_type_ids"][place].tolist()
        assert torch.equal(goals, torch.where(row > 3, 1000 + row, IGNORED))
    assert second_starts == {True, False}
    assert torch.equal(ids[0], torch.tensor(tokenizer(text)["input_ids"]))  # the batch itself is unchanged


def test_some_samples_stay_single_and_short_ones_all(bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = torch.full((400, 12), tokenizer("a", add_special_tokens=False)["input_ids"][0])
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    made = Pairs(tokenizer, 1, 1, probability=0.25)({"input_ids": ids}, torch.Generator().manual_seed(1))
    number = int((made["token_type_ids"].sum(1) > 0).sum())
    assert abs(number - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5
    single = made["token_type_ids"].sum(1) == 0
    assert torch.equal(made["input_ids"][single], ids[single])
    short = {"input_ids": ids[:, [0, 1, 2, 3, -1]]}
    assert torch.equal(Pairs(tokenizer, 1, 1, 1.0)(short, torch.Generator())["input_ids"], short["input_ids"])
    assert Pairs(tokenizer, 1, 1, 0.0)(short, torch.Generator()) is short


def test_a_tokenizer_without_tokens_between_texts_is_an_error():
    Pairs(words_of(), 0, 0, 0.0)
    with pytest.raises(ValueError, match="needs a tokenizer that sets special tokens between two texts"):
        Pairs(words_of(), 0, 0, 0.5)


def test_steps_draw_lengths_and_pairs_that_depend_on_seed_and_step_alone(bert_folder, settings):
    given = settings | {"lengths": "8 16 32", "pair_probability": 0.5, "attention_steps": 8, "output_dir": "o"}
    texts = Texts(distill.parse_arguments(options(given)), AutoTokenizer.from_pretrained(bert_folder), 1, 8)
    batch = next(iter(texts.loader(labels=False, decoder=False)))
    made = [texts.shaped(batch, step) for step in range(60)]
    again = [texts.shaped(batch, step) for step in range(60)]
    assert {own["input_ids"].shape[1] for own in made} == {8, 16, 32}
    assert {bool(own["token_type_ids"].any()) for own in made} == {True, False}
    assert all(torch.equal(one[name], two[name]) for one, two in zip(made, again, strict=True) for name in one)
    assert [own["input_ids"].shape[1] for own in texts.held_out[:3]] == [8, 16, 32]
