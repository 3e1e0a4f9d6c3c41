"""Recordings whose frames are cut over the processes of `favor.sequence_parallel`: each encodes a piece of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from favor import registry
from favor.attention.functional import HEAD_GROUPS, SEQUENCE_GROUPS, sequence_group
from favor.attention.parallel import gathered
from favor.integrations.piece_length import piece_multiple


@dataclass(frozen=True)
class FramePieces:
    """The frames of this process, of recordings that all processes of a group have as a whole.

    Attributes:
        config: of the encoder.
        group: of the processes.
        shape: number of recordings, and of their frames.
        length: of a piece. The last pieces may go beyond the recordings.
        first: number of the first frame of this process.
    """

    config: Any
    group: Any
    shape: tuple[int, int]
    length: int
    first: int

    @classmethod
    def of(cls, model: Any, input_features: Tensor, in_chunks: bool) -> FramePieces | None:
        """Makes the piece of an encoder; None outside `favor.sequence_parallel`, or without a frame.

        Raises ValueError if the encoder cannot run in pieces.
        """
        group, config = sequence_group(), model.config
        if group is None or (frames := model.subsampled_lengths(input_features.shape[1])) == 0:
            return None
        faults = {
            "exact attention: take a FAVOR backend": config._attn_implementation not in registry.BACKENDS,
            "chunks: leave them out": in_chunks,
            "layerdrop: set it to 0": model.training and config.layerdrop,
            "two groups, of pieces and of heads: take one": SEQUENCE_GROUPS and HEAD_GROUPS,
        }
        if wrong := next((fault for fault, is_there in faults.items() if is_there), None):
            raise ValueError(f"inside sequence_parallel a Conformer takes no {wrong}.")
        size = dist.get_world_size(group)
        multiple = 1 if HEAD_GROUPS else piece_multiple(model, size)
        # Convolutions read frames of the next processes alone, so a piece has enough for them.
        length = multiple * math.ceil(max(frames / size, config.conv_kernel_size - 1) / multiple)
        return cls(config, group, (len(input_features), frames), length, dist.get_rank(group) * length)

    def cut(self, input_features: Tensor, every: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gives what the frames of this process are subsampled from, and which of them are real, `[B, l]`.

        Args:
            input_features: of whole recordings.
            every: their real frames `[B, L]`; None if all are.
        """
        stride, width = self.config.subsampling_conv_stride, self.config.subsampling_conv_kernel_size
        number = (self.length - 1) * stride**2 + (width - 1) * (1 + stride) + 1
        own = input_features[:, self.first * stride**2 :][:, :number]
        every = torch.ones(self.shape, dtype=torch.bool, device=own.device) if every is None else every
        real = every[:, self.first :][:, : self.length]
        padded = functional.pad(own, (0, 0, 0, number - own.shape[1]))
        return padded, functional.pad(real, (0, self.length - real.shape[1]))


def with_neighbours(hidden_states: Tensor, left: int, right: int, group: Any) -> Tensor:
    """Puts before `[B, C, T]` the last `left` frames of the previous process, and after it the first of the next.

    Zeros take their place at the ends of the recordings.
    """
    length, rank = hidden_states.shape[-1], dist.get_rank(group)
    ends = gathered(torch.cat((hidden_states[..., length - left :], hidden_states[..., :right]), -1), group)
    before, after = ends[rank - 1, ..., :left], ends[(rank + 1) % len(ends), ..., left:]
    # Not new zeros: the backward pass of every process takes part in the exchange of gradients.
    before = before if rank else 0 * before
    after = after if rank < len(ends) - 1 else 0 * after
    return torch.cat((before, hidden_states, after), -1)
