"""Greedy search that says at each frame which tokens it finds, for audio that comes in pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from favor.models.conformer.transducer_decoding import DIVERGED, begin, transducer_emissions

# Tokens of each frame, with their probabilities.
Said = list[list[tuple[int, float]]]


@torch.no_grad()
def search_frames(model: Any, frames: Sequence[Tensor], contexts: Sequence[list[Tensor]]) -> list[Said]:
    """Finds the tokens of each frame of several recordings in one pass.

    Args:
        model: `ConformerForCTC` or `ConformerForTransducer`.
        frames: of the encoder, `[n, C]` of each recording.
        contexts: of each recording: what a Transducer remembers of the tokens before; empty where decoding begins.
            Changed in place. CTC has none, so that a label that goes on is found in each of its frames.

    Returns:
        For each recording a list of frames, and for each frame the tokens found in it, without blanks.

    Raises:
        ValueError: if the model gives NaN.
    """
    lengths = [len(piece) for piece in frames]
    hidden = pad_sequence(list(frames), True)
    if hasattr(model, "predict"):
        return _transducer(model, hidden, lengths, contexts)
    logits = model.ctc_head(hidden)
    labels = logits.argmax(-1)
    sure = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    sure = sure.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    blank = model.config.pad_token_id
    found: list[Said] = []
    for row, probabilities, length in zip(labels.tolist(), sure.tolist(), lengths, strict=True):
        if any(map(math.isnan, probabilities[:length])):
            raise ValueError(DIVERGED)
        pairs = zip(row[:length], probabilities[:length], strict=True)
        found.append([[] if label == blank else [(label, probability)] for label, probability in pairs])
    return found


def _transducer(model: Any, hidden: Tensor, lengths: Sequence[int], contexts: Sequence[list[Tensor]]) -> list[Said]:
    """Runs `search_frames` for a Transducer, all recordings together."""
    own = [context or begin(model, hidden[:1]) for context in contexts]
    joined = [torch.cat(parts) for parts in zip(*own, strict=True)]
    rows = transducer_emissions(model, hidden, lengths, context=joined)
    found: list[Said] = []
    for row, (emissions, length) in enumerate(zip(rows, lengths, strict=True)):
        contexts[row][:] = [part[row : row + 1].clone() for part in joined]
        found.append([[] for _ in range(length)])
        for one in emissions:
            found[-1][one.start].append((one.token, one.confidence))
    return found
