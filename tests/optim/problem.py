"""Problems of softmax output layers, and steps of the optimizers written out as in the papers, for their tests."""

import math
from functools import cache

import numpy as np
import torch
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from favor.optim import SoftmaxBound

LABELS, INPUTS, EXAMPLES, DECAY = 5, 4, 60, 0.05


@cache
def data():
    """Inputs `[60, 4]`, of which the last is 1, and targets that depend on them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    x[:, -1] = 1
    truth = torch.randn(LABELS, INPUTS, generator=generator, dtype=torch.float64)
    noise = torch.rand(EXAMPLES, LABELS, generator=generator, dtype=torch.float64).log().neg().log().neg()
    return x, (x @ truth.T + noise).argmax(-1)


def start():
    """Weights `[5, 4]` to start from."""
    return torch.randn(LABELS, INPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 4


def objective(weight):
    """Mean cross-entropy and weight decay."""
    x, y = data()
    return (cross_entropy(x @ weight.T, y) + DECAY / 2 * weight.square().sum()).item()


@cache
def optimum():
    """The least objective."""
    x, y = data()

    def value(flat):
        weight = torch.tensor(flat.reshape(LABELS, INPUTS), requires_grad=True)
        loss = cross_entropy(x @ weight.T, y) + DECAY / 2 * weight.square().sum()
        loss.backward()
        return loss.item(), weight.grad.numpy().ravel()

    options = {"ftol": 0, "gtol": 1e-10}
    return minimize(value, np.zeros(LABELS * INPUTS), jac=True, method="L-BFGS-B", options=options).fun


def make_head(bias=False, dtype=torch.float64, weight=None):
    """A head at the start, or at a weight; with `bias`, the last column of the weight is the bias."""
    weight = start() if weight is None else weight
    labels, inputs = weight.shape
    head = torch.nn.Linear(inputs - bias, labels, bias=bias, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight[:, : inputs - bias])
        if bias:
            head.bias.copy_(weight[:, -1])
    return head


def gradient(weight, x, y):
    """Gradient of the mean cross-entropy, `[n, d]`."""
    rest = (x @ weight.T).softmax(-1) - torch.nn.functional.one_hot(y, len(weight))
    return rest.T @ x / len(x)


def backward(head, x, y, **options):
    """One forward and backward pass of the mean cross-entropy."""
    loss = cross_entropy(head(x[:, : head.in_features].to(head.weight.dtype)), y, **options)
    loss.backward()
    return loss


def train(optimizer, head, batch_size, epochs, schedule=None, seed=0):
    """Steps over shuffled batches; the objective after each epoch."""
    x, y = data()
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch_size):

            def closure(rows=rows):
                optimizer.zero_grad()
                return backward(head, x[rows], y[rows])

            optimizer.step(closure)
            if scheduler:
                scheduler.step()
        found.append(objective(joined(head)))
    assert all(map(math.isfinite, found))
    return found


def joined(head):
    """Weight and bias as one `[n, d]`."""
    weight = head.weight.detach().double().clone()
    return weight if head.bias is None else torch.cat((weight, head.bias.detach().double().unsqueeze(-1)), 1)


def after_step(prepare, **options):
    """Weight after a step for which `prepare(optimizer, head)` runs the passes."""
    head = make_head()
    optimizer = SoftmaxBound(head, weight_decay=DECAY, **options)
    prepare(optimizer, head)
    optimizer.step()
    return joined(head)


def whole(_, head, **options):
    x, y = data()
    backward(head, x[:20], y[:20], **options)


ORDERS = ("ascending", "descending", "none")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_array(tensor):
    return tensor.double().numpy()


def log_sum(values):
    return np.logaddexp.reduce(values, axis=-1)


def check_above(bound, theta, features, log_h=0.0):
    """Where features are `[..., n, D]`: the bound at `theta` is above the sum of log-partition functions elsewhere."""
    source = np.random.default_rng(0)
    matrix = bound.curvature if torch.is_tensor(bound.curvature) else bound.curvature.dense()
    for size in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0):
        step = size * source.normal(size=len(theta))
        terms = [float(bound.log_z), step @ bound.mean.numpy(), step @ matrix.numpy() @ step / 2]
        exact = log_sum(features @ (theta + step) + log_h).sum()
        assert exact - sum(terms) <= 1e-12 * (1 + abs(exact) + sum(map(abs, terms)))


def clamped(logits):
    """Logits `[..., n]` with those 60 below the largest raised to that."""
    return np.maximum(logits, logits.max(-1, keepdims=True) - 60.0)


def relative(logits):
    """The same relative to the largest, which is all that curvature depends on, as an array in float64."""
    array = as_array(logits)
    return np.maximum(array - array.max(-1, keepdims=True), -60.0)


def sequence(logits, order):
    """Labels in the order in which they are taken in, for one row of clamped logits."""
    signs = {"ascending": 1.0, "descending": -1.0, "none": 0.0}
    return np.argsort(signs[order] * logits, kind="stable")


def beta_kappa(ratio):
    """Curvature and weight of a label whose logit is `ratio` above the log of the sum so far."""
    beta = 0.25 if ratio == 0 else math.tanh(ratio / 2) / (2 * ratio)
    return beta, math.exp(-np.logaddexp(0.0, -ratio))


def algorithm(log_alpha, features):
    """Algorithm 1 for labels in the order of the rows: log Z, mean `[D]`, curvature `[D, D]`."""
    log_z, mean = log_alpha[0], features[0].copy()
    curvature = np.zeros((features.shape[1], features.shape[1]))
    for logit, feature in zip(log_alpha[1:], features[1:], strict=True):
        step = feature - mean
        beta, kappa = beta_kappa(logit - log_z)
        curvature += beta * np.outer(step, step)
        mean = mean + kappa * step
        log_z = np.logaddexp(log_z, logit)
    return log_z, mean, curvature


def curvature(logits, order="none"):
    """B `[..., n, n]` by label for logits `[..., n]`: Algorithm 1 with unit vectors as features."""
    if logits.ndim > 1:
        return np.stack([curvature(row, order) for row in logits])
    rows = relative(logits)
    labels = sequence(rows, order)
    return algorithm(rows[labels], np.eye(len(rows))[labels])[2]


def layer_curvature(logits, x, order="none"):
    """Sigma `[n d, n d]` of one example: Algorithm 1 with e_y (x) x as the feature of label y."""
    rows = relative(logits)
    labels = sequence(rows, order)
    return algorithm(rows[labels], np.kron(np.eye(len(rows)), as_array(x)[None])[labels])[2]


def solve(matrix, scale, damping, rhs):
    """(scale matrix + damping I)^{-1} rhs, densely."""
    system = scale * matrix + damping * np.eye(len(matrix))
    return np.linalg.solve(system, rhs)


def backward_error(matrix, scale, damping, rhs, solution):
    """|A u - r| relative to |A| |u| + |r| for A = scale matrix + damping I."""
    system = scale * matrix + damping * np.eye(len(matrix))
    size = np.linalg.eigvalsh(system)[-1] * np.linalg.norm(solution) + np.linalg.norm(rhs)
    return np.linalg.norm(system @ solution - rhs) / size


def spread_out(value, vector):
    """A diagonal above value v v'."""
    return value * np.diag(np.abs(vector)) * np.abs(vector).sum()


