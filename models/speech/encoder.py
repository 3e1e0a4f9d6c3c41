"""Encoders of speech: their padding, their output, and the CTC loss of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from favor.attention.functional import sequence_group
from favor.attention.parallel import gathered

IGNORED = -100  # padding of labels, which no loss counts
Count = TypeVar("Count", int, Tensor)


@dataclass
class EncoderOutput(BaseModelOutput):
    """Output of an encoder, as in transformers, with a mask."""

    attention_mask: Tensor | None = None  # [B, L], boolean, True for real frames; None if none was given


class PaddedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation whose statistics are those of the real frames, also of pieces in several processes."""

    def forward(self, input: Tensor, real: Tensor | None = None) -> Tensor:
        """Normalises `[B, C, T]`; real `[B, T]`, boolean, are the frames that count in training."""
        if not self.training:
            return super().forward(input)
        frames = input.transpose(1, 2)
        rows = frames.flatten(0, 1) if real is None else frames[real]
        momentum = 0.0 if self.momentum is None else self.momentum
        # Activation checkpointing runs this a second time, inside the backward pass.
        if torch._C._current_graph_task_id() != -1:
            momentum = 0.0
        if (group := sequence_group()) is not None:
            normed = self._normed_together(rows, momentum, group)
        else:
            normed = self._normed(rows, momentum)
        if real is None:
            return normed.view_as(frames).transpose(1, 2)
        return torch.zeros_like(frames).masked_scatter(real.unsqueeze(-1), normed).transpose(1, 2)

    def _normed(self, rows: Tensor, momentum: float) -> Tensor:
        own = len(rows) > 1  # one frame has no variance: it takes that of the frames so far
        statistics = (self.running_mean, self.running_var, self.weight, self.bias, own, momentum, self.eps)
        return functional.batch_norm(rows, *statistics)

    def _normed_together(self, rows: Tensor, momentum: float, group: Any) -> Tensor:
        """Normalises rows `[N, C]` by the statistics of all processes; torch's `SyncBatchNorm` needs GPUs."""
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        mean = wide.sum(0) / max(1, len(rows))
        own = torch.stack((torch.full_like(mean, len(rows)), mean, (wide - mean).square().sum(0)))
        counts, means, squares = gathered(own, group).unbind(1)
        number = counts.sum(0)
        mean = (counts * means).sum(0) / number
        variance = (squares + counts * (means - mean).square()).sum(0) / number
        kept_mean, kept_variance = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        enough = number > 1  # as in one process, one frame takes the statistics so far
        mean, variance = torch.where(enough, mean, kept_mean), torch.where(enough, variance, kept_variance)
        unbiased = torch.where(enough, variance * number / (number - 1).clamp(min=1), kept_variance)
        kept_mean.lerp_(mean.detach().to(kept_mean.dtype), momentum)
        kept_variance.lerp_(unbiased.detach().to(kept_variance.dtype), momentum)
        return ((wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias).to(rows.dtype)


def right_padded(attention_mask: Tensor, input_features: Tensor) -> Tensor:
    """Gives the mask `[B, T]` of features as boolean; raises ValueError for another shape or padding on the left."""
    if attention_mask.shape != input_features.shape[:2]:
        raise ValueError(
            f"attention_mask must be {list(input_features.shape[:2])}, as the features, got "
            f"{list(attention_mask.shape)}."
        )
    given = attention_mask.bool()
    if not torch.compiler.is_compiling() and bool((~given[:, :-1] & given[:, 1:]).any()):
        raise ValueError("attention_mask must have its padding on the right: ones, then zeros.")
    return given


def check_features(input_features: Tensor, bins: int) -> None:
    """Raises ValueError for features that are not `[B, T, bins]`."""
    if input_features.ndim != 3 or input_features.shape[-1] != bins:
        raise ValueError(f"input_features must be [batch, time, {bins}], got {tuple(input_features.shape)}.")


def frame_counts(encoded: EncoderOutput) -> Tensor:
    """Counts the real frames `[B]` of an encoder's output."""
    hidden: Any = encoded.last_hidden_state
    if encoded.attention_mask is None:
        return torch.full((hidden.shape[0],), hidden.shape[1], device=hidden.device)
    return encoded.attention_mask.sum(-1)


def ctc_loss(logits: Tensor, lengths: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Computes the CTC loss in float32."""
    counts = (labels != IGNORED).sum(-1)
    # cuDNN and half precision have limits of their own; the plain form takes all lengths.
    with torch.backends.cudnn.flags(enabled=False), torch.autocast(logits.device.type, enabled=False):
        return functional.ctc_loss(
            logits.float().log_softmax(-1).transpose(0, 1),
            labels.masked_fill(labels == IGNORED, config.pad_token_id),
            lengths,
            counts,
            blank=config.pad_token_id,
            reduction=config.ctc_loss_reduction,
            zero_infinity=config.ctc_zero_infinity,
        )
