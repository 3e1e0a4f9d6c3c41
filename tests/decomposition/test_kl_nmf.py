"""KL-NMF: its steps by definition, sums, sweeps beside scikit-learn's MU, the guard, sparse data and zeros."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.decomposition import NMF
from sklearn.exceptions import NotFittedError

from favor.decomposition import KLNMF, mixture_proportions
from favor.decomposition.kl_nmf import Target, half_step, sweep


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
    """Uniform factors and one sweep of MU."""
    source = np.random.default_rng(seed)
    W, H = source.uniform(size=(V.shape[0], k)), source.uniform(size=(k, V.shape[1]))
    W = W * (V / (W @ H) @ H.T) / H.sum(1)
    return W, H * (W.T @ (V / (W @ H))) / W.sum(0)[:, None]


def by_definition(V: np.ndarray, W: np.ndarray, H: np.ndarray, shift: float) -> np.ndarray:
    """Mixture proportions of every column: X <- X (shift + G)^2, both times divided by its sums."""
    c, v = W.sum(0), V.sum(0)
    L = W / c
    X = H * c[:, None]
    X = X / X.sum(0)
    G = L.T @ (V / (L @ X)) / v
    X = X * (shift + G) ** 2
    return X / X.sum(0) * v / c[:, None]


def mu(V, k, sweeps, W, H):
    model = NMF(k, init="custom", solver="mu", beta_loss="kullback-leibler", max_iter=sweeps, tol=0)
    W = model.fit_transform(V, W=W.copy(), H=H.copy())
    return W, model.components_


def ours(V, k, sweeps, W, H, **options):
    model = KLNMF(k, init="custom", max_iter=sweeps, tol=0, **options)
    return model.fit_transform(V, W=W, H=H), model.components_


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


def test_transform_of_disjoint_components_without_shift():
    """Where the plain iteration swings, at any tol and number of sweeps, the rows are right."""
    H = np.kron(np.eye(3), [[1.0, 2.0]])
    model = KLNMF(3, shift=0, guard=False, init="custom", max_iter=50, random_state=0)
    model.fit(np.eye(3) @ H, W=np.eye(3), H=H)
    W = np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    np.testing.assert_allclose(model.transform(W @ model.components_), W, atol=1e-12)
    np.testing.assert_allclose(model.set_params(max_iter=7, tol=0).transform(W @ model.components_), W, atol=1e-12)


def test_fit_transform_is_transform():
    V = small(80)
    model = KLNMF(3, random_state=0, max_iter=1000, tol=1e-6)
    W = model.fit_transform(V)
    np.testing.assert_allclose(model.transform(V), W, atol=1e-2 * W.max())
    assert divergence(V, model.transform(V), model.components_) == pytest.approx(
        divergence(V, W, model.components_), rel=1e-4
    )


def test_reconstruction_err_is_that_of_scikit_learn():
    V = small()
    model = KLNMF(4, random_state=0)
    W = model.fit_transform(V)
    assert model.reconstruction_err_ == pytest.approx(np.sqrt(2 * divergence(V, W, model.components_)), rel=1e-10)
    # Theirs, of the same factors, after one sweep that changes little as our factors are nearly a fixed point of it.
    model = KLNMF(4, tol=0, max_iter=5000, random_state=0)
    W = model.fit_transform(V)
    theirs = NMF(4, init="custom", solver="mu", beta_loss="kullback-leibler", max_iter=1, tol=0)
    theirs.fit_transform(V, W=W.copy(), H=model.components_.copy())
    assert model.reconstruction_err_ == pytest.approx(theirs.reconstruction_err_, rel=1e-7)


def test_inverse_transform():
    V = small()
    model = KLNMF(4, random_state=0)
    W = model.fit_transform(V)
    np.testing.assert_allclose(model.inverse_transform(W), W @ model.components_, rtol=1e-14)
    for wrong in (np.ones((2, 3)), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"X must be \[n, 4\].*got \[2, 3\]"):
            model.inverse_transform(wrong)


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
    model = KLNMF(5, random_state=0, max_iter=2000).fit(V)
    assert 9 < model.n_iter_ < 2000
    assert model.n_iter_ % 9 == 0
    W, H = start(V, 5, 0)
    at = {n: np.sqrt(2 * divergence(V, *ours(V, 5, n, W, H))) for n in range(9, 150, 9)}
    at[0] = np.sqrt(2 * divergence(V, W, H))
    model = KLNMF(5, init="custom", tol=1e-3, max_iter=2000).fit(V, W=W, H=H)
    stops = [n for n in sorted(at) if n and at[n - 9] - at[n] <= 1e-3 * at[0]]
    assert model.n_iter_ == stops[0]


def test_starts():
    V = small()
    one, two, three = (KLNMF(3, random_state=seed).fit(V) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.components_, two.components_)
    assert not np.allclose(one.components_, three.components_)
    W, H = factors(V, 3)
    kept = W.copy(), H.copy(), V.copy()
    KLNMF(3, init="custom", max_iter=30, tol=0).fit(torch.from_numpy(V), W=torch.from_numpy(W), H=torch.from_numpy(H))
    for part, before in zip((W, H, V), kept, strict=True):
        np.testing.assert_array_equal(part, before)
    assert KLNMF(random_state=0).fit(V[:, :4]).components_.shape == (4, 4)


@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array, torch.tensor])
def test_negative_data(kind):
    V = small()
    V[1, 2] = -1
    with pytest.raises(ValueError, match="Negative values in data passed to KLNMF"):
        KLNMF(2).fit(kind(V))
    model = KLNMF(2, random_state=0).fit(np.abs(V))
    with pytest.raises(ValueError, match="Negative values in data passed to KLNMF"):
        model.transform(kind(V))


def test_errors_of_data():
    V = small()
    W, H = factors(V, 3)
    with pytest.raises(TypeError, match=r"a dense tensor, an array or a SciPy sparse matrix, got a torch.sparse_coo"):
        KLNMF(2).fit(torch.tensor(V).to_sparse())
    with pytest.raises(ValueError, match="NaN"):
        KLNMF(2).fit(torch.full((4, 3), float("nan")))
    with pytest.raises(NotFittedError):
        KLNMF(2).transform(V)
    with pytest.raises(ValueError, match="20 features"):
        KLNMF(2, random_state=0).fit(V).transform(torch.tensor(V[:, :4]))
    with pytest.raises(ValueError, match='init must be "random" or "custom", got \'nndsvd\''):
        KLNMF(init="nndsvd").fit(V)
    with pytest.raises(ValueError, match='W and H are a start for init="custom"'):
        KLNMF(3).fit(V, W=W)
    with pytest.raises(ValueError, match=r'init="custom" needs H, of shape \[3, 20\]'):
        KLNMF(3, init="custom").fit(V, W=W)
    with pytest.raises(ValueError, match=r"W must be \[30, 3\], finite and nonnegative, got \[29, 3\]"):
        KLNMF(3, init="custom").fit(V, W=W[1:], H=H)
    with pytest.raises(ValueError, match=r"H must be \[3, 20\], finite and nonnegative"):
        KLNMF(3, init="custom").fit(V, W=W, H=-H)
