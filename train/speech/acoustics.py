"""Noise and reverberation of waveforms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from favor._parts import needs
from favor.models.speech.audio import read_piece
from favor.train.speech.data import AUDIO

Range = tuple[float, float]
_ANY_RATE = 16000


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
        """Gives a changed copy of a waveform.

        Args:
            waveform: samples `[n]`, float32.
            sampling_rate: in Hz. Files of other rates are converted.
            generator: draws everything; the result depends on its state alone.

        Returns:
            `[n]`, float32; samples may be greater than 1.

        Raises:
            ValueError: for a file that cannot be read; the message names it.
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
    """Adds noise at a signal-to-noise ratio.

    Args:
        speech: samples `[n]`.
        noise: samples `[n]`; they are scaled.
        snr: 10 log10 of the mean power of `speech` over that of the noise that is added, in dB.

    Returns:
        `[n]`. If one of the two is silent, there is no such ratio, and this is `speech`.
    """
    speech_power, noise_power = _power(speech), _power(noise)
    if not (speech_power and noise_power):
        return speech
    return speech + noise * math.sqrt(speech_power / noise_power * 10 ** (-snr / 10))


def reverberate(speech: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Convolves speech with the impulse response of a room.

    The greatest sample of the response is taken for the direct path: it does not delay the speech.

    Args:
        speech: samples `[n]`.
        response: samples `[k]`, at least one of which is not 0.

    Returns:
        `[n]`, with the mean power of `speech`.
    """
    needs("speech", "scipy")
    # Slow to import, and most runs do not reverberate.
    from scipy.signal import fftconvolve

    peak = int(np.abs(response).argmax())
    wet = fftconvolve(speech, response / response[peak])[peak : peak + len(speech)]
    power = _power(wet)
    return wet * math.sqrt(_power(speech) / power) if power else speech


def synthetic_response(rt60: float, sampling_rate: int, generator: torch.Generator) -> np.ndarray:
    """Makes an impulse response: the direct path, then Gaussian noise whose power decays by 60 dB in `rt60` seconds.

    This is the statistical model of late reverberation (Polack 1988). It has no single early reflections, and no
    colour. Direct path and noise have the same energy on average, as at the critical distance of a room.

    Args:
        rt60: reverberation time in seconds.
        sampling_rate: in Hz.
        generator: draws the noise.

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

    Args:
        folder: the folder.
        option: that names it, for messages.

    Raises:
        ValueError: if there are none, or one cannot be read; the message names it.
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
