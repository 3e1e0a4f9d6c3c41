"""`torch.func` over attention: grad, vmap, jacrev and gradients of single samples, against autograd."""

import pytest
import torch

import favor
from favor.features import Parameters

FAMILIES = ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "trig", "relu", "elu"]
# PyTorch has no batching rules for its own fused attention, which landmarks use, and says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*would let its tokens see later ones:UserWarning", "ignore:There is a performance drop:UserWarning"
)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, 20, 4, dtype=torch.float64, generator=generator) for shape in shapes]


def padding():
    place = torch.arange(20)
    return torch.stack([place >= 0, place < 13, place >= 5])


def loss(query, key, value, mask=None, **options):
    return favor.favor_attention(query, key, value, num_features=8, key_padding_mask=mask, **options).square().sum()


def by_autograd(inputs, mask, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(loss(*leaves, mask, **options), leaves)


def of_one(query, key, value, mask=None, **options):
    return loss(query[None], key[None], value[None], None if mask is None else mask[None], **options)


CASES = [
    *((name, {}) for name in FAMILIES),
    *((name, {"is_causal": True}) for name in ("pos", "relu")),
    ("landmark", {"selected_keys": 0}),
    *((name, {"window": 4, "is_causal": causal}) for name in ("pos", "wderf") for causal in (False, True)),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("features", "options"), CASES)
def test_grad_and_gradients_of_single_samples(features, options, masked):
    options, mask = {"features": features, **options}, padding() if masked else None
    inputs = tensors((3, 4), (3, 2), (3, 2))
    wanted = by_autograd(inputs, mask, **options)
    found = torch.func.grad(lambda *args: loss(*args, mask, **options), argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    each = torch.func.grad(lambda *args: of_one(*args, **options), argnums=(0, 1, 2))
    alone = torch.func.vmap(each)(*inputs, *([] if mask is None else [mask]))
    torch.testing.assert_close(alone, wanted, rtol=1e-6, atol=1e-8)


def test_jacrev():
    inputs = tensors((1, 2), (1, 2), (1, 2))

    def attend(*args):
        return favor.favor_attention(*args, features="wderf", num_features=8)[0, 0, 3]

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    rows = [torch.autograd.grad(number, leaves, retain_graph=True) for number in attend(*leaves)]
    wanted = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    torch.testing.assert_close(torch.func.jacrev(attend, argnums=(0, 1, 2))(*inputs), wanted)


def test_vmap_over_values_alone_and_over_parameters():
    query, key, value = tensors((1, 2), (1, 2), (5, 2))
    found = torch.func.vmap(lambda v: favor.favor_attention(query, key, v[None], features="pos", num_features=8))(value)
    for own, one in zip(found, value, strict=True):
        torch.testing.assert_close(own, favor.favor_attention(query, key, one[None], features="pos", num_features=8))
    factors = torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 1.1, 1.2])[:, None, None, None]

    def of(factor):
        eye = torch.eye(4, dtype=torch.float64).expand_as(factor)
        parameters = Parameters(eye, eye, factor)
        return loss(query, key, value[:1], features="sderf", parameters=parameters)

    found = torch.func.vmap(torch.func.grad(of))(factors.expand(3, 2, 4, 4))
    for own, factor in zip(found, factors, strict=True):
        leaf = factor.expand(2, 4, 4).clone().requires_grad_()
        torch.testing.assert_close(own, torch.autograd.grad(of(leaf), leaf)[0])


def test_second_derivatives_are_refused():
    query, key, value = tensors((1, 2), (1, 2), (1, 2))

    def total(q):
        return torch.func.grad(lambda q: loss(q, key, value, features="pos"))(q).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.func.grad(total)(query)
