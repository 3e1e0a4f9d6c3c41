"""Mixture proportions: the weights of known components, by scale-invariant power iteration or EM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from favor.decomposition.inputs import check_flag, check_integer, check_number

Product = Callable[[Tensor], Tensor]
# Replaces likelihoods of zero, in rows that components have left or that do not count: logarithms and ratios of float32
# stay finite.
LEAST = 1e-30


class Proportions(NamedTuple):
    """Result of `mixture_proportions`.

    Attributes:
        proportions: pi `[..., K]`, nonnegative, with sum 1.
        objective: sum_j v_j log(L pi)_j / sum v, `[...]`.
        gap: distance from the conditions of optimality, 0 at the optimum, `[...]`: the larger of max_k g_k - 1 and
            max_k |pi_k (g_k - 1)|, for g of `mixture_proportions`.
        n_iter: iterations made.
        converged: whether every problem met `tol`.
    """

    proportions: Any
    objective: Any
    gap: Any
    n_iter: int
    converged: bool


@torch.no_grad()
def mixture_proportions(
    likelihoods: Any,
    counts: Any = None,
    *,
    shift: float = 0.05,
    guard: bool = True,
    tol: float = 1e-8,
    max_iter: int = 10_000,
    start: Any = None,
) -> Proportions:
    """Finds weights pi of a mixture that maximise sum_j v_j log(L pi)_j over the simplex; a convex problem.

    With g_k = sum_j v_j L_jk / (L pi)_j / sum v, one iteration is pi <- pi (shift + g)^2, normalised: the power
    iteration x <- grad f(x) + shift x of the scale-invariant f, pi = x^2, with the shift relative to the multiplier,
    which is 1. EM is pi <- pi g. Locally the error shrinks by max |1 - 2 w / (1 + shift)| per iteration and that of EM
    by max |1 - w|, w the eigenvalues of diag(sqrt pi) L' diag(v / (L pi)^2) L diag(sqrt pi) / sum v on the support:
    shift 1 is as fast as EM, small shifts need half the iterations where these are slow, and shift 0 comes to a stop
    where components hardly overlap (w near 1), which is why it is not the default.

    Args:
        likelihoods: L `[..., n, K]`, nonnegative, not all zero in any row that counts: tensor, array, or a SciPy
            sparse matrix `[n, K]`. Leading dimensions are separate problems.
        counts: v `[..., n]`, or `[n]` for all problems, nonnegative; None (default) counts every row once.
        shift: not negative, default 0.05; 0.05 to 0.25 serves all problems.
        guard: whether to repeat a step that lowers the objective as a step of EM, which cannot lower it (default True).
            The plain iteration is not monotone for any shift.
        tol: stop when the gap of every problem is not above this, default 1e-8. A tolerance above 0 but finer than
            rounding counts as 32 epsilons, which is 4e-6 for float32.
        max_iter: largest number of iterations, default 10,000.
        start: pi to begin with `[..., K]`, default 1/K. Components that are zero at the start stay zero and are not
            part of the problem.

    Returns:
        `Proportions`, of tensors if `likelihoods` is a tensor, else of arrays.

    Raises:
        ValueError: for negative or non-finite entries, shapes that do not fit, rows without likelihood, or options out
            of range.

    Source: C. Kim, "Optimization Methods for Scale Invariant Problems in Machine Learning" (Northwestern, 2020),
    section 3.5. There the shift is added to a gradient that is not normalised, so that it means something else for
    every data set, and in practice 0; the rates above and the guard are additions of this package.

    Example:
        >>> import torch
        >>> from favor.decomposition import mixture_proportions
        >>> L = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
        >>> mixture_proportions(L, torch.tensor([7.0, 3.0])).proportions
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    check_options(shift, guard, tol, max_iter)
    L, v, pi = _checked(likelihoods, counts, start)
    L, largest = _rows_of_order_one(L, v)
    tol = tol and max(tol, 32 * torch.finfo(L.dtype).eps)
    transposed = L.t() if L.is_sparse else L.mT
    result = fit_proportions(_product(L), _product(transposed), v, pi, shift, guard=guard, tol=tol, max_iter=max_iter)
    result = result._replace(objective=result.objective + (v / v.sum(-1, keepdim=True) * largest.log()).sum(-1))
    if isinstance(likelihoods, Tensor):
        return result
    pi, objective, gap = (part.cpu().numpy()[()] for part in (result.proportions, result.objective, result.gap))
    return Proportions(pi, objective, gap, result.n_iter, result.converged)


