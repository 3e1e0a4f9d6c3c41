"""L1 and L_p kernel components against exhaustive search, identities, KernelPCA of scikit-learn; outlier scores."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.decomposition import KernelPCA
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from sklearn.preprocessing import KernelCenterer
from spectra import laplacian

from favor.decomposition import L1KernelPCA, LpKernelPCA, l1_kernel_pca


def data(n: int = 40, d: int = 5, seed: int = 0) -> np.ndarray:
    """Rows with a few outliers, and means that are not zero."""
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, d)) * np.linspace(2, 0.5, d) + 1
    x[: n // 20] *= 6
    return x


def random_kernel(seed: int) -> np.ndarray:
    """Linear or centred Gaussian, of 20 to 100 rows."""
    source = np.random.default_rng(seed)
    x = data(int(source.integers(20, 100)), int(source.integers(2, 20)), seed)
    if seed % 2:
        return KernelCenterer().fit_transform(rbf_kernel(x, gamma=1 / (2 * x.shape[1])))
    return x @ x.T


@pytest.mark.filterwarnings("ignore:component 0 still moved")
def test_t1_dispersion_never_falls_and_ends_where_signs_agree():
    for seed in range(100):
        kernel = random_kernel(seed)
        found = l1_kernel_pca(kernel, 1)
        values = []
        for steps in range(1, found.n_iter[0] + 1):
            c = l1_kernel_pca(kernel, 1, max_iter=steps).signs[0]
            values.append(c @ kernel @ c)
        c = found.signs[0]
        assert set(c) <= {-1.0, 1.0}
        assert found.n_iter[0] <= 100
        assert (np.diff(values) >= -1e-9 * values[-1]).all()
        assert (c * (kernel @ c) >= -1e-9 * values[-1]).all()
        # No row of the data is a better direction: the start was the best of them.
        best = (np.abs(kernel).sum(0) / np.sqrt(kernel.diagonal())).max()
        assert np.sqrt(values[0]) >= best * (1 - 1e-12)


def test_t1_ties_keep_observations():
    kernel = np.diag([2.0, 1.0, 1.0, 1.0])
    c = l1_kernel_pca(kernel, 1).signs[0]
    assert c @ kernel @ c == 5


@pytest.mark.parametrize("bit_flips", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 9])
def test_t2_deflation_uses_up_the_kernel(rank, bit_flips):
    source = np.random.default_rng(rank)
    x = source.normal(size=(50, rank)) @ source.normal(size=(rank, 20))
    kernel = x @ x.T
    scores, signs, alphas, n_iter = l1_kernel_pca(kernel, bit_flips=bit_flips)
    assert scores.shape == alphas.shape == (50, rank)
    assert signs.shape == (rank, 50)
    assert len(n_iter) == rank
    size = np.linalg.norm(kernel)
    assert np.linalg.norm(scores @ scores.T - kernel) <= 1e-9 * size
    np.testing.assert_allclose(alphas.T @ kernel @ alphas, np.eye(rank), atol=1e-9)
    np.testing.assert_allclose(scores, kernel @ alphas, atol=1e-9 * size**0.5)


def test_t3_against_all_signs_of_twelve_rows():
    """400 kernels in 2 to 4 dimensions, half of them centred: with more dimensions all get harder."""
    source = np.random.default_rng(0)
    every = np.array([(1.0, *signs) for signs in itertools.product([-1.0, 1.0], repeat=11)])
    ratios = {False: [], True: []}
    for number in range(400):
        x = source.normal(size=(12, 2 + number % 3))
        if number % 4 == 0:
            x[0] *= 5
        kernel = KernelCenterer().fit_transform(x @ x.T) if number % 2 else x @ x.T
        best = np.sqrt(((every @ kernel) * every).sum(1).max())
        for flips, found in ratios.items():
            found.append(np.abs(l1_kernel_pca(kernel, 1, bit_flips=flips).scores).sum() / best)
    plain, flipped = np.array(ratios[False]), np.array(ratios[True])
    assert max(plain.max(), flipped.max()) <= 1 + 1e-9
    assert plain.mean() >= 0.985
    assert (plain >= 1 - 1e-9).mean() >= 0.55
    assert (flipped >= 1 - 1e-9).mean() >= 0.85
    assert flipped.mean() > plain.mean()


def test_after_bit_flips_no_single_sign_gains():
    for seed in range(10):
        kernel = random_kernel(seed)
        c = l1_kernel_pca(kernel, 1, bit_flips=True).signs[0]
        assert (kernel.diagonal() - c * (kernel @ c)).max() <= 1e-9 * (c @ kernel @ c)


def test_results_do_not_depend_on_the_scale_of_the_kernel():
    kernel = random_kernel(3)
    found = l1_kernel_pca(kernel, bit_flips=True)
    np.testing.assert_array_equal(kernel, random_kernel(3))
    for size in (1e-30, 1e30):
        scaled = l1_kernel_pca(size * kernel, bit_flips=True)
        assert scaled.scores.shape == found.scores.shape
        np.testing.assert_array_equal(scaled.signs[:5], found.signs[:5])
    nothing = l1_kernel_pca(np.zeros((3, 3)))
    assert (nothing.scores.shape, nothing.signs.shape, nothing.n_iter) == ((3, 0), (0, 3), ())


KERNELS = {
    "linear": ({"kernel": "linear"}, lambda x, y: x @ y.T),
    "rbf": ({"kernel": "rbf", "gamma": 0.05}, lambda x, y: rbf_kernel(x, y, gamma=0.05)),
    "rbf by default": ({"kernel": "rbf"}, lambda x, y: rbf_kernel(x, y, gamma=0.2)),
    "a function": ({"kernel": laplacian}, lambda x, y: laplacian_kernel(x, y, gamma=0.25)),
}


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_scores_are_those_of_the_kernel_matrix(name, center):
    """Training rows and new ones, against the function on a matrix and scikit-learn's kernels and centring."""
    x, new = data(), data(7, seed=1)
    options, kernel = KERNELS[name]
    pca = L1KernelPCA(4, center=center, **options).fit(x)
    given = L1KernelPCA(4, kernel="precomputed", center=center).fit(kernel(x, x))
    training, later = kernel(x, x), kernel(new, x)
    np.testing.assert_allclose(given.transform(later), pca.transform(new), atol=1e-10)
    if center:
        centerer = KernelCenterer().fit(training)
        training, later = centerer.transform(training), centerer.transform(later)
    expected = l1_kernel_pca(training, 4)
    np.testing.assert_array_equal(pca.signs_, expected.signs)
    np.testing.assert_allclose(pca.scores_, expected.scores, atol=1e-10)
    np.testing.assert_allclose(pca.transform(x), pca.scores_, atol=1e-10)
    np.testing.assert_allclose(pca.transform(new), later @ expected.alphas, atol=1e-10)
    np.testing.assert_array_equal(pca.fit_transform(x), pca.scores_)
    assert pca.n_iter_ == max(expected.n_iter)


