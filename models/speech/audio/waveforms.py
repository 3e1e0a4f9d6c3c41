"""Checks of waveforms, and of the sizes of what makes features of them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from favor.models.speech.audio.files import RATES

logger = logging.get_logger(__name__)

# Greatest sizes that a `preprocessor_config.json` may ask for, so that memory follows the audio.
MOST = {
    "feature_size": 512,
    "sampling_rate": RATES[1],
    "hop_length": 1 << 15,
    "win_length": 1 << 15,
    "n_fft": 1 << 15,
    "chunk_length": 1 << 15,
}
# Frames in a second of audio, and frames that see the same sample.
MOST_FRAMES, MOST_OVERLAP = 1000, 64


def check_sizes(feature_size: int, sampling_rate: int, hop_length: int, n_fft: int, **others: int) -> None:
    """Checks the sizes of an extractor before memory is taken for them.

    Args:
        feature_size, sampling_rate, hop_length, n_fft: of the extractor.
        **others: more sizes of `MOST`.

    Raises:
        TypeError: for a size that is no whole number.
        ValueError: for one that is out of range, or too many frames for the audio.
    """
    sizes = {"feature_size": feature_size, "sampling_rate": sampling_rate, "hop_length": hop_length, "n_fft": n_fft}
    for name, size in {**sizes, **others}.items():
        if not isinstance(size, Integral):
            raise TypeError(f"{name} must be a whole number, got {size!r}.")
        if not 1 <= size <= MOST[name]:
            raise ValueError(f"{name} must be 1 to {MOST[name]}, got {size}.")
    if hop_length < max(sampling_rate / MOST_FRAMES, n_fft / MOST_OVERLAP):
        raise ValueError(
            f"hop_length must be at least sampling_rate / {MOST_FRAMES} and n_fft / {MOST_OVERLAP}, got {hop_length}, "
            f"{sampling_rate} and {n_fft}."
        )


def check_call(given: int | None, expected: int, return_attention_mask: bool | None) -> None:
    """Raises ValueError for another sampling rate than the expected one, or without a mask; warns without a rate."""
    if return_attention_mask is False:
        raise ValueError("return_attention_mask=False: padding needs the mask; leave it at None.")
    if given is None:
        logger.warning_once(f"no sampling_rate was given: the audio is taken to have {expected} Hz.")
    elif given != expected:
        raise ValueError(
            f"sampling_rate must be {expected}, got {given}: resample the audio, with favor.models.speech.resample."
        )


def waveforms(raw: Any, least: int, dither: float = 0.0, generator: torch.Generator | None = None) -> list[Tensor]:
    """Checks one or several waveforms and gives them as float32 tensors `[n]`.

    Args:
        raw: floats in [-1, 1] of one waveform, `[n]`, or several, `[B, n]` or a list of `[n]`.
        least: samples that each must have.
        dither: standard deviation of Gaussian noise that is added. Default 0.
        generator: of that noise. Default None: torch's.
    """
    if isinstance(raw, (list, tuple)) and len(raw) and not np.isscalar(raw[0]) and np.ndim(raw[0]) > 0:
        several = [_tensor(item) for item in raw]
    else:
        whole = _tensor(raw)
        several = list(whole) if whole.ndim > 1 else [whole]
    if not several:
        raise ValueError("raw_speech must hold at least one waveform, got none.")
    for index, waveform in enumerate(several):
        if waveform.ndim != 1:
            raise ValueError(
                f"raw_speech must be one mono waveform [n], [B, n], or a list of [n]; waveform {index} has shape "
                f"{list(waveform.shape)}. Average the channels first."
            )
        if len(waveform) < least:
            raise ValueError(
                f"waveform {index} has {len(waveform)} samples, too few for one window of {least}: leave it out or pad "
                "it with zeros."
            )
        if not waveform.isfinite().all():
            raise ValueError(f"raw_speech must be finite, waveform {index} holds NaN or infinity.")
    return [one + dither * torch.randn(one.shape, generator=generator) for one in several] if dither else several


def _tensor(values: Any) -> Tensor:
    """Turns an array, tensor or list of floats into float32 on the CPU."""
    if isinstance(values, (list, tuple)):
        values = np.asarray(values, dtype=np.float64)
    tensor = torch.as_tensor(values)
    if not tensor.is_floating_point():
        raise TypeError(f"raw_speech must hold floats in [-1, 1], got {tensor.dtype}: divide 16-bit samples by 32768.")
    return tensor.detach().to("cpu", torch.float32)


def check_open(has_ended: bool) -> None:
    """Raises ValueError for a recording that has ended with `finish`."""
    if has_ended:
        raise ValueError("the recording has ended with finish: call reset to begin another one.")


def one_waveform(audio: Any) -> Tensor:
    """Checks samples of one recording and gives them as float32 `[n]`.

    Raises:
        TypeError: for integers. ValueError: for samples of several channels or not finite.
    """
    pieces = waveforms(audio, 0)
    if len(pieces) != 1:
        raise ValueError(f"audio must be one mono waveform [n], got {len(pieces)} rows. Average the channels first.")
    return pieces[0]
