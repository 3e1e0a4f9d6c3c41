"""Augmentation of speech: speed, noise and reverberation of the waveform, masks on the features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from scipy.signal import fftconvolve
from torch import Tensor

from favor.models.speech.audio import read_piece, stretch
from favor.train.speech.data import AUDIO

Range = tuple[float, float]
_ANY_RATE = 16000


@dataclass(frozen=True)
class SpecAugment:
    """Masks bands of frequency and stretches of time, drawn anew for every utterance.

    Widths are drawn uniformly from 0 to the greatest width, then places uniformly from those where the mask fits. Masks
    may overlap. This is SpecAugment (Park et al. 2019, arXiv:1904.08779, section 2) without time warping, with times as
    fractions of the utterance (arXiv:1912.05533, section 3) and the numbers of the Conformer paper (arXiv:2005.08100).

    Args:
        frequency_masks: number of frequency masks.
        frequency_width: greatest width of a frequency mask in bins.
        time_masks: number of time masks.
        time_part: greatest width of a time mask as a fraction of the utterance's frames.
        value: the value of masked features; 0 is the mean of normalised features.
    """

    frequency_masks: int = 2
    frequency_width: int = 27
    time_masks: int = 10
    time_part: float = 0.05
    value: float = 0.0

    def __post_init__(self) -> None:
        if min(self.frequency_masks, self.frequency_width, self.time_masks) < 0 or not 0 <= self.time_part <= 1:
            raise ValueError(f"spec_augment's numbers must be at least 0, and its part at most 1, got {self}")

    def __call__(self, features: Tensor, lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gives masked copies of features `[B, T, F]`, right padded, whose time masks lie within the lengths `[B]`.

        The generator may be on another device than the features. Default None: PyTorch's generator of their device.
        """
        _, frames, bins = features.shape
        every = torch.full_like(lengths, bins)
        width = torch.full_like(lengths, min(self.frequency_width, bins))
        bands = _masks(every, width, self.frequency_masks, bins, generator)
        times = _masks(lengths, (self.time_part * lengths.double()).long(), self.time_masks, frames, generator)
        return features.masked_fill(bands[:, None, :] | times[:, :, None], self.value)


def _masks(lengths: Tensor, widths: Tensor, count: int, size: int, generator: torch.Generator | None) -> Tensor:
    """Draws `count` random stretches of at most `widths [B]` inside `lengths [B]`; returns their union `[B, size]`."""
    device = lengths.device if generator is None else generator.device
    drawn = torch.rand(2, len(lengths), count, generator=generator, device=device)
    wide, place = drawn.to(lengths.device)
    wide = (wide * (widths[:, None] + 1)).floor()  # floor(u (n + 1)) is uniform on 0..n
    start = (place * (lengths[:, None] - wide + 1)).floor()
    position = torch.arange(size, device=lengths.device)
    inside = (position >= start[..., None]) & (position < (start + wide)[..., None])
    return inside.any(1)


def change_speed(waveform: np.ndarray, factor: float) -> np.ndarray:
    """Gives a waveform `[ceil(n / factor)]` played faster (factor > 1) or slower; its pitch changes too.

    Speed perturbation of Ko et al. 2015, "Audio augmentation for speech recognition". The nearest fraction with a
    denominator up to 100 is used. Raises ValueError for a factor that is not between 0.1 and 10.
    """
    if not 0.1 <= factor <= 10:
        raise ValueError(f"factor must be between 0.1 and 10, got {factor}.")
    return stretch(waveform, 1 / Fraction(factor).limit_denominator(100))


