"""KL-NMF: its steps by definition, sums, sweeps beside scikit-learn's MU, the guard, sparse data and zeros."""

import numpy as np
import pytest
import torch
from counts import by_definition, divergence, factors, mu, ours, planted, small, start
from scipy import sparse

from favor.decomposition import KLNMF
from favor.decomposition.kl_nmf import Target, half_step, sweep


def target_of(V: np.ndarray, kind: str) -> Target:
    return Target.of(sparse.csr_array(V) if kind == "sparse" else torch.tensor(V))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("shift", [0, 0.05, 1])
def test_a_half_step_is_its_definition(shift, kind):
    V, W, H = small(), *factors(small(), 4)
    target, left, right = target_of(V, kind), torch.tensor(W), torch.tensor(H)
    found = half_step(target, left, right, target.product(left, right), shift)
    np.testing.assert_allclose(found, by_definition(V, W, H, shift), rtol=1e-12)
    # The other half is the same of the transposes.
    across = target.t()
    found = half_step(across, right.t(), left.t(), target.flipped(target.product(left, right)), shift).t()
    np.testing.assert_allclose(found, by_definition(V.T, H.T, W.T, shift).T, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("shift", [0, 0.05, None])
def test_t7_sums_after_every_half_step(shift, kind):
    V, W, H = small(), *factors(small(), 4)
    target, W, H = target_of(V, kind), torch.tensor(W), torch.tensor(H)
    for _ in range(20):
        H = half_step(target, W, H, target.product(W, H), shift)
        np.testing.assert_allclose((W @ H).sum(0), V.sum(0), rtol=1e-12)
        assert float((W @ H).sum()) == pytest.approx(V.sum(), rel=1e-10)
        W = half_step(target.t(), H.t(), W.t(), target.flipped(target.product(W, H)), shift).t()
        np.testing.assert_allclose((W @ H).sum(1), V.sum(1), rtol=1e-12)
        assert float((W @ H).sum()) == pytest.approx(V.sum(), rel=1e-10)


def test_mu_is_that_of_scikit_learn():
    """Theirs makes W and then H of each sweep: the same of the transposes."""
    V = small()
    W, H = factors(V, 4)
    left, right = mu(V.T, 4, 25, H.T, W.T)
    target = Target.of(torch.tensor(V))
    state = torch.tensor(W), torch.tensor(H), target.product(torch.tensor(W), torch.tensor(H))
    for _ in range(25):
        state = sweep(target, *state, None)
    np.testing.assert_allclose(state[0], right.T, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(state[1], left.T, rtol=1e-7, atol=1e-12)


def test_t7_half_the_sweeps_of_mu_on_planted_factors():
    V = planted()
    reached, reference, twice = [], [], []
    for seed in range(3):
        W, H = start(V, 10, seed)
        reached.append(divergence(V, *ours(V, 10, 50, W, H, shift=0)))
        reference.append(divergence(V, *mu(V, 10, 50, W, H)))
        twice.append(divergence(V, *mu(V, 10, 100, W, H)))
    assert np.mean(reached) <= 0.93 * np.mean(reference)
    assert np.mean(reached) <= 1.01 * np.mean(twice)


@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csc_array, sparse.coo_array])
def test_sparse_is_dense(make):
    V = small(mean=0.3)
    assert (V == 0).mean() > 0.3
    one, two = KLNMF(4, tol=0, max_iter=40, random_state=0), KLNMF(4, tol=0, max_iter=40, random_state=0)
    dense, thin = one.fit_transform(V), two.fit_transform(make(V))
    assert isinstance(thin, np.ndarray)
    np.testing.assert_allclose(thin, dense, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(two.components_, one.components_, rtol=1e-8, atol=1e-12)
    assert two.reconstruction_err_ == pytest.approx(one.reconstruction_err_, rel=1e-10)
    new = small(mean=0.3, seed=1)
    np.testing.assert_allclose(two.transform(make(new)), one.transform(new), rtol=1e-7, atol=1e-12)


def test_sparse_matrices_in_many_blocks(monkeypatch):
    V = small(mean=0.3)
    expected = KLNMF(4, tol=0, max_iter=10, random_state=0).fit_transform(sparse.csr_array(V))
    monkeypatch.setattr("favor.decomposition.kl_nmf._BLOCK", 30)
    found = KLNMF(4, tol=0, max_iter=10, random_state=0).fit_transform(sparse.csr_array(V))
    np.testing.assert_array_equal(found, expected)


def test_duplicates_and_stored_zeros_of_sparse_matrices():
    V = small(mean=0.3)
    coo = sparse.coo_array(V)
    twice = sparse.csr_array(
        (np.repeat(coo.data, 2) / 2, np.repeat(coo.col, 2), 2 * sparse.csr_array(V).indptr), shape=V.shape
    )
    twice.data[:2] = twice.data[0] * np.array([2, 0])
    kept = twice.copy()
    one, two = (KLNMF(4, tol=0, max_iter=20, random_state=0) for _ in range(2))
    np.testing.assert_allclose(two.fit_transform(twice), one.fit_transform(V), rtol=1e-9)
    assert two.reconstruction_err_ == pytest.approx(one.reconstruction_err_, rel=1e-10)
    np.testing.assert_array_equal(twice.data, kept.data)


def extreme(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    n, m, k = source.integers(2, 6), source.integers(2, 6), source.integers(2, 4)
    V = source.gamma(0.1, size=(n, m)) * 100 + 1e-3
    return V, source.uniform(size=(n, k)) ** 8 + 1e-12, source.uniform(size=(k, m)) ** 8 + 1e-12


def test_the_guard_keeps_the_objective_from_rising():
    """Extreme data and starts, looked at every 9 sweeps: without the guard it rises in some, guarded in none."""
    rises = {True: 0.0, False: 0.0}
    for seed in range(1045, 1065):
        V, W, H = extreme(seed)
        for guard in rises:
            options = {"shift": 0, "guard": guard}
            values = [divergence(V, *ours(V, W.shape[1], 9 * j, W, H, **options)) for j in range(1, 6)]
            rises[guard] = max(rises[guard], np.diff(values).max() / V.sum())
    assert rises[False] > 1e-5
    assert rises[True] <= 1e-13


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_of_the_data_do_not_matter(scale, dtype):
    V = torch.tensor(small()).to(dtype)
    options = {"random_state": 0, "tol": 0, "max_iter": 20}
    one, two = KLNMF(4, **options), KLNMF(4, **options)
    first, second = one.fit_transform(V), two.fit_transform(scale * V)
    accuracy = 1e-9 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(second @ two.components_ / scale, first @ one.components_, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(
        two.transform(scale * V[:3]) @ two.components_ / scale,
        one.transform(V[:3]) @ one.components_,
        rtol=accuracy,
        atol=accuracy,
    )


@pytest.mark.parametrize("factor", [1e-20, 1e20])
def test_a_common_factor_of_the_start_does_not_count(factor):
    V = small()
    W, H = factors(V, 4)
    left, right = ours(V, 4, 20, W, H)
    one, two = ours(V, 4, 20, factor * W, factor * H)
    np.testing.assert_allclose(one @ two, left @ right, rtol=1e-9)
    # Nor does it end the iteration early.
    counts = [KLNMF(4, init="custom", max_iter=2000).fit(V, W=c * W, H=H).n_iter_ for c in (1, factor)]
    assert counts[0] == counts[1] > 20


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array, torch.tensor])
@pytest.mark.parametrize("init", ["random", "custom"])
def test_empty_rows_and_columns(kind, init):
    V = small()
    V[3], V[:, 5] = 0, 0
    W, H = factors(V, 4)
    given = {"W": W, "H": H} if init == "custom" else {}
    model = KLNMF(4, init=init, random_state=0, tol=0, max_iter=100)
    left, right = (np.asarray(part) for part in (model.fit_transform(kind(V), **given), model.components_))
    assert (left[3] == 0).all()
    assert (right[:, 5] == 0).all()
    assert np.isfinite(left).all()
    assert np.isfinite(model.reconstruction_err_)
    np.testing.assert_array_equal(np.asarray(model.transform(kind(np.zeros((2, 20))))), 0)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_the_other_rows_and_columns_beside_empty_ones(kind):
    """One sweep, by definition."""
    V = small()
    V[3], V[:, 5] = 0, 0
    W, H = factors(V, 4)
    left, right = ours(kind(V), 4, 1, W, H)
    rows, columns = np.arange(30) != 3, np.arange(20) != 5
    expected = by_definition(V[:, columns], W, H[:, columns], 0.05)
    np.testing.assert_allclose(right[:, columns], expected, rtol=1e-11)
    expected = by_definition(V[rows][:, columns].T, expected.T, W[rows].T, 0.05).T
    np.testing.assert_allclose(left[rows], expected, rtol=1e-11)


def test_nothing_but_zeros():
    for kind in (np.asarray, sparse.csr_array, torch.tensor):
        model = KLNMF(2, random_state=0).fit(kind(np.zeros((4, 3))))
        assert model.reconstruction_err_ == 0
        np.testing.assert_array_equal(np.asarray(model.components_), 0)
        np.testing.assert_array_equal(np.asarray(model.transform(kind(np.ones((2, 3))))), 0)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_zeros_of_a_start_stay(kind):
    """Also where data cannot be reached for them; the rest is fitted as if these were not there."""
    V = small()
    W, H = factors(V, 2)
    W[:10, 1] = 0
    H[0, 15:] = 0
    V[20:, 15:] += 1
    W[25, 1] = 0
    model = KLNMF(2, init="custom", tol=0, max_iter=300)
    left = model.fit_transform(kind(V), W=W, H=H)
    np.testing.assert_array_equal(left[:10, 1], 0)
    np.testing.assert_array_equal(model.components_[0, 15:], 0)
    reachable = (W > 0).astype(float) @ (H > 0) > 0
    assert V[~reachable].sum() > 0
    one, two = ours(V * reachable, 2, 300, W, H)
    np.testing.assert_allclose(left @ model.components_, one @ two, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose((one @ two).sum(1), (V * reachable).sum(1), rtol=1e-10)
    # MU agrees on the optimum of what can be reached.
    a, b = mu(V * reachable, 2, 3000, W, H)
    assert divergence(V * reachable, one, two) == pytest.approx(divergence(V * reachable, a, b), rel=1e-4)
