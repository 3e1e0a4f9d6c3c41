"""Training of language models: masks, nothing is seen of later tokens, an output layer of its own, resuming."""

import json
import math
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from launching import caller, fork, options
from stopping import whole_and_resumed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import favor
import favor.models
from favor.eval import small_decoder
from favor.train import clm, mlm
from favor.train.common.pretrained import check_positions
from favor.train.text import language
from favor.train.text.language import Arguments
from favor.train.text.samples import samples
from favor.train.text.stream import Stream, cut, first_samples

BACKEND = {"attn_implementation": "favor#", "num_features": 8, "exact_below": 0}
BOUND = {"head_optimizer": "softmax_bound"}
SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


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
    results = adapt(max_train_steps=60, flags=("untie_head",) if head else (), **BACKEND, **head)
    assert results["steps"] == 60
    assert results["metrics"]["loss"] == pytest.approx(math.log(14), abs=0.15)


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


def test_positions_of_roberta_begin_after_its_padding():
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, max_position_embeddings=66))
    check_positions(model, 64)
    model(torch.full((1, 64), 5))
    with pytest.raises(ValueError, match="max_length is 65, but the model has 64 positions"):
        check_positions(model, 65)


@pytest.mark.parametrize("model_class", [transformers.BertForMaskedLM, transformers.RobertaForMaskedLM])
def test_untied_head_starts_equal_and_is_loaded_as_its_own(model_class, tmp_path):
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SIZES)).eval()
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
    written = json.loads((tmp_path / "stopped" / "all_results.json").read_text())
    assert adapt("stopped", (*flags, "resume"), **settings) == written  # a finished run is not trained again


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(still_folder, adapt, text, tmp_path):
    # An untied folder has a bias without a part in the loss, which DDP must not wait for.
    adapt("untied", ("untie_head",), model_name_or_path=still_folder, max_train_steps=1, learning_rate=1e-4)
    common = {"model_name_or_path": tmp_path / "untied", "max_train_steps": 6, "learning_rate": 5e-5, **BOUND}
    one = adapt("one", per_device_train_batch_size=4, **common)
    common |= {"train_file": text, "max_length": 32, "per_device_train_batch_size": 2, "output_dir": tmp_path / "two"}
    fork("favor.train.mlm", *options(common), processes=2)
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    # Each process takes the mean over its own masked tokens, of which there are not equally many; half the batch alone
    # ends 2 % away.
    assert one["metrics"]["loss"] == pytest.approx(two["metrics"]["loss"], rel=0.005)


def test_wrong_arguments_are_named(adapt, capsys):
    adapt("exact", attn_implementation="sdpa", num_features=8, max_train_steps=1)
    assert "sdpa is exact attention: it does not use num_features" in capsys.readouterr().out
    for settings, message in (
        (BOUND, "must not share its weights with the embeddings: add --untie_head"),
        ({"head_learning_rate": 0.1}, "must not share its weights with the embeddings: add --untie_head"),
        ({"max_length": 5000}, "max_length is 5000, but the model has 128 positions"),
        ({"max_train_samples": 1}, "one sample of 32 tokens: give a longer text"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt(**settings)


EXACT = {"attn_implementation": "sdpa"}
PLUS = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0}
LANDMARKS = {"attn_implementation": "favor#", "features": "landmark", "selected_keys": 6, "exact_below": 0}


@pytest.fixture(scope="session")
def decoder_folder(text, tmp_path_factory):
    """A LLaMA with random weights, and a tokenizer that makes one token of every word of the text."""
    folder = tmp_path_factory.mktemp("decoder")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VOCABULARY": 320, "WIDTH": 32, "LAYERS": 2, "LONGEST": 128}.items():
            patch.setattr(small_decoder, name, value)
        small_decoder.main(options({"text": text, "output_dir": folder}))
    return folder


@pytest.fixture
def learn(decoder_folder, text, tmp_path):
    """Calls the program on the tiny decoder and text; a `name=value` argument each."""
    settings = {"model_name_or_path": decoder_folder, "train_file": text, "max_length": 32, "max_train_steps": 5}
    return caller(clm.main, tmp_path, settings | {"per_device_train_batch_size": 8, "learning_rate": 1e-2})


@pytest.mark.parametrize("backend", [PLUS, BACKEND], ids=["favor+", "favor#"])
def test_it_learns_how_frequent_words_are_and_no_more(backend, learn, decoder_folder, text, tmp_path):
    # The words are drawn alike, so that less than log 14 is only for those who see the next one.
    folder = decoder_folder
    if backend is BACKEND:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="favor#")
        ids = samples(text, AutoTokenizer.from_pretrained(folder), 32, 8)
        favor.calibrate(model, [{"input_ids": ids}])
        folder = tmp_path / "calibrated"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(decoder_folder).save_pretrained(folder)
    results = learn(model_name_or_path=folder, max_train_steps=60, **backend)
    assert results["metrics"]["loss"] == pytest.approx(math.log(14), abs=0.15)
    assert results["attn_implementation"] == backend["attn_implementation"]


