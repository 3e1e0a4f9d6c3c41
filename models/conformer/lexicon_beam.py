"""Beam search of CTC among the words of a language model, by the decoder of flashlight-text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from favor._parts import needs
from favor.models.conformer.ctc_decoding import (
    Hypothesis,
    check_beam,
    check_blank,
    checked_lengths,
    checked_log_probs,
)
from favor.models.conformer.ngram import LN10, NgramModel
from favor.models.conformer.tokenization_conformer import SPACE, ConformerTokenizer
from favor.models.conformer.word_beam import THRESHOLD
from favor.models.conformer.word_scores import LM_WEIGHT, WORD_SCORE, WordScorer

LEXICON_BEAM = 200


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
) -> list[list[Hypothesis]]:
    """Runs a beam search for the text of known words with the best sum of CTC log probability and score.

    The decoder of flashlight-text (Pratap et al., "Wav2Letter++", arXiv:1812.07625) with a lexicon. It is much faster
    than `ctc_word_beam`, which finds other words too. The score of each text that is found is exact: its CTC
    probability is the sum over all alignments. Needs the extra `lm`.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        lexicon: the words, with the tokenizer that has the V tokens.
        beam_size: hypotheses kept after each frame. Default 200.
        blank: label of the blank. Default 0.

    Returns:
        For each row up to `beam_size` hypotheses, the best first; `log_prob` is the sum.

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
    from flashlight.lib.text.decoder import CriterionType, LexiconDecoder, LexiconDecoderOptions

    values = checked_lengths("logits", logits, lengths)
    check_beam(beam_size)
    check_blank(blank, logits.shape[-1])
    if logits.shape[-1] != lexicon.num_tokens:
        raise ValueError(
            f"logits must be [B, L, {lexicon.num_tokens}], as many as lexicon's tokens; got {logits.shape}."
        )
    options = LexiconDecoderOptions(
        beam_size=beam_size,
        beam_size_token=logits.shape[-1],
        beam_threshold=THRESHOLD,
        lm_weight=LN10 * lexicon.scorer.lm_weight,  # the decoder's language model has logarithms to the base 10
        word_score=lexicon.scorer.word_score,
        unk_score=-math.inf,
        sil_score=0.0,
        log_add=True,
        criterion_type=CriterionType.CTC,
    )
    decoder: Any = LexiconDecoder(options, lexicon.tree, lexicon.kenlm, lexicon.space, blank, -1, [], False)
    found = []
    for row, length in zip(logits, values, strict=True):
        log_probs = checked_log_probs(row[:length]).float().cpu()
        # A word ends with a space, so one more frame ends the last one.
        last = torch.full_like(log_probs[:1], -math.inf)
        if length == 0:
            last = log_probs.new_full((1, logits.shape[-1]), -math.inf)
        last[:, lexicon.space] = 0.0
        frames = torch.cat([log_probs, last]).contiguous()
        results = decoder.decode(frames.data_ptr(), len(frames), frames.shape[-1])
        texts = dict.fromkeys(tuple(lexicon.names[word] for word in one.words if word >= 0) for one in results)
        found.append(_scored(log_probs, [list(text) for text in texts], lexicon, blank))
    return found


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
