"""The centred dense features: their closed form, the shift of the keys, and the weights of wDERF."""

import pytest
import torch
from features_table import D, data, exact_kernel

from favor import features
from favor.features import Parameters
from favor.features.moments import attention_received

EYE = torch.eye(D, dtype=torch.float64)
UNREGULARISED = {"regularization": 0.0, "floor": 0.0}
CENTRED = {
    "cderf": features.CDERF,
    "cderf-cholesky": lambda **options: features.CDERF(factorization="cholesky", **options),
    "wderf": features.WDERF,
    "wderf-cholesky": lambda **options: features.WDERF(factorization="cholesky", **options),
}
each_family = pytest.mark.parametrize("make", CENTRED.values(), ids=CENTRED)


def covariance(rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(0)
    return centred.T @ centred / len(rows)


@each_family
@pytest.mark.parametrize("num_features", [1, 4, 7, 10])
def test_unbiased_far_from_the_origin(make, num_features):
    """The shift is large here: without its share in log f_1 the estimate would be off by orders of magnitude."""
    x, y = data()
    x, y = x + 0.8, y + torch.tensor([1.0, -0.5, 0.7, -1.2])
    rf = make()
    params = rf.fit(x, y)
    assert params.shift.norm() > 1
    omega = rf.draw(num_features, D, generator=torch.Generator().manual_seed(1), batch_shape=(20000,))
    estimates = rf.kernel(x, y, omega, params)
    standard_error = estimates.std(0) / estimates.shape[0] ** 0.5
    assert ((estimates.mean(0) - exact_kernel(x, y, 0.0)) / standard_error).abs().max() < 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_map_is_the_geometric_mean(seed):
    x, y = data(12, 9, seed=seed)
    params = features.CDERF(**UNREGULARISED).fit(x, y)
    F = params.transform.T @ params.transform
    torch.testing.assert_close(F @ covariance(x) @ F, covariance(y), rtol=0, atol=1e-12)
    torch.testing.assert_close(params.transform @ params.inverse, EYE, rtol=0, atol=1e-12)
    torch.testing.assert_close(params.shift, y.mean(0) + F @ x.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.05, 0.3, 0.8, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_cholesky_form_is_near_the_optimum(scale, seed):
    x, y = data(12, 9, scale=scale, seed=seed)
    objective = {
        form: rf.objective(x, y, rf.fit(x, y)).item()
        for form in ("eigh", "cholesky")
        for rf in [features.CDERF(factorization=form, **UNREGULARISED)]
    }
    assert objective["eigh"] - 1e-9 <= objective["cholesky"] <= objective["eigh"] + 0.0075 * D


def outlier() -> tuple[torch.Tensor, torch.Tensor]:
    """One strong direction common to both, as with sink tokens: C1 C2 is beyond the digits of float32."""
    generator = torch.Generator().manual_seed(3)
    d = 64
    direction = torch.nn.functional.normalize(torch.randn(d, generator=generator), dim=0)
    narrow = torch.ones(d)
    narrow[d // 2 :] = 1e-3
    x, y = (
        torch.randn(200, d, generator=generator) * narrow + 1e3 * torch.randn(200, 1, generator=generator) * direction
        for _ in range(2)
    )
    return x, y


@each_family
def test_one_strong_direction_leaves_all_finite(make):
    x, y = outlier()
    rf = make()
    params = rf.fit(x, y)
    omega = rf.draw(7, x.shape[-1], generator=torch.Generator().manual_seed(0)).float()
    assert rf.log_phi(x, omega, params).isfinite().all()
    assert rf.log_phi(y, omega, params, side="key").isfinite().all()
    assert all(part.isfinite().all() for part in rf.directions(omega, params))
    assert rf.objective(x, y, params).isfinite()


@pytest.mark.parametrize("name", ["aderf", "cderf"])
def test_float32_is_near_float64_with_one_strong_direction(name):
    """Eigenvalues below the rounding of the largest are noise; taken at their word they gave 1e10 and more here."""
    x, y = outlier()
    rf = features.get(name)
    single = rf.fit(x, y)
    x, y = x.double(), y.double()
    inverse = torch.linalg.inv(single.transform.double())
    shift = None if single.shift is None else single.shift.double()
    as_double = Parameters(single.transform.double(), inverse, single.factor.double(), shift=shift)
    value, best = (rf.log_relative_second_moment(x, y, p).mean() for p in (as_double, rf.fit(x, y)))
    assert value < best + 1


@pytest.mark.parametrize("num_queries", [1, 3, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_are_the_mean_softmax_row_of_the_sampled_queries(num_queries, masked):
    x, y = data(12, 9, scale=1.5)
    x_mask = torch.arange(12) % 4 != 2 if masked else torch.ones(12, dtype=torch.bool)
    y_mask = torch.arange(9) < 7 if masked else torch.ones(9, dtype=torch.bool)
    seen = x[x_mask]
    rows = seen[((torch.arange(num_queries) + 0.5) / num_queries * len(seen)).long()]
    expected = torch.zeros(9, dtype=torch.float64)
    expected[y_mask] = torch.softmax(0.7 * rows @ y[y_mask].T, -1).mean(0)
    masks = (x_mask, y_mask) if masked else (None, None)
    weights = attention_received(x, y, *masks, num_queries, scale=0.7, is_causal=False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)

    rf = features.WDERF(num_queries=num_queries)
    moments = rf.moments(x, y, *masks, scale=0.7)
    mean = expected @ y
    apart = y - mean
    torch.testing.assert_close(moments.mean_y, 0.7**0.5 * mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(moments.cov_y, 0.7 * apart.T @ (expected[:, None] * apart), rtol=0, atol=1e-12)
    torch.testing.assert_close(moments.mean_x, 0.7**0.5 * seen.mean(0), rtol=0, atol=1e-12)


def test_causal_weights_leave_later_keys_out():
    x, y = data(6, 8)
    weights = attention_received(x, y, None, None, 6, scale=1.0, is_causal=True)
    logits = (x @ y.T).masked_fill(torch.arange(8) > torch.arange(6)[:, None] + 2, -torch.inf)
    torch.testing.assert_close(weights, torch.softmax(logits, -1).mean(0), rtol=0, atol=1e-12)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="factorization must be one of 'auto', 'eigh', 'cholesky'; got 'svd'"):
        features.CDERF(factorization="svd")
    with pytest.raises(ValueError, match="must not be negative"):
        features.CDERF(floor=-1.0)
    with pytest.raises(ValueError, match="num_queries must be from 1 to 16384, got 0"):
        features.WDERF(num_queries=0)
