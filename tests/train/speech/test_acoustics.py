"""Noise, reverberation and volume against their definitions, and what a training draws of them."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.signal
import soundfile
import torch
from speech_corpus import RATE, WORDS, librispeech, sound, write_sound

from favor.models.conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, read_file, train_tokenizer
from favor.models.speech.audio import read_piece
from favor.train.speech.arguments import SpeechDataArguments
from favor.train.speech.augment import Acoustics, add_noise, reverberate, synthetic_response
from favor.train.speech.batches import SpeechDataset
from favor.train.speech.loaders import make_acoustics
from favor.train.speech.sources import load_speech


def decibels(one, other=1.0):
    """Mean power of one over that of the other."""
    powers = [np.mean(np.square(np.asarray(wave, np.float64))) for wave in (one, other)]
    return 10 * math.log10(powers[0] / powers[1])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def float_file(path, samples, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


@pytest.mark.parametrize("snr", [-5.0, 0.0, 7.3, 20.0])
def test_the_noise_has_the_ratio(snr):
    speech, noise = sound(1.0, 1), sound(1.0, 2) * 0.01
    mixed = add_noise(speech, noise, snr)
    assert mixed.dtype == np.float32
    added = mixed.astype(np.float64) - speech
    assert decibels(speech, added) == pytest.approx(snr, abs=1e-5)
    np.testing.assert_allclose(added / np.abs(added).max(), noise / np.abs(noise).max(), atol=1e-5)


def test_reverberation_is_a_convolution_from_the_direct_path_on():
    speech, source = sound(0.4, 1), np.random.default_rng(0)
    response = np.concatenate([[0.05, -0.1], [-0.8], 0.2 * source.normal(size=3000)]).astype(np.float32)
    wet = reverberate(speech, response)
    assert wet.dtype == np.float32
    assert wet.shape == speech.shape
    assert decibels(wet, speech) == pytest.approx(0, abs=1e-5)
    # With the sign of the direct path turned, so that the speech keeps its own.
    expected = np.convolve(speech.astype(np.float64), -response.astype(np.float64))[2 : 2 + len(speech)]
    expected *= np.sqrt(np.mean(np.square(speech, dtype=np.float64)) / np.mean(expected**2))
    np.testing.assert_allclose(wet, expected, atol=2e-6)


@pytest.mark.parametrize("delay", [0, 1, 700])
def test_a_delay_alone_changes_nothing(delay):
    speech, response = sound(0.3), np.zeros(1000, np.float32)
    response[delay] = 0.3
    np.testing.assert_allclose(reverberate(speech, response), speech, atol=1e-6)
    silence = np.zeros(100, np.float32)
    np.testing.assert_array_equal(reverberate(silence, response), silence)


@pytest.mark.parametrize("rt60", [0.1, 0.4])
def test_a_synthetic_response_decays_by_60_decibels(rt60):
    responses = np.stack([synthetic_response(rt60, RATE, seeded(seed)) for seed in range(300)]).astype(np.float64)
    assert (responses.argmax(1) == 0).all()
    assert (responses[:, 0] == 1).all()
    tails = responses[:, 1:] ** 2
    # The energy of the noise: that of the direct path on average, with the deviation of a sum of squares.
    energies, shape = tails.sum(1), 10 ** (-6 * np.arange(1, tails.shape[1] + 1) / (rt60 * RATE))
    deviation = np.sqrt(2 * np.square(shape).sum()) / shape.sum()
    assert energies.mean() == pytest.approx(1, abs=4 * deviation / np.sqrt(300))
    # Energy per tenth of the time falls by 6 dB each.
    levels = 10 * np.log10(tails.mean(0).reshape(10, -1).mean(1))
    np.testing.assert_allclose(np.diff(levels), -6, atol=0.5)


def test_a_piece_is_cut_at_its_place_or_repeated(tmp_path):
    samples = sound(1.0)
    path = float_file(tmp_path / "two.wav", np.stack([samples, -samples], 1))
    for place, start in ((0.0, 0), (0.5, 6000), (1.0, 12000)):
        np.testing.assert_array_equal(read_piece(path, RATE, 4000, place), samples[start : start + 4000])
    np.testing.assert_array_equal(read_piece(path, RATE), samples)
    repeated = read_piece(path, RATE, 40000, 0.7)
    np.testing.assert_array_equal(repeated, np.concatenate([samples, samples, samples[:8000]]))


def test_what_is_drawn_is_in_the_ranges_and_as_probable_as_it_should_be(tmp_path):
    noises = tuple(float_file(tmp_path / f"{name}.wav", sound(0.3, name)) for name in range(2))
    speech = sound(0.4, 9)
    acoustics = Acoustics(noises=noises, snr=(3.0, 9.0), noise_probability=0.25)
    ratios = []
    for seed in range(400):
        added = acoustics(speech, RATE, seeded(seed)).astype(np.float64) - speech
        if added.any():
            ratios.append(decibels(speech, added))
    assert len(ratios) / 400 == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 400))
    assert min(ratios) >= 3 - 1e-5
    assert max(ratios) <= 9 + 1e-5
    assert np.mean(ratios) == pytest.approx(6, abs=4 * 6 / np.sqrt(12 * len(ratios)))


def test_noise_follows_reverberation(tmp_path):
    noise, room = float_file(tmp_path / "n.wav", sound(3.0, 1)), float_file(tmp_path / "r.wav", sound(0.05, 2))
    always = {"noise_probability": 1.0, "reverb_probability": 1.0}
    acoustics = Acoustics(noises=(noise,), responses=(room,), snr=(10.0, 10.0), **always)
    speech = sound(0.5, 3)
    changed = acoustics(speech, RATE, seeded())
    wet = reverberate(speech, read_file(room))
    added = changed.astype(np.float64) - wet
    assert decibels(wet, added) == pytest.approx(10, abs=1e-4)
    # The noise is a piece of its file, whose place a correlation finds.
    scale = np.sqrt(np.mean(added**2))
    whole = read_file(noise).astype(np.float64)
    place = int(np.argmax(scipy.signal.correlate(whole, added, "valid")))
    piece = whole[place : place + len(added)]
    np.testing.assert_allclose(added / scale, piece / np.sqrt(np.mean(piece**2)), atol=1e-4)


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    return load_speech(librispeech(tmp_path_factory.mktemp("corpus")), "dev")[0]


def test_draws_depend_on_seed_epoch_and_utterance_alone(utterances, tmp_path):
    processor = ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer([" ".join(WORDS)], "char"))
    noises = (float_file(tmp_path / "n.wav", sound(3.0, 1)),)
    acoustics = Acoustics(noises=noises, noise_probability=1.0, rt60=(0.1, 0.3))

    def features(seed, key, **given):
        data = SpeechDataset(utterances, processor, acoustics=acoustics, seed=seed, **given)
        return data[key]["input_features"]

    first = features(3, (1, 2))
    assert torch.equal(first, features(3, (1, 2)))
    assert not torch.equal(first, features(3, (2, 2)))
    assert not torch.equal(first, features(4, (1, 2)))
    assert not torch.equal(first, SpeechDataset(utterances, processor, seed=3)[1, 2]["input_features"])
    # Without acoustics the draws of speed, dither and masks are those of a run without the options.
    plain = {"speeds": (0.9, 1.1), "dither": 1e-3, "seed": 3}
    off = SpeechDataset(utterances, processor, acoustics=Acoustics(), **plain)[1, 2]["input_features"]
    assert torch.equal(off, SpeechDataset(utterances, processor, **plain)[1, 2]["input_features"])


def test_folders_become_acoustics(tmp_path):
    for name in ("b.wav", "inner/a.flac", "c.mp3"):
        write_sound(tmp_path / "noise" / name, 0.2)
    (tmp_path / "noise" / "LICENSE.txt").write_text("free")
    made = make_acoustics(SpeechDataArguments(noise_dir=str(tmp_path / "noise"), reverb_dir="synthetic"))
    assert [path.name for path in made.noises] == ["b.wav", "c.mp3", "a.flac"]
    assert dataclasses.asdict(made) == dataclasses.asdict(Acoustics(made.noises, rt60=(0.2, 0.6)))
    assert make_acoustics(SpeechDataArguments()) is None


@pytest.mark.parametrize("option", ["noise_dir", "reverb_dir"])
def test_folders_that_cannot_be_used(tmp_path, option):
    def refuses(message):
        with pytest.raises(ValueError, match=message) as caught:
            make_acoustics(SpeechDataArguments(**{option: str(tmp_path / "x")}))
        assert "\n" not in str(caught.value)

    refuses(rf"{option} must be a folder with \.flac, \.mp3, \.wav files, but .*x is no folder")
    (tmp_path / "x").mkdir()
    refuses(rf"{option} must be a folder with .*, but .*x has none that can be read")
    (tmp_path / "x" / "bad.wav").write_bytes(b"no sound" * 50)
    refuses(r"bad\.wav: cannot be decoded")
    (tmp_path / "x" / "bad.wav").write_bytes(b"")
    refuses(r"bad\.wav: the file is empty")
    float_file(tmp_path / "x" / "bad.wav", np.zeros(0, np.float32))
    refuses(r"bad\.wav: holds no samples")


def test_a_silent_response_is_named(tmp_path):
    room = float_file(tmp_path / "r.wav", np.zeros(100, np.float32))
    with pytest.raises(ValueError, match=r"r\.wav: an impulse response must not be silent"):
        Acoustics(responses=(room,), reverb_probability=1.0)(sound(0.1), RATE, seeded())
