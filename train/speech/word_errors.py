"""Word and character error rates of transcripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jiwer


@dataclass(frozen=True)
class ErrorCounts:
    """Numbers of edits that turn the references of a data set into its hypotheses, the fewest for each utterance.

    `+` adds the counts of two data sets.

    Attributes:
        hits: units that are right; a unit is a word or a character.
        substitutions: units of the reference that are replaced.
        deletions: units of the reference that are missing.
        insertions: units that are not in the reference.
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
        """Errors per unit of the references (less is better); it is above 1 with many insertions.

        If no reference has a unit, the rate is 0 without errors and inf with errors (jiwer gives the number of errors).
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
    """Counts the word errors of all utterances of a split, with jiwer.

    Words are separated by white space. Case and punctuation count: normalise both sides first if they should not.
    With an empty reference every recognised word is an insertion.

    Args:
        references: the texts that were said, one per utterance.
        hypotheses: the texts that were recognised, in the same order.

    Returns:
        Sums over the utterances; `.rate` is the word error rate of the split.

    Raises:
        TypeError: for one text in place of a list of texts.
        ValueError: for two lists of different lengths.
    """
    return _counts(jiwer.process_words(*_spaced(references, hypotheses)))


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Counts the character errors of all utterances of a split, with jiwer.

    Words are joined by one space, which is a character too.

    Args:
        references: the texts that were said, one per utterance.
        hypotheses: the texts that were recognised, in the same order.
    """
    return _counts(jiwer.process_characters(*_spaced(references, hypotheses)))


def _spaced(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Puts one space between words, since jiwer takes a single tab or line break for part of a word."""
    for name, texts in (("references", references), ("hypotheses", hypotheses)):
        if isinstance(texts, str):
            raise TypeError(f"{name} must be a list of texts, one per utterance, got one text; write [{texts[:20]!r}].")
    if len(references) != len(hypotheses):
        raise ValueError(
            f"hypotheses must be as many as references, one per utterance; got {len(hypotheses)} and {len(references)}."
        )
    return [" ".join(text.split()) for text in references], [" ".join(text.split()) for text in hypotheses]


def _counts(output: jiwer.WordOutput | jiwer.CharacterOutput) -> ErrorCounts:
    return ErrorCounts(output.hits, output.substitutions, output.deletions, output.insertions)
