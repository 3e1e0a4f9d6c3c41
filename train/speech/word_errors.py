"""Word and character error rates of transcripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

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
        return ErrorCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Counts the word errors of all utterances of a split, with jiwer; `.rate` is the word error rate of the split.

    Words are separated by white space. Case and punctuation count: normalise both sides first if they should not.
    With an empty reference every recognised word is an insertion.

    Args:
        references: the texts that were said, one per utterance.
        hypotheses: the texts that were recognised, in the same order.

    Raises:
        ValueError: for two lists of different lengths.
    """
    return _counts(jiwer.process_words, references, hypotheses)


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    """Counts character errors as `word_errors` counts words, which are joined by one space, a character too."""
    return _counts(jiwer.process_characters, references, hypotheses)


def _counts(process: Callable[..., Any], references: Sequence[str], hypotheses: Sequence[str]) -> ErrorCounts:
    # jiwer takes a single tab or line break for part of a word.
    pairs = [
        (" ".join(one.split()), " ".join(other.split())) for one, other in zip(references, hypotheses, strict=True)
    ]
    found = process(*([pair[side] for pair in pairs] for side in (0, 1)))
    return ErrorCounts(found.hits, found.substitutions, found.deletions, found.insertions)
