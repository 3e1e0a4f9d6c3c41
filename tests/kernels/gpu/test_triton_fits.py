"""Parameters and directions from one kernel each against the plain formulas in float64."""

from dataclasses import replace

import pytest
import torch

import favor
from favor.attention.packing import Cleaned
from favor.kernels.gpu import tokens as triton_tokens
from favor.kernels.gpu.fits import fit
from favor.kernels.gpu.moments import pieces
from favor.kernels.gpu.parameters import directions

pytestmark = pytest.mark.usefixtures("poisoned")
SCALE = 0.3
# Kind of the fit, factorization, width, query heads, length of queries and of keys, type, whether there is padding.
CASES = {
    "gerf": ("isotropic", "auto", 24, 2, 600, 40, torch.bfloat16, False),
    "gerf, padding": ("isotropic", "auto", 24, 4, 50, 600, torch.float32, True),
    "saderf": ("diagonal", "eigh", 40, 4, 70, 70, torch.float32, True),
    "sderf": ("symmetric", "newton_schulz", 16, 4, 600, 70, torch.bfloat16, True),
    "sderf, one token": ("symmetric", "newton_schulz", 8, 2, 1, 1, torch.float32, False),
    "aderf": ("asymmetric", "newton_schulz", 12, 2, 70, 70, torch.float32, True),
    "cderf": ("centred", "cholesky", 16, 4, 70, 600, torch.float32, False),
    "wderf": ("centred", "cholesky", 12, 4, 70, 600, torch.float32, False),
    "wderf, padding": ("centred", "cholesky", 12, 4, 1100, 70, torch.bfloat16, True),
}


@pytest.mark.parametrize("name", CASES)
def test_fits(name):
    kind, factorization, width, heads, length, keys, dtype, is_padded = CASES[name]
    torch.manual_seed(0)
    family = favor.features.get(name.split(",")[0], factorization=factorization)
    query, key = (torch.randn(2, n, h, width + 3)[..., :width].transpose(1, 2) for n, h in ((length, heads), (keys, 2)))
    query, key = (1.5 * query + torch.randn(width)).to(dtype), (key @ torch.randn(width, width) / 3 + 0.5).to(dtype)
    masks = [None, None]
    if is_padded:
        masks = [torch.rand(2, n) < 0.7 for n in (length, keys)]
        masks[0][1, : length // 2] = False
    exact = [query.double().unflatten(1, (2, -1)).flatten(2, 3), key.double()]
    groups = heads // 2
    of_rows = [None if m is None else m[:, None].repeat(1, 1, n) for m, n in zip(masks, (groups, 1), strict=True)]
    moments = family.moments(*exact, *of_rows, scale=SCALE)
    expected = family.fit_moments(moments)
    omega = SCALE**0.5 * torch.randn(2, 40, width)
    told = family.directions(omega.double(), expected, SCALE**0.5)

    if is_padded:  # what is hidden is not read
        query, key = (t.masked_fill(~m[:, None, :, None], torch.nan) for t, m in zip((query, key), masks, strict=True))
    full = kind in ("symmetric", "asymmetric", "centred")
    found = pieces(query, key, *masks, SCALE, family.num_queries, full)
    ridge = (getattr(family, "regularization", 0.0), getattr(family, "floor", 0.0))
    params, made = fit(kind, found, omega, torch.eye(width), torch.float32, SCALE**0.5, *ridge)
    assert (params.maps, params.form) == (expected.maps, expected.form)
    for attribute in ("transform", "inverse", "factor", "shift"):
        one, other = getattr(params, attribute), getattr(expected, attribute)
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other.expand(one.shape))
    for one, other in zip(made, told, strict=True):
        close(one, other)


def close(found, expected, tolerance=2e-3):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def test_nothing_that_counts_gives_no_moments():
    torch.manual_seed(0)
    query, key = torch.full((1, 1, 30, 16), torch.nan), torch.randn(1, 1, 30, 16)
    nothing = torch.zeros(1, 30, dtype=torch.bool)
    found = pieces(query, key, nothing, nothing, SCALE, 16)
    params, made = fit("centred", found, torch.randn(1, 16, 16), torch.eye(16), torch.float32, 1.0, 0.01, 1e-4)
    for tensor in (params.transform, params.factor, params.shift, *made):
        assert tensor.isfinite().all()
    torch.testing.assert_close(params.transform, torch.eye(16).expand(1, 1, 16, 16), rtol=0.0, atol=0.1)


@pytest.mark.parametrize("name", ["pos", "sderf", "saderf", "cderf"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_directions(name, is_shared):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 2, 40, 24, dtype=torch.float64)
    family = favor.features.get(name)
    params = family.fit(x + 0.5, y[0] * 2 if is_shared else y * 2)
    if is_shared:
        params = replace(params, **{n: getattr(params, n)[0] for n in ("transform", "inverse", "factor")})
        if params.shift is not None:
            params = replace(params, shift=params.shift[0])
    if name != "sderf":
        params = replace(params, log_weights=torch.randn(2, 70, dtype=torch.float64))
    omega = torch.randn(2, 70, 24, dtype=torch.float64)
    expected = family.directions(omega, params, 0.5)
    found = directions(omega.float(), params.to(omega.float()), 0.5, torch.float32)
    for one, other in zip(found, expected, strict=True):
        close(one, other.expand(one.shape), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_hold_no_nan(dtype, monkeypatch):
    torch.manual_seed(0)
    rows = torch.randn(2, 70, 3, 24).transpose(1, 2).to(dtype)
    mask = torch.rand(2, 90)[:, 20:] < 0.5
    rows[0, 1, 3:9] = torch.nan
    rows[1, 2, :, 5] = -torch.inf
    grad, leaf = torch.randn(2, 3, 70, 24).to(dtype), rows.detach().requires_grad_()
    expected = torch.where(mask[:, None, :, None], leaf, leaf.nan_to_num(0.0, 0.0, 0.0))
    (slope,) = torch.autograd.grad(expected, leaf, grad)
    assert torch.equal(triton_tokens.cleaned(rows, mask).nan_to_num(7.0), expected.detach().nan_to_num(7.0))
    assert torch.equal(triton_tokens.cleaned(rows, mask, grad), slope.nan_to_num(0.0))
    monkeypatch.setattr("favor.attention.packing.fuses", lambda rows: True)
    (found,) = torch.autograd.grad(Cleaned.apply(leaf, mask), leaf, grad, create_graph=True)
    assert torch.equal(found, slope.nan_to_num(0.0))
