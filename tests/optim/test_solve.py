"""Systems with the curvature of the bound in O(n), against dense ones."""

import numpy as np
import pytest
import torch
from naive import ORDERS, as_array, backward_error, curvature, randn, solve
from pairwise import pairs

from favor.optim import bound_coefficients, bound_matvec, bound_solve

METHODS = ["tridiagonal", "scan"]
SIZES = [1, 2, 3, 7, 63, 100]


@pytest.mark.parametrize(*pairs(method=METHODS, order=ORDERS, spread=(0.0, 3.0, 30.0, 1e4)))
def test_equals_a_dense_solve(method, order, spread):
    for n in SIZES:
        check_solve(method, order, spread * randn(n), randn(n, seed=1))


def check_solve(method, order, logits, r):
    """To 1e-10 where the condition allows it; by the residual relative to |A| |u| + |r| everywhere."""
    b, c = curvature(logits, order), bound_coefficients(logits, order)
    for scale, damping in [(1e-2, 10.0), (1e2, 1e-1), (1e4, 1.0), (1.0, 1e-6), (1e4, 1e-6), (0.0, 0.3)]:
        u = bound_solve(c, scale, damping, r, method=method).numpy()
        assert backward_error(b, scale, damping, r.numpy(), u) <= 1e-12, (len(r), scale, damping)
        if scale <= 1e4 * damping:
            expected = solve(b, scale, damping, r.numpy())
            np.testing.assert_allclose(u, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize(*pairs(method=METHODS, spread=(1.0, 8.0, 1e4), scale=(1.0, 1e2, 1e4)))
def test_float32(method, spread, scale):
    """Logits, right side and answer in float32: residual at the level of its rounding, whatever the order."""
    for order in ORDERS:
        logits, r = (spread * randn(63)).float(), randn(63, seed=1).float()
        u = bound_solve(bound_coefficients(logits, order), scale, 1.0, r, method=method)
        assert u.dtype == torch.float32
        assert backward_error(curvature(logits, order), scale, 1.0, as_array(r), as_array(u)) <= 2e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_hundred_thousand_labels(method, order):
    logits, r = 2 * randn(100_000), randn(100_000, seed=1)
    c = bound_coefficients(logits, order)
    for scale, damping in [(1.0, 1.0), (1e2, 1e-2)]:
        u = bound_solve(c, scale, damping, r, method=method).numpy()
        image = scale * bound_matvec(c, torch.from_numpy(u)).numpy()
        size = np.linalg.norm(image) + damping * np.linalg.norm(u) + np.linalg.norm(r)
        assert np.linalg.norm(image + damping * u - r.numpy()) <= 1e-9 * size


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("order", ORDERS)
def test_hidden_labels_and_ties(method, order):
    logits = randn(30).round()
    logits[[0, 3, 29]] = -torch.inf
    r = randn(30, seed=1)
    u = bound_solve(bound_coefficients(logits, order), 5.0, 0.1, r, method=method)
    np.testing.assert_allclose(u, solve(curvature(logits, order), 5.0, 0.1, r.numpy()), atol=1e-12)


@pytest.mark.parametrize(*pairs(method=METHODS, order=("ascending", "none"), n=(1, 2, 7)))
def test_leading_dimensions(method, order, n):
    """Logits, right sides, scales (one of them 0) and dampings broadcast, as in elementwise operations."""
    logits = randn(2, 3, n)
    c = bound_coefficients(logits, order)
    b = torch.from_numpy(curvature(logits.flatten(0, 1), order)).reshape(2, 3, n, n)
    scales, dampings = torch.tensor([0.0, 1.0, 40.0]).double(), torch.tensor([[0.1], [2.0]]).double()
    for s, lam, r in [
        (scales, 0.5, randn(2, 3, n, seed=1)),
        (2.0, dampings, randn(n, seed=1)),
        (scales, dampings, randn(3, n, seed=1)),
        (scales.expand(2, 3), dampings.expand(2, 3), randn(4, 2, 3, n, seed=1)),
        (torch.rand(4, 1, 1).double(), dampings, randn(1, n, seed=1)),
    ]:
        u = bound_solve(c, s, lam, r, method=method)
        s, lam = (torch.as_tensor(value, dtype=torch.float64)[..., None, None] for value in (s, lam))
        expected = torch.linalg.solve(s * b + lam * torch.eye(n, dtype=torch.float64), r.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(u, expected, rtol=1e-10, atol=1e-10)
