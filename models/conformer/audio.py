"""Audio files as waveforms: FLAC, MP3, WAV and what else libsndfile knows, at any sampling rate."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from favor._parts import needs

if TYPE_CHECKING:
    import soundfile

# Audio is decoded in blocks, because a header may not know its length.
BLOCK_SAMPLES = 1 << 20
UNKNOWN_FRAMES = 1 << 40


def read_file(
    source: str | Path | bytes, sampling_rate: int = 16000, resample: bool = False, place: str | None = None
) -> np.ndarray:
    """Reads the samples of an audio file of any format that libsndfile knows (FLAC, WAV, MP3, OGG, ...).

    A file that is cut short is noticed if its header says its length, as headers of FLAC and of most MP3 files do; the
    header of a WAV file does not suffice.

    Args:
        source: a path, or the bytes of a file.
        sampling_rate: wanted rate in Hz. Default 16000.
        resample: whether audio of another rate is resampled. Default False: it is an error.
        place: names the audio in messages. Default None: the path.

    Returns:
        `[n]`, float32, in [-1, 1]; channels are averaged.

    Raises:
        ValueError: if the file is missing, empty, not audio, cut short or damaged, or has another rate; the message
            names the file.
    """
    place = place or ("bytes" if isinstance(source, bytes) else str(source))
    with _opened(source, place) as stream:
        rate, expected = stream.samplerate, stream.frames
        samples = _decode(stream)
    if not len(samples):
        raise ValueError(f"{place}: holds no samples")
    if len(samples) < expected < UNKNOWN_FRAMES:
        raise ValueError(f"{place}: is cut short: {len(samples)} of {expected} samples can be decoded")
    if not np.isfinite(samples).all():
        raise ValueError(f"{place}: holds samples that are not finite")
    if rate != sampling_rate:
        if not resample:
            raise ValueError(
                f"{place}: has {rate} Hz, expected {sampling_rate}: resample=True (--resample) converts it"
            )
        samples = stretch(samples, Fraction(sampling_rate, rate))
    return samples


def file_seconds(path: str | Path) -> float:
    """Length of an audio file in seconds, as its header says; raises ValueError as `read_file`."""
    with _opened(path, str(path)) as stream:
        return stream.frames / stream.samplerate


def read_piece(path: str | Path, sampling_rate: int, samples: int | None = None, place: float = 0.0) -> np.ndarray:
    """Reads a part of an audio file, converted to a sampling rate; of several channels the first.

    Args:
        path: the file.
        sampling_rate: wanted rate in Hz.
        samples: wanted number. Default None: the whole file.
        place: where the piece begins, from 0 for the start of the file up to 1 for the last place where it fits. A file
            that is shorter than the piece is repeated, from its start. Default 0.

    Returns:
        `[samples]`, float32.

    Raises:
        ValueError: as `read_file`; the message names the file.
    """
    with _opened(path, str(path)) as stream:
        if stream.frames >= UNKNOWN_FRAMES:
            raise ValueError(f"{path}: its header does not say how long it is")
        wanted = stream.frames if samples is None else math.ceil(samples * stream.samplerate / sampling_rate)
        stream.seek(math.floor(place * max(0, stream.frames - wanted)))
        piece = stream.read(wanted, dtype="float32", always_2d=True)[:, 0]
        ratio = Fraction(sampling_rate, stream.samplerate)
    if not len(piece) or not np.isfinite(piece).all():
        raise ValueError(f"{path}: holds {'samples that are not finite' if len(piece) else 'no samples'}")
    piece = stretch(piece, ratio)
    return piece if samples is None else np.resize(piece, samples)


@contextmanager
def _opened(source: str | Path | bytes, place: str) -> Iterator[soundfile.SoundFile]:
    """The decoder of a file; what goes wrong before and inside is a ValueError that names it."""
    needs("speech", "soundfile")
    import soundfile

    handle: Any
    try:
        if isinstance(source, bytes):
            size, handle = len(source), io.BytesIO(source)
        else:
            size, handle = Path(source).stat().st_size, str(source)
        if size == 0:
            raise ValueError(f"{place}: the file is empty")
        with soundfile.SoundFile(handle) as stream:
            yield stream
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{place}: cannot be decoded: {getattr(error, 'error_string', error)}") from error


def _decode(stream: soundfile.SoundFile) -> np.ndarray:
    """Decodes all samples `[n]`, the mean of the channels."""
    blocks = []
    while True:
        block = stream.read(BLOCK_SAMPLES, dtype="float32", always_2d=True)
        blocks.append(block[:, 0] if block.shape[1] == 1 else block.mean(1, dtype=np.float32))
        if len(block) < BLOCK_SAMPLES:
            return np.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def resample(waveform: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Gives a waveform at another sampling rate, by scipy's polyphase filter (Kaiser window).

    Args:
        waveform: samples `[n]`.
        from_rate: their rate in Hz.
        to_rate: the wanted rate in Hz.

    Returns:
        `[ceil(n to_rate / from_rate)]`, of the same type.

    Raises:
        ValueError: for rates that are not positive integers.
    """
    if from_rate != int(from_rate) or to_rate != int(to_rate) or min(from_rate, to_rate) < 1:
        raise ValueError(f"from_rate and to_rate must be positive integers in Hz, got {from_rate} and {to_rate}.")
    return stretch(waveform, Fraction(int(to_rate), int(from_rate)))


def stretch(waveform: np.ndarray, ratio: Fraction) -> np.ndarray:
    """Gives `ratio` times as many samples of one sound."""
    if ratio == 1:
        return waveform
    needs("speech", "scipy")
    # Slow to import, and most runs neither resample nor change the speed.
    from scipy.signal import resample_poly

    return resample_poly(waveform, ratio.numerator, ratio.denominator)
