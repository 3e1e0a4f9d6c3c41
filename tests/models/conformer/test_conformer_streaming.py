"""Audio that comes in pieces gives the outputs and the text of the whole; chunks, end points, resets, batches."""

from dataclasses import replace

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
    streaming,
)
from favor.models.speech import ConformerProcessor, EndpointRules, ctc_greedy, transducer_greedy

KINDS = (ConformerForCTC, ConformerForTransducer)
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
    cuts = [10, 500, 9000, 9001, *range(12000, 40000, 1000)]
    found = torch.cat([stream.feed(piece) for piece in np.split(sound, cuts)], dim=1)
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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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


BLANK = {ConformerForCTC: 1.0, ConformerForTransducer: 0.5}  # so that all is there: tokens, words and silence
SILENCE = EndpointRules(None, 0.2 + 1e-9, None)
OFTEN = EndpointRules(0.28, 0.12, 0.8)


PROCESSOR = make_processor("GO DAD", "A BAD DOG", **FIXED)
VOCABULARY = len(PROCESSOR.tokenizer)


def sounds(seconds, seed):
    """Noise whose loudness and colour change every 0.12 s."""
    draw, parts = np.random.default_rng(seed), []
    for _ in range(round(seconds / 0.12)):
        noise = np.convolve(draw.normal(size=1920), draw.normal(size=3), "same")
        parts.append(noise * 10.0 ** draw.uniform(-3, 0))
    return torch.tensor(np.concatenate(parts), dtype=torch.float32)


@torch.no_grad()
def talker(kind, backend="favor+", causal=True, **options):
    """A model that finds blanks and several tokens."""
    sizes = {"conv_kernel_size": 6 if causal else 7, "vocab_size": VOCABULARY}
    model = tiny_speech.build(kind, backend, options, causal=causal, **sizes)
    inputs = PROCESSOR(audio=sounds(4, 9), sampling_rate=16000)
    if kind is ConformerForCTC:
        head, logits = model.ctc_head, model(**inputs).logits
    else:
        # So that a token changes what comes after it, and not every frame says ten of them.
        model.prediction.embedding.weight *= 20
        model.joint.prediction_projection.weight *= 8
        hidden, _ = model.encode(**inputs)
        prediction, _ = model.predict(torch.arange(VOCABULARY)[:, None])
        head, logits = model.joint.head, model.join(hidden[:1, :, None], prediction[:, 0])
    mean, std = (of(logits.flatten(0, -2), 0) for of in (torch.mean, torch.std))
    head.weight /= std[:, None]
    head.bias.sub_(mean).div_(std)
    head.bias[1:3] -= 9.0  # no special tokens
    head.bias[0] += BLANK[kind]
    head.bias[PROCESSOR.tokenizer.convert_tokens_to_ids("▁")] += 0.5  # words
    return model


def fed(stream, audio, size):
    """Utterances of audio in pieces of so many samples, of a stream that is new or was reset."""
    found = [one for piece in audio.split(size) for one in stream.feed(piece)] + stream.finish()
    stream.reset()
    return found


def plain(utterances):
    """What must be equal: text and times."""
    return [(one.text, one.start, one.end, [(w.text, w.start, w.end) for w in one.words]) for one in utterances]


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_times_are_those_of_the_whole(kind):
    """Confidences too, of words whose least sure token lasts for several frames."""
    model, audio = talker(kind), sounds(6, 5)
    whole = model.transcribe([audio], processor=PROCESSOR, return_timestamps="word")[0]
    assert len(whole.spans) > 2
    assert len(set(whole.text)) > 3
    for size in (999, 16000, 96000):
        stream = model.transcribe_stream(PROCESSOR, NEVER)
        for piece in audio.split(size):
            assert stream.feed(piece) == []
        assert stream.partial == whole.text
        assert stream.seconds == pytest.approx(5.88, abs=0.1)
        words = stream.partial_words
        assert [replace(word, confidence=0) for word in words] == [replace(span, confidence=0) for span in whole.spans]
        for word, span in zip(words, whole.spans, strict=True):
            assert word.confidence == pytest.approx(span.confidence, abs=1e-4)
        (final,) = stream.finish()
        assert (final.text, final.start, final.end) == (whole.text, whole.spans[0].start, whole.spans[-1].end)
        assert final.words == words
        assert (stream.partial, stream.state_bytes) == ("", 0)


@pytest.mark.parametrize(
    ("kind", "reset_encoder", "chunks"),
    [(ConformerForCTC, False, None), (ConformerForTransducer, True, None), (ConformerForCTC, True, Chunks(8))],
)
def test_end_points_do_not_depend_on_the_pieces(kind, reset_encoder, chunks, monkeypatch):
    model, audio, found = talker(kind, causal=chunks is None), sounds(3.6, 1), []
    for size, frames in ((96000, 250), (777, 250), (20000, 250), (96000, 7)):
        monkeypatch.setattr(streaming, "BLOCK_FRAMES", frames)
        found.append(plain(fed(model.transcribe_stream(PROCESSOR, OFTEN, reset_encoder, chunks), audio, size)))
    assert found == [found[0]] * 4
    assert len(found[0]) > 1


