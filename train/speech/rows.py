"""Utterances from rows of a table: a line of a manifest, or a JSON file in a tar shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from favor.train.speech.data import Utterance

Normalize = Callable[[str], str]


def from_row(row: Any, folder: Path, normalize: Normalize, transcripts: bool) -> Utterance:
    """Makes an utterance from a row; raises ValueError for a bad row.

    Args:
        row: an object of JSON or a row of CSV.
        folder: where the audio is.
        normalize: turns texts into transcripts.
        transcripts: whether the row needs a text.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected one JSON object per line, got {str(row)[:60]!r}")
    needed = ("audio", "text") if transcripts else ("audio",)
    missing = [name for name in needed if not isinstance(row.get(name), str) or not row[name].strip()]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, got {row}")
    if not (text := normalize(str(row.get("text") or ""))) and transcripts:
        raise ValueError(f"text is empty after normalisation of {row['text']!r}")
    try:
        seconds = float(row["seconds"]) if row.get("seconds") not in (None, "") else None
    except (TypeError, ValueError):
        raise ValueError(f"seconds must be a number, got {row['seconds']!r}") from None
    named = {name: str(row[name]) if row.get(name) not in (None, "") else None for name in ("speaker", "chapter")}
    return Utterance(str(row.get("id") or row["audio"]), text, folder / row["audio"], seconds, **named)
