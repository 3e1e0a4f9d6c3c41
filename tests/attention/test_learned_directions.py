"""Directions that are given with the parameters take the place of the drawn ones in every form of attention."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from reference import attend, inputs

from favor import favor_attention, features
from favor.kernels import StreamState

HEADS, HEAD_DIM, FEATURES = 2, 8, 16
run = partial(favor_attention, features="sderf", num_features=FEATURES)


def parameters(seed=0):
    """Parameters with all parts, one for each key head, and directions that nothing would draw."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    transform = torch.eye(HEAD_DIM) + normal(HEADS, HEAD_DIM, HEAD_DIM) / 10
    factor = torch.eye(HEAD_DIM) + normal(HEADS, HEAD_DIM, HEAD_DIM) / 10
    directions, shift = normal(HEADS, FEATURES, HEAD_DIM) + 0.3, normal(HEADS, HEAD_DIM) / 5
    return features.Parameters(transform, transform.inverse(), factor, shift=shift, directions=directions)


def expected(query, key, value, given):
    """Normalised attention from the features of each head, in float64."""
    family, out = features.get("sderf"), []
    for head in range(query.shape[1]):
        own = given.heads([head // 2])
        x, y = (query.shape[-1] ** -0.25 * rows.double() for rows in (query[:, head], key[:, head // 2]))
        kernel = family.kernel(x, y, own.directions[0].double(), own.to(x))
        out.append(kernel / kernel.sum(-1, keepdim=True) @ value[:, head // 2].double())
    return torch.stack(out, 1)


def test_attention_uses_them():
    query, key, value = inputs(20)
    given = parameters()
    out = run(query, key, value, parameters=given)
    torch.testing.assert_close(out.double(), expected(query, key, value, given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(query, key, value, parameters=given, seed=5), out)
    other = run(query, key, value, parameters=replace(given, directions=None))
    assert (other - out).norm() > 0.01 * out.norm()
    base = features.Parameters.identity(HEAD_DIM, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(run(query, key, value, parameters=base, correction=given), out, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"parameters hold learned directions \(2, 16, 8\).* ask for \(2, 24, 8\)"):
        attend(query, key, value, name="sderf", parameters=given, num_features=24)


def test_causal_attention_and_its_stream_use_them():
    query, key, value = inputs(20)
    given = parameters()
    whole = run(query, key, value, parameters=given, is_causal=True)
    for end in (1, 7, 20):  # the last row of causal attention is attention without a mask
        last = expected(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], given)
        torch.testing.assert_close(whole[:, :, end - 1 : end].double(), last, rtol=1e-4, atol=1e-5)
    state, pieces = StreamState(), []
    for rows in (slice(0, 9), slice(9, 10), slice(10, 20)):
        tensors = (tensor[:, :, rows] for tensor in (query, key, value))
        pieces.append(run(*tensors, parameters=given, is_causal=True, state=state))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-4, atol=1e-5)


def test_they_have_gradients():
    query, key, value = (tensor.double() for tensor in inputs(6))
    given = parameters().to(query)

    def attention(directions):
        return run(query, key, value, parameters=replace(given, directions=directions))

    torch.autograd.gradcheck(attention, given.directions.requires_grad_(), fast_mode=True)
