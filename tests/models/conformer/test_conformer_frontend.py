"""Log-mel features against numpy and against transformers, and the processor on top of them."""

import numpy as np
import pytest
import tiny_speech
import torch
from tiny_speech import RATE
from transformers import AutoFeatureExtractor, LasrFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from favor.models.conformer import feature_extraction_conformer as frontend
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.models.whisper_ctc import WhisperCTCFeatureExtractor


def sound(samples, seed=0):
    return tiny_speech.sound(samples / RATE, seed)


def plain_log_mel(waveform):
    """The formula, a frame at a time, in float64."""
    window, rows = np.hanning(400), []
    bank = mel_filter_bank(257, 80, 125.0, 7500.0, RATE, None, "kaldi", triangularize_in_mel_space=True)
    for start in range(0, len(waveform) - 399, 160):
        spectrum = np.fft.rfft(window * waveform[start : start + 400].astype(np.float64), 512)
        rows.append(np.log(np.maximum(np.abs(spectrum) ** 2 @ bank, 1e-5)))
    return np.array(rows)


EXTRACTOR = ConformerFeatureExtractor()


@pytest.mark.parametrize("samples", [400, 559, 560, 16123])
def test_log_mel_is_the_formula_and_that_of_lasr(samples):
    waveform = sound(samples)
    features = EXTRACTOR.log_mel(torch.from_numpy(waveform))
    assert (len(features), features.dtype) == (EXTRACTOR.num_frames(samples), torch.float32)
    np.testing.assert_allclose(features.numpy(), plain_log_mel(waveform), rtol=1e-6, atol=1e-6)
    theirs = LasrFeatureExtractor(feature_size=128)(waveform, sampling_rate=RATE, return_tensors="pt")
    ours = ConformerFeatureExtractor(feature_size=128).log_mel(torch.from_numpy(waveform))
    torch.testing.assert_close(ours, theirs.input_features[0], rtol=1e-6, atol=1e-6)


def test_blocks_do_not_change_frames(monkeypatch):
    waveform, widths = torch.from_numpy(sound(30000)), []
    whole, compute = EXTRACTOR.log_mel(waveform), EXTRACTOR._torch_extract_fbank_features
    spy = lambda piece, device: widths.append(len(piece)) or compute(piece)  # noqa: E731
    monkeypatch.setattr(frontend, "BLOCK_FRAMES", 7)
    monkeypatch.setattr(EXTRACTOR, "_torch_extract_fbank_features", spy)
    torch.testing.assert_close(EXTRACTOR.log_mel(waveform), whole, rtol=0, atol=1e-6)
    assert max(widths) == 6 * 160 + 400