def keep_exact(V, S, D, r):
    """V' S V + D + r r' with the smallest of k + 1 eigenvectors put onto the diagonal."""
    g = r - V.T @ (V @ r)
    directions = np.concatenate((V, g[None] / np.linalg.norm(g)))
    q = np.append(V @ r, np.linalg.norm(g))
    values, turns = np.linalg.eigh(np.diag(np.append(S, 0.0)) + np.outer(q, q))
    turned = turns.T @ directions
    return turned[1:], values[1:], D + spread_out(values[0], turned[0])


def keep_repaired(V, S, D, r):
    """The paper's rule with |g| |a| I for the cross terms."""
    p = V @ r
    g = r - V.T @ p
    S, Q = np.linalg.eigh(np.diag(S) + np.outer(p, p))
    V, D = Q.T @ V, D + np.linalg.norm(g) * np.linalg.norm(V.T @ p) * np.eye(len(r))
    least = int(np.argmin(S))
    if g @ g <= S[least]:
        return V, S, D + spread_out(1.0, g)
    D = D + spread_out(S[least], V[least])
    S[least], V[least] = g @ g, g / np.linalg.norm(g)
    return V, S, D


def low_rank(theta, features, rank, rule):
    """V' S V + D `[D, D]` for features `[T, n, D]`, rows in generic position."""
    size = features.shape[-1]
    state = np.zeros((rank, size)), np.zeros(rank), np.zeros((size, size))
    for table in features:
        log_alpha = clamped(table @ theta)
        log_z, mean = log_alpha[0], table[0]
        for logit, feature in zip(log_alpha[1:], table[1:], strict=True):
            beta, kappa = beta_kappa(logit - log_z)
            r = math.sqrt(beta) * (feature - mean)
            state = (keep_exact if rule == "exact" else keep_repaired)(*state, r)
            mean = mean + kappa * (feature - mean)
            log_z = np.logaddexp(log_z, logit)
    V, S, D = state
    return (V.T * S) @ V + D
