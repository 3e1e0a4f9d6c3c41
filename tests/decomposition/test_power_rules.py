"""Rules for step, epoch and momentum: their inequalities, and that epochs by them do what the theorems say."""

import math
from itertools import product

import numpy as np
import pytest
from spectra import deviations, epoch_of, printed_epoch, rows_with, tensor, unit

from favor.decomposition.power_rules import (
    heavy_ball_beta,
    heavy_ball_rule,
    power_rule,
    second_eigenvalue,
)


def needed(kind, p, l1, l2, sigma2):
    """Rows of a batch that section 4.3 asks for."""
    keep = 1 - p.eta + p.eta * l1
    if kind == "power":
        return 16 * p.eta**2 * sigma2 * p.epoch_length / keep**2
    return 128 * p.eta * sigma2 * p.epoch_length / ((l1 - l2) * (2 * (1 - p.eta) + p.eta * (l1 + l2)))


def length(kind, eta, l1, l2):
    gap, keep = l1 - l2, 1 - eta + eta * l1
    if kind == "power":
        return math.ceil(keep * math.log(2) / (2 * eta * gap))
    q = math.sqrt(eta * gap * (2 * (1 - eta) + eta * (l1 + l2)))
    return math.ceil((keep + q) / (eta * gap + q) * math.log(8) / 2)


RULES = {"power": power_rule, "heavy ball": heavy_ball_rule}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(("l1", "l2"), [(1.0, 0.7), (1.0, 0.98), (11.7, 10.9), (0.3, 0.0)])
def test_t10_rules_satisfy_their_inequality_with_the_largest_step(kind, l1, l2):
    for batch, sigma2 in product((1, 200, 10**6), (0.0, 4.0, 900.0)):
        check_rule(kind, batch, l1, l2, sigma2)


def check_rule(kind, batch, l1, l2, sigma2):
    p = RULES[kind](l1, l2, sigma2, batch)
    assert 0 < p.eta <= 1
    assert p.epoch_length == length(kind, p.eta, l1, l2)
    assert needed(kind, p, l1, l2, sigma2) <= batch
    assert p.beta == (heavy_ball_beta(p.eta, l2) if kind == "heavy ball" else None)
    if p.eta < 1:
        # Ceilings make the right side rise by leaps of 1 / m.
        larger = p._replace(eta=p.eta * (1 + 1e-9))
        larger = larger._replace(epoch_length=length(kind, larger.eta, l1, l2))
        assert needed(kind, larger, l1, l2, sigma2) > batch * (1 - 1e-9)


def test_t10_the_closed_form_without_the_ceiling():
    l1, l2, sigma2, batch = 3.0, 2.9, 500.0, 50
    closed = batch * (l1 - l2) / (8 * math.log(2) * sigma2 + batch * (l1 - l2) * (1 - l1))
    assert power_rule(l1, l2, sigma2, batch).eta == pytest.approx(closed, rel=2e-3)


def test_rules_for_a_step_or_a_length_that_is_given():
    assert power_rule(1.0, 0.9, 5.0, 10, eta=0.5) == (0.5, math.ceil(math.log(2) / (2 * 0.5 * 0.1)), None)
    fixed = power_rule(1.0, 0.9, 5.0, 10, epoch_length=25)
    assert fixed.epoch_length == 25
    assert fixed.eta == pytest.approx(math.sqrt(10 / (16 * 5 * 25)))
    assert heavy_ball_rule(1.0, 0.9, 5.0, 10, eta=1.0, epoch_length=3) == (1.0, 3, pytest.approx(0.81))


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1.0, 1.0, 1.0, 10), "0 <= l2 < l1, got l1 = 1.0 and l2 = 1.0"),
        ((1.0, -0.1, 1.0, 10), "0 <= l2 < l1"),
        ((math.inf, 0.1, 1.0, 10), "0 <= l2 < l1"),
        ((1.0, 0.5, -1.0, 10), "sigma2 must be finite and at least 0, got -1.0"),
        ((1.0, 0.5, 1.0, 0), "batch must be at least 1 row, got 0"),
        ((1.0, 0.5, 1e300, 1), "make batch larger, or sigma2 smaller"),
    ],
)
def test_rules_refuse(rule, values, message):
    with pytest.raises(ValueError, match=message):
        rule(*values)
    with pytest.raises(ValueError, match="eta must be in"):
        rule(1.0, 0.5, 1.0, 10, eta=1.5)
    with pytest.raises(ValueError, match="epoch_length must be at least 1"):
        rule(1.0, 0.5, 1.0, 10, epoch_length=0)


