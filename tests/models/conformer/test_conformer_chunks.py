"""A model that sees both sides streams in chunks: the outputs are those of one pass with the mask of these chunks."""

import numpy as np
import pytest
import tiny_speech
import torch
from tiny_speech import FIXED, features, in_pieces, make_processor

import favor
from favor.models.conformer import Chunks, ConformerForCTC, ConformerForTransducer, ConformerModel, feed_streams
from favor.models.speech import EndpointRules

NEVER = EndpointRules(None, None, None)


def build(kind, backend="sdpa", options=None, **changes):
    model = tiny_speech.build(kind, backend, options, conv_kernel_size=7, **changes)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model


def audio(length, seed=0):
    noise = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    return noise * np.abs(np.sin(np.arange(length) / 3000))


@pytest.mark.parametrize("chunks", [Chunks(1), Chunks(4), Chunks(5, left=0), Chunks(7, left=2), Chunks(100)])
@pytest.mark.parametrize("backend", ["sdpa", "eager", "favor+"])
def test_a_stream_equals_one_pass_in_its_chunks(backend, chunks):
    model, inputs = build(ConformerModel, backend), features(200)
    if backend == "favor+":
        chunks = Chunks(chunks.size)
    with torch.no_grad():
        whole = model(inputs, chunks=chunks).last_hidden_state
    found = in_pieces(model.stream(batch_size=2, chunks=chunks), inputs)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "favor+"])
def test_a_chunk_as_long_as_the_recording_is_no_chunk(backend):
    model, inputs = build(ConformerModel, backend), features(100)
    with torch.no_grad():
        whole, found = model(inputs), model(inputs, chunks=Chunks(50))
    torch.testing.assert_close(found.last_hidden_state, whole.last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "left"), [("sdpa", None), ("sdpa", 1), ("eager", 0), ("favor+", None)])
