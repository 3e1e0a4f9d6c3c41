"""Tensors stay where they live, and give what arrays give; on a GPU too, where there is one."""

import numpy as np
import pytest
import torch
from sklearn.base import clone

from favor import decomposition
from favor.decomposition import KLNMF, L1KernelPCA, LpKernelPCA, StochasticSCIPI, VRHeavyBallPower, VRPower

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
W, H = (np.random.default_rng(1).uniform(0.01, 1, size) for size in ((60, 3), (3, 6)))
X = np.random.default_rng(0).gamma(1.0, size=(60, 6)) * [3, 2, 1, 1, 1, 1]


def laplacian(x, y):
    return torch.exp(-torch.cdist(x, y, p=1) / 4)


POWER = {"p": 4, "tol": 1e-12, "max_iter": 5000, "random_state": 0}
STEPS = {"batch_size": 30, "random_state": 0}
ESTIMATORS = [
    L1KernelPCA(2),
    L1KernelPCA(2, kernel="rbf"),
    L1KernelPCA(2, kernel=laplacian),
    LpKernelPCA(2, **POWER),
    LpKernelPCA(2, kernel="rbf", gamma=0.05, **POWER),
    LpKernelPCA(2, kernel=laplacian, **POWER),
    KLNMF(3, init="custom", tol=0, max_iter=20),
    VRPower(2, center=True, **STEPS),
    VRHeavyBallPower(2, center=True, **STEPS),
    StochasticSCIPI(**STEPS),
    StochasticSCIPI("mixture", tol=1e-5, **STEPS),
]


def fitted(model):
    return {key: value for key, value in vars(model).items() if key.endswith("_") and hasattr(value, "shape")}


def close(found, expected, rtol):
    found, expected = (np.abs(np.asarray(part.cpu() if torch.is_tensor(part) else part)) for part in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * expected.max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_estimators(estimator, device):
    x, new = torch.tensor(X, device=device), torch.tensor(X[:5] + 0.1, device=device)
    arrays, model, single = (clone(estimator) for _ in range(3))
    start = {"W": W, "H": H} if isinstance(estimator, KLNMF) else {}
    expected = arrays.fit_transform(X, **start)
    close(model.fit_transform(x, **start), expected, 1e-6)
    close(single.fit_transform(x.float(), **start), expected, 5e-3)
    assert fitted(model).keys() == fitted(arrays).keys() != set()
    for key, value in fitted(model).items():
        assert value.device.type == device
        close(value, fitted(arrays)[key], 1e-6)
    for dtype, own in ((torch.float64, model), (torch.float32, single)):
        assert {value.dtype for value in fitted(own).values() if value.is_floating_point()} == {dtype}
        for name in ("transform", *(["outlier_score"] if hasattr(own, "outlier_score") else [])):
            found = getattr(own, name)(new.to(dtype))
            assert (found.device.type, found.dtype) == (device, dtype)
            close(found, getattr(arrays, name)(X[:5] + 0.1), 1e-6 if own is model else 5e-3)
    # What was fitted on one kind takes the other.
    assert isinstance(model.transform(X), np.ndarray)
    assert isinstance(arrays.transform(new), torch.Tensor)


def test_integers_count_as_float64():
    whole = X.round()
    model = KLNMF(3, random_state=0, tol=0, max_iter=20)
    expected, found = (model.fit_transform(torch.tensor(rows)) for rows in (whole, whole.astype(int)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_functions(device):
    likelihoods = torch.tensor(X, device=device)
    result = decomposition.mixture_proportions(likelihoods)
    assert result.proportions.device.type == device
    np.testing.assert_allclose(result.proportions.cpu(), decomposition.mixture_proportions(X).proportions, atol=1e-8)
    kernel = likelihoods @ likelihoods.T
    found = decomposition.l1_kernel_pca(kernel, 2)
    assert {part.device.type for part in (found.scores, found.signs, found.alphas)} == {device}
    power = decomposition.scale_invariant_power(lambda x: kernel @ x, kernel[0])
    assert power.x.device.type == device
    top = torch.linalg.eigh(kernel).eigenvectors[:, -1]
    assert abs(float(power.x @ top)) > 1 - 1e-8
