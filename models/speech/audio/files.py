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

# Audio is decoded in blocks, because a header may not know its length, or say a wrong one.
BLOCK_SAMPLES = 1 << 20
UNKNOWN_FRAMES = 1 << 40
# Hz. A header that says another rate is damaged, or was written to harm.
RATES = (1000, 768_000)
# Greatest term of the ratio of two rates. The filter between them has 20 times as many numbers.
MOST_TERM = 1 << 16
# A small file can unpack to endless silence. Speech has at most 64 samples per byte (Opus, 6 kbit/s).
FREE_SAMPLES, MOST_SAMPLES_PER_BYTE = 1 << 24, 256


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
    """Decodes the samples `[n]` of a file, at most as many as wanted. Memory follows what there is, not the header.

    Args:
        stream: the file.
        first: number of samples before the wanted ones.
        wanted: number of samples; infinity for all.
        most: samples that the file may have.
        place: names the file.
        channels: whose mean is taken. Default None: all.
    """
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
    # Slow to import, and most runs neither resample nor change the speed.
    from scipy.signal import resample_poly

    return resample_poly(waveform, ratio.numerator, ratio.denominator)
