"""Selected keys in models: options, and generation with a cache that keeps the keys."""

import pytest
import torch
from test_cache import CONFIGS, prompt
from transformers import AutoModelForCausalLM

import favor

OPTIONS = {"exact_below": 0, "selected_keys": 8}


def make(name="llama", **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval().double()  # no choice by rounding
    return favor.configure(model, "landmark", **{**OPTIONS, **options})


def full(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forgotten", [1, 70, 300, 600])
def test_forgotten_tokens_leave_nothing_behind(forgotten):
    """In sections of 256 tokens: what follows is what follows in a cache that never saw them."""
    model, ids = make(selected_keys=64), prompt(1000)["input_ids"]
    caches, founds = [favor.FavorCache(model.config) for _ in range(2)], []
    with torch.no_grad():
        model(ids[:, :640], past_key_values=caches[0])
        caches[0].crop(-forgotten)
        model(ids[:, : 640 - forgotten], past_key_values=caches[1])
        for cache in caches:
            pieces = ids[:, 640:].split([1, 7, 300, 1, 1, 50], 1)
            founds.append(torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1))
    close(*founds)


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


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize(("name", "how"), [("llama", "assistant"), ("gpt2", "lookup")])
def test_assisted_generation(name, how):
    """Without the padding token, whose embedding is 0: its query would find all keys equal."""
    model, inputs = make(name), prompt(45)
    options = {"max_new_tokens": 16, "do_sample": False, "suppress_tokens": [0]}
    expected = model.generate(**inputs, **options, use_cache=False)
    if how == "assistant":
        options["assistant_model"] = make(name, selected_keys=4)
        options["assistant_model"].generation_config.num_assistant_tokens = 3
    else:
        options["prompt_lookup_num_tokens"] = 4
    found = model.generate(**inputs, **options, past_key_values=favor.FavorCache(model.config))
    assert torch.equal(found, expected)


def test_the_number_of_selected_keys_is_that_of_the_kind_of_layer():
    """Under each name of the backend and in direct calls."""
    for config in (favor.FavorConfig(), favor.FavorConfig(features="landmark")):
        assert [config.selected("landmark", is_causal) for is_causal in (False, True)] == [768, 1024]
    assert favor.FavorConfig(selected_keys=8).selected("landmark", True) == 8
    query, key, value = torch.randn(3, 1, 2, 1200, 8, generator=torch.Generator().manual_seed(0))
    for is_causal, number in ((False, 768), (True, 1024)):
        outs = [
            favor.favor_attention(
                query, key, value, features="landmark", num_features=50, is_causal=is_causal, **options
            )
            for options in ({}, {"selected_keys": number}, {"selected_keys": number - 256})
        ]
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])
