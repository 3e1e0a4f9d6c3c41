"""Audio that comes in pieces gives the outputs of the whole recording, by a causal model or in chunks."""

import numpy as np
import pytest
import tiny_speech
import torch
from small_sections import set_small_sections
from tiny_speech import FIXED, features, in_pieces, make_processor

import favor
from favor.models.conformer import (
    Chunks,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
    ConformerModel,
    feed_streams,
)
from favor.models.speech import EndpointRules, ctc_greedy, transducer_greedy

NEVER = EndpointRules(None, None, None)


def build(kind, backend, options=None, causal=True, **changes):
    model = tiny_speech.build(kind, backend, options, causal=causal, conv_kernel_size=6 if causal else 7, **changes)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model


def audio(length, seed=0):
    noise = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    return noise * np.abs(np.sin(np.arange(length) / 3000))


@torch.no_grad()
def whole(model, inputs, chunks=None):
    return model(inputs, chunks=chunks).last_hidden_state


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def check_stream(model, chunks=None):
    inputs = features(200)
    close(in_pieces(model.stream(batch_size=2, chunks=chunks), inputs), whole(model, inputs, chunks=chunks))


CHUNKS = (Chunks(1), Chunks(4), Chunks(7), Chunks(100))
CASES = [("sdpa", {}), ("eager", {}), ("favor+", {}), ("favor+", {"window": 8}), ("favor+", {"kernel": "torch"})]
CASES = [(*case, None) for case in (*CASES, ("landmark", {"selected_keys": 6}))]
CASES += [(backend, {}, chunks) for backend in ("sdpa", "eager", "favor+") for chunks in CHUNKS]
CASES += [(backend, {}, chunks) for backend in ("sdpa", "eager") for chunks in (Chunks(5, left=0), Chunks(7, left=2))]


@pytest.mark.parametrize(("backend", "options", "chunks"), CASES)
def test_pieces_equal_the_whole(backend, options, chunks, monkeypatch):
    set_small_sections(monkeypatch)
    check_stream(build(ConformerModel, backend, options, causal=chunks is None), chunks)


CALIBRATED = [("favor++", {}, None), ("favor+", {"feature_weights": True}, None)]
CALIBRATED += [("favor#", {}, None), ("favor#", {}, Chunks(6))]


@pytest.mark.parametrize(("backend", "options", "chunks"), CALIBRATED)
def test_calibrated_parameters_stream_too(backend, options, chunks):
    model, inputs = build(ConformerModel, backend, causal=chunks is None), features(200)
    if chunks is not None:
        with pytest.raises(ValueError, match="calibrate"):
            model(inputs, chunks=chunks)
    plain = whole(build(ConformerModel, "favor+", causal=chunks is None), inputs, chunks=chunks)
    favor.calibrate(model, [{"input_features": features(120)}], attn_implementation=backend, **options)
    assert not torch.allclose(whole(model, inputs, chunks=chunks), plain, atol=1e-3)
    check_stream(model, chunks)


@pytest.mark.parametrize("backend", ["sdpa", "favor+"])
def test_grouped_heads_and_single_switched_layers_stream(backend):
    config = build(ConformerModel, backend).config
    config.num_key_value_heads = 1
    check_stream(ConformerModel(config).eval())
    model = build(ConformerModel, "sdpa")
    favor.configure(model, "favor+", only="layers.0", num_features=16, exact_below=0)
    check_stream(model)