def test_a_large_mean_costs_no_digits():
    x = data()
    near, far = L1KernelPCA(3).fit_transform(x), L1KernelPCA(3).fit_transform(x + 1e7)
    np.testing.assert_allclose(far, near, atol=1e-6)


def test_t4_outlier_scores_are_those_of_the_main_components():
    x = data(200, 8)
    pca = L1KernelPCA(center=False).fit(x)
    held, chosen = pca.scores_.var(0), pca.outlier_components_
    assert held[chosen].sum() >= 0.8 * held.sum()
    assert held[chosen].sum() - held[chosen].min() < 0.8 * held.sum()
    np.testing.assert_allclose(pca.outlier_variances_, held[chosen])
    by_hand = ((pca.scores_ - pca.scores_.mean(0)) ** 2 / held)[:, chosen].sum(1)
    np.testing.assert_allclose(pca.outlier_score(x), by_hand, rtol=1e-9)


def test_components_without_variance_do_not_score_outliers():
    for rows in (np.ones((4, 2)), np.full((7, 3), 0.1), torch.full((7, 3), 0.1)):
        pca = L1KernelPCA(center=False).fit(rows)
        assert len(pca.outlier_components_) == 0
        assert pca.outlier_score(3 * rows).tolist() == [0] * len(rows)
    # All rows have the same score on the first component, up to rounding; the second one varies.
    rows = np.column_stack([np.full(20, 5.0), np.tile([-1.0, 1.0], 10)])
    pca = L1KernelPCA(center=False).fit(rows)
    np.testing.assert_allclose(pca.outlier_score(rows), 1, atol=1e-9)


RBF = {"kernel": "rbf", "gamma": 0.05}


