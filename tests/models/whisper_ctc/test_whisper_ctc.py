"""CTC on Whisper's encoder: against transformers' own encoder, padding, positions, saving, text with times."""

import gc
from functools import partialmethod

import numpy as np
import pytest
import torch
from tiny_speech import needs_search
from transformers import (
    AutoModelForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    pipeline,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import sinusoids

from favor.models.speech import (
    ConformerProcessor,
    Pronunciations,
    Transcript,
    WordLexicon,
    WordScorer,
    ctc_align,
    ctc_emissions,
    ctc_greedy,
    join_words,
    train_tokenizer,
    write_arpa,
)
from favor.models.speech.word_beam import search_emissions
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC, modeling_whisper_ctc

SIZES = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
POSITIONS = 100


def make(**changes):
    torch.manual_seed(0)
    return WhisperForCTC(WhisperCTCConfig(**{**SIZES, "max_source_positions": POSITIONS, **changes})).eval()


def features(*lengths, seed=0):
    """Random features, padded with noise that must have no effect, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.randn(len(lengths), max(lengths), 80, generator=generator)
    return given, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


GIVEN = features(20, 9)


def waveform(seconds, seed=0):
    return 0.1 * np.random.default_rng(seed).normal(size=round(16000 * seconds)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model whose outputs vary, and its processor."""
    folder = tmp_path_factory.mktemp("saved")
    processor = ConformerProcessor(WhisperCTCFeatureExtractor(), train_tokenizer(["ABC DEF"], "char"))
    model = make(vocab_size=len(processor.tokenizer))
    torch.nn.init.normal_(model.ctc_head.out.weight)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def loaded(folder):
    return WhisperForCTC.from_pretrained(folder).eval(), ConformerProcessor.from_pretrained(folder)


@torch.no_grad()
def test_hidden_states_are_those_of_transformers():
    torch.manual_seed(0)
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "max_target_positions": 8}
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    config = WhisperConfig(**SIZES, **decoder, **special, vocab_size=50, max_source_positions=POSITIONS)
    whisper = WhisperForConditionalGeneration(config).eval()
    model = WhisperForCTC.from_whisper(whisper, 7).eval()
    given, _ = features(2 * POSITIONS, 2 * POSITIONS)
    ours, theirs = model.encoder(given).last_hidden_state, whisper.model.encoder(given.mT).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert model(given).logits.shape == (2, POSITIONS, 7)
    assert len(model.encoder(given, output_hidden_states=True).hidden_states) == 3


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager", "favor#", "favor+", "landmark"])
def test_padding_has_no_effect(backend):
    model = make(attn_implementation=backend, favor={"exact_below": 0, "num_features": 8})
    given, mask = features(160, 91, 2)
    together = model(given, mask).logits
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(given[row : row + 1, :length]).logits[0]
        assert len(alone) == model.subsampled_lengths(length) == -(-length // 2)
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)


def test_loss_is_that_of_torch_and_reaches_every_weight():
    model = make(dropout=0.0, head_dropout=0.0, ctc_loss_reduction="sum").train()
    found = model(*features(120, 60), torch.tensor([[1, 2, 2], [3, -100, -100]]))
    rows, texts = found.logits.log_softmax(-1).transpose(0, 1), torch.tensor([1, 2, 2, 3])
    expected = torch.nn.functional.ctc_loss(rows, texts, (60, 30), (3, 1), reduction="sum")
    torch.testing.assert_close(found.loss, expected)
    found.loss.backward()
    still = [name for name, one in model.named_parameters() if one.grad is None]
    assert still == ["encoder.embed_positions.weight"]


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "landmark", "favor#"])
def test_a_sliding_window_keeps_attention_to_the_frames_nearby(backend):
    """In one pass over what is longer than the positions, with padding; the truth is attention with a dense mask."""
    reach = 7
    model = make(attn_implementation=backend, sliding_window=reach, favor={"exact_below": 0, "num_features": 8})
    given, mask = features(2 * 2 * POSITIONS + 30, 91)
    frames = torch.arange(2 * POSITIONS + 15)
    near = (frames[:, None] - frames).abs() <= reach
    dense = make(attn_implementation="eager")
    hidden, real = dense.encoder.subsample(given, mask)
    seen = near & real[:, None, None].bool()
    hidden = hidden + sinusoids(POSITIONS, 32)[frames % POSITIONS]
    for layer in dense.encoder.layers:
        hidden = layer(hidden, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min))
    expected = dense.encoder.layer_norm(hidden)
    found = model.encoder(given, mask).last_hidden_state
    for row, length in enumerate(real.sum(1).tolist()):
        torch.testing.assert_close(found[row, :length], expected[row, :length], rtol=1e-4, atol=1e-5)