def test_an_utterance_is_normalised_over_its_own_frames():
    lengths = (30000, 7000, 401)
    waveforms = [sound(samples, seed) for seed, samples in enumerate(lengths)]
    batch = EXTRACTOR(waveforms, sampling_rate=RATE, return_tensors="pt")
    frames = [(samples - 400) // 160 + 1 for samples in lengths]
    assert batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask.sum(1).tolist() == frames
    for row, waveform, count in zip(batch.input_features, waveforms, frames, strict=True):
        alone = EXTRACTOR(waveform, sampling_rate=RATE, return_tensors="pt")
        assert alone.attention_mask.all()
        torch.testing.assert_close(row[:count], alone.input_features[0], rtol=0, atol=1e-5)
        assert not row[count:].any()
        expected = plain_log_mel(waveform)
        expected = (expected - expected.mean(0)) / np.sqrt(expected.var(0) + 1e-5)
        np.testing.assert_allclose(row[:count].numpy(), expected, atol=2e-4)
    assert EXTRACTOR(waveforms[1:], sampling_rate=RATE, pad_to_multiple_of=16).input_features.shape[1] == 48
    cut = EXTRACTOR(waveforms[1:], sampling_rate=RATE, padding="max_length", max_length=20, truncation=True)
    assert cut.input_features.shape[1] == 20
    assert cut.attention_mask.sum(1).tolist() == [20, 1]


def test_constants_instead_of_the_utterance(tmp_path):
    """Also after saving."""
    waveform, other = sound(9000), {"normalize": "none"}
    mean, std = np.linspace(-9, 3, 80), np.linspace(0.5, 4, 80)
    given = ConformerFeatureExtractor(**other, mean=mean, std=std)
    given.save_pretrained(tmp_path)
    for kind in (ConformerFeatureExtractor, AutoFeatureExtractor):
        after = kind.from_pretrained(tmp_path)
        assert (type(after), after.to_dict()) == (ConformerFeatureExtractor, given.to_dict())
        got = after(waveform, sampling_rate=RATE, return_tensors="np").input_features[0]
        np.testing.assert_allclose(got, (plain_log_mel(waveform) - mean) / std, rtol=1e-5, atol=1e-5)
    bare = ConformerFeatureExtractor(**other)(waveform, sampling_rate=RATE).input_features[0]
    np.testing.assert_allclose(bare, plain_log_mel(waveform), rtol=1e-6, atol=1e-6)
    by_call = EXTRACTOR(waveform, sampling_rate=RATE, do_normalize=False).input_features[0]
    torch.testing.assert_close(by_call, bare)


def test_forms_of_a_waveform():
    waveform = sound(4000)
    expected, tensor = EXTRACTOR(waveform, sampling_rate=RATE).input_features, torch.from_numpy(waveform)
    for form in (waveform.tolist(), np.float64(waveform), tensor, tensor[None], [waveform.tolist()], waveform[None]):
        got = EXTRACTOR(form, sampling_rate=RATE).input_features
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_dither_is_seeded_and_belongs_to_the_call(tmp_path):
    waveform, seed = sound(4000), torch.Generator().manual_seed
    given = {"sampling_rate": RATE, "do_normalize": False, "dither": 0.1}
    one, two = (EXTRACTOR(waveform, **given, generator=seed(5)).input_features[0] for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    noise = 0.1 * torch.randn(4000, generator=seed(5))
    torch.testing.assert_close(one, EXTRACTOR.log_mel(torch.from_numpy(waveform) + noise), rtol=0, atol=1e-5)
    assert "dither" not in EXTRACTOR.to_dict()


@pytest.mark.parametrize(
    ("raw", "given", "error", "message"),
    [
        (sound(4000), {"sampling_rate": 8000}, ValueError, "sampling_rate must be 16000, got 8000"),
        (sound(399), {}, ValueError, "waveform 0 has 399 samples, too few for one window of 400"),
        ([sound(4000), sound(10)], {}, ValueError, "waveform 1 has 10 samples"),
        ([], {}, ValueError, "waveform 0 has 0 samples"),
        (np.full(4000, np.nan), {}, ValueError, "waveform 0 holds NaN"),
        ((sound(4000) * 32768).astype(np.int16), {}, TypeError, "divide 16-bit samples by 32768"),
        (np.zeros((1, 2, 4000)), {}, ValueError, r"waveform 0 has shape \[2, 4000\]"),
        (np.zeros((0, 4000)), {}, ValueError, "at least one waveform"),
        (sound(4000), {"return_attention_mask": False}, ValueError, "needs the mask"),
    ],
)
def test_refuses_audio(raw, given, error, message):
    with pytest.raises(error, match=message):
        EXTRACTOR(raw, **{"sampling_rate": RATE, **given})


BOTH = (ConformerFeatureExtractor, WhisperCTCFeatureExtractor)


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (BOTH[:1], {"normalize": "batch"}, "normalize must be one of utterance, none"),
        (BOTH[:1], {"mean": [0.0] * 79}, "mean must be 80 finite numbers"),
        (BOTH[:1], {"std": [1.0] * 75 + [-2.0, 1.0, 0.0, 1.0, 1.0]}, r"got -2.0 for bin 75 of 80 \(2 such bins\)"),
        (BOTH[:1], {"std": [float("nan")] * 80}, "std must be 80 finite numbers"),
        (BOTH[:1], {"n_fft": 256}, "n_fft must be at least win_length"),
        (BOTH[:1], {"sampling_rate": 8000}, "sampling_rate must be at least 15000"),
        # Memory does not follow the settings.
        (BOTH, {"feature_size": 10**7}, "feature_size must be 1 to 512, got 10000000"),
        (BOTH, {"n_fft": 32768}, "hop_length must be at least .*, got 160, 16000 and 32768"),
        (BOTH, {"hop_length": 1}, "hop_length must be at least .*, got 1, 16000 and"),
        (BOTH, {"n_fft": 512.5}, "n_fft must be a whole number, got 512.5"),
    ],
)
def test_refuses_settings(kinds, settings, message):
    for kind in kinds:
        with pytest.raises((ValueError, TypeError), match=message):
            kind(**settings)


def test_processor(tmp_path):
    tokenizer = train_tokenizer(["A CAT SAT", "THE DOG RAN FAR", "CATS AND DOGS"], "char")
    ConformerProcessor(ConformerFeatureExtractor(normalize="none"), tokenizer).save_pretrained(tmp_path)
    processor = ConformerProcessor.from_pretrained(tmp_path)
    assert processor.feature_extractor.normalize == "none"
    waveforms = [sound(9000), sound(4000)]
    both = processor(waveforms, ["A CAT", "DOG"], sampling_rate=RATE)
    heard = processor.feature_extractor(waveforms, sampling_rate=RATE)
    assert set(both) == {"input_features", "attention_mask", "labels"}
    torch.testing.assert_close(both.input_features, heard.input_features)
    assert both.attention_mask.tolist() == heard.attention_mask.tolist()
    assert both.labels.shape == (2, 6)
    assert both.labels[1].tolist() == [*tokenizer("DOG").input_ids, -100, -100]
    assert processor.decode(both.labels[0], group_tokens=False) == "A CAT"
    assert set(processor(waveforms[0], sampling_rate=RATE)) == {"input_features", "attention_mask"}
    assert processor(text="DOG").labels.tolist() == [tokenizer("DOG").input_ids]
    for given, options, message in (
        ((), {}, "audio or text must be given"),
        ((waveforms, "DOG", RATE), {}, "one transcript per waveform, got 1 for 2"),
        ((waveforms,), {"colour": "red"}, "colour"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            processor(*given, **options)


def test_measured_constants_of_audio_whose_band_ends_early():
    """As MP3 and telephones leave it: bins above 4 kHz are constant, and one at the edge hardly moves."""
    waveforms = []
    for seed in range(2):
        spectrum = np.fft.rfft(sound(32000, seed))
        spectrum[np.fft.rfftfreq(32000, 1 / RATE) > 4000] = 0
        waveforms.append(np.fft.irfft(spectrum).astype(np.float32))
    measured = ConformerFeatureExtractor.measured(waveforms)
    rows = np.concatenate([plain_log_mel(waveform) for waveform in waveforms])
    deviation = rows.std(0, ddof=1)
    assert (deviation < 1e-9).sum() > 5
    np.testing.assert_allclose(measured.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(measured.std, np.maximum(deviation, 0.1), rtol=1e-4)
    features = measured(waveforms, sampling_rate=RATE).input_features[..., deviation < 1e-9]
    assert features.abs().max() < 1e-4
