"""Stochastic scale-invariant power iteration against exact optima, EM and finite differences."""

import numpy as np
import pytest
import torch
from spectra import rows_with, tensor

from favor.decomposition import StochasticSCIPI, VRPower
from favor.decomposition.epochs import Quadratic, reduced_gradient
from favor.decomposition.stochastic import MixtureLikelihood, PowerOfProducts

OBJECTIVES = [PowerOfProducts(1.5), PowerOfProducts(2.0), PowerOfProducts(3.0), PowerOfProducts(4.0)]


def mixture(n, seed=0, weights=None, apart=1.5, K=10):
    """Likelihoods `[n, K]` of draws from normal distributions with means `apart` from each other."""
    source = np.random.default_rng(seed)
    means = np.arange(K) * apart
    weights = source.dirichlet(np.full(K, 2.0)) if weights is None else np.asarray(weights)
    data = source.normal(means[source.choice(K, n, p=weights)])
    return np.exp(-((data[:, None] - means) ** 2) / 2)


def likelihood(L, proportions):
    return np.log(L @ proportions).mean()


def em(L, steps):
    """Proportions after steps of EM, which never fall and cannot pass the optimum."""
    proportions = np.full(L.shape[1], 1 / L.shape[1])
    for _ in range(steps):
        proportions *= (1 / (L @ proportions)) @ L / len(L)
    return proportions


def peaks(n=4000, d=8, seed=0):
    """Rows with heavy tails and one direction that has most of them."""
    source = np.random.default_rng(seed)
    turn = np.linalg.qr(source.normal(size=(d, d)))[0]
    return (source.laplace(size=(n, d)) * np.r_[1.6, np.linspace(1, 0.5, d - 1)]) @ turn


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_t12_degree_2_is_vr_power(eta):
    X, _ = rows_with(np.r_[1.0, 0.8, 0.6, np.linspace(0.4, 0.1, 7)], 3000)
    one = StochasticSCIPI(n_components=2, degree=2, eta=eta, random_state=0).fit(X)
    other = VRPower(2, eta=eta, random_state=0).fit(X)
    np.testing.assert_allclose(one.components_, other.components_, atol=1e-10)
    np.testing.assert_allclose(2 * one.values_, other.explained_variance_, rtol=1e-12)
    assert one.passes_ == other.passes_
    assert one.n_iter_ == other.n_iter_


@pytest.mark.parametrize("objective", [*OBJECTIVES, MixtureLikelihood()], ids=lambda o: f"{o.degree:g}")
def test_gradients_by_finite_differences_and_their_degree(objective):
    source = np.random.default_rng(0)
    rows, x = tensor(source.normal(size=(30, 5))).abs(), tensor(source.normal(size=5))
    p = objective.degree

    def value(x):
        return (rows @ x).abs().pow(p).mean() / p if p else objective.value(rows, x)

    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    numeric = torch.stack([(value(x + step) - value(x - step)) / 2e-6 for step in steps])
    torch.testing.assert_close(objective.gradient(rows, x), numeric, rtol=1e-6, atol=1e-7)
    doubled = objective.gradient(rows, -2 * x)
    torch.testing.assert_close(doubled, -(2 ** (p - 1)) * objective.gradient(rows, x), rtol=1e-12, atol=1e-12)
    # Euler's identity: p times the value, or the base of the logarithm, here e^(1/2).
    assert torch.dot(x, objective.gradient(rows, x)).item() == pytest.approx(p * value(x).item() if p else 2)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("objective", [*OBJECTIVES, MixtureLikelihood()], ids=lambda o: f"{o.degree:g}")
def test_the_estimate_is_unbiased_and_exact_along_the_anchor_on_both_sides(objective, side):
    source = np.random.default_rng(0)
    rows, x = tensor(source.normal(size=(100, 5))).abs(), tensor(source.normal(size=5))
    anchor = tensor(source.normal(size=5))
    x = x * torch.dot(x, anchor).sign() * side
    whole = objective.gradient(rows, anchor)
    every = torch.stack([reduced_gradient(objective, row[None], x, anchor, whole) for row in rows])
    torch.testing.assert_close(every.mean(0), objective.gradient(rows, x), rtol=1e-10, atol=1e-12)
    far = 0.7 * side * anchor
    along = torch.stack([reduced_gradient(objective, row[None], far, anchor, whole) for row in rows])
    expected = objective.gradient(rows, far).expand_as(along)
    torch.testing.assert_close(along, expected, rtol=1e-10, atol=1e-12)


