"""Models with relative positions: landmarks of all keys equal the attention of the model, and nothing is L x L."""

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import favor
from favor.attention import Clipped
from favor.integrations.positions import detect

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
    "udop": lambda: (hf.UdopEncoderModel, hf.UdopConfig(**SMALL, decoder_start_token_id=0)),
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
    if isinstance(model, hf.UdopEncoderModel):
        return {"input_ids": ids, "attention_mask": mask, "bbox": torch.rand(2, length, 4).sort().values}, mask
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


# One of each kind of positions, and of the models that are made alike.
ALIKE = ("mt5", "umt5", "longt5", "pop2piano", "udop")
CASES = [(name, 300, True) for name in ALIKE]
CASES += [(name, *case) for name in MODELS if name not in ALIKE for case in ((1, False), (100, True), (1000, True))]


@pytest.mark.parametrize(("name", "length", "padded"), CASES)
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


class Largest(TorchDispatchMode):
    """Notes the most bytes of a tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        made = [own.untyped_storage().nbytes() for own in tree_leaves(out) if isinstance(own, torch.Tensor)]
        self.size = max(self.size, *made, 0)
        return out


@pytest.mark.parametrize("name", ["t5", "wav2vec2-bert relative keys", "parakeet"])
def test_no_tensor_has_room_for_all_pairs(name):
    kind, config = MODELS[name]()
    kind = hf.T5EncoderModel if name == "t5" else kind
    config.num_hidden_layers = 1
    model = favor.configure(kind(config), "landmark", exact_below=0, selected_keys=64, num_features=64)
    inputs, mask = inputs_of(model, 8192, True)
    inputs = {own: rows[1:] for own, rows in inputs.items() if not own.startswith("decoder")}
    with Largest() as largest:
        model(**inputs).last_hidden_state[mask[1:] > 0].sum().backward()
    assert largest.size < 8192**2 / 4  # a boolean mask has a byte for each pair


def test_biases_of_other_kinds_are_refused():
    model = hf.UdopEncoderModel(hf.UdopConfig(**SMALL, decoder_start_token_id=0))
    inputs, _ = inputs_of(model, 100, False)
    favor.configure(model, "landmark", exact_below=0, selected_keys=64)
    with pytest.raises(ValueError, match=r"a position bias for each pair \(argument position_bias\)"):
        model(**inputs)


def test_biases_of_all_pairs_are_read_where_they_depend_on_the_distance_alone():
    torch.manual_seed(0)
    known = Clipped(torch.ones(1, 1, 1, 1), torch.randn(2, 8, 1), 4, 3)
    dense = known.dense(50, 50)
    found = detect(dense.expand(3, -1, -1, -1))
    assert (found.left, found.right) == (4, 3)
    assert torch.equal(found.dense(90, 90), known.dense(90, 90))
    dense[0, 1, 20, 30] += 1
    assert detect(dense) is None
    assert detect(torch.cat([known.dense(50, 50), dense])) is None
