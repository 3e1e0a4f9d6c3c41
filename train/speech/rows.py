"""Utterances from rows of a table: a line of a manifest, or a JSON file in a tar shard."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from favor.train.common.lines import is_text
from favor.train.speech.data import Piece, Utterance

Normalize = Callable[[str], str]
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


def from_row(row: Any, folder: Path, normalize: Normalize, transcripts: bool) -> Utterance:
    """Makes an utterance from a row; raises ValueError for a bad row.

    Args:
        row: an object of JSON or a row of a table, with columns of any name in `COLUMNS`.
        folder: where the audio is, there or in `clips`.
        normalize: turns texts into transcripts.
        transcripts: whether the row needs a text.
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
    if not (text := normalize(told["text"] or "")) and transcripts:
        raise ValueError(f"text is empty after normalisation of {told['text']!r}")
    path = folder / str(told["audio"])
    if "path" in row and os.path.isfile(clip := folder / CLIPS / str(told["audio"])):
        path = clip
    audio = path if offset is None else Piece(path, offset, seconds)
    name = told["id"] or f"{told['audio']}{'' if offset is None else f'@{offset}'}"
    return Utterance(name, text, audio, seconds, told["speaker"], told["chapter"])


def _seconds(found: Mapping[str, Any], name: str) -> float | None:
    """Gives a length of time, if there is one."""
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
