"""From the logits of a CTC model to tokens: the best path, and prefix beam search; parts of all searches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

NEVER = -math.inf


@dataclass(frozen=True)
class Hypothesis:
    """Tokens and how probable the search found them.

    Attributes:
        tokens: without blanks.
        log_prob: natural logarithm of their probability, summed over the alignments that the search kept.
        words: of the text, if the search is one among known words; else empty.
    """

    tokens: list[int]
    log_prob: float
    words: tuple[str, ...] = ()

    def then(self, after: Hypothesis) -> Hypothesis:
        """Puts the text of the frames that follow behind."""
        return Hypothesis(self.tokens + after.tokens, self.log_prob + after.log_prob, self.words + after.words)


class Prefixes:
    """Token sequences as nodes of a tree, so that a sequence is one number however long it is; the empty one is 0."""

    def __init__(self) -> None:
        self.parents, self.last = [-1], [-1]  # of each node; last tokens
        self._children: dict[tuple[int, int], int] = {}

    def child(self, node: int, token: int) -> int:
        """Gives the node of a sequence with one token more."""
        found = self._children.setdefault((node, token), len(self.parents))
        if found == len(self.parents):
            self.parents.append(node)
            self.last.append(token)
        return found

    def find(self, node: int, token: int) -> int | None:
        """Gives `child` if it was made before."""
        return self._children.get((node, token))

    def tokens(self, node: int) -> list[int]:
        """Gives the sequence of a node."""
        reverse = []
        while node:
            reverse.append(self.last[node])
            node = self.parents[node]
        return reverse[::-1]


def checked_lengths(name: str, frames: Tensor, lengths: Tensor | Sequence[int]) -> list[int]:
    """Gives lengths `[B]` of `frames` `[B, L, ...]` as a list; raises TypeError or ValueError if they do not fit."""
    if frames.dim() != 3:
        raise ValueError(f"{name} must have three dimensions, [B, L, features], got shape {tuple(frames.shape)}.")
    rows, length, _ = frames.shape
    given = torch.as_tensor(lengths)
    if given.numel() and (given.is_floating_point() or given.dtype == torch.bool):
        raise TypeError(f"lengths must be integers, numbers of frames; got {given.dtype}. Sum a mask over its frames.")
    if given.shape != (rows,):
        raise ValueError(f"lengths must have shape ({rows},), one for each row of {name}; got {tuple(given.shape)}.")
    values = [int(value) for value in given.tolist()]
    if any(not 0 <= value <= length for value in values):
        raise ValueError(
            f"lengths must lie between 0 and L = {length} of {name}, got {values}. "
            "Lengths of the audio must go through the model's subsampled_lengths first."
        )
    return values


def check_beam(beam_size: int) -> None:
    """Raises ValueError for a beam without hypotheses."""
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, got {beam_size}.")


def check_blank(blank: int, labels: int) -> None:
    """Raises ValueError for a blank that is no label."""
    if not 0 <= blank < labels:
        raise ValueError(f"blank must be one of the {labels} labels of logits, 0 to {labels - 1}; got {blank}.")


def checked_log_probs(row: Tensor) -> Tensor:
    """Log probabilities of one row `[L, V]`, at least float32; raises ValueError for logits that give none."""
    log_probs = torch.log_softmax(row, -1, dtype=torch.promote_types(row.dtype, torch.float32))
    if log_probs.isnan().any():
        raise ValueError("logits must be finite, or -inf for some labels; got NaN, +inf or -inf alone.")
    return log_probs


@torch.no_grad()
def ctc_greedy(logits: Tensor, lengths: Tensor | Sequence[int], blank: int = 0) -> list[list[int]]:
    """Finds the labeling of the most probable path: repeats are merged, then blanks dropped.

    Best path decoding of Graves et al., "Connectionist Temporal Classification", ICML 2006, section 3.2.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        blank: label of the blank. Default 0.

    Returns:
        Tokens of each row.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths or a blank that do not fit, or NaN.

    Example:
        >>> import torch
        >>> from favor.models.speech import ctc_greedy
        >>> ctc_greedy(torch.eye(3)[None, [1, 1, 0, 1, 2]], [5])
        [[1, 1, 2]]
    """
    values = checked_lengths("logits", logits, lengths)
    check_blank(blank, logits.shape[-1])
    found = []
    for row, length in zip(logits, values, strict=True):
        top, best = row[:length].max(-1)
        if top.isnan().any():
            raise ValueError("logits must be numbers, got NaN. Has the model diverged?")
        tokens = best.unique_consecutive()
        found.append(tokens[tokens != blank].tolist())
    return found


@torch.no_grad()
def ctc_prefix_beam(
    logits: Tensor, lengths: Tensor | Sequence[int], beam_size: int = 8, blank: int = 0
) -> list[list[Hypothesis]]:
    """Runs a prefix beam search: the probability of a labeling is summed over the alignments that lead to it.

    Each frame extends the `beam_size` most probable prefixes by every label. A prefix keeps two probabilities, of the
    alignments that end in a blank and in its last token, since a repeated token is a new one only after a blank.
    Graves, "Supervised Sequence Labelling with Recurrent Neural Networks", 2012, section 7.5; Hannun et al.,
    "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional Recurrent DNNs", arXiv:1408.2873,
    algorithm 1, without its language model. Only prefixes outside the beam are lost: with a beam that holds them all,
    log_prob is minus the CTC loss of the tokens.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        beam_size: prefixes kept after each frame. Default 8.
        blank: label of the blank. Default 0.

    Returns:
        For each row up to `beam_size` hypotheses, the most probable first.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths, a blank or a beam size that do not fit, or logits with NaN or +inf.

    Example:
        >>> import torch
        >>> from favor.models.speech import ctc_prefix_beam
        >>> ctc_prefix_beam(9 * torch.eye(3)[None, [1, 1, 0, 1, 2]], [5])[0][0].tokens
        [1, 1, 2]
    """
    values = checked_lengths("logits", logits, lengths)
    check_beam(beam_size)
    check_blank(blank, logits.shape[-1])
    # A token is out once beam_size candidates with the same parent beat it, and every label above it gives one, except
    # the last token of the parent, whose probability is shared out; labels further down are never needed.
    width = min(logits.shape[-1], beam_size + 1)
    found = []
    for row, length in zip(logits, values, strict=True):
        log_probs = checked_log_probs(row[:length])
        order = log_probs.topk(width, -1).indices
        found.append(_search(log_probs.tolist(), order.tolist(), beam_size, blank))
    return found


def _search(log_probs: list[list[float]], order: list[list[int]], beam_size: int, blank: int) -> list[Hypothesis]:
    """Runs `ctc_prefix_beam` for one row, from log probabilities and the labels of each frame, most probable first."""
    prefixes = Prefixes()
    beam = {0: (0.0, NEVER)}  # node: log probability that it ends in a blank, and in its last token; best first
    for row, labels in zip(log_probs, order, strict=True):
        total = {node: _add(*ends) for node, ends in beam.items()}
        stay = _stay(beam, total, prefixes, row, blank)
        found: list[tuple[float, int, int | None, tuple[float, float]]]
        found = [(_add(*ends), node, None, ends) for node, ends in stay.items()]
        floor = min(one[0] for one in found) if len(found) == beam_size else NEVER
        for node, (ends_blank, _) in beam.items():
            for label in labels:
                again = label == prefixes.last[node]
                score = (ends_blank if again else total[node]) + row[label]
                if score <= floor and not again:
                    break
                if score > floor and label != blank and prefixes.find(node, label) not in stay:
                    found.append((score, node, label, (NEVER, score)))
        best = heapq.nlargest(beam_size, (one for one in found if one[0] > NEVER), key=itemgetter(0))
        beam = {node if label is None else prefixes.child(node, label): ends for _, node, label, ends in best}
    return [Hypothesis(prefixes.tokens(node), _add(*ends)) for node, ends in beam.items()]


def _stay(
    beam: dict[int, tuple[float, float]], total: dict[int, float], prefixes: Prefixes, row: list[float], blank: int
) -> dict[int, tuple[float, float]]:
    """Keeps prefixes for one more frame: by a blank, by their last token again, or by that token after their parent."""
    stay = {}
    for node, (_, ends_token) in beam.items():
        last, parent = prefixes.last[node], prefixes.parents[node]
        after_token = ends_token + row[last] if node else NEVER
        if parent in beam:
            before = beam[parent][0] if prefixes.last[parent] == last else total[parent]
            after_token = _add(after_token, before + row[last])
        stay[node] = (total[node] + row[blank], after_token)
    return stay


def _add(a: float, b: float) -> float:
    """Computes log(e^a + e^b)."""
    low, high = sorted((a, b))
    return high if low == NEVER else high + math.log1p(math.exp(low - high))
