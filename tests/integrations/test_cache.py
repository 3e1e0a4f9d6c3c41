"""Generation with a state of fixed size, or with selected keys, gives what a cache of keys and values gives."""

import pytest
import torch
import transformers as hf
from architectures import BART
from graphs import Graphs
from pairwise import pairs
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import favor

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
FEW = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
CONFIGS = {"llama": lambda: hf.LlamaConfig(**SIZES, **FEW), "gpt2": lambda: hf.GPT2Config(**SIZES, n_positions=128)}
HYBRIDS = {
    # Its config names a window that its attention does not have.
    "moshi": lambda: hf.MoshiForCausalLM(hf.MoshiConfig(**SIZES, **FEW, sliding_window=6, ffn_dim=32)),
    # Its chunks stay exact, and keep the keys of one chunk.
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **SIZES, **FEW, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=8,
            layer_types=["chunked_attention", "full_attention"],
        )
    ),
    # Beside its keys it keeps the last tokens of a convolution.
    "zaya": lambda: hf.ZayaForCausalLM(hf.ZayaConfig(**SIZES, **FEW, moe_intermediate_size=32, num_experts=2)),
    "mllama": lambda: hf.MllamaForCausalLM(MllamaTextConfig(**SIZES, **FEW, cross_attention_layers=[1])),
}  # fmt: skip
BACKENDS = {"favor+": {"num_features": 4, "window": 8}, "landmark": {"selected_keys": 6}}
OPTIONS = {"num_features": 16, "exact_below": 0}
STATIC = {"favor+": {}, "landmark": {"selected_keys": 6}}  # a window has an open block


def make(name: str = "llama", backend: str = "favor+", **options: object) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return favor.configure(model, backend, **{**OPTIONS, **options})


def make_selecting(name: str = "llama", **options: object) -> hf.PreTrainedModel:
    return make(name, "landmark", **{"selected_keys": 8, **options}).double()  # no choice by rounding


def prompt(*lengths: int) -> dict[str, torch.Tensor]:
    """Token numbers and mask of a batch, padded at the left."""
    ids = torch.randint(3, 40, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def generate(model: hf.PreTrainedModel, cache: object, inputs: dict[str, torch.Tensor], **settings: object) -> object:
    settings |= {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    return model.generate(**inputs, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **settings)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def make_hybrid(name: str, backend: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return favor.configure(HYBRIDS[name]().eval(), backend, exact_below=0, **BACKENDS[backend])


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize(*pairs(name=HYBRIDS, length=[5, 19], backend=BACKENDS))
def test_every_layer_that_estimates_attention_keeps_a_state(name, length, backend):
    """Whatever the config calls it: results are those of no cache, which does not grow with positive features."""
    model, sizes = make_hybrid(name, backend), set()
    ids = prompt(length + 16)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, length - 1 :]
        cache = favor.FavorCache(model.config)
        found = [model(ids[:, :length], past_key_values=cache).logits[:, -1]]
        for token in ids[:, length:].split(1, 1):
            found.append(model(token, past_key_values=cache).logits[:, -1])
            if cache.get_seq_length() % 8 == 0:
                sizes.add(cache.nbytes)
    close(torch.stack(found, 1), expected)
    assert len(sizes) == 1 or backend == "landmark"


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_layers_go_on_after_a_reset_and_with_several_rows(name):
    model = make_hybrid(name, "landmark")
    ids = torch.cat([prompt(19)["input_ids"], prompt(19)["input_ids"].flip(1)])
    rows, more = torch.tensor([1, 1]), torch.tensor([[7], [8]])
    cache = favor.FavorCache(model.config)
    with torch.no_grad():
        model(ids[:, :3], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        cache.reorder_cache(rows)
        expected = model(torch.cat([ids[rows], more], 1), use_cache=False).logits[:, -1]
        found = model(more, past_key_values=cache).logits[:, -1]
    close(found, expected)


def test_cross_attention_of_a_decoder_keeps_its_keys():
    """Its layers stand in one list with those of self-attention, and their keys are those of an image."""
    model = make_hybrid("mllama", "landmark")
    ids = prompt(12)["input_ids"]
    image = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(4))
    for layer in model.model.layers:
        for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            if hasattr(layer, name):
                torch.nn.init.ones_(getattr(layer, name))
                layer.cross_attn.is_causal = False  # it does not say so
    seen = {"cross_attention_states": image, "cross_attention_mask": None, "full_text_row_masked_out_mask": None}
    with torch.no_grad():
        expected = model(ids, use_cache=False, **seen).logits[:, 8:]
        without = model(ids, use_cache=False).logits[:, 8:]
        cache = favor.FavorCache(model.config)
        found = [model(ids[:, :9], past_key_values=cache, **seen).logits[:, -1]]
        found += [model(token, past_key_values=cache).logits[:, -1] for token in ids[:, 9:].split(1, 1)]
    assert (expected - without).abs().max() > 0.01
    close(torch.stack(found, 1), expected)


def test_with_calibrated_parameters():
    model, inputs = make(), prompt(12, 7)
    ids = torch.randint(3, 40, (4, 30), generator=torch.Generator().manual_seed(2))
    favor.calibrate(model, [{"input_ids": ids}], attn_implementation="favor#")
    assert model.config.favor["statistics"] == "calibrated"
    caches = (hf.DynamicCache(config=model.config), favor.FavorCache(model.config))
    expected, found = (generate(model, cache, inputs) for cache in caches)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == 20
    close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("change", [{"window": 4}, {"window": 0}, {"seed": 5}, {"num_features": 24}])
def test_options_changed_on_the_way_are_an_error(change):
    model, cache = make(window=8), favor.FavorCache()
    with torch.no_grad():
        model(**prompt(15), past_key_values=cache)
        favor.configure(model, **change)
        with pytest.raises(ValueError, match="have changed since the first tokens"):
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)
        # Some layers have counted the token by now.
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)


