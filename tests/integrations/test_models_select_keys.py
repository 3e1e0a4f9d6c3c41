"""Selected keys in models: options, and generation with a cache that keeps the keys."""

import pytest
import torch
from small_sections import set_small_sections
from test_cache import CONFIGS, prompt
from test_cache import generate as generate_any
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import favor

OPTIONS = {"exact_below": 0, "selected_keys": 8}


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
    """Without the padding token, whose embedding is 0: its query would find all keys equal."""
    return generate_any(*args, **options, suppress_tokens=[0])


def full(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


LENGTHS = [(name, lengths) for name in CONFIGS for lengths in ((41,), (49, 5, 29, 36))]


@pytest.mark.parametrize(("name", "lengths"), [*LENGTHS, ("llama", (630, 5, 520))])
def test_generate_is_a_full_forward_pass(name, lengths, monkeypatch):
    """As to the logits of each token; a full pass is causal, so one pass over all tokens gives them all."""
    if max(lengths) < 256:
        set_small_sections(monkeypatch)
    model, inputs = make(name), prompt(*lengths)
    found = generate(model, favor.FavorCache(model.config), inputs)
    start = inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 19), value=1)
    whole = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = full(model, found.sequences[:, :-1], **whole)[:, start - 1 :]
    close(torch.stack(found.logits, 1).double(), expected)
    without = full(make(name, selected_keys=0), found.sequences[:, :-1], **whole)[:, start - 1 :]
    assert (without - expected).abs().max() > 1e-3


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
@pytest.mark.parametrize(("name", "how"), [("llama", "assistant"), ("gpt2", "lookup"), ("gemma3", "beams")])
def test_assisted_generation_and_beams(name, how):
    model, inputs = make(name), prompt(45)
    options = {"max_new_tokens": 16, "do_sample": False, "suppress_tokens": [0]}  # as in `generate`
    options |= {"num_beams": 3} if how == "beams" else {}
    expected = model.generate(**inputs, **options, use_cache=False)
    if how == "assistant":
        options["assistant_model"] = make(name, selected_keys=4)
        options["assistant_model"].generation_config.num_assistant_tokens = 3
    elif how == "lookup":
        options["prompt_lookup_num_tokens"] = 4
    found = model.generate(**inputs, **options, past_key_values=favor.FavorCache(model.config))
    assert torch.equal(found, expected)


def test_the_kept_keys_are_counted():
    model, ids = make(), prompt(40)["input_ids"]
    cache = favor.FavorCache(model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.nbytes > 2 * 40 * 2 * (8 + 8) * 4  # two layers, two key heads, keys and values of width 8


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
