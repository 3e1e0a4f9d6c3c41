"""Beam search of CTC that scores words, of any words or of known ones alone; rows of any length in bounded memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from favor._parts import needs
from favor.models.speech.alignment import GreedyEmissions, ctc_align, ctc_emissions
from favor.models.speech.ctc import Hypothesis, check_beam, check_blank, checked_lengths, checked_log_probs
from favor.models.speech.pronunciations import Pronunciations
from favor.models.speech.spans import Emission
from favor.models.speech.word_lexicon import WordLexicon
from favor.models.speech.word_scorer import WordScorer

Scorer: TypeAlias = WordScorer | WordLexicon


@torch.no_grad()
def ctc_word_beam(
    logits: Tensor,
    lengths: Tensor | Sequence[int],
    scorer: Scorer,
    beam_size: int | None = None,
    blank: int = 0,
    piece: int | None = None,
) -> list[list[Hypothesis]]:
    """Runs a beam search for the text with the best sum of CTC log probability and the score of its words.

    The decoder of flashlight-text (Pratap et al., "Wav2Letter++", arXiv:1812.07625). `ctc_lexicon_beam` is another name
    of this function. A row of more than `piece` frames is searched in pieces. Needs the extra `lm`.

    With a `WordScorer` any word can be found. The CTC probability is summed over alignments, and each frame tries its
    32 most probable tokens. Rows are cut where the blank is most probable; the score of words goes on from the best
    text so far.

    With a `WordLexicon` its words alone can be found, much faster. The score of each text that is found is exact: its
    CTC probability is the sum over all alignments, of the pronunciation that the search has found for the text. The
    search itself sees one frame of each run of almost sure blanks. Rows are cut in the middle of a long run of blanks;
    each piece is a text of its own for the language model, and no text comes twice.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        scorer: language model and hotwords, or known words, with the tokenizer that has the V tokens.
        beam_size: hypotheses kept after each frame. With a `WordScorer` a text takes two places while it can end in a
            blank and in its last token. Default None: 50 with a `WordScorer`, 200 with a `WordLexicon`.
        blank: label of the blank. Default 0.
        piece: frames that are searched at once, at least 3; the decoder keeps all that it tried in them. Default None:
            500 with a `WordScorer`, 1500 with a `WordLexicon`.

    Returns:
        For each row up to `beam_size` hypotheses, the best first; `log_prob` is the sum. Hypotheses of a row that was
        cut differ after the last cut only.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths, a blank or a beam size that do not fit, for a tokenizer with another number of
            tokens, or for logits with NaN or +inf.

    Example:
        >>> import torch
        >>> from favor.models.speech import WordScorer, ctc_word_beam, train_tokenizer
        >>> tokenizer = train_tokenizer(["HOLD", "COLD"], "char")
        >>> logits = torch.full((1, 5, len(tokenizer)), -9.0)
        >>> logits[0, range(5), tokenizer("COLD").input_ids] = 1.0
        >>> logits[0, 1, tokenizer("HOLD").input_ids[1]] = 1.5
        >>> scorers = [WordScorer(tokenizer), WordScorer(tokenizer, hotwords=["COLD"])]
        >>> found = [ctc_word_beam(logits, [5], scorer)[0][0].tokens for scorer in scorers]
        >>> [tokenizer.decode(tokens, group_tokens=False) for tokens in found]
        ['HOLD', 'COLD']
    """
    found = []
    for row, length in zip(logits, checked_lengths("logits", logits, lengths), strict=True):
        search = PieceSearch(logits.shape[-1], scorer, beam_size, blank, piece)
        parts = [piece.best for piece in search.add(row[:length])]
        before = functools.reduce(Hypothesis.then, parts, Hypothesis([], 0.0))
        found.append([before.then(one) for one in search.rest().found])
    return found


class Piece(NamedTuple):
    """Frames that were searched at once."""

    first: int  # place in the row
    log_probs: Tensor  # [n, V]
    found: list[Hypothesis]  # of these frames alone, the best first; none if the frames can say no text

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis, without text if there is none."""
        return self.found[0] if self.found else Hypothesis([], -math.inf)


