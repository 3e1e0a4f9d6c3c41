"""Steps of the optimizers against their formulas with dense matrices in float64; matrices above the curvature."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from pairwise import pairs
from problem import (
    DECAY,
    EXAMPLES,
    INPUTS,
    LABELS,
    ORDERS,
    as_array,
    backward,
    curvature,
    data,
    gradient,
    joined,
    layer_curvature,
    make_head,
    randn,
    start,
)

from favor.optim import BBM, LSPFB, SBM, SPFB, LowRankCurvature, ProxBoundSGD, SoftmaxBound, exact_step_, majorizers
from favor.optim.bound import bound_coefficients, bound_factor
from favor.optim.majorizers import MAJORIZERS, Blocks, averaged, bohning, diagonal, exact, geometric, kfac, spectral


def sigma(weight, x, order="ascending"):
    return torch.as_tensor(layer_curvature(weight @ x, x, order))


def dense_sigma(weight, x, order="ascending"):
    return sum(sigma(weight, row, order) for row in x) / len(x)


def solved(matrix, damping, right):
    eye = torch.eye(len(matrix), dtype=torch.float64)
    return torch.linalg.solve(matrix + damping * eye, right.flatten()).reshape(right.shape)


def mean_square(x):
    return x.square().sum(-1).mean()


# The optimizer, rows of a batch, order of the labels, what is added to the curvature, and lengths of the steps.
STEPS = [
    *((lambda h, o=order: BBM(h, 0.7, DECAY, order=o), 60, order, lambda x: DECAY, [0.7] * 3) for order in ORDERS),
    *(
        (lambda h: SPFB(h, 0.7, DECAY, 0.3), rows, "ascending", lambda x: DECAY + 0.3 * mean_square(x), [0.7] * 3)
        for rows in (1, 7)
    ),
    *(
        (lambda h: SPFB(h, 0.7, DECAY, 0.3, literal=True), rows, "ascending", lambda x: DECAY, [0.7, 0.35, 0.7 / 3])
        for rows in (1, 7)
    ),
    *(
        (lambda h, r=rate, d=decay: ProxBoundSGD(h, r, d), 1, "none", lambda x, r=rate, d=decay: d + 1 / r, [1.0] * 3)
        for rate in (0.1, 1e3)
        for decay in (0.0, DECAY)
    ),
    (lambda h: SBM(h, EXAMPLES, weight_decay=DECAY), 9, "descending", lambda x: DECAY * EXAMPLES / 9, [1.0]),
]


@pytest.mark.parametrize(("factory", "rows", "order", "damping", "lengths"), STEPS)
def test_step_by_dense_matrices(factory, rows, order, damping, lengths):
    x, y = (part[:rows] for part in data())
    head = make_head()
    optimizer = factory(head)
    for length in lengths:
        before = joined(head)
        optimizer.step(lambda: (optimizer.zero_grad(), backward(head, x, y))[1])
        total = gradient(before, x, y) + optimizer.param_groups[0]["weight_decay"] * before
        expected = before - length * solved(dense_sigma(before, x, order), damping(x), total)
        torch.testing.assert_close(joined(head), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    *pairs(order=ORDERS, regularisation=((0.0, 0.2), (DECAY, DECAY), (DECAY, 3.0)), rate=(1.0, 0.4))
)
def test_exact_step_by_dense_matrices(order, regularisation, rate):
    decay, damping = regularisation
    x, y = (part[0] for part in data())
    weight = 3 * start()
    after = weight.clone()
    loss = exact_step_(after, x, int(y), lr=rate, weight_decay=decay, damping=damping, order=order)
    move = solved(sigma(weight, x, order), damping, gradient(weight, x[None], y[None]) + decay * weight)
    torch.testing.assert_close(after, weight - rate * move, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, -(weight @ x).log_softmax(-1)[y])


def test_exact_step_in_half_precision():
    x, y = (part[0] for part in data())
    weight, half = start(), start().bfloat16()
    exact_step_(weight, x, int(y), damping=0.2)
    exact_step_(half, x.bfloat16(), int(y), damping=0.2)
    torch.testing.assert_close(half.double(), weight, rtol=0.05, atol=0.02)


def test_exact_step_on_an_input_of_zeros_only_decays():
    weight = start()
    exact_step_(weight, torch.zeros(INPUTS, dtype=torch.float64), 2, lr=0.5, weight_decay=0.1, damping=0.4)
    torch.testing.assert_close(weight, start() * (1 - 0.5 * 0.1 / 0.4))


def naive_sbm(x, y, rate):
    """Algorithm 2 with the regularization once an example: Sherman-Morrison, label by label, descending."""
    size, total = LABELS * INPUTS, DECAY * EXAMPLES
    theta, phi, mu = start().flatten(), torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    inverse = torch.eye(size, dtype=torch.float64) / total
    for row, target in zip(x, y, strict=True):
        features = torch.kron(torch.eye(LABELS, dtype=torch.float64), row[None]).reshape(LABELS, size)
        logits = features @ theta
        order = logits.argsort(descending=True)
        share = (total * theta / EXAMPLES - features[target]) / LABELS
        z, g = torch.tensor(0.0, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        for place, label in enumerate(order):
            alpha, step = logits[label].exp(), features[label] - g
            if place == 0:
                kappa, beta = 1.0, 0.0
            else:
                ratio = (alpha / z).log()
                kappa, beta = alpha / (z + alpha), torch.tanh(ratio / 2) / (2 * ratio)
            xi = kappa * step + share
            image = inverse @ step
            drop = beta * torch.outer(image, image) / (1 + beta * step @ image)
            inverse = inverse - drop
            phi = phi + inverse @ xi - drop @ mu
            g, mu, z = g + kappa * step, mu + xi, z + alpha
        theta = theta - rate / EXAMPLES * phi
        torch.testing.assert_close(phi, inverse @ mu)
    return theta.reshape(LABELS, INPUTS), inverse


def test_sbm_accumulated_is_the_corrected_algorithm():
    x, y = (part[:12] for part in data())
    head = make_head()
    optimizer = SBM(head, EXAMPLES, lr=2.0, weight_decay=DECAY, variant="accumulated")
    for i in range(12):
        optimizer.zero_grad()
        backward(head, x[i : i + 1], y[i : i + 1])
        optimizer.step()
    theta, inverse = naive_sbm(x, y, 2.0)
    torch.testing.assert_close(joined(head), theta, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(optimizer.state[head.weight]["inverse"], inverse, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", ["exact", "repaired"])
def test_lspfb_step_by_its_curvature(rule):
    x, y = (part[:6] for part in data())
    head, before = make_head(), start()
    optimizer = LSPFB(head, lr=0.7, weight_decay=DECAY, rank=3, rule=rule)
    backward(head, x, y)
    optimizer.step()
    curvature = LowRankCurvature(LABELS * INPUTS, 3, rule=rule, like=x)
    for row in x:
        for each in bound_factor(bound_coefficients(before @ row, "none")):
            curvature.add(torch.kron(each, row) / len(x) ** 0.5)
    move = solved(curvature.dense(), DECAY, gradient(before, x, y) + DECAY * before)
    torch.testing.assert_close(joined(head), before - 0.7 * move, rtol=1e-9, atol=1e-10)
    excess = torch.linalg.eigvalsh(curvature.dense() - dense_sigma(before, x, "none"))
    assert excess[0] > -1e-12


def labels_of(curvature, weight, x, order="ascending"):
    """The factor of labels of a batch `[n]`; its averages are under the root for "geometric"."""
    if curvature == "bohning":
        return torch.full((LABELS,), 0.5, dtype=torch.float64)
    if curvature == "geometric":
        p = (x @ weight.T).softmax(-1)
        return (p * (1 - p)).mean(0)
    blocks = [sigma(weight, row, order).reshape(LABELS, INPUTS, LABELS, INPUTS) / row.dot(row) for row in x]
    return 2 * torch.stack([torch.einsum("aiai->a", block) for block in blocks]).mean(0)


CURVATURES = [("bohning", {}), ("diag", {}), ("diag", {"order": "descending"}), ("geometric", {})]


@pytest.mark.parametrize("ema", [0.0, 0.7])
@pytest.mark.parametrize(("curvature", "options"), [*CURVATURES, ("geometric", {"max_rows": 4})])
def test_softmax_bound_step_by_dense_matrices(curvature, options, ema):
    """Rows of "geometric" are left out for the logits, not for the inputs' second moment."""
    x, y = data()
    head, parts, weights = make_head(), [], []
    fixed = {"lr": 0.9, "weight_decay": DECAY, "damping": 0.2, "curvature_ema": ema}
    optimizer = SoftmaxBound(head, curvature=curvature, **fixed, **options)
    for number in range(3):
        rows, before = slice(20 * number, 20 * number + 20), joined(head)
        backward(head, x[rows], y[rows])
        optimizer.step()
        optimizer.zero_grad()
        kept = x[rows][torch.linspace(0, 19, options.get("max_rows", 20)).long()]
        order = options.get("order", "ascending")
        parts.append((labels_of(curvature, before, kept, order), x[rows].T @ x[rows] / 20))
        weights = [ema * w for w in weights] + [1.0]
        shares = [w / sum(weights) for w in weights]
        label, moment = (sum(s * part[i] for s, part in zip(shares, parts, strict=True)) for i in (0, 1))
        matrix = torch.kron((label.sqrt() if curvature == "geometric" else label).diag(), moment)
        damping = DECAY + 0.2 * matrix.trace() / len(matrix)
        values = torch.linalg.eigvalsh(matrix)
        degrees = (values / (values + damping)).sum() / LABELS
        move = solved(matrix, damping, gradient(before, x[rows], y[rows]) + DECAY * before)
        expected = before - 0.9 * 20 / (20 + 3 * (degrees + 1)) * move
        torch.testing.assert_close(joined(head), expected, rtol=1e-9, atol=1e-10)


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
    two = logits[:, :2]
    np.testing.assert_allclose(dense(spectral(two, x, weights), 2), batch_curvature(two, x, weights))
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
