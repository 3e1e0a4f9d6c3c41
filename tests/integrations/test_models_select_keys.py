"""Selected keys in models: options, and generation with a cache that keeps the keys."""

import logging

import pytest
import torch
from pairwise import pairs
from test_cache import CONFIGS, prompt
from test_cache import generate as generate_any
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import favor

OPTIONS = {"num_features": 6, "exact_below": 0, "window": 8, "selected_keys": 8, "page_size": 2, "query_block": 3}


def make(name="llama", **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval().double()  # no choice by rounding
    return favor.configure(model, "landmark", **{**OPTIONS, **options})


def bert(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = BertModel(BertConfig(**sizes, vocab_size=40, initializer_range=0.5)).eval()
    return favor.configure(model, "landmark", num_features=4, exact_below=0, **options)


def generate(*args, **options):
    """Without the padding token, whose embedding is 0: its query would find all pages equal."""
    return generate_any(*args, **options, suppress_tokens=[0])


def full(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(*pairs(name=CONFIGS, lengths=[(11,), (19, 5, 9, 16)], window=[8, 7]))
def test_generate_is_a_full_forward_pass(name, lengths, window):
    """As to the logits of each token; a full pass is causal, so one pass over all tokens gives them all."""
    model, inputs = make(name, window=window), prompt(*lengths)
    found = generate(model, favor.FavorCache(model.config), inputs)
    start = inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 19), value=1)
    whole = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = full(model, found.sequences[:, :-1], **whole)[:, start - 1 :]
    close(torch.stack(found.logits, 1).double(), expected)
    without = full(make(name, window=window, selected_keys=0), found.sequences[:, :-1], **whole)[:, start - 1 :]
    assert (without - expected).abs().max() > 1e-3


def test_what_cannot_be_forgotten_is_named():
    """`tests/fuzz` compares what is read, forgotten and reordered with a run without a cache."""
    model, ids = make(), prompt(21)["input_ids"]
    cache = favor.FavorCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget its last 14 tokens"):
        cache.crop(-14)


def test_nothing_is_forgotten_of_a_piece_that_is_padded_at_its_right():
    """Where the last column of the batch is no token of a row, the last token of its state is an earlier one."""
    model, ids = make(), prompt(13, 13)["input_ids"]
    cache, mask = favor.FavorCache(model.config), torch.ones(2, 13, dtype=torch.long)
    mask[1, 9:11] = 0
    places = mask.cumsum(1) - 1
    with torch.no_grad():
        model(ids[:, :11], attention_mask=mask[:, :11], position_ids=places[:, :11], past_key_values=cache)
        with pytest.raises(ValueError, match="cannot forget its last 1 tokens"):
            cache.crop(-1)
        model(ids[:, 11:], attention_mask=mask, position_ids=places[:, 11:], past_key_values=cache)
        cache.crop(-1)
        last = {"attention_mask": mask, "position_ids": places[:, 12:]}
        found = model(ids[:, :1], **last, past_key_values=cache).logits[:, -1]
    whole = torch.cat([ids[:, :12], ids[:, :1]], 1)
    close(found, full(model, whole, attention_mask=mask, position_ids=places)[:, -1])
    with pytest.raises(ValueError, match="cannot forget its last 3 tokens"):
        cache.crop(-3)


@pytest.mark.parametrize(("name", "assistant"), [("llama", True), ("gpt2", False), ("gemma3", True)])
def test_assisted_generation(name, assistant):
    model, inputs, helper = make(name), prompt(21), {"prompt_lookup_num_tokens": 4}
    if assistant:
        helper = {"assistant_model": make(name, num_features=2)}
        helper["assistant_model"].generation_config.num_assistant_tokens = 3
    options = {"max_new_tokens": 16, "do_sample": False, "suppress_tokens": [0]}  # as in `generate`
    expected = model.generate(**inputs, **options, use_cache=False)
    found = model.generate(**inputs, **options, past_key_values=favor.FavorCache(model.config), **helper)
    assert torch.equal(found, expected)


def test_a_state_alone_selects_no_keys_and_says_so_once(caplog):
    model, ids = make(), prompt(40)["input_ids"]
    sizes, founds = set(), []
    with caplog.at_level(logging.WARNING, logger="favor"), torch.no_grad():
        cache = favor.FavorCache(model.config, keep="state")
        for token in ids.split(1, 1):
            founds.append(model(token, past_key_values=cache).logits)
            if cache.get_seq_length() in (16, 24, 32, 40):
                sizes.add(cache.nbytes)
    assert len(sizes) == 1
    told = [record.message for record in caplog.records if "keeps no keys" in record.message]
    assert len(told) == 1
    close(torch.cat(founds, 1), full(make(selected_keys=0), ids))


def test_the_kept_keys_are_counted():
    model, ids = make(), prompt(40)["input_ids"]
    cache = favor.FavorCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.nbytes > 2 * 40 * 2 * (8 + 8) * 4  # two layers, two key heads, keys and values of width 8


def test_another_keep_is_refused():
    with pytest.raises(ValueError, match="keep must be one of 'all', 'state'; got 'some'"):
        favor.FavorCache(keep="some")


def test_by_default_many_keys_are_selected():
    """More than there are tokens here, so that attention is exact; 0 selects none."""
    ids = torch.arange(3, 39)[None]
    with torch.no_grad():
        model, none = bert(), bert(selected_keys=0)
        exact = BertModel(model.config)
        exact.load_state_dict(model.state_dict())
        exact.eval().set_attn_implementation("sdpa")
        wanted = exact(ids).last_hidden_state
        torch.testing.assert_close(model(ids).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(none(ids).last_hidden_state, wanted, atol=1e-2)


def test_the_older_spelling_selects_none_by_default():
    assert favor.FavorConfig(features="landmark").for_backend("favor#").selected("landmark", False) == 0
    assert favor.FavorConfig().for_backend("landmark").selected("landmark", False) == 256
    asked = favor.FavorConfig(features="landmark", selected_keys=8).for_backend("favor#")
    assert asked.selected("landmark", True) == 8
