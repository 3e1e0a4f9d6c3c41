"""Parts of all searches: hypotheses, a tree of their tokens, and checks of what is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hypothesis:
    """Tokens and how probable the search found them.

    Attributes:
        tokens: without blanks.
        log_prob: natural logarithm of their probability, summed over the alignments that the search kept.
        words: of the text, if the search is one among known words; else empty.

    Example:
        >>> from favor.models.speech import Hypothesis
        >>> Hypothesis(tokens=[1, 2], log_prob=-0.5).tokens
        [1, 2]
    """

    tokens: list[int]
    log_prob: float
    words: tuple[str, ...] = ()

    def then(self, after: Hypothesis) -> Hypothesis:
        """Puts the text of the frames that follow behind."""
        return Hypothesis(self.tokens + after.tokens, self.log_prob + after.log_prob, self.words + after.words)


class Prefixes:
    """Token sequences as nodes of a tree, so that a sequence is one number however long it is; the empty one is 0.

    Attributes:
        parents: of each node, -1 for the empty sequence.
        last: last token of each node, -1 for the empty sequence.
    """

    def __init__(self) -> None:
        self.parents, self.last = [-1], [-1]
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
    """Gives the lengths as a list, after a check that they fit.

    Args:
        name: of `frames` in messages.
        frames: `[B, L, ...]`, three dimensions.
        lengths: `[B]`, integers.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for other dimensions, or lengths below 0 or beyond L.
    """
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
