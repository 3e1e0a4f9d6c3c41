"""Linear systems (s B + lambda I) u = r with the curvature B of the bound, in O(n)."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """One symmetric positive definite tridiagonal system a row; rows are laid end to end, uncoupled.

    In numpy: on vectors of a thousand labels its calls cost a third of torch's, and this is all that a step with one
    example adds to plain gradient descent.
    """
    import numpy as np
    from scipy.linalg import lapack

    if r.shape[-1] == 1 or r.numel() == 0:
        return r / lam
    tau = (lam / s.where(s > 0, 1.0)).numpy()
    beta, rho = c.beta[..., 1:].double().numpy(), c.rho[..., 1:].double().numpy()
    right, leading = r.numpy(), r.shape[:-1]
    ahead = rho / beta
    diagonal, beside = np.empty((*leading, beta.shape[-1])), np.zeros((*leading, beta.shape[-1]))
    np.add(2.0, tau / beta, out=diagonal)
    diagonal[..., 1:] += tau * (rho * ahead)[..., :-1]
    beside[..., :-1] = -1.0 - tau * ahead[..., :-1]
    *_, t, info = lapack.dptsv(
        diagonal.ravel(),
        # LAPACK's wrapper takes no empty array, not even for a single equation.
        beside.ravel()[: max(1, beside.size - 1)],
        np.diff(right).ravel(),
        overwrite_d=True,
        overwrite_e=True,
        overwrite_b=True,
    )
    if info != 0:
        raise FloatingPointError("the system is not positive definite: are the logits or the right side NaN?")
    t = t.reshape(diagonal.shape)
    y = t / beta
    y[..., :-1] -= ahead[..., :-1] * t[..., 1:]
    step = y.copy()
    step[..., 1:] -= rho[..., :-1] * y[..., :-1]
    u = np.zeros(right.shape)
    np.cumsum(step / s.where(s > 0, 1.0).numpy(), axis=-1, out=u[..., 1:])
    u += right.mean(-1, keepdims=True) / lam.numpy() - u.mean(-1, keepdims=True)
    return torch.from_numpy(u).where(s > 0, r / lam)


def _scan(c: BoundCoefficients, s: Tensor, lam: Tensor, r: Tensor) -> Tensor:
    """LDL' of a semiseparable matrix: its scalar state Q follows Moebius maps, the two substitutions affine ones."""
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
    carried = torch.nn.functional.pad(affine_scan(rho - w * g, w * r)[..., :-1], (1, 0))
    y = (r - g * carried) / pivot
    later = torch.nn.functional.pad(affine_scan(rho - g * w, g * y, reverse=True)[..., 1:], (0, 1))
    return y - w * later
