"""`model.transcribe` against one recording at a time, put together by hand."""

import math

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE, build, make_processor

from favor.models.conformer import ConformerForCTC, ConformerForTransducer
from favor.models.speech import Span, ctc_greedy, join_segments, join_words, transducer_greedy


def sound(seconds, seed=0, rate=RATE):
    return 0.1 * np.random.default_rng(seed).normal(size=round(seconds * rate)).astype(np.float32)


PROCESSOR = make_processor("THE CAT SAT ON A MAT", "A DOG")


@pytest.fixture(scope="module", params=[ConformerForCTC, ConformerForTransducer], ids=["ctc", "transducer"])
@torch.no_grad()
def model(request, tmp_path_factory):
    """A saved model that says many tokens, spaces among them, with its processor."""
    path = tmp_path_factory.mktemp("model")
    model = build(request.param, num_hidden_layers=1, vocab_size=len(PROCESSOR.tokenizer))
    head = model.ctc_head if request.param is ConformerForCTC else model.joint.head
    inputs = PROCESSOR(sound(2.0, 1), sampling_rate=RATE)
    head.weight.mul_(5)
    if request.param is ConformerForCTC:
        logits = model(**inputs).logits[0]
    else:
        logits = model.join(model.encode(**inputs)[0][0], model.predict(torch.tensor([[0]]))[0][0])
        head.bias[0] += 2 * (logits - logits.mean(0)).std()
    # The frames say different letters, spaces among them, and nothing special.
    head.bias -= logits.mean(0)
    head.bias[PROCESSOR.tokenizer.convert_tokens_to_ids("▁")] += (logits - logits.mean(0)).std() / 2
    head.bias[1:3] -= 99
    model.save_pretrained(path)
    PROCESSOR.save_pretrained(path)
    return request.param.from_pretrained(path)


@torch.no_grad()
def text_of(model, waveform):
    """One recording by the searches that give tokens alone."""
    inputs = PROCESSOR(waveform, sampling_rate=RATE)
    if isinstance(model, ConformerForTransducer):
        (tokens,) = transducer_greedy(model, *model.encode(**inputs))
    else:
        (tokens,) = ctc_greedy(*model.frame_logits(**inputs))
    return PROCESSOR.decode(tokens, group_tokens=False)


def rounded(spans):
    return [(one.text, round(one.start, 6), round(one.end, 6), round(one.confidence, 4)) for one in spans]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_results_are_those_of_each_recording_in_order(model, batch_size):
    waveforms = [sound(seconds, seed) for seed, seconds in enumerate((0.9, 2.0, 0.4, 1.3, 0.7))]
    model.train()
    found = model.transcribe(waveforms, batch_size=batch_size, return_timestamps="char")
    assert model.training
    model.eval()
    assert [one.text for one in found] == [text_of(model, waveform) for waveform in waveforms]
    assert len({one.text for one in found}) > 3
    for waveform, one in zip(waveforms, found, strict=True):
        (alone,) = model.transcribe(torch.from_numpy(waveform), return_timestamps="char")
        assert rounded(alone.spans) == rounded(one.spans)
        assert "".join(span.text for span in one.spans) == one.text
        starts = [span.start for span in one.spans]
        assert starts == sorted(starts)
        assert all(span.end <= len(waveform) / RATE and 0 < span.confidence <= 1 for span in one.spans)
    assert all(one.spans == [] for one in model.transcribe(waveforms))
    assert model.transcribe([]) == []


def test_words_and_segments(model):
    waveform = sound(2.0, 1)
    (chars,), (words,), (whole,), (split,) = (
        model.transcribe(waveform, return_timestamps=times, pause=pause)
        for times, pause in (("char", 0.5), ("word", 0.5), ("segment", 9.0), ("segment", 0.0))
    )
    assert [word.text for word in words.spans] == words.text.split()
    assert len(words.spans) > 2
    seconds = 640 / RATE
    for word in words.spans:
        inside = [one for one in chars.spans if one.text != " " and word.start <= one.start and one.end <= word.end]
        assert word.confidence == min(one.confidence for one in inside)
        assert word.start / seconds == pytest.approx(round(word.start / seconds))
    assert [one.text for one in whole.spans] == [" ".join(words.text.split())]
    assert split.spans == join_segments(words.spans, 0.0)
    assert len(split.spans) > 1


