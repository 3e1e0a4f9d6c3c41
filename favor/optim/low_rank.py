"""Low-rank plus diagonal upper bounds on a sum of curvatures, and LSPFB, which steps with them."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.optim.bound import PartitionBound, bound_coefficients, bound_factor
from favor.optim.head import Batch, HeadOptimizer, Heads, Options

RULES = ("exact", "repaired")


class LowRankCurvature:
    """V' S V + D, never below the sum of r r' over all vectors r that were added.

    A vector goes into the k kept directions, and the rest of it onto the diagonal, by
    c v v' <= diag(c |v_i| sum|v|).

    Args:
        size: length of the vectors.
        rank: k >= 1; more than `size` are no better, and `size` are kept.
        rule: "exact" (default): of the k + 1 eigenvectors of V' S V + r r' the smallest goes onto the diagonal;
            "repaired": the paper's rule, which keeps the directions of V apart from the part of r outside them, with
            the cross terms on the diagonal; without them it is not a bound. It is 2.5 to 4 times looser.
        like: tensor that gives dtype and device.

    Attributes:
        vectors: V `[k, size]`, rows orthonormal or zero; k is at most `size`.
        values: S `[k]`.
        diagonal: D `[size]`.

    Raises:
        ValueError: for a rank below 1 or an unknown rule.

    References:
        Wang and Choromanska, "SGB: Stochastic Gradient Bound", Algorithm 3 and Theorem 3.

    Example:
        >>> import torch
        >>> from favor.optim import low_rank_bound
        >>> type(low_rank_bound(torch.zeros(4), torch.randn(2, 3, 4), rank=1).curvature).__name__
        'LowRankCurvature'
    """

    def __init__(self, size: int, rank: int, *, rule: str = "exact", like: Tensor) -> None:
        check_rule(rank, rule)
        self.rule, rank = rule, min(rank, size)
        self.vectors = like.new_zeros(rank, size)
        self.values = like.new_zeros(rank)
        self.diagonal = like.new_zeros(size)

    def add(self, r: Tensor) -> None:
        """Adds r r' for r `[size]`."""
        p = self.vectors @ r
        first = r - p @ self.vectors
        # Twice, as the first difference is only rounding if r lies within the kept directions.
        again = self.vectors @ first
        p, outside = p + again, first - again @ self.vectors
        length = outside.norm()
        if length < first.norm() / 2:
            length = torch.zeros_like(length)
        unit = outside / length if length > 0 else torch.zeros_like(outside)
        if self.rule == "exact":
            q = torch.cat((p, length.unsqueeze(0)))
            values, turns = torch.linalg.eigh(torch.nn.functional.pad(self.values, (0, 1)).diag() + torch.outer(q, q))
            turned = turns.T @ torch.cat((self.vectors, unit.unsqueeze(0)))
            values = values.clamp_min(0)
            self.vectors, self.values = turned[1:], values[1:]
            self._to_diagonal(values[0], turned[0])
            return
        values, turns = torch.linalg.eigh(self.values.diag() + torch.outer(p, p))
        self.values, self.vectors = values.clamp_min(0), turns.T @ self.vectors
        self.diagonal += p.norm() * length
        least, square = self.values.argmin(), length.square()
        if self.values[least] < square:
            self._to_diagonal(self.values[least], self.vectors[least])
            self.values[least], self.vectors[least] = square, unit
        else:
            self._to_diagonal(square, unit)

    def _to_diagonal(self, value: Tensor, vector: Tensor) -> None:
        size = vector.abs()
        self.diagonal.add_(size, alpha=(value * size.sum()).item())

    def dense(self) -> Tensor:
        """Forms V' S V + D as a matrix `[size, size]`."""
        return (self.vectors.T * self.values) @ self.vectors + self.diagonal.diag()

    def solve(self, r: Tensor, damping: float = 0.0) -> Tensor:
        """Computes (V' S V + D + damping I)^{-1} r, `[size]`, by the Woodbury identity, for a positive diagonal."""
        diagonal = self.diagonal + damping
        thin = self.values.sqrt().unsqueeze(-1) * self.vectors
        middle = (thin / diagonal) @ thin.T
        middle.diagonal().add_(1)
        return (r - thin.T @ torch.linalg.solve(middle, thin @ (r / diagonal))) / diagonal


