"""Tokens and forms of attention by landmarks that its tests share."""

import torch

import favor

# With fewer exact keys than the tests have tokens: means stand for the others.
FORMS = {
    "encoder": {"num_features": 12, "selected_keys": 24},
    "encoder, means alone": {"num_features": 12, "selected_keys": 0},
    "encoder, queries apart": {"num_features": 40, "selected_keys": 24, "use_statistics": False},
    "causal": {"is_causal": True, "selected_keys": 32},
    "causal, means alone": {"is_causal": True, "selected_keys": 0},
}


def inputs(length=50, keys=None, *, batch=2, heads=4, key_heads=2, width=8, value_width=5, norm=1.5, seed=0):
    """Random query, key and value in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    keys = length if keys is None else keys
    query, key = norm * draw(batch, heads, length, width), norm * draw(batch, key_heads, keys, width)
    return query, key, draw(batch, key_heads, keys, value_width)


def attend(*tensors, **options):
    """Attention by landmarks."""
    return favor.favor_attention(*tensors, features="landmark", **options)


def with_gradients(function, tensors, weight=None):
    """Output of a function, and gradients of its sum times a weight."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    if weight is None:
        weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(out, leaves, weight.to(out.dtype), materialize_grads=True)
    return [out.detach(), *gradients]


def error(found, expected):
    """Relative error in the Frobenius norm, in float64."""
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()
