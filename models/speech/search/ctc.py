"""From the logits of a CTC model to tokens: the best path, and prefix beam search."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from favor.models.speech.search.common import (
    Hypothesis,
    Prefixes,
    check_beam,
    check_blank,
    checked_lengths,
    checked_log_probs,
)

NEVER = -math.inf


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
    if not logits.numel():
        return [[] for _ in values]
    top, best = logits.max(-1)
    if any(row[:length].isnan().any() for row, length in zip(top.cpu(), values, strict=True)):
        raise ValueError("logits must be numbers, got NaN. Has the model diverged?")
    kept = best != blank
    kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    return [row[:n][keep[:n]].tolist() for row, keep, n in zip(best.cpu(), kept.cpu(), values, strict=True)]


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
    # node: (log probability that it ends in a blank, in its last token, either way), best first
    beam = {0: (0.0, NEVER, 0.0)}
    for row, labels in zip(log_probs, order, strict=True):
        stay = _stay(beam, prefixes, row, blank)
        # Entries are (score, -time of arrival, parent, token, ...), so that the older of two equal ones stays.
        heap: list[tuple] = []
        for node, (after_blank, after_token) in stay.items():
            score = _add(after_blank, after_token)
            if score > NEVER:
                heap.append((score, -len(heap), node, None, after_blank, after_token))
        heapq.heapify(heap)
        arrival = len(heap)
        for node, (ends_blank, _, total) in beam.items():
            for label in labels:
                if label == blank:
                    continue
                again = label == prefixes.last[node]
                score = (ends_blank if again else total) + row[label]
                if score == NEVER or (len(heap) >= beam_size and score <= heap[0][0]):
                    if again:
                        continue
                    break
                if prefixes.find(node, label) in stay:
                    continue
                arrival += 1
                entry = (score, -arrival, node, label, NEVER, score)
                if len(heap) < beam_size:
                    heapq.heappush(heap, entry)
                else:
                    heapq.heappushpop(heap, entry)
        heap.sort(reverse=True)
        beam = {
            node if label is None else prefixes.child(node, label): (ends_blank, ends_token, score)
            for score, _, node, label, ends_blank, ends_token in heap
        }
    return [Hypothesis(prefixes.tokens(node), total) for node, (_, _, total) in beam.items()]


def _stay(
    beam: dict[int, tuple[float, float, float]], prefixes: Prefixes, row: list[float], blank: int
) -> dict[int, tuple[float, float]]:
    """Keeps prefixes for one more frame: by a blank, by their last token again, or by that token after their parent."""
    stay = {}
    for node, (_, ends_token, total) in beam.items():
        last, parent = prefixes.last[node], prefixes.parents[node]
        after_token = ends_token + row[last] if node else NEVER
        if parent in beam:
            ends_blank, _, whole = beam[parent]
            after_token = _add(after_token, (ends_blank if prefixes.last[parent] == last else whole) + row[last])
        stay[node] = (total + row[blank], after_token)
    return stay


def _add(a: float, b: float) -> float:
    """Computes log(e^a + e^b)."""
    if a < b:
        a, b = b, a
    return a if b == NEVER else a + math.log1p(math.exp(b - a))
