"""What all of favor.decomposition have in common: scikit-learn's checks, names, refusals, warnings."""

import inspect
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

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
ESTIMATORS = (KLNMF, L1KernelPCA, LpKernelPCA, VRPower, VRHeavyBallPower, StochasticSCIPI)
CHECKED = [
    KLNMF(),
    KLNMF(2, shift=0.25),
    KLNMF(2, shift=0, guard=False),
    L1KernelPCA(),
    L1KernelPCA(kernel="rbf", bit_flips=True),
    L1KernelPCA(kernel="precomputed"),
    L1KernelPCA(kernel="rbf", gamma=0.1, center=False),
    LpKernelPCA(),
    LpKernelPCA(p=1, kernel="rbf"),
    LpKernelPCA(p=1.5, kernel="precomputed", shift=0.2),
    VRPower(),
    VRPower(center=True),
    VRHeavyBallPower(),
    VRHeavyBallPower(beta=0.5),
    StochasticSCIPI(),
    StochasticSCIPI(degree=2, n_components=1, eta=0.5),
]
FUNCTIONS = {
    l1_kernel_pca: lambda **options: l1_kernel_pca(X @ X.T, **options),
    mixture_proportions: lambda **options: mixture_proportions(X, **options),
    scale_invariant_power: lambda **options: scale_invariant_power(lambda x: X.T @ (X @ x), np.ones(4), **options),
    block_power: lambda **options: block_power([lambda x: X.T @ (X @ x)], [np.ones(4)], **options),
}
# By their default values; these have others.
SORTS = {"n_components": "integer", "gamma": "number", "degree": "number", "beta": "number", "batch_size": None}
WRONG = {
    "integer": (True, 2.5, "3", [1], 0, -1),
    "number": (True, np.nan, "much", [1.0], np.inf, -1.5),
    "flag": ("no", 1, None),
}
WORDS = {"integer": "a positive integer.*", "number": ".*", "flag": "True or False, "}


# Some checks allow a few steps only.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
# One needs scipy's array API, which is set before scipy is imported.
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API")
@pytest.mark.parametrize("estimator", CHECKED, ids=str)
def test_scikit_learn_checks(estimator):
    check_estimator(estimator, on_skip=None)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_columns_have_names_and_copies_give_the_same(kind):
    rows = load_iris(as_frame=True).data
    model = kind(n_components=2).set_output(transform="pandas")
    if "random_state" in model.get_params():
        model.set_params(random_state=0)
    frame = model.fit_transform(rows)
    assert list(frame.columns) == [f"{kind.__name__.lower()}{i}" for i in range(2)]
    assert list(model.get_feature_names_out()) == list(frame.columns)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).transform(rows), model.transform(rows))
    np.testing.assert_array_equal(clone(model).fit_transform(rows), frame)


def sorts(call):
    """Names of parameters by their sort."""
    for name, parameter in inspect.signature(call).parameters.items():
        sort = {bool: "flag", int: "integer", float: "number"}.get(type(parameter.default))
        yield name, SORTS.get(name, sort)


@pytest.mark.parametrize("call", [*ESTIMATORS, *FUNCTIONS], ids=lambda call: call.__name__)
def test_wrong_kinds_of_parameters_are_refused_by_name(call):
    run = FUNCTIONS.get(call, lambda **options: call(**options).fit(X))
    tried = [(name, sort, value) for name, sort in sorts(call) if sort for value in WRONG[sort]]
    assert len(tried) > 10
    for name, sort, value in tried:
        with pytest.raises(ValueError, match=rf"^{name} must be {WORDS[sort]}got "):
            run(**{name: value})


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


LATE = [
    (KLNMF(3, max_iter=9, tol=1e-9, random_state=0), "max_iter=9 sweeps did not meet tol=1e-09"),
    (L1KernelPCA(1, max_iter=1), "component 0 still moved after max_iter=1 sign updates"),
    (LpKernelPCA(max_iter=1, random_state=0), "component 0 still moved after max_iter=1 steps"),
    (VRPower(max_epochs=1, random_state=0), "component 0 did not reach tol=1e-06 in max_epochs=1"),
    (StochasticSCIPI(max_epochs=1, batch_size=2, random_state=0), "did not reach tol=1e-06 in max_epochs=1"),
]


@pytest.mark.parametrize("method", ["fit", "fit_transform"])
@pytest.mark.parametrize(("estimator", "message"), LATE, ids=str)
def test_warnings_say_what_ended_and_point_at_the_caller(estimator, message, method):
    rows = np.random.default_rng(1).gamma(0.5, size=(200, 12))
    with pytest.warns(ConvergenceWarning, match=message) as caught:
        getattr(estimator, method)(rows)
    assert {warning.filename for warning in caught} == {__file__}


def test_warnings_of_transform_and_of_functions_point_at_the_caller():
    rows = np.random.default_rng(1).gamma(0.5, size=(200, 12))
    model = KLNMF(3, max_iter=500, tol=1e-3, random_state=0).fit(rows).set_params(max_iter=1, tol=1e-9)
    for call in (lambda: model.transform(rows), lambda: l1_kernel_pca(rows @ rows.T, max_iter=1)):
        with pytest.warns(ConvergenceWarning) as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}
