"""Means and second moments of queries and keys: all that the closed-form parameters need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """First and second moments of x (queries) and y (keys), each averaged over its own set.

    Attributes:
        mean_x, mean_y: `[..., d]`.
        second_x, second_y: uncentred second moments, mean of x x' and of y y', `[..., d, d]`.
    """

    mean_x: Tensor
    mean_y: Tensor
    second_x: Tensor
    second_y: Tensor

    @classmethod
    def from_samples(cls, x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None) -> Moments:
        """Moments of x `[..., L, d]` and y `[..., S, d]`.

        Args:
            x, y: samples; half precision is raised to float32.
            x_mask, y_mask: boolean `[..., L]` and `[..., S]`, True for the rows that count. A set without any
                row that counts has zero moments.
        """
        mean_x, second_x = _first_two(x, x_mask)
        mean_y, second_y = _first_two(y, y_mask)
        return cls(mean_x, mean_y, second_x, second_y)

    @classmethod
    def cat(cls, moments: list[Moments]) -> Moments:
        """Moments of several batches as those of one, along the first dimension."""
        return cls(*(torch.cat(parts) for parts in zip(*map(_fields, moments), strict=True)))

    @property
    def head_dim(self) -> int:
        """Dimension d."""
        return self.mean_x.shape[-1]

    @property
    def cross(self) -> Tensor:
        """mean_x . mean_y, `[...]`."""
        return (self.mean_x * self.mean_y).sum(-1)

    @property
    def trace_sum(self) -> Tensor:
        """Mean |x|^2 + mean |y|^2, `[...]`."""
        return trace(self.second_x) + trace(self.second_y)

    @property
    def pair_second_moment(self) -> Tensor:
        """N = mean over all pairs of (x_i + y_j)(x_i + y_j)', `[..., d, d]` (FAVOR#, Theorem 4.3)."""
        outer = self.mean_x.unsqueeze(-1) * self.mean_y.unsqueeze(-2)
        return self.second_x + self.second_y + outer + outer.transpose(-1, -2)

    def regularised(self, regularization: float, floor: float) -> Moments:
        """Adds t I to both second moments, t = regularization * (tr M1 + tr M2) / (2 d) + floor.

        The absolute floor is what keeps the inverse of an all-zero set finite.
        """
        eye = torch.eye(self.head_dim, dtype=self.mean_x.dtype, device=self.mean_x.device)
        t = regularization * self.trace_sum / (2 * self.head_dim) + floor
        ridge = t[..., None, None] * eye
        return Moments(self.mean_x, self.mean_y, self.second_x + ridge, self.second_y + ridge)


def _fields(moments: Moments) -> tuple[Tensor, ...]:
    return moments.mean_x, moments.mean_y, moments.second_x, moments.second_y


def trace(matrix: Tensor) -> Tensor:
    """Trace over the last two dimensions."""
    return torch.diagonal(matrix, dim1=-2, dim2=-1).sum(-1)


def _first_two(samples: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    samples = samples if samples.dtype == torch.float64 else samples.float()
    if mask is None:
        count = max(samples.shape[-2], 1)
        return samples.sum(-2) / count, samples.transpose(-1, -2) @ samples / count
    samples = samples.masked_fill(~mask.unsqueeze(-1), 0.0)
    total = mask.sum(-1, keepdim=True).clamp(min=1).to(samples.dtype)
    return samples.sum(-2) / total, samples.transpose(-1, -2) @ samples / total.unsqueeze(-1)