class PieceSearch:
    """Searches a row piece by piece. How the row comes does not matter: pieces depend on their own frames alone."""

    def __init__(
        self, labels: int, scorer: Scorer, beam_size: int | None = None, blank: int = 0, piece: int | None = None
    ) -> None:
        needs("lm", "flashlight")
        self.scorer: Any = scorer
        self.beam_size = scorer.beam_size if beam_size is None else beam_size
        self.blank, self.most = blank, scorer.piece if piece is None else piece
        check_beam(self.beam_size)
        check_blank(blank, labels)
        if labels != scorer.num_tokens:
            raise ValueError(f"logits must be [B, L, {scorer.num_tokens}], as many as scorer's tokens; got {labels}.")
        if self.most < 3:
            raise ValueError(f"piece must be at least 3 frames, got {piece}.")
        self._first, self._waiting, self._context = 0, torch.empty(0, labels), self.scorer.start()

    def add(self, logits: Tensor) -> Iterator[Piece]:
        """Takes the next logits `[n, V]`; gives the pieces that are over, whose frames are kept no longer."""
        self._waiting = torch.cat([self._waiting, checked_log_probs(logits).float().cpu()])
        while len(self._waiting) > self.most:
            half = self.most // 2
            end = half + 1 + self.scorer.cut(self._waiting[half : self.most - 1], self.blank)
            piece = self._search(self._waiting[:end], ends=False)
            self._first, self._waiting = self._first + end, self._waiting[end:]
            self._context = self.scorer.after(self._context, piece.best)
            yield piece

    def rest(self) -> Piece:
        """Searches the frames after the last piece, as if the row ended with them."""
        return self._search(self._waiting, ends=True)

    def _search(self, frames: Tensor, ends: bool) -> Piece:
        found = self.scorer.search(frames, self._context, ends, self.beam_size, self.blank)
        return Piece(self._first, frames, found)


class WordEmissions:
    """Tokens of the best text of a row whose logits come in parts, with frames as of `ctc_align`."""

    def __init__(self, search: PieceSearch) -> None:
        self._search = search
        self.final: list[Emission] = []
        self._open: list[Emission] | None = None

    def add(self, logits: Tensor) -> None:
        """Takes the next logits `[n, V]`."""
        self._open = None
        for piece in self._search.add(logits):
            self.final += self._emissions(piece)

    @property
    def open(self) -> list[Emission]:
        """Tokens after the final ones, as if the row ended now."""
        if self._open is None:
            self._open = self._emissions(self._search.rest())
        return self._open

    def _emissions(self, piece: Piece) -> list[Emission]:
        best, scorer = piece.best, self._search.scorer
        if not best.tokens:
            return []
        tokens = torch.tensor([best.tokens], dtype=torch.long)
        (found,) = ctc_align(piece.log_probs[None], [len(piece.log_probs)], tokens, blank=self._search.blank)
        words = iter(best.words)
        return [
            replace(
                one,
                start=one.start + piece.first,
                end=one.end + piece.first,
                word=next(words) if scorer.is_spoken and one.token == scorer.space else "",
            )
            for one in found
        ]


def begin_search(
    labels: int, scorer: Scorer | None, beam_size: int | None = None, blank: int = 0
) -> GreedyEmissions | WordEmissions:
    """Begins the search of `search_emissions` for a row whose logits, of V labels, come in parts."""
    return GreedyEmissions(blank) if scorer is None else WordEmissions(PieceSearch(labels, scorer, beam_size, blank))


@torch.no_grad()
def search_emissions(
    logits: Tensor, lengths: Tensor | Sequence[int], scorer: Scorer | None, beam_size: int | None = None, blank: int = 0
) -> list[list[Emission]]:
    """Finds the tokens of the best text of `ctc_word_beam`, with their frames and confidences; without a scorer those
    of greedy search. If the tokens are phonemes, the space that begins a word names it.
    """
    if scorer is None:
        return ctc_emissions(logits, lengths, blank)
    found = []
    for row, length in zip(logits, checked_lengths("logits", logits, lengths), strict=True):
        search = begin_search(logits.shape[-1], scorer, beam_size, blank)
        search.add(row[:length])
        found.append([*search.final, *search.open])
    return found


def searched_words(
    model: Any,
    tokenizer: Any,
    beam_size: int | None,
    known_words: bool = False,
    lexicon: Pronunciations | None = None,
    **options: Any,
) -> Scorer | None:
    """Makes a `WordScorer` of those options that are given, a `WordLexicon` with `known_words`, or None without any."""
    given = {name: value for name, value in options.items() if value is not None and value not in ((), [])}
    if lexicon is not None:
        lexicon.check(tokenizer)
    names = [*(["known_words"] if known_words else []), *given]
    if not names:
        return None
    check_searches_words(model, names[0])
    if beam_size == 1:
        raise ValueError(f"beam_size must be above 1 with {names[0]}, got 1: greedy search scores no words.")
    if not known_words and lexicon is None:
        return WordScorer(tokenizer, **options)
    if "language_model" not in given:
        raise ValueError(f"{names[0]} needs language_model, whose words are the known ones.")
    if unused := [name for name in given if name.startswith("hotword")]:
        beside = "known_words" if known_words else "a lexicon of pronunciations"
        raise ValueError(f"{unused[0]} has no effect with {beside}: leave one of them out.")
    return WordLexicon(tokenizer, **given, pronunciations=lexicon)


def check_searches_words(model: Any, option: str) -> None:
    """Raises ValueError for an option that a model has no search for, and ImportError without the package."""
    if not hasattr(model, "frame_logits"):
        raise ValueError(
            f"{option} needs a ConformerForCTC, got a {type(model).__name__}, whose search scores no words; "
            "transducer_beam is its beam search."
        )
    needs("lm", "flashlight")
