"""KL-NMF: its steps by definition, sums, sweeps beside scikit-learn's MU, the guard, sparse data and zeros."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.decomposition import NMF

from favor.decomposition import KLNMF, mixture_proportions
from favor.decomposition.kl_nmf import Target, sweep


def divergence(V: np.ndarray, W: np.ndarray, H: np.ndarray) -> float:
    product = np.maximum(W @ H, 1e-300)
    logs = np.log(np.where(V > 0, V, 1) / product)
    return float((V * logs - V + product).sum())


def planted() -> np.ndarray:
    source = np.random.default_rng(0)
    return source.poisson(source.gamma(1, 1, (300, 10)) @ source.gamma(1, 1, (10, 200))).astype(float)


def small(n: int = 30, m: int = 20, seed: int = 0, mean: float = 1.0) -> np.ndarray:
    """Counts, none of whose rows and columns is empty."""
    source = np.random.default_rng(seed)
    V = source.poisson(mean * source.gamma(0.5, 2, (n, 3)) @ source.dirichlet(np.ones(m), 3) * m / 2).astype(float)
    V[:, 0] += 1
    V[0] += 1
    return V


def factors(V: np.ndarray, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.uniform(0.01, 1, (V.shape[0], k)), source.uniform(0.01, 1, (k, V.shape[1]))


def start(V: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors and one sweep of MU, W first as in scikit-learn."""
    W, H = factors(V, k, seed)
    W = W * (V / (W @ H) @ H.T) / H.sum(1)
    return W, H * (W.T @ (V / (W @ H))) / W.sum(0)[:, None]


def by_definition(V: np.ndarray, W: np.ndarray, H: np.ndarray, shift: float | None) -> np.ndarray:
    """Mixture proportions of every column: X <- X (shift + G)^2, both times divided by its sums; MU without shift."""
    c, v = W.sum(0), V.sum(0)
    if shift is None:
        return H * (W.T @ (V / (W @ H))) / c[:, None]
    L, X = W / c, H * c[:, None]
    X = X / X.sum(0)
    X = X * (shift + L.T @ (V / (L @ X)) / v) ** 2
    return X / X.sum(0) * v / c[:, None]


def mu(V, k, sweeps, W, H):
    model = NMF(k, init="custom", solver="mu", beta_loss="kullback-leibler", max_iter=sweeps, tol=0)
    W = model.fit_transform(V, W=W.copy(), H=H.copy())
    return W, model.components_


def ours(V, k, sweeps, W, H, **options):
    model = KLNMF(k, init="custom", max_iter=sweeps, tol=0, **options)
    return model.fit_transform(V, W=W, H=H), model.components_


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


def doubled(V: np.ndarray) -> sparse.csr_array:
    """Every entry stored as two, one of them 0 in one place."""
    coo = sparse.coo_array(V)
    twice = np.repeat(coo.data, 2) / 2, np.repeat(coo.col, 2), 2 * sparse.csr_array(V).indptr
    twice[0][:2] = twice[0][0] * np.array([2, 0])
    return sparse.csr_array(twice, shape=V.shape)


