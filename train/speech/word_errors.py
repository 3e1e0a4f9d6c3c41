"""Word and character error rates of transcripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jiwer


@dataclass(frozen=True)
class ErrorCounts:
    """Edits that turn the references of a data set into its hypotheses, fewest possible for each utterance.

    Counts of two sets are added with `+`.

    Attributes:
        hits: units that are right; a unit is a word or a character.
        substitutions: units replaced.
        deletions: units of the reference that are missing.
        insertions: units that are too many.
    """

    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def errors(self) -> int:
        """All edits."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def reference_length(self) -> int:
        """Units in the references."""
        return self.hits + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """Errors a unit of the references, over 1 with many insertions.

        Where no reference has a unit it is 0 without an error and inf with one (jiwer gives the number of errors).
        """
        if self.reference_length:
            return self.errors / self.reference_length
        return math.inf if self.errors else 0.0

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            self.hits + other.hits,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Counts over all utterances of a split, by words, from jiwer.

    Words are what stands between white space. Case and punctuation count; normalise both sides first where they should
    not. Each word said where the reference is empty is an insertion.

    Args:
        references: what was said, one text an utterance.
        hypotheses: what was recognised, in the same order.

    Returns:
        Sums over the utterances; `.rate` is the word error rate of the split.

    Raises:
        TypeError: for one text in place of a list of texts.
        ValueError: for two lists of different lengths.
    """
    return _counts(jiwer.process_words(*_spaced(references, hypotheses)))


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Counts as of `word_errors`, by characters: words are joined by one space, which is a character too."""
    return _counts(jiwer.process_characters(*_spaced(references, hypotheses)))


def _spaced(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Texts with one space between words, since jiwer takes a lone tab or line break for part of a word."""
    for name, texts in (("references", references), ("hypotheses", hypotheses)):
        if isinstance(texts, str):
            raise TypeError(f"{name} must be a list of texts, one an utterance, got one text; write [{texts[:20]!r}].")
    if len(references) != len(hypotheses):
        raise ValueError(
            f"hypotheses must be as many as references, one an utterance; got {len(hypotheses)} and {len(references)}."
        )
    return [" ".join(text.split()) for text in references], [" ".join(text.split()) for text in hypotheses]


def _counts(output: jiwer.WordOutput | jiwer.CharacterOutput) -> ErrorCounts:
    return ErrorCounts(output.hits, output.substitutions, output.deletions, output.insertions)
