"""The variance figure against formulas written out, the library, and small runs of the program."""

import numpy as np
import pytest
import torch

from favor.eval.papers import variance


def sets(sigma: float = 0.4, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(sigma * rows for rows in variance.draw_sets("heterogen", length, {}, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0])
def test_trigonometric_features(sigma):
    x, y = sets(sigma)
    r = (x[:, None] - y).square().sum(-1)
    phase = variance.log_relative_variance("trig (phase)", x, y)
    torch.testing.assert_close(phase, (r.exp() + (-r).exp() / 2 - 1).log(), rtol=0, atol=1e-9)
    pair = variance.log_relative_variance("trig (sin/cos)", x, y)
    torch.testing.assert_close(pair, (2 * (torch.cosh(r) - 1)).log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", variance.FAMILIES)
@pytest.mark.parametrize("sigma", [0.02, 0.4])
def test_the_fast_form_is_the_formula_of_the_library(name, sigma):
    x, y = sets(sigma, length=80)
    rf = variance.FAMILIES[name]
    moment = rf.log_relative_second_moment(x, y, rf.fit(x, y))
    expected = moment + torch.log(-torch.expm1(-moment))
    torch.testing.assert_close(variance.log_relative_variance(name, x, y), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["saderf", "aderf", "cderf"])
def test_dead_pixels_do_no_harm(name):
    """Coordinates that are zero in one set or in both, with next to no regularisation, against SDERF's number."""
    x, y = sets(1.0, length=300)
    x[:, :10] = 0
    y[:, 5:15] = 0
    y = y[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    value = variance.log_relative_variance(name, x, y).mean()
    assert value < 1.5 * variance.log_relative_variance("sderf", x, y).mean()


def test_resize_averages_over_areas():
    images = np.arange(2 * 32 * 32).reshape(2, 32, 32)
    blocks = images.reshape(2, 8, 4, 8, 4).mean((2, 4))
    np.testing.assert_allclose(variance.resize(images), blocks)
    np.testing.assert_allclose(variance.resize(np.ones((1, 28, 28))), np.ones((1, 8, 8)))
    row = np.array([[[6.0, 3.0, 0.0]] * 3])
    np.testing.assert_allclose(variance.resize(row, 2)[0, 0], [(6 + 1.5) / 1.5, 1.5 / 1.5])


def test_regimes():
    generator = torch.Generator().manual_seed(0)
    x, y = variance.draw_sets("sphere", 500, {}, generator)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(500, dtype=torch.float64))
    assert y.mean(0).norm() < 0.1
    x, y = variance.draw_sets("heterogen", 2000, {}, generator)
    assert abs(x.mean().item()) < 0.02
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    images = {"mnist": torch.arange(20.0)[:, None].expand(-1, 64), "cifar10": 100 + torch.zeros(3, 64)}
    x, y = variance.draw_sets("mnist", 10, images, generator)
    assert sorted(torch.cat((x, y))[:, 0].tolist()) == list(range(20))
    x, y = variance.draw_sets("mnist/cifar10", 10, images, generator)
    assert x.max() < 20
    assert (y == 100).all()
    assert len(y) == 10


def test_the_program(tmp_path, capsys, monkeypatch, ran):
    for name, value in {"SETS": 2, "VECTORS": 16, "SIGMAS": (0.5, 1.0)}.items():
        monkeypatch.setattr(variance, name, value)
    source = np.random.default_rng(0)
    np.savez(tmp_path / "mnist_10k.npz", x_train=source.integers(0, 256, (40, 28, 28), dtype=np.uint8))
    np.savez(tmp_path / "cifar10_gray_6k.npz", x=source.integers(0, 256, (40, 32, 32), dtype=np.uint8))
    content, markdown = ran(variance, "--images_dir", tmp_path)
    assert content["command"] == "python -m favor.eval.papers.variance --images_dir DATA --name x"
    generator = torch.Generator().manual_seed(2)
    pairs = [variance.draw_sets("heterogen", 16, {}, generator) for _ in range(2)]
    expected = np.mean([variance.log_relative_variance("gerf", 0.5 * x, 0.5 * y).mean() for x, y in pairs])
    value = content["log_relative_variance"]["heterogen"]["gerf"][0]
    assert value == pytest.approx(expected, abs=1e-10)
    assert f" {value:.3f} " in markdown
    assert "holds: heterogen: sderf is below gerf" in capsys.readouterr().out
    np.savez(tmp_path / "mnist_10k.npz", other=np.zeros((2, 28, 28)))
    with pytest.raises(ValueError, match=r"expected the array 'x_train' in .*, got other"):
        variance.load_images(tmp_path)
    (tmp_path / "mnist_10k.npz").unlink()
    with pytest.raises(ValueError, match=r"images_dir must hold mnist_10k.npz, with x_train"):
        variance.load_images(tmp_path)


def test_without_a_folder_scikit_learn_stands_in():
    images, _ = variance.load_images(None)
    for pixels in images.values():
        assert pixels.shape[1] == 64
        assert 0 <= pixels.min() < pixels.max() <= 1


def test_checks_fail_when_the_numbers_say_so(monkeypatch):
    monkeypatch.setattr(variance, "SIGMAS", (1.0,))
    low = {name: [1.0] for name in variance.METHODS}
    results = {"heterogen": {**low, "cderf": [1.06], "gerf": [6.5]}, "cifar10": {**low, "gerf": [10.5]}}
    found = variance.checks(results)
    assert [check.holds for check in found] == [False, True, False]
    assert "0.06" in found[0].numbers
    assert found[2].line().startswith("DOES NOT HOLD: cifar10: sderf")
