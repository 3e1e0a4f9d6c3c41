"""Every family estimates what it says, with the variance it says."""

import pytest
import torch
from features_table import POSITIVE, D, data, exact_kernel, paper_second_moment
from pairwise import pairs

from favor import features

SAMPLINGS = {"iid": {"orthogonal": False}, "orthogonal": {}, "antithetic": {"antithetic": True}}


def assert_unbiased(estimates: torch.Tensor, truth: torch.Tensor) -> None:
    """Estimates `[draws, ...]` of truth: no entry is further off than 5 standard errors."""
    standard_error = estimates.std(0) / estimates.shape[0] ** 0.5
    z = (estimates.mean(0) - truth) / standard_error
    assert z.abs().max() < 5, f"z = {z.abs().max():.1f}"


@pytest.mark.parametrize(
    *pairs(family=POSITIVE, alpha=(0.0, -0.5, 0.3), sampling=SAMPLINGS, num_features=(1, 7)),
    ids=lambda value: getattr(value, "name", None),
)
def test_positive_features_are_unbiased(family, alpha, sampling, num_features):
    x, y = data()
    rf = family(alpha=alpha)
    params = rf.fit(x, y)
    generator = torch.Generator().manual_seed(1)
    omega = rf.draw(num_features, D, generator=generator, batch_shape=(20000,), **SAMPLINGS[sampling])
    log_x, log_y = rf.log_phi(x, omega, params), rf.log_phi(y, omega, params, side="key")
    estimates = log_x.exp() @ log_y.exp().transpose(-1, -2) / num_features
    assert_unbiased(estimates, exact_kernel(x, y, alpha))


@pytest.mark.parametrize(*pairs(form=("sincos", "phase"), alpha=(0.0, -0.5), sampling=SAMPLINGS))
def test_trigonometric_features_are_unbiased(form, alpha, sampling):
    x, y = data()
    rf = features.TrigRF(form=form, alpha=alpha)
    generator = torch.Generator().manual_seed(1)
    omega = rf.draw(6, D, generator=generator, batch_shape=(20000,), **SAMPLINGS[sampling])
    assert_unbiased(rf.kernel(x, y, omega), exact_kernel(x, y, alpha))


@pytest.mark.parametrize("family", POSITIVE, ids=lambda f: f.name)
def test_kernel_is_the_mean_of_products_of_features(family):
    x, y = data(scale=3.0)
    rf = family(alpha=-0.2)
    params = rf.fit(x, y)
    omega = rf.draw(9, D, generator=torch.Generator().manual_seed(2))
    log_x, log_y = rf.log_phi(x, omega, params), rf.log_phi(y, omega, params, side="key")
    direct = (log_x[:, None] + log_y[None]).exp().mean(-1)
    torch.testing.assert_close(rf.kernel(x, y, omega, params), direct, rtol=1e-10, atol=0)


@pytest.mark.parametrize("family", POSITIVE, ids=lambda f: f.name)
def test_directions_give_the_features_up_to_query_terms(family):
    """What attention uses (directions, offset, key bias) is log_phi with the query's own terms left out."""
    x, y = data()
    rf = family()
    params = rf.fit(x, y)
    omega = rf.draw(9, D, generator=torch.Generator().manual_seed(2))
    to_query, to_key, offset = rf.directions(omega, params)
    log_product = (x @ to_query.T)[:, None] + (y @ to_key.T + offset + rf.key_bias(y, params)[:, None])[None]
    full = rf.log_phi(x, omega, params)[:, None] + rf.log_phi(y, omega, params, side="key")[None]
    difference = full - log_product  # [L, S, M], must depend on the query alone
    torch.testing.assert_close(difference, difference[:, :1, :1].expand_as(difference), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", POSITIVE, ids=lambda f: f.name)
def test_second_moment_is_equation_15(family):
    x, y = data()
    rf = family()
    params = rf.fit(x, y)
    second = paper_second_moment(x, y, params)
    torch.testing.assert_close(rf.log_second_moment(x, y, params).exp(), second, rtol=1e-11, atol=0)
    variance = second - exact_kernel(x, y, 0.0).square()
    torch.testing.assert_close(rf.log_variance(x, y, params).exp(), variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("family", POSITIVE, ids=lambda f: f.name)
def test_rho_is_the_mean_of_the_log_relative_second_moment(family):
    x, y = data()
    rf = family()
    params = rf.fit(x, y)
    expected = rf.log_relative_second_moment(x, y, params).mean()
    torch.testing.assert_close(params.rho(features.Moments.from_samples(x, y)), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("family", POSITIVE, ids=lambda f: f.name)
@pytest.mark.parametrize("alpha", [0.0, -0.5])
def test_sampled_variance_is_equation_15(family, alpha):
    x, y = data(2, 2, scale=0.2)
    rf = family(alpha=alpha)
    params = rf.fit(x, y)
    draws = 400_000
    omega = rf.draw(draws, D, orthogonal=False, antithetic=False, generator=torch.Generator().manual_seed(5))
    log_x, log_y = rf.log_phi(x, omega, params), rf.log_phi(y, omega, params, side="key")
    products = (log_x[:, None] + log_y[None]).exp()  # [L, S, draws]
    squares = (products - exact_kernel(x, y, alpha)[..., None]).square()
    z = (squares.mean(-1) - rf.log_variance(x, y, params).exp()) / (squares.std(-1) / draws**0.5)
    assert z.abs().max() < 5


@pytest.mark.parametrize("form", ["sincos", "phase"])
def test_sampled_variance_of_trigonometric_features(form):
    x, y = data(3, 3)
    rf = features.TrigRF(form=form)
    draws = 200_000
    generator = torch.Generator().manual_seed(5)
    omega = rf.draw(2 if form == "sincos" else 1, D, generator=generator, batch_shape=(draws,))
    exact = exact_kernel(x, y, 0.0)
    squares = (rf.kernel(x, y, omega) - exact).square()
    relative = torch.expm1(rf.log_relative_second_moment(x, y))
    z = (squares.mean(0) - relative * exact.square()) / (squares.std(0) / draws**0.5)
    assert z.abs().max() < 5


def test_kernel_on_random_directions_does_not_overflow():
    x = torch.full((1, D), 300.0)
    rf = features.PosRF()
    params = rf.fit(x, -x)
    omega = rf.draw(8, D, generator=torch.Generator().manual_seed(0)).float()
    assert rf.log_phi(x, omega, params).isfinite().all()
    assert rf.log_second_moment(x, -x, params).isfinite().all()


def test_unknown_names_list_the_known_ones():
    known = "aderf, cderf, elu, gerf, landmark, pos, relu, saderf, sderf, trig, wderf, or a backend"
    with pytest.raises(ValueError, match=rf"{known} \(favor\+, .*landmark\); got 'perf'"):
        features.get("perf")


def test_odd_number_of_sincos_features_is_refused():
    with pytest.raises(ValueError, match="even, got 7"):
        features.TrigRF().draw(7, D)


def test_side_is_checked():
    x, y = data()
    rf = features.PosRF()
    with pytest.raises(ValueError, match="side must be"):
        rf.log_phi(x, rf.draw(2, D), rf.fit(x, y), side="keys")