def test_files_of_any_kind_and_rate_need_no_ffmpeg(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    low = np.sin(2 * np.pi * 300 * np.arange(2 * 44100) / 44100) * np.linspace(0, 1, 2 * 44100)
    soundfile.write(tmp_path / "stereo.wav", np.stack([low, low], 1), 44100)
    soundfile.write(tmp_path / "a.flac", sound(1.0, 3), RATE)
    soundfile.write(tmp_path / "b.mp3", sound(1.4, 4), RATE)
    names = [tmp_path / "a.flac", str(tmp_path / "stereo.wav"), tmp_path / "b.mp3"]
    found = model.transcribe(names, batch_size=2)
    for place in (0, 2):
        samples, _ = soundfile.read(names[place], dtype="float32")
        assert found[place].text == text_of(model, samples)
    assert model.transcribe(names[1]) == found[1:2]


def test_the_processor_is_given_or_in_the_folder(model, tmp_path):
    waveform = sound(1.0)
    model.save_pretrained(tmp_path / "bare")
    bare, new = type(model).from_pretrained(tmp_path / "bare"), build(type(model))
    with pytest.raises(ValueError, match=r"processor must be given: .*bare, where .* loaded from, holds none"):
        bare.transcribe(waveform)
    with pytest.raises(ValueError, match="processor must be given: this model was not loaded from a folder"):
        new.transcribe(waveform)
    assert bare.transcribe(waveform, processor=PROCESSOR) == model.transcribe(waveform)
    PROCESSOR.save_pretrained(tmp_path / "bare")
    config = tmp_path / "bare" / "processor_config.json"
    text = config.read_text()
    for damaged, message in (
        (text.replace('"hop_length": 160', '"hop_length": 0'), "bare, .* loaded.*hop_length must be 1 to 32768, got 0"),
        ("{", "bare, .* loaded.*processor_config.json' is not a valid JSON file"),
    ):
        config.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            bare.transcribe(waveform)


@pytest.mark.parametrize(
    ("audio", "options", "message"),
    [
        (sound(1.0), {"return_timestamps": True}, "return_timestamps must be char, word, segment or None, got True"),
        (sound(1.0), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (sound(1.0), {"pause": -1.0}, "pause must be a number of at least 0, got -1.0"),
        (sound(1.0), {"pause": math.nan}, "pause must be a number of at least 0, got nan"),
        ([sound(1.0), sound(0.1)], {}, "waveform 1: 1600 samples are too few for one frame"),
        ([sound(1.0), np.full(9000, np.nan, np.float32)], {}, "waveform 1: holds samples that are not finite"),
        ([sound(1.0), np.zeros((2, 9000), np.float32)], {}, r"got ndarray of shape \[2, 9000\] at place 1"),
        ([0.1, 0.2], {}, r"audio must be paths or mono waveforms \[n\], got float"),
        ("/no/such.wav", {}, "/no/such.wav: cannot be decoded"),
    ],
)
def test_refusals(model, audio, options, message):
    with pytest.raises(ValueError, match=message):
        model.transcribe(audio, **options)


def test_words_of_pieces_and_segments_of_words():
    """By hand."""
    pieces = [(" ", 0, 1, 0.1), ("GO", 1, 2, 0.9), ("OD", 4, 5, 0.7), (" ", 5, 6, 0.2), (" ", 6, 7, 0.2)]
    words = join_words([Span(*one) for one in (*pieces, ("DAY", 8, 9, 0.8), (" YES", 20, 22, 0.5))])
    assert words == [Span("GOOD", 1, 5, 0.7), Span("DAY", 8, 9, 0.8), Span("YES", 20, 22, 0.5)]
    assert join_segments(words, 3) == [Span("GOOD DAY", 1, 9, 0.75), words[2]]
    assert join_segments(words, 2.9) == words
    assert join_words([]) == join_segments([], 1) == []
