"""Beam search of CTC that scores words, by the decoder of flashlight-text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from favor._parts import needs
from favor.models.speech.search.common import Hypothesis
from favor.models.speech.search.pieces import PieceSearch, search_rows
from favor.models.speech.search.scores import Context, WordScorer

BEAM_SIZE = 50
TOKENS = 32  # the most probable ones of each frame are tried
PIECE = 500  # frames searched at once: 20 seconds, since the decoder keeps all that it tried until it is done
THRESHOLD = 1e4  # drops hypotheses that are worse than the best by more: those of probability 0


@torch.no_grad()
def ctc_word_beam(
    logits: Tensor,
    lengths: Tensor | Sequence[int],
    scorer: WordScorer,
    beam_size: int = BEAM_SIZE,
    blank: int = 0,
    piece: int = PIECE,
) -> list[list[Hypothesis]]:
    """Runs a beam search for the text with the best sum of CTC log probability and the score of its words.

    The decoder of flashlight-text (Pratap et al., "Wav2Letter++", arXiv:1812.07625) without a lexicon: any word can be
    found. The CTC probability is summed over alignments, and each frame tries its 32 most probable tokens. A row of
    more than `piece` frames is searched in pieces, cut where the blank is most probable; the score of words goes on
    from the best text so far. Needs the extra `lm`.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        scorer: language model and hotwords, with the tokenizer that has the V tokens.
        beam_size: hypotheses kept after each frame; a text takes two places while it can end in a blank and in its
            last token. Default 50.
        blank: label of the blank. Default 0.
        piece: frames that are searched at once, at least 3. Default 500; the decoder keeps all that it tried in them.

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
        >>> for words in ([], ["COLD"]):
        ...     best = ctc_word_beam(logits, [5], WordScorer(tokenizer, hotwords=words))[0][0]
        ...     print(tokenizer.decode(best.tokens, group_tokens=False))
        HOLD
        COLD
    """
    begin = functools.partial(WordSearch, logits.shape[-1], scorer, beam_size, blank, piece)
    return search_rows(logits, lengths, begin)


class WordSearch(PieceSearch):
    """The search of `ctc_word_beam`, whose scores of words go on from piece to piece; it has the same arguments."""

    def __init__(
        self, labels: int, scorer: WordScorer, beam_size: int = BEAM_SIZE, blank: int = 0, piece: int | None = None
    ) -> None:
        needs("lm", "flashlight")
        super().__init__(labels, scorer.num_tokens, beam_size, blank, PIECE if piece is None else piece, "scorer")
        self._scorer, self._context = scorer, scorer.start()

    def cut(self, log_probs: Tensor) -> int:
        """Finds the likeliest blank."""
        return int(log_probs[:, self.blank].argmax())

    def decode(self, log_probs: Tensor, ends: bool) -> list[Hypothesis]:
        """Searches a piece from the context on that the pieces before it have left."""
        return _decode(log_probs.contiguous(), self._scorer, self._context, ends, self.beam_size, self.blank)

    def go_on(self, best: Hypothesis) -> None:
        """Moves the context over the text of a piece."""
        for token in best.tokens:
            self._context, _ = self._scorer.advance(self._context, token)


def _decode(
    log_probs: Tensor, scorer: WordScorer, context: Context, ends: bool, beam_size: int, blank: int
) -> list[Hypothesis]:
    """Searches one piece from a context on; `ends` says whether the text ends with it."""
    from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions

    scores = _adapter()(scorer, context, ends)
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