@pytest.mark.parametrize("program", [mlm, clm])
def test_scores_are_those_of_the_saved_model(program, adapt, learn, text, bert_folder, decoder_folder, tmp_path):
    """A configuration of the zoo remembers its backend, another one the options."""
    kind, backend, model = program.OBJECTIVE.auto_class, {}, bert_folder
    call, options_of = adapt, BACKEND
    if program is clm:
        call, options_of, model, backend = learn, LANDMARKS, decoder_folder, {"attn_implementation": "favor#"}
    given = {"validation_file": text, "max_eval_samples": 10}
    results = call(per_device_eval_batch_size=3, **given, **options_of)
    saved = kind.from_pretrained(tmp_path / "run", **backend).eval()
    assert type(saved).__name__ == ("LlamaForCausalLM" if program is clm else "PerformerBertForMaskedLM")
    assert saved.config._attn_implementation == "favor#"
    assert favor.FavorConfig.from_dict(saved.config.favor).features == options_of.get("features")
    given |= {"model_name_or_path": model, "train_file": text, "max_length": 32, "output_dir": "o"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    (batch,) = language.make_loaders(Arguments.parse(options(given)), program.OBJECTIVE, tokenizer, 42)[1]
    with torch.no_grad():
        assert results["metrics"]["loss"] == pytest.approx(saved(**batch).loss.item(), rel=1e-5)
    assert results["metrics"]["perplexity"] == pytest.approx(math.exp(results["metrics"]["loss"]))


@pytest.mark.parametrize("backend", [{}, EXACT, PLUS], ids=["as saved", "exact", "favor+"])
def test_a_model_that_sees_later_tokens_is_refused(backend, learn, bert_folder):
    with pytest.raises(ValueError, match=r"sees? later tokens.*favor\.train\.mlm"):
        learn(model_name_or_path=bert_folder, **backend)


def test_a_stream_is_its_texts_joined_and_cut_and_processes_share_it(shards, bert_folder, decoder_folder):
    texts = [json.loads(line)["text"] for path in shards.glob("train*") for line in path.read_text().splitlines()]
    tokenizer, dataset = AutoTokenizer.from_pretrained(bert_folder), load_dataset(str(shards), streaming=True)
    rounds = []
    for epoch in range(4):
        (order := dataset["train"].shuffle(seed=42)).set_epoch(epoch)
        rounds.append([row["text"] for row in order])
    assert Counter(texts) == Counter(rounds[0]) == Counter(rounds[1])
    assert texts != rounds[0] != rounds[1]
    assert len(" ".join(filter(None, texts)).split()) < 100 * 30  # each of two shares is read more than twice

    def direct(texts, number):
        words = tokenizer.convert_tokens_to_ids(" ".join(filter(None, texts)).split())
        ids = torch.tensor(words[: 30 * number]).view(number, 30)
        ends = torch.tensor([[tokenizer.cls_token_id, tokenizer.sep_token_id]]).repeat(number, 1)
        return torch.cat([ends[:, :1], ids, ends[:, 1:]], dim=1)

    stream = Stream(str(shards), tokenizer, 32, 200, seed=42, batch=10, shares=2)
    loader = DataLoader(clm.OBJECTIVE.samples(stream, tokenizer, 42), 10)
    for rank in range(2):
        whole = direct([text for order in rounds for text in order[rank::2]], 100).view(10, 10, 32)
        own = prepare_data_loader(loader, num_processes=2, process_index=rank)
        assert torch.equal(torch.stack([batch["input_ids"] for batch in own]), whole)
        later = [batch["input_ids"] for batch in skip_first_batches(own, 4)]
        assert torch.equal(torch.stack(later), whole[4:])
    for shares in (2, 3):  # every second text, a file each
        parts = [split_dataset_by_node(stream.dataset, rank, shares) for rank in range(shares)]
        words = [int(row[1]) for part in parts for row in cut(part, tokenizer, 3, "")]
        assert Counter(tokenizer.convert_ids_to_tokens(words)) == Counter(" ".join(filter(None, texts)).split())
    held = [row["text"] for row in dataset["validation"]]
    assert torch.equal(first_samples(str(shards), tokenizer, 32, 5), direct(held, 5))
    reads_spaces = AutoTokenizer.from_pretrained(decoder_folder)
    lines = "".join(f"{line or ''}\n" for line in held)
    assert lines.startswith(reads_spaces.decode(first_samples(str(shards), reads_spaces, 99, 2).flatten()))


def test_a_resumed_stream_goes_on_at_its_place(adapt, shards, tmp_path):
    # 80 samples a round: the run is stopped in the second one.
    settings = {"train_file": None, "dataset_name": shards, "max_train_steps": 8, "checkpointing_steps": 3, **PLUS}
    whole, resumed = whole_and_resumed(adapt, tmp_path, 6, gradient_accumulation_steps=2, **settings)
    assert [entry["step"] for entry in whole["history"]] == [8]
    assert resumed["history"] == whole["history"]
    assert resumed["train_loss"] == whole["train_loss"]


def test_two_processes_take_turns_in_a_stream(learn, decoder_folder, shards, tmp_path):
    """Together they see what one process sees that reads both shares."""
    given = {"model_name_or_path": decoder_folder, "train_file": None, "dataset_name": shards, "max_length": 32}
    given |= {"max_train_steps": 6, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, **EXACT}

    class Both(Stream):
        def __init__(self, *given):
            super().__init__(*given[:-2], batch=2, shares=2)

    with patch.object(language, "Stream", Both):
        one = learn("one", per_device_train_batch_size=4, **given)
    given |= {"per_device_train_batch_size": 2, "output_dir": tmp_path / "two"}
    fork("favor.train.clm", *options(given), processes=2)
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["steps"], two["steps"], two["num_processes"]) == (6, 6, 2)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_streams_that_cannot_be_read_are_named(adapt, shards, text, tmp_path):
    for name, rows in {
        "bare": '{"words": "good"}',
        "short": '{"text": "good film"}',
        "none": '{"text": null}',
        "empty": "",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(rows)
    stream = {"train_file": None, "dataset_name": shards}
    for settings, message in (
        ({"dataset_name": shards}, "give a text, train_file, or a data set, dataset_name: one of them"),
        ({"train_file": None}, "give a text, train_file, or a data set, dataset_name: one of them"),
        (stream | {"max_train_steps": None}, "length is not known: add --max_train_steps"),
        (stream | {"max_train_samples": 9}, "max_train_samples is for train_file"),
        (stream | {"dataset_name": tmp_path / "absent"}, "with the split train, got .*absent: Couldn't find any data"),
        (stream | {"dataset_name": f"{shards}:en"}, r"with the split train, got .*:en: .*Available: \['default'\]"),
        (
            stream | {"dataset_name": tmp_path / "bare"},
            r"bare, train, must have texts in the column text, got words \(str\)",
        ),
        (stream | {"dataset_name": tmp_path / "empty"}, "with the split train, got .*empty: an empty file"),
        (stream | {"dataset_name": tmp_path / "short"}, "with the split validation, .* or give --validation_file"),
        (
            stream | {"dataset_name": tmp_path / "short", "validation_file": text},
            "short has 2 tokens for a process",
        ),
        (
            stream | {"dataset_name": tmp_path / "none", "validation_file": text},
            "none has 0 tokens for a process",
        ),
        (stream | {"max_length": 2}, "max_length must be more than 2 special tokens, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt("refused", flags=("overwrite_output_dir",), **settings)
