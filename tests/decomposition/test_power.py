"""Scale-invariant power iteration: rates against Hessians, blocks and free blocks."""

import numpy as np
import pytest
import torch

from favor.decomposition import block_power, scale_invariant_power

SIZE = 8


def rows(n: int = 300) -> torch.Tensor:
    """Data with heavy tails and unequal spread."""
    source = np.random.default_rng(0)
    mixing = np.eye(SIZE) * np.linspace(1.2, 0.8, SIZE) + source.normal(size=(SIZE, SIZE)) / 8
    return torch.tensor(source.standard_t(6, size=(n, SIZE)) @ mixing)


def lp_problem(p: float):
    """Value, gradient and Hessian of the mean of |a'x|^p."""
    data = rows()

    def value(x):
        return (data @ x).abs().pow(p).mean()

    def gradient(x):
        t = data @ x
        return p * data.T @ (t.sign() * t.abs() ** (p - 1)) / len(data)

    def hessian(x):
        return p * (p - 1) * data.T @ (data * (data @ x).abs().pow(p - 2).unsqueeze(1)) / len(data)

    return value, gradient, hessian


def start(seed: int = 0, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sine(x: torch.Tensor, target: torch.Tensor) -> float:
    """Of the angle between two lines, with all digits of small ones."""
    return float((x - target * (x @ target)).norm())


def complement(x: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of what is orthogonal to x, as columns."""
    return torch.linalg.qr(torch.column_stack((x, torch.eye(len(x), dtype=x.dtype))))[0][:, 1 : len(x)]


def contraction(step, here, distance, sweeps: int) -> float:
    """Mean factor by which steps shorten the distance, after those that still turn."""
    lengths = []
    for _ in range(sweeps):
        here = step(here)
        lengths.append(distance(here))
    late = [length for length in lengths[sweeps // 2 :] if length > 1e-11]
    assert len(late) > 8
    return (late[-1] / late[0]) ** (1 / (len(late) - 1))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("p", [1.5, 3.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_t5_lp_dispersion_never_falls_and_ends_in_a_stationary_point(p, seed):
    value, gradient, _ = lp_problem(p)
    x, values = start(seed), []
    x = x / x.norm()
    for _ in range(60):
        values.append(float(value(x)))
        x = scale_invariant_power(gradient, x, tol=0, max_iter=1).x
    assert (np.diff(values) >= -1e-13 * values[-1]).all()
    assert values[-1] > 1.01 * values[0]
    found = scale_invariant_power(gradient, start(seed), tol=1e-24, max_iter=5000)
    assert found.converged
    assert float((gradient(found.x) - found.multiplier * found.x).norm()) <= 1e-8
    assert found.multiplier == pytest.approx(p * float(value(found.x)), rel=1e-12)


@pytest.mark.parametrize("p", [3.0, 4.0])
@pytest.mark.parametrize("shift", [0.0, -0.3, 0.5])
def test_t5_rate_is_the_one_of_the_hessian(p, shift):
    _, gradient, hessian = lp_problem(p)
    target = scale_invariant_power(gradient, start(), tol=1e-30, max_iter=10000)
    others = complement(target.x)
    eigenvalues, vectors = torch.linalg.eigh(others.T @ hessian(target.x) @ others / target.multiplier)
    expected, slowest = ((eigenvalues + shift).abs() / (1 + shift)).max(0)
    expected = float(expected)
    assert 0.3 < expected < 0.97

    def step(x):
        return scale_invariant_power(gradient, x, shift=shift, tol=0, max_iter=1).x

    near = target.x + 1e-3 * others @ vectors[:, slowest]
    sweeps = int(np.log(1e-7) / np.log(expected))
    assert contraction(step, near, lambda x: sine(x, target.x), sweeps) == pytest.approx(expected, rel=0.01)


def test_huge_and_tiny_gradients_keep_their_direction():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    expected = scale_invariant_power(lambda x: matrix @ x, torch.ones(2, dtype=torch.float64), shift=0.1).x
    for size in (1e200, 1e-200):
        big = scale_invariant_power(lambda x, s=size: s * (matrix @ x), size * torch.ones(2).double(), shift=0.1)
        torch.testing.assert_close(big.x, expected, rtol=1e-14, atol=0)


def test_blocks_of_a_bilinear_function_find_singular_vectors():
    matrix = rows(11)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    gradients, starts = [lambda x, y: matrix @ y, lambda x, y: matrix.T @ x], [start(1, 11), start(2)]
    found = block_power(gradients, starts, tol=1e-28, max_iter=5000)
    assert found.converged
    assert found.multipliers == pytest.approx((float(values[0]),) * 2, rel=1e-12)
    assert sine(found.blocks[0], u[:, 0]) < 1e-10
    assert sine(found.blocks[1], v[0]) < 1e-10
    array = matrix.numpy()
    arrays = block_power([lambda x, y: array @ y, lambda x, y: array.T @ x], [start.numpy() for start in starts])
    assert all(isinstance(block, np.ndarray) for block in arrays.blocks)


def test_burer_monteiro_rows_as_blocks_reach_the_bound_of_the_relaxation():
    """max <C, S S'> over unit rows of S, each of them a block."""
    entries, n = np.random.default_rng(3).normal(size=(40, 40)), 40
    matrix = torch.tensor(np.triu(entries, 1) + np.triu(entries, 1).T)
    gradients = [lambda *s, i=i: 2 * matrix[i] @ torch.stack(s) for i in range(n)]
    rows = torch.randn(n, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = block_power(gradients, tuple(rows), tol=1e-13, max_iter=3000)
    s, multipliers = torch.stack(found.blocks), torch.tensor(found.multipliers, dtype=torch.float64) / 2
    torch.testing.assert_close(s.norm(dim=1), torch.ones(n, dtype=torch.float64))
    # S is optimal for the semidefinite relaxation, and so the best of any rank, if diag(multipliers) - C >= 0.
    assert float(torch.linalg.eigvalsh(multipliers.diag() - matrix)[0]) > -1e-4
    assert float((matrix * (s @ s.T)).sum()) == pytest.approx(float(multipliers.sum()), rel=1e-9)


def coupled_problem():
    """f = x'(A + sum_j y_j B_j)x / 2 - (y - y0)'D(y - y0) / 2: degree 2 in x up to a constant, concave in y."""
    source = np.random.default_rng(5)
    basis = np.linalg.qr(source.normal(size=(6, 6)))[0]
    a = torch.tensor(basis * np.array([4.0, 3.0, 2.2, 1.5, 0.7, 0.3]) @ basis.T)
    b = source.normal(size=(3, 6, 6)) / 4
    b = torch.tensor(b + b.transpose(0, 2, 1)) / 2
    d, y0 = torch.tensor([1.0, 1.7, 2.5]).double(), torch.tensor([0.3, -0.2, 0.4]).double()

    def by_x(x, y):
        return (a + (y[:, None, None] * b).sum(0)) @ x

    def by_y(x, y):
        return torch.einsum("i,kij,j->k", x, b, x) / 2 - d * (y - y0)

    return a, b, d, by_x, by_y


def test_partially_scale_invariant_rate_on_a_quadratic_problem():
    """A sweep with a free block contracts as its linearisation says."""
    a, b, d, by_x, by_y = coupled_problem()
    step = 2 / float(d.min() + d.max())
    starts = [start(1, 6), torch.zeros(3).double()]
    found = block_power([by_x, by_y], starts, steps=[None, step], tol=1e-31, max_iter=5000)
    x, y = found.blocks
    assert found.converged
    assert found.multipliers[1] is None
    assert float(by_y(x, y).norm()) < 1e-13
    others, multiplier = complement(x), found.multipliers[0]
    inner = others.T @ (a + (y[:, None, None] * b).sum(0)) @ others
    cross = others.T @ torch.einsum("kij,j->ik", b, x)
    # x moves by the tangent part over the multiplier; y then sees the new x.
    of_x = torch.cat((inner, cross), 1) / multiplier
    of_y = torch.cat((torch.zeros(3, 5).double(), torch.eye(3) - step * d.diag()), 1) + step * cross.T @ of_x
    expected = float(torch.linalg.eigvals(torch.cat((of_x, of_y))).abs().max())

    def distance(pair):
        return float(np.hypot(sine(pair[0], x), float((pair[1] - y).norm())))

    def sweep(pair):
        return block_power([by_x, by_y], pair, steps=[None, step], tol=0, max_iter=1).blocks

    near = (x + 1e-3 * start(2, 6), y + 1e-3 * start(3, 3))
    sweeps = int(np.log(1e-7) / np.log(expected))
    assert contraction(sweep, near, distance, sweeps) == pytest.approx(expected, rel=0.01)


def test_a_free_block_may_start_and_stay_at_zero():
    found = block_power([lambda x, y: x, lambda x, y: -y], [start(), torch.zeros(3).double()], steps=[None, 1.0])
    assert found.converged
    assert not found.blocks[1].any()
