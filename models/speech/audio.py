"""Audio: files (FLAC, MP3, WAV and what else libsndfile knows) as waveforms at any rate, and checks of waveforms."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from favor._parts import needs

if TYPE_CHECKING:
    import soundfile

logger = logging.get_logger(__name__)

# Audio is decoded in blocks, because a header may not know its length, or say a wrong one.
BLOCK_SAMPLES = 1 << 20
UNKNOWN_FRAMES = 1 << 40
# Hz. A header that says another rate is damaged, or was written to harm.
RATES = (1000, 768_000)
# Greatest term of the ratio of two rates. The filter between them has 20 times as many numbers.
MOST_TERM = 1 << 16
# A small file can unpack to endless silence. Speech has at most 64 samples per byte (Opus, 6 kbit/s).
FREE_SAMPLES, MOST_SAMPLES_PER_BYTE = 1 << 24, 256
# Greatest sizes that a `preprocessor_config.json` may ask for, so that memory follows the audio.
MOST = {
    "feature_size": 512,
    "sampling_rate": RATES[1],
    "hop_length": 1 << 15,
    "win_length": 1 << 15,
    "n_fft": 1 << 15,
    "chunk_length": 1 << 15,
}
MOST_FRAMES, MOST_OVERLAP = 1000, 64  # frames in a second of audio, and frames that see the same sample


def read_file(
    source: str | Path | bytes,
    sampling_rate: int = 16000,
    resample: bool = False,
    place: str | None = None,
    offset: float = 0.0,
    seconds: float | None = None,
) -> np.ndarray:
    """Reads the samples of an audio file of any format that libsndfile knows (FLAC, WAV, MP3, OGG, ...).

    A file that is cut short is noticed if its header says its length, as headers of FLAC and of most MP3 files do; the
    header of a WAV file does not suffice.

    Args:
        source: a path, or the bytes of a file.
        sampling_rate: wanted rate in Hz. Default 16000.
        resample: whether audio of another rate is resampled. Default False: it is an error.
        place: names the audio in messages. Default None: the path.
        offset: seconds of the file before the wanted piece. Default 0.
        seconds: greatest length of the piece; the file may end before. Default None: up to the end of the file.

    Returns:
        `[n]`, float32, in [-1, 1]; channels are averaged.

    Raises:
        ValueError: if the file is missing, empty, not audio, cut short or damaged, has another rate, or unpacks to
            more than 256 samples per byte; the message names the file.

    Example:
        >>> import io
        >>> import numpy as np
        >>> import soundfile
        >>> from favor.models.speech import read_file
        >>> file = io.BytesIO()
        >>> soundfile.write(file, np.zeros(800), 8000, format="FLAC")
        >>> read_file(file.getvalue(), resample=True).shape
        (1600,)
    """
    place = place or ("bytes" if isinstance(source, bytes) else str(source))
    if not (offset >= 0 and (seconds is None or seconds >= 0)):
        raise ValueError(f"{place}: offset and seconds must be at least 0, got {offset} and {seconds}")
    with _opened(source, place) as (stream, most):
        ratio = _ratio(stream.samplerate, sampling_rate, place)
        if ratio != 1 and not resample:
            raise ValueError(
                f"{place}: has {stream.samplerate} Hz, expected {sampling_rate}: resample=True converts it"
            )
        first = round(min(offset * stream.samplerate, UNKNOWN_FRAMES))
        if first >= stream.frames > 0:
            raise ValueError(f"{place}: begins after {offset:g} s of {stream.frames / stream.samplerate:.2f} s")
        wanted = math.inf if seconds is None else round(min(seconds * stream.samplerate, UNKNOWN_FRAMES))
        expected = min(stream.frames - first, wanted)
        samples = _decode(stream, first, wanted, most, place)
    if len(samples) < expected < UNKNOWN_FRAMES:
        raise ValueError(f"{place}: is cut short: {len(samples)} of {expected} samples can be decoded")
    return stretch(samples, ratio)


def file_seconds(path: str | Path) -> float:
    """Length of an audio file in seconds, as its header says; raises ValueError as `read_file`."""
    with _opened(path, str(path)) as (stream, _):
        return stream.frames / stream.samplerate


def read_piece(path: str | Path, sampling_rate: int, samples: int | None = None, place: float = 0.0) -> np.ndarray:
    """Reads samples `[n]` of an audio file, or all, converted to a rate in Hz; of several channels the first.

    The piece begins at a place from 0, the start of the file, to 1, the last one where it fits. A file that is shorter
    than the piece is repeated, from its start. Raises ValueError as `read_file`.
    """
    with _opened(path, str(path)) as (stream, most):
        ratio = _ratio(stream.samplerate, sampling_rate, str(path))
        if stream.frames >= UNKNOWN_FRAMES:
            raise ValueError(f"{path}: its header does not say how long it is")
        wanted = stream.frames if samples is None else min(stream.frames, math.ceil(samples / ratio))
        piece = _decode(stream, math.floor(place * (stream.frames - wanted)), wanted, most, str(path), channels=1)
    piece = stretch(piece, ratio)
    return piece if samples is None else np.resize(piece, samples)


class _Bytes(io.BytesIO):
    """Bytes as a file, in which a seek to a place before the start does nothing, as headers can ask for one."""

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


@contextmanager
def _opened(source: str | Path | bytes, place: str) -> Iterator[tuple[soundfile.SoundFile, int]]:
    """The decoder of a file and how many samples it may have; what goes wrong is a ValueError that names the file."""
    needs("speech", "soundfile")
    import soundfile

    handle: Any
    try:
        if isinstance(source, bytes):
            size, handle = len(source), _Bytes(source)
        else:
            size, handle = Path(source).stat().st_size, str(source)
        if size == 0:
            raise ValueError(f"{place}: the file is empty")
        with soundfile.SoundFile(handle) as stream:
            yield stream, max(FREE_SAMPLES, MOST_SAMPLES_PER_BYTE * size)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{place}: cannot be decoded: {getattr(error, 'error_string', error)}") from error


def _decode(
    stream: soundfile.SoundFile, first: int, wanted: float, most: int, place: str, channels: int | None = None
) -> np.ndarray:
    """Decodes samples `[n]` of a file from the place `first` on, the mean of all channels or the first ones."""
    if first:
        stream.seek(first)
    blocks, found, block = [], 0, max(1, BLOCK_SAMPLES // stream.channels)
    while found < wanted:
        asked = int(min(block, wanted - found))
        read = stream.read(asked, dtype="float32", always_2d=True)[:, :channels]
        blocks.append(np.ascontiguousarray(read[:, 0]) if read.shape[1] == 1 else read.mean(1, dtype=np.float32))
        found += len(read)
        if found > most:
            raise ValueError(f"{place}: unpacks to more than {most} samples, which no speech of this size does")
        if len(read) < asked:
            break
    if not found:
        raise ValueError(f"{place}: holds no samples")
    samples = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
    if not np.isfinite(samples).all():
        raise ValueError(f"{place}: holds samples that are not finite")
    return samples


def _ratio(from_rate: float, to_rate: float, place: str) -> Fraction:
    """Gives how many samples of a rate replace one of another; raises ValueError for rates that no recording has."""
    for rate in (from_rate, to_rate):
        if not RATES[0] <= rate <= RATES[1] or rate != int(rate):
            raise ValueError(
                f"{place}: sampling rates must be whole numbers of {RATES[0]} to {RATES[1]} Hz, got {rate}"
            )
    ratio = Fraction(int(to_rate), int(from_rate))
    if max(ratio.numerator, ratio.denominator) > MOST_TERM:
        raise ValueError(
            f"{place}: {from_rate} Hz cannot be converted to {to_rate} Hz: {ratio} has a term above {MOST_TERM}"
        )
    return ratio


def resample(waveform: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Gives a waveform at another sampling rate, by scipy's polyphase filter (Kaiser window).

    Args:
        waveform: samples `[n]`.
        from_rate: their rate in Hz.
        to_rate: the wanted rate in Hz.

    Returns:
        `[ceil(n to_rate / from_rate)]`, of the same type.

    Raises:
        ValueError: for rates that are no whole numbers of 1,000 to 768,000 Hz, or whose ratio in lowest terms has a
            term above 65,536.

    Example:
        >>> import numpy as np
        >>> from favor.models.speech import resample
        >>> resample(np.zeros(441), 44100, 16000).shape
        (160,)
    """
    return stretch(waveform, _ratio(from_rate, to_rate, "waveform"))


def stretch(waveform: np.ndarray, ratio: Fraction) -> np.ndarray:
    """Gives `ratio` times as many samples of one sound."""
    if ratio == 1:
        return waveform
    needs("speech", "scipy")
    from scipy.signal import resample_poly  # slow to import, and most runs neither resample nor change the speed

    return resample_poly(waveform, ratio.numerator, ratio.denominator)


def check_sizes(feature_size: int, sampling_rate: int, hop_length: int, n_fft: int, **others: int) -> None:
    """Raises TypeError or ValueError for sizes of an extractor out of the range of `MOST`, or too many frames."""
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
    """Checks one waveform of floats, `[n]`, or several, `[B, n]` or a list, of at least `least` samples; dithers."""
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
    """Checks samples of one recording and gives them as float32 `[n]`."""
    pieces = waveforms(audio, 0)
    if len(pieces) != 1:
        raise ValueError(f"audio must be one mono waveform [n], got {len(pieces)} rows. Average the channels first.")
    return pieces[0]
