"""Low-rank plus diagonal bounds on a sum of log-partition functions, against the sum of the exact curvatures."""

import numpy as np
import pytest
import torch
from pairwise import pairs
from problem import algorithm, check_above, clamped, low_rank, randn

from favor.optim.low_rank import LowRankCurvature, low_rank_bound

RULES = ["exact", "repaired"]


def case(number):
    """Expansion point `[D]` and features `[T, n, D]`, some of low rank, some with every example twice."""
    source = np.random.default_rng(number)
    examples, labels, dim = int(source.integers(1, 5)), int(source.integers(2, 7)), int(source.integers(1, 9))
    theta = source.choice([0.0, 1.0, 5.0]) * source.normal(size=dim)
    features = source.normal(size=(examples, labels, dim))
    if number % 3 == 1:
        features = features[..., :1] * source.normal(size=dim) + features[..., -1:] * source.normal(size=dim)
    if number % 4 == 1:
        features = np.concatenate((features, features))
    return theta, features


def sum_of_curvatures(theta, features):
    """Of all examples: log Z, mean `[D]`, curvature `[D, D]`."""
    parts = [algorithm(clamped(table @ theta), table) for table in features]
    return tuple(sum(part) for part in zip(*parts, strict=True))


def bound_of(theta, features, rank, rule):
    return low_rank_bound(torch.from_numpy(theta), torch.from_numpy(features), rank, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank", [1, 2, 3, 5])
def test_above_the_sum_of_the_exact_curvatures(rule, rank):
    """In value and mean equal, in curvature above, and so above the sum of log-partition functions everywhere."""
    for number in range(30):
        theta, features = case(number)
        bound = bound_of(theta, features, rank, rule)
        log_z, mean, curvature = sum_of_curvatures(theta, features)
        assert float(bound.log_z) == pytest.approx(log_z, rel=1e-13)
        np.testing.assert_allclose(bound.mean, mean, atol=1e-12)
        gap = bound.curvature.dense().numpy() - curvature
        assert np.linalg.eigvalsh(gap)[0] >= -1e-12 * np.abs(curvature).max(), number
        check_above(bound, theta, features)


@pytest.mark.parametrize("extra", [0, 2])
def test_enough_rank_is_exact(extra):
    """With k >= T (n - 1) the exact rule keeps everything, and nothing goes onto the diagonal."""
    for number in range(40):
        theta, features = case(number)
        rank = features.shape[0] * (features.shape[1] - 1) + extra
        bound = bound_of(theta, features, rank, "exact")
        expected = sum_of_curvatures(theta, features)[2]
        np.testing.assert_allclose(bound.curvature.dense(), expected, atol=1e-12 * np.abs(expected).max())
        assert bound.curvature.diagonal.abs().max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_equals_its_rule(rule, rank):
    for seed in range(10):
        theta, features = randn(20, seed=seed).numpy(), randn(3, 6, 20, seed=seed + 1).numpy()
        expected = low_rank(theta, features, rank, rule)
        found = bound_of(theta, features, rank, rule).curvature.dense()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank", [1, 2, 5, 30])
def test_solve(rule, rank):
    for number in range(20):
        theta, features = case(number)
        found = bound_of(theta, features, rank, rule).curvature
        r = randn(len(theta), seed=number)
        for damping in (1e-3, 0.5):
            system = found.dense() + damping * torch.eye(len(theta), dtype=torch.float64)
            expected = torch.linalg.solve(system, r)
            torch.testing.assert_close(found.solve(r, damping), expected, rtol=0, atol=1e-11 * expected.abs().max())
        if found.diagonal.min() > 1e-3:
            torch.testing.assert_close(found.solve(r), torch.linalg.solve(found.dense(), r), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(*pairs(rule=RULES, size=(1, 2, 3, 5), rank=(1, 2, 3, 5)))
def test_vectors_that_repeat(rule, size, rank):
    """What they leave outside the kept directions is rounding, and must not become a direction of its own."""
    for seed in range(10):
        found = LowRankCurvature(size, rank, rule=rule, like=randn(1))
        expected = torch.zeros(size, size, dtype=torch.float64)
        for vector in randn(4, size, seed=seed):
            for times in (1.0, 0.3, 2.0):
                found.add(times * vector)
                expected += torch.outer(times * vector, times * vector)
        gap = torch.linalg.eigvalsh(found.dense() - expected)
        assert gap[0] >= -1e-12 * expected.abs().max(), seed
        if rule == "exact" and rank >= size:
            assert gap[-1] <= 1e-12 * expected.abs().max(), seed


@pytest.mark.parametrize("rule", RULES)
def test_one_label_and_large_logits(rule):
    """No curvature from a single label; logits of 1e4 overflow nowhere."""
    single = low_rank_bound(randn(3), randn(2, 1, 3, seed=1), 2, rule=rule)
    assert single.curvature.dense().abs().max() == 0
    torch.testing.assert_close(single.mean, randn(2, 1, 3, seed=1).sum((0, 1)))
    theta, features = randn(3).numpy(), 1e4 * randn(2, 6, 3, seed=1).numpy()
    bound = bound_of(theta, features, 2, rule)
    assert bound.curvature.dense().isfinite().all()
    check_above(bound, theta, features)