@pytest.mark.parametrize(
    ("kind", "dtype", "rtol", "atol"),
    [
        (ConformerForCTC, torch.float32, 1e-4, 1e-4),
        (ConformerForCTC, torch.bfloat16, 0.05, 0.1),
        (ConformerForTransducer, torch.bfloat16, 0.05, 0.1),
    ],
)
@torch.no_grad()
def test_audio_in_pieces_gives_logits_and_tokens_of_the_whole(kind, dtype, rtol, atol):
    model, extractor = build(kind, "favor+").to(dtype), ConformerFeatureExtractor(feature_size=10, **FIXED)
    sound = audio(40000)
    given, stream = extractor(sound, sampling_rate=16000)["input_features"].to(dtype), model.stream(extractor)
    if kind is ConformerForCTC:
        model.ctc_head.bias -= model(given).logits.mean((0, 1))  # so that no token is the best one everywhere
    expected = model(given).logits if kind is ConformerForCTC else model(given).last_hidden_state
    assert stream.latency == pytest.approx(0.145)
    found = torch.cat([stream.feed(piece) for piece in np.split(sound, [10, 500, 9000, 9001, 31000])], dim=1)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if dtype is torch.float32:
        assert stream.tokens == ctc_greedy(expected, [expected.shape[1]])
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
    close(in_pieces(stream, inputs), hidden)
    assert stream.tokens == expected
    assert 3 < len(expected[0]) < 400


def test_the_state_grows_with_exact_attention_of_all_chunks_alone():
    def sizes(backend, causal=True, chunks=None):
        stream = build(ConformerModel, backend, causal=causal).stream(batch_size=2, chunks=chunks)
        return [stream.feed_features(piece) is not None and stream.state_bytes for piece in features(400).split(40, 1)]

    linear, exact, limited = sizes("favor+"), sizes("sdpa"), sizes("sdpa", False, Chunks(4, left=2))
    assert len(set(linear[1:])) == 1
    assert exact[-1] > exact[4] > exact[1]
    assert max(limited) < 2 * limited[2]


def test_attention_in_chunks_is_softmax_over_the_visible_keys():
    """The layer with linear attention, exact because its sequence is short, equals the mask of all pairs."""
    exact = build(ConformerModel, "sdpa", causal=False)
    linear = build(ConformerModel, "favor+", {"exact_below": 10**6}, causal=False)
    linear.load_state_dict(exact.state_dict())
    close(whole(exact, features(120), chunks=Chunks(50)), whole(exact, features(120)))  # as long as the recording
    close(*(whole(model, features(120), chunks=Chunks(5)) for model in (linear, exact)))


