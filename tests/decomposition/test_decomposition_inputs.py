"""What all of favor.decomposition have in common: scikit-learn's checks, names, devices, refusals, warnings."""

import inspect

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator
from spectra import laplacian

from favor.decomposition import (
    KLNMF,
    L1KernelPCA,
    LpKernelPCA,
    StochasticSCIPI,
    VRHeavyBallPower,
    VRPower,
    l1_kernel_pca,
)
from favor.decomposition.mixture import mixture_proportions
from favor.decomposition.power import block_power, scale_invariant_power

X = np.random.default_rng(0).uniform(0.5, 2.0, size=(30, 4))
ESTIMATORS = (KLNMF, L1KernelPCA, LpKernelPCA, VRPower, VRHeavyBallPower, StochasticSCIPI)
CHECKED = [
    KLNMF(max_iter=40),
    L1KernelPCA(),
    L1KernelPCA(kernel="rbf", bit_flips=True),
    L1KernelPCA(kernel="precomputed"),
    LpKernelPCA(),
    LpKernelPCA(p=1.5, kernel="precomputed", shift=0.2),
    VRPower(center=True),
    VRHeavyBallPower(),
    StochasticSCIPI(),
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


POWER = {"p": 4, "tol": 1e-12, "max_iter": 5000, "random_state": 0}
STEPS = {"batch_size": 30, "random_state": 0}
SKEWED = np.random.default_rng(0).gamma(1.0, size=(60, 6)) * [3, 2, 1, 1, 1, 1]
FACTORS = {name: np.random.default_rng(1).uniform(0.01, 1, size) for name, size in (("W", (60, 3)), ("H", (3, 6)))}
PLACED = [
    L1KernelPCA(2),
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
devices = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])


def fitted(model):
    return {key: value for key, value in vars(model).items() if key.endswith("_") and hasattr(value, "shape")}


def close(found, expected, rtol):
    found, expected = (np.abs(np.asarray(part.cpu() if torch.is_tensor(part) else part)) for part in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * expected.max())


@devices
@pytest.mark.parametrize("estimator", PLACED, ids=lambda estimator: type(estimator).__name__)
def test_tensors_stay_where_they_live_and_give_what_arrays_give(estimator, device):
    x, new = torch.tensor(SKEWED, device=device), torch.tensor(SKEWED[:5] + 0.1, device=device)
    arrays, model, single = (clone(estimator) for _ in range(3))
    start = FACTORS if isinstance(estimator, KLNMF) else {}
    expected = arrays.fit_transform(SKEWED, **start)
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
            close(found, getattr(arrays, name)(SKEWED[:5] + 0.1), 1e-6 if own is model else 5e-3)
    # What was fitted on one kind takes the other, and integers count as float64.
    assert isinstance(model.transform(SKEWED), np.ndarray)
    assert isinstance(arrays.transform(new), torch.Tensor)
    whole = SKEWED.round().astype(int) + 1
    found = clone(estimator).fit_transform(torch.tensor(whole), **start)
    np.testing.assert_array_equal(found, clone(estimator).fit_transform(torch.tensor(whole).double(), **start))


@devices
def test_tensors_of_functions_stay_where_they_live(device):
    likelihoods = torch.tensor(SKEWED, device=device)
    result = mixture_proportions(likelihoods)
    np.testing.assert_allclose(result.proportions.cpu(), mixture_proportions(SKEWED).proportions, atol=1e-8)
    kernel = likelihoods @ likelihoods.T
    found = l1_kernel_pca(kernel, 2)
    power = scale_invariant_power(lambda x: kernel @ x, kernel[0])
    parts = (result.proportions, found.scores, found.signs, found.alphas, power.x)
    assert {part.device.type for part in parts} == {device}
    assert abs(float(power.x @ torch.linalg.eigh(kernel).eigenvectors[:, -1])) > 1 - 1e-8


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