@pytest.mark.parametrize(("n", "d"), [(40, 5), (30, 1), (6, 9)])
def test_variance_of_rows_by_dense_norms(n, d):
    X = np.random.default_rng(n).normal(size=(n, d)) * np.geomspace(1, 0.1, d)
    X[0] *= 1e-3
    X[1] = 0
    C = X.T @ X / n
    true = [np.linalg.norm(np.outer(row, row) - C, 2) for row in X]
    np.testing.assert_allclose(deviations(X), true, rtol=1e-9, atol=1e-12)


def growth(t, al, be):
    """p_t of section 4.3: how the noise-free square grows in t steps with momentum."""
    if al == pytest.approx(4 * be, rel=1e-14):
        return be**t
    root = np.sqrt(complex(al - 4 * be))
    plus, minus = (np.sqrt(al) + root) / 2, (np.sqrt(al) - root) / 2
    return (((plus**t + minus**t) / 2) ** 2).real


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_t11_noise_free_heavy_ball_grows_as_its_polynomial(eta):
    values = np.array([1.3, 1.1, 0.8, 0.3, 0.0])
    X, vectors = rows_with(values, 60)
    anchor, beta = unit(vectors @ np.array([0.1, 1, 1, -1, 1])), heavy_ball_beta(eta, values[1])
    whole, steps = np.arange(60), 12
    ratios = []
    for k, value in enumerate(values):
        al = 4 * (1 - eta + eta * value) ** 2
        grown = growth(steps, al, beta) * (vectors[:, k] @ anchor) ** 2
        path = printed_epoch(X, anchor, [whole] * (steps - 1), eta, beta)
        assert (vectors[:, k] @ path[-1]) ** 2 == pytest.approx(grown, rel=1e-10, abs=1e-13)
        ratios.append(grown)
    found = (vectors.T @ epoch_of(X, anchor, [None] * (steps - 1), eta, beta)) ** 2
    np.testing.assert_allclose(found, np.array(ratios) / sum(ratios), rtol=1e-10, atol=1e-13)


def contraction(X, vectors, start, p, batch, seed=0, repetitions=30):
    """theta after an epoch of the printed algorithm over theta before, from means over repetitions."""
    source = np.random.default_rng(seed)
    ends = [
        printed_epoch(X, start, list(source.integers(0, len(X), (p.epoch_length - 1, batch))), p.eta, p.beta)[-1]
        for _ in range(repetitions)
    ]
    squares = ((np.array(ends) @ vectors) ** 2).mean(0)
    before = (start @ vectors) ** 2
    return squares[1:].sum() / squares[0] / (before[1:].sum() / before[0])


SPREAD = np.r_[1.0, 0.7, np.linspace(0.4, 0.05, 8)]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("near", [False, True])
def test_t10_an_epoch_by_the_rules_takes_a_quarter_off(kind, near):
    X, vectors = rows_with(SPREAD, 10000)
    sigma2, batch = (deviations(X) ** 2).mean(), 1000
    p = RULES[kind](1.0, 0.7, sigma2, batch)
    assert p.epoch_length <= 60
    start = vectors[:, 0] + 0.1 * vectors[:, 1] if near else np.random.default_rng(1).normal(size=10)
    assert contraction(X, vectors, start, p, batch) <= 0.75


def test_second_eigenvalue_is_the_quotient_of_what_is_new():
    C = np.diag([3.0, 2.0, 1.0, 0.5])
    below = []
    for seed in range(20):
        source = np.random.default_rng(seed)
        x, last = (unit(source.normal(size=4)) for _ in range(2))
        new = unit(last - (last @ x) * x)
        found = second_eigenvalue(*(tensor(v) for v in (x, C @ x, last, C @ last)))
        bound = x @ C @ x * (1 - 1e-6)
        assert found == pytest.approx(min(new @ C @ new, bound), rel=1e-9)
        below.append(new @ C @ new < bound)
    assert {True, False} == set(below)
    top, near = np.eye(4)[0], unit(np.array([1, 1e-3, 1e-4, 1e-4]))
    found = second_eigenvalue(*(tensor(v) for v in (top, C @ top, near, C @ near)))
    assert 1.9 < found <= 2
    assert second_eigenvalue(*(tensor(v) for v in (top, C @ top, top, C @ top))) is None
    # Of the higher of two points nothing tells that the other is above: the estimate stays below l1.
    low = np.eye(4)[3]
    found = second_eigenvalue(*(tensor(v) for v in (low, C @ low, top, C @ top)))
    assert found == pytest.approx(0.5 * (1 - 1e-6))
