"""Attention by landmarks from its definition against the code that is used, and against one loop over pairs."""

import pytest
import torch

import favor
from favor.landmark import causal
from favor.landmark.naive import bidirectional_logits, naive_landmark_attention


@pytest.mark.parametrize(("is_causal", "keys"), [(False, 50), (True, 50), (True, 70)])
@pytest.mark.parametrize("window", [0, 8])
def test_favor_attention_is_the_definition(is_causal, keys, window, monkeypatch):
    monkeypatch.setattr(causal, "BLOCK", 16)
    monkeypatch.setattr("favor.landmark.naive.BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 50, 8, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 2, 2, keys, 8, dtype=torch.float64, generator=generator)
    options = {"is_causal": is_causal, "window": window, "scale": 0.3}
    found = favor.favor_attention(query, key, value, features="landmark", num_features=12, **options)
    torch.testing.assert_close(found, naive_landmark_attention(query, key, value, 12, **options))


def test_logits_one_by_one():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 9, 4, dtype=torch.float64, generator=generator)
    cells, block = torch.tensor([0, 2, 1, 0, 2, 0, 1, 1, 0]), torch.arange(9) // 4
    found = bidirectional_logits(query, key, cells, block, block)
    for i in range(9):
        for j in range(9):
            group = [k for k in range(9) if cells[k] == cells[j] and block[k] != block[i]]
            counted = key[j] if block[i] == block[j] else sum(key[k] for k in group) / len(group)
            torch.testing.assert_close(found[i, j], query[i] @ counted)
