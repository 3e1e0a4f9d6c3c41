"""Decoding one token at a time gives what causal attention gives for the whole sequence."""

import pytest
import torch
from truth import attention, make_inputs

from favor.kernels import DecodeState, decode, linear_attention


@pytest.mark.parametrize("prompt", [0, 13])
@pytest.mark.parametrize("shared", [False, True])
def test_steps_equal_the_whole(prompt, shared):
    inputs = make_inputs(30, groups=3, batch=2, features=20, value_dim=5, shared=shared)
    inputs[-1][0, :, :4] = inputs[-1][1, :, 20] = -torch.inf
    expected = attention(*inputs, is_causal=True)
    for tensor in inputs[1:3]:
        tensor[0, :, :4], tensor[1, :, 20] = torch.nan, torch.nan
    query, key, value, to_query, to_key, offset, bias = inputs
    if prompt:
        state = DecodeState.from_keys(*(t[:, :, :prompt] for t in (key, value)), to_key, bias[:, :, :prompt])
    else:
        state = DecodeState.empty(2, 2, 20, 5, dtype=torch.float64)
    for step in range(prompt, 30):
        now = slice(step, step + 1)
        rows = (tensor[:, :, now] for tensor in (query, key, value))
        out = decode(*rows, to_query, to_key, offset, bias[:, :, now], state)
        torch.testing.assert_close(out, expected[:, :, now], rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton kernels on the CPU, by the interpreter")
def test_both_kernels_leave_the_same_state_and_step_alike():
    inputs = [t.float() for t in make_inputs(14, groups=2, batch=2)]
    inputs[-1][1] = -torch.inf
    query, key, value, to_query, to_key, offset, bias = inputs
    results = []
    for kernel in ("torch", "triton"):
        past = (key[:, :, :13], value[:, :, :13], to_key, bias[:, :, :13])
        state = DecodeState.from_keys(*past, kernel=kernel)
        rows = (tensor[:, :, 13:] for tensor in (query, key, value))
        out = decode(*rows, to_query, to_key, offset, bias[:, :, 13:], state, kernel=kernel)
        results.append((out, state.log_weight, state.summary))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_thousand_steps_in_float32_lose_no_accuracy():
    inputs = make_inputs(1000, features=32)
    expected = linear_attention(*inputs, is_causal=True)
    state = DecodeState.empty(1, 2, 32, 8)
    query, key, value, *operands, bias = (t.float() for t in inputs)
    for step in range(1000):
        now = slice(step, step + 1)
        out = decode(*(t[:, :, now] for t in (query, key, value)), *operands, bias[:, :, now], state)
    torch.testing.assert_close(out.double(), expected[:, :, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default")
def test_the_operator_keeps_the_rules_of_pytorch():
    inputs = [t.float() for t in make_inputs(1, groups=2)]
    state = DecodeState.empty(1, 2, 16, 8)
    torch.library.opcheck(torch.ops.favor.decode.default, (*inputs, state.log_weight, state.summary, "torch"))


def test_more_than_one_token_is_refused():
    inputs = make_inputs(3)
    with pytest.raises(ValueError, match="one token at a time, got 3 queries and 3 keys"):
        decode(*inputs, DecodeState.empty(1, 2, 16, 8))
