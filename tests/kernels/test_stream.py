"""Causal attention by tokens or by pieces gives what it gives for the whole sequence; the state does not grow."""

import pytest
import torch
from elsewhere import interpreted
from pairwise import pairs
from truth import attention, make_inputs

import favor
from favor.kernels import DecodeState, StreamState, decode, extend, linear_attention

PIECES = {"tokens": [1] * 40, "uneven": [3, 0, 17, 1, 19], "whole": [40]}


def in_pieces(inputs, sizes, state, query_bias=None, **options):
    query, key, value, to_query, to_key, offset, bias = inputs
    outs, start = [], 0
    for size in sizes:
        now = (slice(None), slice(None), slice(start, start + size))
        own = {} if query_bias is None else {"query_bias": query_bias[now]}
        rows = (query[now], key[now], value[now], to_query, to_key, offset, bias[now])
        outs.append(extend(*rows, state, **own, **options))
        start += size
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize(*pairs(pieces=PIECES, window=[0, 1, 7, 64], shared=[True, False]))
def test_pieces_equal_the_whole(pieces, window, shared):
    inputs = make_inputs(40, groups=3, batch=2, features=20, value_dim=5, shared=shared)
    inputs[-1][0, :, :4] = inputs[-1][1, :, 20] = -torch.inf
    options, biases = {}, []
    if window:
        options = {"window": window, "scale": 0.4}
        biases = [torch.randn(2, 6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    expected = attention(*inputs, *biases, is_causal=True, **options)
    for tensor in inputs[1:3]:
        tensor[0, :, :4], tensor[1, :, 20] = torch.nan, torch.nan
    state = StreamState()
    found = in_pieces(inputs, PIECES[pieces], state, *biases, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert window or state.nbytes == 2 * 2 * 20 * (5 + 1) * 8


def test_steep_logits_in_float32():
    inputs = make_inputs(64, features=32)
    inputs[3:5] = [40 * directions for directions in inputs[3:5]]
    expected = attention(*inputs, is_causal=True)
    found = in_pieces([t.float() for t in inputs], [30, 34], StreamState())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [0, 4])
def test_a_shorter_window_on_the_way_is_refused(window):
    inputs = make_inputs(6, features=8)
    query_bias, state = torch.zeros(*inputs[0].shape[:3], dtype=torch.float64), StreamState()
    extend(*inputs, state, window=8, query_bias=query_bias)
    with pytest.raises(ValueError, match=f"holds 6 tokens .* longer window than {window}"):
        extend(*inputs, state, window=window, query_bias=query_bias if window else None)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({}, {"num_features": 4}),
        ({}, {"features": "landmark"}),
        ({"features": "landmark"}, {}),
        ({"features": "landmark"}, {"window": 8}),
        ({}, {"batch": 1}),
        ({"features": "landmark"}, {"features": "landmark", "batch": 1}),
    ],
)
def test_a_state_goes_on_with_what_it_was_begun_with(first, change):
    state = StreamState()

    def attend(length, *, batch=2, **options):
        rows = torch.ones(3, batch, 2, length, 8)
        return favor.favor_attention(
            *rows, **{"features": "pos", "num_features": 8, **options}, is_causal=True, state=state
        )

    attend(5, **first)
    with pytest.raises(ValueError, match="the state was begun with other"):
        attend(1, **change)


@pytest.mark.parametrize("features", ["pos", "landmark"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)])
def test_pieces_of_another_type(features, dtypes):
    generator, state, found = torch.Generator().manual_seed(0), StreamState(), []
    rows = torch.randn(3, 1, 2, 20, 8, generator=generator, dtype=torch.float64).bfloat16()
    options = {"features": features, "num_features": 8, "is_causal": True}
    options |= {"window": 6} if features == "pos" else {}
    for piece, dtype in zip(rows.split([13, 7], 3), dtypes, strict=True):
        out = favor.favor_attention(*piece.to(dtype), **options, state=state)
        assert out.dtype == dtype
        found.append(out.double())
    expected = favor.favor_attention(*rows.double(), **options)
    torch.testing.assert_close(torch.cat(found, 2), expected, rtol=2e-2, atol=1e-2)


def test_states_of_rows_join_and_split():
    """Rows of different lengths, one of them new, go on as one batch and then alone again."""
    inputs = make_inputs(40, batch=3, features=20, shared=True)
    whole, lengths = attention(*inputs, is_causal=True), (12, 0, 25)

    def row(number, start, stop):
        now = (slice(number, number + 1), slice(None), slice(start, stop))
        return [tensor[now] if tensor.shape[2] == 40 else tensor for tensor in inputs]

    def check(found, number, start):
        expected = whole[number, :, start : start + found.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    states = [StreamState() for _ in lengths]
    for number, length in enumerate(lengths):
        in_pieces(row(number, 0, length), [length], states[number])
    assert [state.can_join for state in states] == [True, True, True]
    states[1] = StreamState()  # as before the first token
    assert not states[1].can_join
    joined = StreamState.joined(states)
    rows = [row(number, length, length + 10) for number, length in enumerate(lengths)]
    batch = [torch.cat(parts) for parts in zip(*(own[:3] for own in rows), strict=True)]
    bias = torch.cat([own[-1] for own in rows])
    bias[2, :, 4:] = -torch.inf  # the last row has only four tokens here
    found = in_pieces([*batch, *inputs[3:6], bias], [10], joined)
    for number, length in enumerate(lengths):
        check(found[number, :, : 4 if number == 2 else 10], number, length)
    for number, state in enumerate(joined.split()):
        start = lengths[number] + (4 if number == 2 else 10)
        check(in_pieces(row(number, start, start + 5), [5], state)[0], number, start)
    assert all(torch.isfinite(state.memory.summary).all() for state in states[::2])  # the parts are as they were


def test_states_with_blocks_do_not_join():
    state, inputs = StreamState(), make_inputs(8, features=20)
    in_pieces(inputs, [8], state, torch.zeros(1, 2, 8, dtype=torch.float64), window=4)
    assert (state.can_join, StreamState().can_join) == (False, False)
    for states in ([state, StreamState()], [StreamState()], []):
        with pytest.raises(ValueError, match="without a window, and one must have tokens"):
            StreamState.joined(states)


@interpreted
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
def test_the_operator_of_decoding_keeps_the_rules_of_pytorch():
    inputs = [t.float() for t in make_inputs(1, groups=2)]
    state = DecodeState.empty(1, 2, 16, 8)
    torch.library.opcheck(torch.ops.favor.decode.default, (*inputs, state.log_weight, state.summary, "torch"))


def test_more_than_one_token_is_refused_by_decode():
    inputs = make_inputs(3)
    with pytest.raises(ValueError, match="one token at a time, got 3 queries and 3 keys"):
        decode(*inputs, DecodeState.empty(1, 2, 16, 8))
