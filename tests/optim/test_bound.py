"""The bound on the log-partition function, its structure and its systems, against Algorithm 1 label by label."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from pairwise import pairs
from problem import ORDERS, algorithm, as_array, backward_error, check_above, clamped, curvature, log_sum, randn, solve

from favor.optim import bound_coefficients, bound_solve, partition_bound
from favor.optim.bound import bound_dense, bound_diagonal, bound_factor, bound_matvec, bound_row_sums
from favor.optim.low_rank import low_rank_bound
from favor.optim.majorizers import MAJORIZERS

SIZES = [1, 2, 3, 50, 63, 100]
# Of the structure, of the bound, and of the residual of systems.
TOLERANCE = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), (1e-5, 1e-6, 2e-6))
TOLERANCE[torch.float64] = 1e-13, 1e-12, 1e-12
METHODS = ["tridiagonal", "scan"]
SYSTEMS = [(1e-2, 10.0), (1e2, 1e-1), (1e4, 1.0), (1.0, 1e-6), (1e4, 1e-6), (0.0, 0.3)]
KINDS = {"flat": 0.0, "small": 0.1, "moderate": 3.0, "large": 30.0, "huge": 1e4, "ties": 1.0}


def excess(logits, delta, c):
    """By how much log Z at logits + delta is above the bound of c, relative to the terms; delta `[m, n]`."""
    at = clamped(as_array(logits))
    mean = np.exp(at - log_sum(at))
    quadratic = (delta * bound_matvec(c, torch.from_numpy(delta)).numpy()).sum(-1) / 2
    terms = [np.full(len(delta), float(c.log_z)), delta @ mean, quadratic]
    log_z = log_sum(as_array(logits) + delta)
    return (log_z - sum(terms)) / (1 + np.abs(log_z) + sum(np.abs(term) for term in terms))


def directions(n, seed, count=40):
    """Changes of the logits of all sizes `[4 count, n]`, a quarter of them of a single label."""
    source = np.random.default_rng(seed)
    single = np.eye(n)[source.integers(n, size=count)] * source.normal(size=(count, 1))
    dense = source.normal(size=(3 * count, n))
    return np.concatenate((single, dense)) * 10.0 ** source.uniform(-3, 3, size=(4 * count, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hidden", ["first", "most", "most likely"])
def test_hidden_labels(order, hidden):
    logits = 3 * randn(20)
    labels = {"first": [0], "most": list(range(1, 20)), "most likely": [int(logits.argmax())]}[hidden]
    logits[labels] = -torch.inf
    c = bound_coefficients(logits, order)
    assert abs(float(c.log_z) - log_sum(logits.numpy())) <= 1e-13
    assert excess(logits, directions(20, 0), c).max() <= 1e-12
    np.testing.assert_allclose(bound_dense(c), curvature(logits, order), atol=1e-13)
    for method in METHODS:
        u = bound_solve(c, 5.0, 0.1, randn(20, seed=1), method=method)
        np.testing.assert_allclose(u, solve(curvature(logits, order), 5.0, 0.1, randn(20, seed=1).numpy()), atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_partition_bound(weighted, scale):
    source = np.random.default_rng(0)
    for _ in range(10):
        n, dim = source.integers(1, 12), source.integers(1, 6)
        theta, features = source.normal(size=dim), scale * source.normal(size=(n, dim))
        h = source.exponential(size=n) if weighted else np.ones(n)
        h[1:3] *= not weighted  # hidden labels
        weights = torch.from_numpy(h) if weighted else None
        bound = partition_bound(torch.from_numpy(theta), torch.from_numpy(features), weights)
        with np.errstate(divide="ignore"):
            log_h = np.log(h)
        log_alpha = clamped(features @ theta + log_h)
        parts = bound.log_z, bound.mean, bound.curvature
        for found, expected in zip(parts, algorithm(log_alpha, features), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * scale**2)
        check_above(bound, theta, features, log_h)


@pytest.mark.parametrize(*pairs(order=ORDERS, kind=KINDS, dtype=TOLERANCE), ids=str)
def test_structure(order, kind, dtype):
    """That of Algorithm 1, which is above log Z everywhere; half precision is computed in float32."""
    for n in SIZES:
        logits = (KINDS[kind] * (randn(n).round() if kind == "ties" else randn(n))).to(dtype)
        check_structure(logits, order, n, *TOLERANCE[dtype])


def check_structure(logits, order, n, tolerance, bound_tolerance, residual):
    expected, dtype = curvature(logits, order), torch.promote_types(logits.dtype, torch.float32)
    c = bound_coefficients(logits, order)
    v = randn(n, seed=1, dtype=dtype)
    found = {
        "dense": (bound_dense(c), expected),
        "diagonal": (bound_diagonal(c), np.diag(expected)),
        "row sums": (bound_row_sums(c), np.abs(expected).sum(-1)),
        "product": (bound_matvec(c, v), expected @ as_array(v)),
        "factor": (bound_factor(c).mT @ bound_factor(c), expected),
    }
    for name, (value, truth) in found.items():
        assert value.dtype == dtype, name
        atol = tolerance * max(1.0, np.abs(truth).max())
        np.testing.assert_allclose(value, truth, rtol=0, atol=atol, err_msg=f"{name} for {n} labels")
    assert bound_factor(c).shape == (n - 1, n)
    assert abs(float(c.log_z) - log_sum(clamped(as_array(logits)))) <= tolerance * (1 + abs(float(c.log_z)))
    assert excess(logits, directions(n, n), c).max() <= bound_tolerance
    for method, (scale, damping) in product(METHODS, SYSTEMS):
        u = bound_solve(c, scale, damping, v, method=method)
        assert u.dtype == dtype
        error = backward_error(expected, scale, damping, as_array(v), as_array(u))
        assert error <= residual, (method, n, scale, damping)
        if residual < 1e-6 and scale <= 1e4 * damping:  # where the condition allows it
            truth = solve(expected, scale, damping, v.numpy())
            np.testing.assert_allclose(u, truth, rtol=0, atol=1e-10 * np.abs(truth).max())


@pytest.mark.parametrize("order", ORDERS)
def test_leading_dimensions(order):
    # A permuted layout, which is what transposes and slices hand over.
    logits = (3 * randn(2, 3, 7)).transpose(0, 2).contiguous().transpose(0, 2)
    c = bound_coefficients(logits, order)
    expected = curvature(logits.flatten(0, 1), order).reshape(2, 3, 7, 7)
    np.testing.assert_allclose(bound_dense(c), expected, atol=1e-14)
    np.testing.assert_allclose(bound_diagonal(c), np.diagonal(expected, axis1=-2, axis2=-1), atol=1e-14)
    np.testing.assert_allclose(bound_row_sums(c), np.abs(expected).sum(-1), atol=1e-14)
    assert c.log_z.shape == (2, 3)
    for shape in [(7,), (3, 7), (2, 1, 7), (4, 2, 3, 7)]:
        v = randn(*shape, seed=1)
        product = np.einsum("...ij,...j->...i", expected, v.expand(*shape[:-3], 2, 3, 7))
        np.testing.assert_allclose(bound_matvec(c, v), product, atol=1e-13)


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


@pytest.mark.parametrize(*pairs(method=METHODS, order=("ascending", "none"), n=(1, 2, 7)))
def test_systems_broadcast(method, order, n):
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


def test_an_empty_batch():
    c = bound_coefficients(torch.zeros(0, 5))
    assert c.log_z.shape == (0,)
    assert bound_diagonal(c).shape == bound_row_sums(c).shape == bound_matvec(c, torch.zeros(0, 5)).shape == (0, 5)
    assert bound_dense(c).shape == (0, 5, 5)
    for method in ("tridiagonal", "scan"):
        assert bound_solve(c, 1.0, 1.0, torch.zeros(0, 5), method=method).shape == (0, 5)


INF, NAN, Z = torch.inf, torch.nan, torch.zeros
C = bound_coefficients(Z(2, 3))
REFUSED = [
    *((bound_coefficients, (torch.tensor(a),), "logits") for a in ([0.0, NAN], [0.0, INF], [[0.0], [-INF]], 1.0, [1])),
    (bound_coefficients, (Z(3, 0),), "logits"),
    (bound_coefficients, (Z(3), "sorted"), "order"),
    (bound_coefficients, (Z(3), None), "order"),
    *((bound_matvec, (C, Z(shape)), r"\bv\b") for shape in ((), (1,), (2,), (4,))),
    (partition_bound, (Z(3), Z(4, 2)), "features"),
    (partition_bound, (Z(2), Z(2)), "features"),
    (partition_bound, (Z(1, 2), Z(4, 2)), "theta"),
    (partition_bound, (Z(2), Z(0, 2)), "features|logits"),
    *((partition_bound, (Z(2), Z(2, 2), torch.tensor(w)), "weights") for w in ([1.0], [0.0, 0], [1.0, -1], [1.0, INF])),
    *((bound_solve, (C, scale, 1.0, Z(2, 3)), "scale") for scale in (-1.0, NAN, torch.ones(5))),
    *((bound_solve, (C, 1.0, damping, Z(2, 3)), "damping") for damping in (0.0, NAN, torch.ones(5))),
    (bound_solve, (C, 1.0, torch.tensor([1.0, 0.0]), Z(2, 3)), "damping"),
    *((bound_solve, (C, 1.0, 1.0, rhs), "rhs") for rhs in (Z(2, 4), Z(()), Z(5, 3))),
    (partial(bound_solve, method="cholesky"), (C, 1.0, 1.0, Z(2, 3)), "method"),
    (low_rank_bound, (Z(2), Z(3, 4, 3), 1), "features"),
    (low_rank_bound, (Z(2), Z(4, 2), 1), "features"),
    (low_rank_bound, (Z(1, 2), Z(3, 4, 2), 1), "theta"),
    (low_rank_bound, (Z(2), Z(3, 0, 2), 1), "features|logits"),
    (low_rank_bound, (Z(2), Z(3, 4, 2) * NAN, 1), "features|logits"),
    (low_rank_bound, (Z(2), Z(3, 4, 2), 0), "rank"),
    (partial(low_rank_bound, rule="paper"), (Z(2), Z(3, 4, 2), 1), "rule"),
    *((MAJORIZERS[name], (Z(1, 2001), Z(1, 1), Z(1)), "got 2001") for name in ("spectral", "block", "kfac")),
    (MAJORIZERS["bohning"](Z(4, 5), Z(4, 3) + INF, Z(4) + 0.25).solve, (Z(5, 3), 1e-4), "must be finite .* scale"),
    (MAJORIZERS["block"](Z(4, 5), Z(4, 3) + INF, Z(4) + 0.25).solve, (Z(5, 3), 1e-4), "must be finite .* scale"),
]


@pytest.mark.parametrize(("call", "arguments", "match"), REFUSED)
def test_refuses(call, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(*arguments)
