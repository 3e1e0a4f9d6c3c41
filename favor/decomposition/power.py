"""Maximisers of scale-invariant functions on the unit sphere by repeated gradients (SCI-PI).

A function is scale invariant if f(c x) = |c|^p f(x), or f(c x) = f(x) + log_a |c|, which behaves as p = 0. Its gradient
then keeps its direction when x is scaled, so x <- grad f(x) / |grad f(x)| is an iteration on directions whose fixed
points are the stationary points on the sphere. For f = x'Cx/2 it is power iteration.

Independent components are an application, not a function of this package: maximise e (E[(w'x)^4] - 3 |x|^4) over unit
x, w whitened data and e the sign of the bracket, which is FastICA with cubes.

Source: C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), chapter 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from favor.decomposition.inputs import check_integer, check_number, same_kind, tensor_of


class PowerResult(NamedTuple):
    """Result of `scale_invariant_power`.

    Attributes:
        x: unit vector `[d]`, of the kind of the start.
        multiplier: x'grad f(x), which at a stationary point is p f(x), or 1/ln(a) in the additive case.
        n_iter: number of steps taken.
        converged: whether the last step was below the tolerance.
    """

    x: Any
    multiplier: float
    n_iter: int
    converged: bool


class BlockPowerResult(NamedTuple):
    """Result of `block_power`.

    Attributes:
        blocks: one vector per block, each of the kind of its start; unit vectors except for free blocks.
        multipliers: x'grad of each block at the end; None for free blocks.
        n_iter: number of sweeps over all blocks.
        converged: whether the last sweep moved every block by less than the tolerance.
    """

    blocks: tuple[Any, ...]
    multipliers: tuple[float | None, ...]
    n_iter: int
    converged: bool


def scale_invariant_power(
    gradient: Callable[[Any], Any], start: Any, *, shift: float = 0.0, tol: float = 1e-10, max_iter: int = 1000
) -> PowerResult:
    """Maximises f on the unit sphere by x <- (grad f(x) + s x) / norm, f scale invariant.

    The local rate is max |lam_i + s| / (lam + s), lam = x'grad f(x) at the maximiser and lam_i the eigenvalues of the
    Hessian there on the directions orthogonal to it. f never falls if it is convex and s >= 0; elsewhere it may. Sums
    of scale-invariant functions of several degrees are allowed.

    Args:
        gradient: of f, from a unit vector `[d]` to a vector `[d]`; called with tensors if the start is one, else with
            arrays. A positive factor that depends on x changes nothing.
        start: vector `[d]` of any length except zero.
        shift: s in units of the current lam, above -1. A positive one damps directions that change sign from step to
            step (lam_i near -lam); a slightly negative one may speed up slow ones. Default 0.
        tol: stops when 1 - |x_new'x| < tol; evaluated without cancellation, so values down to the square of the
            precision mean something. Default 1e-10.
        max_iter: largest number of steps. Default 1000. One gradient per step, and one for the result.

    Returns:
        `PowerResult(x, multiplier, n_iter, converged)`.

    Raises:
        ValueError: for a start that is not a finite vector with a direction, a gradient that is zero, not finite or of
            another shape, or an option out of range.

    References:
        C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), Algorithm 2
        and sections 3.3, 3.4. The shift there is added to the unscaled gradient, which makes the same number mean
        something else for every data set; here it is relative to lam.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import scale_invariant_power
        >>> C = np.array([[2.0, 1.0], [1.0, 2.0]])
        >>> result = scale_invariant_power(lambda x: C @ x, np.array([1.0, 0.0]), tol=1e-20)
        >>> round(result.multiplier, 6), result.x.round(6).tolist()
        (3.0, [0.707107, 0.707107])
    """
    found = _swept([gradient], [start], [None], [("gradient", "start")], shift, tol, max_iter)
    return PowerResult(found.blocks[0], float(found.multipliers[0] or 0.0), found.n_iter, found.converged)


def block_power(
    gradients: Sequence[Callable[..., Any]],
    blocks: Sequence[Any],
    *,
    steps: Sequence[float | None] | None = None,
    shift: float = 0.0,
    tol: float = 1e-10,
    max_iter: int = 1000,
) -> BlockPowerResult:
    """Maximises f of several vectors, block after block, each on its unit sphere or free.

    A block x on the sphere, in which f is scale invariant, becomes (grad_x f + s x) / norm; a free block y becomes
    y + step grad_y f. Every update uses the newest values of the others (Gauss-Seidel).

    Args:
        gradients: one for each block: called as gradient(*blocks) with all blocks, gives the gradient with respect to
            its own block.
        blocks: where to start, vectors of any lengths; those on the sphere may not be zero.
        steps: for each block None if it is on the sphere, or else its step; None (default) puts all on the sphere.
            2 / (L + m) suits f that is m-strongly concave in the block with L-Lipschitz gradient.
        shift: s in units of the block's own multiplier, as in `scale_invariant_power`. Default 0.
        tol: stops when a sweep changes every block x on the sphere by 1 - |x_new'x| < tol and every free one by
            |y_new - y|^2 < 2 tol max(1, |y|^2). Default 1e-10.
        max_iter: largest number of sweeps. Default 1000.

    Returns:
        `BlockPowerResult(blocks, multipliers, n_iter, converged)`.

    Raises:
        ValueError: for numbers of gradients, blocks and steps that differ, for starts, gradients or options as in
            `scale_invariant_power`, or a free block that grows without bound.

    References:
        C. Kim, Optimization Methods for Scale Invariant Problems in Machine Learning (Northwestern, 2020), section 3.4.
        Its formulas update all blocks from the old point, while its experiments do not. With more than two blocks the
        former can fail to ascend where the sweep used here ascends.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import block_power
        >>> A = np.array([[3.0, 0.0], [1.0, 2.0]])
        >>> found = block_power([lambda x, y: A @ y, lambda x, y: A.T @ x], [np.ones(2), np.ones(2)], tol=1e-20)
        >>> bool(abs(found.multipliers[0] - np.linalg.norm(A, 2)) < 1e-9)
        True
    """
    lengths = [None] * len(blocks) if steps is None else list(steps)
    if not len(gradients) == len(blocks) == len(lengths) or not blocks:
        raise ValueError(
            "gradients, blocks and steps must have one entry per block, and there must be a block; got "
            f"{len(gradients)}, {len(blocks)} and {len(lengths)}."
        )
    for i, length in enumerate(lengths):
        check_number(f"steps[{i}]", length, None, expected="a positive number", allowed=lambda s: 0 < s < math.inf)
    names = [(f"gradients[{i}]", f"blocks[{i}]") for i in range(len(blocks))]
    return _swept(gradients, blocks, lengths, names, shift, tol, max_iter)


def _swept(
    gradients: Sequence[Callable[..., Any]],
    blocks: Sequence[Any],
    lengths: Sequence[float | None],
    names: Sequence[tuple[str, str]],
    shift: float,
    tol: float,
    max_iter: int,
) -> BlockPowerResult:
    """Runs the sweeps of `block_power`, with a length per block and the names of gradients and blocks in errors."""
    check_number("shift", shift, expected="a finite number", allowed=math.isfinite)
    if shift <= -1:
        raise ValueError(f"shift must be above -1, at which it cancels the multiplier; got {shift!r}.")
    check_number("tol", tol)
    check_integer("max_iter", max_iter)
    found = [_vector(block, name) for block, (_, name) in zip(blocks, names, strict=True)]
    found = [x if lengths[i] is not None else _unit(x, names[i][1]) for i, x in enumerate(found)]
    given = [same_kind(x, block) for x, block in zip(found, blocks, strict=True)]

    def slope(i: int) -> Tensor:
        return _gradient(gradients[i], given, found[i], names[i][0], may_vanish=lengths[i] is not None)

    n_iter, converged = 0, False
    while n_iter < max_iter and not converged:
        converged = True
        for i, length in enumerate(lengths):
            if length is None:
                found[i], moved = _step(found[i], slope(i), shift, names[i][0])
            else:
                before, found[i] = found[i], found[i] + length * slope(i)
                if not bool(found[i].isfinite().all()):
                    raise ValueError(f"blocks[{i}] grew without bound; choose steps[{i}] smaller than {length!r}.")
                moved = float((found[i] - before).square().sum() / (2 * before.square().sum().clamp(min=1)))
            given[i] = same_kind(found[i], blocks[i])
            converged = converged and moved < tol
        n_iter += 1
    multipliers = tuple(float(x @ slope(i)) if lengths[i] is None else None for i, x in enumerate(found))
    return BlockPowerResult(tuple(given), multipliers, n_iter, converged)


def _vector(start: Any, name: str) -> Tensor:
    x = tensor_of(start).detach()
    if x.ndim != 1 or x.is_complex():
        raise ValueError(f"{name} must be a real vector [d], got shape {tuple(x.shape)} of {x.dtype}.")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity.")
    return x if x.is_floating_point() else x.double()


def _unit(x: Tensor, name: str) -> Tensor:
    if not bool(x.any()):
        raise ValueError(f"{name} must have a direction, got zeros or no entries; take a random vector.")
    x = x / x.abs().max()
    return x / x.norm()


def _gradient(
    gradient: Callable[..., Any], given: Sequence[Any], x: Tensor, name: str, *, may_vanish: bool = False
) -> Tensor:
    """Gives the gradient at the given blocks in the type and on the device of x, checked."""
    slope = tensor_of(gradient(*given), x).detach()
    if slope.shape != x.shape:
        raise ValueError(f"{name} must give shape {tuple(x.shape)}, got {tuple(slope.shape)}.")
    if not bool(slope.isfinite().all()):
        raise ValueError(f"{name} gave NaN or infinity; rescale the function, or start elsewhere.")
    if not may_vanish and not bool(slope.any()):
        raise ValueError(f"{name} gave zeros, which have no direction; start elsewhere, for example at random.")
    return slope


def _step(x: Tensor, slope: Tensor, shift: float, name: str) -> tuple[Tensor, float]:
    """Gives the next unit vector, and 1 - |x_new'x|."""
    # Norms of very large or very small gradients would overflow or vanish: only their direction counts.
    slope = slope / slope.abs().max()
    move = slope + shift * (x @ slope) * x
    length = move.norm()
    if not 0 < float(length) < math.inf:
        raise ValueError(f"{name} plus shift {shift!r} has no direction; choose another shift or start.")
    new = move / length
    # |x_new -+ x|^2 / 2 is 1 - |x_new'x| for unit vectors, and keeps its digits where they nearly agree.
    moved = torch.minimum((new - x).square().sum(), (new + x).square().sum()) / 2
    return new, float(moved)