def skewed(n: int = 60, d: int = 5, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng(seed)
    return source.standard_t(5, size=(n, d)) * np.linspace(3, 0.5, d) + 1


def cubic(x, y):
    return (x @ y.T / 10 + 1) ** 3


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("options", [{"kernel": "linear"}, RBF])
def test_p_2_is_kernel_pca(options, center):
    x, new = skewed(), skewed(9, seed=1)
    pca = LpKernelPCA(3, p=2, tol=1e-26, max_iter=50000, center=center, random_state=0, **options).fit(x)
    if center:
        reference = KernelPCA(3, eigen_solver="dense", **options).fit(x)
        training, later = reference.transform(x), reference.transform(new)
    else:
        kernel = (lambda a, b: a @ b.T) if options["kernel"] == "linear" else lambda a, b: rbf_kernel(a, b, gamma=0.05)
        values, vectors = np.linalg.eigh(kernel(x, x))
        alphas = vectors[:, :-4:-1] / np.sqrt(values[:-4:-1])
        training, later = kernel(x, x) @ alphas, kernel(new, x) @ alphas
    signs = np.sign((pca.scores_ * training).sum(0))
    np.testing.assert_allclose(pca.scores_, training * signs, atol=1e-8)
    np.testing.assert_allclose(pca.transform(new), later * signs, atol=1e-8)


@pytest.mark.parametrize("p", [1, 1.5, 3.0, 4.0])
@pytest.mark.parametrize("name", ["linear", "rbf", "function", "precomputed"])
def test_components_are_orthonormal_and_stationary(name, p):
    """Of mean |score|^p among directions orthogonal to the earlier ones, in the dual coordinates of the kernel."""
    x = skewed()
    kernel = {"rbf": rbf_kernel(x, gamma=0.05), "function": cubic(x, x)}.get(name, x @ x.T)
    options = {"rbf": RBF, "function": {"kernel": cubic}}.get(name, {"kernel": name})
    given = kernel if name == "precomputed" else x
    pca = LpKernelPCA(3, p=p, tol=1e-26, max_iter=20000, random_state=0, **options).fit(given)
    kernel, scores = KernelCenterer().fit_transform(kernel), pca.scores_
    np.testing.assert_allclose(pca.transform(given), scores, atol=1e-9)
    np.testing.assert_allclose(pca.fit_transform(given), scores, atol=1e-9)
    # Coordinates of the components, from their scores: K alpha = scores.
    alphas = np.linalg.pinv(kernel, rcond=1e-11, hermitian=True) @ scores
    np.testing.assert_allclose(alphas.T @ kernel @ alphas, np.eye(3), atol=1e-6)
    for j in range(3):
        slope = np.sign(scores[:, j]) * np.abs(scores[:, j]) ** (p - 1)
        # The gradient is K slope in dual coordinates; what of it is orthogonal to all components so far must vanish.
        inner = scores[:, : j + 1].T @ slope
        rest = slope - alphas[:, : j + 1] @ inner
        assert rest @ kernel @ rest <= 1e-12 * (slope @ kernel @ slope)
    assert scores[np.abs(scores).argmax(0), range(3)].min() > 0


def test_p_1_ends_where_sign_updates_end():
    """A fixed point of one is a fixed point of the other, and the best of several starts the same."""
    x = skewed()
    by_signs = np.abs(L1KernelPCA(1, bit_flips=True, **RBF).fit_transform(x)).sum()
    found = [LpKernelPCA(p=1, random_state=seed, **RBF).fit(x) for seed in range(20)]
    best = max(np.abs(pca.scores_).sum() for pca in found)
    assert best == pytest.approx(by_signs, rel=0.01)
    kernel = KernelCenterer().fit_transform(rbf_kernel(x, gamma=0.05))
    for pca in found:
        c = np.sign(pca.scores_[:, 0])
        np.testing.assert_array_equal(np.sign(kernel @ c), c)
        np.testing.assert_allclose(kernel @ c / np.sqrt(c @ kernel @ c), pca.scores_[:, 0], atol=1e-9)


def test_p_1_keeps_rows_whose_score_is_zero():
    """The start, the first row, is orthogonal to all others; they join in all the same."""
    pca = LpKernelPCA(p=1, kernel="precomputed", center=False, random_state=0).fit(np.diag([2.0, 1.0, 1.0, 1.0]))
    assert np.abs(pca.scores_).sum() == pytest.approx(5**0.5, rel=1e-12)


def test_a_large_power_seeks_the_largest_score():
    x = skewed(200, 6)
    x[0] = 60 * np.eye(6)[5] + 1
    pca = LpKernelPCA(p=200, random_state=1).fit(x)
    assert np.isfinite(pca.components_).all()
    row = x[pca.scores_[:, 0].argmax()] - pca.mean_
    assert row @ pca.components_[0] == pytest.approx(np.linalg.norm(row), rel=1e-3)