def check_rule(rank: int, rule: str) -> None:
    """Raises ValueError for a rank below 1 or an unknown rule."""
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}.")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}.")


LowRankBound = PartitionBound  # its curvature is a `LowRankCurvature`


def low_rank_bound(theta: Tensor, features: Tensor, rank: int, *, rule: str = "exact") -> PartitionBound:
    """Makes a bound on sum_j log Z_j with curvature of rank k plus a diagonal, labels in the order of the rows.

    Args:
        theta: expansion point `[D]`.
        features: f_j(y), `[T, n, D]`.
        rank: k >= 1.
        rule: "exact" (default) or "repaired", see `LowRankCurvature`.

    Returns:
        The bound at `theta`, whose curvature is a `LowRankCurvature`.

    Raises:
        ValueError: for shapes that do not fit, a rank below 1 or an unknown rule.

    Example:
        >>> import torch
        >>> from favor.optim import low_rank_bound
        >>> features = torch.randn(2, 3, 4)
        >>> bound = low_rank_bound(torch.zeros(4), features, rank=2)
        >>> torch.allclose(bound.mean, features.mean(1).sum(0), atol=1e-5)
        True
    """
    if features.ndim != 3 or theta.shape != features.shape[2:]:
        got = f"{tuple(features.shape)} and {tuple(theta.shape)}"
        raise ValueError(f"features must be [T, n, D] and theta [D], got {got}.")
    logits = features @ theta
    c = bound_coefficients(logits, "none")
    curvature = LowRankCurvature(len(theta), rank, rule=rule, like=features)
    for r in (bound_factor(c) @ features).flatten(0, 1):
        curvature.add(r)
    mean = torch.einsum("tn,tnd->d", logits.softmax(-1), features)
    return PartitionBound(c.log_z.sum(), mean, curvature)


class LSPFB(HeadOptimizer):
    r"""Stochastic partition function bound with curvature of rank k plus a diagonal.

    .. math:: W \leftarrow W - \eta\, (V^\top S V + D + \lambda I)^{-1} (G + \lambda W)

    with V, S, D built afresh from each mini-batch of m examples. That takes m (n - 1) updates of O(k n d), one after
    the other: k n times the cost of gradient descent. `ProxBoundSGD` and `SPFB` do not need this; LSPFB is for
    comparison with the paper.

    Args:
        head: `nn.Linear` `[n, d]`, or dicts `{"head": nn.Linear, ...}`.
        lr: eta. Default 1.
        weight_decay: lambda > 0, bias included. Default 1e-4.
        rank: k. Default 1.
        rule: "exact" (default) or "repaired", see `LowRankCurvature`.

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, or a tied weight; in `step`, on several processes.

    References:
        Wang and Choromanska, "SGB: Stochastic Gradient Bound", Algorithm 3.

    Example:
        >>> import torch
        >>> from favor.optim import LSPFB
        >>> head = torch.nn.Linear(4, 3)
        >>> optimizer = LSPFB(head, rank=2)
        >>> torch.nn.functional.cross_entropy(head(torch.randn(4, 4)), torch.randint(3, (4,))).backward()
        >>> optimizer.step()
    """

    def __init__(
        self, head: Heads, lr: float = 1.0, weight_decay: float = 1e-4, rank: int = 1, rule: str = "exact"
    ) -> None:
        super().__init__(head, {"lr": lr, "weight_decay": weight_decay, "rank": rank, "rule": rule})

    def _check(self, options: Options) -> None:
        super()._check(options)
        check_rule(options["rank"], options["rule"])
        if options["weight_decay"] == 0:
            raise ValueError("weight_decay must be positive: the diagonal may be 0 where no curvature falls.")

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        if self._world_size() > 1:
            raise ValueError("LSPFB adds examples one after the other: run it on one process.")
        curvature = LowRankCurvature(theta.numel(), group["rank"], rule=group["rule"], like=theta)
        factors = bound_factor(bound_coefficients(batch.x @ theta.T, "none")) * batch.weights.sqrt()[:, None, None]
        for factor, x in zip(factors, batch.x, strict=True):
            for row in factor:
                curvature.add(torch.outer(row, x).flatten())
        total = gradient + group["weight_decay"] * theta
        return group["lr"] * curvature.solve(total.flatten(), group["weight_decay"]).reshape(theta.shape)
