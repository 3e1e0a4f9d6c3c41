"""The definition itself, against loops over pairs of tokens and features that share nothing with it."""

import math

import pytest
import torch
from truth import make_inputs

from favor.kernels import linear_attention
from favor.kernels.naive import naive_linear_attention

LENGTHS = torch.tensor([0, 2, 6], dtype=torch.int32)


def weight(operands, head, i, j, past, options):
    """How much query i, the (past + i)-th token, weighs key j."""
    query, key, _, query_directions, key_directions, offset, key_bias, query_bias = operands
    if math.isinf(key_bias[0, head // 2, j]) or (options.get("is_causal") and j > past + i):
        return 0.0
    q, k = query[0, head, i].tolist(), key[0, head // 2, j].tolist()
    if "window" in options and (past + i) // options["window"] == j // options["window"]:
        return math.exp(options["scale"] * sum(a * b for a, b in zip(q, k, strict=True)))
    total = 0.0
    for m in range(offset.shape[2]):
        uq, uk = (t[0, head // 2, m].tolist() for t in (query_directions, key_directions))
        dots = sum(a * b for a, b in zip([*q, *k], [*uq, *uk], strict=True))
        total += math.exp(dots + offset[0, head // 2, m] + key_bias[0, head // 2, j])
    return total * (1.0 if query_bias is None else math.exp(query_bias[0, head, i]))


def by_loops(operands, options):
    query, key, value = operands[:3]
    out, past = torch.zeros(1, 4, query.shape[2], value.shape[3], dtype=torch.float64), key.shape[2] - query.shape[2]
    for head in range(4):
        for i in range(query.shape[2]):
            weights = [weight(operands, head, i, j, past, options) for j in range(key.shape[2])]
            for j, own in enumerate(weights):
                out[0, head, i] += own / (sum(weights) or 1.0) * value[0, head // 2, j]
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_pairs_and_features_one_by_one(is_causal, window, packed):
    keys = 6 if packed or not is_causal else 8
    inputs = make_inputs(6, keys, dim=3, value_dim=2, features=4, groups=2)
    inputs[6][0, 0, 1] = inputs[6][0, 1, :2] = -torch.inf
    bias = torch.randn(1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if window else None
    options = {"is_causal": is_causal} | ({"window": window, "scale": 0.7} if window else {})
    packing = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS} if packed else {}
    parts = [slice(0, 2), slice(2, 6)] if packed else [slice(None)]
    outs = []
    for own in parts:
        query, key, value, key_bias = (inputs[i][:, :, own] for i in (0, 1, 2, 6))
        operands = (query, key, value, *inputs[3:6], key_bias, None if bias is None else bias[:, :, own])
        outs.append(by_loops(operands, options))
    found = naive_linear_attention(*inputs, query_bias=bias, **options, **packing)
    torch.testing.assert_close(found, torch.cat(outs, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend", [naive_linear_attention, linear_attention])
def test_unknown_options_are_refused(attend):
    with pytest.raises(TypeError, match="unknown options: causal; known are is_causal, cu_seqlens_q"):
        attend(*make_inputs(3), causal=True)


@pytest.mark.usefixtures("poisoned")
def test_memory_that_tests_fill_is_on_the_default_device():
    with torch.device("meta"):
        assert torch.empty(0).device.type == "meta"
    assert torch.empty(1).isnan().all()
