"""The scikit-learn transformer: scikit-learn's own checks, unbiasedness, accuracy, and what surrounds it."""

import pickle

import numpy as np
import pytest
import torch
from pairwise import pairs
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.estimator_checks import check_estimator

import favor
from favor.features import Parameters
from favor.sklearn import SoftmaxKernelSampler

FEATURES = ("trig", "pos", "gerf", "saderf", "aderf", "sderf", "cderf")


def sets(n: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of width 4 and of different spread, with means that are not zero."""
    source, spread = np.random.default_rng(0), np.linspace(1.5, 0.5, 4)
    x, y = source.normal(size=(n, 4)) * spread + 0.6, source.normal(size=(5, 4)) * spread[::-1] - 0.4
    return 0.3 * x, 0.3 * y


def exact(kernel: str, scale: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.exp(scale * x @ y.T) if kernel == "softmax" else rbf_kernel(x, y, gamma=scale / 2)


# One of scikit-learn's checks has rows of norm 100 and more, whose softmax kernel float64 cannot hold.
@pytest.mark.filterwarnings("ignore:features up to exp")
# One needs scipy's array API, which is set before scipy is imported.
@pytest.mark.filterwarnings("ignore:.*SCIPY_ARRAY_API")
@pytest.mark.parametrize(
    "estimator",
    [SoftmaxKernelSampler(n_components=10)]
    + [SoftmaxKernelSampler(name, n_components=10, kernel="gaussian") for name in ("trig", "cderf")],
)
def test_scikit_learn_checks(estimator):
    check_estimator(estimator, on_skip=None)


@pytest.mark.parametrize(*pairs(features=FEATURES, kernel=("softmax", "gaussian"), two_sets=(False, True)))
def test_unbiased(features, kernel, two_sets):
    """The mean over many draws is the kernel, with one set as with two; no entry is off by 5 standard errors."""
    x, y = sets()
    draws = []
    for seed in range(110):
        sampler = SoftmaxKernelSampler(features, 22, kernel=kernel, scale=0.7, random_state=seed)
        sampler.fit(x, keys=y if two_sets else None)
        z = sampler.transform(x)
        draws.append(z @ (sampler.transform_keys(y) if two_sets else z).T)
    truth = exact(kernel, 0.7, x, y if two_sets else x)
    error = np.std(draws, axis=0, ddof=1) / len(draws) ** 0.5
    # sin/cos pairs are exact on the diagonal.
    off = np.abs(np.mean(draws, axis=0) - truth)
    assert (off <= 5 * error + 1e-12).all()
    assert error.max() < 0.2


@pytest.mark.parametrize("features", FEATURES)
def test_one_set_has_one_map(features):
    x, _ = sets()
    sampler = SoftmaxKernelSampler(features, 8, random_state=0).fit(x + 1)
    np.testing.assert_array_equal(sampler.transform(x), sampler.transform_keys(x))
    assert np.allclose(sampler.center_, (x + 1).mean(0) if features == "cderf" else 0)


@pytest.mark.parametrize("features", FEATURES[1:])
def test_one_map_keeps_the_optimum(features):
    """Both maps of a family fitted to one set are a rotation of the one map here, with the same variance."""
    x = torch.from_numpy(sets(9)[0] + 1)
    sampler = SoftmaxKernelSampler(features, 8, random_state=0).fit(x.numpy())
    centred = x - torch.from_numpy(sampler.center_)
    z = (centred[:, None] + centred).flatten(0, 1)
    rf = favor.features.get(features)
    expected = rf.log_relative_second_moment(x, x, rf.fit(x, x)).flatten()
    torch.testing.assert_close(sampler.parameters_.log_relative_second_moment(z), expected, rtol=0, atol=1e-9)


def test_clone_pickle_and_names():
    x = load_iris(as_frame=True).data
    sampler = SoftmaxKernelSampler("cderf", 6, scale=0.1, random_state=3).set_output(transform="pandas")
    frame = sampler.fit_transform(x)
    assert list(frame.columns) == [f"softmaxkernelsampler{i}" for i in range(6)]
    assert list(sampler.get_feature_names_out()) == list(frame.columns)
    assert list(sampler.feature_names_in_) == list(x.columns)
    assert sampler.n_features_in_ == 4
    assert sampler.omega_.shape == (6, 4)
    assert isinstance(sampler.parameters_, Parameters)
    again = pickle.loads(pickle.dumps(sampler))
    np.testing.assert_array_equal(again.transform(x), frame)
    trig = SoftmaxKernelSampler("trig", 5, kernel="gaussian", random_state=0)
    assert trig.fit_transform(x).shape == (len(x), 5)
    assert trig.parameters_ is None
    copy = clone(sampler)
    assert not hasattr(copy, "omega_")
    np.testing.assert_array_equal(copy.fit_transform(x), frame)


def test_a_kernel_beyond_float64_is_cut_with_a_warning():
    x = np.full((3, 4), 40.0) * np.array([[1.0], [0.5], [0.1]])
    sampler = SoftmaxKernelSampler("trig", 10, random_state=0).fit(x)
    with pytest.warns(RuntimeWarning, match="are cut at exp\\(350\\).*Lower scale"):
        z = sampler.transform(x)
    assert np.isfinite(z @ z.T).all()


@pytest.mark.filterwarnings("ignore:features up to exp")
@pytest.mark.parametrize("features", FEATURES)
def test_gaussian_features_are_finite_at_any_norm(features):
    x, y = sets()
    for norm in (1e-8, 1.0, 1e3):
        sampler = SoftmaxKernelSampler(features, 8, kernel="gaussian", random_state=0).fit(norm * x, keys=norm * y)
        assert np.isfinite(sampler.transform(norm * x)).all(), norm
        assert np.isfinite(sampler.transform_keys(norm * y)).all(), norm


@pytest.mark.parametrize(
    ("options", "width", "message"),
    [
        ({"features": "wderf"}, 4, "features must be one of trig, .*; got 'wderf'"),
        ({"kernel": "rbf"}, 4, "kernel must be one of softmax, gaussian; got 'rbf'"),
        ({"n_components": 0}, 4, "n_components must be an integer from 1 to 262144, got 0"),
        ({"scale": 0.0}, 4, "scale must be a positive number, got 0.0"),
        ({}, 3, "keys must have 4 features as X has, got 3"),
    ],
)
def test_bad_parameters_are_refused_by_fit(options, width, message):
    x, y = sets()
    sampler = SoftmaxKernelSampler(**options)
    with pytest.raises(ValueError, match=message):
        sampler.fit(x, keys=y[:, :width])
