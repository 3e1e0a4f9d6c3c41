"""The words of a language model as a tree of tokens, for a beam search that finds these words alone."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from favor._parts import needs
from favor.models.speech.ctc import Hypothesis
from favor.models.speech.ngram import LN10, NgramModel
from favor.models.speech.pronunciations import Pronunciations
from favor.models.speech.tokenizer import SPACE, ConformerTokenizer
from favor.models.speech.word_scorer import LM_WEIGHT, THRESHOLD, WORD_SCORE, check_words, checked_weight

SURE = math.log(0.999)  # of a blank, for the search alone
HOMOPHONES = 6  # words with the same tokens that the tree of flashlight-text can hold


class WordLexicon:
    """The words of a language model as a tree of tokens, for `ctc_lexicon_beam`, which finds no others.

    The score of a text with words w_1 to w_n is lm_weight * log P(w_1 ... w_n </s>) + word_score * n, as in
    `WordScorer`. Each beginning of a word counts as the most probable word with it, so
    that the search drops unlikely words before they end.

    With pronunciations the tokens are phonemes, and a word can be found by each of its pronunciations. Words of the
    language model without one cannot be found. Of words that are spoken in the same way the six most probable ones can
    be found; the language model decides between them.

    Args:
        tokenizer: of the speech model.
        language_model: an `NgramModel`, or the path of its file.
        lm_weight: weight of the language model. Default 0.5.
        word_score: added for each word. Default 1.5.
        pronunciations: of the words, if the tokens are phonemes. Default None: the tokens are letters.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        ValueError: for weights out of range, a file that is no language model, a tokenizer of word pieces, or one that
            can write none of the words.

    Example:
        >>> import tempfile
        >>> from favor.models.speech import WordLexicon, train_tokenizer, write_arpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_arpa(["GOOD DAY", "GOOD MORNING"], f"{folder}/lm.arpa")
        ...     print(WordLexicon(train_tokenizer(["GOOD MORNING DAY"], "char"), path).words)
        3
    """

    beam_size = 200
    piece = 1500  # frames searched at once: 30 seconds of 20 ms

    def __init__(
        self,
        tokenizer: ConformerTokenizer,
        language_model: str | Path | NgramModel,
        lm_weight: float = LM_WEIGHT,
        word_score: float = WORD_SCORE,
        pronunciations: Pronunciations | None = None,
    ) -> None:
        needs("lm", "flashlight")
        from flashlight.lib.text.decoder import SmearingMode, Trie

        self.model = language_model if isinstance(language_model, NgramModel) else NgramModel(language_model)
        self.lm_weight = checked_weight("lm_weight", lm_weight, least=0)
        self.word_score = checked_weight("word_score", word_score)
        self.is_spoken = pronunciations is not None
        self.num_tokens, self.space = len(tokenizer), tokenizer.convert_tokens_to_ids(SPACE)
        self.tree = Trie(self.num_tokens, 0)
        self.names: dict[int, str] = {}
        alike: Counter[tuple[int, ...]] = Counter()
        for word, log_prob, ids in self._spelled(tokenizer, pronunciations):
            alike[ids] += 1
            if alike[ids] <= HOMOPHONES:
                self.names[self.model.index(word)] = word
                self.tree.insert([*ids, self.space], self.model.index(word), log_prob / LN10)
        check_words(bool(self.names), self.model, "pronounce" if self.is_spoken else "write")
        self.tree.smear(SmearingMode.MAX)

    def _spelled(
        self, tokenizer: ConformerTokenizer, pronunciations: Pronunciations | None
    ) -> Iterator[tuple[str, float, tuple[int, ...]]]:
        """Gives words with their log probabilities and tokens, the most probable words first."""
        anywhere = self.model.start(in_text=True)
        log_probs = {word: self.model.score(anywhere, word)[1] for word in self.model.words}
        said = [
            (word, text)
            for word in sorted(log_probs, key=lambda one: (-log_probs[one], one))
            for text in ([word] if pronunciations is None else pronunciations.spellings(word))
        ]
        rows = tokenizer([text for _, text in said])["input_ids"] if said else ()
        for (word, _), ids in zip(said, rows, strict=True):
            if tokenizer.unk_token_id in ids:
                continue
            if ids[0] != self.space or self.space in ids[1:]:
                raise ValueError("tokenizer must be one of characters for a lexicon; ctc_word_beam takes word pieces.")
            yield word, log_probs[word], tuple(ids[1:])

    @property
    def words(self) -> int:
        """Number of words that can be found."""
        return len(self.names)

    def weighted(self, lm_weight: float, word_score: float) -> WordLexicon:
        """Gives the words with other weights, without building the tree again."""
        other = copy.copy(self)
        other.lm_weight = checked_weight("lm_weight", lm_weight, least=0)
        other.word_score = checked_weight("word_score", word_score)
        return other

    def score(self, words: Sequence[str]) -> float:
        """Gives the score of a text, without its CTC log probability."""
        state, total = self.model.start(), 0.0
        for word in words:
            state, log_prob = self.model.score(state, word)
            total += log_prob
        return self.lm_weight * (total + self.model.finish(state)) + self.word_score * len(words)

    def start(self) -> None:
        """Gives no context: each piece is a text of its own."""

    def after(self, context: None, text: Hypothesis) -> None:
        """Gives no context."""

    def cut(self, log_probs: Tensor, blank: int) -> int:
        """Gives the best of some frames for the end of a piece: the middle of the longest silence.

        Without a frame whose best label is the blank it is the likeliest blank.
        """
        best, length, run = int(log_probs[:, blank].argmax()), 0, 0
        for place, silent in enumerate((log_probs.argmax(-1) == blank).tolist()):
            run = run + 1 if silent else 0
            if run > length:
                best, length = place - run // 2, run
        return best

    def search(self, log_probs: Tensor, context: None, ends: bool, beam_size: int, blank: int) -> list[Hypothesis]:
        """Searches a piece `[n, V]` as a whole text, by the decoder of flashlight-text with a lexicon."""
        from flashlight.lib.text.decoder import CriterionType, LexiconDecoder, LexiconDecoderOptions

        options = LexiconDecoderOptions(
            beam_size=beam_size,
            beam_size_token=log_probs.shape[-1],
            beam_threshold=THRESHOLD,
            lm_weight=LN10 * self.lm_weight,  # the decoder's language model has logarithms to the base 10
            word_score=self.word_score,
            unk_score=-math.inf,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        decoder: Any = LexiconDecoder(options, self.tree, self.model.kenlm, self.space, blank, -1, [], False)
        silent = log_probs[:, blank] > SURE
        goes_on = torch.cat([silent[:1] & False, silent[1:] & silent[:-1]])
        # A word ends with a space, so one more frame ends the last one.
        last = log_probs.new_full((1, log_probs.shape[-1]), -math.inf)
        last[:, self.space] = 0.0
        frames = torch.cat([log_probs[~goes_on], last]).contiguous()
        results = decoder.decode(frames.data_ptr(), len(frames), frames.shape[-1])
        said = {
            (tuple(self.names[number] for number in one.words if number >= 0), self._tokens(one.tokens, blank))
            for one in results
        }
        return self._scored(log_probs, sorted(said), blank)

    def _tokens(self, path: Sequence[int], blank: int) -> tuple[int, ...]:
        """Gives the tokens of a path of the decoder, each word with one space in front of it."""
        kept = [token for token, _ in itertools.groupby(path) if token != blank]
        words = [list(own) for is_space, own in itertools.groupby(kept, self.space.__eq__) if not is_space]
        return tuple(token for own in words for token in (self.space, *own))

    def _scored(
        self, log_probs: Tensor, said: Sequence[tuple[tuple[str, ...], tuple[int, ...]]], blank: int
    ) -> list[Hypothesis]:
        """Gives texts, from words and tokens, with the score of their best tokens."""
        counts = torch.tensor([len(tokens) for _, tokens in said])
        targets = torch.tensor([token for _, tokens in said for token in tokens], dtype=torch.long)
        rows = log_probs[:, None].expand(-1, len(said), -1)
        frames = torch.full_like(counts, len(log_probs))
        if len(log_probs):
            losses = functional.ctc_loss(rows, targets, frames, counts, blank=blank, reduction="none")
        else:
            losses = torch.where(counts == 0, 0.0, math.inf)
        best: dict[tuple[str, ...], Hypothesis] = {}
        for (words, tokens), loss in zip(said, losses.tolist(), strict=True):
            one = Hypothesis(list(tokens), self.score(words) - loss, words)
            if math.isfinite(one.log_prob) and (words not in best or one.log_prob > best[words].log_prob):
                best[words] = one
        return sorted(best.values(), key=lambda one: -one.log_prob)
