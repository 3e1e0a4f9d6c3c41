"""The biases of positive features: an unbiased numerator and denominator, and gradients written by hand."""

import pytest
import torch

from favor import features
from favor.attention.linear import key_bias, query_bias

NAMES = ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf"]
SCALE, DRAWS, FEATURES = 0.4, 4000, 6


@pytest.mark.parametrize("name", NAMES)
def test_numerator_and_denominator_are_unbiased(name):
    """Sums over the keys of exp(query_bias + q.uq + k.uk + offset + key_bias), alone and times values, over draws."""
    generator = torch.Generator().manual_seed(0)
    query = 0.7 * torch.randn(2, 4, 5, 4, dtype=torch.float64, generator=generator) + 0.3
    key, value = (0.7 * torch.randn(2, 2, 7, 4, dtype=torch.float64, generator=generator) - 0.2 for _ in range(2))
    family = features.get(name)
    root = SCALE**0.5
    params = family.fit(root * query.unflatten(1, (2, 2)).flatten(2, 3), root * key)
    hidden = torch.zeros(2, 1, 7, dtype=torch.bool)
    hidden[0, 0, 5:] = True
    of_keys = key_bias(family.alpha, key, params, SCALE, hidden, None)  # [B, Hk, S]
    of_queries = query_bias(query, params, 2, FEATURES, SCALE, None)  # [B, H, L]
    omega = family.draw(FEATURES, 4, generator=generator, batch_shape=(DRAWS, 1, 2))
    to_query, to_key, offset = family.directions(root * omega, params, root)
    log_phi_k = key @ to_key.mT + offset.unsqueeze(-2) + of_keys.unsqueeze(-1)
    rows = query.unflatten(1, (2, 2)).flatten(2, 3)
    log_phi_q = rows @ to_query.mT + of_queries.unflatten(1, (2, 2)).flatten(2, 3).unsqueeze(-1)
    weights = log_phi_q.exp() @ log_phi_k.exp().mT  # [draws, B, Hk, G L, S]
    exact = (SCALE * rows @ key.mT).exp().masked_fill(hidden.unsqueeze(-2), 0.0)
    for found, expected in ((weights.sum(-1), exact.sum(-1)), (weights @ value, exact @ value)):
        error = found.std(0) / DRAWS**0.5
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
        return key_bias(family.alpha, rows, params, 0.4, hidden, None).masked_fill(hidden, 0.0)

    def of_queries(rows):
        return query_bias(rows, params, 2, 6, 0.4, None)

    assert torch.autograd.gradcheck(of_keys, key.requires_grad_())
    assert torch.autograd.gradcheck(of_queries, query.requires_grad_())