def fit_proportions(
    times: Product,
    transposed_times: Product,
    counts: Tensor,
    start: Tensor,
    shift: float,
    *,
    guard: bool,
    tol: float,
    max_iter: int,
) -> Proportions:
    """Runs the iteration of `mixture_proportions` for a matrix that is known by its products alone.

    They are pi `[..., K]` -> L pi `[..., n]`, in new storage, and r `[..., n]` -> L' r `[..., K]`.
    """
    share = counts / counts.sum(-1, keepdim=True)
    pi = start / start.sum(-1, keepdim=True)
    mixture = times(pi).clamp_(min=LEAST)
    objective = _objective(share, mixture)
    for step in range(max_iter + 1):
        g = transposed_times(share / mixture)
        gap = torch.maximum((g - 1).amax(-1), (pi * (g - 1)).abs().amax(-1))
        converged = bool((gap <= tol).all())
        if converged or step == max_iter:
            break
        new = pi * (shift + g) * (shift + g)  # in this order float32 holds the product: pi g is at most 1
        new = new / new.sum(-1, keepdim=True)
        mixture = times(new).clamp_(min=LEAST)
        reached = _objective(share, mixture)
        if guard:
            # Rounding alone may lower the objective near the optimum.
            slack = 8 * torch.finfo(objective.dtype).eps * (1 + objective.abs())
            fell = ~(reached >= objective - slack)
            if bool(fell.any()):
                new = torch.where(fell.unsqueeze(-1), pi * g / (pi * g).sum(-1, keepdim=True), new)
                mixture = times(new).clamp_(min=LEAST)
                reached = _objective(share, mixture)
        pi, objective = new, reached
    return Proportions(pi, objective, gap, step, converged)


def check_options(shift: Any, guard: Any, tol: Any, max_iter: Any) -> None:
    """Raises ValueError for an option of `mixture_proportions` out of range."""
    check_number("shift", shift)
    check_flag("guard", guard)
    check_number("tol", tol)
    check_integer("max_iter", max_iter)


def _product(matrix: Tensor) -> Product:
    return lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _objective(share: Tensor, mixture: Tensor) -> Tensor:
    return (share * mixture.log()).sum(-1)


def _rows_of_order_one(L: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gives rows divided by their largest entries, which changes no proportion, and these entries `[..., n]`."""
    indices, values = (L.indices(), L.values()) if L.is_sparse else (None, L)
    if indices is None:
        largest = L.amax(-1)
    else:
        largest = values.new_zeros(L.shape[0]).scatter_reduce(0, indices[0], values, "amax")
    empty = (largest <= 0) & (v > 0)
    if bool(empty.any()):
        raise ValueError(
            f"{int(empty.sum())} rows with a positive count have likelihood 0 under every component that start allows; "
            "leave them out, or give them a count of 0."
        )
    largest = torch.where(largest > 0, largest, 1.0)
    if indices is None:
        return L / largest.unsqueeze(-1), largest
    values = values / largest[indices[0]]
    return torch.sparse_coo_tensor(indices, values, L.shape, check_invariants=False, is_coalesced=True), largest


def _checked(likelihoods: Any, counts: Any, start: Any) -> tuple[Tensor, Tensor, Tensor]:
    L = _matrix_of(likelihoods)
    values = L._values() if L.is_sparse else L
    if L.ndim < 2 or 0 in L.shape or (L.is_sparse and L.sparse_dim() != 2):
        raise ValueError(
            f"likelihoods must be [..., n, K], or [n, K] if sparse, with n and K above 0, got {tuple(L.shape)}."
        )
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError("likelihoods must be finite and nonnegative.")
    v = _vector("counts", counts, L.shape[:-1], values)
    pi = _vector("start", start, (*L.shape[:-2], L.shape[-1]), values)
    if not bool((pi > 0).all()):
        # Components that start leaves out get no likelihood, so that they change neither scales nor gap.
        allowed = (pi > 0).to(values)
        L = L * (allowed if L.is_sparse else allowed.unsqueeze(-2))
        L = L.coalesce() if L.is_sparse else L
    return L, v, pi


def _vector(name: str, given: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Checks nonnegative numbers, one set per problem or one for all problems; gives ones if None."""
    if given is None:
        return like.new_ones(shape)
    tensor = _real(given, name)
    fits = tensor.ndim > 0 and tensor.ndim <= len(shape) and tensor.shape == shape[len(shape) - tensor.ndim :]
    tensor = tensor.to(like)
    if not fits or not bool((tensor.isfinite() & (tensor >= 0)).all()) or not bool(tensor.sum(-1).all()):
        raise ValueError(
            f"{name} must be {list(shape)}, finite, nonnegative and not all zero, got {list(tensor.shape)}."
        )
    return tensor.expand(shape)


def _real(given: Any, name: str) -> Tensor:
    if not isinstance(given, Tensor):
        array = np.asarray(given)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{name} must be real numbers, got {array.dtype}.")
        return torch.tensor(array, dtype=torch.float64, device="cpu")
    if given.is_complex():
        raise ValueError(f"{name} must be real numbers, got {given.dtype}.")
    return given


def _matrix_of(given: Any) -> Tensor:
    """Makes a float64 tensor (float32 if a float32 tensor was given), sparse (COO) for sparse matrices."""
    name = "likelihoods"
    if isinstance(given, Tensor):
        given = _real(given, name)
        given = given if given.dtype == torch.float32 else given.double()
        return given if given.layout == torch.strided else given.to_sparse_coo().coalesce()
    if not hasattr(given, "tocoo"):  # what SciPy's sparse matrices have
        return _real(given, name)
    if given.ndim != 2:
        raise ValueError(f"{name} must be [n, K] if sparse, got {given.shape}.")
    coo = given.tocoo()
    indices = torch.tensor(np.vstack([coo.row, coo.col]), dtype=torch.int64, device="cpu")
    return torch.sparse_coo_tensor(indices, _real(coo.data, name), coo.shape, check_invariants=True).coalesce()
