"""What linear attention is made of: biases of tokens, with gradients written by hand, and directions that are given."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from reference import attend, inputs

from favor import favor_attention, features
from favor.attention.directions import Draw, directions
from favor.attention.linear import key_bias, query_bias
from favor.kernels import StreamState

NAMES = ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf"]
run = partial(favor_attention, features="sderf", num_features=16)


def parameters():
    """Parameters with all parts, one for each of two key heads, but with directions that are drawn; and directions."""
    generator = torch.Generator().manual_seed(0)
    C, D = torch.eye(8) + torch.randn(2, 2, 8, 8, generator=generator, dtype=torch.float64) / 10
    shift = torch.randn(2, 8, generator=generator, dtype=torch.float64) / 5
    omega = directions(Draw(features.get("sderf"), 16, 8, 2, True, 0, 0, 0, torch.device("cpu"), torch.float64))
    return features.Parameters(C, C.inverse(), D, shift=shift), omega


def in_pieces(*tensors, **options):
    parts, state = zip(*(tensor.split([9, 1, 10], 2) for tensor in tensors), strict=True), StreamState()
    return torch.cat([run(*part, is_causal=True, state=state, **options) for part in parts], 2)


@pytest.mark.parametrize("attention", [run, partial(run, is_causal=True), in_pieces], ids=["all", "causal", "pieces"])
def test_attention_uses_them(attention):
    """Those that seed 0 draws give with any seed what seed 0 gives."""
    tensors, (given, omega) = inputs(20), parameters()
    drawn = attention(*tensors, parameters=given)
    learned = replace(given, directions=omega)
    torch.testing.assert_close(attention(*tensors, parameters=learned, seed=5), drawn, rtol=1e-9, atol=1e-9)
    assert (attention(*tensors, parameters=given, seed=5) - drawn).norm() > 0.01 * drawn.norm()
    base = features.Parameters.identity(8, dtype=torch.float64, device="cpu")
    corrected = attention(*tensors, parameters=base, correction=learned, seed=5)
    torch.testing.assert_close(corrected, drawn, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"parameters hold learned directions \(2, 16, 8\).* ask for \(2, 24, 8\)"):
        attend(*tensors, name="sderf", parameters=learned, num_features=24)


def test_they_have_gradients():
    tensors, (given, omega) = inputs(6), parameters()

    def attention(own):
        return run(*tensors, parameters=replace(given, directions=own))

    torch.autograd.gradcheck(attention, omega.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_numerator_and_denominator_are_unbiased(name):
    """Sums over the keys of exp(query_bias + q.uq + k.uk + offset + key_bias), alone and times values, over draws."""
    scale, draws, generator = 0.4, 4000, torch.Generator().manual_seed(0)
    query = 0.7 * torch.randn(2, 4, 5, 4, dtype=torch.float64, generator=generator) + 0.3
    key, value = (0.7 * torch.randn(2, 2, 7, 4, dtype=torch.float64, generator=generator) - 0.2 for _ in range(2))
    family = features.get(name)
    root = scale**0.5
    params = family.fit(root * query.unflatten(1, (2, 2)).flatten(2, 3), root * key)
    hidden = torch.zeros(2, 1, 7, dtype=torch.bool)
    hidden[0, 0, 5:] = True
    of_keys = key_bias(family.alpha, key, params, scale, ~hidden, None)  # [B, Hk, S]
    of_queries = query_bias(query, params, 2, 6, scale, None)  # [B, H, L]
    omega = family.draw(6, 4, generator=generator, batch_shape=(draws, 1, 2))
    to_query, to_key, offset = family.directions(root * omega, params, root)
    log_phi_k = key @ to_key.mT + offset.unsqueeze(-2) + of_keys.unsqueeze(-1)
    rows = query.unflatten(1, (2, 2)).flatten(2, 3)
    log_phi_q = rows @ to_query.mT + of_queries.unflatten(1, (2, 2)).flatten(2, 3).unsqueeze(-1)
    weights = log_phi_q.exp() @ log_phi_k.exp().mT  # [draws, B, Hk, G L, S]
    exact = (scale * rows @ key.mT).exp().masked_fill(hidden.unsqueeze(-2), 0.0)
    for found, expected in ((weights.sum(-1), exact.sum(-1)), (weights @ value, exact @ value)):
        error = found.std(0) / draws**0.5
        assert ((found.mean(0) - expected).abs() <= 5 * error).all()
        # A constant that is off by a quarter would be seen.
        assert (error.mean() < 0.05 * expected.abs().mean()).all()


@pytest.mark.parametrize("name", NAMES)
def test_biases_by_finite_differences(name):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    key = key @ torch.randn(4, 4, dtype=torch.float64, generator=generator)  # so that no map is symmetric by chance
    family = features.get(name, alpha=-0.3)
    params = family.fit(query, key)
    hidden = torch.zeros(2, 1, 5, dtype=torch.bool)
    hidden[0, 0, 3:] = True

    def of_keys(rows):
        return key_bias(family.alpha, rows, params, 0.4, ~hidden, None).masked_fill(hidden, 0.0)

    def of_queries(rows):
        return query_bias(rows, params, 2, 6, 0.4, None)

    assert torch.autograd.gradcheck(of_keys, key.requires_grad_())
    assert torch.autograd.gradcheck(of_queries, query.requires_grad_())
