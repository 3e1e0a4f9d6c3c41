"""Local attention against the formula over all pairs in float64."""

import pytest
import torch
from pairwise import pairs

from favor.attention.local import local_attention

AXES = {
    "length": [1, 2, 63, 65, 130, 300],
    "earlier": [0, 1, 70],
    "reach": [0, 1, 3, 64, 100, 1000],
    "is_causal": [True, False],
    "batch": [1, 2],
    "key_heads": [4, 2],
    "padding": [None, "left", "right", "all"],
}


def padding_of(kind, batch, length):
    hidden = {"left": slice(None, length // 2), "right": slice(length // 2, None), "all": slice(None)}
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[-1, hidden.get(kind, slice(0))] = False
    return None if kind is None else mask


def truth(query, key, value, reach, is_causal, key_padding_mask):
    length, key_length, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(length)[:, None] + key_length - length - torch.arange(key_length)
    visible = (distance >= (0 if is_causal else -reach)) & (distance <= reach)
    visible = visible[None, None] if key_padding_mask is None else visible & key_padding_mask[:, None, None, :]
    logits = query @ key.repeat_interleave(groups, 1).mT * query.shape[-1] ** -0.5
    weights = torch.softmax(logits.masked_fill(~visible, -1e30), -1) * visible.any(-1, keepdim=True)
    return weights @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize(*pairs(**AXES))
def test_output_and_gradients_are_those_of_the_formula(length, earlier, reach, is_causal, batch, key_heads, padding):
    earlier = earlier if is_causal else 0
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 4, length, 8), *((batch, key_heads, length + earlier, size) for size in (8, 6))]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = padding_of(padding, batch, length + earlier)
    upstream = torch.randn(batch, 4, length, 6, generator=generator, dtype=torch.float64)
    outs = []
    for function, dtype in ((local_attention, torch.float32), (truth, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = function(*leaves, reach, is_causal=is_causal, key_padding_mask=mask)
        outs.append((out, *torch.autograd.grad(out, leaves, upstream.to(dtype))))
    for found, expected in zip(*outs, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def test_no_tensor_holds_all_pairs():
    """The largest tensor made, forward and backward, grows with the length and not with its square."""
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest[-1] = max(largest[-1], tensor.untyped_storage().nbytes())
            return out

    for length in (1024, 2048):
        largest.append(0)
        leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        with Watch():
            local_attention(*leaves, 32, is_causal=False).sum().backward()
    assert largest[1] <= 2.1 * largest[0]


def test_lengths_that_cannot_be_aligned_are_refused():
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 2, 4)
    for causal, tensors in ((True, (query, key, key)), (False, (key, query, query))):
        with pytest.raises(ValueError, match="aligns queries with the last keys"):
            local_attention(*tensors, 1, is_causal=causal)
    assert local_attention(query[:, :, :0], key, key, 1, is_causal=True).shape == (1, 1, 0, 4)