def test_a_frame_hears_its_whole_chunk_in_the_convolution():
    layer, chunks = build(ConformerModel, "sdpa", causal=False).layers[0].conv, Chunks(4)
    hidden = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for frame, expected in ((4, range(1, 8)), (5, range(2, 8)), (7, range(4, 8)), (8, range(5, 12))):
        (slope,) = torch.autograd.grad(layer(hidden, chunks=chunks)[0, frame].sum(), hidden)
        assert slope[0].abs().sum(-1).nonzero().flatten().tolist() == list(expected)


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
@pytest.mark.parametrize("backend", ["sdpa", "favor+"])
def test_text_streams_together_give_the_text_of_the_logits(kind, backend):
    model, chunks, processor = build(kind, backend, causal=False), Chunks(8), make_processor("ABCDEFG HI", **FIXED)
    sounds = [audio(40000), audio(31234, seed=1)]
    streams = [model.transcribe_stream(processor, NEVER, chunks=chunks) for _ in sounds]
    for first in range(0, 40000, 7000):
        feed_streams(streams, [sound[first : first + 7000] for sound in sounds])
    for sound, stream in zip(sounds, streams, strict=True):
        frames = whole(model.encoder, processor(sound, sampling_rate=16000)["input_features"], chunks).shape[1]
        logits = model.stream(processor.feature_extractor, chunks=chunks)
        assert logits.latency == pytest.approx(0.145 + 7 * 0.04)
        logits.feed(sound)
        assert stream.partial == processor.tokenizer.decode(logits.tokens[0], group_tokens=False)
        assert stream.seconds == pytest.approx(0.04 * (frames // 8 * 8)) == pytest.approx(0.04 * logits.frames)
        logits.finish()
        assert logits.frames == frames
        told = processor.tokenizer.decode(logits.tokens[0], group_tokens=False)
        assert told == "".join(utterance.text for utterance in stream.finish())


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
@pytest.mark.parametrize("chunks", [None, Chunks(4)])
def test_after_finish_a_stream_takes_nothing_until_it_is_reset(kind, chunks):
    """It would go on with a state, or in the middle of a chunk, that audio after the end does not fit."""
    model, sound = build(kind, "favor+", causal=chunks is None), audio(20000)
    processor = make_processor("ABCDEFG HI", **FIXED)
    text, other = (model.transcribe_stream(processor, chunks=chunks) for _ in range(2))
    logits = model.stream(processor.feature_extractor, chunks=chunks)
    calls = [lambda: feed_streams([other, text], [sound] * 2), lambda: logits.feed_features(features(60, batch=1))]
    for stream in (text, logits):
        stream.feed(sound)
        stream.finish()
        for call in (lambda own=stream: own.feed(sound), stream.finish, *calls[stream is logits :][:1]):
            with pytest.raises(ValueError, match="the recording has ended with finish: call reset to begin another"):
                call()
        stream.reset()
        stream.feed(sound)
        stream.finish()
    assert other._state.samples is None  # nor does a stream that is fed together with it


@pytest.mark.parametrize(
    ("backend", "options", "causal", "chunks", "message"),
    [
        ("favor+", {}, False, Chunks(4, left=2), "leave it out, or use sdpa"),
        ("favor+", {"window": 8}, False, Chunks(4), "without a window"),
        ("landmark", {}, False, Chunks(4), "use favor\\+ with window=0"),
        ("favor_relu", {}, False, Chunks(4), "use favor\\+"),
        ("sdpa", {}, True, Chunks(4), "streams without them"),
        ("sdpa", {}, False, None, "needs a causal model"),
    ],
)
def test_models_that_cannot_stream_say_so(backend, options, causal, chunks, message):
    model = build(ConformerModel, backend, options, causal)
    with pytest.raises(ValueError, match=message):
        model.stream(chunks=chunks)
    if chunks is not None:
        with pytest.raises(ValueError, match=message):
            model(features(60), chunks=chunks)


def test_what_cannot_stream_is_refused():
    model, extractor = build(ConformerModel, "favor+"), ConformerFeatureExtractor(feature_size=10, **FIXED)
    with pytest.raises(ValueError, match="evaluation mode"):
        model.train().stream()
    stream, short = model.eval().stream(extractor), features(60, batch=1)
    recogniser, processor = build(ConformerForCTC, "sdpa", causal=False), make_processor("AB", **FIXED)
    streams = [recogniser.transcribe_stream(processor, chunks=Chunks(size)) for size in (4, 8)]
    chunked = build(ConformerModel, "favor+", {"exact_below": 100}, causal=False).stream(chunks=Chunks(4))
    exact = favor.configure(build(ConformerModel, "favor+"), exact_below=32).stream()
    for call, message in (
        (lambda: model.stream(ConformerFeatureExtractor(feature_size=10)), 'normalize="none"'),
        (lambda: stream.feed(np.zeros(1000, dtype=np.int16)), "divide 16-bit samples by 32768"),
        (lambda: stream.feed(np.zeros((1000, 2), dtype=np.float32)), "one mono waveform"),
        (lambda: model.stream().feed(np.zeros(1000)), "needs a feature_extractor"),
        *((lambda own=own: own.feed_features(short), "exact_below=0") for own in (exact, chunked)),
        *((lambda numbers=numbers: Chunks(*numbers), "at least") for numbers in ((0,), (4, -1))),
        (lambda: Chunks.lasting(0.5, 0.04), r"whole number of frames of 0\.04 s, got 0\.5 s"),
        (lambda: feed_streams(streams, [audio(100)] * 2), "same chunks"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
