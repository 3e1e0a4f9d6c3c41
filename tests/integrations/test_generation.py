"""Generation with a state of fixed size gives what generation with a cache of keys and values gives."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

import favor

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=32),
    "gpt2": lambda: GPT2Config(**SIZES, n_positions=128),
    # One layer of two has a sliding window, and keeps its keys.
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=32,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def make(name: str = "llama", **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return favor.configure(model, "favor+", **{"num_features": 16, "exact_below": 0, **options})


def prompt(*lengths: int) -> dict[str, torch.Tensor]:
    """Token numbers and mask of a batch, padded at the left."""
    ids = torch.randint(3, 40, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def generate(model: PreTrainedModel, cache: object, inputs: dict[str, torch.Tensor], **options: object) -> object:
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, **options}
    return model.generate(**inputs, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **settings)


def check_equal(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: object) -> None:
    expected = generate(model, DynamicCache(config=model.config), inputs, **options)
    found = generate(model, favor.FavorCache(model.config), inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == 20
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(11,), (13, 5, 9)], ids=["one", "padded"])
def test_tokens_and_logits(name, lengths):
    check_equal(make(name), prompt(*lengths))


@pytest.mark.parametrize("length", [5, 8, 19])
def test_with_a_window(length):
    check_equal(make(window=8), prompt(length, length))


def test_with_calibrated_parameters():
    model = make()
    ids = torch.randint(3, 40, (4, 30), generator=torch.Generator().manual_seed(2))
    favor.calibrate(model, [{"input_ids": ids}], attn_implementation="favor#")
    assert model.config.favor["statistics"] == "calibrated"
    check_equal(model, prompt(12, 7))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
def test_rows_of_the_batch_are_repeated_and_reordered(options):
    model = make(window=0 if "num_beams" in options else 8)
    runs = []
    for kind in (DynamicCache, favor.FavorCache):
        torch.manual_seed(5)
        runs.append(generate(model, kind(config=model.config), prompt(9, 9), **options).sequences)
    assert torch.equal(*runs)


def test_a_conversation_goes_on_with_the_same_cache():
    model, cache = make(), favor.FavorCache()
    first = generate(model, cache, prompt(9)).sequences
    more = torch.cat([first, torch.randint(3, 40, (1, 6), generator=torch.Generator().manual_seed(3))], dim=1)
    inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    assert torch.equal(generate(model, cache, inputs).sequences, generate(model, None, inputs).sequences)
    cache.reset()
    assert torch.equal(generate(model, cache, prompt(9)).sequences, first)


def test_size_does_not_grow():
    model, sizes = make(window=8), set()
    for length in (16, 32, 64):
        cache = favor.FavorCache(model.config)
        with torch.no_grad():
            model(**prompt(length), past_key_values=cache)
        assert cache.get_seq_length() == length
        sizes.add(cache.nbytes)
    # Two layers, two key heads: M weights and M means of width 8, in float32.
    assert sizes == {2 * 2 * 16 * (8 + 1) * 4}


def test_a_layer_that_does_not_read_its_state_is_an_error():
    model = make()
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="did not read its state"):
        generate(model, favor.FavorCache(), prompt(9))


@pytest.mark.parametrize(
    ("options", "lengths", "message"),
    [
        ({"exact_below": 64}, (9,), "set exact_below=0 .it is 64."),
        ({"window": 8}, (9, 4), "a state with a window takes no padding"),
    ],
)
def test_what_is_refused(options, lengths, message):
    model = make(**options)
    with pytest.raises(ValueError, match=message):
        generate(model, favor.FavorCache(), prompt(*lengths))


def test_gradients_and_forgetting_are_refused():
    model, cache = make(), favor.FavorCache()
    with pytest.raises(RuntimeError, match=r"use torch\.no_grad"):
        model(**prompt(9), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(**prompt(9), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(-1)
