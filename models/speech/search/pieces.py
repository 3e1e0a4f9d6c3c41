"""Searches of CTC that go on from frame to frame: rows of any length, which may come in parts, in bounded memory."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from favor.models.speech.search.alignment import ctc_align
from favor.models.speech.search.common import Hypothesis, check_beam, check_blank, checked_lengths, checked_log_probs
from favor.models.speech.transcript.spans import Emission

NOTHING = Hypothesis([], 0.0)


class Piece(NamedTuple):
    """Frames that were searched at once.

    Attributes:
        first: place of the first one in the row.
        log_probs: of the labels, `[n, V]`.
        found: hypotheses of these frames alone, the best first; none if the frames can say no text.
    """

    first: int
    log_probs: Tensor
    found: list[Hypothesis]

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis, without text if there is none."""
        return self.found[0] if self.found else Hypothesis([], -math.inf)


class PieceSearch(ABC):
    """Searches a row piece by piece. How the row comes does not matter: pieces depend on their own frames alone.

    Args:
        labels: V, of the logits.
        tokens: that the words are written with.
        beam_size: hypotheses kept after each frame.
        blank: label of the blank.
        most: frames of the longest piece, at least 3.
        words: what the search knows, for messages.

    Attributes:
        space: token that names the word it begins; None if words have no names.

    Raises:
        ValueError: for numbers out of range, or another number of tokens than labels.
    """

    space: int | None = None

    def __init__(self, labels: int, tokens: int, beam_size: int, blank: int, most: int, words: str) -> None:
        check_beam(beam_size)
        check_blank(blank, labels)
        if labels != tokens:
            raise ValueError(f"logits must be [B, L, {tokens}], as many as {words}'s tokens; got {labels} labels.")
        if most < 3:
            raise ValueError(f"piece must be at least 3 frames, got {most}.")
        self.beam_size, self.blank, self.most = beam_size, blank, most
        self._first, self._waiting = 0, torch.empty(0, labels)

    @abstractmethod
    def cut(self, log_probs: Tensor) -> int:
        """Gives the best of some frames for the end of a piece."""

    @abstractmethod
    def decode(self, log_probs: Tensor, ends: bool) -> list[Hypothesis]:
        """Searches a piece; `ends` says whether the text ends with it."""

    @abstractmethod
    def go_on(self, best: Hypothesis) -> None:
        """Takes in the text of a piece, for those that come after it."""

    def add(self, logits: Tensor) -> Iterator[Piece]:
        """Takes the next logits `[n, V]`; gives the pieces that are over, whose frames are kept no longer."""
        self._waiting = torch.cat([self._waiting, checked_log_probs(logits).float().cpu()])
        while len(self._waiting) > self.most:
            half = self.most // 2
            end = half + 1 + self.cut(self._waiting[half : self.most - 1])
            frames, self._waiting = self._waiting[:end], self._waiting[end:]
            piece = Piece(self._first, frames, self.decode(frames, ends=False))
            self._first += end
            self.go_on(piece.best)
            yield piece

    def rest(self) -> Piece:
        """Searches the frames after the last piece, as if the row ended with them."""
        return Piece(self._first, self._waiting, self.decode(self._waiting, ends=True))

    def emissions(self, piece: Piece) -> list[Emission]:
        """Finds the tokens of the best text of a piece with the frames and confidences of `ctc_align`."""
        best = piece.best
        if not best.tokens:
            return []
        frames, words = len(piece.log_probs), iter(() if self.space is None else best.words)
        tokens = torch.tensor([best.tokens], dtype=torch.long)
        return [
            replace(
                one,
                start=one.start + piece.first,
                end=one.end + piece.first,
                word=next(words, "") if one.token == self.space else "",
            )
            for one in ctc_align(piece.log_probs[None], [frames], tokens, blank=self.blank)[0]
        ]


def search_rows(
    logits: Tensor, lengths: Tensor | Sequence[int], begin: Callable[[], PieceSearch]
) -> list[list[Hypothesis]]:
    """Searches whole rows.

    Args:
        logits: `[B, L, V]`.
        lengths: frames of each row `[B]`.
        begin: makes the search of a row.

    Returns:
        Hypotheses of each row, the best first; they differ after the last cut only.
    """
    found = []
    for row, length in zip(logits, checked_lengths("logits", logits, lengths), strict=True):
        search = begin()
        before = functools.reduce(Hypothesis.then, (piece.best for piece in search.add(row[:length])), NOTHING)
        found.append([before.then(one) for one in search.rest().found])
    return found


class WordEmissions:
    """Tokens of the best text of a row whose logits come in parts, found by a search of words.

    Args:
        search: of the row.

    Attributes:
        final: tokens that no later frame can change.
    """

    def __init__(self, search: PieceSearch) -> None:
        self._search = search
        self.final: list[Emission] = []
        self._open: list[Emission] | None = None

    def add(self, logits: Tensor) -> None:
        """Takes the next logits `[n, V]`."""
        self._open = None
        for piece in self._search.add(logits):
            self.final += self._search.emissions(piece)

    @property
    def open(self) -> list[Emission]:
        """Tokens after the final ones, as if the row ended now."""
        if self._open is None:
            self._open = self._search.emissions(self._search.rest())
        return self._open
