"""A small softmax regression in float64, its optimum by scipy, and functions that train a head on it."""

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