def test_encoder_decoder():
    torch.manual_seed(0)
    model = favor.configure(hf.BartForConditionalGeneration(BART.config()).eval(), "favor+", **OPTIONS)
    cache, inputs = hf.EncoderDecoderCache(favor.FavorCache(), hf.DynamicCache()), prompt(11, 11)
    expected, found = (generate(model, own, inputs) for own in (None, cache))
    assert torch.equal(found.sequences, expected.sequences)
    assert cache.self_attention_cache.get_seq_length() == 20
    close(torch.stack(found.logits), torch.stack(expected.logits))


def test_gradients_and_forgetting_are_refused():
    model, cache = make(), favor.FavorCache()
    with pytest.raises(RuntimeError, match=r"use torch\.no_grad"):
        model(**prompt(9), past_key_values=cache)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"last pass was refused: then call reset\(\)"):
        model(**prompt(9), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(**prompt(9), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(-1)


def without_favor():
    model = make()
    model.set_attn_implementation("sdpa")
    return model


def sharing_keys():
    model = hf.AutoModelForCausalLM.from_config(hf.DiffLlamaConfig(**SIZES, **FEW)).eval()
    return favor.configure(model, "favor+", exact_below=0)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (without_favor, RuntimeError, "did not read the state of its FavorCache"),
        (sharing_keys, RuntimeError, "two attention layers read the same cached keys"),
        (lambda: make(exact_below=64), ValueError, "set exact_below=0"),
    ],
)
def test_layers_without_a_state_of_their_own_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        generate(build(), favor.FavorCache(), prompt(9))


@pytest.mark.parametrize("forgotten", [1, 70, 300, 600])
def test_forgotten_tokens_leave_nothing_behind(forgotten):
    """In sections of 256 tokens: what follows is what follows in a cache that never saw them."""
    model, ids, founds = make_selecting(selected_keys=64), prompt(1000)["input_ids"], []
    with torch.no_grad():
        for seen in (640, 640 - forgotten):
            cache = favor.FavorCache(model.config)
            model(ids[:, :seen], past_key_values=cache)
            cache.crop(640 - forgotten)
            pieces = ids[:, 640:].split([1, 7, 300, 1, 1, 50], 1)
            founds.append(torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1))
    close(*founds)


