"""Frames of tokens under CTC: of the most probable path, and of a text that is known (forced alignment)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from favor.models.speech.ctc import check_blank, checked_lengths, checked_log_probs
from favor.models.speech.encoder import IGNORED
from favor.models.speech.spans import Emission


@torch.no_grad()
def ctc_emissions(logits: Tensor, lengths: Tensor | Sequence[int], blank: int = 0) -> list[list[Emission]]:
    """The tokens of `ctc_greedy`, with their frames and confidences.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        blank: label of the blank. Default 0.

    Returns:
        Tokens of each row. A token has the frames in which the most probable path repeats it, and its confidence is
        the mean of its probability over them.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths or a blank that do not fit, or logits with NaN or +inf.

    Example:
        >>> import torch
        >>> from favor.models.speech import ctc_emissions
        >>> [(one.token, one.start, one.end) for one in ctc_emissions(9 * torch.eye(3)[None, [0, 1, 1, 0, 2]], [5])[0]]
        [(1, 1, 3), (2, 4, 5)]
    """
    values = checked_lengths("logits", logits, lengths)
    check_blank(blank, logits.shape[-1])
    found = []
    for row, length in zip(logits, values, strict=True):
        search = GreedyEmissions(blank)
        search.add(row[:length])
        found.append([*search.final, *search.open])
    return found


@torch.no_grad()
def ctc_align(logits: Tensor, lengths: Tensor | Sequence[int], labels: Tensor, blank: int = 0) -> list[list[Emission]]:
    """Aligns texts that are known to the frames: the most probable CTC path that gives them (Viterbi).

    The path goes through the labels with blanks around them, 2 U + 1 states, and stays, steps, or skips a blank
    between different labels. All rows go together, frame by frame. Needs B L (2 U + 1) bytes for the way back.

    Args:
        logits: `[B, L, V]`, before or after log-softmax.
        lengths: frames of each row `[B]`; what comes after is ignored.
        labels: `[B, U]`, token ids without blanks, padded with -100.
        blank: label of the blank. Default 0.

    Returns:
        The labels of each row with their frames on the path. The confidence is the mean of the label's probability
        over its frames.

    Raises:
        TypeError: for lengths or labels that are not integers.
        ValueError: for shapes, lengths, labels or a blank that do not fit, for more labels than the frames can hold (a
            frame for each label, and one for the blank between two equal ones), for a text of probability 0, or for
            logits with NaN or +inf.

    Example:
        >>> import torch
        >>> from favor.models.speech import ctc_align
        >>> [(one.token, one.start, one.end) for one in ctc_align(torch.eye(3)[None, [0, 1, 1, 2]], [4], [[1, 2]])[0]]
        [(1, 1, 3), (2, 3, 4)]
    """
    frames = checked_lengths("logits", logits, lengths)
    check_blank(blank, logits.shape[-1])
    texts = _checked_labels(labels, frames, logits.shape[-1], blank)
    if not texts:
        return []
    log_probs = pad_sequence([checked_log_probs(row[:n]) for row, n in zip(logits, frames, strict=True)], True)
    states = torch.full((len(texts), 2 * max(map(len, texts)) + 1), blank, device=logits.device)
    for row, text in enumerate(texts):
        states[row, 1 : 2 * len(text) : 2] = torch.tensor(text, dtype=torch.long, device=logits.device)
    last = torch.tensor([2 * len(text) for text in texts], device=logits.device)
    paths = _viterbi(log_probs, torch.tensor(frames, device=logits.device), states, last, blank).cpu()
    labels_of, probabilities = states.gather(1, paths.to(states.device)), log_probs.exp()
    chosen = probabilities.gather(2, labels_of[..., None])[..., 0]
    found = []
    for path, tokens, sure, n in zip(paths.tolist(), labels_of.tolist(), chosen.tolist(), frames, strict=True):
        runs = GreedyEmissions(blank)
        runs.add_path(path[:n], tokens[:n], sure[:n])
        found.append([*runs.final, *runs.open])
    return found


class GreedyEmissions:
    """Tokens of the most probable path of a row whose logits come in parts; those in `final` change no more."""

    def __init__(self, blank: int) -> None:
        self.final: list[Emission] = []
        self._blank, self._frames = blank, 0
        self._state, self._label, self._start, self._sure = -1, blank, 0, 0.0

    @property
    def open(self) -> list[Emission]:
        """The token of the last frame, which may go on; none after a blank."""
        length = self._frames - self._start
        is_blank = self._label == self._blank
        return [] if is_blank else [Emission(self._label, self._start, self._frames, self._sure / length)]

    def add(self, logits: Tensor) -> None:
        """Takes the next logits `[n, V]`."""
        best = logits.argmax(-1)
        probabilities = checked_log_probs(logits).gather(-1, best[:, None])[:, 0].exp()
        self.add_path(best.tolist(), best.tolist(), probabilities.tolist())

    def add_path(self, states: list[int], labels: list[int], probabilities: list[float]) -> None:
        """Takes the state, the label and the probability of each of the next frames of any path."""
        for state, label, probability in zip(states, labels, probabilities, strict=True):
            if state != self._state:
                self.final += self.open
                self._state, self._label, self._start, self._sure = state, label, self._frames, 0.0
            self._sure += probability
            self._frames += 1


def _checked_labels(labels: Tensor, frames: list[int], size: int, blank: int) -> list[list[int]]:
    """The labels of each row; raises ValueError for those that cannot be aligned."""
    given = torch.as_tensor(labels)
    if given.is_floating_point() or given.dtype == torch.bool:
        raise TypeError(f"labels must be integers, token ids; got {given.dtype}.")
    if given.dim() != 2 or len(given) != len(frames):
        raise ValueError(f"labels must be [{len(frames)}, U], a row for each of logits, got {list(given.shape)}.")
    counts = (given != IGNORED).sum(-1).tolist()
    texts = [row[:n] for row, n in zip(given.tolist(), counts, strict=True)]
    for row, (text, available) in enumerate(zip(texts, frames, strict=True)):
        wrong = [label for label in text if not 0 <= label < size or label == blank]
        if wrong:
            raise ValueError(
                f"labels must be 0 to {size - 1} and not the blank {blank}, got {wrong[0]} in row {row}. "
                "Padding of -100 comes after the labels."
            )
        repeats = sum(first == second for first, second in itertools.pairwise(text))
        if len(text) + repeats > available:
            raise ValueError(
                f"row {row} has {len(text)} labels, which need {len(text) + repeats} frames, got {available}. Is it "
                "the text of this audio?"
            )
    return texts


def _viterbi(log_probs: Tensor, frames: Tensor, states: Tensor, last: Tensor, blank: int) -> Tensor:
    """Finds the most probable path: the place in `states` at each frame, `[B, L]`."""
    length, rows = log_probs.shape[1], torch.arange(len(states), device=states.device)
    # A blank is skipped between different labels alone: equal ones would become one.
    skips = functional.pad(states[:, 2:] != states[:, :-2], (2, 0))[:, : states.shape[1]]
    scores = torch.full(states.shape, -torch.inf, dtype=log_probs.dtype, device=log_probs.device)
    scores[:, 0] = 0  # before the first frame: from here a path goes to the first blank or the first label
    moves = torch.zeros(length, *states.shape, dtype=torch.int8, device=states.device)
    for frame in range(length):
        before = functional.pad(scores, (2, 0), value=-torch.inf)
        skipped = before[:, :-2].masked_fill(~skips, -torch.inf)
        best, move = torch.stack([scores, before[:, 1:-1], skipped]).max(0)
        real = (frame < frames)[:, None]
        scores = torch.where(real, best + log_probs[:, frame].gather(1, states), scores)
        moves[frame] = move.masked_fill(~real, 0)
    before_last = (last - 1).clamp(min=0)
    state = torch.where(scores[rows, before_last] > scores[rows, last], before_last, last)
    impossible = scores[rows, state].isneginf().nonzero().flatten().tolist()
    if impossible:
        raise ValueError(
            f"the labels of row {impossible[0]} have probability 0: logits are -inf on each of their paths."
        )
    path = torch.zeros(len(states), length, dtype=torch.long, device=states.device)
    for frame in range(length - 1, -1, -1):
        path[:, frame] = state
        state = state - moves[frame, rows, state]
    return path
