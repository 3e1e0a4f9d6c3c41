"""Tensors stay where they live, and give what arrays give; on a GPU too, where there is one."""

import numpy as np
import pytest
import torch

from favor import decomposition

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
X = np.random.default_rng(0).gamma(1.0, size=(60, 6)) * [3, 2, 1, 1, 1, 1]
ESTIMATORS = {
    "L1KernelPCA": {"n_components": 2},
    "LpKernelPCA": {"n_components": 2, "random_state": 0},
    "KLNMF": {"n_components": 3, "random_state": 0, "tol": 0, "max_iter": 20},
    "VRPower": {"random_state": 0, "batch_size": 30},
    "VRHeavyBallPower": {"random_state": 0, "batch_size": 30},
    "StochasticSCIPI": {"random_state": 0, "batch_size": 30},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name, device):
    make = getattr(decomposition, name)
    expected = make(**ESTIMATORS[name]).fit_transform(X)
    model = make(**ESTIMATORS[name])
    found = model.fit_transform(torch.tensor(X, device=device))
    assert found.device.type == device
    assert found.dtype == torch.float64
    np.testing.assert_allclose(np.abs(found.cpu().numpy()), np.abs(expected), rtol=1e-6, atol=1e-8)
    arrays = [value for key, value in vars(model).items() if key.endswith("_") and hasattr(value, "shape")]
    assert arrays
    assert all(isinstance(value, torch.Tensor) and value.device.type == device for value in arrays)
    if hasattr(model, "transform"):
        new = torch.tensor(X[:5], device=device)
        assert model.transform(new).device.type == device


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
