"""
The variance of random features
===============================

A random feature estimates exp(x.y) without bias. Its variance says how far a single draw is from the true value.
Figure 2 of the FAVOR# paper compares families by log(Var / K^2), where K is the kernel.
This variance has a closed form, so no feature is drawn here.
"""

import matplotlib.pyplot as plt
import torch

import favor

FAMILIES = {
    "pos": "FAVOR+",
    "gerf": "FAVOR++",
    "saderf": "FAVOR#, SADERF",
    "sderf": "FAVOR#, SDERF",
    "cderf": "ours, CDERF",
}
SIGMAS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
torch.manual_seed(0)
DIM, COUNT = 64, 128


def regimes(sigma):
    """Queries and keys: one cloud around zero, and keys with another mean."""
    x, y = sigma * torch.randn(2, COUNT, DIM, dtype=torch.float64)
    return {"normal": (x, y), "heterogeneous": (x, y + sigma)}


def log_relative_variance(family, x, y):
    """Mean over all pairs of log(Var / K^2)."""
    features = favor.features.get(family)
    relative = features.log_relative_second_moment(x, y, features.fit(x, y))
    return torch.log(torch.expm1(relative.clamp(max=700))).where(relative < 700, relative).mean().item()


results = {
    regime: {name: [log_relative_variance(name, *regimes(sigma)[regime]) for sigma in SIGMAS] for name in FAMILIES}
    for regime in regimes(1.0)
}

# %%
# Lower is better. The mean of 256 features removes a value of log(256) = 5.5: that is the dotted line.

figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
for axis, (regime, lines) in zip(axes, results.items(), strict=True):
    for name, line in lines.items():
        axis.plot(SIGMAS, line, marker=".", label=FAMILIES[name])
    axis.axhline(torch.tensor(256.0).log(), color="black", linestyle=":", label="log 256")
    axis.set(xlabel="sigma", title=regime, ylim=(-10, 60))
axes[0].set_ylabel("log(Var / K^2), mean over pairs")
axes[0].legend(fontsize=8)
figure.tight_layout()
plt.show()

# %%
# The order is as in the paper: each family has more parameters than the family before, and less variance.
# ``eval/results/variance`` has the whole figure, also with images as data.

for regime, lines in results.items():
    print(f"{regime}, sigma 1:", ", ".join(f"{FAMILIES[name]} {line[-1]:.1f}" for name, line in lines.items()))
