"""Linear systems with the curvature of one example in O(n), and what takes them: `exact_step_` and ProxBoundSGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from favor._parts import needs
from favor.optim.bound import (
    FLOOR,
    ORDERS,
    BoundCoefficients,
    Elements,
    affine_scan,
    bound_coefficients,
    common_shape,
    prefix_scan,
)
from favor.optim.head import Batch, HeadOptimizer, Heads, Options

METHODS = ("auto", "tridiagonal", "scan")


def bound_solve(
    c: BoundCoefficients, scale: Tensor | float, damping: Tensor | float, rhs: Tensor, *, method: str = "auto"
) -> Tensor:
    """Solves (scale B + damping I) u = rhs exactly, in float64 inside.

    Args:
        c: of logits `[..., n]`.
        scale: s >= 0, a number or `[...]`; |x|^2 for a softmax layer and one input.
        damping: lambda > 0, a number or `[...]`.
        rhs: r by label, `[..., n]`; broadcasts with the coefficients over leading dimensions.
        method: "tridiagonal" (CPU: B has a tridiagonal inverse on differences of labels, whose LDL' factorization
            LAPACK does in one sequential pass), "scan" (any device: the LDL' recurrence of a semiseparable matrix as
            prefix products of 2 x 2 matrices), or "auto" (default): the first on a CPU, the second elsewhere.

    Returns:
        u by label, `[..., n]`, in the dtype of `rhs`.

    Raises:
        ValueError: for a scale below 0, a damping that is not positive, or an unknown method.

    Example:
        >>> import torch
        >>> from favor.optim import bound_coefficients, bound_dense, bound_solve
        >>> c = bound_coefficients(torch.tensor([0.5, -1.0, 2.0]))
        >>> u = bound_solve(c, 1.0, 0.1, torch.ones(3))
        >>> torch.allclose(bound_dense(c) @ u + 0.1 * u, torch.ones(3), atol=1e-5)
        True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}.")
    if method == "auto":
        method = "tridiagonal" if rhs.device.type == "cpu" else "scan"
    s, lam = (torch.as_tensor(value, dtype=torch.float64, device=rhs.device) for value in (scale, damping))
    if not bool((s >= 0).all() & (lam > 0).all() & s.isfinite().all() & lam.isfinite().all()):
        raise ValueError(f"scale must be at least 0, damping positive, both finite; got {scale} and {damping}.")
    n = c.beta.shape[-1]
    by_label = {name: value.unsqueeze(-1).expand(*value.shape, n) for name, value in (("scale", s), ("damping", lam))}
    r = c.arrange(rhs.double().expand(common_shape(c, rhs=rhs, **by_label)))
    solution = (_tridiagonal if method == "tridiagonal" else _scan)(c, s.unsqueeze(-1), lam.unsqueeze(-1), r)
    return c.restore(solution).to(rhs.dtype)


def _tridiagonal(c: BoundCoefficients, s: Tensor, lam: Tensor, r: Tensor) -> Tensor:
    if r.shape[-1] == 1 or r.numel() == 0:
        return r / lam
    beta, rho = c.beta[..., 1:].double().numpy(), c.rho[..., 1:].double().numpy()
    scale = s.where(s > 0, 1.0).numpy()
    return torch.from_numpy(tridiagonal_solve(beta, rho, scale, lam.numpy(), r.numpy())).where(s > 0, r / lam)


def tridiagonal_solve(beta: Any, rho: Any, s: Any, lam: Any, r: Any) -> Any:
    """Computes (s B + lambda I)^{-1} r `[..., n]` by one positive definite tridiagonal system per row, laid end to end.

    beta and rho are those of all labels except the first, `[..., n - 1]` with n >= 2; s and lam are numbers or
    `[..., 1]`. It uses numpy, whose calls cost a third of torch's on vectors of a thousand labels: this is all that a
    step with one example adds to plain gradient descent.
    """
    needs("sklearn", "scipy")
    from scipy.linalg import lapack

    tau, ahead = lam / s, rho / beta
    shape = (*r.shape[:-1], beta.shape[-1])
    diagonal, beside = np.empty(shape), np.zeros(shape)
    np.add(2.0, tau / beta, out=diagonal)
    diagonal[..., 1:] += (tau * rho * ahead)[..., :-1]
    beside[..., :-1] = (-1.0 - tau * ahead)[..., :-1]
    *_, t, info = lapack.dptsv(
        diagonal.ravel(),
        # LAPACK's wrapper takes no empty array, not even for a single equation.
        beside.ravel()[: max(1, beside.size - 1)],
        (r[..., 1:] - r[..., :-1]).ravel(),
        overwrite_d=True,
        overwrite_e=True,
        overwrite_b=True,
    )
    if info != 0:
        raise FloatingPointError("the system is not positive definite: are the logits or the right side NaN?")
    t = t.reshape(shape)
    y = t / beta
    y[..., :-1] -= ahead[..., :-1] * t[..., 1:]
    u = np.zeros(r.shape)
    u[..., 1:] = y
    u[..., 2:] -= rho[..., :-1] * y[..., :-1]
    u /= s
    np.cumsum(u, axis=-1, out=u)
    u += r.mean(-1, keepdims=True) / lam - u.mean(-1, keepdims=True)
    return u


