"""Linear systems (s B + lambda I) u = r with the curvature B of the bound, in O(n)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favor._parts import needs
from favor.optim.bound import BoundCoefficients, common_shape
from favor.optim.scan import Elements, affine_scan, prefix_scan

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
    shape = common_shape(c, rhs=rhs, **by_label)
    r = c.arrange(rhs.double().expand(shape))
    solution = (_tridiagonal if method == "tridiagonal" else _scan)(c, s.unsqueeze(-1), lam.unsqueeze(-1), r)
    return c.restore(solution).to(rhs.dtype)


def _tridiagonal(c: BoundCoefficients, s: Tensor, lam: Tensor, r: Tensor) -> Tensor:
    if r.shape[-1] == 1 or r.numel() == 0:
        return r / lam
    beta, rho = c.beta[..., 1:].double().numpy(), c.rho[..., 1:].double().numpy()
    scale = s.where(s > 0, 1.0).numpy()
    return torch.from_numpy(tridiagonal_solve(beta, rho, scale, lam.numpy(), r.numpy())).where(s > 0, r / lam)


def tridiagonal_solve(beta: Any, rho: Any, s: Any, lam: Any, r: Any) -> Any:
    """Computes (s B + lambda I)^{-1} r by one symmetric positive definite tridiagonal system per row, laid end to end.

    It uses numpy, whose calls cost a third of torch's on vectors of a thousand labels: this is all that a step with one
    example adds to plain gradient descent.

    Args:
        beta: `[..., n - 1]` float64, of all labels except the first, n >= 2; rho likewise.
        s: > 0, a number or `[..., 1]`; lam likewise.
        r: right side `[..., n]` in the order of the coefficients.
    """
    needs("sklearn", "scipy")
    import numpy as np
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
