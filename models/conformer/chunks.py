"""Chunks of frames: what a model that sees both sides may see of them, so that it can stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from favor import registry
from favor.config import FavorConfig, feature_family
from favor.integrations.layer import layer_options, stored_choice

EXACT = ("sdpa", "eager")


@dataclass(frozen=True)
class Chunks:
    """Cuts a recording into chunks of frames; a frame sees its own chunk and those before it.

    A model that was trained with chunks of many sizes, and without, works in one pass and piece by piece (Zhang et al.
    2020, "Unified streaming and non-streaming two-pass end-to-end model", arXiv:2012.05481). Attention of a frame ends
    at the last frame of its chunk. So does the convolution, with zeros in the place of what comes after, while what
    came before is there across the border (Li et al. 2023, "Dynamic chunk convolution", arXiv:2304.09325).

    Args:
        size: frames of a chunk, at least 1. A frame of a Conformer lasts 40 ms.
        left: how many chunks before its own a frame attends to. Default None: all. A number needs exact attention.

    Raises:
        ValueError: for numbers out of range.

    Example:
        >>> from favor.models.conformer import Chunks
        >>> Chunks(2, left=1).visible(4, 4).int()
        tensor([[1, 1, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 1],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    size: int
    left: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or (self.left is not None and self.left < 0):
            raise ValueError(f"size must be at least 1 and left None or at least 0, got {self.size} and {self.left}.")

    @classmethod
    def lasting(cls, seconds: float, frame: float, left: int | None = None) -> Chunks:
        """Makes chunks of a length in seconds, given the seconds of a frame.

        Raises:
            ValueError: if the length is no whole number of frames.

        Example:
            >>> from favor.models.conformer import Chunks
            >>> Chunks.lasting(0.64, frame=0.04)
            Chunks(size=16, left=None)
        """
        size = round(seconds / frame)
        if size < 1 or abs(seconds / frame - size) > 1e-6:
            raise ValueError(f"a chunk must last a whole number of frames of {frame:g} s, got {seconds:g} s.")
        return cls(size, left)

    def visible(self, length: int, total: int, device: torch.device | None = None) -> Tensor:
        """Says which of `total` keys each query sees, boolean `[length, total]`.

        Queries begin with the first frame of a chunk, and the last keys are their frames.
        """
        query = torch.arange(length, device=device)[:, None] // self.size
        key = torch.arange(length - total, length, device=device) // self.size
        seen = key <= query
        return seen if self.left is None else seen & (key >= query - self.left)

    def unrolled(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Makes chunks of a sequence of L frames for attention that is causal, which need not know of them.

        Each chunk comes twice: first its frames as keys, whose queries nobody reads, then its frames as queries, whose
        keys nobody sees. So a query sees all keys of its chunk and of those before, and none else.

        Returns:
            The frame at each of the 2 L places; whether a place is a key; the place of the query of each frame, `[L]`.
        """
        frames = torch.arange(length, device=device)
        first = frames - frames % self.size
        keys, queries = first + frames, frames + (first + self.size).clamp(max=length)
        order, is_key = torch.empty_like(frames).repeat(2), torch.zeros(2 * length, dtype=torch.bool, device=device)
        order[keys], order[queries], is_key[keys] = frames, frames, True
        return order, is_key, queries

    def convolve(self, inputs: Tensor, convolution: Any, right: int) -> Tensor:
        """Convolves each chunk with zeros after its last frame, `[B, C, T]`.

        Args:
            inputs: `[B, C, left + T]`, with as many frames before the first one as the convolution sees.
            convolution: over time, without padding.
            right: frames that it sees after the one in its middle.
        """
        left = convolution.kernel_size[0] - 1 - right
        length = inputs.shape[-1] - left
        number = -(-length // self.size)
        whole = functional.pad(inputs, (0, number * self.size - length))
        windows = functional.pad(whole.unfold(-1, left + self.size, self.size), (0, right))
        out: Tensor = convolution(windows.transpose(1, 2).flatten(0, 1))
        return out.unflatten(0, (-1, number)).transpose(1, 2).flatten(2)[..., :length]


def check_chunks(encoder: Any, chunks: Chunks) -> None:
    """Raises ValueError for an encoder that cannot run in these chunks; the message says what to do."""
    if encoder.config.causal:
        raise ValueError("chunks are for a model that sees both sides; a causal model streams without them.")
    backend = encoder.config._attn_implementation
    if backend in EXACT:
        return
    if backend not in registry.BACKENDS:
        raise ValueError(f"chunks need sdpa, eager or a FAVOR backend, got {backend}.")
    if chunks.left is not None:
        raise ValueError(
            f"linear attention sees all chunks before, and left is {chunks.left}: leave it out, or use sdpa, whose "
            "cost is linear too when left is a number."
        )
    for layer in encoder.layers:
        name, options = layer_options(layer.self_attn, backend)
        if name is None:
            continue
        config = FavorConfig.from_dict(options)
        family = registry.FAMILIES[feature_family(name, config)[0]]
        window = stored_choice(layer.self_attn).get("window", config.window)
        if window or family.selects_keys or not family.supports_state:
            raise ValueError(
                f"chunks need positive features without a window, or exact attention; got {family.name} with window "
                f"{window}: use favor+ with window=0, or sdpa."
            )
        if family.needs_statistics and config.statistics != "calibrated":
            raise ValueError(
                f"{family.name} would fit its parameters to the whole recording, which chunks must not see: call "
                "favor.calibrate first, or use favor+ or sdpa."
            )
