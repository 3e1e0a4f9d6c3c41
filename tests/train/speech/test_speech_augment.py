"""Masks against their probabilities, and resampled sines against sines."""

import numpy as np
import pytest
import torch

from favor.models.speech import resample
from favor.train.speech.augment import SpecAugment, change_speed

RATE = 16000


def sine(frequency, samples, rate=RATE):
    return np.sin(2 * np.pi * frequency * np.arange(samples) / rate).astype(np.float32)


def covered(size, width):
    """Probability of each of `size` places to be masked by one stretch of width 0..`width`, by counting all of them."""
    chance = np.zeros(size)
    for wide in range(width + 1):
        for start in range(size - wide + 1):
            chance[start : start + wide] += 1 / (width + 1) / (size - wide + 1)
    return chance


@pytest.mark.parametrize("axis", ["frequency", "time"])
def test_one_mask_has_the_probabilities_of_all_masks(axis):
    draws, size, width = 20000, 12, 5
    if axis == "frequency":
        augment = SpecAugment(frequency_masks=1, frequency_width=width, time_masks=0)
        shape = (draws, 1, size)
    else:
        augment = SpecAugment(frequency_masks=0, time_masks=1, time_part=(width + 0.5) / size)
        shape = (draws, size, 1)
    lengths = torch.full((draws,), shape[1])
    masked = augment(torch.ones(shape), lengths, torch.Generator().manual_seed(0)).view(draws, size) == 0
    widths = masked.sum(1)
    assert ((masked[:, 1:] & ~masked[:, :-1]).sum(1) + masked[:, 0] <= 1).all()
    shares = torch.bincount(widths, minlength=width + 1) / draws
    expected = 1 / (width + 1)
    assert len(shares) == width + 1
    np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(expected / draws))
    chance = covered(size, width)
    np.testing.assert_allclose(masked.double().mean(0), chance, atol=4 * np.sqrt(chance.max() / draws))


def test_masks_are_bands_within_each_utterance():
    lengths = torch.tensor([400, 200, 100, 19])
    features = torch.randn(4, 400, 80, generator=torch.Generator().manual_seed(1)) + 10
    features[torch.arange(400) >= lengths[:, None]] = 0
    most = torch.zeros(4)
    for seed in range(50):
        got = SpecAugment(value=-1.0)(features, lengths, torch.Generator().manual_seed(seed))
        masked = got == -1
        assert torch.equal(got[~masked], features[~masked])
        for row, length in enumerate(lengths.tolist()):
            times, bands = masked[row, :, :].all(1), masked[row, :, :].all(0)
            assert torch.equal(masked[row], times[:, None] | bands)
            assert not times[length:].any()
            assert bands.sum() <= 54
            assert times.sum() <= 10 * int(0.05 * length)
            most[row] = max(most[row], times.sum())
    assert most[3] == 0
    assert (most[:3] > 0.2 * lengths[:3]).all()


def test_masks_differ_between_utterances_and_follow_the_generator():
    features, lengths = torch.ones(8, 300, 80), torch.full((8,), 300)
    one, two = (SpecAugment()(features, lengths, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert len({row.numpy().tobytes() for row in one}) == 8
    torch.manual_seed(3)
    default = SpecAugment()(features, lengths)
    torch.manual_seed(3)
    assert torch.equal(SpecAugment()(features, lengths), default)
    assert not torch.equal(SpecAugment()(features, lengths), default)
    assert (features == 1).all()


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1, 1.25])
def test_speed_scales_frequency_and_length(factor):
    waveform = sine(1000, 16001)
    faster = change_speed(waveform, factor)
    assert faster.dtype == np.float32
    assert len(faster) == -(-16001 * 100 // round(factor * 100))
    middle = slice(500, len(faster) - 500)
    np.testing.assert_allclose(faster[middle], sine(1000 * factor, len(faster))[middle], atol=5e-3)


@pytest.mark.parametrize(("before", "after"), [(44100, 16000), (8000, 16000), (16000, 16000), (48000, 16000)])
def test_resampled_sine(before, after):
    waveform = resample(sine(440, before, before), before, after)
    assert len(waveform) == after
    np.testing.assert_allclose(waveform[500:-500], sine(440, after, after)[500:-500], atol=5e-3)


@pytest.mark.parametrize(
    "rates", [(0, 16000), (16000, -1), (16000.5, 16000), (2**31 - 1, 16000), (16000, float("nan"))]
)
def test_refuses_rates(rates):
    with pytest.raises(ValueError, match="sampling rates must be whole numbers of 1000 to 768000 Hz"):
        resample(sine(440, 1000), *rates)
