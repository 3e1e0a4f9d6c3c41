"""L_p kernel components: the problem they solve, scikit-learn's KernelPCA at p = 2, sign updates at p = 1, kinds."""

import numpy as np
import pytest
from sklearn.decomposition import KernelPCA
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.preprocessing import KernelCenterer

from favor.decomposition import L1KernelPCA, LpKernelPCA

RBF = {"kernel": "rbf", "gamma": 0.05}


def data(n: int = 60, d: int = 5, seed: int = 0) -> np.ndarray:
    source = np.random.default_rng(seed)
    return source.standard_t(5, size=(n, d)) * np.linspace(3, 0.5, d) + 1


def cubic(x, y):
    return (x @ y.T / 10 + 1) ** 3


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("options", [{"kernel": "linear"}, RBF])
def test_p_2_is_kernel_pca(options, center):
    x, new = data(), data(9, seed=1)
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
    x = data()
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
    x = data()
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
    x = data(200, 6)
    x[0] = 60 * np.eye(6)[5] + 1
    pca = LpKernelPCA(p=200, random_state=1).fit(x)
    assert np.isfinite(pca.components_).all()
    row = x[pca.scores_[:, 0].argmax()] - pca.mean_
    assert row @ pca.components_[0] == pytest.approx(np.linalg.norm(row), rel=1e-3)
