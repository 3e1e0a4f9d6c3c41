"""Beam searches of CTC that score words, of any words or of known ones alone, behind one function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from favor.models.speech.search.alignment import GreedyEmissions, ctc_emissions
from favor.models.speech.search.common import Hypothesis, checked_lengths
from favor.models.speech.search.lexicon_beam import LEXICON_BEAM, LexiconSearch, WordLexicon
from favor.models.speech.search.pieces import PieceSearch, WordEmissions, search_rows
from favor.models.speech.search.scores import WordScorer, check_searches_words
from favor.models.speech.search.word_beam import BEAM_SIZE, WordSearch
from favor.models.speech.transcript.pronunciations import Pronunciations
from favor.models.speech.transcript.spans import Emission

Scorer: TypeAlias = WordScorer | WordLexicon


def usual_beam(scorer: Scorer) -> int:
    """Gives the number of hypotheses that a search keeps by default."""
    return LEXICON_BEAM if isinstance(scorer, WordLexicon) else BEAM_SIZE


def search_words(
    logits: Tensor, lengths: Tensor | Sequence[int], scorer: Scorer, beam_size: int | None = None, blank: int = 0
) -> list[list[Hypothesis]]:
    """Runs `ctc_word_beam` for a `WordScorer` and `ctc_lexicon_beam` for a `WordLexicon`."""
    return search_rows(logits, lengths, partial(_begin, logits.shape[-1], scorer, beam_size, blank))


def _begin(labels: int, scorer: Scorer, beam_size: int | None, blank: int) -> PieceSearch:
    size = usual_beam(scorer) if beam_size is None else beam_size
    if isinstance(scorer, WordLexicon):
        return LexiconSearch(labels, scorer, size, blank)
    return WordSearch(labels, scorer, size, blank)


def begin_search(
    labels: int, scorer: Scorer | None, beam_size: int | None = None, blank: int = 0
) -> GreedyEmissions | WordEmissions:
    """Begins the search of `search_emissions` for a row whose logits come in parts.

    The time for each part and what is kept do not grow with the row; the tokens that are found do.

    Args:
        labels: number of them in the logits.
        scorer: of words; None searches greedily.
        beam_size: as in `search_words`.
        blank: label of the blank. Default 0.

    Raises:
        ValueError: for a blank or a beam size out of range, or another number of tokens than labels.
    """
    return GreedyEmissions(blank) if scorer is None else WordEmissions(_begin(labels, scorer, beam_size, blank))


@torch.no_grad()
def search_emissions(
    logits: Tensor, lengths: Tensor | Sequence[int], scorer: Scorer | None, beam_size: int | None = None, blank: int = 0
) -> list[list[Emission]]:
    """Finds the tokens of the best text of `search_words`, with their frames and confidences; without a scorer those of
    greedy search. If the tokens are phonemes, the space that begins a word names it.
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
    """Makes a `WordScorer` of those options that are given, a `WordLexicon` with `known_words`, or None without any.

    With a lexicon the words of a language model are always the known ones.

    Args:
        model: whose search it is for.
        tokenizer: that of the model.
        beam_size: that is asked for, if any.
        known_words: whether words outside of the language model cannot be found. Default False.
        lexicon: pronunciations of words, if the tokens are phonemes. Default None: they are letters or word pieces.
        **options: of `WordScorer`.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        ValueError: if the search of the model would ignore an option, and as `WordScorer` and `WordLexicon`.
    """
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