def _scan(c: BoundCoefficients, s: Tensor, lam: Tensor, r: Tensor) -> Tensor:
    """Solves by LDL' of a semiseparable matrix: its scalar state Q follows Moebius maps, substitutions affine ones."""
    kappa, rho, g = c.kappa.double(), c.rho.double(), c.coupling.double()
    unit = s * kappa
    whole = lam + s * (c.beta.double() + kappa.square() * c.tail.double())

    def product(earlier: Elements, later: Elements) -> Elements:
        a, b, d, e = later
        p, q, t, u = earlier
        result = (a * p + b * t, a * q + b * u, d * p + e * t, d * q + e * u)
        size = torch.stack(result).abs().amax(0)
        return tuple(part / size for part in result)

    maps = torch.broadcast_tensors(rho.square() * whole - 2 * rho * g * unit, unit.square(), -g.square(), whole)
    _, top, _, bottom = prefix_scan(product, maps)
    state = torch.nn.functional.pad((top / bottom)[..., :-1], (1, 0))
    pivot = whole - g.square() * state
    w = (unit - rho * g * state) / pivot
    y = (r - g * affine_scan(rho - w * g, w * r, exclusive=True)) / pivot
    return y - w * affine_scan(rho - g * w, g * y, reverse=True, exclusive=True)


def _on_cpu(logits: Tensor, right: Tensor, scale: float, damping: float, order: str) -> Tensor:
    """Runs `bound_solve` for one row with few calls: sums exponentials between e^-60 and 1 directly, in float64."""
    a, r = logits.double().numpy(), right.double().numpy()
    top = a.max()
    if not np.isfinite(top):
        raise ValueError("logits must be finite, or -inf for some labels; got NaN, +inf or -inf alone.")
    a = np.maximum(a - top, -FLOOR)
    permutation = None
    if order != "none":
        permutation = np.argsort(a if order == "ascending" else -a, kind="stable")
        a, r = a[permutation], r[permutation]
    alpha = np.exp(a)
    sums = np.cumsum(alpha)
    ratio = a[1:] - np.log(sums[:-1])
    square = ratio * ratio
    with np.errstate(divide="ignore", invalid="ignore"):
        beta = (alpha[1:] - sums[:-1]) / (sums[1:] * 2 * ratio)
    # tanh(L/2) / (2 L) by its series where numerator and denominator have lost their digits.
    beta = np.where(square < 1e-4, 0.25 - square / 48 + square * square / 480, beta)
    u = tridiagonal_solve(beta, sums[:-1] / sums[1:], scale, damping, r)
    if permutation is not None:
        found = np.empty_like(u)
        found[permutation] = u
        u = found
    return torch.from_numpy(u).to(right.dtype)


@torch.no_grad()
def exact_step_(
    weight: Tensor,
    x: Tensor,
    target: int,
    *,
    lr: float = 1.0,
    weight_decay: float = 0.0,
    damping: float,
    order: str = "none",
) -> Tensor:
    """Takes the exact step on one example, in place, in O(n d).

    W <- W - eta (B (x) x x' + damping I)^{-1} (gradient of cross-entropy + lambda W).

    Args:
        weight: W `[n, d]`, changed.
        x: one input `[d]`.
        target: its label.
        lr: eta. Default 1.
        weight_decay: lambda of lambda/2 |W|^2. Default 0.
        damping: > 0; lambda + 1/tau is the proximal step of length tau, lambda alone the undamped one.
        order: of the labels, see `bound_coefficients`. Default "none".

    Returns:
        The loss before the step, without the l2 term, ().

    Raises:
        ValueError: for shapes that do not fit, a target that is not a label, or a number out of range.

    Example:
        >>> import torch
        >>> from favor.optim import exact_step_
        >>> weight = torch.zeros(3, 2)
        >>> exact_step_(weight, torch.tensor([1.0, 0.0]), 1, damping=1.0)
        tensor(1.0986)
    """
    if weight.ndim != 2 or x.shape != weight.shape[1:]:
        raise ValueError(f"weight must be [n, d] and x [d], got {tuple(weight.shape)} and {tuple(x.shape)}.")
    if not 0 <= target < len(weight):
        raise ValueError(f"target must be from 0 to {len(weight) - 1}, got {target}.")
    if not (0 < damping < float("inf") and lr >= 0 and weight_decay >= 0):
        raise ValueError(
            f"damping must be positive, lr and weight_decay at least 0; got {damping}, {lr}, {weight_decay}."
        )
    logits = torch.mv(weight, x)
    log_p = logits.log_softmax(-1)
    residual = log_p.exp()
    residual[target] = 0
    residual[target] = -residual.sum()
    push, keep = rank_one_step(logits, residual, torch.dot(x, x).item(), lr, weight_decay, damping, order)
    weight.addr_(push, x, beta=keep)
    return -log_p[target]