def test_an_encoder_that_is_reset_begins_as_a_new_one():
    """The last utterance equals that of a stream that begins where the encoder was reset."""
    model, audio, rules = talker(ConformerForCTC), sounds(6, 1), EndpointRules(None, None, 2.0)
    found = fed(model.transcribe_stream(PROCESSOR, rules, reset_encoder=True), audio, 5000)
    alone = fed(model.transcribe_stream(PROCESSOR, NEVER), audio[100 * 640 :], 5000)[0]
    assert len(found) == 3
    assert found[-1].text == alone.text
    for word, other in zip(found[-1].words, alone.words, strict=True):
        assert (word.text, word.start, word.end) == (other.text, *map(pytest.approx, (other.start + 4, other.end + 4)))
    goes_on = fed(model.transcribe_stream(PROCESSOR, rules), audio, 5000)
    assert plain(goes_on)[-1] != plain(found)[-1]


def scripted(monkeypatch, script, rules, kind):
    """A stream whose model says the letters of a script, one a frame, whatever the audio."""
    model, eye = talker(kind), torch.eye(VOCABULARY)
    labels = [PROCESSOR.tokenizer(letter).input_ids[1] if letter != " " else 0 for letter in script]
    labels = torch.tensor(labels + [0] * 1000)

    def frames(encoder, states, counts):
        pairs = zip(states, counts, strict=True)
        return [9 * eye[labels[state.position : state.position + count]][None] for state, count in pairs]

    monkeypatch.setattr(streaming, "encode", frames)
    if kind is ConformerForCTC:
        model.ctc_head = torch.nn.Identity()
    else:  # it says a token once, and no token again after itself
        monkeypatch.setattr(model, "predict", lambda tokens, state: (eye[tokens], ()))
        monkeypatch.setattr(model, "join", lambda hidden, last: hidden - 18 * last * (1 - eye[0]) + eye[0])
    return model.transcribe_stream(PROCESSOR, rules)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("script", "rules", "frames", "expected", "partial"),
    [
        # 4 blanks in the middle, and 5 at the end, which are 0.2 s up to rounding.
        ("     GO    DAD     GO", SILENCE, 26, [("GODAD", 5, 14, 19), ("GO", 19, 21, 26)], []),
        # An end point at frame 5, and nothing to give.
        ("      GO", EndpointRules(0.2, None, None), 8, [], [("GO", 6)]),
        # Utterances of 5 frames: "A", blank, blank, "DO" | "G" and silence.
        ("A  DOG          ", EndpointRules(None, None, 0.2), 11, [("ADO", 0, 5, 5), ("G", 5, 6, 10)], []),
        # A token that an end point cuts is said once.
        ("   GGGG G", EndpointRules(None, None, 0.2), 9, [("G", 3, 5, 5)], [("G", 8)]),
    ],
)
def test_rules_end_an_utterance_at_its_frame(kind, script, rules, frames, expected, partial, monkeypatch):
    """Texts, first and last frame of the utterances, and the frame at which each was found."""
    if kind is ConformerForTransducer and "GG" in script:
        pytest.skip("a Transducer says each token in one frame")
    stream, found = scripted(monkeypatch, script, rules, kind), []
    for piece in torch.zeros(640 * (frames - 1) + 2320).split(640):
        for one in stream.feed(piece):
            found.append((one.text, *(round(time / 0.04) for time in (one.start, one.end, stream.seconds))))
    assert found == expected
    assert [(word.text, round(word.start / 0.04)) for word in stream.partial_words] == partial
    assert stream.seconds == pytest.approx(0.04 * frames)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_was_reset_equals_a_new_one(kind):
    logits, new = (talker(kind).stream(PROCESSOR.feature_extractor) for _ in range(2))
    logits.feed(sounds(2, 2))
    logits.reset()
    assert (logits.frames, logits.tokens) == (0, [[]])
    torch.testing.assert_close(*(stream.feed(sounds(3, 2)) for stream in (logits, new)), rtol=0, atol=0)
    assert logits.tokens == new.tokens


BATCHES = [(ConformerForTransducer, "favor+", {})]
CASES = (("favor+", {"window": 8}), ("sdpa", {}), ("landmark", {"selected_keys": 6}))
BATCHES += [(ConformerForCTC, *case) for case in CASES]


