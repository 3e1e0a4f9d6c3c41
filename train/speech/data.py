"""Utterances: their data, how their audio is read, and which of them cannot be used."""

from __future__ import annotations

import itertools
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from favor.models.conformer.configuration_conformer import subsampled_frames
from favor.models.speech import normalize_transcript, read_file
from favor.train.text.samples import is_text

AUDIO = (".flac", ".mp3", ".wav")  # endings of files that are audio
LISTED = 20
# What a column may be called, here, by NeMo, by Mozilla Common Voice and on the hub; the first name counts.
COLUMNS = {
    "audio": ("audio", "audio_filepath", "path"),
    "text": ("text", "sentence"),
    "id": ("id",),
    "seconds": ("seconds", "duration"),
    "offset": ("offset",),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "chapter": ("chapter", "chapter_id"),
}
CLIPS = "clips"  # folder of the files of Common Voice, beside its tables


class StoredAudio(Protocol):
    """Audio that is not in a file of its own."""

    def read(self) -> bytes:
        """Gives the bytes of the audio file."""

    def __str__(self) -> str:
        """Names the place of the audio."""


@dataclass(frozen=True)
class Piece:
    """A piece of a longer recording: its offset and its length in seconds, None up to the end of the recording."""

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
    """

    max_bad: int | float = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the limit; raises ValueError if it is negative, or a float above 1."""
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
    """Joins consecutive utterances of a chapter, with lengths, as long as they last at most `most` seconds together."""
    groups: list[list[Utterance]] = []
    for utterance in utterances:
        last = groups[-1] if groups else []
        is_next = bool(last) and (last[0].speaker, last[0].chapter) == (utterance.speaker, utterance.chapter)
        if is_next and utterance.chapter is not None and sum(u.seconds or 0.0 for u in [*last, utterance]) <= most:
            last.append(utterance)
        else:
            groups.append([utterance])
    return [Utterance.joined(group) for group in groups]


