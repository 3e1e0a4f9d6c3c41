"""From the encoder of a Transducer to tokens: greedy search, and beam search with at most one token per frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from favor.models.speech.ctc import Hypothesis, Prefixes, check_beam, checked_lengths
from favor.models.speech.spans import Emission

BLANK = 0
DIVERGED = "the model's logits must be numbers, got NaN. Has the model diverged?"


class Transducer(Protocol):
    """Methods that the searches need of a model; label 0 is the blank and the start symbol."""

    def predict(
        self, tokens: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Gives prediction `[B, 1, P]` after one more token `[B, 1]`, and the state, batch first."""

    def join(self, hidden: Tensor, prediction: Tensor) -> Tensor:
        """Gives logits `[..., V]` of frames `[..., H]` and predictions `[..., P]`; leading dimensions broadcast."""


@torch.no_grad()
def transducer_greedy(
    model: Transducer,
    hidden: Tensor,
    lengths: Tensor | Sequence[int],
    max_symbols: int = 10,
    context: list[Tensor] | None = None,
) -> list[list[int]]:
    """Finds the most probable label at every step: a token is appended, a blank moves on to the next frame.

    All rows are searched at once, each at its own frame. Graves, "Sequence Transduction with Recurrent Neural
    Networks", arXiv:1211.3711, with the best label in place of a beam.

    Args:
        model: with `predict` and `join`.
        hidden: encoder output `[B, L, H]`.
        lengths: frames of each row `[B]`; what comes after is ignored.
        max_symbols: number of tokens at a frame after which the next frame begins, so that the search ends. Default 10.
        context: for audio that comes in pieces: an empty list before the first, filled here with what the next call
            needs. Default None.

    Returns:
        Tokens of each row.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes or lengths that do not fit, max_symbols below 1, or NaN from the model.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForTransducer
        >>> from favor.models.speech import transducer_greedy
        >>> model = ConformerForTransducer(ConformerConfig.preset("tiny", vocab_size=32)).eval()
        >>> len(transducer_greedy(model, torch.randn(2, 5, 128), [5, 3]))
        2
    """
    found = transducer_emissions(model, hidden, lengths, max_symbols, context)
    return [[emission.token for emission in row] for row in found]


@torch.no_grad()
def transducer_emissions(
    model: Transducer,
    hidden: Tensor,
    lengths: Tensor | Sequence[int],
    max_symbols: int = 10,
    context: list[Tensor] | None = None,
) -> list[list[Emission]]:
    """The tokens of `transducer_greedy`, with their frames and confidences.

    A Transducer says a token at one frame, often some time after it was spoken.

    Args:
        model, hidden, lengths, max_symbols, context: as in `transducer_greedy`; with a context frames are counted from
            the start of each piece.

    Returns:
        Tokens of each row; `end` is `start` + 1, and the confidence is the probability of the token at its step.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes or lengths that do not fit, max_symbols below 1, or NaN from the model.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForTransducer
        >>> from favor.models.speech import transducer_emissions
        >>> model = ConformerForTransducer(ConformerConfig.preset("tiny", vocab_size=32)).eval()
        >>> len(transducer_emissions(model, torch.randn(2, 5, 128), [5, 3]))
        2
    """
    ends = checked_lengths("hidden", hidden, lengths)
    if max_symbols < 1:
        raise ValueError(f"max_symbols must be at least 1, got {max_symbols}.")
    found: list[list[Emission]] = [[] for _ in ends]
    frames, emitted = [0] * len(ends), [0] * len(ends)
    rows = [row for row, end in enumerate(ends) if end > 0]
    if not rows:
        return found
    parts = context or begin(model, hidden)
    if context is not None:
        context[:] = parts
    while rows:
        where = torch.tensor(rows, device=hidden.device)
        times = torch.tensor([frames[row] for row in rows], device=hidden.device)
        logits = model.join(hidden[where, times], parts[0][where])
        labels, precision = logits.argmax(-1), torch.promote_types(logits.dtype, torch.float32)
        sure = logits.softmax(-1, dtype=precision).gather(-1, labels[:, None])[:, 0]
        for row, label, probability in zip(rows, labels.tolist(), sure.tolist(), strict=True):
            if math.isnan(probability):
                raise ValueError(DIVERGED)
            if label != BLANK:
                found[row].append(Emission(label, frames[row], frames[row] + 1, probability))
                emitted[row] += 1
            if label == BLANK or emitted[row] == max_symbols:
                frames[row] += 1
                emitted[row] = 0
        more = labels != BLANK
        _advance(model, parts, where[more], labels[more])
        rows = [row for row in rows if frames[row] < ends[row]]
    return found