@dataclass(frozen=True)
class Acoustics:
    """Reverberates waveforms and adds noise to them, in this order, by chance.

    Numbers are drawn uniformly from their ranges, and files with equal probability.

    Args:
        noises: files of noise; a piece of one, at a drawn place, is added. Default (): no noise.
        snr: range of signal-to-noise ratios in dB, as in `add_noise`. Default (5, 20).
        noise_probability: probability of noise. Default 0.5.
        responses: files of room impulse responses. Default ().
        rt60: range of reverberation times in seconds of responses that `synthetic_response` makes, in the place of
            files. Default None: no such responses.
        reverb_probability: probability of reverberation. Default 0.5.
    """

    noises: tuple[Path, ...] = ()
    snr: Range = (5.0, 20.0)
    noise_probability: float = 0.5
    responses: tuple[Path, ...] = ()
    rt60: Range | None = None
    reverb_probability: float = 0.5

    def __call__(self, waveform: np.ndarray, sampling_rate: int, generator: torch.Generator) -> np.ndarray:
        """Gives a changed copy of a waveform `[n]`, float32; samples may be greater than 1.

        Files of other sampling rates are converted. The result depends on the state of the generator alone. Raises
        ValueError for a file that cannot be read; the message names it.
        """
        if (self.responses or self.rt60) and _uniform((0, 1), generator) < self.reverb_probability:
            waveform = reverberate(waveform, self._response(sampling_rate, generator))
        if self.noises and _uniform((0, 1), generator) < self.noise_probability:
            path, place = _choose(self.noises, generator), _uniform((0, 1), generator)
            noise = read_piece(path, sampling_rate, len(waveform), place)
            waveform = add_noise(waveform, noise, _uniform(self.snr, generator))
        return waveform

    def _response(self, sampling_rate: int, generator: torch.Generator) -> np.ndarray:
        if self.rt60 is not None:
            return synthetic_response(_uniform(self.rt60, generator), sampling_rate, generator)
        path = _choose(self.responses, generator)
        response = read_piece(path, sampling_rate)
        if not response.any():
            raise ValueError(f"{path}: an impulse response must not be silent")
        return response


def add_noise(speech: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Adds noise `[n]`, scaled, to speech `[n]` at a signal-to-noise ratio.

    The ratio is 10 log10 of the mean power of `speech` over that of the noise that is added, in dB. If one of the two
    is silent, there is no such ratio, and the result is `speech`.
    """
    speech_power, noise_power = _power(speech), _power(noise)
    if not (speech_power and noise_power):
        return speech
    return speech + noise * math.sqrt(speech_power / noise_power * 10 ** (-snr / 10))


def reverberate(speech: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Convolves speech `[n]` with the impulse response `[k]` of a room; the result `[n]` has the power of `speech`.

    The greatest sample of the response, which must not be 0, is the direct path: it does not delay the speech.
    """
    peak = int(np.abs(response).argmax())
    wet = fftconvolve(speech, response / response[peak])[peak : peak + len(speech)]
    power = _power(wet)
    return wet * math.sqrt(_power(speech) / power) if power else speech


def synthetic_response(rt60: float, sampling_rate: int, generator: torch.Generator) -> np.ndarray:
    """Makes an impulse response: the direct path, then Gaussian noise whose power decays by 60 dB in `rt60` seconds.

    This is the statistical model of late reverberation (Polack 1988). It has no single early reflections, and no
    colour. Direct path and noise have the same energy on average, as at the critical distance of a room.

    Returns:
        `[round(rt60 * sampling_rate) + 1]`, float32; the direct path is the first sample, 1.
    """
    samples = max(1, round(rt60 * sampling_rate))
    decay = 10 ** (-3 * np.arange(1, samples + 1) / samples)
    decay /= math.sqrt(np.square(decay).sum())
    noise = torch.randn(samples, generator=generator, dtype=torch.float64).numpy()
    return np.concatenate([[1.0], decay * noise]).astype(np.float32)


def audio_files(folder: str, option: str) -> tuple[Path, ...]:
    """Lists the audio files of a folder and below it, sorted by path, and decodes a sample of each one.

    Raises ValueError if there are none, or one cannot be read; the message names it, or the option of the folder.
    """
    found = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in AUDIO and path.is_file())
    if not found:
        what = "has none that can be read" if Path(folder).is_dir() else "is no folder"
        raise ValueError(f"{option} must be a folder with {', '.join(AUDIO)} files, but {folder} {what}")
    for path in found:
        read_piece(path, _ANY_RATE, 1)
    return tuple(found)


def _power(waveform: np.ndarray) -> float:
    return float(np.mean(np.square(waveform, dtype=np.float64))) if len(waveform) else 0.0


def _uniform(range_: Range, generator: torch.Generator) -> float:
    low, high = range_
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _choose(paths: tuple[Path, ...], generator: torch.Generator) -> Path:
    return paths[int(torch.randint(len(paths), (), generator=generator))]