NEGATIVE, EQUAL, W, H = X - 1, np.full((7, 3), 0.1), np.ones((30, 3)), np.ones((3, 4))
REFUSED = [
    (L1KernelPCA(kernel="poly"), X, "kernel must be one of linear, rbf, precomputed or a function; got 'poly'"),
    (LpKernelPCA(kernel=np.eye(3)), X, "kernel must be one of linear, rbf, precomputed or a function; got array"),
    (L1KernelPCA(gamma=0), X, "gamma must be a positive number or None, got 0"),
    (L1KernelPCA(kernel="precomputed"), X, "X must be a square matrix"),
    (L1KernelPCA(kernel="precomputed"), np.triu(np.ones((3, 3))), "X must be symmetric"),
    (LpKernelPCA(kernel="precomputed", center=False), -np.eye(3), "X must be positive semidefinite, got -1"),
    (L1KernelPCA(kernel=lambda x, y: x @ y.T / 0), X, "kernel gave NaN or infinity"),
    (L1KernelPCA(kernel=lambda x, y: x[:, 0]), X, r"kernel must give \[30, 30\], got \[30\]"),
    (L1KernelPCA(), X[:1], "minimum of 2 is required"),
    (L1KernelPCA(), EQUAL, "X must have rows that differ"),
    (L1KernelPCA(kernel="rbf"), EQUAL, "X must have rows that differ"),
    (LpKernelPCA(), EQUAL, "X must have rows that differ"),
    (LpKernelPCA(p=0.5), X, "p must be a finite number of at least 1.*got 0.5"),
    (LpKernelPCA(None), X, "n_components must be a positive integer, got None"),
    (VRPower(), 0 * EQUAL, "X must have rows that are not zero"),
    (VRPower(center=True), EQUAL, "X must have rows that differ"),
    (VRPower(center=True), 1e7 / 3 * EQUAL, "X must have rows that differ"),
    (VRHeavyBallPower(), 0 * EQUAL, "X must have rows that are not zero"),
    (VRHeavyBallPower(center=True), EQUAL, "X must have rows that differ"),
    (StochasticSCIPI(), 0 * EQUAL, "X must have rows that are not zero"),
    (StochasticSCIPI(degree=1), 0 * EQUAL, "X must have rows that are not zero"),
    (VRPower(5), X, "n_components must be at most the 4 features"),
    (VRPower(batch_size=0), X, "batch_size must be"),
    (VRPower(batch_size=1.5), X, "batch_size must be"),
    (VRPower(eta=0.0), X, "eta must be"),
    (VRHeavyBallPower(beta=1.0), X, r"beta must be in \[0, 1\) or 'rule'"),
    (VRHeavyBallPower(eigenvalues=(1.0,)), X, "2 falling numbers"),
    (VRHeavyBallPower(eigenvalues=(1.0, 1.0)), X, "2 falling numbers"),
    (VRHeavyBallPower(eigenvalues=(1.0, -0.1)), X, "2 falling numbers"),
    (VRHeavyBallPower(eigenvalues="exact"), X, "2 falling numbers"),
    (StochasticSCIPI("l2"), X, "objective must be"),
    (StochasticSCIPI(lambda rows, x: x), X, "degree must be given"),
    (StochasticSCIPI(lambda rows, x: rows @ x, degree=2), X, r"must give the mean gradient, a tensor \(4,\)"),
    (StochasticSCIPI(lambda rows, x: 1.0, degree=2), X, "must give the mean gradient"),
    (StochasticSCIPI("mixture", degree=2), X, "degree of objective='mixture' is 0"),
    (StochasticSCIPI("mixture", n_components=2), X, "n_components must be 1 for objective='mixture'"),
    (StochasticSCIPI("mixture"), NEGATIVE, "Negative values in data"),
    (StochasticSCIPI("mixture"), np.diag([1.0, 0]), "row of zeros, an observation that is impossible"),
    (StochasticSCIPI(degree=0.5), X, "degree must be at least 1"),
    (KLNMF(31), X, "n_components must be at most 30"),
    (KLNMF(init="nndsvd"), X, 'init must be "random" or "custom", got \'nndsvd\''),
    (KLNMF(2), torch.full((4, 3), torch.nan), "NaN"),
    *((KLNMF(2), kind(NEGATIVE), "Negative values in data") for kind in (np.asarray, sparse.csr_array, torch.tensor)),
]


@pytest.mark.parametrize(("estimator", "rows", "message"), REFUSED)
def test_fit_refuses(estimator, rows, message):
    for given in (rows, torch.tensor(rows)) if isinstance(rows, np.ndarray) else (rows,):
        with pytest.raises(ValueError, match=message):
            estimator.fit(given)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: l1_kernel_pca(W), ValueError, r"K must be a square matrix .*, got shape \(30, 3\)"),
        (lambda: l1_kernel_pca([[1.0, 2.0], [0.0, 1.0]]), ValueError, "K must be symmetric.* differ by 2"),
        (lambda: l1_kernel_pca(np.diag([1.0, -1.0])), ValueError, "K must be positive semidefinite, got -1"),
        (lambda: l1_kernel_pca(np.diag([1.0, np.nan])), ValueError, "K must be finite"),
        (lambda: KLNMF(2).fit(torch.tensor(X).to_sparse()), TypeError, "X must be a dense tensor.*torch.sparse_coo"),
        (lambda: KLNMF(2, random_state=0).fit(X).transform(NEGATIVE), ValueError, "Negative values in data"),
        (lambda: KLNMF(2, random_state=0).fit(X).transform(torch.tensor(W)), ValueError, "4 features"),
        (lambda: KLNMF(2, random_state=0).fit(X).inverse_transform(W), ValueError, r"X must be \[n, 2\].*\[30, 3\]"),
        (lambda: KLNMF(3).fit(X, W=W), ValueError, 'W and H are a start for init="custom"'),
        (lambda: KLNMF(3, init="custom").fit(X, W=W), ValueError, r'init="custom" needs H, of shape \[3, 4\]'),
        (lambda: KLNMF(3, init="custom").fit(X, W=W[1:], H=H), ValueError, r"W must be \[30, 3\], .*, got \[29, 3\]"),
        (lambda: KLNMF(3, init="custom").fit(X, W=W, H=-H), ValueError, r"H must be \[3, 4\], finite and nonneg"),
    ],
)
def test_what_else_is_refused(run, error, message):
    with pytest.raises(error, match=message):
        run()


