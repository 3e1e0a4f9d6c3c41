"""KL-NMF as an estimator: scikit-learn's checks, transform, kinds, when it stops and what it refuses."""

import numpy as np
import pytest
import torch
from counts import divergence, factors, ours, planted, small, start
from scipy import sparse
from sklearn.decomposition import NMF
from sklearn.exceptions import NotFittedError

from favor.decomposition import KLNMF, mixture_proportions


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
