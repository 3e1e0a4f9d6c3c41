"""
Optimizers that bound the loss
==============================

``favor.optim`` bounds the loss of a softmax layer from above by a quadratic, and steps to its lowest point.
The quadratic sets the length of the step, so nothing has to be tuned. This page compares such steps with SGD and Adam.
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from favor.optim import BBM, SoftmaxBound

images, labels = load_digits(return_X_y=True)
x = torch.from_numpy(images / 16).float()
y = torch.from_numpy(labels)
DECAY = 1e-3


def objective(head):
    """Mean loss and its penalty."""
    return cross_entropy(head(x), y) + DECAY / 2 * sum(p.square().sum() for p in head.parameters())


# %%
# First logistic regression on all data at once. ``BBM`` never increases the objective. SGD and Adam get the best of
# five learning rates each; thin lines show the other rates.


def full_batch(make, steps=60, penalty=True):
    """The objective after each step."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 10)
    optimizer, found = make(head), []

    def closure():
        optimizer.zero_grad()
        loss = objective(head) if penalty else cross_entropy(head(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        found.append(objective(head).item())
        optimizer.step(closure)
    return found


figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
GRIDS = {"SGD": (torch.optim.SGD, (0.1, 0.3, 1, 3, 6)), "Adam": (torch.optim.Adam, (0.003, 0.01, 0.03, 0.1, 0.3))}
for color, (name, (kind, rates)) in enumerate(GRIDS.items()):
    curves = {rate: full_batch(lambda head, rate=rate, kind=kind: kind(head.parameters(), lr=rate)) for rate in rates}
    best = min(curves, key=lambda rate: curves[rate][-1])
    for rate, curve in curves.items():
        label = f"{name}, best rate {rate:g}" if rate == best else None
        axis.plot(curve, color=f"C{color}", linewidth=2 if rate == best else 0.6, label=label)
for color, curvature in enumerate(("exact", "bohning"), start=2):
    make = lambda head, curvature=curvature: BBM(head, weight_decay=DECAY, curvature=curvature)  # noqa: E731
    curve = full_batch(make, penalty=False)
    assert all(after <= before + 1e-6 for before, after in pairwise(curve))
    axis.plot(curve, color=f"C{color}", linewidth=2, label=f"BBM, {curvature}, nothing tuned")
axis.set(xlabel="step", ylabel="objective", title="logistic regression, all data", ylim=(0.1, 2.4))
axis.legend(fontsize=8)
plt.show()

# %%
# Next a network with mini-batches: AdamW on the body, and AdamW or ``SoftmaxBound`` on the output layer.
# Both variants get the best of three learning rates for AdamW.


def network(bound, rate, epochs=6):
    """The training loss after each epoch."""
    torch.manual_seed(0)
    body, head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.nn.Linear(64, 10)
    optimizers = [torch.optim.AdamW(body.parameters(), lr=rate)]
    optimizers.append(SoftmaxBound(head) if bound else torch.optim.AdamW(head.parameters(), lr=rate))
    found = []
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            cross_entropy(head(body(x[rows])), y[rows]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            found.append(cross_entropy(head(body(x)), y).item())
    return found


figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name, bound in (("AdamW", False), ("SoftmaxBound", True)):
    curve = min((network(bound, rate) for rate in (2e-3, 6e-3, 2e-2)), key=lambda losses: losses[-1])
    axis.plot(range(1, 7), curve, marker="o", label=f"{name} on the output layer")
    print(f"{name} on the output layer: training loss {curve[0]:.3f} after one epoch, {curve[-1]:.3f} after six")
axis.set(xlabel="epoch", ylabel="training loss", yscale="log", title="a network, batches of 64")
axis.legend(fontsize=8)
plt.show()

# %%
# L-BFGS solves the first problem in less time, and ``SoftmaxBound`` is one choice among several for the second.
# The tables in ``eval/results/optimizers`` compare them with tuned rates and several seeds.
