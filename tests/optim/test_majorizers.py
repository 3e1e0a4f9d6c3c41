"""Matrices above the curvature of a mini-batch, against that curvature written out."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from naive import as_array, curvature, randn
from pairwise import pairs

from favor.optim import BBM, majorizers
from favor.optim.majorizers import MAJORIZERS, Blocks, averaged, bohning, diagonal, exact, geometric, kfac, spectral

CERTIFIED = ["spectral", "block"]
EVERY = list(MAJORIZERS)


def even(x):
    """Weights 1/m."""
    return torch.full((len(x),), 1 / len(x), dtype=x.dtype)


def dense(k, n):
    """The whole matrix, `[n d, n d]`."""
    if isinstance(k, Blocks):
        return torch.block_diag(*k.blocks)
    labels = k.left.expand(n) if k.left.ndim == 0 else k.left
    return torch.kron(labels.diag() if labels.ndim == 1 else labels, k.inputs)


def batch_curvature(logits, x, weights=None, order="ascending"):
    """sum_j w_j B_j (x) x_j x_j', `[n d, n d]`, w_j = 1/m if not given."""
    w = as_array(even(x) if weights is None else weights)
    size = logits.shape[1] * x.shape[1]
    b = curvature(logits, order)
    return np.einsum("j,jab,jc,jd->acbd", w, b, as_array(x), as_array(x), optimize=True).reshape(size, size)


def case(number):
    """Logits `[m, n]`, inputs `[m, d]` and weights `[m]`: few and many labels, peaked and flat, hidden rows."""
    source = np.random.default_rng(number)
    m, n, d = int(source.integers(1, 12)), int(source.choice([2, 3, 5, 10])), int(source.integers(1, 5))
    logits = source.choice([0.0, 0.5, 3.0, 30.0]) * randn(m, n, seed=number)
    if number % 3 == 0:
        logits[:, int(source.integers(n))] += 10.0
    weights = randn(m, seed=number + 1).square()
    if number % 4 == 1 and m > 1:
        weights[0] = 0
    return logits, randn(m, d, seed=number + 2), weights


def smallest(matrix):
    return np.linalg.eigvalsh(matrix)[0]


@pytest.mark.parametrize("name", EVERY)
def test_above_the_curvature_and_finite(name):
    """On random batches, inputs of zero and labels that are hidden."""
    hidden = randn(4, 3)
    hidden[:, 0] = -torch.inf
    degenerate = [(own, x, even(x)) for own, x in ((hidden, randn(4, 2)), (randn(4, 3), 0 * randn(4, 2)))]
    for number, (logits, x, weights) in enumerate([*map(case, range(60)), *degenerate]):
        k, expected = MAJORIZERS[name](logits, x, weights), batch_curvature(logits, x, weights)
        assert k.solve(randn(logits.shape[1], x.shape[1]), 0.1).isfinite().all()
        gap = smallest(dense(k, logits.shape[1]).numpy() - expected)
        assert name not in CERTIFIED or gap >= -1e-10 * max(1.0, np.abs(expected).max()), number


@pytest.mark.parametrize(*pairs(name=EVERY, n=(1, 2, 7), damping=(1e-3, 1.0)))
def test_solve(name, n, damping):
    for d, spread in [(1, 1.0), (4, 1.0), (4, 20.0)]:
        x, gradient = randn(5, d), randn(n, d, seed=1)
        k = MAJORIZERS[name](spread * randn(5, n, seed=2), x, even(x))
        matrix = dense(k, n)
        system = matrix + damping * torch.eye(n * d, dtype=torch.float64)
        expected = torch.linalg.solve(system, gradient.flatten()).reshape(n, d)
        torch.testing.assert_close(k.solve(gradient, damping), expected, rtol=0, atol=1e-11 * expected.abs().max())
        torch.testing.assert_close(k.mean_eigenvalue(), matrix.diagonal().mean())
        degrees = torch.linalg.solve(system, matrix).trace().item() / n
        assert k.inverse(damping).degrees == pytest.approx(degrees, rel=1e-10, abs=1e-10)
        single = k.solve(gradient.float(), damping)
        assert single.dtype == torch.float32
        assert (single - expected).norm() <= 1e-3 * expected.norm()


