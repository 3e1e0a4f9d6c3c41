"""What the backends refuse."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, COMMON, tokens

from favor.integrations.backend import favor_attention_forward

BERT, LLAMA = (next(a for a in ARCHITECTURES if a.name == name) for name in ("bert", "llama"))


T5 = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 32, "vocab_size": 40}
REFUSED = {
    "t5": (hf.T5EncoderModel, lambda: hf.T5Config(**T5), tokens, "position bias .*argument position_bias"),
    "gemma2": (
        hf.Gemma2Model,
        lambda: hf.Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=8),
        tokens,
        "soft-capped logits",
    ),
    "gpt-oss": (
        hf.GptOssModel,
        lambda: hf.GptOssConfig(**COMMON, num_key_value_heads=2, head_dim=8, num_local_experts=2),
        tokens,
        "attention sinks",
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name, padded):
    model_class, config, inputs, message = REFUSED[name]
    model = model_class._from_config(config(), attn_implementation="favor#").eval()
    with pytest.raises(ValueError, match=message):
        model(**inputs(padded))


def test_static_cache_is_refused():
    model = LLAMA.build("favor+", exact_below=0)
    cache = hf.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match="static cache"):
        model(input_ids=tokens(False)["input_ids"], past_key_values=cache)


def test_attention_weights_are_refused():
    model = BERT.build("favor+", exact_below=0)
    module = model.encoder.layer[0].attention.self
    states = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="never forms the attention matrix"):
        favor_attention_forward("favor+", module, states, states, states, None, output_attentions=True)


def test_unknown_causality_is_refused():
    module = BERT.build("favor+", exact_below=0).encoder.layer[0].attention.self
    del module.is_causal
    states = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="set its attribute is_causal"):
        favor_attention_forward("favor+", module, states, states, states, None)


def test_a_custom_pairwise_mask_is_refused():
    model = BERT.build("favor+", exact_below=0)
    mask = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) > 0.3
    with pytest.raises(ValueError, match="mask or an additive bias for each pair"):
        model(input_ids=tokens(False)["input_ids"], attention_mask=mask)
