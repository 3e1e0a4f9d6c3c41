"""Mixture proportions: sparse data, kinds of arrays and tensors, types, and what is refused."""

import numpy as np
import pytest
import torch
from scipy import sparse
from test_mixture import random_case

from favor.decomposition import mixture_proportions


@pytest.mark.parametrize("make", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_is_dense(make):
    source = np.random.default_rng(0)
    L = source.uniform(size=(300, 8)) * (source.uniform(size=(300, 8)) < 0.3)
    v = source.poisson(3.0, size=300).astype(float) * L.any(1)
    dense, thin = mixture_proportions(L, v), mixture_proportions(make(L), v)
    assert dense.n_iter == thin.n_iter
    np.testing.assert_allclose(thin.proportions, dense.proportions, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose([thin.objective, thin.gap], [dense.objective, dense.gap], rtol=1e-10, atol=1e-14)
    tensors = mixture_proportions(torch.tensor(L).to_sparse(), v)
    assert isinstance(tensors.proportions, torch.Tensor)
    np.testing.assert_allclose(tensors.proportions, dense.proportions, rtol=1e-9, atol=1e-14)


def test_duplicate_entries_of_sparse_matrices_add_up():
    coo = sparse.coo_array(([0.5, 0.4, 0.1, 0.1, 0.9], ([0, 0, 0, 1, 1], [0, 0, 1, 0, 1])), shape=(2, 2))
    np.testing.assert_allclose(mixture_proportions(coo, [7, 3]).proportions, [0.75, 0.25], atol=1e-7)


def test_kinds():
    L, v = random_case()
    arrays = mixture_proportions(L, v)
    assert isinstance(arrays.proportions, np.ndarray)
    assert arrays.proportions.dtype == np.float64
    assert isinstance(arrays.objective, np.float64)
    assert isinstance(arrays.gap, np.float64)
    assert type(arrays.n_iter) is int
    assert type(arrays.converged) is bool
    lists = mixture_proportions(L.tolist(), v.astype(int).tolist())
    np.testing.assert_array_equal(lists.proportions, arrays.proportions)
    tensors = mixture_proportions(torch.tensor(L, requires_grad=True), torch.tensor(v).int(), start=np.ones(5))
    assert isinstance(tensors.proportions, torch.Tensor)
    assert tensors.proportions.dtype == torch.float64
    assert not tensors.proportions.requires_grad
    np.testing.assert_array_equal(tensors.proportions, arrays.proportions)
    # Arrays of float32 count as float64; half precision tensors, too.
    assert mixture_proportions(L.astype(np.float32), v).proportions.dtype == np.float64
    assert mixture_proportions(torch.tensor(L).bfloat16(), v).proportions.dtype == torch.float64


def test_float32():
    """The default tol is beyond float32 and counts as 32 epsilons of it, so that the iteration ends."""
    L, v = random_case()
    exact = mixture_proportions(L, v)
    single = mixture_proportions(torch.tensor(L).float(), torch.tensor(v))
    assert single.proportions.dtype == single.objective.dtype == single.gap.dtype == torch.float32
    assert single.converged
    assert single.gap <= 4e-6
    assert single.n_iter < exact.n_iter
    np.testing.assert_allclose(single.proportions, exact.proportions, atol=1e-4)


def test_nothing_given_is_changed():
    L, v = random_case()
    start = np.ones(5)
    kept = [np.copy(part) for part in (L, v, start)]
    mixture_proportions(torch.from_numpy(L), torch.from_numpy(v), start=torch.from_numpy(start), max_iter=5)
    thin = sparse.csr_array(L)
    mixture_proportions(thin, v, start=np.array([0, 1.0, 1, 1, 1]), max_iter=5)
    for part, before in zip((L, v, start), kept, strict=True):
        np.testing.assert_array_equal(part, before)
    np.testing.assert_array_equal(thin.toarray(), L)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihoods": np.ones(4)}, r"likelihoods must be \[..., n, K\].*got \(4,\)"),
        ({"likelihoods": np.ones((4, 0))}, "n and K above 0"),
        ({"likelihoods": -np.ones((4, 3))}, "likelihoods must be finite and nonnegative"),
        ({"likelihoods": sparse.csr_array(-np.eye(4))}, "likelihoods must be finite and nonnegative"),
        ({"likelihoods": sparse.coo_array(np.ones(4))}, r"\[n, K\] if sparse"),
        ({"likelihoods": torch.ones(2, 4, 3).to_sparse()}, r"\[n, K\] if sparse"),
        ({"likelihoods": np.ones((4, 3), complex)}, "likelihoods must be real numbers"),
        ({"likelihoods": torch.ones(4, 3, dtype=torch.complex64)}, "likelihoods must be real numbers"),
        ({"likelihoods": [["a", "b"]]}, "likelihoods must be real numbers"),
        ({"counts": np.ones(5)}, r"counts must be \[4\], .*got \[5\]"),
        ({"counts": 1.0}, "counts must be"),
        ({"counts": np.ones((2, 4))}, "counts must be"),
        ({"counts": [1, 1, 1, -1]}, "counts must be .* nonnegative"),
        ({"counts": [1, 1, 1, np.inf]}, "counts must be .* finite"),
        ({"counts": np.zeros(4)}, "counts must be .* not all zero"),
        ({"start": np.ones(4)}, "start must be"),
        ({"likelihoods": np.diag([1.0, 1, 0, 0])}, "2 rows with a positive count have likelihood 0"),
        ({"likelihoods": sparse.csr_array(np.eye(4)), "start": [1, 0, 0, 1]}, "2 rows .* that start allows"),
    ],
)
def test_errors(options, message):
    given = {"likelihoods": np.ones((4, 3))} | options
    with pytest.raises(ValueError, match=message):
        mixture_proportions(**given)
