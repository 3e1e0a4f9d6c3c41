"""Models with sliding windows: local layers stay exact, and so are landmarks that select all keys."""

import pytest
import torch
import transformers as hf
from architectures import COMMON, padding_mask, tokens

import favor

pytestmark = pytest.mark.usefixtures("small_sections")
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
GEMMA = {**GROUPED, "num_hidden_layers": 3, "sliding_window": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, layer_types=KINDS)),
    "gemma3 encoder": lambda: hf.Gemma3TextModel(
        hf.Gemma3TextConfig(**GEMMA, layer_types=KINDS, use_bidirectional_attention=True)
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **GROUPED, intermediate_size_mlp=32, attention_chunk_size=8, num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        )
    ),
}  # fmt: skip
DECODERS = ("mistral", "gemma3")


def both(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    exact = MODELS[name]().eval()
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    return favor.configure(model, "landmark", num_features=4, exact_below=0), exact


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_exact_attention(name, padded):
    results = []
    for model in both(name):
        out = model(**tokens(padded))[0]
        real = padding_mask().bool() if padded else torch.ones(out.shape[:2], dtype=torch.bool)
        out[real].square().sum().backward()
        results.append((out[real], *(p.grad for p in model.parameters() if p.grad is not None)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "favor"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_that_of_exact_attention(name, cache):
    model, exact = both(name)
    inputs = tokens(False)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :9] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = exact.generate(**inputs, **options)
    if cache == "favor":
        options["past_key_values"] = favor.FavorCache(model.config)
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_packed_sequences_stay_apart():
    """Each sequence of a packed batch is what it is alone, in local and global layers."""
    model, _ = both("gemma3")
    lengths, ids = [13, 20, 7], tokens(False)["input_ids"].flatten()[:40][None]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    with torch.no_grad():
        out = model(ids, position_ids=positions, use_cache=False, **packed).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(out, torch.cat(alone, dim=1), rtol=0, atol=1e-5)