def test_outputs_do_not_depend_on_padding(backend, left):
    model, inputs, chunks = build(ConformerModel, backend), features(200), Chunks(6, left)
    with torch.no_grad():
        whole = model(inputs, chunks=chunks).last_hidden_state
    mask = torch.arange(200)[None] < torch.tensor([200, 90])[:, None]
    padded = torch.where(mask[..., None], inputs, 1000.0)
    with torch.no_grad():
        alone = model(inputs[1:, :90], chunks=chunks).last_hidden_state
        found = model(padded, mask, chunks=chunks).last_hidden_state
    torch.testing.assert_close(found[:1], whole[:1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:, : alone.shape[1]], alone, rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()


def test_attention_in_chunks_is_softmax_over_the_visible_keys():
    """The layer with linear attention, exact because its sequence is short, equals the mask of all pairs."""
    inputs, chunks = features(120), Chunks(5)
    exact, linear = build(ConformerModel), build(ConformerModel, "favor+", {"exact_below": 10**6})
    with torch.no_grad():
        found, expected = (model(inputs, chunks=chunks).last_hidden_state for model in (linear, exact))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_frame_hears_its_whole_chunk_in_the_convolution():
    """One layer: without its attention, a frame depends on what is near, up to the end of its chunk and not beyond."""
    layer, chunks = build(ConformerModel).layers[0].conv, Chunks(4)
    hidden = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for frame, expected in ((4, range(1, 8)), (5, range(2, 8)), (7, range(4, 8)), (8, range(5, 12))):
        (slope,) = torch.autograd.grad(layer(hidden, chunks=chunks)[0, frame].sum(), hidden)
        assert slope[0].abs().sum(-1).nonzero().flatten().tolist() == list(expected)


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
@pytest.mark.parametrize("backend", ["sdpa", "favor+"])
def test_text_streams_together_or_alone_give_the_text_of_one_pass(kind, backend):
    model, chunks = build(kind, backend), Chunks(8)
    processor = make_processor("ABCDEFG HI", **FIXED)
    sounds = [audio(40000), audio(31234, seed=1)]
    streams = [model.transcribe_stream(processor, NEVER, chunks=chunks) for _ in sounds]
    for first in range(0, 40000, 7000):
        feed_streams(streams, [sound[first : first + 7000] for sound in sounds])
    for sound, stream in zip(sounds, streams, strict=True):
        inputs = processor(sound, sampling_rate=16000)
        with torch.no_grad():
            hidden = model.encoder(inputs["input_features"], chunks=chunks).last_hidden_state
        alone = model.transcribe_stream(processor, NEVER, chunks=chunks)
        alone.feed(sound)
        assert alone.partial == stream.partial
        assert stream.seconds == pytest.approx(0.04 * (hidden.shape[1] // 8 * 8))
        last = stream.finish()
        assert last == [] or last[0].text.startswith(alone.partial)
        logits = model.stream(processor.feature_extractor, chunks=chunks)
        logits.feed(sound)
        logits.finish()
        assert logits.frames == hidden.shape[1]
        told = processor.tokenizer.decode(logits.tokens[0], group_tokens=False)
        assert told == "".join(utterance.text for utterance in last)


def test_a_stream_that_forgets_at_end_points_begins_new_chunks():
    model, chunks = build(ConformerForCTC), Chunks(8)
    processor = make_processor("ABCDEFG HI", **FIXED)
    rules = EndpointRules(None, None, 1.0)
    texts = []
    for size in (16000, 5000):
        stream = model.transcribe_stream(processor, rules, reset_encoder=True, chunks=chunks)
        found = [one for piece in np.split(audio(64000), range(size, 64000, size)) for one in stream.feed(piece)]
        texts.append([one.text for one in found + stream.finish()])
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 3


def test_the_state_of_limited_chunks_does_not_grow():
    stream, sizes = build(ConformerModel).stream(batch_size=2, chunks=Chunks(4, left=2)), []
    for _ in range(6):
        stream.feed_features(features(64))
        sizes.append(stream.state_bytes)
    assert sizes[-1] == sizes[2]


def test_calibrated_parameters_work_in_chunks():
    model, inputs, chunks = build(ConformerModel, "favor#"), features(200), Chunks(6)
    with pytest.raises(ValueError, match="calibrate"):
        model(inputs, chunks=chunks)
    favor.calibrate(model, [{"input_features": features(120)}], attn_implementation="favor#")
    with torch.no_grad():
        whole = model(inputs, chunks=chunks).last_hidden_state
    found = in_pieces(model.stream(batch_size=2, chunks=chunks), inputs)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "options", "fields", "chunks", "message"),
    [
        ("favor+", {}, {}, Chunks(4, left=2), "leave it out, or use sdpa"),
        ("favor+", {"window": 8}, {}, Chunks(4), "without a window"),
        ("landmark", {}, {}, Chunks(4), "use favor\\+ with window=0"),
        ("favor_relu", {}, {}, Chunks(4), "use favor\\+"),
        ("sdpa", {}, {"causal": True}, Chunks(4), "streams without them"),
        ("sdpa", {}, {}, None, "needs a causal model"),
    ],
)
def test_models_that_cannot_run_in_chunks_say_so(backend, options, fields, chunks, message):
    model = build(ConformerModel, backend, options, **fields)
    with pytest.raises(ValueError, match=message):
        model.stream(chunks=chunks)
    if chunks is not None:
        with pytest.raises(ValueError, match=message):
            model(features(60), chunks=chunks)


def test_a_stream_with_exact_attention_of_short_inputs_is_refused():
    model = build(ConformerModel, "favor+", {"exact_below": 100})
    with pytest.raises(ValueError, match="exact_below=0"):
        model.stream(chunks=Chunks(4)).feed_features(features(60, 1))


def test_numbers_out_of_range_are_refused():
    for size, left in ((0, None), (4, -1)):
        with pytest.raises(ValueError, match="at least"):
            Chunks(size, left)
    with pytest.raises(ValueError, match=r"whole number of frames of 0\.04 s, got 0\.5 s"):
        Chunks.lasting(0.5, 0.04)
    models = [build(ConformerForCTC) for _ in range(2)]
    processor = make_processor("AB", **FIXED)
    streams = [models[0].transcribe_stream(processor, chunks=Chunks(size)) for size in (4, 8)]
    with pytest.raises(ValueError, match="same chunks"):
        feed_streams(streams, [audio(100)] * 2)
