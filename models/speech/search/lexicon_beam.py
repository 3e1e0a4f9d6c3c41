"""Beam search of CTC among the words of a language model, by the decoder of flashlight-text."""

from __future__ import annotations

import copy
import functools
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
from favor.models.speech.search.common import Hypothesis
from favor.models.speech.search.ngram import LN10, NgramModel
from favor.models.speech.search.pieces import PieceSearch, search_rows
from favor.models.speech.search.scores import LM_WEIGHT, WORD_SCORE, checked_weight
from favor.models.speech.search.word_beam import THRESHOLD
from favor.models.speech.transcript.pronunciations import Pronunciations
from favor.models.speech.transcript.tokenizer import SPACE, ConformerTokenizer

LEXICON_BEAM = 200
PIECE = 1500  # frames searched at once: 30 seconds of 20 ms
SURE = math.log(0.999)  # of a blank, for the search alone
HOMOPHONES = 6  # words with the same tokens that the tree of flashlight-text can hold


class WordLexicon:
    """The words of a language model as a tree of tokens, for `ctc_lexicon_beam`.

    The score of a text with words w_1 to w_n is lm_weight * log P(w_1 ... w_n </s>) + word_score * n, as in
    `WordScorer`. No other words can be found. Each beginning of a word counts as the most probable word with it, so
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
        if not self.names:
            said = "pronounce" if self.is_spoken else "write"
            raise ValueError(
                f"language_model has no word that the tokenizer can {said}; one of its words is "
                f"{min(self.model.words, default='')!r}. Write its texts as the transcripts of the speech model."
            )
        self.tree.smear(SmearingMode.MAX)

    def _spelled(
        self, tokenizer: ConformerTokenizer, pronunciations: Pronunciations | None
    ) -> Iterator[tuple[str, float, tuple[int, ...]]]:
        """Gives words with their log probabilities and tokens, the most probable words first."""
        anywhere = self.model.start(in_text=True)
        log_probs = {word: self.model.score(anywhere, word)[1] for word in self.model.words}
        words, written = [], []
        for word in sorted(log_probs, key=lambda one: (-log_probs[one], one)):
            for text in [word] if pronunciations is None else pronunciations.spellings(word):
                words.append(word)
                written.append(text)
        for word, ids in zip(words, tokenizer(written)["input_ids"] if written else (), strict=True):
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
        """Gives the words with other weights, without building the tree again.

        Raises:
            ValueError: for weights out of range.
        """
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


@torch.no_grad()
def ctc_lexicon_beam(
    logits: Tensor,
    lengths: Tensor | Sequence[int],
    lexicon: WordLexicon,
    beam_size: int = LEXICON_BEAM,
    blank: int = 0,
    piece: int = PIECE,
) -> list[list[Hypothesis]]:
    """Runs a beam search for the text of known words with the best sum of CTC log probability and score.

    The decoder of flashlight-text (Pratap et al., "Wav2Letter++", arXiv:1812.07625) with a lexicon. It is much faster
    than `ctc_word_beam`, which finds other words too. The score of each text that is found is exact: its CTC
    probability is the sum over all alignments, of the pronunciation that the search has found for the text. The search
    itself sees one frame of each run of almost sure blanks. A row of more than `piece` frames is searched in pieces,
    cut in the middle of a long run of blanks; each piece is a text of its own for the language model. Needs the extra
    `lm`.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        lexicon: the words, with the tokenizer that has the V tokens.
        beam_size: hypotheses kept after each frame. Default 200.
        blank: label of the blank. Default 0.
        piece: frames that are searched at once, at least 3. Default 1500; the decoder keeps all that it tried in them.

    Returns:
        For each row up to `beam_size` hypotheses, the best first; `log_prob` is the sum. Hypotheses of a row that was
        cut differ after the last cut only. No text comes twice.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths, a blank or a beam size that do not fit, for a tokenizer with another number of
            tokens, or for logits with NaN or +inf.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from favor.models.speech import WordLexicon, ctc_lexicon_beam, train_tokenizer, write_arpa
        >>> tokenizer = train_tokenizer(["HOLD", "COLD"], "char")
        >>> logits = torch.full((1, 5, len(tokenizer)), -9.0)
        >>> logits[0, range(5), tokenizer("COLD").input_ids] = 1.0
        >>> logits[0, 1, tokenizer("HOLD").input_ids[1]] = 1.5
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lexicon = WordLexicon(tokenizer, write_arpa(["COLD DAY"], f"{folder}/lm.arpa"))
        >>> tokenizer.decode(ctc_lexicon_beam(logits, [5], lexicon)[0][0].tokens, group_tokens=False)
        'COLD'
    """
    begin = functools.partial(LexiconSearch, logits.shape[-1], lexicon, beam_size, blank, piece)
    return search_rows(logits, lengths, begin)


class LexiconSearch(PieceSearch):
    """The search of `ctc_lexicon_beam`, where each piece is a text of its own; it has the same arguments."""

    def __init__(
        self, labels: int, lexicon: WordLexicon, beam_size: int = LEXICON_BEAM, blank: int = 0, piece: int | None = None
    ) -> None:
        super().__init__(labels, lexicon.num_tokens, beam_size, blank, PIECE if piece is None else piece, "lexicon")
        self._lexicon, self.space = lexicon, lexicon.space if lexicon.is_spoken else None

    def cut(self, log_probs: Tensor) -> int:
        """Finds the middle of the longest silence."""
        return _middle_of_blanks(log_probs, self.blank)

    def decode(self, log_probs: Tensor, ends: bool) -> list[Hypothesis]:
        """Searches a piece as a whole text."""
        return _decode(log_probs, self._lexicon, self.beam_size, self.blank)

    def go_on(self, best: Hypothesis) -> None:
        """Does nothing."""


def _middle_of_blanks(row: Tensor, blank: int) -> int:
    """Finds the middle of the longest run of frames whose best label is the blank; without one, the likeliest blank."""
    best, length, run = int(row[:, blank].argmax()), 0, 0
    for place, silent in enumerate((row.argmax(-1) == blank).tolist()):
        run = run + 1 if silent else 0
        if run > length:
            best, length = place - run // 2, run
    return best


def _decode(log_probs: Tensor, lexicon: WordLexicon, beam_size: int, blank: int) -> list[Hypothesis]:
    """Searches one piece, as a whole text."""
    from flashlight.lib.text.decoder import CriterionType, LexiconDecoder, LexiconDecoderOptions

    options = LexiconDecoderOptions(
        beam_size=beam_size,
        beam_size_token=log_probs.shape[-1],
        beam_threshold=THRESHOLD,
        lm_weight=LN10 * lexicon.lm_weight,  # the decoder's language model has logarithms to the base 10
        word_score=lexicon.word_score,
        unk_score=-math.inf,
        sil_score=0.0,
        log_add=True,
        criterion_type=CriterionType.CTC,
    )
    decoder: Any = LexiconDecoder(options, lexicon.tree, lexicon.model.kenlm, lexicon.space, blank, -1, [], False)
    silent = log_probs[:, blank] > SURE
    goes_on = torch.cat([silent[:1] & False, silent[1:] & silent[:-1]])
    # A word ends with a space, so one more frame ends the last one.
    last = log_probs.new_full((1, log_probs.shape[-1]), -math.inf)
    last[:, lexicon.space] = 0.0
    frames = torch.cat([log_probs[~goes_on], last]).contiguous()
    results = decoder.decode(frames.data_ptr(), len(frames), frames.shape[-1])
    said = {(_words(one.words, lexicon), _tokens(one.tokens, lexicon, blank)) for one in results}
    return _scored(log_probs, sorted(said), lexicon, blank)


def _words(numbers: Sequence[int], lexicon: WordLexicon) -> tuple[str, ...]:
    """Gives the words of a path of the decoder."""
    return tuple(lexicon.names[number] for number in numbers if number >= 0)


def _tokens(path: Sequence[int], lexicon: WordLexicon, blank: int) -> tuple[int, ...]:
    """Gives the tokens of a path of the decoder, each word with one space in front of it."""
    kept = [token for token, _ in itertools.groupby(path) if token != blank]
    words = [list(own) for is_space, own in itertools.groupby(kept, lexicon.space.__eq__) if not is_space]
    return tuple(token for own in words for token in (lexicon.space, *own))


def _scored(
    log_probs: Tensor, said: Sequence[tuple[tuple[str, ...], tuple[int, ...]]], lexicon: WordLexicon, blank: int
) -> list[Hypothesis]:
    """Gives texts, from words and tokens, with the score of their best tokens.

    The best text is the first one. Those that the frames cannot say are left out.
    """
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
        one = Hypothesis(list(tokens), lexicon.score(words) - loss, words)
        if math.isfinite(one.log_prob) and (words not in best or one.log_prob > best[words].log_prob):
            best[words] = one
    return sorted(best.values(), key=lambda one: -one.log_prob)
