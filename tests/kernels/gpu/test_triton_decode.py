"""Decoding step by step against float64 causal attention over all keys so far."""

import pytest
import torch
from truth import attention

from favor.kernels.gpu.decode import decode
from favor.kernels.gpu.summary import summarise

pytestmark = pytest.mark.usefixtures("poisoned")
STEPS = 3


def make(batch, heads, key_heads, width, value_width, features, shared, dtype, steps=STEPS, scale=1.0):
    torch.manual_seed(0)

    def tokens(heads, width, scale=1.0):
        return (torch.randn(batch, steps, heads, width) * scale).to(dtype).transpose(1, 2)

    def per_head(*shape):
        return torch.randn(1 if shared else batch, key_heads, features, *shape)

    query, key = tokens(heads, width, scale), tokens(key_heads, width, scale)
    directions = [per_head(width) * width**-0.5 for _ in range(2)]
    return query, key, tokens(key_heads, value_width), *directions, per_head(), torch.randn(batch, key_heads, steps)


def steps(inputs, start, log_weight, summary, **options):
    query, key, value, *parameters, bias = inputs
    outs = []
    for step in range(start, query.shape[2]):
        one = slice(step, step + 1)
        tokens = (x[:, :, one] for x in (query, key, value))
        outs.append(decode(*tokens, *parameters, bias[:, :, one].contiguous(), log_weight, summary, **options))
    return torch.cat(outs, 2)


def fresh_state(inputs):
    _, key, value, directions, *_ = inputs
    log_weight = torch.full((*key.shape[:2], directions.shape[2]), -torch.inf)
    return log_weight, torch.full((*log_weight.shape, value.shape[3]), torch.nan)


def check(inputs, out, start=0):
    dtype = inputs[0].dtype
    exact, plain = (
        attention(*(part.to(kind) for part in inputs), is_causal=True)[:, :, start:] for kind in (torch.float64, dtype)
    )
    assert out.dtype == dtype
    error, size = (out.double() - exact).abs().max(), exact.abs().max()
    allowed = 1e-4 * size if dtype == torch.float32 else 2 * (plain.double() - exact).abs().max() + 1e-3 * size
    assert error <= allowed, (error, allowed)


CASES = {
    "plain": (2, 2, 2, 32, 32, 16, True, torch.float32, None, 1.0),
    "grouped, own directions": (2, 8, 2, 20, 12, 100, False, torch.float32, None, 1.0),
    "wide, many features": (1, 4, 1, 80, 128, 270, True, torch.float32, None, 1.0),
    "more heads than a block": (1, 20, 1, 16, 16, 16, True, torch.float32, None, 1.0),
    "more heads than a program takes": (1, 71, 1, 16, 20, 16, True, torch.float32, None, 1.0),
    "one piece": (1, 4, 2, 16, 16, 100, True, torch.float32, 1, 1.0),
    "three pieces": (1, 4, 2, 16, 16, 100, True, torch.float32, 3, 1.0),
    "bfloat16": (1, 4, 1, 64, 64, 256, True, torch.bfloat16, None, 1.0),
    "float16": (1, 2, 2, 64, 40, 100, True, torch.float16, None, 1.0),
    "large": (1, 2, 1, 64, 64, 64, True, torch.float32, None, 30.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_from_an_empty_state(case):
    *sizes, splits, scale = case
    inputs = make(*sizes, scale=scale)
    check(inputs, steps(inputs, 0, *fresh_state(inputs), splits=splits))


def test_hidden_keys_hold_nan_and_leave_the_state():
    inputs = make(2, 4, 2, 32, 32, 40, True, torch.float32, steps=5)
    _, key, value, *_, bias = inputs
    bias[0, :, :2] = -torch.inf
    bias[1, 0, 3] = -torch.inf
    for tensor in (key, value):
        tensor.masked_fill_((bias == -torch.inf)[..., None], torch.nan)
    log_weight, summary = fresh_state(inputs)
    out = steps(inputs, 0, log_weight, summary)
    assert not out[0, :, :2].any()
    check(inputs, out)
    before = log_weight.clone(), summary.clone()
    hidden = [x[:, :, :1] for x in (inputs[0], key * torch.nan, value * torch.nan)]
    decode(*hidden, *inputs[3:6], torch.full((2, 2, 1), -torch.inf), log_weight, summary)
    torch.testing.assert_close(log_weight, before[0], rtol=0.0, atol=1e-6)
    assert torch.equal(summary, before[1])


def test_state_comes_from_a_summary_and_ends_as_one():
    inputs = make(2, 4, 2, 32, 24, 40, False, torch.float32, steps=8)
    _, key, value, _, directions, _, bias = inputs
    past = 5
    seen = (key[:, :, :past], bias[:, :, :past].contiguous(), value[:, :, :past])
    summary, log_weight, _ = summarise(directions, *seen, None, past)
    check(inputs, steps(inputs, past, log_weight, summary), past)
    whole = summarise(directions, key, bias, value, None, key.shape[2])
    torch.testing.assert_close(summary, whole[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_weight, whole[1], rtol=1e-5, atol=1e-5)