def test_equals_its_formula():
    """What is not pinned down by being above the curvature: Bohning, the diagonal, K-FAC, and one block a label."""
    logits, x, weights = 3 * randn(6, 5), randn(6, 3, seed=1), randn(6, seed=2).square()
    w = weights.numpy()
    moment, b = (x.numpy().T * w) @ x.numpy(), curvature(logits, "ascending")
    share = np.einsum("j,jaa->a", w, b) / w.sum()
    p = np.exp(logits.numpy() - logits.numpy().max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    between = np.sqrt(2 * (w @ (p * (1 - p))) / w.sum() * 0.5)
    descending = np.einsum("j,jab->ab", w, curvature(logits, "descending")) / w.sum()
    blocks = np.einsum("j,ja,jc,jd->acd", w, np.abs(b).sum(-1), x, x)
    for found, expected in [
        (bohning(None, x, weights), np.kron(np.eye(5) / 2, moment)),
        (diagonal(logits, x, weights), np.kron(np.diag(2 * share), moment)),
        (kfac(logits, x, weights), np.kron(descending, moment)),
        (geometric(logits, x, weights), np.kron(np.diag(between), moment)),
    ]:
        np.testing.assert_allclose(dense(found, 5), expected, atol=1e-13)
    block = majorizers.block(logits, x, weights)
    np.testing.assert_allclose(block.blocks, blocks, atol=1e-13)
    # Two labels are exact.
    np.testing.assert_allclose(
        dense(spectral(logits[:, :2], x, weights), 2), batch_curvature(logits[:, :2], x, weights)
    )
    # Ascending order: row sums of absolute values are twice the diagonal.
    assert np.trace(dense(block, 5)) == pytest.approx(2 * np.trace(batch_curvature(logits, x, weights)))


@pytest.mark.parametrize("name", ["geometric", "diag", "kfac"])
@pytest.mark.parametrize("rows", [0, 4, 6])
def test_parts_of_a_batch_average_to_the_whole(name, rows, monkeypatch):
    """Two processes with parts of the rows, and one of them without any, against one process with all."""
    logits, x, w = randn(10, 5), randn(10, 3, seed=1), randn(10, seed=2).square()
    function = MAJORIZERS[name]
    monkeypatch.setattr(majorizers, "CHUNK", 15)
    parts = [function(logits[rows:], x[rows:], w[rows:]), function(logits[:rows], x[:rows], w[:rows])]
    sent = []
    averaged(parts[1], w[:rows].sum(), lambda value: sent.append(value.clone()) or value)
    found = averaged(parts[0], w[rows:].sum(), lambda value: (value + sent.pop(0)) / 2)
    expected = dense(function(logits, x, w / 2), 5)
    assert not sent
    torch.testing.assert_close(dense(found, 5), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(*pairs(order=("ascending", "descending", "none"), whole=(True, False)))
def test_exact(order, whole, monkeypatch):
    if not whole:
        monkeypatch.setattr(majorizers, "DENSE", 0)
    for n, d, spread in [(1, 2, 1.0), (2, 1, 3.0), (6, 4, 1.0), (6, 4, 20.0)]:
        logits, x, gradient = spread * randn(9, n), randn(9, d, seed=1), randn(n, d, seed=2)
        weights = randn(9, seed=3).square()
        sigma = batch_curvature(logits, x, weights, order)
        k = exact(logits, x, weights, order)
        np.testing.assert_allclose(k.dense(n), sigma, atol=1e-13)
        np.testing.assert_allclose(k.matvec(gradient).flatten(), sigma @ gradient.flatten().numpy(), atol=1e-12)
        assert float(k.mean_eigenvalue()) == pytest.approx(np.trace(sigma) / len(sigma), rel=1e-12)
        expected = np.linalg.solve(sigma + 0.1 * np.eye(n * d), gradient.flatten().numpy()).reshape(n, d)
        atol = (1e-12 if whole else 1e-4) * np.abs(expected).max()
        np.testing.assert_allclose(k.solve(gradient, 0.1), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [64, 4])
@pytest.mark.parametrize("name", ["exact", "bohning", "spectral", "block"])
def test_large_inputs_in_float32_do_not_increase_the_objective(name, rows):
    """Rounding of inputs of size 1e4 gives their second moments negative eigenvalues far below the damping."""
    x, labels = (1e4 * randn(rows, 8)).float(), torch.arange(rows) % 5
    head = torch.nn.Linear(8, 5)
    torch.nn.init.zeros_(head.weight)
    optimizer, objectives = BBM(head, curvature=name), []

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(x), labels)
        loss.backward()
        return loss

    for _ in range(6):
        with torch.no_grad():
            logits = x.double() @ head.weight.double().T + head.bias.double()
            square = sum(p.double().square().sum() for p in head.parameters())
            objectives.append((torch.nn.functional.cross_entropy(logits, labels) + 1e-4 / 2 * square).item())
        optimizer.step(closure)
    assert all(after <= before * (1 + 1e-5) for before, after in pairwise(objectives))
    assert objectives[-1] < 0.99 * objectives[0]
