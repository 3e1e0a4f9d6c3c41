"""What all of favor.decomposition refuse and warn of in the same way, and the names it lists."""

from itertools import product

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import favor.decomposition
from favor.decomposition import (
    KLNMF,
    L1KernelPCA,
    LpKernelPCA,
    StochasticSCIPI,
    VRHeavyBallPower,
    VRPower,
    block_power,
    l1_kernel_pca,
    mixture_proportions,
    scale_invariant_power,
)

X = np.random.default_rng(0).uniform(0.5, 2.0, size=(30, 4))
ESTIMATORS = {
    KLNMF: {"integer": ("n_components", "max_iter"), "number": ("shift", "tol"), "flag": ("guard",)},
    L1KernelPCA: {"integer": ("n_components", "max_iter"), "number": ("gamma",), "flag": ("center", "bit_flips")},
    LpKernelPCA: {
        "integer": ("n_components", "max_iter"),
        "number": ("p", "gamma", "shift", "tol"),
        "flag": ("center",),
    },
    VRPower: {
        "integer": ("n_components", "epoch_length", "max_epochs"),
        "number": ("eta", "variance", "tol"),
        "flag": ("center",),
    },
    VRHeavyBallPower: {
        "integer": ("n_components", "epoch_length", "max_epochs"),
        "number": ("eta", "beta", "variance", "tol"),
        "flag": ("center",),
    },
    StochasticSCIPI: {
        "integer": ("n_components", "epoch_length", "max_epochs"),
        "number": ("degree", "eta", "tol"),
        "flag": (),
    },
}
FUNCTIONS = {
    "l1_kernel_pca": (
        lambda **options: l1_kernel_pca(X @ X.T, **options),
        {"integer": ("n_components", "max_iter"), "number": (), "flag": ("bit_flips",)},
    ),
    "mixture_proportions": (
        lambda **options: mixture_proportions(X, **options),
        {"integer": ("max_iter",), "number": ("shift", "tol"), "flag": ("guard",)},
    ),
    "scale_invariant_power": (
        lambda **options: scale_invariant_power(lambda x: X.T @ (X @ x), np.ones(4), **options),
        {"integer": ("max_iter",), "number": ("shift", "tol"), "flag": ("relative",)},
    ),
    "block_power": (
        lambda **options: block_power([lambda x: X.T @ (X @ x)], [np.ones(4)], **options),
        {"integer": ("max_iter",), "number": ("shift", "tol"), "flag": ()},
    ),
}
WRONG = {"integer": (True, 2.5, "3", [1]), "number": (True, np.nan, "much", [1.0]), "flag": ("no", 1, None)}


def cases():
    for kind, names in ESTIMATORS.items():
        yield kind.__name__, lambda kind=kind, **options: kind(**options).fit(X), names
    for name, (call, names) in FUNCTIONS.items():
        yield name, call, names


@pytest.mark.parametrize(("call", "names"), [pytest.param(*rest, id=owner) for owner, *rest in cases()])
def test_wrong_kinds_of_parameters_are_refused_by_name(call, names):
    for sort, members in names.items():
        for name, value in product(members, WRONG[sort]):
            with pytest.raises(ValueError, match=rf"^{name} must be .*got "):
                call(**{name: value})


def test_a_step_of_a_block_is_no_boolean():
    with pytest.raises(ValueError, match=r"steps\[0\] must be a positive number or None, got True"):
        block_power([lambda x: x], [np.ones(4)], steps=[True])


@pytest.mark.parametrize("kind", [L1KernelPCA, LpKernelPCA])
def test_a_matrix_is_no_kernel(kind):
    with pytest.raises(ValueError, match="kernel must be one of linear, rbf, precomputed or a function; got array"):
        kind(kernel=np.eye(3)).fit(X)


def test_components_without_variance_do_not_score_outliers():
    for rows in (np.ones((4, 2)), np.full((7, 3), 0.1), torch.full((7, 3), 0.1)):
        pca = L1KernelPCA(center=False).fit(rows)
        assert len(pca.outlier_components_) == 0
        assert pca.outlier_score(3 * rows).tolist() == [0] * len(rows)
    # All rows have the same score on the first component, up to rounding; the second one varies.
    rows = np.column_stack([np.full(20, 5.0), np.tile([-1.0, 1.0], 10)])
    pca = L1KernelPCA(center=False).fit(rows)
    np.testing.assert_allclose(pca.outlier_score(rows), 1, atol=1e-9)


@pytest.mark.parametrize("factory", [np.asarray, torch.tensor], ids=["array", "tensor"])
@pytest.mark.parametrize(
    ("estimator", "value"),
    [
        (VRPower(), 0.0),
        (VRPower(center=True), 1.0),
        (VRPower(center=True), 0.1),
        (VRPower(center=True), 1e6 / 3),
        (VRHeavyBallPower(), 0.0),
        (VRHeavyBallPower(center=True), 0.1),
        (StochasticSCIPI(), 0.0),
        (StochasticSCIPI(degree=1), 0.0),
    ],
)
def test_data_without_any_direction_are_refused(estimator, value, factory):
    with pytest.raises(ValueError, match=r"^X must have rows that (are not zero|differ)"):
        estimator.fit(factory(np.full((7, 3), value)))


def test_small_differences_beside_a_large_mean_are_a_direction():
    rows = 1.0 + 1e-9 * np.outer(np.tile([-1.0, 1.0], 100), [0.6, 0.8, 0.0])
    found = VRPower(center=True, random_state=0).fit(rows)
    np.testing.assert_allclose(found.components_, [[0.6, 0.8, 0.0]], atol=1e-5)


LATE = {
    "KLNMF": KLNMF(3, max_iter=9, tol=1e-9, random_state=0),
    "L1KernelPCA": L1KernelPCA(max_iter=1),
    "LpKernelPCA": LpKernelPCA(max_iter=1, random_state=0),
    "VRPower": VRPower(max_epochs=1, random_state=0),
    "StochasticSCIPI": StochasticSCIPI(max_epochs=1, batch_size=2, random_state=0),
}


@pytest.mark.parametrize("method", ["fit", "fit_transform"])
@pytest.mark.parametrize("name", LATE)
def test_warnings_point_at_the_caller(name, method):
    rows = np.random.default_rng(1).gamma(0.5, size=(200, 12))
    with pytest.warns(ConvergenceWarning) as caught:
        getattr(LATE[name], method)(rows)
    assert {warning.filename for warning in caught} == {__file__}


def test_warnings_of_transform_and_of_functions_point_at_the_caller():
    rows = np.random.default_rng(1).gamma(0.5, size=(200, 12))
    model = KLNMF(3, max_iter=500, tol=1e-3, random_state=0).fit(rows).set_params(max_iter=1, tol=1e-9)
    for call in (lambda: model.transform(rows), lambda: l1_kernel_pca(rows @ rows.T, max_iter=1)):
        with pytest.warns(ConvergenceWarning) as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}


def test_public_names_are_listed():
    assert set(favor.decomposition.__all__) <= set(dir(favor.decomposition))
    assert "__doc__" in dir(favor.decomposition)
