"""Gradients of the quadratic terms, whose backward pass is written by hand, by finite differences."""

import pytest
import torch

from favor import features
from favor.attention.linear import key_bias, query_bias


@pytest.mark.parametrize("name", ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf"])
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
