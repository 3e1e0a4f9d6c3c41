"""The quadratic upper bound on the log-partition function of a softmax, and its O(n) structure.

For Z(theta) = sum_y h(y) exp(theta . f(y)) and any expansion point t0, the bound of Jebara and Choromanska
("Majorization for CRFs and latent likelihoods", 2012, Algorithm 1) gives mu and Sigma with, for every theta,

    log Z(theta) <= log Z(t0) + (theta - t0) . mu + (theta - t0)' Sigma (theta - t0) / 2,

with equal value and gradient at t0. Labels are taken in one after the other; any order is valid, and each gives another
Sigma.

For a softmax layer with weight W `[n, d]` and one input x, theta . f(y) is the logit a_y = W_y . x and Sigma is the
Kronecker product B (x) x x', where B `[n, n]` depends on the logits alone. B is semiseparable: three numbers per label
(beta, kappa, rho) hold all of it, and products, diagonal and linear systems cost O(n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]
FLOOR = 60.0
ORDERS = ("ascending", "descending", "none")


def prefix_scan(combine: Callable[[Elements, Elements], Elements], elements: Elements) -> Elements:
    """Computes all prefixes of an associative product (earlier, later): O(n) work in O(log n) vectorised steps.

    Neighbours are combined in pairs, the pairs scanned by recursion, and the even places filled in from the odd ones.
    The tensors `[..., n]`, n >= 1, together make one element at each place.
    """
    n = elements[0].shape[-1]
    if n == 1:
        return elements
    whole = n - n % 2
    odd = prefix_scan(
        combine,
        combine(tuple(e[..., 0:whole:2] for e in elements), tuple(e[..., 1:whole:2] for e in elements)),
    )
    results = tuple(torch.empty_like(e) for e in elements)
    for result, element, at_odd in zip(results, elements, odd, strict=True):
        result[..., 0] = element[..., 0]
        result[..., 1::2] = at_odd
    if n > 2:
        before = tuple(e[..., : (n - 1) // 2] for e in odd)
        for result, even in zip(results, combine(before, tuple(e[..., 2::2] for e in elements)), strict=True):
            result[..., 2::2] = even
    return results


def affine_scan(factor: Tensor, term: Tensor, *, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Runs the recurrence h_k = factor_k h_{k-1} + term_k along `[..., n]`, from 0; factor and term broadcast.

    With `reverse` from the last place to the first; with `exclusive` it gives at every place the h of the place before.
    """
    factor, term = torch.broadcast_tensors(factor, term)
    if reverse:
        return affine_scan(factor.flip(-1), term.flip(-1), exclusive=exclusive).flip(-1)

    def combine(earlier: Elements, later: Elements) -> Elements:
        return later[0] * earlier[0], torch.addcmul(later[1], later[0], earlier[1])

    whole = prefix_scan(combine, (factor, term))[1]
    return torch.nn.functional.pad(whole[..., :-1], (1, 0)) if exclusive else whole


@dataclass(frozen=True)
class PartitionBound:
    """The bound on a log-partition function, or on a sum of them, at one point.

    Attributes:
        log_z: the value at the point, ().
        mean: mu `[D]`, its gradient.
        curvature: Sigma `[D, D]`, or a `LowRankCurvature`.

    Example:
        >>> import torch
        >>> from favor.optim import partition_bound
        >>> partition_bound(torch.zeros(2), torch.eye(2)).mean
        tensor([0.5000, 0.5000])
    """

    log_z: Tensor
    mean: Tensor
    curvature: Any


