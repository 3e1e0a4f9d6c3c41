"""Random projection directions omega, each row marginally N(0, I_d).

Orthogonal directions follow Choromanski et al., "Rethinking Attention with Performers" (2021), section 3.3,
with an independent chi(d) length for each row, so that every row is exactly Gaussian and every estimator that is
unbiased with independent rows stays unbiased for any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def draw_omega(
    num_features: int,
    head_dim: int,
    *,
    orthogonal: bool = True,
    antithetic: bool = False,
    generator: torch.Generator | None = None,
    batch_shape: tuple[int, ...] = (),
) -> Tensor:
    """Draws directions on the CPU in float64.

    Args:
        num_features: number of rows M, any positive integer (it need not be a multiple of `head_dim`).
        head_dim: dimension d of the rows.
        orthogonal: rows are orthogonal within consecutive blocks of d; else all rows are independent.
        antithetic: the second half of the rows is the negative of the first half (the last row of an odd M is
            left without its partner). Lowers the variance of features whose inputs are centred.
        generator: CPU generator; the global one by default.
        batch_shape: leading dimensions, for instance `(num_heads,)`; each has its own rows.

    Returns:
        omega `[*batch_shape, num_features, head_dim]`.

    Raises:
        ValueError: if `num_features` or `head_dim` is not a positive integer.

    Example:
        >>> import torch
        >>> from favor.features import draw_omega
        >>> omega = draw_omega(8, 8, generator=torch.Generator().manual_seed(0))
        >>> gram = omega @ omega.T
        >>> bool((gram - gram.diagonal().diag()).abs().max() < 1e-10)
        True
    """
    for name, size in (("num_features", num_features), ("head_dim", head_dim)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}.")
    if antithetic:
        half = draw_omega(
            (num_features + 1) // 2,
            head_dim,
            orthogonal=orthogonal,
            generator=generator,
            batch_shape=batch_shape,
        )
        return torch.cat((half, -half), dim=-2)[..., :num_features, :].contiguous()
    if not orthogonal:
        return torch.randn(*batch_shape, num_features, head_dim, dtype=torch.float64, device="cpu", generator=generator)

    blocks = math.ceil(num_features / head_dim)
    shape = (*batch_shape, blocks, head_dim, head_dim)
    q, r = torch.linalg.qr(torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator))
    # QR alone is not Haar distributed: the signs of R's diagonal have to be moved into Q.
    q = q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
    lengths = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator).norm(dim=-1, keepdim=True)
    rows = q.transpose(-1, -2) * lengths
    return rows.flatten(-3, -2)[..., :num_features, :].contiguous()


# Ways to draw that most families share, by names that stand in compiled graphs.
DRAWS: dict[str, Callable[..., Tensor]] = {"plain": draw_omega, "antithetic": partial(draw_omega, antithetic=True)}
