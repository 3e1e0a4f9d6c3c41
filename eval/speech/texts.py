"""Sentences of books, for language models and speech synthesis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from favor.models.speech import normalize_transcript
from favor.train.text.samples import read_text

# As transcripts of LibriSpeech write what is said.
SAID = {"Mr": "mister", "Mrs": "missus", "Dr": "doctor", "St": "saint", "Messrs": "messieurs"}
END = re.compile(r"(?<=[.!?;])[\"'\u201d\u2019)\]]*\s+|\n\s*\n")


def sentences(text: str) -> Iterator[str]:
    """Gives the sentences of a text, and the parts between semicolons, with Mr. and such abbreviations in full."""
    full = re.sub(rf"\b({'|'.join(SAID)})\b\.?", lambda found: SAID[found[1]].capitalize(), text)
    for part in END.split(full):
        if words := " ".join(part.split()):
            yield words


def transcripts(texts: Sequence[Path]) -> Iterator[str]:
    """Gives the sentences of files as transcripts, in capitals, without those that are empty."""
    for path in texts:
        for sentence in sentences(read_text(path)):
            if words := normalize_transcript(sentence):
                yield words


def word_sequences(texts: Sequence[str], order: int) -> set[tuple[str, ...]]:
    """Gives all sequences of `order` words of transcripts; a shorter transcript is one sequence."""
    found: set[tuple[str, ...]] = set()
    for text in texts:
        words = tuple(text.split())
        found.update(words[first : first + order] for first in range(max(1, len(words) - order + 1)))
    return found