def rank_one_step(
    logits: Tensor, residual: Tensor, norm2: float, lr: float, weight_decay: float, damping: float, order: str
) -> tuple[Tensor, float]:
    """Gives the step on a weight as W <- keep W + push x': push `[n]` and keep, in O(n).

    With a = W x the logits `[n]`, r the gradient by a `[n]` and s = |x|^2, the step on the (n d) x (n d) system

        W - eta (B (x) x x' + damping I)^{-1} (r x' + lambda W)

    is W (1 - eta lambda / damping) + eta ((lambda / damping) a / s - v) x', (s B + damping I) v = r + (lambda / s) a.
    """
    shrink = lr * weight_decay / damping
    if norm2 == 0:
        return torch.zeros_like(logits), 1 - shrink
    right = residual + (weight_decay / norm2) * logits if weight_decay else residual
    if order in ORDERS and logits.device.type == "cpu" and len(logits) > 1:
        direction = _on_cpu(logits, right, norm2, damping, order)
    else:
        direction = bound_solve(bound_coefficients(logits, order), norm2, damping, right)
    push = -lr * direction
    return push if shrink == 0 else push + shrink / norm2 * logits, 1 - shrink


class ProxBoundSGD(HeadOptimizer):
    r"""Stochastic gradient descent on one example per step; each step minimises the bound of its example.

    .. math:: W \leftarrow \arg\min_V \; \mathrm{bound}_j(V) + \tfrac{\lambda}{2} |V|^2 + \tfrac{1}{2 \eta} |V - W|^2

    It never overshoots, tends to plain gradient descent for small eta, and costs O(n d) as well. The undamped step of
    the paper (`SPFB(literal=True)`) has a fixed point other than the optimum; the fixed point of ProxBoundSGD tends to
    the optimum as eta goes to 0.

    Args:
        head: `nn.Linear` `[n, d]`, or dicts `{"head": nn.Linear, ...}`.
        lr: eta, the length of the step; decrease it by a scheduler to converge. Default 1.
        weight_decay: lambda, bias included. Default 0.
        order: of the labels in the bound: "none" (default), "descending" or "ascending".

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, a tied weight, or a batch that is not one example.

    References:
        The bound: Jebara and Choromanska, 2012; its use on one example: Wang and Choromanska, "SGB: Stochastic Gradient
        Bound", eq. 2.3, here with a proximal term and solved in O(n d).

    Example:
        >>> import torch
        >>> from favor.optim import ProxBoundSGD
        >>> head = torch.nn.Linear(4, 3)
        >>> optimizer = ProxBoundSGD(head)
        >>> torch.nn.functional.cross_entropy(head(torch.randn(1, 4)), torch.randint(3, (1,))).backward()
        >>> optimizer.step()
    """

    def __init__(self, head: Heads, lr: float = 1.0, weight_decay: float = 0.0, order: str = "none") -> None:
        super().__init__(head, {"lr": lr, "weight_decay": weight_decay, "order": order})

    def _update(self, group: Options, head: nn.Linear, batch: Batch) -> None:
        if len(batch.x) != 1 or self._world_size() > 1:
            raise ValueError(
                f"ProxBoundSGD takes one example per step on one process, got {len(batch.x)} on each: use SPFB or "
                "SoftmaxBound for batches."
            )
        x, rate, decay = batch.x[0], group["lr"], group["weight_decay"]
        if rate == 0:
            return
        weight, *bias = group["params"]
        dtype, norm2, inputs = x.dtype, torch.dot(x, x).item(), x[: head.in_features]
        logits = torch.mv(weight.to(dtype), inputs)
        if bias:
            logits += bias[0]
            residual = bias[0].grad.to(dtype)
        else:
            residual = torch.mv(weight.grad.to(dtype), inputs) / max(norm2, torch.finfo(dtype).tiny)
        push, keep = rank_one_step(logits, residual, norm2, 1.0, decay, decay + 1 / rate, group["order"])
        if weight.dtype == dtype:
            weight.addr_(push, inputs, beta=keep)
        else:
            weight.copy_(keep * weight.to(dtype) + torch.outer(push, inputs))
        for parameter in bias:
            parameter.mul_(keep).add_(push)
