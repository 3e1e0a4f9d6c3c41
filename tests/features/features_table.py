"""The table of families that every test of features runs through, and formulas written out as in the paper."""

import math
from functools import partial

import pytest
import torch
from own_family import OppositePairs

from favor import features

D = 4


def general_derf(alpha: float = 0.0) -> features.DERF:
    """A dense DERF that satisfies Theorem 4.1 without being any of the special families."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(3, D, D, dtype=torch.float64, generator=generator) / 10
    A = (noise[0] + noise[0].T) / 4 - 0.1 * torch.eye(D, dtype=torch.float64)
    B1 = torch.eye(D, dtype=torch.float64) + noise[1]
    B2 = (torch.eye(D, dtype=torch.float64) - 4 * A) @ torch.linalg.inv(B1).T
    return features.DERF(A, B1, B2, alpha=alpha)


POSITIVE = {
    "pos": features.PosRF,
    "gerf": features.GERF,
    "saderf": features.SADERF,
    "aderf": features.ADERF,
    "aderf-newton_schulz": partial(features.ADERF, factorization="newton_schulz"),
    "sderf": features.SDERF,
    "sderf-cholesky": partial(features.SDERF, factorization="cholesky"),
    "sderf-newton_schulz": partial(features.SDERF, factorization="newton_schulz"),
    "derf": general_derf,
    "cderf": features.CDERF,
    "cderf-cholesky": partial(features.CDERF, factorization="cholesky"),
    "wderf": features.WDERF,
    "wderf-cholesky": partial(features.WDERF, factorization="cholesky"),
    "opposite": OppositePairs,
}
each_family = pytest.mark.parametrize("family", POSITIVE.values(), ids=POSITIVE)


def data(length: int = 6, other: int = 5, scale: float = 0.35, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of different spread, with means that are not zero, float64."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1.5, 1.0, 0.7, 0.4], dtype=torch.float64)
    x = torch.randn(length, D, dtype=torch.float64, generator=generator) * spread + 0.3
    y = torch.randn(other, D, dtype=torch.float64, generator=generator) * spread.flip(0) - 0.2
    return scale * x, scale * y


def exact_kernel(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """K^(alpha)(x, y) for all pairs."""
    return (x @ y.T + alpha * x.square().sum(-1)[:, None] + alpha * y.square().sum(-1)).exp()


def theorem_4_1(params: features.Parameters) -> list[torch.Tensor]:
    """A, B_1 and B_2 of parameters."""
    maps = (params.factor, params.transform, params.inverse.mT)
    gram, B1, B2 = (params.factor.mT @ one for one in maps)
    return [(torch.eye(gram.shape[-1]).to(gram) - gram) / 4, B1, B2]


def paper_second_moment(x: torch.Tensor, y: torch.Tensor, params: features.Parameters) -> torch.Tensor:
    """First term of equation (15) for all pairs, from A, B1, B2 exactly as the theorem has it (alpha = 0).

    The paper has no shift b of the keys: it replaces y by y - b and multiplies f_1 by exp(x . b).
    """
    eye = torch.eye(D, dtype=torch.float64)
    tilt = torch.zeros(len(x), 1, dtype=torch.float64)
    if params.shift is not None:
        tilt = 2 * x @ params.shift[:, None]
        y = y - params.shift
    A, B1, B2 = theorem_4_1(params)
    inverse = torch.linalg.inv(eye - 4 * A)
    C1, C2 = -B1.T @ inverse @ B1 / 2, -B2.T @ inverse @ B2 / 2
    D4 = torch.linalg.det(eye - 4 * A)
    R = torch.linalg.inv(eye - 8 * A)
    first = 2 * torch.einsum("ia,ab,ib->i", x, C1 + B1.T @ R @ B1, x)
    second = 2 * torch.einsum("ja,ab,jb->j", y, C2 + B2.T @ R @ B2, y)
    mixed = 4 * x @ B1.T @ R @ B2 @ y.T
    return D4 / math.sqrt(torch.linalg.det(eye - 8 * A)) * (tilt + first[:, None] + second + mixed).exp()
