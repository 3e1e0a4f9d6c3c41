"""Steps of the optimizers against their formulas with dense matrices in float64."""

import pytest
import torch
from naive import ORDERS, layer_curvature
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
    *pairs(
        order=ORDERS,
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
