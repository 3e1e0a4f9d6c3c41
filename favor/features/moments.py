"""Means and second moments of queries and keys: all that the closed-form parameters need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favor.features.linalg import add_diagonal, joined, row_parts, trace
from favor.kernels.dispatch import fuses, kernel_module


@dataclass(frozen=True)
class Moments:
    """First and second moments of x (queries) and y (keys), each averaged over its own set.

    Attributes:
        mean_x, mean_y: `[..., d]`.
        cov_x, cov_y: covariances, `[..., d, d]`. They are computed from centred samples: as differences of second
            moments they would lose digits if the mean is large.

    Example:
        >>> import torch, favor
        >>> x, y = torch.randn(2, 5, 8)
        >>> moments = favor.features.Moments.from_samples(x, y)
        >>> moments.cov_x.shape
        torch.Size([8, 8])
    """

    mean_x: Tensor
    mean_y: Tensor
    cov_x: Tensor
    cov_y: Tensor

    @classmethod
    def from_samples(
        cls,
        x: Tensor,
        y: Tensor,
        x_mask: Tensor | None = None,
        y_mask: Tensor | None = None,
        y_weights: Tensor | None = None,
    ) -> Moments:
        """Computes the moments of x `[..., L, d]` and y `[..., S, d]`.

        Args:
            x, y: samples; half precision is raised to float32.
            x_mask, y_mask: boolean `[..., L]` and `[..., S]`, True for the rows that count. A set without any
                row that counts has zero moments.
            y_weights: weights of the keys `[..., S]` that add up to 1 (or are all 0); None weighs them equally.
        """
        (mean_x, cov_x), (mean_y, cov_y) = _first_two(x, x_mask), _first_two(y, y_mask, y_weights)
        return cls(mean_x, mean_y, cov_x, cov_y)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gives the four attributes, in order."""
        return self.mean_x, self.mean_y, self.cov_x, self.cov_y

    @classmethod
    def cat(cls, moments: list[Moments]) -> Moments:
        """Joins moments of several batches into those of one, along the first dimension."""
        return cls(*(torch.cat(parts) for parts in zip(*(m.tensors() for m in moments), strict=True)))

    @classmethod
    def pooled(cls, moments: Moments, weights: Tensor) -> Moments:
        """Pools moments, given those of n sets (first dimension) and the weight of each set `[n]`."""
        share = weights.to(moments.mean_x) / weights.sum().to(moments.mean_x)
        share = share.view(-1, *(1,) * (moments.mean_x.ndim - 2))
        return cls.pooled_apart(moments, share, share)

    @classmethod
    def pooled_apart(cls, moments: Moments, share_x: Tensor, share_y: Tensor) -> Moments:
        """Pools moments of n sets (first dimension) by shares of x and of y, `[n, ...]`, which add up to 1."""

        def pool(mean: Tensor, cov: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
            centre = (share.unsqueeze(-1) * mean).sum(0)
            apart = mean - centre
            scatter = cov + apart.unsqueeze(-1) * apart.unsqueeze(-2)
            return centre, (share[..., None, None] * scatter).sum(0)

        mean_x, cov_x = pool(moments.mean_x, moments.cov_x, share_x)
        mean_y, cov_y = pool(moments.mean_y, moments.cov_y, share_y)
        return cls(mean_x, mean_y, cov_x, cov_y)

    def scaled(self, scale: float) -> Moments:
        """Gives the moments of sqrt(scale) x and sqrt(scale) y."""
        root = scale**0.5
        return Moments(root * self.mean_x, root * self.mean_y, scale * self.cov_x, scale * self.cov_y)

    @property
    def second_x(self) -> Tensor:
        """Mean of x x', `[..., d, d]`."""
        return self.cov_x + self.mean_x.unsqueeze(-1) * self.mean_x.unsqueeze(-2)

    @property
    def second_y(self) -> Tensor:
        """Mean of y y', `[..., d, d]`."""
        return self.cov_y + self.mean_y.unsqueeze(-1) * self.mean_y.unsqueeze(-2)

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

    def ridge(self, regularization: float, floor: float, *, centred: bool = False) -> Tensor:
        """Gives the t of `regularised`: regularization * (tr M1 + tr M2) / (2 d) + floor, `[...]`.

        M1 and M2 are the second moments, or with `centred` the covariances. The absolute floor keeps the inverse of an
        all-zero set finite.
        """
        total = trace(self.cov_x) + trace(self.cov_y) if centred else self.trace_sum
        return regularization * total / (2 * self.head_dim) + floor

    def regularised(self, ridge: Tensor) -> Moments:
        """Adds t I to both second moments, for a t of each set `[...]`."""
        return Moments(self.mean_x, self.mean_y, add_diagonal(self.cov_x, ridge), add_diagonal(self.cov_y, ridge))


def _first_two(samples: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(samples.dtype, torch.float32)
    if not torch.is_grad_enabled() and fuses(samples):
        if weights is None and mask is not None:
            weights = mask.to(compute)
        shares = None if weights is None else weights.expand(samples.shape[:-1])
        return kernel_module("triton", "tokens").moments(samples, shares)
    if mask is not None:
        samples = samples.masked_fill(~mask.unsqueeze(-1), 0.0)
    if weights is None:
        count: Tensor | int = max(samples.shape[-2], 1) if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        mean = samples.sum(-2, dtype=compute) / count
        scatter = _scatter(samples, mean, mask if mask is None else mask.unsqueeze(-1))
        return mean, scatter / (count if isinstance(count, int) else count.unsqueeze(-1))
    mean = samples.new_zeros(*samples.shape[:-2], 1, samples.shape[-1], dtype=compute)
    for part in row_parts(samples, samples.dtype != compute):
        mean = mean + weights[..., part].unsqueeze(-2) @ samples[..., part, :].to(compute)
    return mean.squeeze(-2), _scatter(samples, mean.squeeze(-2), weights.unsqueeze(-1))


def _scatter(samples: Tensor, mean: Tensor, weights: Tensor | None) -> Tensor:
    """Computes the sum of weight (sample - mean)(sample - mean)', `[..., d, d]`."""
    total = mean.new_zeros(*mean.shape, mean.shape[-1])
    for part in row_parts(samples):
        centred = samples[..., part, :].to(mean.dtype) - mean.unsqueeze(-2)
        weighted = centred if weights is None else centred * weights[..., part, :]
        total += weighted.transpose(-1, -2) @ centred
    return total


@torch.no_grad()
def attention_received(
    x: Tensor,
    y: Tensor,
    x_mask: Tensor | None,
    y_mask: Tensor | None,
    num_queries: int,
    *,
    scale: float,
    is_causal: bool = False,
) -> Tensor:
    """Averages the softmax rows of a few queries: the share of attention each key gets, `[..., S]`, without gradient.

    Args:
        x, y: queries `[..., L, d]` and keys `[..., S, d]`.
        x_mask, y_mask: boolean `[..., L]`, `[..., S]`, True for the rows that count.
        num_queries: how many queries, evenly spaced over those that count.
        scale: of the logits x . y.
        is_causal: query i sees keys 0 ... S - L + i.
    """
    length, keys = x.shape[-2], y.shape[-2]
    compute = x.dtype if x.dtype == torch.float64 else torch.float32
    if length == 0 or keys == 0:
        return y.new_zeros(y.shape[:-1], dtype=compute)
    rows, places = evenly_spaced(x, x_mask, num_queries)
    rows = scale * rows.to(compute)
    if y.is_cuda and y.dtype != compute and y.ndim > 2:
        product = torch.bmm(rows.to(y.dtype).flatten(0, -3), y.flatten(0, -3).transpose(-1, -2), out_dtype=compute)
        logits = product.unflatten(0, rows.shape[:-2])
    else:
        parts = row_parts(y, y.dtype != compute)
        logits = joined([rows @ y[..., part, :].to(compute).transpose(-1, -2) for part in parts], -1)
    if y_mask is not None:
        logits = logits.masked_fill(~y_mask.unsqueeze(-2), -torch.inf)
    if is_causal:
        later = torch.arange(keys, device=x.device) > (places.unsqueeze(-1) + keys - length)
        logits = logits.masked_fill(later, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0.0).mean(-2)


def evenly_spaced(x: Tensor, mask: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """Takes n rows of x `[..., L, d]`, evenly spaced over those that count, wherever the padding is.

    Gives `[..., n, d]`, zeros if no row counts, and their places, `[n]` or `[..., n]`.
    """
    steps = (torch.arange(number, device=x.device) + 0.5) / number
    if mask is None:
        places = (steps * x.shape[-2]).long()
        return x[..., places, :], places
    wanted = (steps * mask.sum(-1, keepdim=True)).long() + 1
    places = places_of(mask, wanted)
    index = places.expand(*x.shape[:-2], number).unsqueeze(-1).expand(*x.shape[:-2], number, x.shape[-1])
    return x.gather(-2, index).masked_fill(~mask.any(-1)[..., None, None], 0.0), places  # not what padding holds


def places_of(mask: Tensor, wanted: Tensor) -> Tensor:
    """Finds the wanted True entries `[..., n]` of each row of a mask `[..., S]`: place of the first for 1, and so on.

    It is the last place where a row has fewer. A binary search of the running count would do, but ONNX has none.
    """
    length = mask.shape[-1]
    count = torch.where(mask, mask.cumsum(-1), 0)  # entries that are False all go to place 0, which is not read
    last = count.new_full((*mask.shape[:-1], length + 1), length - 1)
    places = last.scatter(-1, count, torch.arange(length, device=mask.device).expand_as(count))
    return places.gather(-1, wanted)
