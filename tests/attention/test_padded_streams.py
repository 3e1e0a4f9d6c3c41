"""Streams of a batch whose sequences are of different length: each goes on as it would alone."""

import pytest
import torch

import favor
from favor.kernels import StreamState

BATCH, HEADS, KEY_HEADS, WIDTH = 4, 4, 2, 8
# What is real in the pieces: padding at the left, none, everywhere, one token of some sequences only, none for a while.
PIECES = [(20, 0.6), (1, 1.0), (1, 1.0), (9, 0.5), (1, 0.5), (16, 1.0), (1, 0.0), (1, 1.0), (5, 0.7), (1, 1.0)]
OPTIONS = [{"features": "pos", "window": 7}, {"features": "pos"}, {"features": "landmark", "selected_keys": 6}]


def masks_of_pieces():
    """Boolean `[B, length]` each, the first one padded at the left."""
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(BATCH, length, generator=generator) < share for length, share in PIECES]
    masks[0] = torch.arange(20) >= torch.tensor([0, 3, 20, 11]).unsqueeze(1)
    return masks


def attend(query, key, value, **options):
    return favor.favor_attention(query, key, value, num_features=6, is_causal=True, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_sequence_goes_on_as_alone(options):
    masks, state = masks_of_pieces(), StreamState()
    length = sum(mask.shape[1] for mask in masks)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, BATCH, KEY_HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
    real = torch.cat(masks, 1)
    hidden = ~real[:, None, :, None]
    padded = [tensor.masked_fill(hidden, torch.nan) for tensor in (query, key, value)]
    outs, start = [], 0
    for mask in masks:
        now = [tensor[:, :, start : start + mask.shape[1]] for tensor in padded]
        outs.append(attend(*now, state=state, key_padding_mask=mask, **options))
        start += mask.shape[1]
    found = torch.cat(outs, 2)
    for row in range(BATCH):
        own = real[row]
        expected = attend(*(tensor[row : row + 1, :, own] for tensor in (query, key, value)), **options)
        torch.testing.assert_close(found[row : row + 1, :, own], expected, rtol=1e-9, atol=1e-9)


def test_the_state_of_features_does_not_grow():
    state, sizes = StreamState(), []
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(20) >= torch.tensor([0, 3, 19, 11]).unsqueeze(1)
    for length in [20, *[1] * 60]:
        query, key, value = torch.randn(3, BATCH, HEADS, length, WIDTH, generator=generator)
        attend(query, key, value, state=state, key_padding_mask=mask if length > 1 else None, **OPTIONS[0])
        assert not state.block or state.block[1].shape[2] < OPTIONS[0]["window"]
        sizes.append(state.nbytes)
    assert max(sizes[30:]) == max(sizes)
    assert max(sizes[30:]) <= 2 * min(sizes[30:])
