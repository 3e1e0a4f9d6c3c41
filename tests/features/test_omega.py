"""Distribution and structure of the random directions."""

import pytest
import torch
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