def test_more_frames_than_positions_are_reported_without_a_sliding_window(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_whisper_ctc._logger, "warning_once", said.append)
    make()(features(2 * POSITIONS)[0])
    make(sliding_window=5)(features(2 * POSITIONS + 2)[0])
    assert said == []
    make()(features(2 * POSITIONS + 2)[0])
    assert f"got {POSITIONS + 1} frames" in said[0]
    assert f"set config.sliding_window, for example to {POSITIONS // 4}." in said[0]


def test_features_are_those_of_transformers_and_do_not_depend_on_the_batch():
    ours, theirs = WhisperCTCFeatureExtractor(), WhisperFeatureExtractor()
    sounds = [waveform(30), waveform(1.234, 1), waveform(0.02, 2)]
    batch = ours(sounds, sampling_rate=16000)
    whole = theirs(sounds[0], sampling_rate=16000, return_tensors="pt").input_features[0].T
    torch.testing.assert_close(batch["input_features"][0], whole)
    for row, sound in enumerate(sounds):
        alone = ours(sound, sampling_rate=16000)["input_features"][0]
        assert batch["attention_mask"][row].sum() == len(alone) == ours.num_frames(len(sound))
        assert torch.equal(batch["input_features"][row, : len(alone)], alone)
        assert not batch["input_features"][row, len(alone) :].any()
    assert ours.num_frames(200) == 0
    noisy = [ours(sounds[1], 16000, dither=0.1, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(noisy[0]["input_features"], noisy[1]["input_features"])
    assert not torch.equal(noisy[0]["input_features"][0], batch["input_features"][1, :123])
    assert isinstance(ours(sounds[1], 16000, return_tensors="np")["attention_mask"], np.ndarray)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, _: model(torch.zeros(1, 80, 200)), r"must be \[batch, time, 80\], got \(1, 80, 200\)"),
        (lambda model, _: model(GIVEN[0], GIVEN[1].flip(1)), "padding on the right: ones, then zeros"),
        (lambda model, _: model(GIVEN[0], GIVEN[1][:, :10]), r"must be \[2, 20\], as the features, got \[2, 10\]"),
        (lambda *_: WhisperCTCConfig(ctc_loss_reduction="none"), "ctc_loss_reduction must be"),
        (lambda *_: WhisperCTCConfig(sliding_window=0), "sliding_window must be"),
        (lambda *_: WhisperCTCConfig(head_layers=10**6), "head_layers must be"),
        (lambda *_: WhisperCTCFeatureExtractor()(waveform(1), 16000, max_length=3), "max_length: features are as long"),
        (lambda model, _: WhisperForCTC.from_whisper(model, 7), "model must be a Whisper of transformers, got Whisper"),
        (lambda model, processor: model.stream(processor, step=0), "step must be above 0"),
        (lambda model, processor: model.stream(processor, look_ahead=0.33), "in frames of 0.02 s; got 1, 0.33 and 10"),
        (lambda model, processor: model.stream(processor), "must last at most 2 s together, got 12 s"),
        (lambda model, processor: model.train().stream(processor), "needs a model in evaluation mode"),
    ],
)
def test_what_is_refused(saved, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(*loaded(saved))


@torch.no_grad()
def test_saved_with_its_backend(tmp_path):
    model = make(attn_implementation="favor#", favor={"exact_below": 0, "num_features": 8, "seed": 3})
    model.save_pretrained(tmp_path)
    again = AutoModelForCTC.from_pretrained(tmp_path).eval()
    assert isinstance(again, WhisperForCTC)
    assert torch.equal(again(*GIVEN).logits, model(*GIVEN).logits)
    exact = WhisperForCTC.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert not torch.allclose(exact(*GIVEN).logits, model(*GIVEN).logits)


@torch.no_grad()
def test_text_with_times(saved):
    model, processor = loaded(saved)
    sounds = [waveform(4.1, 2), waveform(1.5), waveform(0.8, 1)]  # the first is longer than the positions
    found = model.transcribe(sounds, 1, return_timestamps="word")
    for sound, one in zip(sounds, found, strict=True):
        logits, lengths = model.window_logits(**processor(sound, sampling_rate=16000))
        (tokens,) = ctc_greedy(logits, lengths)
        assert one.text == processor.tokenizer.decode(tokens, group_tokens=False)
        assert one.text
        assert [span.text for span in one.spans] == one.text.split()
        assert all(0 <= span.start < span.end <= len(sound) / 16000 + 0.02 for span in one.spans)
        assert all(round(span.start / 0.02, 3).is_integer() for span in one.spans)
    assert found[0].spans[-1].end > 3.5
    piped = pipeline("automatic-speech-recognition", model=str(saved))(sounds[1].copy(), return_timestamps="word")
    assert [chunk["text"] for chunk in piped["chunks"]] == found[1].text.split()
    (aligned,) = ctc_align(logits, lengths, processor.labels("AB CD"))
    assert [word.text for word in join_words(processor.tokenizer.spans(aligned))] == ["AB", "CD"]


@torch.no_grad()
def test_windows_of_long_recordings():
    """By hand: window by window; short recordings are one pass, also beside long ones; padding has no effect."""
    model, (given, mask) = make(), features(531, 250, 190)
    found, lengths = model.window_logits(given, mask)
    assert lengths.tolist() == [266, 125, 95]
    for row, (length, frames, step) in enumerate(((531, 266, 33), (250, 125, 33), (190, 95, 95))):
        for first in range(0, frames, step):
            start, end = max(0, first - 8), min(first + step, frames)
            window = given[row : row + 1, 2 * start : min(2 * (first + step + 8), length)]
            expected = model(window).logits[0, first - start : end - start]
            torch.testing.assert_close(found[row, first:end], expected, rtol=1e-4, atol=1e-5)
    short, _ = model.window_logits(given[:, : 2 * POSITIONS])
    torch.testing.assert_close(short, model(given[:, : 2 * POSITIONS]).logits)


@torch.no_grad()
def test_a_stream_is_its_windows(saved):
    """However the audio is cut into pieces, each step has the logits of its window."""
    (model, processor), sound, expected = loaded(saved), waveform(2.37), []
    for first in range(0, 119, 10):
        start, last = max(0, first - 20), min(first + 25, 119)
        inputs = processor(sound[320 * start : 320 * last], sampling_rate=16000)
        expected.append(model(inputs["input_features"]).logits[0, first - start : min(first + 10, 119) - start])
    (found,) = ctc_emissions(torch.cat(expected)[None], [119])
    tokens = [one.token for one in found]
    stream = model.stream(processor, step=0.2, look_ahead=0.3, context=0.4)
    for size in (1000, 16000, len(sound)):
        for piece in torch.from_numpy(sound).split(size):
            stream.feed(piece)
        assert stream.seconds == pytest.approx(2.0)
        stream.finish()
        assert stream.seconds == pytest.approx(2.38)
        for call in (lambda: stream.feed(sound), stream.finish):
            with pytest.raises(ValueError, match="the recording has ended with finish: call reset to begin another"):
                call()
        assert [one.token for one in stream.emissions] == tokens
        sure = [one.confidence for one in stream.emissions]
        assert sure == pytest.approx([one.confidence for one in found], abs=1e-4)
        assert stream.text == processor.tokenizer.decode(tokens, group_tokens=False)
        assert [word.text for word in stream.words] == stream.text.split()
        stream.reset()
        assert (stream.text, stream.seconds) == ("", 0)


def kept(stream):
    """Bytes of tensors that a stream holds beside its model, processor and scorer."""
    seen, found, waiting = {*map(id, (stream.model, stream.processor, stream.scorer, None))}, {}, [vars(stream)]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type):
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            waiting += gc.get_referents(one)
    return sum(found.values())


