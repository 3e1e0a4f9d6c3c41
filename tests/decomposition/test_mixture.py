"""Mixture proportions: the optimum, rates by theory, the guard, scales, batches, kinds of data, and refusals."""

import numpy as np
import pytest
import torch
from scipy import sparse, stats

from favor.decomposition import mixture_proportions

# The counterexample to monotonicity: from here one step without shift lowers the objective by 0.0127.
FALLING = np.array([[0.93, 0.01], [0.01, 0.99]]), np.array([5 / 17, 12 / 17]), np.array([0.0649, 0.9351])


def poisson_case() -> tuple[np.ndarray, np.ndarray]:
    """Components that hardly differ: slow for all methods."""
    source = np.random.default_rng(0)
    L = source.uniform(size=(500, 20))
    return L, source.poisson(20 * L @ source.dirichlet(np.ones(20))).astype(float)


def separated_case() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(3, 200)) + np.array([[-6], [0], [6]])
    return stats.norm.pdf(x.reshape(-1, 1), [-6, 0, 6], 1), np.ones(600)


def random_case(n: int = 60, k: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.gamma(0.5, size=(n, k)) + 1e-3, source.poisson(4.0, size=n).astype(float)


def gradient(L: np.ndarray, v: np.ndarray, pi: np.ndarray) -> np.ndarray:
    return L.T @ (v / (L @ pi)) / v.sum()


def objective(L: np.ndarray, v: np.ndarray, pi: np.ndarray) -> float:
    return float(v @ np.log(L @ pi) / v.sum())


def step_of(L, v, shift, **options):
    """The function that takes one step from proportions."""
    options = {"shift": shift, "tol": 0, "max_iter": 1, **options}
    return lambda pi: mixture_proportions(L, v, start=pi, **options).proportions


@pytest.mark.parametrize("case", [poisson_case, separated_case, random_case])
@pytest.mark.parametrize("shift", [0, 0.05, 0.25, 1])
def test_t6_conditions_of_optimality(case, shift):
    """Which are enough for the optimum, as the objective is concave."""
    L, v = case()
    result = mixture_proportions(L, v, shift=shift)
    assert result.converged
    pi, g = result.proportions, gradient(L, v, result.proportions)
    assert pi.min() >= 0
    assert pi.sum() == pytest.approx(1, abs=1e-14)
    assert g.max() - 1 <= 1e-8 + 1e-13
    assert np.abs(pi * (g - 1)).max() <= 1e-8 + 1e-13
    assert result.gap == pytest.approx(max(g.max() - 1, np.abs(pi * (g - 1)).max()), abs=1e-13)
    assert result.objective == pytest.approx(objective(L, v, pi), abs=1e-13)


@pytest.mark.parametrize("shift", [0, 0.05, 0.25, 1, 3])
def test_local_rates_equal_theory(shift):
    """max |1 - 2 w / (1 + shift)|, w the eigenvalues of the Hessian in scaled coordinates."""
    source = np.random.default_rng(3)
    L = source.gamma(1.0, size=(200, 4))
    v = source.poisson(100 * L @ np.array([0.4, 0.3, 0.2, 0.1])).astype(float)
    best = mixture_proportions(L, v, tol=1e-15, max_iter=20_000).proportions
    assert best.min() > 0.01  # all components are on the support
    root = np.sqrt(best)
    A = L.T @ (L * (v / (L @ best) ** 2)[:, None]) / v.sum()
    w = np.linalg.eigvalsh(root[:, None] * A * root)
    assert w[-1] == pytest.approx(1, abs=1e-10)
    w = w[:-1]
    expected = np.abs(1 - 2 * w / (1 + shift)).max()
    pi, errors = best + 1e-3 * np.array([1, -1, 0.5, -0.5]), []
    step = step_of(L, v, shift, guard=False)
    while not errors or errors[-1] > 1e-9:
        pi = step(pi)
        errors.append(np.linalg.norm(pi - best))
    assert (errors[-1] / errors[-6]) ** 0.2 == pytest.approx(expected, abs=1e-4)


def test_t6_the_guard_takes_the_step_of_em():
    L, v, start = FALLING
    fallen = objective(L, v, step_of(L, v, 0, guard=False)(start)) - objective(L, v, start)
    assert fallen == pytest.approx(-0.0127, abs=1e-4)
    np.testing.assert_allclose(step_of(L, v, 0)(start), start * gradient(L, v, start), rtol=1e-13)


@pytest.mark.parametrize("shift", [0, 0.25, 1])
def test_the_guard_is_monotone_on_extreme_problems(shift):
    """20,000 small problems at once, some of which fall without the guard."""
    source = torch.Generator().manual_seed(0)
    L = torch.rand(20_000, 4, 3, generator=source, dtype=torch.float64) ** 12
    v = torch.rand(20_000, 4, generator=source, dtype=torch.float64) ** 6
    start = torch.rand(20_000, 3, generator=source, dtype=torch.float64) ** 6

    def falls(guard):
        pi, worst, last = start, 0.0, None
        for _ in range(5):
            result = mixture_proportions(L, v, shift=shift, start=pi, guard=guard, tol=0, max_iter=1)
            pi, share = result.proportions, v / v.sum(-1, keepdim=True)
            value = (share * (L @ pi.unsqueeze(-1)).squeeze(-1).log()).sum(-1)
            torch.testing.assert_close(result.objective, value)
            worst = worst if last is None else max(worst, float((last - value).max()))
            last = value
        return worst

    assert falls(False) > 1e-4
    assert falls(True) <= 1e-13


def test_invariance_to_the_scale_of_rows_and_counts():
    L, v = random_case()
    scale = 10.0 ** np.random.default_rng(0).uniform(-250, 250, size=len(v))
    one, two = mixture_proportions(L, v), mixture_proportions(L * scale[:, None], 1e-3 * v)
    assert one.n_iter == two.n_iter
    np.testing.assert_allclose(two.proportions, one.proportions, rtol=1e-10)
    assert two.objective == pytest.approx(one.objective + v @ np.log(scale) / v.sum(), rel=1e-12)


def test_starts_of_zero_and_near_it():
    """What is zero is not part of the problem, what is near it comes back."""
    L, v = random_case()
    expected = mixture_proportions(L[:, [1, 2, 4]], v, start=[1.0, 2, 1])
    for given in (L, sparse.csr_array(L), L * np.array([1e200, 1, 1, 1e250, 1])):
        result = mixture_proportions(given, v, start=np.array([0, 1.0, 2, 0, 1]))
        assert result.converged
        np.testing.assert_allclose(result.proportions[[1, 2, 4]], expected.proportions, rtol=1e-9)
        np.testing.assert_array_equal(result.proportions[[0, 3]], 0)
    best, start = mixture_proportions(L, v).proportions, np.full(5, 1e-280)
    start[1] = 1
    np.testing.assert_allclose(mixture_proportions(L, v, start=start, shift=0).proportions, best, atol=1e-6)
    for guard in (True, False):
        start = torch.tensor([1e-30, 1, 1e-30, 1e-30, 1e-30])
        found = mixture_proportions(torch.tensor(L).float(), v, start=start, guard=guard)
        np.testing.assert_allclose(found.proportions, best, atol=1e-3)
        # Here g is 5e29, whose square float32 does not hold.
        found = mixture_proportions(torch.eye(2), start=torch.tensor([1, 1e-30]), guard=guard)
        np.testing.assert_allclose(found.proportions, [0.5, 0.5], atol=1e-4)


def test_batches_are_single_problems():
    cases = [random_case(seed=seed) for seed in range(6)]
    L, v = (np.stack(parts).reshape(2, 3, *parts[0].shape) for parts in zip(*cases, strict=True))
    result = mixture_proportions(L, v, tol=1e-11)
    assert result.proportions.shape == (2, 3, 5)
    assert result.objective.shape == result.gap.shape == (2, 3)
    singles = [mixture_proportions(*case, tol=1e-11) for case in cases]
    assert result.n_iter == max(single.n_iter for single in singles)
    for number, single in enumerate(singles):
        place = divmod(number, 3)
        np.testing.assert_allclose(result.proportions[place], single.proportions, atol=1e-8)
        assert result.objective[place] == pytest.approx(single.objective, abs=1.1e-11)
    # With as many iterations and no early end they are the same numbers; one vector of counts, and one start, for all.
    for counts, own, options in ((v, v[1, 2], {}), (v[0, 0], v[0, 0], {"start": [1, 2, 3, 4, 5.0]})):
        fixed = mixture_proportions(L, counts, tol=0, max_iter=7, **options)
        single = mixture_proportions(L[1, 2], own, tol=0, max_iter=7, **options)
        np.testing.assert_allclose(fixed.proportions[1, 2], single.proportions, rtol=1e-12)


def test_max_iter_ends_the_iteration():
    L, v = poisson_case()
    result = mixture_proportions(L, v, max_iter=3)
    assert result.n_iter == 3
    assert not result.converged
    assert result.gap > 1e-8
    step, pi = step_of(L, v, 0.05), np.full(20, 1 / 20)
    np.testing.assert_allclose(result.proportions, step(step(step(pi))), rtol=1e-12)
    again = mixture_proportions(L, v, max_iter=3, start=mixture_proportions(L, v).proportions)
    assert again.n_iter == 0
    assert again.converged


@pytest.mark.parametrize("make", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_is_dense(make):
    """Whose duplicates add up; rows without count need no likelihood."""
    source = np.random.default_rng(0)
    L = source.uniform(size=(300, 8)) * (source.uniform(size=(300, 8)) < 0.3)
    v = source.poisson(3.0, size=300).astype(float) * L.any(1)
    assert not L.any(1).all()
    dense, thin, short = (mixture_proportions(*case) for case in ((L, v), (make(L), v), (L[v > 0], v[v > 0])))
    assert dense.n_iter == thin.n_iter == short.n_iter
    for other in (thin, short):
        np.testing.assert_allclose(other.proportions, dense.proportions, rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose([other.objective, other.gap], [dense.objective, dense.gap], rtol=1e-10, atol=1e-14)
    tensors = mixture_proportions(torch.tensor(L).to_sparse(), v)
    assert isinstance(tensors.proportions, torch.Tensor)
    np.testing.assert_allclose(tensors.proportions, dense.proportions, rtol=1e-9, atol=1e-14)
    coo = sparse.coo_array(([0.5, 0.4, 0.1, 0.1, 0.9], ([0, 0, 0, 1, 1], [0, 0, 1, 0, 1])), shape=(2, 2))
    np.testing.assert_allclose(mixture_proportions(coo, [7, 3]).proportions, [0.75, 0.25], atol=1e-7)


def test_kinds():
    L, v = random_case()
    arrays = mixture_proportions(L, v)
    assert [type(part) for part in arrays] == [np.ndarray, np.float64, np.float64, int, bool]
    lists = mixture_proportions(L.tolist(), v.astype(int).tolist())
    np.testing.assert_array_equal(lists.proportions, arrays.proportions)
    tensors = mixture_proportions(torch.tensor(L, requires_grad=True), torch.tensor(v).int(), start=np.ones(5))
    assert isinstance(tensors.proportions, torch.Tensor)
    assert not tensors.proportions.requires_grad
    np.testing.assert_array_equal(tensors.proportions, arrays.proportions)
    # Arrays of float32 count as float64; half precision tensors, too.
    for given in (L, L.astype(np.float32), torch.tensor(L), torch.tensor(L).bfloat16()):
        assert str(mixture_proportions(given, v).proportions.dtype).endswith("float64")
    # The default tol is beyond float32 and counts as 32 epsilons of it, so that the iteration ends.
    single = mixture_proportions(torch.tensor(L).float(), torch.tensor(v))
    assert single.proportions.dtype == single.objective.dtype == single.gap.dtype == torch.float32
    assert single.converged
    assert single.gap <= 4e-6
    assert single.n_iter < arrays.n_iter
    np.testing.assert_allclose(single.proportions, arrays.proportions, atol=1e-4)
    # Nothing given is changed.
    given = [torch.tensor(L), torch.tensor(v), torch.ones(5).double(), sparse.csr_array(L)]
    mixture_proportions(given[0], given[1], start=given[2], max_iter=5)
    mixture_proportions(given[3], v, start=np.array([0, 1.0, 1, 1, 1]), max_iter=5)
    for part, before in zip((*given[:3], given[3].toarray()), (L, v, np.ones(5), L), strict=True):
        np.testing.assert_array_equal(part, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihoods": np.ones(4)}, r"likelihoods must be \[..., n, K\].*got \(4,\)"),
        ({"likelihoods": np.ones((4, 0))}, "n and K above 0"),
        ({"likelihoods": -np.ones((4, 3))}, "likelihoods must be finite and nonnegative"),
        ({"likelihoods": sparse.csr_array(-np.eye(4))}, "likelihoods must be finite and nonnegative"),
        ({"likelihoods": sparse.coo_array(np.ones(4))}, r"\[n, K\] if sparse"),
        ({"likelihoods": torch.ones(2, 4, 3).to_sparse()}, r"\[n, K\] if sparse"),
        ({"likelihoods": torch.ones(4, 3, dtype=torch.complex64)}, "likelihoods must be real numbers"),
        ({"likelihoods": [["a", "b"]]}, "likelihoods must be real numbers"),
        ({"counts": np.ones(5)}, r"counts must be \[4\], .*got \[5\]"),
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