def gradients(line, n, batch, m):
    """Gradients of one row taken until an epoch ended, in units of n: a batch takes two of each of its rows."""
    return 1 + line * (1 + 2 * (m - 1) * batch / n)


def test_t12_mixture_to_1e9_in_40_passes():
    L = mixture(20000, apart=1.4)
    best = em(L, 4000)
    top = likelihood(L, best)
    estimator = StochasticSCIPI("mixture", tol=1e-7, random_state=0).fit(L)
    close = next(i for i, line in enumerate(estimator.history_) if top - line.value <= 1e-9 * abs(top))
    assert gradients(close, 20000, 200, 25) <= 40
    np.testing.assert_allclose(estimator.proportions_, best, atol=1e-5)
    assert estimator.proportions_.sum() == pytest.approx(1, abs=1e-12)
    assert estimator.values_[0] == pytest.approx(top, rel=1e-12)


def test_components_without_data_get_no_proportion():
    weights = np.array([0.3, 0.0, 0.2, 0.0, 0.0, 0.5])
    L = mixture(5000, 1, weights, apart=3.0, K=6)
    estimator = StochasticSCIPI("mixture", random_state=0).fit(L)
    best = em(L, 5000)
    np.testing.assert_allclose(estimator.proportions_, best, atol=1e-4)
    assert (estimator.proportions_ >= 0).all()
    assert likelihood(L, estimator.proportions_) >= likelihood(L, best) - 1e-9
    shares = estimator.transform(L)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(shares.mean(0), estimator.proportions_, atol=1e-5)
    direct = L * estimator.proportions_
    np.testing.assert_allclose(shares, direct / direct.sum(1, keepdims=True), atol=1e-15)
    assert len(estimator.get_feature_names_out()) == 6


def test_negative_entries_of_a_step_on_proportions_stay():
    x, after = torch.tensor([0.6, 0.8]), torch.tensor([-0.1, 0.9])
    assert MixtureLikelihood().admitted(x, after).tolist() == pytest.approx([0.6, 0.9])
    assert Quadratic().admitted(x, after) is after


@pytest.mark.parametrize("degree", [1, 1.5, 3, 4])
def test_the_end_is_a_local_maximum_of_the_p_norm(degree):
    X = peaks()

    def value(x):
        return (np.abs(X @ x.T) ** degree).mean(0) / degree

    estimator = StochasticSCIPI(degree=degree, random_state=0).fit(X)
    x = estimator.components_[0]
    assert value(x[None])[0] == pytest.approx(estimator.values_[0], rel=1e-12)
    source = np.random.default_rng(0)
    near = x + 0.02 * source.normal(size=(200, 8))
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    assert (value(near) <= estimator.values_[0] * (1 + 1e-12)).all()
    gradient = X.T @ (np.sign(X @ x) * np.abs(X @ x) ** (degree - 1)) / len(X)
    assert np.linalg.norm(gradient - (x @ gradient) * x) <= 1e-6 * (x @ gradient) * 1.01


def test_directions_are_orthogonal_and_best_in_their_complement():
    X = peaks()
    estimator = StochasticSCIPI(n_components=3, random_state=0).fit(X)
    V = estimator.components_
    np.testing.assert_allclose(V @ V.T, np.eye(3), atol=1e-12)
    rest = np.linalg.svd(V[:1])[2][1:]
    inside = StochasticSCIPI(random_state=0).fit(X @ rest.T)
    assert estimator.values_[1] == pytest.approx(inside.values_[0], rel=1e-9)
    np.testing.assert_allclose(estimator.transform(X), X @ V.T, atol=1e-12)


def cube(rows, x):
    products = rows @ x
    return rows.T @ (products * products.abs()) / len(rows)


def test_a_function_in_place_of_a_name():
    X = peaks()
    named = StochasticSCIPI(random_state=0).fit(X)
    own = StochasticSCIPI(cube, degree=3, random_state=0).fit(X)
    np.testing.assert_allclose(own.components_, named.components_, atol=1e-10)
    np.testing.assert_allclose(own.values_, named.values_, rtol=1e-12)


def test_a_function_of_degree_0_without_a_value():
    """Its value is not known, so nothing guards its epochs."""
    L = mixture(5000, apart=3.0, K=4)
    estimator = StochasticSCIPI(MixtureLikelihood().gradient, degree=0, random_state=0).fit(L)
    assert np.isnan(estimator.values_).all()
    np.testing.assert_allclose(estimator.components_[0] ** 2, em(L, 2000), atol=1e-4)