def test_nothing_is_forgotten_of_a_piece_that_is_padded_at_its_right():
    """Where the last column of the batch is no token of a row, the last token of its state is an earlier one."""
    model, ids = make_selecting(), prompt(13, 13)["input_ids"]
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
    with torch.no_grad():
        expected = model(whole, attention_mask=mask, position_ids=places, use_cache=False).logits[:, -1]
    close(found, expected)
    with pytest.raises(ValueError, match="cannot forget its last 3 tokens"):
        cache.crop(-3)


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize(("name", "how"), [("llama", "assistant"), ("gpt2", "lookup")])
def test_assisted_generation(name, how):
    """Without the padding token, whose embedding is 0: its query would find all keys equal."""
    model, inputs = make_selecting(name), prompt(45)
    options = {"max_new_tokens": 16, "do_sample": False, "suppress_tokens": [0]}
    expected = model.generate(**inputs, **options, use_cache=False)
    if how == "assistant":
        options["assistant_model"] = make_selecting(name, selected_keys=4)
        options["assistant_model"].generation_config.num_assistant_tokens = 3
    else:
        options["prompt_lookup_num_tokens"] = 4
    found = model.generate(**inputs, **options, past_key_values=favor.FavorCache(model.config))
    assert torch.equal(found, expected)


def states(cache):
    """All tensors of the states, and how many tokens layers have seen."""
    return [tensor for layer in cache.layers for tensor in (*layer.state._memory(), layer.length)]


@pytest.mark.filterwarnings("default")  # tracing runs code of torch and transformers that warns
@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize(("backend", "prompts"), [("landmark", (5,)), ("landmark", (20, 1, 9)), ("favor+", (20, 1, 9))])
def test_a_compiled_step_serves_all_tokens(backend, prompts):
    """In one program that looks at no tensor, after prompts of several pieces, shorter than a block or longer."""
    torch.compiler.reset()
    model, ids, graphs = make(backend=backend, **STATIC[backend]).double(), prompt(50, 50)["input_ids"], Graphs()
    mask = prompt(50, 41)["attention_mask"] if len(prompts) > 1 else None
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        step = torch.compile(model, fullgraph=True, dynamic=False, backend=graphs)
        cache, places = favor.FavorCache(model.config, max_cache_len=50), []
        for _ in range(2):
            found = [
                model(piece, mask, past_key_values=cache).logits
                for piece in ids.split([*prompts, 50 - sum(prompts)], 1)[:-1]
            ]
            found += [step(token, mask, past_key_values=cache).logits for token in ids[:, sum(prompts) :].split(1, 1)]
            real = torch.ones(2, 50, dtype=torch.bool) if mask is None else mask.bool()
            close(torch.cat(found, 1)[real], expected[real])
            places.append([tensor.data_ptr() for tensor in states(cache)])
            cache.reset()
    assert places[0] == places[1]
    assert graphs.programs == 1
    graphs.check(1)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("small_sections")
def test_generate_compiles_its_steps_with_room_for_all_tokens():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, inputs = make(backend="landmark", **STATIC["landmark"]).double(), prompt(12, 7)
    compiling = hf.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    expected = generate(model, favor.FavorCache(model.config), inputs)
    for config in (favor.FavorCache(model.config, 31), favor.FavorCache(max_cache_len=31)):
        found = generate(model, config, inputs, compile_config=compiling)
        close(torch.stack(found.logits), torch.stack(expected.logits))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] in (1, 2)


@pytest.mark.filterwarnings("default")
def test_a_cache_with_room_says_what_it_cannot_do():
    model, ids = make(), prompt(9)["input_ids"]
    cache = favor.FavorCache(model.config, max_cache_len=10)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.get_max_length() == 10
        model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="got 11 tokens in all: a FavorCache with max_cache_len=10 has no room"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        with pytest.raises(ValueError, match="got 18 tokens"):
            model(ids.repeat(1, 2), past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        step(ids[:, :1], past_key_values=cache)
        with pytest.raises(RuntimeError, match="max_cache_len=10 has no room for more"):
            step(ids[:, :1], past_key_values=cache)
        model = make(window=4)
        with pytest.raises(ValueError, match="keeps no open block of a window"):
            model(ids, past_key_values=favor.FavorCache(model.config, max_cache_len=10))
    with pytest.raises(ValueError, match="cannot forget"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="must be at least 1"):
        favor.FavorCache(max_cache_len=0)
    with pytest.raises(ValueError, match="has layers that need a DynamicSlidingWindowLayer"):
        favor.FavorCache(hf.MistralConfig(sliding_window=4), max_cache_len=10)
    with pytest.raises(ValueError, match="is for causal layers"):
        cache.layers[0].keep(ids, ids)
