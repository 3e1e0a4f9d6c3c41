"""Drawn directions, and the estimates of every family with them: unbiased, with the variance of the formula."""

import pytest
import torch
from features_table import POSITIVE, D, data, each_family, exact_kernel, paper_second_moment
from pairwise import pairs
from scipy import stats

from favor import features
from favor.features import draw_omega


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("head_dim", [1, 4])
def test_any_number_and_dimension(head_dim):
    for num_features in (1, 3, 4, 5, 8, 11):
        assert draw_omega(num_features, head_dim).shape == (num_features, head_dim)


def test_blocks_are_orthogonal():
    omega = draw_omega(11, 4, generator=generator())
    gram = omega @ omega.T
    blocks = torch.arange(11) // 4
    same = (blocks[:, None] == blocks) & ~torch.eye(11, dtype=torch.bool)
    assert gram[same].abs().max() < 1e-12
    assert gram[blocks[:, None] != blocks].abs().min() > 1e-6


@pytest.mark.parametrize("options", [{"orthogonal": False}, {}, {"antithetic": True}], ids=str)
@pytest.mark.parametrize("row", [0, 2, 4])
def test_each_row_is_standard_normal(options, row):
    omega = draw_omega(5, 3, generator=generator(), batch_shape=(20000,), **options)[:, row]
    assert stats.kstest(omega.square().sum(-1), stats.chi2(3).cdf).pvalue > 1e-3
    for coordinate in omega.T:
        assert stats.kstest(coordinate, stats.norm.cdf).pvalue > 1e-3
    covariance = omega.T @ omega / omega.shape[0]
    assert (covariance - torch.eye(3)).abs().max() < 0.05


def test_lengths_are_independent_of_directions_and_each_other():
    omega = draw_omega(3, 3, generator=generator(), batch_shape=(20000,))
    lengths = omega.norm(dim=-1)
    correlation = torch.corrcoef(lengths.T)
    assert (correlation - torch.eye(3)).abs().max() < 5 / 20000**0.5


def test_antithetic_pairs():
    omega = draw_omega(7, 4, antithetic=True, generator=generator())
    torch.testing.assert_close(omega[4:], -omega[:3], rtol=0, atol=0)


def test_same_generator_same_directions():
    one, two = (draw_omega(6, 4, generator=generator(5), batch_shape=(2,)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


def test_drawn_on_the_cpu_whatever_the_default_device():
    rf = features.TrigRF(form="phase")
    expected = rf.draw(6, 4, generator=generator())
    with torch.device("meta"):
        assert torch.equal(rf.draw(6, 4, generator=generator()), expected)
        assert draw_omega(6, 4, orthogonal=False).device.type == "cpu"


SAMPLINGS = {"iid": {"orthogonal": False}, "orthogonal": {}, "antithetic": {"antithetic": True}}


def assert_unbiased(estimates: torch.Tensor, truth: torch.Tensor) -> None:
    """Estimates `[draws, ...]` of truth: no entry is further off than 5 standard errors."""
    standard_error = estimates.std(0) / estimates.shape[0] ** 0.5
    z = (estimates.mean(0) - truth) / standard_error
    assert z.abs().max() < 5, f"z = {z.abs().max():.1f}"


@pytest.mark.parametrize(*pairs(name=POSITIVE, alpha=(0.0, -0.5, 0.3), sampling=SAMPLINGS, num_features=(1, 7)))
def test_positive_features_are_unbiased(name, alpha, sampling, num_features):
    x, y = data()
    rf = POSITIVE[name](alpha=alpha)
    if isinstance(rf, features.CDERF):  # far from the origin, where much depends on the share of the shift in log f_1
        x, y = x + 0.8, y + torch.tensor([1.0, -0.5, 0.7, -1.2])
    params = rf.fit(x, y)
    generator = torch.Generator().manual_seed(1)
    omega = rf.draw(num_features, D, generator=generator, batch_shape=(20000,), **SAMPLINGS[sampling])
    assert_unbiased(rf.kernel(x, y, omega, params), exact_kernel(x, y, alpha))


@pytest.mark.parametrize(*pairs(form=("sincos", "phase"), alpha=(0.0, -0.5), sampling=SAMPLINGS))
def test_trigonometric_features_are_unbiased(form, alpha, sampling):
    x, y = data()
    rf = features.TrigRF(form=form, alpha=alpha)
    generator = torch.Generator().manual_seed(1)
    omega = rf.draw(6, D, generator=generator, batch_shape=(20000,), **SAMPLINGS[sampling])
    assert_unbiased(rf.kernel(x, y, omega), exact_kernel(x, y, alpha))


@each_family
def test_formulas_of_fitted_features(family):
    x, y = data()
    rf = family()
    params = rf.fit(x, y)
    # What attention uses (directions, offset, key bias) is log_phi with the query's own terms left out.
    omega = rf.draw(9, D, generator=torch.Generator().manual_seed(2))
    to_query, to_key, offset = rf.directions(omega, params)
    log_product = (x @ to_query.T)[:, None] + (y @ to_key.T + offset + rf.key_bias(y, params)[:, None])[None]
    full = rf.log_phi(x, omega, params)[:, None] + rf.log_phi(y, omega, params, side="key")[None]
    difference = full - log_product  # [L, S, M], must depend on the query alone
    torch.testing.assert_close(difference, difference[:, :1, :1].expand_as(difference), rtol=0, atol=1e-12)
    # The second moment is the first term of equation 15, and rho the mean of its logarithm.
    second = paper_second_moment(x, y, params)
    torch.testing.assert_close(rf.log_second_moment(x, y, params).exp(), second, rtol=1e-11, atol=0)
    variance = second - exact_kernel(x, y, 0.0).square()
    torch.testing.assert_close(rf.log_variance(x, y, params).exp(), variance, rtol=1e-9, atol=0)
    expected = rf.log_relative_second_moment(x, y, params).mean()
    torch.testing.assert_close(params.rho(features.Moments.from_samples(x, y)), expected, rtol=1e-10, atol=0)


@each_family
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
