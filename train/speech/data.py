"""Utterances: their data, how their audio is read, and which of them cannot be used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from favor.models.conformer.configuration_conformer import subsampled_frames
from favor.models.speech import read_file

# Endings of files that are audio.
AUDIO = (".flac", ".mp3", ".wav")
LISTED = 20


class StoredAudio(Protocol):
    """Audio that is not in a file of its own."""

    def read(self) -> bytes:
        """Gives the bytes of the audio file."""

    def __str__(self) -> str:
        """Names the place of the audio."""


@dataclass(frozen=True)
class Piece:
    """A piece of a longer recording.

    Args:
        recording: the audio file.
        offset: seconds of the recording before the piece.
        seconds: length of the piece. Default None: up to the end of the recording.
    """

    recording: Path
    offset: float
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.recording} from {self.offset} s{'' if self.seconds is None else f' for {self.seconds} s'}"


@dataclass(frozen=True)
class Utterance:
    """One piece of speech and its transcript.

    Args:
        id: unique name.
        text: normalised transcript.
        audio: path of an audio file, its bytes, an object that reads them, or a piece of a recording.
        seconds: length of the audio. Default None: not known before `prepare`.
        speaker: who speaks. Default None: not known.
        chapter: the recording that it was cut from. Default None: not known.
        parts: utterances whose audio, one after another, is the audio of this one; `audio` is then not read. Default
            (): it is not made of others.
    """

    id: str
    text: str
    audio: Path | bytes | StoredAudio | Piece
    seconds: float | None = None
    speaker: str | None = None
    chapter: str | None = None
    parts: tuple[Utterance, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Utterance]) -> Utterance:
        """Joins prepared utterances of one chapter, with a space between their transcripts."""
        first = parts[0]
        return cls(
            id=first.id if len(parts) == 1 else f"{first.id}..{parts[-1].id}",
            text=" ".join(part.text for part in parts),
            audio=first.audio,
            seconds=sum(part.seconds or 0.0 for part in parts),
            speaker=first.speaker,
            chapter=first.chapter,
            parts=tuple(parts),
        )

    @property
    def place(self) -> str:
        """Names the place of the audio, for messages."""
        return f"{len(self.audio)} bytes" if isinstance(self.audio, bytes) else str(self.audio)


@dataclass
class Skipped:
    """Counts the utterances that are left out and keeps the reasons, up to a limit.

    Args:
        max_bad: a whole number is the greatest number of utterances to leave out, a float is the greatest fraction of
            all. Default 0: the first one raises.

    Attributes:
        reasons: for each name the reason why it is left out, in the order of discovery.

    Raises:
        ValueError: for a negative limit or a float above 1.
    """

    max_bad: int | float = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the limit."""
        if self.max_bad < 0 or (isinstance(self.max_bad, float) and self.max_bad > 1):
            raise ValueError(f"max_bad must be a whole number or a float between 0 and 1, got {self.max_bad!r}.")

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, name: str, reason: str) -> None:
        """Adds an utterance; raises ValueError if `max_bad` is a whole number and there are now more."""
        self.reasons[name] = reason
        if not isinstance(self.max_bad, float) and len(self) > self.max_bad:
            raise ValueError(self.describe(LISTED))

    def check(self, total: int) -> None:
        """Raises ValueError if more than the fraction `max_bad` of `total` utterances is left out."""
        if isinstance(self.max_bad, float) and len(self) > self.max_bad * total:
            raise ValueError(f"of {total} utterances {self.describe(LISTED)}")

    def describe(self, most: int | None = None) -> str:
        """Lists all names and reasons, one per line; with `most`, only the last `most` that were found."""
        lines = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        hidden = 0 if most is None else max(0, len(lines) - most)
        head = f"{len(lines)} cannot be used (max_bad is {self.max_bad})"
        if most is not None and not isinstance(self.max_bad, float):
            head += f"{', the first unusable file' if len(lines) == 1 else ''}; later ones were not read"
        return "\n".join([f"{head}, {hidden} not shown:" if hidden else f"{head}:", *lines[hidden:]])


def join(utterances: Sequence[Utterance], most: float) -> list[Utterance]:
    """Joins consecutive utterances of a chapter as long as they last at most `most` seconds together.

    Args:
        utterances: with their lengths, in the order of their chapters.
        most: seconds; a longer utterance stays alone.
    """
    groups: list[list[Utterance]] = []
    for utterance in utterances:
        last = groups[-1] if groups else []
        is_next = bool(last) and (last[0].speaker, last[0].chapter) == (utterance.speaker, utterance.chapter)
        if is_next and utterance.chapter is not None and sum(u.seconds or 0.0 for u in [*last, utterance]) <= most:
            last.append(utterance)
        else:
            groups.append([utterance])
    return [Utterance.joined(group) for group in groups]