@pytest.mark.parametrize(("kind", "backend", "options"), BATCHES)
@pytest.mark.parametrize("reset_encoder", [False, True])
def test_a_batch_equals_its_streams_alone(kind, backend, options, reset_encoder, monkeypatch):
    """Streams that begin late, have pieces of their own lengths, pause, were reset and end."""
    set_small_sections(monkeypatch)
    model = talker(kind, backend, **options)
    sizes, recordings = (4000, 7100, 2500, 9999), [sounds(*own[::-1]) for own in enumerate((4, 3, 2.4, 3.6))]
    streams = [model.transcribe_stream(PROCESSOR, OFTEN, reset_encoder) for _ in recordings]
    alone = [plain(fed(*own)) for own in zip(streams, recordings, sizes, strict=True)]
    assert sum(map(len, alone)) > 5
    streams[2].feed(recordings[0][:9000])
    streams[2].reset()
    queues = [list(audio.split(size)) for audio, size in zip(recordings, sizes, strict=True)]
    found = [[] for _ in recordings]
    for step in range(100):
        # The second one begins late, the third one pauses.
        waits = {1: step < 3, 2: step == 4}
        going = [row for row in range(4) if queues[row] and not waits.get(row)]
        pieces = [queues[row].pop(0) for row in going]
        for row, new in zip(going, feed_streams([streams[row] for row in going], pieces), strict=True):
            found[row] += new
            if not queues[row]:
                found[row] += streams[row].finish()
    assert [plain(one) for one in found] == alone


def test_the_layers_run_once_for_a_batch(monkeypatch):
    """Of positive features without a window attention too, from the second piece on."""
    model = talker(ConformerForCTC)
    streams, sizes = [model.transcribe_stream(PROCESSOR, NEVER) for _ in range(3)], []
    right = favor.kernels.StreamState.joined
    monkeypatch.setattr(favor.kernels.StreamState, "joined", lambda own: sizes.append(len(own)) or right(own))
    audio = sounds(3, 5)
    for start in (0, 16000, 32000):
        feed_streams(streams, [audio[start : start + 9000], audio[start : start + 16000], audio[start : start + 4000]])
    assert sizes == [3] * 4  # two layers, two pieces
    assert len({stream.state_bytes for stream in streams}) > 1  # of samples and features that wait
    assert max(stream.state_bytes for stream in streams) < 30000


def test_what_cannot_be_is_refused():
    model, both = talker(ConformerForCTC), talker(ConformerForCTC, "sdpa", causal=False)
    with pytest.raises(ValueError, match="evaluation mode"):
        model.train().stream()
    one, two, other = (own.transcribe_stream(PROCESSOR) for own in (model.eval(), model, talker(ConformerForCTC)))
    logits, piece = model.stream(PROCESSOR.feature_extractor), torch.zeros(900)
    chunked = [both.transcribe_stream(PROCESSOR, chunks=Chunks(size)) for size in (4, 8)]
    short = [build(ConformerModel, "favor+", {"exact_below": 100}, causal=False).stream(chunks=Chunks(4))]
    short += [favor.configure(build(ConformerModel, "favor+"), exact_below=32).stream()]
    utterance = ConformerProcessor(ConformerFeatureExtractor(feature_size=10), PROCESSOR.tokenizer)
    for call, message in (
        (lambda: model.stream(utterance.feature_extractor), 'normalize="none"'),
        (lambda: model.transcribe_stream(utterance), 'normalize="none"'),
        (lambda: model.transcribe_stream(), "processor must be given"),
        (lambda: model.stream(PROCESSOR), "for text call"),
        (lambda: streaming.TranscriptStream(model.encoder, PROCESSOR), "must recognise speech"),
        (lambda: logits.feed(piece.short()), "divide 16-bit samples by 32768"),
        (lambda: logits.feed(torch.zeros(1000, 2)), "one mono waveform"),
        (lambda: model.stream().feed(piece), "needs a feature_extractor"),
        *((lambda own=own: own.feed_features(features(60, batch=1)), "exact_below=0") for own in short),
        *((lambda numbers=numbers: Chunks(*numbers), "at least") for numbers in ((0,), (4, -1))),
        (lambda: Chunks.lasting(0.5, 0.04), r"whole number of frames of 0\.04 s, got 0\.5 s"),
        (lambda: EndpointRules(rule2_min_trailing_silence=0), "rule2_min_trailing_silence must be"),
        (lambda: EndpointRules(rule3_min_utterance_length=float("nan")), "rule3_min_utterance_length must be"),
        (lambda: feed_streams([one, one], [piece, piece]), "different ones with a piece each, got 2 streams and 2"),
        (lambda: feed_streams([one, two], [piece]), "got 2 streams and 1"),
        (lambda: feed_streams([one, other], [piece, piece]), "of one model"),
        (lambda: feed_streams(chunked, [piece, piece]), "same chunks"),
        (lambda: feed_streams([one, two], [piece, torch.zeros(2, 9)]), "one mono waveform"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert one._state.samples is None  # a bad piece changes no stream
    assert feed_streams([], []) == []
    with torch.no_grad():
        model.ctc_head.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="got NaN"):
        one.feed(torch.zeros(9000))
