"""Square roots of matrices by products alone, and the features that take theirs so."""

import pytest
import torch
from features_table import theorem_4_1

import favor
from favor import features
from favor.features.linalg import newton_schulz


def spread(condition: float, d: int = 32, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Symmetric positive matrices of a given condition, `[3, d, d]`."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(3, d, d, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), d, dtype=torch.float64)
    return (7 * basis * values @ basis.transpose(-1, -2)).to(dtype)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
def test_roots_are_those_of_the_eigenvalues(condition):
    matrix = spread(condition)
    values, vectors = torch.linalg.eigh(matrix)
    root, inverse = newton_schulz(matrix)
    assert torch.equal(root, root.transpose(-1, -2))
    expected = vectors * values.sqrt().unsqueeze(-2) @ vectors.transpose(-1, -2)
    torch.testing.assert_close(root, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(inverse @ root, torch.eye(32, dtype=torch.float64).expand(3, -1, -1), rtol=0, atol=1e-5)


def test_roots_of_zeros_and_of_single_precision():
    root, inverse = newton_schulz(torch.zeros(2, 4, 4))
    assert torch.equal(root, torch.zeros(2, 4, 4))
    assert inverse.isfinite().all()
    matrix = spread(1e3, dtype=torch.float32)
    root, _ = newton_schulz(matrix)
    assert (root @ root - matrix).norm() < 1e-5 * matrix.norm()


@pytest.mark.parametrize("family", [features.SDERF, features.ADERF])
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_t13_the_estimator_is_that_of_the_eigendecomposition(family, size):
    """Single precision, norms as in trained heads (|x|^2 up to about 300), d = 32."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(0.3, -0.7, 32)
    x = size * (torch.randn(12, 200, 32, generator=generator) * scales + 0.3)
    y = size * (torch.randn(12, 200, 32, generator=generator) * scales.flip(0) - 0.3)
    params = [family(factorization=form).fit(x, y) for form in ("eigh", "newton_schulz")]
    for expected, found in zip(*([own.sigma, *theorem_4_1(own)[1:]] for own in params), strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_far_beyond_the_norms_of_heads_the_parameters_stay_valid():
    x = 100 * torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    params = features.SDERF(factorization="newton_schulz").fit(x, x)
    assert (torch.linalg.eigvalsh(params.sigma) > 0.5).all()  # a finite variance, Theorem 4.1


@pytest.mark.parametrize("size", [100.0, 1e3, 1e4])
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("form", ["newton_schulz", "cholesky"])
def test_far_beyond_the_norms_of_heads_few_tokens_are_enough(form, tokens, size):
    """Moments that are singular up to rounding."""
    x, y = size * torch.randn(2, 100, tokens, 16, generator=torch.Generator().manual_seed(0))
    params = features.SDERF(factorization=form).fit(x, y)
    if form == "cholesky":
        expected = torch.eye(16) + features.Moments.from_samples(x, y).pair_second_moment
    else:
        expected = features.SDERF(factorization="eigh").fit(x, y).sigma
    assert params.log_det_sigma.isfinite().all()
    assert (params.sigma - expected).norm() < 1e-3 * expected.norm()


def test_gradients_pass_where_eigenvalues_are_equal():
    matrix = torch.eye(4, dtype=torch.float64, requires_grad=True)
    newton_schulz(matrix)[0].sum().backward()
    torch.testing.assert_close(matrix.grad, torch.full((4, 4), 0.5, dtype=torch.float64))


def test_the_option_reaches_the_backend():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=generator).unbind(0)
    outs = [
        favor.favor_attention(q, k, v, features=features.get("sderf", factorization=form), num_features=64)
        for form in ("eigh", "newton_schulz", "cholesky")
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outs[0], outs[2], rtol=1e-4, atol=1e-5)
    config = favor.FavorConfig(features="aderf", factorization="newton_schulz")
    assert favor.config.feature_family("favor#", config) == ("aderf", {"factorization": "newton_schulz"})
