"""Going on with pre-training: masks, an output layer of its own, resuming."""

import json
import math

import pytest
import torch
from launching import caller, fork, options
from stopping import whole_and_resumed
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import favor.models  # noqa: F401  registers Performer BERT
from favor.train import mlm
from favor.train.common.pretrained import check_positions
from favor.train.text import language
from favor.train.text.language import Arguments

BACKEND = {"attn_implementation": "favor#", "num_features": 8, "exact_below": 0}
BOUND = {"head_optimizer": "softmax_bound"}


@pytest.fixture
def adapt(bert_folder, text, tmp_path):
    """Calls the program on the tiny checkpoint and text; a `name=value` argument each."""
    settings = {"model_name_or_path": bert_folder, "train_file": text, "max_length": 32, "max_train_steps": 5}
    return caller(mlm.main, tmp_path, settings | {"per_device_train_batch_size": 8, "learning_rate": 1e-2})


def test_masks_are_those_of_bert_and_change_with_the_epoch(bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    word = tokenizer.convert_tokens_to_ids("film")
    row = [tokenizer.cls_token_id, *[word] * 198, tokenizer.sep_token_id]
    ids = torch.tensor([row] * 200)
    data = mlm.MaskedTexts(ids, tokenizer, seed=3)
    first, again, later = data[7], data[7], data[7 + len(data)]
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], later["labels"])
    assert ids.eq(word).sum() == 200 * 198  # the samples themselves stay

    items = [data[i] for i in range(200)]
    inputs, labels = (torch.stack([item[name] for item in items]) for name in ("input_ids", "labels"))
    chosen = labels != -100
    assert not chosen[:, [0, -1]].any()
    assert (labels[chosen] == word).all()
    assert torch.equal(inputs[~chosen], ids[~chosen])

    def within(count, number, share):
        assert abs(count - share * number) < 5 * math.sqrt(number * share * (1 - share))

    total = int(chosen.sum())
    within(total, 200 * 198, 0.15)
    within(int((inputs[chosen] == tokenizer.mask_token_id).sum()), total, 0.8 + 0.1 / len(tokenizer))
    # A tenth stays as it is, and a random word may be the same.
    within(int((inputs[chosen] == word).sum()), total, 0.1 + 0.1 / len(tokenizer))


@pytest.mark.parametrize("head", [{}, BOUND])
def test_it_learns_how_frequent_words_are(head, adapt):
    # The words are drawn alike, so that nothing beyond log 14 can be learnt.
    flags = ("untie_head",) if head else ()
    results = adapt(max_train_steps=60, flags=flags, **BACKEND, **head)
    assert results["steps"] == 60
    assert results["metrics"]["loss"] == pytest.approx(math.log(14), abs=0.15)
    assert results["metrics"]["perplexity"] == pytest.approx(math.exp(results["metrics"]["loss"]))


