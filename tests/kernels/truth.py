"""Inputs of the kernels, the right outputs, and measures of the difference."""

import torch

from favor.kernels.naive import naive_linear_attention


def attention(*operands, lengths=None, **options):
    """The definition; a query bias is the last operand, and `lengths` are those of packed queries and keys."""
    packing = {}
    if lengths is not None:
        device = operands[0].device
        cumulative = (torch.tensor([0, *own], device=device).cumsum(0) for own in lengths)
        packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cumulative, strict=True))
    query_bias = operands[7] if len(operands) > 7 else None
    return naive_linear_attention(*operands[:7], query_bias=query_bias, **packing, **options)


def make_inputs(
    length, key_length=None, *, dim=8, value_dim=None, features=16, heads=2, groups=1, batch=1, shared=True, seed=0
):
    """Operands in float64; directions and bias have the sizes they have in attention."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key_length = length if key_length is None else key_length
    root, number = dim**-0.25, 1 if shared else batch
    query, key = randn(batch, heads * groups, length, dim), randn(batch, heads, key_length, dim)
    value = randn(batch, heads, key_length, value_dim or dim)
    directions = (root * randn(number, heads, features, dim) for _ in range(2))
    return [query, key, value, *directions, randn(number, heads, features), -(root * key).square().sum(-1) / 2]


def gradients(function, inputs, weight):
    """Output and gradients of (output * weight).sum()."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    (out * weight.to(out.dtype)).sum().backward()
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def error(found, expected):
    """Relative error in the Frobenius norm, in float64."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()
