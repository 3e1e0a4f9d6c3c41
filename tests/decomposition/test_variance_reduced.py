"""VR Power and VR HB Power against the printed algorithms, exact eigenvectors and power iteration."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import StandardScaler
from spectra import GAP5, Lazy, epoch_of, error, printed_epoch, rows_with, tensor, unit

from favor.decomposition import StochasticSCIPI, VRHeavyBallPower, VRPower
from favor.decomposition.rows import batch_rows
from favor.decomposition.variance_reduced import second_eigenvalue

BOTH = (VRPower, VRHeavyBallPower)


def start_of(seed, d):
    """The vector that an estimator starts from."""
    generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(np.iinfo(np.int32).max)))
    return torch.randn(d, generator=generator, dtype=torch.float64).numpy()


def test_t9_all_rows_and_full_step_is_power_iteration():
    X, _ = rows_with(np.linspace(2, 0.1, 8), 300)
    x, C = start_of(0, 8), X.T @ X / len(X)
    for _ in range(7):
        x = unit(C @ x)
    estimator = VRPower(batch_size=1.0, epoch_length=7, max_epochs=1, random_state=0)
    with pytest.warns(ConvergenceWarning, match="component 0 did not reach tol=1e-06 in max_epochs=1"):
        estimator.fit(X)
    assert np.abs(estimator.components_[0] - x * np.sign(x[np.abs(x).argmax()])).max() < 1e-12
    assert estimator.passes_ == 8
    assert estimator.n_iter_ == 1


@pytest.mark.parametrize("beta", [None, 0.3])
@pytest.mark.parametrize("eta", [1.0, 0.2])
def test_t9_normalised_and_printed_paths_have_equal_directions(eta, beta):
    source = np.random.default_rng(0)
    X, anchor = source.normal(size=(500, 6)), source.normal(size=6)
    batches = list(source.integers(0, 500, (30, 20)))
    printed = printed_epoch(X, anchor, batches, eta, beta)[-1]
    found = epoch_of(X, anchor, batches, eta, beta)
    assert not 0.9 < np.linalg.norm(printed) < 1.1
    assert np.abs(found - unit(printed)).max() < 1e-12


HEAVY = [VRHeavyBallPower(eigenvalues=each, random_state=0) for each in ((1.0, 0.95), None)]


@pytest.mark.parametrize("estimator", [*(VRPower(random_state=seed) for seed in range(3)), *HEAVY], ids=str)
def test_t10_small_gap_in_few_passes(estimator):
    X, vectors = rows_with(GAP5, 20000)
    # A residual of 1e-4 gap means an error of 1e-8 at most.
    estimator.set_params(tol=1e-4 * 0.05).fit(X)
    assert estimator.passes_ <= (35 if estimator in HEAVY else 25)
    assert error(estimator.components_[0], vectors[:, 0]) <= 1e-8
    assert estimator.explained_variance_[0] == pytest.approx(1, abs=1e-8)


SCALED = [VRPower(), VRPower(eta=0.3), VRHeavyBallPower(), VRHeavyBallPower(beta=0.5, eta=0.2)]
SCALED += [StochasticSCIPI(eta=0.5), StochasticSCIPI("mixture", eta=0.5)]


@pytest.mark.parametrize("estimator", SCALED, ids=str)
def test_the_scale_of_the_data_does_not_matter(estimator):
    X, mixes = rows_with(np.r_[1.0, np.linspace(0.6, 0.1, 9)], 3000)[0], "mixture" in str(estimator)
    X, estimator = np.abs(X) + 0.1 if mixes else X, estimator.set_params(random_state=0)
    one = clone(estimator).fit(X)
    for scale in (1e-5, 1e4):
        other = clone(estimator).fit(scale * X)
        # Where nothing is left but rounding, values of the mixture shifted by log(scale) round differently.
        assert abs(other.n_iter_ - one.n_iter_) <= mixes
        np.testing.assert_allclose(other.components_, one.components_, rtol=1e-9, atol=1e-8 if mixes else 1e-9)
        if isinstance(estimator, VRPower):
            np.testing.assert_allclose(other.explained_variance_, scale**2 * one.explained_variance_, rtol=1e-9)


READERS = [
    *(kind(center=center) for kind in BOTH for center in (False, True)),
    *map(StochasticSCIPI, ["lp", "mixture"]),
]


@pytest.mark.parametrize("estimator", READERS, ids=str)
def test_a_file_is_read_by_rows_and_gives_the_same(estimator, tmp_path):
    X = np.abs(rows_with(np.r_[1.0, np.linspace(0.6, 0.1, 9)], 3000)[0] + 0.3)
    np.save(tmp_path / "rows.npy", X)
    file = np.load(tmp_path / "rows.npy", mmap_mode="r")
    whole, mapped, lazy = (clone(estimator).set_params(random_state=0).fit(rows) for rows in (X, file, Lazy(X)))
    for found in (mapped, lazy):
        np.testing.assert_array_equal(found.components_, whole.components_)
        for rows in (file, Lazy(X)):
            np.testing.assert_array_equal(found.transform(rows), whole.transform(X))
        assert found.passes_ == whole.passes_


def test_blocks_bound_what_is_read_at_once(monkeypatch):
    import favor.decomposition.rows as module

    X, _ = rows_with(np.r_[1.0, np.linspace(0.6, 0.1, 9)], 3000)
    whole = VRPower(random_state=0, tol=1e-8).fit(X)
    monkeypatch.setattr(module, "BLOCK", 10 * 128)
    lazy = Lazy(X, torch.from_numpy)
    parts = VRPower(random_state=0, tol=1e-8).fit(lazy)
    assert lazy.most == 128
    assert isinstance(parts.components_, torch.Tensor)
    assert isinstance(parts.transform(lazy), torch.Tensor)
    np.testing.assert_allclose(parts.components_.numpy(), whole.components_, atol=1e-9)
    assert parts.passes_ == pytest.approx(whole.passes_, rel=1e-12)


def test_rows_of_a_file_must_be_finite(tmp_path):
    X = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    X[400, 1] = np.nan
    np.save(tmp_path / "rows.npy", X)
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        VRPower().fit(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    with pytest.raises(ValueError, match="0 sample"):
        VRPower().fit(Lazy(X[:0]))
    with pytest.raises(ValueError, match="4 features, but VRPower is expecting 3"):
        VRPower(random_state=0).fit(X[:300]).transform(Lazy(np.ones((5, 4))))


def test_several_components_and_centring_are_those_of_pca():
    X = StandardScaler().fit_transform(load_breast_cancer().data) + 2
    pca = PCA(4).fit(X)
    estimator = VRPower(4, center=True, batch_size=0.2, tol=1e-7, random_state=0).fit(X)
    np.testing.assert_allclose(np.abs(estimator.components_ @ pca.components_.T), np.eye(4), atol=1e-5)
    n = len(X)
    np.testing.assert_allclose(estimator.explained_variance_, pca.explained_variance_ * (n - 1) / n, rtol=1e-9)
    np.testing.assert_allclose(estimator.mean_, X.mean(0))
    np.testing.assert_allclose(np.abs(estimator.transform(X)), np.abs(pca.transform(X)), atol=1e-3)
    assert [line.component for line in estimator.history_] == sorted(line.component for line in estimator.history_)
    plain = VRPower(random_state=0).fit(X)
    assert plain.explained_variance_[0] == pytest.approx(np.linalg.eigvalsh(X.T @ X / n)[-1], rel=1e-9)
    assert not plain.mean_.any()


def test_eigenvalues_of_several_components():
    values = np.r_[2.0, 1.5, 1.0, np.linspace(0.5, 0.1, 5)]
    X, vectors = rows_with(values, 2000)
    for given in (values[:4], tuple(values[:4]), None):
        estimator = VRHeavyBallPower(3, eigenvalues=given, random_state=0).fit(X)
        np.testing.assert_allclose(np.abs(estimator.components_ @ vectors[:, :3]), np.eye(3), atol=1e-4)
        np.testing.assert_allclose(estimator.explained_variance_, values[:3], rtol=1e-8)


@pytest.mark.parametrize("kind", BOTH)
def test_components_beyond_the_rank(kind):
    X = np.random.default_rng(0).normal(size=(300, 2)) @ np.random.default_rng(1).normal(size=(2, 5))
    estimator = kind(4, random_state=0).fit(X)
    assert (estimator.explained_variance_[2:] < 1e-12).all()
    np.testing.assert_allclose(estimator.components_ @ estimator.components_.T, np.eye(4), atol=1e-7)


def test_an_epoch_that_falls_is_undone_and_halves_the_step():
    X, vectors = rows_with(np.r_[1.0, np.linspace(0.5, 0.1, 9)], 2000)
    estimator = VRPower(batch_size=1, tol=1e-5, random_state=0).fit(X)
    steps = estimator.history_
    kept = [line.value for line in steps if line.accepted]
    assert (np.diff(kept) >= -1e-13).all()
    assert not all(line.accepted for line in steps)
    for line, after in pairwise(steps[1:]):
        assert after.eta == (line.eta if line.accepted else line.eta / 2)
    assert error(estimator.components_[0], vectors[:, 0]) < 1e-8


def test_passes_of_epochs():
    X, _ = rows_with(np.r_[1.0, np.linspace(0.5, 0.1, 9)], 20000)
    estimator = VRPower(batch_size=100, epoch_length=11, random_state=0).fit(X)
    passes = [line.passes for line in estimator.history_]
    np.testing.assert_allclose(np.diff(passes), 1 + 10 * 100 / 20000)
    assert passes[0] == 1
    assert passes[-1] == estimator.passes_
    assert len(passes) == estimator.n_iter_ + 1
    free = VRHeavyBallPower(random_state=0).fit(X)
    assert free.history_[0].passes == 6


def test_batches():
    given = ((0.01, 20000), (0.01, 2000), (0.01, 10), (7, 2000), (7, 3), (1.0, 300))
    assert [batch_rows(*each) for each in given] == [200, 64, 10, 7, 3, 300]


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
    top = np.eye(4)[0]
    assert second_eigenvalue(*(tensor(v) for v in (top, C @ top, top, C @ top))) is None
    # Of the higher of two points nothing tells that the other is above: the estimate stays below l1.
    low = np.eye(4)[3]
    found = second_eigenvalue(*(tensor(v) for v in (low, C @ low, top, C @ top)))
    assert found == pytest.approx(0.5 * (1 - 1e-6))
