"""Text that comes in pieces is that of the whole recording; end points, resets and batches of streams."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_speech
import torch
from small_sections import set_small_sections
from tiny_speech import FIXED, make_processor

import favor
from favor.models.conformer import (
    Chunks,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
    feed_streams,
    streaming,
)
from favor.models.speech import ConformerProcessor, EndpointRules

KINDS = (ConformerForCTC, ConformerForTransducer)
BLANK = {ConformerForCTC: 1.0, ConformerForTransducer: 0.5}  # so that all is there: tokens, words and silence
NEVER = EndpointRules(None, None, None)
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
def build(kind, backend="favor+", causal=True, **options):
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
    model, audio = build(kind), sounds(6, 5)
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
    model, audio, found = build(kind, causal=chunks is None), sounds(6, 1), []
    for size, frames in ((96000, 250), (777, 250), (20000, 250), (96000, 7)):
        monkeypatch.setattr(streaming, "BLOCK_FRAMES", frames)
        found.append(plain(fed(model.transcribe_stream(PROCESSOR, OFTEN, reset_encoder, chunks), audio, size)))
    assert found == [found[0]] * 4
    assert len(found[0]) > 1


def test_an_encoder_that_is_reset_begins_as_a_new_one():
    """The last utterance equals that of a stream that begins where the encoder was reset."""
    model, audio, rules = build(ConformerForCTC), sounds(6, 1), EndpointRules(None, None, 2.0)
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
    model, eye = build(kind), torch.eye(VOCABULARY)
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


def ends(stream, frames, size):
    """Texts, first and last frame of the utterances, and the frame at which each was found."""
    found, audio = [], torch.zeros(640 * (frames - 1) + 2320)
    for piece in audio.split(size):
        for one in stream.feed(piece):
            found.append((one.text, round(one.start / 0.04), round(one.end / 0.04), round(stream.seconds / 0.04)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_silence_ends_an_utterance_at_its_frame(kind, monkeypatch):
    # Frames 5, 6 | 4 blanks | 11 to 13 | 5 blanks end it at frame 18 | 19 to 20.
    script = "     GO    DAD     GO"
    rules = EndpointRules(None, 0.2 + 1e-9, None)  # 5 frames, up to rounding
    stream = scripted(monkeypatch, script, rules, kind)
    assert ends(stream, 19, 640) == [("GODAD", 5, 14, 19)]
    assert (stream.partial, stream.seconds) == ("", pytest.approx(0.76))
    assert ends(stream, 8, 640)[0] == ("GO", 19, 21, 26)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("script", "rules", "frames", "expected", "partial"),
    [
        # An end point at frame 5, and nothing to give.
        ("      GO", EndpointRules(0.2, None, None), 8, [], [("GO", 6)]),
        # Utterances of 5 frames: "A", blank, blank, "DO" | "G" and silence.
        ("A  DOG          ", EndpointRules(None, None, 0.2), 11, [("ADO", 0, 5, 11), ("G", 5, 6, 11)], []),
        # A token that an end point cuts is said once.
        ("   GGGG G", EndpointRules(None, None, 0.2), 9, [("G", 3, 5, 9)], [("G", 8)]),
    ],
)
def test_other_rules_end_an_utterance(kind, script, rules, frames, expected, partial, monkeypatch):
    if kind is ConformerForTransducer and "GG" in script:
        pytest.skip("a Transducer says each token in one frame")
    stream = scripted(monkeypatch, script, rules, kind)
    assert ends(stream, frames, 10**6) == expected
    assert [(word.text, round(word.start / 0.04)) for word in stream.partial_words] == partial


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_was_reset_equals_a_new_one(kind):
    logits, new = (build(kind).stream(PROCESSOR.feature_extractor) for _ in range(2))
    logits.feed(sounds(2, 2))
    logits.reset()
    assert (logits.frames, logits.tokens) == (0, [[]])
    torch.testing.assert_close(*(stream.feed(sounds(3, 2)) for stream in (logits, new)), rtol=0, atol=0)
    assert logits.tokens == new.tokens


BATCHES = [(kind, "favor+", {}) for kind in KINDS]
CASES = (("favor+", {"window": 8}), ("sdpa", {}), ("landmark", {"selected_keys": 6}))
BATCHES += [(ConformerForCTC, *case) for case in CASES]


@pytest.mark.parametrize(("kind", "backend", "options"), BATCHES)
@pytest.mark.parametrize("reset_encoder", [False, True])
def test_a_batch_equals_its_streams_alone(kind, backend, options, reset_encoder, monkeypatch):
    """Streams that begin late, have pieces of their own lengths, pause, were reset and end."""
    set_small_sections(monkeypatch)
    model = build(kind, backend, **options)
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
    model = build(ConformerForCTC)
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
    model = build(ConformerForCTC)
    one, two, other = (own.transcribe_stream(PROCESSOR) for own in (model, model, build(ConformerForCTC)))
    utterance = ConformerProcessor(ConformerFeatureExtractor(feature_size=10), PROCESSOR.tokenizer)
    piece = torch.zeros(900)
    for call, message in (
        (lambda: EndpointRules(rule2_min_trailing_silence=0), "rule2_min_trailing_silence must be"),
        (lambda: EndpointRules(rule3_min_utterance_length=float("nan")), "rule3_min_utterance_length must be"),
        (lambda: streaming.TranscriptStream(model.encoder, PROCESSOR), "must recognise speech"),
        (lambda: model.transcribe_stream(), "processor must be given"),
        (lambda: model.transcribe_stream(utterance), 'normalize="none"'),
        (lambda: model.stream(PROCESSOR), "for text call"),
        (lambda: feed_streams([one, one], [piece, piece]), "different ones with a piece each, got 2 streams and 2"),
        (lambda: feed_streams([one, two], [piece]), "got 2 streams and 1"),
        (lambda: feed_streams([one, other], [piece, piece]), "of one model"),
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
