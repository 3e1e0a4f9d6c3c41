"""Scores of the words of a text, for a beam search: an n-gram language model, and hotwords."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from favor._parts import needs
from favor.models.speech.search.ngram import LN10, NgramModel
from favor.models.speech.transcript.tokenizer import SPACE, ConformerTokenizer

LM_WEIGHT, WORD_SCORE, HOTWORD_WEIGHT = 0.5, 1.5, 10.0
RARE = -7 * LN10  # least log probability of a hotword that the language model does not know: that of a rare word


class Context(NamedTuple):
    """All that the score of the next token depends on.

    Attributes:
        state: of the language model, after the words that are finished.
        words: last ones that are finished, as many as a hotword can begin with.
        word: beginning of the next one.
        lent: part of `hotword_weight` for the beginning of a hotword, to be taken back.
    """

    state: Any
    words: tuple[str, ...]
    word: str
    lent: float


class WordScorer:
    """Scores the words of a text, token by token: the score that `ctc_word_beam` adds to the CTC log probability.

    The score of a text with words w_1 to w_n is

        lm_weight * log P(w_1 ... w_n </s>) + word_score * n + hotword_weight * (number of hotwords in the text).

    A word counts when the next one begins. The beginning of a hotword counts in part, by its letters, so that the
    search keeps it; this part is taken back if the text goes on in another way, and so it does not change the score of
    a whole text. Hotwords of several words count when all of them stand together. A hotword that the language model
    does not know has at least the probability of a rare word, 10^-7.

    Args:
        tokenizer: of the speech model.
        language_model: an `NgramModel`, or the path of its file. Default None: without.
        lm_weight: weight of the language model, often called alpha. Default 0.5. Programs that multiply logarithms to
            the base 10 need 2.3 times as much for the same result.
        word_score: added for each word, often called beta, against the language model's liking of short texts.
            Default 1.5.
        hotwords: words or phrases that are likely here, such as names, written as the tokenizer writes them.
        hotword_weight: added for each hotword in the text, in nats. Default 10.

    Raises:
        ImportError: for a language model, if the package flashlight-text is not installed.
        TypeError: for a single string as hotwords.
        ValueError: for weights that are out of range or have nothing to weigh, for a file that is no language model,
            or for words that the tokenizer cannot write.

    Example:
        >>> from favor.models.speech import WordScorer, train_tokenizer
        >>> tokenizer = train_tokenizer(["GOOD DAY"], "char")
        >>> scorer = WordScorer(tokenizer, hotwords=["DAY"], hotword_weight=3)
        >>> [scorer.score(tokenizer(text).input_ids) for text in ("GOOD DAY", "DAY DAY", "GOOD DAYS")]
        [3.0, 6.0, 0.0]
    """

    def __init__(
        self,
        tokenizer: ConformerTokenizer,
        language_model: str | Path | NgramModel | None = None,
        lm_weight: float | None = None,
        word_score: float | None = None,
        hotwords: Sequence[str] = (),
        hotword_weight: float | None = None,
    ) -> None:
        if isinstance(hotwords, str):
            raise TypeError(f"hotwords must be a list of words, got the string {hotwords!r}.")
        phrases = [" ".join(one.split()) for one in hotwords or ()]
        no_model, no_words = language_model is None and "language_model", not phrases and "hotwords"
        self.lm_weight = _weight("lm_weight", lm_weight, LM_WEIGHT, no_model, least=0)
        self.word_score = _weight("word_score", word_score, WORD_SCORE, no_model)
        self.hotword_weight = _weight("hotword_weight", hotword_weight, HOTWORD_WEIGHT, no_words, least=0)
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        letters = {*"".join({*pieces} - {*tokenizer.all_special_tokens})} - {SPACE}
        for phrase in phrases:
            if not phrase:
                raise ValueError("hotwords must not hold an empty word.")
            if wrong := {*phrase} - {" "} - letters:
                raise ValueError(
                    "hotwords must be written as the tokenizer writes words; it cannot write "
                    f"{''.join(sorted(wrong))!r} of {phrase!r}."
                )
        model = NgramModel(language_model) if isinstance(language_model, str | Path) else language_model
        if model is not None and not any({*word} <= letters for word in model.words):
            raise ValueError(
                f"language_model has no word that the tokenizer can write; one of its words is "
                f"{min(model.words, default='')!r}. Write its texts as the transcripts of the speech model."
            )
        self.language_model = model
        self.num_tokens = len(pieces)
        self._pieces = [piece.split(SPACE) for piece in pieces]
        self._hotwords = frozenset(phrases)
        self._hot = frozenset(word for phrase in phrases for word in phrase.split())
        self._kept = max((len(phrase.split()) for phrase in phrases), default=1) - 1
        # A search asks for every token that can begin the next word.
        self._finish_word = lru_cache(1024)(self._score_word)
        self._begun: dict[str, float] = {}
        for phrase in phrases:
            for length in range(1, len(phrase) + 1):
                part = self.hotword_weight * length / len(phrase)
                self._begun[phrase[:length]] = max(part, self._begun.get(phrase[:length], 0.0))

    def start(self) -> Context:
        """Gives the context at the beginning of a text."""
        return Context(self.language_model.start() if self.language_model else None, (), "", 0.0)

    def advance(self, context: Context, token: int) -> tuple[Context, float]:
        """Gives the context after one more token, and what the token adds to the score."""
        more, *begun = self._pieces[token]
        state, words, word, lent = context
        word, gain = word + more, -lent
        for next_word in begun:
            state, words, added = self._finish_word(state, words, word)
            word, gain = next_word, gain + added
        lent = max(self._begun.get(text, 0.0) for text in _endings(words, word)) if self._begun else 0.0
        return Context(state, words, word, lent), gain + lent

    def finish(self, context: Context) -> float:
        """Gives what the end of the text adds to the score."""
        state, _, gain = self._finish_word(context.state, context.words, context.word)
        if self.language_model:
            gain += self.lm_weight * self.language_model.finish(state)
        return gain - context.lent

    def score(self, tokens: Sequence[int]) -> float:
        """Gives the score of a whole text, as token ids without blanks."""
        context, total = self.start(), 0.0
        for token in tokens:
            context, gain = self.advance(context, token)
            total += gain
        return total + self.finish(context)

    def _score_word(self, state: Any, words: tuple[str, ...], word: str) -> tuple[Any, tuple[str, ...], float]:
        """Gives the state and the last words after one more word, and what it adds; an empty word adds nothing."""
        if not word:
            return state, words, 0.0
        gain = self.hotword_weight * sum(text in self._hotwords for text in _endings(words, word))
        if self.language_model:
            state, log_prob = self.language_model.score(state, word)
            if word in self._hot and word not in self.language_model.words:
                log_prob = max(log_prob, RARE)
            gain += self.lm_weight * log_prob + self.word_score
        return state, (*words, word)[-self._kept :] if self._kept else (), gain


def check_searches_words(model: Any, option: str) -> None:
    """Raises ValueError for an option that a model has no search for, and ImportError without the package."""
    if not hasattr(model, "frame_logits"):
        raise ValueError(
            f"{option} needs a ConformerForCTC, got a {type(model).__name__}, whose search scores no words; "
            "transducer_beam is its beam search."
        )
    needs("lm", "flashlight")


def _endings(words: tuple[str, ...], word: str) -> list[str]:
    """The word alone, and after one or more of the words before it."""
    return [word, *(" ".join((*words[first:], word)) for first in range(len(words)))] if words else [word]


def _weight(name: str, value: float | None, default: float, absent: str | bool, least: float | None = None) -> float:
    """A weight or its default; raises ValueError for one out of range, or that weighs an option that is `absent`."""
    if value is None:
        return default
    if absent:
        raise ValueError(f"{name} needs {absent}, which is not given.")
    return checked_weight(name, value, least)


def checked_weight(name: str, value: float, least: float | None = None) -> float:
    """Gives a weight; raises ValueError for one out of range."""
    if not math.isfinite(value) or (least is not None and value < least):
        raise ValueError(f"{name} must be a number{'' if least is None else f' of at least {least}'}, got {value}.")
    return value
