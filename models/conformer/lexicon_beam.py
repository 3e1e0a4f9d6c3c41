"""Beam search of CTC among the words of a language model, by the decoder of flashlight-text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from favor._parts import needs
from favor.models.conformer.ctc_alignment import ctc_align
from favor.models.conformer.ctc_decoding import (
    Hypothesis,
    check_beam,
    check_blank,
    checked_lengths,
    checked_log_probs,
)
from favor.models.conformer.ngram import LN10, NgramModel
from favor.models.conformer.spans import Emission
from favor.models.conformer.tokenization_conformer import SPACE, ConformerTokenizer
from favor.models.conformer.word_beam import THRESHOLD
from favor.models.conformer.word_scores import LM_WEIGHT, WORD_SCORE, WordScorer

LEXICON_BEAM = 200
PIECE = 1500  # frames searched at once: 30 seconds of 20 ms
SURE = math.log(0.999)  # of a blank, for the search alone


class WordLexicon:
    """The words of a language model as a tree of tokens, for `ctc_lexicon_beam`.

    The score of a text with words w_1 to w_n is lm_weight * log P(w_1 ... w_n </s>) + word_score * n, as in
    `WordScorer`. No other words can be found. Each beginning of a word counts as the most probable word with it, so
    that the search drops unlikely words before they end.

    Args:
        tokenizer: of the speech model.
        language_model: an `NgramModel`, or the path of its file.
        lm_weight: weight of the language model. Default 0.5.
        word_score: added for each word. Default 1.5.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        ValueError: for weights out of range, a file that is no language model, a tokenizer of word pieces, or one that
            can write none of the words.

    Example:
        >>> import tempfile
        >>> from favor.models.conformer import WordLexicon, train_tokenizer, write_arpa
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
    ) -> None:
        needs("lm", "flashlight")
        from flashlight.lib.text.decoder import SmearingMode, Trie

        model = language_model if isinstance(language_model, NgramModel) else NgramModel(language_model)
        self.scorer = WordScorer(tokenizer, model, lm_weight, word_score)
        self.num_tokens, self.kenlm = len(tokenizer), model.kenlm
        self.space, unknown = tokenizer.convert_tokens_to_ids(SPACE), tokenizer.unk_token_id
        self.tree = Trie(self.num_tokens, 0)
        self.names: dict[int, str] = {}
        self._ids: dict[str, list[int]] = {}
        names = sorted(model.words)
        for word, ids in zip(names, tokenizer(names)["input_ids"], strict=True):
            if unknown in ids:
                continue
            if ids[0] != self.space or self.space in ids[1:]:
                raise ValueError("tokenizer must be one of characters for a lexicon; ctc_word_beam takes word pieces.")
            self._ids[word], self.names[model.index(word)] = ids, word
            self.tree.insert([*ids[1:], self.space], model.index(word), model.score(model.start(), word)[1] / LN10)
        self.tree.smear(SmearingMode.MAX)

    @property
    def words(self) -> int:
        """Number of words that can be found."""
        return len(self.names)

    def tokens(self, words: Sequence[str]) -> list[int]:
        """Gives the tokens of a text of words that can be found."""
        return [token for word in words for token in self._ids[word]]


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
    probability is the sum over all alignments. The search itself sees one frame of each run of almost sure blanks. A
    row of more than `piece` frames is searched in pieces, cut in the middle of a long run of blanks; each piece is a
    text of its own for the language model. Needs the extra `lm`.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        lexicon: the words, with the tokenizer that has the V tokens.
        beam_size: hypotheses kept after each frame. Default 200.
        blank: label of the blank. Default 0.
        piece: frames that are searched at once, at least 3. Default 1500; the decoder keeps all that it tried in them.

    Returns:
        For each row up to `beam_size` hypotheses, the best first; `log_prob` is the sum. Hypotheses of a row that was
        cut differ after the last cut only.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths, a blank or a beam size that do not fit, for a tokenizer with another number of
            tokens, or for logits with NaN or +inf.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from favor.models.conformer import WordLexicon, ctc_lexicon_beam, train_tokenizer, write_arpa
        >>> tokenizer = train_tokenizer(["HOLD", "COLD"], "char")
        >>> logits = torch.full((1, 5, len(tokenizer)), -9.0)
        >>> logits[0, range(5), tokenizer("COLD").input_ids] = 1.0
        >>> logits[0, 1, tokenizer("HOLD").input_ids[1]] = 1.5
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lexicon = WordLexicon(tokenizer, write_arpa(["COLD DAY"], f"{folder}/lm.arpa"))
        >>> tokenizer.decode(ctc_lexicon_beam(logits, [5], lexicon)[0][0].tokens, group_tokens=False)
        'COLD'
    """
    if piece < 3:
        raise ValueError(f"piece must be at least 3 frames, got {piece}.")
    found = []
    for row in _rows(logits, lengths, lexicon, beam_size, blank):
        before: list[int] = []
        score = 0.0
        *cut, (_, last) = _pieces(row, lexicon, beam_size, blank, piece)
        for _, hypotheses in cut:
            best = _first(hypotheses)
            before, score = before + best.tokens, score + best.log_prob
        found.append([Hypothesis(before + one.tokens, score + one.log_prob) for one in last])
    return found


@torch.no_grad()
def lexicon_emissions(
    logits: Tensor,
    lengths: Tensor | Sequence[int],
    lexicon: WordLexicon,
    beam_size: int = LEXICON_BEAM,
    blank: int = 0,
) -> list[list[Emission]]:
    """Finds the tokens of the best hypothesis of `ctc_lexicon_beam`, with the frames and confidences of `ctc_align`."""
    found = []
    for row in _rows(logits, lengths, lexicon, beam_size, blank):
        emissions = []
        for frames, hypotheses in _pieces(row, lexicon, beam_size, blank, PIECE):
            if not _first(hypotheses).tokens:
                continue
            part = row[None, frames.start : frames.stop]
            tokens = torch.tensor([hypotheses[0].tokens], dtype=torch.long)
            for one in ctc_align(part, [len(frames)], tokens, blank=blank)[0]:
                emissions.append(Emission(one.token, one.start + frames.start, one.end + frames.start, one.confidence))
        found.append(emissions)
    return found


def _rows(
    logits: Tensor, lengths: Tensor | Sequence[int], lexicon: WordLexicon, beam_size: int, blank: int
) -> Iterator[Tensor]:
    """Log probabilities `[length, V]` of each row, in float32 on the CPU, after a check of all arguments."""
    values = checked_lengths("logits", logits, lengths)
    check_beam(beam_size)
    check_blank(blank, logits.shape[-1])
    if logits.shape[-1] != lexicon.num_tokens:
        raise ValueError(
            f"logits must be [B, L, {lexicon.num_tokens}], as many as lexicon's tokens; got {logits.shape}."
        )
    for row, length in zip(logits, values, strict=True):
        yield checked_log_probs(row[:length]).float().cpu()


def _pieces(
    row: Tensor, lexicon: WordLexicon, beam_size: int, blank: int, most: int
) -> Iterator[tuple[range, list[Hypothesis]]]:
    """Searches a row piece by piece: frames and hypotheses."""
    first, end = 0, -1
    while end < len(row):
        end = len(row)
        if end - first > most:
            half = first + most // 2
            end = half + 1 + _middle_of_blanks(row[half : first + most - 1], blank)
        yield range(first, end), _decode(row[first:end], lexicon, beam_size, blank)
        first = end


def _first(hypotheses: list[Hypothesis]) -> Hypothesis:
    """Gives the best hypothesis, without text if the frames can say none."""
    return hypotheses[0] if hypotheses else Hypothesis([], -math.inf)


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
        lm_weight=LN10 * lexicon.scorer.lm_weight,  # the decoder's language model has logarithms to the base 10
        word_score=lexicon.scorer.word_score,
        unk_score=-math.inf,
        sil_score=0.0,
        log_add=True,
        criterion_type=CriterionType.CTC,
    )
    decoder: Any = LexiconDecoder(options, lexicon.tree, lexicon.kenlm, lexicon.space, blank, -1, [], False)
    silent = log_probs[:, blank] > SURE
    goes_on = torch.cat([silent[:1] & False, silent[1:] & silent[:-1]])
    # A word ends with a space, so one more frame ends the last one.
    last = log_probs.new_full((1, log_probs.shape[-1]), -math.inf)
    last[:, lexicon.space] = 0.0
    frames = torch.cat([log_probs[~goes_on], last]).contiguous()
    results = decoder.decode(frames.data_ptr(), len(frames), frames.shape[-1])
    texts = dict.fromkeys(tuple(lexicon.names[word] for word in one.words if word >= 0) for one in results)
    return _scored(log_probs, [list(text) for text in texts], lexicon, blank)


def _scored(log_probs: Tensor, texts: list[list[str]], lexicon: WordLexicon, blank: int) -> list[Hypothesis]:
    """Gives the texts with their scores, the best first, without those that the frames cannot say."""
    tokens = [lexicon.tokens(words) for words in texts]
    counts = torch.tensor([len(own) for own in tokens])
    targets = torch.tensor([token for own in tokens for token in own], dtype=torch.long)
    rows = log_probs[:, None].expand(-1, len(texts), -1)
    frames = torch.full_like(counts, len(log_probs))
    if len(log_probs):
        losses = functional.ctc_loss(rows, targets, frames, counts, blank=blank, reduction="none")
    else:
        losses = torch.where(counts == 0, 0.0, math.inf)
    scores = [lexicon.scorer.score(own) - float(loss) for own, loss in zip(tokens, losses, strict=True)]
    kept = [Hypothesis(own, score) for own, score in zip(tokens, scores, strict=True) if math.isfinite(score)]
    return sorted(kept, key=lambda one: -one.log_prob)