@torch.no_grad()
def transducer_beam(
    model: Transducer, hidden: Tensor, lengths: Tensor | Sequence[int], beam_size: int = 4
) -> list[list[Hypothesis]]:
    """Runs a beam search where a frame gives one token or none; all rows and hypotheses go through the model together.

    A step at frame t takes either the blank or a token, and both lead to frame t + 1: every alignment has as many
    steps as frames, so the hypotheses stay in step and need no inner loop. A sequence reached in two ways, by a blank
    after itself or by its last token after the rest, is one hypothesis with the sum of the two probabilities, which
    are added before the beam is cut. A Transducer that was trained without the limit also gives a blank after each
    token; that factor is left out, as in the "modified beam search" of Kang et al., "Fast and Parallel Decoding for
    Transducer", arXiv:2211.00484; the limit itself is from Kim and Lee, "Accelerating RNN Transducer
    Inference via One-Step Constrained Beam Search", arXiv:2002.03577. Texts with more tokens than frames are lost.

    Args:
        model: with `predict` and `join`.
        hidden: encoder output `[B, L, H]`.
        lengths: frames of each row `[B]`; what comes after is ignored.
        beam_size: hypotheses kept after each frame. Default 4.

    Returns:
        For each row up to `beam_size` hypotheses, the most probable first; log_prob is not divided by the length.

    Raises:
        TypeError: for lengths that are not integers.
        ValueError: for shapes, lengths or a beam size that do not fit, or NaN from the model.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForTransducer
        >>> from favor.models.speech import transducer_beam
        >>> model = ConformerForTransducer(ConformerConfig.preset("tiny", vocab_size=32)).eval()
        >>> len(transducer_beam(model, torch.randn(2, 5, 128), [5, 3]))
        2
    """
    ends = checked_lengths("hidden", hidden, lengths)
    check_beam(beam_size)
    if not any(ends):
        return [[Hypothesis([], 0.0)] for _ in ends]
    rows, device = len(ends), hidden.device
    parts = [part.repeat_interleave(beam_size, 0) for part in begin(model, hidden)]
    offsets = beam_size * torch.arange(rows, device=device)[:, None]
    limits = torch.tensor(ends, device=device)[:, None, None]
    precision = torch.promote_types(hidden.dtype, torch.float32)
    scores = torch.full((rows, beam_size), -math.inf, dtype=precision, device=device)
    scores[:, 0] = 0
    prefixes = Prefixes()
    nodes: list[list[int | None]] = [[0] + [None] * (beam_size - 1) for _ in ends]
    for time in range(max(ends)):
        logits = model.join(hidden[:, time, None], parts[0].view(rows, beam_size, -1))
        log_probs = torch.log_softmax(logits, -1, dtype=precision)
        # A row that has ended can only stay as it is.
        stay = torch.full_like(log_probs[:1, :1], -math.inf)
        stay[..., BLANK] = 0
        extended = scores[..., None] + torch.where(time < limits, log_probs, stay)
        _merge(extended, nodes, prefixes)
        scores, best = extended.flatten(1).topk(beam_size, -1)
        source, label = best // log_probs.shape[-1], best % log_probs.shape[-1]
        nodes = _follow(nodes, prefixes, scores, source, label)
        parts = [part[(offsets + source).flatten()] for part in parts]
        more = ((label != BLANK) & (scores > -math.inf)).flatten().nonzero()[:, 0]
        _advance(model, parts, more, label.flatten()[more])
    if scores.isnan().any():
        raise ValueError(DIVERGED)
    return [
        [Hypothesis(prefixes.tokens(node), score) for node, score in zip(beam, row, strict=True) if node is not None]
        for beam, row in zip(nodes, scores.tolist(), strict=True)
    ]


def begin(model: Transducer, hidden: Tensor) -> list[Tensor]:
    """Gives the prediction `[B, P]` and state before the first token, for the rows of frames `[B, ...]`."""
    prediction, state = model.predict(torch.full((len(hidden), 1), BLANK, device=hidden.device), None)
    # Rows are overwritten later, and the model may have given views of its parameters.
    return [prediction[:, 0].clone(), *(part.clone() for part in state or ())]


def _advance(model: Transducer, parts: list[Tensor], rows: Tensor, tokens: Tensor) -> None:
    """Writes prediction and state, the parts that `begin` gives, of `rows` after one more token each."""
    if len(rows):
        after, state = model.predict(tokens[:, None], tuple(part[rows] for part in parts[1:]))
        for old, new in zip(parts, (after[:, 0], *(state or ())), strict=True):
            old[rows] = new


def _merge(extended: Tensor, nodes: list[list[int | None]], prefixes: Prefixes) -> None:
    """Joins hypotheses that become equal: moves the share of one to the blank of the other, `[B, K, V]` in place."""
    pairs = []
    for row, beam in enumerate(nodes):
        place = {node: at for at, node in enumerate(beam) if node is not None}
        for node, at in place.items():
            parent = place.get(prefixes.parents[node])
            if parent is not None:
                pairs.append((row, at, parent, prefixes.last[node]))
    if not pairs:
        return
    row, at, parent, token = torch.tensor(pairs, device=extended.device).T
    extended[row, at, BLANK] = torch.logaddexp(extended[row, at, BLANK], extended[row, parent, token])
    extended[row, parent, token] = -math.inf


def _follow(
    nodes: list[list[int | None]], prefixes: Prefixes, scores: Tensor, source: Tensor, label: Tensor
) -> list[list[int | None]]:
    """Gives the nodes of the new beam; None where there are fewer hypotheses than places."""
    result: list[list[int | None]] = []
    steps = torch.stack([source, label, (scores > -math.inf).long()], -1)
    for beam, row in zip(nodes, steps.tolist(), strict=True):
        new: list[int | None] = []
        for origin, token, possible in row:
            node = beam[origin] if possible else None
            new.append(node if node is None or token == BLANK else prefixes.child(node, token))
        result.append(new)
    return result
