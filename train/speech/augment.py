"""Augmentation of speech: masks on the features, speed of the waveform."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from favor.models.speech.audio import stretch


@dataclass(frozen=True)
class SpecAugment:
    """Masks bands of frequency and stretches of time, drawn anew for every utterance.

    Widths are drawn uniformly from 0 to the greatest width, then places uniformly from those where the mask fits. Masks
    may overlap. This is SpecAugment (Park et al. 2019, arXiv:1904.08779, section 2) without time warping. The greatest
    width of a time mask is a fraction of the utterance's own length (Park et al. 2019b, arXiv:1912.05533, section 3).
    The defaults are those of the Conformer paper (arXiv:2005.08100, section 3.1).

    Args:
        frequency_masks: number of frequency masks. Default 2.
        frequency_width: greatest width of a frequency mask in bins. Default 27.
        time_masks: number of time masks. Default 10.
        time_part: greatest width of a time mask as a fraction of the utterance's frames. Default 0.05.
        value: the value of masked features. Default 0, the mean of normalised features.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> import torch
        >>> SpecAugment()(torch.ones(2, 400, 80), torch.tensor([400, 200])).shape
        torch.Size([2, 400, 80])
    """

    frequency_masks: int = 2
    frequency_width: int = 27
    time_masks: int = 10
    time_part: float = 0.05
    value: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if min(self.frequency_masks, self.frequency_width, self.time_masks) < 0 or not 0 <= self.time_part <= 1:
            raise ValueError(
                f"SpecAugment's numbers and widths must be at least 0 and time_part at most 1, got {self}."
            )

    def __call__(self, features: Tensor, lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gives masked copies of features.

        Args:
            features: `[B, T, F]`, right padded.
            lengths: real frames `[B]`; time masks lie within these.
            generator: draws the masks, on its own device. Default None: PyTorch's generator of the features' device.

        Returns:
            `[B, T, F]`.

        Raises:
            ValueError: for shapes that do not fit.
        """
        if features.ndim != 3 or lengths.shape != features.shape[:1]:
            raise ValueError(
                f"features must be [B, T, F] and lengths [B], got {list(features.shape)} and {list(lengths.shape)}."
            )
        _, frames, bins = features.shape
        every = torch.full_like(lengths, bins)
        width = torch.full_like(lengths, min(self.frequency_width, bins))
        bands = _masks(every, width, self.frequency_masks, bins, generator)
        times = _masks(lengths, (self.time_part * lengths.double()).long(), self.time_masks, frames, generator)
        return features.masked_fill(bands[:, None, :] | times[:, :, None], self.value)


def _masks(lengths: Tensor, widths: Tensor, count: int, size: int, generator: torch.Generator | None) -> Tensor:
    """Draws `count` random stretches of at most `widths [B]` inside `lengths [B]`; returns their union `[B, size]`."""
    device = lengths.device if generator is None else generator.device
    drawn = torch.rand(2, len(lengths), count, generator=generator, device=device)
    wide, place = drawn.to(lengths.device)
    # floor(u (n + 1)) is uniform on 0..n.
    wide = (wide * (widths[:, None] + 1)).floor()
    start = (place * (lengths[:, None] - wide + 1)).floor()
    position = torch.arange(size, device=lengths.device)
    inside = (position >= start[..., None]) & (position < (start + wide)[..., None])
    return inside.any(1)


def change_speed(waveform: np.ndarray, factor: float) -> np.ndarray:
    """Gives a waveform played faster or slower; its pitch changes too.

    Speed perturbation of Ko et al. 2015, "Audio augmentation for speech recognition".

    Args:
        waveform: samples `[n]`.
        factor: > 1 is faster; the nearest fraction with a denominator up to 100 is used. Usual are 0.9 and 1.1.

    Returns:
        `[ceil(n / factor)]`, of the same type.

    Raises:
        ValueError: for a factor that is not between 0.1 and 10.
    """
    if not 0.1 <= factor <= 10:
        raise ValueError(f"factor must be between 0.1 and 10, got {factor}.")
    return stretch(waveform, 1 / Fraction(factor).limit_denominator(100))