def partition_bound(theta: Tensor, features: Tensor, weights: Tensor | None = None) -> PartitionBound:
    """Makes the bound for any table of features by Algorithm 1, O(n D^2), with labels in the order of the rows.

    Args:
        theta: expansion point `[D]`.
        features: f(y), one row per label, `[n, D]`.
        weights: h(y) >= 0, `[n]`, at least one of them positive. Default: ones.

    Returns:
        The bound at `theta`.

    Raises:
        ValueError: for shapes that do not fit, or weights that are negative or all zero.

    Example:
        >>> import torch
        >>> from favor.optim import partition_bound
        >>> bound = partition_bound(torch.zeros(2), torch.eye(2))
        >>> bound.curvature
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    if features.ndim != 2 or theta.shape != features.shape[1:]:
        raise ValueError(
            f"features must be [n, D] and theta [D], got {tuple(features.shape)} and {tuple(theta.shape)}."
        )
    logits = features @ theta
    if weights is not None:
        if weights.shape != logits.shape or not bool(
            (weights >= 0).all() & (weights > 0).any() & weights.isfinite().all()
        ):
            raise ValueError(f"weights must be {tuple(logits.shape)} finite numbers >= 0, at least one > 0.")
        logits = logits + weights.log()
    c = bound_coefficients(logits, "none")
    mean, curvature = features[0], features.new_zeros(features.shape[1], features.shape[1])
    for label in range(1, len(features)):
        step = features[label] - mean
        curvature = curvature + c.beta[label] * torch.outer(step, step)
        mean = mean + c.kappa[label] * step
    return PartitionBound(c.log_z, mean, curvature)


@dataclass(frozen=True)
class BoundCoefficients:
    """Everything about B for logits `[..., n]`, in the order in which the labels were taken in.

    With S_k the sum of exp(a) of the first k labels and L_k = a_k - log S_{k-1}, each `[..., n]`:

    Attributes:
        beta: tanh(L/2) / (2 L), 0 for the first label.
        kappa: sigmoid(L), 1 for the first label.
        rho: 1 - kappa, computed without the difference.
        log_z: log-partition function `[...]`.
        order: `[..., n]`, the label taken in at each place; None if that is 0, 1, ...

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients
        >>> bound_coefficients(torch.zeros(2)).beta
        tensor([0.0000, 0.2500])
    """

    beta: Tensor
    kappa: Tensor
    rho: Tensor
    log_z: Tensor
    order: Tensor | None

    @cached_property
    def tail(self) -> Tensor:
        """Gives C_k `[..., n]`, what curvature of later labels reaches k: C_{k-1} = beta_k + rho_k^2 C_k, C_n = 0."""
        return affine_scan(self.rho.square(), self.beta, reverse=True, exclusive=True)

    @cached_property
    def coupling(self) -> Tensor:
        """Gives G_k `[..., n]`: B_ab = kappa_a (product of rho between a and b) G_b for a before b."""
        return self.kappa * self.rho * self.tail - self.beta

    def arrange(self, values: Tensor) -> Tensor:
        """Puts values by label `[..., n]` into the order of the coefficients."""
        return values if self.order is None else values.gather(-1, self.order.expand(values.shape))

    def restore(self, values: Tensor) -> Tensor:
        """Puts values in the order of the coefficients `[..., n]` back by label."""
        if self.order is None:
            return values
        return torch.empty_like(values).scatter_(-1, self.order.expand(values.shape), values)


def bound_coefficients(logits: Tensor, order: str = "ascending") -> BoundCoefficients:
    """Computes the coefficients of B from logits, in the log domain throughout.

    Logits more than 60 below the largest of their row (-inf for masked labels, for instance) are raised to this level,
    which keeps the bound valid: it then bounds a slightly larger partition function, by at most n e^-60.

    Args:
        logits: `[..., n]` with n >= 1, floating point; half precisions are computed in float32.
        order: in which labels are taken in: "ascending" (likely labels last: smallest largest eigenvalue, and B is the
            Laplacian of a graph), "descending" (smallest trace) or "none" (by index). Ties keep their order.

    Returns:
        The coefficients of all rows.

    Raises:
        ValueError: for logits that are NaN or +inf, a row that is all -inf, no labels, or an unknown order.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients
        >>> bound_coefficients(torch.zeros(3)).log_z
        tensor(1.0986)
    """
    if logits.ndim == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [..., n] with n >= 1, got {logits.dtype} {tuple(logits.shape)}."
        )
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}.")
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    if not bool(top.isfinite().all()):
        raise ValueError("logits must be finite, or -inf for some labels of a row; got NaN, +inf or a row of -inf.")
    # Relative to the largest: the sums below would otherwise lose the digits that large logits take.
    logits, permutation = (logits - top).clamp_min(-FLOOR), None
    if order != "none":
        logits, permutation = logits.sort(dim=-1, descending=order == "descending", stable=True)
    log_sums = logits.logcumsumexp(-1)
    log_z = log_sums[..., -1] + top.squeeze(-1)
    ratio = logits[..., 1:] - log_sums[..., :-1]
    # The first label has nothing before it: log ratio +inf, so kappa = 1 and rho = beta = 0.
    ratio = torch.nn.functional.pad(ratio, (1, 0), value=torch.inf)
    half = ratio.abs() / 2
    beta = torch.where(half == 0, 0.25, half.tanh() / (4 * half))
    return BoundCoefficients(beta, ratio.sigmoid(), (-ratio).sigmoid(), log_z, permutation)


def common_shape(c: BoundCoefficients, **by_label: Tensor) -> torch.Size:
    """Gives the shape `[..., n]` in which values by label meet the coefficients."""
    for name, values in by_label.items():
        if values.ndim == 0 or values.shape[-1] != c.beta.shape[-1]:
            raise ValueError(
                f"{name} must be [..., {c.beta.shape[-1]}], one number per label; got {tuple(values.shape)}."
            )
    try:
        return torch.broadcast_shapes(c.beta.shape, *(values.shape for values in by_label.values()))
    except RuntimeError as error:
        raise ValueError(f"{', '.join(by_label)} must broadcast with logits {tuple(c.beta.shape)}.") from error


def bound_matvec(c: BoundCoefficients, v: Tensor) -> Tensor:
    """Computes B v in O(n), `[..., n]` for v `[..., n]` by label, broadcasting over leading dimensions.

    Args:
        c: from `bound_coefficients`, of logits `[..., n]`.
        v: by label, `[..., n]`.

    Returns:
        `[..., n]`.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense, bound_matvec
        >>> c = bound_coefficients(torch.tensor([0.5, -1.0, 2.0]))
        >>> torch.allclose(bound_matvec(c, torch.ones(3)), torch.zeros(3), atol=1e-6)  # equal changes change nothing
        True
    """
    v = c.arrange(v.expand(common_shape(c, v=v)))
    force = c.beta * (v - affine_scan(c.rho, c.kappa * v, exclusive=True))
    later = affine_scan(c.rho, force, reverse=True, exclusive=True)
    return c.restore(force - c.kappa * later)


def bound_diagonal(c: BoundCoefficients) -> Tensor:
    """Computes the diagonal of B by label, `[..., n]`, in O(n).

    Args:
        c: from `bound_coefficients`, of logits `[..., n]`.

    Returns:
        `[..., n]`.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense, bound_diagonal
        >>> c = bound_coefficients(torch.tensor([0.5, -1.0, 2.0]))
        >>> torch.allclose(bound_diagonal(c), bound_dense(c).diagonal())
        True
    """
    return c.restore(c.beta + c.kappa.square() * c.tail)


def bound_row_sums(c: BoundCoefficients) -> Tensor:
    """Sums absolute values of the rows of B by label, `[..., n]`, in O(n); diag of the sums is above B (Gershgorin).

    Args:
        c: from `bound_coefficients`, of logits `[..., n]`.

    Returns:
        `[..., n]`.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense, bound_row_sums
        >>> c = bound_coefficients(torch.tensor([0.5, -1.0, 2.0]))
        >>> torch.allclose(bound_row_sums(c), bound_dense(c).abs().sum(-1))
        True
    """
    coupling = c.coupling.abs()
    coupling = torch.cat((torch.zeros_like(coupling[..., :1]), coupling[..., 1:]), dim=-1)
    later = affine_scan(c.rho, coupling, reverse=True, exclusive=True)
    return c.restore(c.beta + c.kappa.square() * c.tail + c.kappa * later + coupling)


def bound_factor(c: BoundCoefficients) -> Tensor:
    """Gives F `[..., n - 1, n]`, columns by label, with B = F'F: row sqrt(beta_k) (e_k - m_{k-1}) for k = 2 ... n.

    Args:
        c: from `bound_coefficients`, of logits `[..., n]`.

    Returns:
        `[..., n - 1, n]`.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense, bound_factor
        >>> c = bound_coefficients(torch.tensor([0.5, -1.0, 2.0]))
        >>> torch.allclose(bound_factor(c).T @ bound_factor(c), bound_dense(c))
        True
    """
    n = c.beta.shape[-1]
    # m_{k-1} has weight kappa_a times the product of rho from a + 1 to k - 1 at label a: logs, as products underflow.
    log_rho = torch.nn.functional.pad(c.rho[..., 1:].log(), (1, 0)).cumsum(-1)
    weight = c.kappa.log() - log_rho
    row, column = torch.arange(1, n, device=weight.device).unsqueeze(-1), torch.arange(n, device=weight.device)
    log_mean = weight.unsqueeze(-2) + log_rho[..., :-1].unsqueeze(-1)
    mean = torch.where(column < row, log_mean, -torch.inf).exp()
    factor = c.beta[..., 1:, None].sqrt() * ((column == row).to(mean) - mean)
    if c.order is None:
        return factor
    return torch.empty_like(factor).scatter_(-1, c.order.unsqueeze(-2).expand(factor.shape), factor)


def bound_dense(c: BoundCoefficients) -> Tensor:
    """Forms B itself, `[..., n, n]` by label: O(n^2) memory.

    Args:
        c: from `bound_coefficients`, of logits `[..., n]`.

    Returns:
        `[..., n, n]`.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense
        >>> bound_dense(bound_coefficients(torch.zeros(2)))
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    factor = bound_factor(c)
    return factor.mT @ factor