def from_row(row: Any, folder: Path, transcripts: bool) -> Utterance:
    """Makes an utterance from a row, an object of JSON or a row of a table, with columns of any name in `COLUMNS`.

    The audio is in the folder or in its `clips`. Raises ValueError for a bad row, and for one that lacks its text.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected one JSON object per line, got {reprlib.repr(row)}")
    if None in row:
        raise ValueError(f"has more fields than the header (in CSV, quote a text with commas): {row[None][0]!r:.60}")
    found = {
        name: row[own] for name, others in COLUMNS.items() for own in reversed(others) if row.get(own) not in (None, "")
    }
    needed = ("audio", "text") if transcripts else ("audio",)
    missing = [name for name in needed if not isinstance(found.get(name), str) or not found[name].strip()]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, got {reprlib.repr(dict(row))}")
    seconds, offset = _seconds(found, "seconds"), _seconds(found, "offset")
    told = {name: _text(found, name) for name in ("audio", "text", "id", "speaker", "chapter")}
    if not (text := normalize_transcript(told["text"] or "")) and transcripts:
        raise ValueError(f"text is empty after normalisation of {told['text']!r}")
    path = folder / str(told["audio"])
    if "path" in row and os.path.isfile(clip := folder / CLIPS / str(told["audio"])):
        path = clip
    audio = path if offset is None else Piece(path, offset, seconds)
    name = told["id"] or f"{told['audio']}{'' if offset is None else f'@{offset}'}"
    return Utterance(name, text, audio, seconds, told["speaker"], told["chapter"])


def _seconds(found: Mapping[str, Any], name: str) -> float | None:
    try:
        value = float(found.get(name, 0))
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, got {reprlib.repr(found[name])}")
    return value if name in found else None


def _text(found: Mapping[str, Any], name: str) -> str | None:
    """Gives a text or a number as a text, if there is one."""
    value = found.get(name)
    if value is None:
        return None
    if not isinstance(value, (str, int, float)) or not is_text(str(value)):
        raise ValueError(f"{name} must be a text in UTF-8, got {reprlib.repr(value)}")
    return str(value)


def read_audio(source: Utterance | str | Path | bytes, sampling_rate: int = 16000) -> np.ndarray:
    """Reads the samples of an utterance or of an audio file, `[n]`, float32, at a rate in Hz; channels are averaged.

    Raises ValueError as `favor.models.speech.read_file`; the message names the place of the utterance.
    """
    if not isinstance(source, Utterance):
        return read_file(source, sampling_rate, True)
    if source.parts:
        return np.concatenate([read_audio(part, sampling_rate) for part in source.parts])
    audio: Any = source.audio
    if isinstance(audio, Piece):
        return read_file(audio.recording, sampling_rate, True, source.place, audio.offset, audio.seconds)
    if not isinstance(audio, (str, Path, bytes)):
        try:
            audio = audio.read()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{source.place}: cannot be decoded: {error}") from error
    return read_file(audio, sampling_rate, True, source.place)


def keep(utterances: Sequence[Utterance], faults: Iterable[str | None], skipped: Skipped) -> list[Utterance]:
    """Gives the utterances whose fault is None; the others go to `skipped`, which may raise."""
    kept, total = [], len(utterances) + len(skipped)
    for utterance, fault in zip(utterances, faults, strict=True):
        if fault is None:
            kept.append(utterance)
        else:
            skipped.add(f"{utterance.id} ({utterance.place})", fault)
    skipped.check(total)
    return kept


def needed_frames(ids: Sequence[int], ctc: bool = True) -> int:
    """Counts the encoder outputs that a transcript needs.

    CTC needs one per token, and one for the blank between two equal tokens (Graves et al. 2006, section 3.1). Without
    it tokens alone count: a Transducer could work with fewer outputs, but then the transcript is not that of its audio.
    """
    return len(ids) + (sum(a == b for a, b in itertools.pairwise(ids)) if ctc else 0)


def check_lengths(
    utterances: Sequence[Utterance],
    processor: Any,
    skipped: Skipped,
    *,
    ctc: bool = True,
    fastest: float = 1.0,
    outputs: Callable[[int], int] = subsampled_frames,
) -> list[Utterance]:
    """Selects the utterances whose transcript fits into their audio; the others go to `skipped`, which may raise.

    Args:
        utterances: with `seconds`.
        processor: a `ConformerProcessor`.
        skipped: takes the others.
        ctc: whether equal neighbouring tokens need a blank between them, as in `needed_frames`.
        fastest: greatest speed factor of the training.
        outputs: encoder outputs for a number of feature frames.
    """
    extractor = processor.feature_extractor
    tokens = processor.tokenizer([utterance.text for utterance in utterances])["input_ids"] if utterances else []

    def fault(utterance: Utterance, ids: Sequence[int]) -> str | None:
        samples = math.ceil(round((utterance.seconds or 0.0) * extractor.sampling_rate) / fastest)
        available, needed = outputs(extractor.num_frames(samples)), needed_frames(ids, ctc)
        if available >= max(needed, 1):
            return None
        few = f"{utterance.seconds:.2f} s give {available} frames, too few"
        return f"{few} for {len(ids)} tokens that need {needed}"

    return keep(utterances, map(fault, utterances, tokens), skipped)


def long_enough(
    utterances: Sequence[Utterance], processor: Any, skipped: Skipped, outputs: Callable[[int], int] = subsampled_frames
) -> list[Utterance]:
    """Selects the utterances that give the encoder at least one frame; the others go to `skipped`, which may raise.

    Transcripts do not matter: an evaluation must not leave out hard utterances.
    """
    extractor = processor.feature_extractor

    def fault(utterance: Utterance) -> str | None:
        frames = extractor.num_frames(round((utterance.seconds or 0) * extractor.sampling_rate))
        return None if outputs(frames) else f"{frames} feature frames, too few for the encoder"

    return keep(utterances, map(fault, utterances), skipped)
