"""Models with relative positions: landmarks that lose nothing equal the model's own attention, and form no L x L tensor."""

import pytest
import torch
import transformers as hf

import favor

SMALL = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 32, "vocab_size": 40, "dropout_rate": 0.0}
EXACT = {"exact_below": 0, "selected_keys": 2048}
SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "layerdrop": 0.0,
    "attention_dropout": 0.0,
}
WAV2VEC = {
    **SPEECH,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "conv_depthwise_kernel_size": 3,
}
PARAKEET = {
    **SPEECH,
    "num_mel_bins": 8,
    "subsampling_factor": 2,
    "subsampling_conv_channels": 8,
    "dropout": 0.0,
    "activation_dropout": 0.0,
}


def t5(model, config):
    return lambda: (model, config(**SMALL, num_decoder_layers=2, decoder_start_token_id=0))


def wav2vec(kind):
    config = {**WAV2VEC, "feature_projection_input_dim": 8, "position_embeddings_type": kind}
    return lambda: (hf.Wav2Vec2BertModel, hf.Wav2Vec2BertConfig(**config))


MODELS = {
    "t5": t5(hf.T5Model, hf.T5Config),
    "mt5": t5(hf.MT5Model, hf.MT5Config),
    "umt5": t5(hf.UMT5Model, hf.UMT5Config),
    "longt5": lambda: (hf.LongT5Model, hf.LongT5Config(**SMALL, num_decoder_layers=2, decoder_start_token_id=0)),
    "pop2piano": t5(hf.Pop2PianoForConditionalGeneration, hf.Pop2PianoConfig),
    "wav2vec2-bert relative keys": wav2vec("relative_key"),
    "wav2vec2-bert relative": wav2vec("relative"),
    "parakeet": lambda: (hf.ParakeetEncoder, hf.ParakeetEncoderConfig(**PARAKEET)),
}


def inputs_of(model, length, padded):
    torch.manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.long)
    if padded:
        mask[1, (length + 1) // 2 :] = 0
    if isinstance(model, hf.Wav2Vec2BertModel):
        return {"input_features": torch.randn(2, length, 8), "attention_mask": mask}, mask
    if isinstance(model, hf.ParakeetEncoder):
        frames = torch.ones(2, 2 * length, dtype=torch.long)
        frames[1, 2 * int(mask[1].sum()) :] = 0
        return {"input_features": torch.randn(2, 2 * length, 8), "attention_mask": frames if padded else None}, mask
    ids = torch.randint(1, 40, (2, length))
    text = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    return text, mask


def run(model, inputs, mask):
    model.zero_grad()
    out = model(**inputs)
    out = out.last_hidden_state if "last_hidden_state" in out else out.logits
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    (out * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach() * mask[..., None], grads


@pytest.mark.parametrize("length, padded", [(1, False), (100, True), (300, False), (1000, True)])
@pytest.mark.parametrize("name", MODELS)
def test_landmarks_of_all_keys_are_the_attention_of_the_model(name, length, padded):
    kind, config = MODELS[name]()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # biases that matter
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    inputs, mask = inputs_of(model, length, padded)
    exact, wanted = run(model, inputs, mask)
    favor.configure(model, "landmark", only="decoder" if name == "longt5" else None, **EXACT)
    found, grads = run(model, inputs, mask)
    assert torch.allclose(found, exact, atol=1e-4), (found - exact).abs().max()
    assert grads.keys() == wanted.keys()
    for part, grad in wanted.items():
        assert torch.allclose(grads[part], grad, atol=1e-4 * max(1, float(grad.abs().max()))), part