SEARCHES = ["greedy", "phonemes", *(pytest.param(one, marks=needs_search) for one in ("words", "known"))]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_stream_goes_on_with_its_search(search, tmp_path, monkeypatch):
    """It finds what one search over all logits finds, searches no frame much later, and its state does not grow."""
    tokenizer, lexicon = train_tokenizer(["A B AB"], "char"), None
    if search == "phonemes":  # whose text has no space at its end
        (tmp_path / "lexicon.txt").write_text("AB\tA B\nA\tA\n")
        lexicon = Pronunciations(tmp_path / "lexicon.txt")
        tokenizer = lexicon.tokenizer()
    processor, text = ConformerProcessor(WhisperCTCFeatureExtractor(), tokenizer), "AB A B AB B A " * 7
    tokens = tokenizer(text.replace("AB", "A-B") if lexicon else text).input_ids
    model = make(vocab_size=len(tokenizer))
    logits = 2 * torch.randn(300, len(tokenizer), generator=torch.Generator().manual_seed(0))
    logits[range(0, 3 * len(tokens), 3), tokens] += 6.0
    logits[2::3, 0] += 6.0
    logits[:, 1:3] -= 99.0
    places, searched = [], []

    def forward(features):
        first = max(0, 10 * len(places) - 20)
        places.append(first)
        return CausalLMOutput(logits=logits[None, first : first + (features.shape[1] + 1) // 2])

    monkeypatch.setattr(model, "forward", forward)
    for kind in (WordScorer, WordLexicon):
        monkeypatch.setattr(kind, "beam_size", 6)
        monkeypatch.setattr(kind, "piece", 30)
        spy = partialmethod(lambda one, own, *given: searched.append(len(given[0])) or own(one, *given), kind.search)
        monkeypatch.setattr(kind, "search", spy)
    scorer = {"words": WordScorer, "known": WordLexicon}.get(search)
    if scorer is not None:
        scorer = scorer(tokenizer, write_arpa(["A B AB", "AB B"], tmp_path / "lm.arpa", 2))
    found = []
    for cuts in ([], [16000, 17000, 60000, 60001], range(1600, 96000, 1600)):
        stream = model.stream(processor, step=0.2, look_ahead=0.1, context=0.4, scorer=scorer, lexicon=lexicon)
        for place, piece in enumerate(np.split(waveform(6), cuts)):
            stream.feed(piece)
            said = None if place % 3 else Transcript.of(stream.emissions, processor, 0.02, lexicon, "word")
            assert said in (None, Transcript(stream.text, stream.words))
            assert kept(stream) <= 4 * (16000 * 0.8 + 40 * logits.shape[1])
        stream.finish()
        places.clear()
        found.append((stream.text, stream.words, stream.emissions))
    assert found[0] == found[1] == found[2]
    assert max(searched, default=0) <= 40
    (expected,), (text, words, emissions) = search_emissions(logits[None], [300], scorer), found[0]
    assert [(one.token, one.start, one.end) for one in emissions] == [(o.token, o.start, o.end) for o in expected]
    assert [one.confidence for one in emissions] == pytest.approx([one.confidence for one in expected], abs=1e-5)
    assert Transcript.of(emissions, processor, 0.02, lexicon, "word") == Transcript(text, words)
    assert len(words) > 30