def test_folder_holds_the_model_with_its_backend_and_its_scores(adapt, text, bert_folder, tmp_path):
    results = adapt(per_device_eval_batch_size=3, validation_file=text, max_eval_samples=10, **BACKEND)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run").eval()
    assert type(model).__name__ == "PerformerBertForMaskedLM"
    assert model.config._attn_implementation == "favor#"
    arguments = Arguments.parse(
        [
            *("--model_name_or_path", str(bert_folder), "--train_file", str(text), "--validation_file", str(text)),
            *("--output_dir", "o", "--max_length", "32", "--max_eval_samples", "10"),
        ]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    (batch,) = language.make_loaders(arguments, mlm.OBJECTIVE, tokenizer, 42)[1]
    with torch.no_grad():
        assert results["metrics"]["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_short_samples_have_something_to_predict(bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = torch.tensor([[tokenizer.cls_token_id, 7, 8, tokenizer.sep_token_id]] * 100)
    data = mlm.MaskedTexts(ids, tokenizer, seed=0)
    labels = torch.stack([data[i]["labels"] for i in range(100)])
    assert (labels != -100).any(1).all()
    assert (labels[:, [0, 3]] == -100).all()
    chosen = (labels != -100).sum(0)
    # One of two words, and now and then both: .575 in the mean.
    assert abs(chosen[1:3].float().mean() - 57.5) < 5 * 5


def test_options_of_a_backend_that_is_not_used_are_named(adapt, capsys):
    adapt(attn_implementation="sdpa", num_features=8, max_train_steps=1)
    assert "sdpa is exact attention: it does not use num_features" in capsys.readouterr().out


def test_positions_of_roberta_begin_after_its_padding():
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = RobertaForMaskedLM(RobertaConfig(**sizes, intermediate_size=32, max_position_embeddings=66))
    check_positions(model, 64)
    model(torch.full((1, 64), 5))
    with pytest.raises(ValueError, match="max_length is 65, but the model has 64 positions"):
        check_positions(model, 65)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_untied_head_starts_equal_and_is_loaded_as_its_own(kind, tmp_path):
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config_class, model_class = {
        "bert": (BertConfig, BertForMaskedLM),
        "roberta": (RobertaConfig, RobertaForMaskedLM),
    }[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**sizes, intermediate_size=32)).eval()
    ids = torch.arange(5, 15).view(2, 5)
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_()
        tied = model(ids).logits
        assert torch.equal(language.untie(model)(ids).logits, tied)
    head = model.get_output_embeddings()
    assert head.weight is not model.get_input_embeddings().weight
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        head.weight += 1
        head.bias += torch.arange(30)
        moved = model(ids).logits
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(model_class.from_pretrained(tmp_path).eval()(ids).logits, moved)


@pytest.mark.parametrize("head", [{}, BOUND])
def test_resume_repeats_the_uninterrupted_run(head, adapt, tmp_path):
    # 17 batches an epoch: the second one has other masks, and the run is stopped within it.
    settings = {"max_train_steps": 24, "checkpointing_steps": 10, **BACKEND, **head}
    flags = ("untie_head",) if head else ()
    whole, resumed = whole_and_resumed(adapt, tmp_path, 20, flags, **settings)
    assert resumed["history"] == whole["history"]
    assert [entry["epoch"] for entry in whole["history"]] == [1, 2]
    assert resumed["metrics_before"] == whole["metrics_before"]
    # A finished run is not trained again.
    assert adapt("stopped", (*flags, "resume"), **settings) == json.loads(
        (tmp_path / "stopped" / "all_results.json").read_text()
    )


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(still_folder, text, tmp_path):
    settings = {"model_name_or_path": still_folder, "train_file": text, "max_length": 32, "max_train_steps": 6, **BOUND}
    common, losses = options(settings), []
    for count, batch in ((1, 4), (2, 2)):
        words = ["--output_dir", tmp_path / str(count), "--per_device_train_batch_size", batch, "--untie_head"]
        fork("favor.train.mlm", *common, *words, processes=count)
        results = json.loads((tmp_path / str(count) / "all_results.json").read_text())
        assert results["num_processes"] == count
        losses.append(results["metrics"]["loss"])
    # Each process takes the mean over its own masked tokens, of which there are not equally many; half the batch alone
    # ends 2 % away.
    assert losses[0] == pytest.approx(losses[1], rel=0.005)
    # An untied folder has a bias without a part in the loss, which DDP must not wait for.
    words = ["--train_file", text, "--max_length", 32, "--max_train_steps", 3, "--output_dir", tmp_path / "on"]
    fork("favor.train.mlm", "--model_name_or_path", tmp_path / "2", *words, processes=2)


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        (BOUND, (), "must not share its weights with the embeddings: add --untie_head"),
        ({"head_learning_rate": 0.1}, (), "must not share its weights with the embeddings: add --untie_head"),
        ({"max_length": 200}, (), "max_length is 200, but the model has 128 positions"),
        ({"max_length": 5000}, (), "max_length is 5000, but the model has 128 positions"),
        ({"max_train_samples": 1}, (), "one sample of 32 tokens: give a longer text"),
    ],
)
def test_wrong_arguments_are_named(settings, flags, message, adapt):
    with pytest.raises(ValueError, match=message):
        adapt(flags=flags, **settings)
