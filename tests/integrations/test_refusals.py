"""What the backends refuse."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, AUDIO, COMMON, mel_frames, padding_mask, tokens, waveform
from torch.nn.functional import scaled_dot_product_attention

from favor.integrations.backend import favor_attention_forward

BERT, LLAMA = (next(a for a in ARCHITECTURES if a.name == name) for name in ("bert", "llama"))


T5 = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 32, "vocab_size": 40}
REFUSED = {
    "t5": (hf.T5EncoderModel, lambda: hf.T5Config(**T5), tokens, "position bias .*argument position_bias"),
    "parakeet": (
        hf.ParakeetEncoder,
        lambda: hf.ParakeetEncoderConfig(**AUDIO, conv_kernel_size=5, subsampling_factor=4),
        mel_frames,
        "additive bias for each pair",
    ),
    "wav2vec2-conformer with relative positions": (
        hf.Wav2Vec2ConformerModel,
        lambda: hf.Wav2Vec2ConformerConfig(
            **{**next(a for a in ARCHITECTURES if a.name == "wav2vec2-conformer").config().to_dict()}
            | {"position_embeddings_type": "relative"}
        ),
        waveform,
        "position bias .*argument position_bias",
    ),
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
    with pytest.raises(ValueError, match="output_attentions"):
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


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, 24])
def test_exact_path_with_fully_padded_rows(length, is_causal):
    """Under `exact_below` the result is SDPA's, aligned with the last keys, and zero for rows without a key."""
    module = BERT.build("favor+", num_features=64).encoder.layer[0].attention.self
    module.is_causal = module.is_decoder = is_causal
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, length, 8, generator=generator)
    key, value = torch.randn(2, 3, 4, 24, 8, generator=generator)
    padding = padding_mask().bool()
    padding[2] = False
    out, _ = favor_attention_forward("favor+", module, query, key, value, padding)
    mask = padding[:, None, None, :].expand(-1, 1, length, -1)
    if is_causal:
        mask = mask & torch.ones(length, 24, dtype=torch.bool).tril(24 - length)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert not out[2].any()
