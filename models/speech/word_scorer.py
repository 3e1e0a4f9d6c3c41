"""Scores of the words of a text, for a beam search that finds any words: an n-gram language model, and hotwords."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from favor.models.speech.ctc import Hypothesis
from favor.models.speech.ngram import LN10, NgramModel
from favor.models.speech.tokenizer import SPACE, ConformerTokenizer

LM_WEIGHT, WORD_SCORE, HOTWORD_WEIGHT = 0.5, 1.5, 10.0
TOKENS = 32  # the most probable ones of each frame are tried
THRESHOLD = 1e4  # drops hypotheses that are worse than the best by more: those of probability 0
RARE = -7 * LN10  # least log probability of a hotword that the language model does not know: that of a rare word


class Context(NamedTuple):
    """All that the score of the next token depends on."""

    state: Any  # of the language model, after the words that are finished
    words: tuple[str, ...]  # last ones that are finished, as many as a hotword can begin with
    word: str  # beginning of the next one
    lent: float  # part of `hotword_weight` for the beginning of a hotword, to be taken back


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

    beam_size = 50
    piece = 500  # frames searched at once: 20 seconds, since the decoder keeps all that it tried until it is done
    is_spoken = False  # tokens are letters or word pieces

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
        if model is not None:
            check_words(any({*word} <= letters for word in model.words), model, "write")
        self.language_model = model
        self.num_tokens = len(pieces)
        self._pieces = [piece.split(SPACE) for piece in pieces]
        self._hotwords = frozenset(phrases)
        self._hot = frozenset(word for phrase in phrases for word in phrase.split())
        self._kept = max((len(phrase.split()) for phrase in phrases), default=1) - 1
        # A search asks for every token that can begin the next word.
        self._finish_word = functools.lru_cache(1024)(self._score_word)
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
        context, total = self._through(self.start(), tokens)
        return total + self.finish(context)

    def after(self, context: Context, text: Hypothesis) -> Context:
        """Gives the context after the text of a piece."""
        return self._through(context, text.tokens)[0]

    def _through(self, context: Context, tokens: Sequence[int]) -> tuple[Context, float]:
        total = 0.0
        for token in tokens:
            context, gain = self.advance(context, token)
            total += gain
        return context, total

    def cut(self, log_probs: Tensor, blank: int) -> int:
        """Gives the best of some frames for the end of a piece: the likeliest blank."""
        return int(log_probs[:, blank].argmax())

    def search(self, log_probs: Tensor, context: Context, ends: bool, beam_size: int, blank: int) -> list[Hypothesis]:
        """Searches a piece `[n, V]`, with which the text may end, from a context on; no lexicon limits the words."""
        from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions

        scores = _adapter()(self, context, ends)
        log_probs = log_probs.contiguous()
        frames, labels = log_probs.shape
        # Weights are in the scores; silence is no token here, and with log_add equal texts add their probabilities.
        options = LexiconFreeDecoderOptions(
            beam_size=beam_size,
            beam_size_token=min(TOKENS, labels),
            beam_threshold=THRESHOLD,
            lm_weight=1.0,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        decoder = LexiconFreeDecoder(options, scores, sil_token_idx=-1, blank_token_idx=blank, transitions=[])
        found = []
        for result in decoder.decode(log_probs.data_ptr(), frames, labels):
            path = result.tokens[1:-1]  # a token per frame, between a start and an end
            found.append(Hypothesis([token for token, _ in itertools.groupby(path) if token != blank], result.score))
        return found

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


def check_words(has_some: bool, model: NgramModel, said: str) -> None:
    """Raises ValueError if a language model has no word that can be written, or pronounced, in the tokens."""
    if not has_some:
        raise ValueError(
            f"language_model has no word that the tokenizer can {said}; one of its words is "
            f"{min(model.words, default='')!r}. Write its texts as the transcripts of the speech model."
        )


def checked_weight(name: str, value: float, least: float | None = None) -> float:
    """Gives a weight; raises ValueError for one out of range."""
    if not math.isfinite(value) or (least is not None and value < least):
        raise ValueError(f"{name} must be a number{'' if least is None else f' of at least {least}'}, got {value}.")
    return value


@functools.cache
def _adapter() -> Any:
    """The class that the decoder asks for scores; a function, as its base class is in an optional package."""
    from flashlight.lib.text.decoder import LM, LMState

    class Scores(LM):
        """Keeps a context for each text that the decoder tried; a state of the decoder stands for one text."""

        def __init__(self, scorer: WordScorer, context: Context, ends: bool) -> None:
            super().__init__()
            self.scorer, self.context, self.ends = scorer, context, ends
            self.known: dict[Any, tuple[Context, float]] = {}

        def start(self, start_with_nothing: bool) -> Any:
            state = LMState()
            self.known[state] = self.context, 0.0
            return state

        def score(self, state: Any, token: int) -> tuple[Any, float]:
            after = state.child(token)
            if after not in self.known:
                self.known[after] = self.scorer.advance(self.known[state][0], token)
            return after, self.known[after][1]

        def finish(self, state: Any) -> tuple[Any, float]:
            return state, self.scorer.finish(self.known[state][0]) if self.ends else 0.0

    return Scores