@pytest.mark.parametrize("estimator", [L1KernelPCA(4), LpKernelPCA(4), LpKernelPCA(4, kernel=lambda a, b: a @ b.T)])
def test_fewer_components_where_the_rank_is_lower(estimator):
    rows = SKEWED[:20, :1] * np.ones(6)
    assert estimator.fit(rows).n_components_ == 1
    assert estimator.transform(rows).shape == (20, 1)


ONES, ZEROS = torch.ones(2).double(), torch.zeros(2).double()


@pytest.mark.parametrize(
    ("gradient", "start", "options", "message"),
    [
        (lambda x: 0 * x, ONES, {}, "gradient gave zeros, which have no direction; start elsewhere"),
        (lambda x: x * np.inf, ONES, {}, "gradient gave NaN or infinity; rescale"),
        (lambda x: x[:1], ONES, {}, r"gradient must give shape \(2,\), got \(1,\)"),
        (lambda x: x, ZEROS, {}, "start must have a direction, got zeros"),
        (lambda x: x, ONES[:0], {}, "start must have a direction, got zeros or no entries"),
        (lambda x: x, ONES * np.nan, {}, "start must be finite"),
        (lambda x: x, ONES[None], {}, r"start must be a real vector \[d\], got shape \(1, 2\)"),
        (lambda x: x, ONES, {"shift": -1.0}, "shift must be above -1, .*got -1.0"),
        ([lambda x: x], [ONES, ONES], {}, "must have one entry per block.*got 1, 2 and 2"),
        ([lambda x: x], [ONES], {"steps": [None, 1.0]}, "got 1, 1 and 2"),
        ([], [], {}, "there must be a block"),
        ([lambda x: x], [ONES], {"steps": [0.0]}, r"steps\[0\] must be a positive number or None, got 0.0"),
        ([lambda x, y: x, lambda x, y: 0 * y], [ONES, ONES], {}, r"gradients\[1\] gave zeros"),
        ([lambda x, y: x, lambda x, y: y], [ONES, ZEROS], {}, r"blocks\[1\] must have a direction"),
        ([lambda x: x**3], [2 * ONES], {"steps": [1.0]}, r"gradients\[0\] gave NaN or infinity"),
        ([lambda x: 1e308 * ONES], [ONES], {"steps": [9.0]}, r"blocks\[0\] grew without bound; choose steps\[0\] sm"),
    ],
)
def test_what_power_iteration_refuses(gradient, start, options, message):
    with pytest.raises(ValueError, match=message):
        (block_power if isinstance(start, list) else scale_invariant_power)(gradient, start, **options)


LATE = [
    (KLNMF(3, max_iter=9, tol=1e-9, random_state=0), "max_iter=9 sweeps did not meet tol=1e-09"),
    (L1KernelPCA(1, max_iter=1), "component 0 still moved after max_iter=1 sign updates"),
    (LpKernelPCA(max_iter=1, random_state=0), "component 0 still moved after max_iter=1 steps"),
    (VRPower(max_epochs=1, random_state=0), "component 0 did not reach tol=1e-06 in max_epochs=1"),
    (StochasticSCIPI(max_epochs=1, batch_size=2, random_state=0), "did not reach tol=1e-06 in max_epochs=1"),
]


def test_warnings_say_what_ended_and_point_at_the_caller():
    rows = np.random.default_rng(1).gamma(0.5, size=(200, 12))
    nmf = KLNMF(3, max_iter=500, tol=1e-3, random_state=0).fit(rows).set_params(max_iter=1, tol=1e-9)
    calls = [(getattr(one, method), message) for one, message in LATE for method in ("fit", "fit_transform")]
    calls += [(nmf.transform, "max_iter=1"), (lambda x: l1_kernel_pca(x @ x.T, max_iter=1), "still moved")]
    for call, message in calls:
        with pytest.warns(ConvergenceWarning, match=message) as caught:
            call(rows)
        assert {warning.filename for warning in caught} == {__file__}
