"""Sizes of the method: memory follows the data, or the size is refused before memory is taken."""

import numpy as np
import pytest
import torch
from reference import inputs
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor.decomposition import KLNMF
from favor.kernels import StreamState
from favor.optim import low_rank_bound

LENGTH = 64
HUGE = 2**30


@pytest.mark.parametrize(
    ("features", "size", "most"),
    [("pos", "window", HUGE), ("landmark", "selected_keys", HUGE), ("landmark", "num_features", 2**18)],
)
@pytest.mark.parametrize(("is_causal", "pieces"), [(False, False), (True, False), (True, True)])
def test_a_size_beyond_the_sequence_is_that_of_the_sequence(features, size, most, is_causal, pieces):
    """Also that of a state in causal attention, which is softmax attention then if the size is not that of features."""
    outs, query, key, value = [], *inputs(LENGTH)
    for number in (LENGTH, most):
        options, state = {"num_features": 8, "selected_keys": 0, "features": features, size: number}, StreamState()
        cuts = [7, 1, 32, 1, LENGTH - 41] if pieces else [LENGTH]
        parts = zip(*(tensor.split(cuts, 2) for tensor in (query, key, value)), strict=True)
        options |= {"state": state} if pieces else {}
        outs.append(torch.cat([favor.favor_attention(*part, is_causal=is_causal, **options) for part in parts], 2))
        assert state.nbytes < 2**18
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
    if size != "num_features" or not is_causal:
        exact = scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(outs[0], exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", ["window", "selected_keys", "num_features", "key_heads"])
def test_typing_mistakes_are_refused(size):
    wanted = (0, 10**15) if size == "key_heads" else 10**15
    with pytest.raises(ValueError, match=size):
        favor.favor_attention(*inputs(LENGTH), **{"features": "pos" if size == "window" else "landmark", size: wanted})
    if size != "key_heads":
        with pytest.raises(ValueError, match=f"{size} must be at most"):
            favor.FavorConfig(**{size: wanted})


def test_sizes_elsewhere():
    """Components of a factorization, and the rank of a bound."""
    with pytest.raises(ValueError, match="n_components must be at most 6 for X"):
        KLNMF(n_components=10**9).fit(np.ones((6, 3)))
    theta, features = torch.zeros(4).double(), torch.randn(2, 3, 4).double()
    whole, more = (low_rank_bound(theta, features, rank=rank).curvature.dense() for rank in (4, 10**9))
    torch.testing.assert_close(more, whole)


def test_the_state_of_a_window_does_not_grow_with_padding():
    state, sizes = StreamState(), []
    mask = torch.arange(20) >= torch.tensor([0, 3, 19, 11]).unsqueeze(1)
    options = {"features": "pos", "window": 7, "num_features": 6, "is_causal": True, "state": state}
    for length in [20, *[1] * 40]:
        favor.favor_attention(*torch.ones(3, 4, 4, length, 8), **options, key_padding_mask=mask if length > 1 else None)
        assert not state.block or state.block[1].shape[2] < 7
        sizes.append(state.nbytes)
    assert max(sizes) == max(sizes[20:]) <= 2 * min(sizes[20:])
