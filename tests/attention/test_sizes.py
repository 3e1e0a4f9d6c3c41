"""Sizes of the method: memory follows the data, or the size is refused before memory is taken."""

import numpy as np
import pytest
import torch
from reference import inputs

import favor
from favor.decomposition import KLNMF
from favor.kernels import StreamState
from favor.optim import low_rank_bound

LENGTH = 64
HUGE = 2**30
SELECTING = {"features": "landmark", "num_features": 8, "selected_keys": 24, "page_size": 2, "query_block": 3}
SPANS = ("window", "selected_keys", "page_size", "query_block")  # counted in tokens


def attended(**options):
    query, key, value = inputs(LENGTH)
    return favor.favor_attention(query, key, value, **SELECTING | options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("size", SPANS)
def test_a_size_beyond_the_sequence_is_that_of_the_sequence(is_causal, window, size):
    """Causal blocks need a page for each query, so they choose from all pages."""
    options = {
        "is_causal": is_causal,
        "window": window,
        **({"selected_keys": HUGE, "page_size": 1} if is_causal else {}),
    }
    outs = [attended(**options | {size: number}) for number in (LENGTH, HUGE)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", SPANS)
def test_a_state_does_not_grow_with_a_size(size):
    query, key, value = inputs(LENGTH)
    options, outs = {**SELECTING, "selected_keys": HUGE, "page_size": 1, "is_causal": True, "window": 16}, []
    for number in (LENGTH, HUGE):
        state, pieces = StreamState(), []
        for start, stop in ((0, 7), (7, 8), (8, 40), (40, 41), (41, LENGTH)):
            part = (tensor[:, :, start:stop] for tensor in (query, key, value))
            pieces.append(favor.favor_attention(*part, **options | {size: number}, state=state))
        outs.append(torch.cat(pieces, 2))
        assert state.nbytes < 2**18
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_landmarks_beyond_the_sequence_have_no_keys(is_causal, window):
    most = {"features": "landmark", "selected_keys": 0, "is_causal": is_causal, "window": window}
    outs = [attended(**most, num_features=number) for number in (LENGTH, 2**18)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [*SPANS, "num_features", "key_heads"])
def test_typing_mistakes_are_refused(size):
    wanted = (0, 10**15) if size == "key_heads" else 10**15
    with pytest.raises(ValueError, match=size):
        attended(**{size: wanted})
    if size != "key_heads":
        with pytest.raises(ValueError, match=f"{size} must be at most"):
            favor.FavorConfig(**{size: wanted})


@pytest.mark.parametrize("longest", [LENGTH, HUGE])
def test_the_longest_packed_sequence_is_no_longer_than_the_batch(longest):
    ends = torch.tensor([0, 20, LENGTH])
    options = {"features": "pos", "cu_seqlens_q": ends, "cu_seqlens_k": ends, "num_features": 8}
    query, key, value = (tensor[:1] for tensor in inputs(LENGTH))
    given = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out = favor.favor_attention(query, key, value, **options, **given)
    torch.testing.assert_close(out, favor.favor_attention(query, key, value, **options))


def test_sizes_elsewhere():
    """Queries that choose landmarks, components of a factorization and of a sampler, the rank of a bound."""
    for family in (favor.features.WDERF, favor.landmark.Landmarks):
        with pytest.raises(ValueError, match="num_queries must be from 1 to 16384"):
            family(num_queries=10**9)
    with pytest.raises(ValueError, match="n_components must be at most 6 for X"):
        KLNMF(n_components=10**9).fit(np.ones((6, 3)))
    theta, features = torch.zeros(4).double(), torch.randn(2, 3, 4).double()
    whole, more = (low_rank_bound(theta, features, rank=rank).curvature.dense() for rank in (4, 10**9))
    torch.testing.assert_close(more, whole)
