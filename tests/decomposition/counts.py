"""Matrices of counts, and two references for their KL-NMF: its definition and scikit-learn's MU."""

import numpy as np
from sklearn.decomposition import NMF

from favor.decomposition import KLNMF


def divergence(V: np.ndarray, W: np.ndarray, H: np.ndarray) -> float:
    product = np.maximum(W @ H, 1e-300)
    logs = np.log(np.where(V > 0, V, 1) / product)
    return float((V * logs - V + product).sum())


def planted() -> np.ndarray:
    source = np.random.default_rng(0)
    return source.poisson(source.gamma(1, 1, (300, 10)) @ source.gamma(1, 1, (10, 200))).astype(float)


def small(n: int = 30, m: int = 20, seed: int = 0, mean: float = 1.0) -> np.ndarray:
    """Counts, none of whose rows and columns is empty."""
    source = np.random.default_rng(seed)
    V = source.poisson(mean * source.gamma(0.5, 2, (n, 3)) @ source.dirichlet(np.ones(m), 3) * m / 2).astype(float)
    V[:, 0] += 1
    V[0] += 1
    return V


def factors(V: np.ndarray, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.uniform(0.01, 1, (V.shape[0], k)), source.uniform(0.01, 1, (k, V.shape[1]))


def start(V: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Uniform factors and one sweep of MU."""
    source = np.random.default_rng(seed)
    W, H = source.uniform(size=(V.shape[0], k)), source.uniform(size=(k, V.shape[1]))
    W = W * (V / (W @ H) @ H.T) / H.sum(1)
    return W, H * (W.T @ (V / (W @ H))) / W.sum(0)[:, None]


def by_definition(V: np.ndarray, W: np.ndarray, H: np.ndarray, shift: float) -> np.ndarray:
    """Mixture proportions of every column: X <- X (shift + G)^2, both times divided by its sums."""
    c, v = W.sum(0), V.sum(0)
    L = W / c
    X = H * c[:, None]
    X = X / X.sum(0)
    G = L.T @ (V / (L @ X)) / v
    X = X * (shift + G) ** 2
    return X / X.sum(0) * v / c[:, None]


def mu(V, k, sweeps, W, H):
    model = NMF(k, init="custom", solver="mu", beta_loss="kullback-leibler", max_iter=sweeps, tol=0)
    W = model.fit_transform(V, W=W.copy(), H=H.copy())
    return W, model.components_


def ours(V, k, sweeps, W, H, **options):
    model = KLNMF(k, init="custom", max_iter=sweeps, tol=0, **options)
    return model.fit_transform(V, W=W, H=H), model.components_
