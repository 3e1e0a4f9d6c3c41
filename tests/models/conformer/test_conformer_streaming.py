"""Audio that comes in pieces gives the outputs of the whole recording."""

import numpy as np
import pytest
import tiny_speech
import torch
from small_sections import set_small_sections
from tiny_speech import FIXED, features, in_pieces

import favor
from favor.models.conformer import ConformerFeatureExtractor, ConformerForCTC, ConformerForTransducer, ConformerModel
from favor.models.speech import ctc_greedy, transducer_greedy


def build(kind, backend, **options):
    return tiny_speech.build(kind, backend, options, causal=True, conv_kernel_size=6)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("sdpa", {}),
        ("eager", {}),
        ("favor+", {}),
        ("favor+", {"window": 8}),
        ("favor+", {"kernel": "torch"}),
        ("landmark", {"selected_keys": 6}),
    ],
)
def test_pieces_equal_the_whole(backend, options, monkeypatch):
    set_small_sections(monkeypatch)
    model, inputs = build(ConformerModel, backend, **options), features(200)
    with torch.no_grad():
        whole = model(inputs).last_hidden_state
    found = in_pieces(model.stream(batch_size=2), inputs)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "options"), [("favor#", {}), ("favor++", {}), ("favor+", {"feature_weights": True})]
)
def test_calibrated_parameters_stream_too(backend, options):
    model, inputs = build(ConformerModel, backend), features(200)
    with torch.no_grad():
        plain = build(ConformerModel, "favor+")(inputs).last_hidden_state
    favor.calibrate(model, [{"input_features": features(120)}], attn_implementation=backend, **options)
    with torch.no_grad():
        whole = model(inputs).last_hidden_state
    assert not torch.allclose(whole, plain, atol=1e-3)
    torch.testing.assert_close(in_pieces(model.stream(batch_size=2), inputs), whole, rtol=1e-4, atol=1e-5)


def test_audio_in_pieces_gives_logits_and_tokens_of_the_whole():
    model, extractor = build(ConformerForCTC, "favor+"), ConformerFeatureExtractor(feature_size=10, **FIXED)
    audio = np.random.default_rng(0).normal(size=40000).astype(np.float32)
    audio *= np.abs(np.sin(np.arange(40000) / 3000))
    with torch.no_grad():
        # So that no token is the best one everywhere.
        model.ctc_head.bias -= model(**extractor(audio, sampling_rate=16000)).logits.mean((0, 1))
        whole = model(**extractor(audio, sampling_rate=16000)).logits
    stream = model.stream(extractor)
    assert stream.latency == pytest.approx(0.145)
    found = torch.cat([stream.feed(piece) for piece in np.split(audio, [10, 500, 9000, 9001, 31000])], dim=1)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert stream.tokens == ctc_greedy(whole, [whole.shape[1]])
    assert len(stream.tokens[0]) > 3


def test_a_transducer_finds_the_tokens_of_the_whole():
    model, inputs = build(ConformerForTransducer, "favor+"), features(200)
    with torch.no_grad():
        hidden, lengths = model.encode(inputs)
        # So that neither a token nor the blank is the best one everywhere.
        prediction, _ = model.predict(torch.arange(12)[:, None])
        logits = model.join(hidden[:1, :, None], prediction[:, 0])
        model.joint.head.bias -= logits.mean((0, 1, 2))
        model.joint.head.bias[0] += logits.std() / 4
        expected = transducer_greedy(model, hidden, lengths)
    stream = model.stream(batch_size=2)
    torch.testing.assert_close(in_pieces(stream, inputs), hidden, rtol=1e-4, atol=1e-5)
    assert stream.tokens == expected
    assert 3 < len(expected[0]) < 400


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
def test_half_precision_streams(kind):
    """As in the whole recording, to the accuracy of the type."""
    model, extractor = build(kind, "favor+").to(torch.bfloat16), ConformerFeatureExtractor(feature_size=10, **FIXED)
    audio = np.random.default_rng(0).normal(size=16000).astype(np.float32)
    stream, features = model.stream(extractor), extractor(audio, sampling_rate=16000)["input_features"]
    found = torch.cat([stream.feed(piece) for piece in np.split(audio, [100, 9000])], dim=1)
    with torch.no_grad():
        out = model(features.to(torch.bfloat16))
    whole = out.logits if kind is ConformerForCTC else out.last_hidden_state
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, whole, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("backend", ["sdpa", "favor+"])
def test_grouped_heads_stream(backend):
    config = build(ConformerModel, backend).config
    config.num_key_value_heads = 1
    model, inputs = ConformerModel(config).eval(), features(100)
    with torch.no_grad():
        whole = model(inputs).last_hidden_state
    torch.testing.assert_close(in_pieces(model.stream(batch_size=2), inputs, [40, 60]), whole, rtol=1e-4, atol=1e-5)


def test_a_model_of_which_one_layer_was_switched_streams():
    model, inputs = build(ConformerModel, "sdpa"), features(200)
    favor.configure(model, "favor+", only="layers.0", num_features=16, exact_below=0)
    with torch.no_grad():
        whole = model(inputs).last_hidden_state
    torch.testing.assert_close(in_pieces(model.stream(batch_size=2), inputs), whole, rtol=1e-4, atol=1e-5)


def test_the_state_does_not_grow_with_linear_attention():
    sizes = {}
    for backend in ("favor+", "sdpa"):
        stream, sizes[backend] = build(ConformerModel, backend).stream(batch_size=2), []
        for piece in features(400).split(40, dim=1):
            stream.feed_features(piece)
            sizes[backend].append(stream.state_bytes)
    assert len(set(sizes["favor+"][1:])) == 1
    assert sizes["sdpa"][-1] > sizes["sdpa"][4] > sizes["sdpa"][1]


def test_what_cannot_stream_is_refused():
    model = build(ConformerModel, "favor+")
    with pytest.raises(ValueError, match="evaluation mode"):
        model.train().stream()
    model.eval()
    with pytest.raises(ValueError, match='normalize="none"'):
        model.stream(ConformerFeatureExtractor(feature_size=10))
    stream = model.stream(ConformerFeatureExtractor(feature_size=10, **FIXED))
    with pytest.raises(TypeError, match="divide 16-bit samples by 32768"):
        stream.feed(np.zeros(1000, dtype=np.int16))
    with pytest.raises(ValueError, match="one mono waveform"):
        stream.feed(np.zeros((1000, 2), dtype=np.float32))
    with pytest.raises(ValueError, match="needs a feature_extractor"):
        model.stream().feed(np.zeros(1000))
    with pytest.raises(ValueError, match="set exact_below=0"):
        favor.configure(model, exact_below=32).stream().feed_features(features(40, batch=1))
    with pytest.raises(ValueError, match="causal=True"):
        tiny_speech.build(ConformerModel).stream()