def read_audio(
    source: Utterance | str | Path | bytes, sampling_rate: int = 16000, resample: bool = False
) -> np.ndarray:
    """Reads the samples of an utterance or of an audio file; see `favor.models.speech.read_file`.

    Args:
        source: an utterance, a path, or the bytes of a file.
        sampling_rate: wanted rate in Hz. Default 16000.
        resample: whether audio of another rate is resampled. Default False: it is an error.

    Returns:
        `[n]`, float32, in [-1, 1]; channels are averaged.

    Raises:
        ValueError: as `read_file`; the message names the place of the utterance.
    """
    if not isinstance(source, Utterance):
        return read_file(source, sampling_rate, resample)
    if source.parts:
        return np.concatenate([read_audio(part, sampling_rate, resample) for part in source.parts])
    audio: Any = source.audio
    if isinstance(audio, (str, Path, bytes)):
        return read_file(audio, sampling_rate, resample, source.place)
    if isinstance(audio, Piece):
        return read_file(audio.recording, sampling_rate, resample, source.place, audio.offset, audio.seconds)
    try:
        content = audio.read()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{source.place}: cannot be decoded: {error}") from error
    return read_file(content, sampling_rate, resample, source.place)


def needed_frames(ids: Sequence[int], ctc: bool = True) -> int:
    """Counts the encoder outputs that a transcript needs.

    Args:
        ids: tokens of the transcript.
        ctc: count one output per token, and one for the blank between two equal tokens (Graves et al. 2006, section
            3.1). Default True. False counts tokens alone: a Transducer could work with fewer outputs, but then the
            transcript does not belong to its audio.
    """
    return len(ids) + (sum(a == b for a, b in itertools.pairwise(ids)) if ctc else 0)


def check_lengths(
    utterances: Sequence[Utterance],
    processor: Any,
    skipped: Skipped | None = None,
    *,
    ctc: bool = True,
    fastest: float = 1.0,
    outputs: Callable[[int], int] = subsampled_frames,
) -> list[Utterance]:
    """Selects the utterances whose transcript fits into their audio.

    Args:
        utterances: with `seconds`.
        processor: a `ConformerProcessor`.
        skipped: takes the others. Default None: the first one raises.
        ctc: whether equal neighbouring tokens need a blank between them, as in `needed_frames`. Default True.
        fastest: greatest speed factor of the training. Default 1.
        outputs: encoder outputs for a number of feature frames. Default `subsampled_frames`.

    Returns:
        The utterances that fit, in order.

    Raises:
        ValueError: for an utterance without `seconds`, or for more misfits than `skipped` takes.
    """
    skipped = Skipped() if skipped is None else skipped
    extractor, kept, total = processor.feature_extractor, [], len(utterances) + len(skipped)
    tokens = processor.tokenizer([utterance.text for utterance in utterances])["input_ids"] if utterances else []
    for utterance, ids in zip(utterances, tokens, strict=True):
        if utterance.seconds is None:
            raise ValueError(f"utterance {utterance.id} has no length yet: prepare the utterances first.")
        samples = math.ceil(round(utterance.seconds * extractor.sampling_rate) / fastest)
        available, needed = outputs(extractor.num_frames(samples)), needed_frames(ids, ctc)
        if available >= max(needed, 1):
            kept.append(utterance)
        else:
            skipped.add(
                f"{utterance.id} ({utterance.place})",
                f"{utterance.seconds:.2f} s give {available} frames, too few for {len(ids)} tokens that need {needed}",
            )
    skipped.check(total)
    return kept


def long_enough(
    utterances: Sequence[Utterance],
    processor: Any,
    skipped: Skipped,
    outputs: Callable[[int], int] = subsampled_frames,
) -> list[Utterance]:
    """Selects the utterances that give the encoder at least one frame; the others go to `skipped`, which may raise.

    Transcripts do not matter: an evaluation must not leave out hard utterances.

    Args:
        utterances: with `seconds`.
        processor: a `ConformerProcessor`.
        skipped: takes the others.
        outputs: encoder outputs for a number of feature frames. Default `subsampled_frames`.
    """
    extractor, kept, total = processor.feature_extractor, [], len(utterances) + len(skipped)
    for utterance in utterances:
        frames = extractor.num_frames(round((utterance.seconds or 0) * extractor.sampling_rate))
        if outputs(frames):
            kept.append(utterance)
        else:
            skipped.add(f"{utterance.id} ({utterance.place})", f"{frames} feature frames, too few for the encoder")
    skipped.check(total)
    return kept