@pytest.mark.parametrize("block", [1 << 18, 30])
@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csc_array, sparse.coo_array, doubled])
def test_sparse_is_dense(make, block, monkeypatch):
    monkeypatch.setattr("favor.decomposition.kl_nmf._BLOCK", block)
    V, new = small(mean=0.3), small(mean=0.3, seed=1)
    assert (V == 0).mean() > 0.3
    one, two = (KLNMF(4, tol=0, max_iter=40, random_state=0) for _ in range(2))
    given = make(V)
    dense, thin = one.fit_transform(V), two.fit_transform(given)
    assert isinstance(thin, np.ndarray)
    np.testing.assert_allclose(thin, dense, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(two.components_, one.components_, rtol=1e-8, atol=1e-12)
    assert two.reconstruction_err_ == pytest.approx(one.reconstruction_err_, rel=1e-10)
    np.testing.assert_allclose(two.transform(make(new)), one.transform(new), rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(given.data, make(V).data)


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
    one, two = (KLNMF(4, random_state=0, tol=0, max_iter=20) for _ in range(2))
    fits = [one.fit_transform(V), two.fit_transform(scale * V)]
    accuracy = 1e-9 if dtype == torch.float64 else 2e-3
    for left, right in (fits, [one.transform(V[:3]), two.transform(scale * V[:3])]):
        expected, found = left @ one.components_, right @ two.components_ / scale
        torch.testing.assert_close(found, expected, rtol=accuracy, atol=accuracy)


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
def test_empty_rows_and_columns_and_nothing_but_zeros(kind):
    V = small()
    V[3], V[:, 5] = 0, 0
    model = KLNMF(4, random_state=0, tol=0, max_iter=100)
    assert np.isfinite(np.asarray(model.fit_transform(kind(V)))).all()
    assert np.isfinite(model.reconstruction_err_)
    np.testing.assert_array_equal(np.asarray(model.transform(kind(np.zeros((2, 20))))), 0)
    model.fit(kind(np.zeros((4, 4))))
    assert model.reconstruction_err_ == 0
    np.testing.assert_array_equal(np.asarray(model.components_), 0)
    np.testing.assert_array_equal(np.asarray(model.transform(kind(np.ones((2, 4))))), 0)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("shift", [0, 0.05, 1, None])
def test_three_sweeps_are_their_definition(shift, kind, empty):
    """Of H and then W, whatever rows and columns are empty."""
    V = small()
    if empty:
        V[3], V[:, 5] = 0, 0
    W, H = factors(V, 4)
    if shift is None:
        target = Target.of(kind(V) if kind is sparse.csr_array else torch.tensor(V))
        state = torch.tensor(W), torch.tensor(H), target.product(torch.tensor(W), torch.tensor(H))
        for _ in range(3):
            state = sweep(target, *state, None)
        left, right = (part.numpy() for part in state[:2])
    else:
        left, right = ours(kind(V), 4, 3, W, H, shift=shift, guard=False)
    rows, columns = V.any(1), V.any(0)
    assert not left[~rows].any()
    assert not right[:, ~columns].any()
    H = by_definition(V[:, columns], W, H[:, columns], shift)
    # The other half is the same of the transposes.
    V, W, H = V[rows][:, columns].T, H.T, W[rows].T
    for _ in range(5):
        V, W, H = V.T, by_definition(V, W, H, shift).T, W.T
    np.testing.assert_allclose(left[rows] @ right[:, columns], W @ H, rtol=1e-10)
    np.testing.assert_allclose(right[:, columns] / right.sum(1, keepdims=True), H / H.sum(1, keepdims=True), rtol=1e-10)


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


@pytest.mark.parametrize("shift", [0, 0.05])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_transform_is_the_optimum_of_every_row(shift, kind):
    V, new = small(60), small(9, seed=1)
    model = KLNMF(3, shift=shift, tol=0, max_iter=400, random_state=0).fit(V)
    H = model.components_
    found = model.transform(kind(new))
    rows = mixture_proportions(np.broadcast_to((H / H.sum(1, keepdims=True)).T, (9, 20, 3)), new, tol=1e-12)
    expected = rows.proportions * new.sum(1, keepdims=True) / H.sum(1)
    np.testing.assert_allclose(found, expected, atol=1e-6 * expected.max())
    one_by_one = np.vstack([model.transform(row[None]) for row in new[:4]])
    np.testing.assert_allclose(found[:4], one_by_one, atol=1e-6 * expected.max())
    # Where the plain iteration swings, components without overlap, rows are right at any tol and number of sweeps.
    H, W = np.kron(np.eye(3), [[1.0, 2.0]]), np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    model = KLNMF(3, shift=shift, guard=False, init="custom", max_iter=50).fit(H, W=np.eye(3), H=H)
    for options in ({}, {"max_iter": 7, "tol": 0}):
        np.testing.assert_allclose(model.set_params(**options).transform(W @ model.components_), W, atol=1e-12)


def test_inverse_transform_and_the_error_are_those_of_the_factors():
    V, model = small(80), KLNMF(3, random_state=0, max_iter=1000, tol=1e-6)
    W, H = model.fit_transform(V), model.components_
    assert model.reconstruction_err_ == pytest.approx(np.sqrt(2 * divergence(V, W, H)), rel=1e-10)
    np.testing.assert_allclose(model.inverse_transform(W), W @ H, rtol=1e-14)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array])
def test_features_that_no_component_has_do_not_count(kind):
    """Words of new texts that were in none of the old ones."""
    V = small()
    V[:, 5] = 0
    model = KLNMF(3, random_state=0, tol=0, max_iter=500).fit(V)
    new = small(8, seed=2)
    new[:, 5] = 7
    without = new * (np.arange(20) != 5)
    np.testing.assert_allclose(model.transform(kind(new)), model.transform(kind(without)), rtol=1e-9, atol=1e-12)
    assert (new > without).any()


def test_tol_is_that_of_the_error():
    V = planted()[:60, :40]
    W, H = start(V, 5, 0)
    at = {n: np.sqrt(2 * divergence(V, *ours(V, 5, n, W, H))) for n in range(9, 150, 9)}
    at[0] = np.sqrt(2 * divergence(V, W, H))
    model = KLNMF(5, init="custom", tol=1e-3, max_iter=2000).fit(V, W=W, H=H)
    stops = [n for n in sorted(at) if n and at[n - 9] - at[n] <= 1e-3 * at[0]]
    assert model.n_iter_ == stops[0]


def test_starts():
    V = small()
    one, other = (KLNMF(3, random_state=seed).fit(V) for seed in (0, 1))
    assert not np.allclose(one.components_, other.components_)
    W, H = factors(V, 3)
    kept = W.copy(), H.copy(), V.copy()
    KLNMF(3, init="custom", max_iter=30, tol=0).fit(torch.from_numpy(V), W=torch.from_numpy(W), H=torch.from_numpy(H))
    np.testing.assert_equal((W, H, V), kept)
    assert KLNMF(random_state=0).fit(V[:, :4]).components_.shape == (4, 4)
