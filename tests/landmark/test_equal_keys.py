"""Equal keys count as one, whichever way ties between them fall."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor.features.moments import attention_received
from favor.landmark.equal import first_equal
from favor.landmark.naive import naive_landmark_attention


def copies(length, distinct, seed=0, dtype=torch.float64):
    """Queries, keys of which only so many differ, values, `[2, 2, length, 16]`."""
    generator = torch.Generator().manual_seed(seed)
    keys = 3 * torch.randn(2, 2, distinct, 16, dtype=dtype, generator=generator)
    query, value = torch.randn(2, 2, 2, length, 16, dtype=dtype, generator=generator)
    return 2 * query, keys[:, :, torch.randint(distinct, (length,), generator=generator)], value


def exact_of(query, key, value, is_causal=False, mask=None):
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    seen = seen.tril(key.shape[2] - query.shape[2]) if is_causal else seen
    seen = seen if mask is None else seen & mask[:, None, None]
    return scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=seen)


def error_of(tensors, mask=None, **options):
    exact = exact_of(*tensors, options.get("is_causal", False), mask)
    out = favor.favor_attention(*tensors, features="landmark", key_padding_mask=mask, **options)
    if mask is not None:
        exact, out = (t * mask[:, None, :, None] for t in (exact, out))
    return ((out - exact).norm() / exact.norm()).item()


@pytest.fixture(params=range(2))
def ties(request, monkeypatch):
    """Attention received as another processor rounds it: equal keys get shares that differ in the last digits."""
    generator = torch.Generator().manual_seed(request.param)

    def rounded(*tensors, **options):
        received = attention_received(*tensors, **options)
        noise = torch.randn(received.shape, dtype=received.dtype, generator=generator)
        return received * (1 + 2 * torch.finfo(received.dtype).eps * noise)

    monkeypatch.setattr("favor.landmark.grouping.attention_received", rounded)
    return request.param


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_distinct_key_is_merged_whichever_way_ties_fall(is_causal, window, padding, ties):
    mask = None
    if padding != "none":
        mask = torch.arange(300) < torch.tensor([[300], [250]])
        mask = mask.flip(1) if padding == "left" else mask
    options = {"num_features": 64, "window": window, "is_causal": is_causal, "mask": mask}
    assert error_of(copies(300, 8, ties), **options) < 1e-12
    single = copies(300, 8, ties, torch.float32)
    assert error_of(single, **options) < 1e-5


@pytest.mark.parametrize("distinct", [2, 9, 20, 32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_as_many_landmarks_as_keys_that_differ_are_exact(is_causal, distinct, ties):
    assert error_of(copies(200, distinct, ties), num_features=32, window=16, is_causal=is_causal) < 1e-12
    assert error_of(copies(200, distinct, ties), num_features=32, is_causal=is_causal) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
def test_evenly_spaced_landmarks_hold_them_too(is_causal):
    """Without statistics no query has a say: a key that occurs once must not be missed for its rarity."""
    query, key, value = copies(300, 1)
    key = key.clone()
    key[:, :, 77] = -key[:, :, 0]
    options = {"num_features": 4, "use_statistics": False, "is_causal": is_causal, "window": 16}
    assert error_of((query, key, value), **options) < 1e-12


def test_means_of_many_equal_keys_stay_equal_to_a_new_one():
    """128 blocks in float32: the mean of n equal keys is off by up to n roundings."""
    tensors = [t[:1] for t in copies(4096, 8, dtype=torch.float32)]
    assert error_of(tensors, num_features=9, is_causal=True, window=32) < 1e-5


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("distinct", [8, 60])
def test_the_definition_agrees_with_fewer_and_more_of_them_than_landmarks(is_causal, window, distinct):
    tensors = copies(150, distinct)
    options = {"is_causal": is_causal, "window": window}
    found = favor.favor_attention(*tensors, features="landmark", num_features=24, **options)
    torch.testing.assert_close(found, naive_landmark_attention(*tensors, 24, **options))


def test_with_a_landmark_for_each_key_gradients_are_exact_too():
    """A group has one gradient for all of its keys: copies are alone where there is room."""
    gradients = []
    for attend in (exact_of, lambda *t: favor.favor_attention(*t, features="landmark", num_features=40)):
        tensors = [t.requires_grad_() for t in copies(40, 5)]
        gradients.append(torch.autograd.grad(attend(*tensors).square().sum(), tensors))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_padding_of_zeros_is_not_the_key_zero():
    query, key, value = copies(60, 5)
    key = key.clone()
    key[:, :, 30] = 0
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[:, :20] = False
    assert error_of((query, key.masked_fill(~mask[:, None, :, None], 0.0), value), mask, num_features=8) < 1e-12


def brute_first_equal(key, mask):
    """The first of the keys that count with the same numbers."""
    same = (key.unsqueeze(-2) == key.unsqueeze(-3)).all(-1)
    same = same & mask.unsqueeze(-1) & mask.unsqueeze(-2)
    return torch.where(mask, same.long().argmax(-1), torch.arange(key.shape[-2]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_first_equal_is_a_search_of_all_pairs(dtype, width):
    generator = torch.Generator().manual_seed(width)
    key = torch.randn(3, 40, width, generator=generator)[:, torch.randint(40, (100,), generator=generator)].to(dtype)
    mask = torch.rand(3, 100, generator=generator) < 0.7
    assert torch.equal(first_equal(key, mask), brute_first_equal(key, mask))
    assert torch.equal(first_equal(key), brute_first_equal(key, torch.ones_like(mask)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_first_equal_looks_through_rounding_and_no_further(dtype):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 50, 32, dtype=dtype, generator=generator)
    eps = torch.finfo(dtype).eps
    change = torch.randn(2, 50, 32, dtype=dtype, generator=generator)
    both = torch.cat([key, key * (1 + eps * change)], 1)
    assert torch.equal(first_equal(both), torch.arange(50).repeat(2).expand(2, 100))
    other = torch.cat([key, key * (1 + 1000 * eps * change)], 1)
    assert torch.equal(first_equal(other), torch.arange(100).expand(2, 100))
    counts = torch.full((2, 100), 5000.0, dtype=dtype)
    assert torch.equal(first_equal(other, counts=counts), first_equal(both))


def test_keys_far_from_zero_and_on_a_lattice_are_their_own():
    generator = torch.Generator().manual_seed(0)
    lattice = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 4)
    for key in (torch.randn(500, 16, generator=generator) + 1e3, torch.eye(64), lattice):
        assert torch.equal(first_equal(key[None])[0], torch.arange(len(key)))
