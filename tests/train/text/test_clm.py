"""Training of decoders: nothing is seen of later tokens, whatever the attention, and the folder can be used."""

import math

import pytest
import torch
from launching import caller, options
from transformers import AutoModelForCausalLM, AutoTokenizer

import favor
from favor.eval import small_decoder
from favor.train import clm
from favor.train.text import language
from favor.train.text.samples import samples

EXACT = {"attn_implementation": "sdpa"}
PLUS = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0}
LANDMARKS = {"attn_implementation": "favor#", "features": "landmark", "selected_keys": 16, "exact_below": 0}
LONGER = {"max_length": 320, "per_device_train_batch_size": 2}  # landmarks read the last 256 tokens exactly
CALIBRATED = {"attn_implementation": "favor#", "num_features": 8, "exact_below": 0}


@pytest.fixture(scope="session")
def decoder_folder(text, tmp_path_factory):
    """A LLaMA with random weights, and a tokenizer that makes one token of every word of the text."""
    folder = tmp_path_factory.mktemp("decoder")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VOCABULARY": 320, "WIDTH": 32, "LAYERS": 2, "LONGEST": 320}.items():
            patch.setattr(small_decoder, name, value)
        small_decoder.main(options({"text": text, "output_dir": folder}))
    return folder


@pytest.fixture
def learn(decoder_folder, text, tmp_path):
    """Calls the program on the tiny decoder and text; a `name=value` argument each."""
    settings = {"model_name_or_path": decoder_folder, "train_file": text, "max_length": 32, "max_train_steps": 5}
    return caller(clm.main, tmp_path, settings | {"per_device_train_batch_size": 8, "learning_rate": 1e-2})


@pytest.mark.parametrize("backend", [PLUS, LANDMARKS | LONGER, CALIBRATED], ids=["favor+", "landmarks", "favor#"])
def test_it_learns_how_frequent_words_are_and_no_more(backend, learn, decoder_folder, text, tmp_path):
    # The words are drawn alike, so that less than log 14 is only for those who see the next one.
    folder = decoder_folder
    if backend is CALIBRATED:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="favor#")
        ids = samples(text, AutoTokenizer.from_pretrained(folder), 32, 8)
        favor.calibrate(model, [{"input_ids": ids}])
        folder = tmp_path / "calibrated"
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(decoder_folder).save_pretrained(folder)
    results = learn(model_name_or_path=folder, max_train_steps=60, **backend)
    assert results["metrics"]["loss"] == pytest.approx(math.log(14), abs=0.15)
    assert results["attn_implementation"] == backend["attn_implementation"]


def test_scores_are_those_of_the_saved_model(learn, text, decoder_folder, tmp_path):
    results = learn(per_device_eval_batch_size=3, validation_file=text, max_eval_samples=10, **LANDMARKS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run", attn_implementation="favor#").eval()
    assert favor.FavorConfig.from_dict(model.config.favor).features == "landmark"
    words = ("--model_name_or_path", str(decoder_folder), "--train_file", str(text), "--validation_file", str(text))
    arguments = language.Arguments.parse(
        [*words, "--output_dir", "o", "--max_length", "32", "--max_eval_samples", "10"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    (batch,) = language.make_loaders(arguments, clm.OBJECTIVE, tokenizer, 42)[1]
    with torch.no_grad():
        assert results["metrics"]["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert results["metrics"]["perplexity"] == pytest.approx(math.exp(results["metrics"]["loss"]))


@pytest.mark.parametrize("backend", [{}, EXACT, PLUS], ids=["as saved", "exact", "favor+"])
def test_a_model_that_sees_later_tokens_is_refused(backend, learn, bert_folder):
    with pytest.raises(ValueError, match=r"sees? later tokens.*favor\.train\.mlm"):
        learn(model_name_or_path=bert_folder, **backend)


def test_the_small_decoder_reads_and_writes_its_text(decoder_folder):
    tokenizer = AutoTokenizer.from_pretrained(decoder_folder)
    ids = tokenizer(" good film was very dull")["input_ids"]
    assert len(ids) == 5
    assert tokenizer.decode(ids) == " good film was very dull"
    config = AutoModelForCausalLM.from_pretrained(decoder_folder).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (4, 2, len(tokenizer))
