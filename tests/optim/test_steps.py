"""Steps of the optimizers against their formulas with dense matrices in float64."""

import pytest
import torch
from naive import layer_curvature
from pairwise import pairs
from problem import DECAY, EXAMPLES, INPUTS, LABELS, backward, data, gradient, joined, make_head, start

from favor.optim import (
    BBM,
    LSPFB,
    SBM,
    SPFB,
    LowRankCurvature,
    ProxBoundSGD,
    SoftmaxBound,
    bound_coefficients,
    bound_factor,
    exact_step_,
)


def sigma(weight, x, order="ascending"):
    return torch.as_tensor(layer_curvature(weight @ x, x, order))


def dense_sigma(weight, x, order="ascending"):
    return sum(sigma(weight, row, order) for row in x) / len(x)


def solved(matrix, damping, right):
    eye = torch.eye(len(matrix), dtype=torch.float64)
    return torch.linalg.solve(matrix + damping * eye, right.flatten()).reshape(right.shape)


def stepped(factory, x, y, weight=None):
    head = make_head(weight=weight)
    optimizer = factory(head)
    before = joined(head)
    optimizer.step(lambda: (optimizer.zero_grad(), backward(head, x, y))[1])
    return before, joined(head)


def mean_square(x):
    return x.square().sum(-1).mean()


# Optimizer and its options, rows of a batch, order of the labels, what is added to the curvature.
STEPS = [
    *((BBM, {"order": order}, 60, order, lambda x: DECAY) for order in ("ascending", "descending", "none")),
    *((SPFB, {"damping": 0.3}, rows, "ascending", lambda x: DECAY + 0.3 * mean_square(x)) for rows in (1, 7)),
    *((SPFB, {"damping": 0.3, "literal": True}, rows, "ascending", lambda x: DECAY) for rows in (1, 7)),
]


@pytest.mark.parametrize(("optimizer", "options", "rows", "order", "damping"), STEPS)
def test_step_by_dense_matrices(optimizer, options, rows, order, damping):
    x, y = (part[:rows] for part in data())
    before, after = stepped(lambda h: optimizer(h, lr=0.7, weight_decay=DECAY, **options), x, y)
    move = solved(dense_sigma(before, x, order), damping(x), gradient(before, x, y) + DECAY * before)
    torch.testing.assert_close(after, before - 0.7 * move, rtol=1e-10, atol=1e-10)


def test_literal_spfb_divides_its_step_by_the_number_of_steps():
    x, y = data()
    head = make_head()
    optimizer = SPFB(head, weight_decay=DECAY, literal=True)
    for number in (1, 2, 3):
        before = joined(head)
        backward(head, x[:7], y[:7])
        optimizer.step()
        optimizer.zero_grad()
        move = solved(dense_sigma(before, x[:7]), DECAY, gradient(before, x[:7], y[:7]) + DECAY * before)
        torch.testing.assert_close(joined(head), before - move / number, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("rate", [0.1, 1e3])
def test_prox_step_by_dense_matrices(rate, decay):
    x, y = (part[:1] for part in data())
    before, after = stepped(lambda h: ProxBoundSGD(h, lr=rate, weight_decay=decay), x, y)
    move = solved(dense_sigma(before, x, "none"), decay + 1 / rate, gradient(before, x, y) + decay * before)
    torch.testing.assert_close(after, before - move, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    *pairs(
        order=("ascending", "descending", "none"),
        regularisation=((0.0, 0.2), (DECAY, DECAY), (DECAY, 3.0)),
        rate=(1.0, 0.4),
    )
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


@pytest.mark.parametrize(
    "values", [{"damping": 0.0}, {"damping": -0.01}, {"damping": float("nan")}, {"damping": 1, "lr": -1}]
)
def test_exact_step_refuses(values):
    with pytest.raises(ValueError, match="damping must be positive, lr and weight_decay at least 0"):
        exact_step_(start(), torch.ones(INPUTS, dtype=torch.float64), 0, **values)


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


def test_sbm_batch_adds_all_its_curvature_at_once():
    x, y = (part[:9] for part in data())
    head = make_head()
    optimizer = SBM(head, EXAMPLES, weight_decay=DECAY)
    backward(head, x, y)
    before = joined(head)
    optimizer.step()
    whole = 9 * dense_sigma(before, x, "descending")
    move = solved(whole, DECAY * EXAMPLES, 9 * (gradient(before, x, y) + DECAY * before))
    torch.testing.assert_close(joined(head), before - move, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["exact", "repaired"])
def test_lspfb_step_by_its_curvature(rule):
    x, y = (part[:6] for part in data())
    before, after = stepped(lambda h: LSPFB(h, lr=0.7, weight_decay=DECAY, rank=3, rule=rule), x, y)
    curvature = LowRankCurvature(LABELS * INPUTS, 3, rule=rule, like=x)
    for row in x:
        for each in bound_factor(bound_coefficients(before @ row, "none")):
            curvature.add(torch.kron(each, row) / len(x) ** 0.5)
    move = solved(curvature.dense(), DECAY, gradient(before, x, y) + DECAY * before)
    torch.testing.assert_close(after, before - 0.7 * move, rtol=1e-9, atol=1e-10)
    excess = torch.linalg.eigvalsh(curvature.dense() - dense_sigma(before, x, "none"))
    assert excess[0] > -1e-12


@pytest.mark.parametrize("ema", [0.0, 0.7])
@pytest.mark.parametrize(("curvature", "order"), [("bohning", None), ("diag", None), ("diag", "descending")])
def test_softmax_bound_step_by_dense_matrices(curvature, order, ema):
    x, y = data()
    head = make_head()
    options = {"curvature": curvature, "curvature_ema": ema, "order": order}
    optimizer = SoftmaxBound(head, lr=0.9, weight_decay=DECAY, damping=0.2, **options)
    moments, labels, weights = [], [], []
    for number in range(3):
        rows, before = slice(20 * number, 20 * number + 20), joined(head)
        backward(head, x[rows], y[rows])
        optimizer.step()
        optimizer.zero_grad()
        moments.append(x[rows].T @ x[rows] / 20)
        diagonals = [
            sigma(before, row, order or "ascending").reshape(LABELS, INPUTS, LABELS, INPUTS) for row in x[rows]
        ]
        labels.append(sum(torch.einsum("aiai->a", s) / r.dot(r) for s, r in zip(diagonals, x[rows], strict=True)) / 20)
        weights = [ema * w for w in weights] + [1.0]
        shares = [w / sum(weights) for w in weights]
        moment = sum(s * m for s, m in zip(shares, moments, strict=True))
        label = sum(s * m for s, m in zip(shares, labels, strict=True))
        diagonal = torch.full((LABELS,), 0.5, dtype=torch.float64) if curvature == "bohning" else 2 * label
        matrix = torch.kron(diagonal.diag(), moment)
        damping = DECAY + 0.2 * matrix.trace() / len(matrix)
        values = torch.linalg.eigvalsh(matrix)
        degrees = (values / (values + damping)).sum() / LABELS
        move = solved(matrix, damping, gradient(before, x[rows], y[rows]) + DECAY * before)
        expected = before - 0.9 * 20 / (20 + 3 * (degrees + 1)) * move
        torch.testing.assert_close(joined(head), expected, rtol=1e-9, atol=1e-10)
