"""Kernels of windowed attention against the definition in float64: outputs and all gradients."""

from dataclasses import replace

import pytest
from cases import BF16, F16, Case, check, make, run, small_gradients

from favor.kernels.gpu import window

pytestmark = pytest.mark.usefixtures("poisoned")
UNEVEN = ((5, 5), (20, 20), (0, 0), (16, 16), (1, 1))
PREFIXED = ((5, 7), (20, 30), (0, 20), (1, 33), (0, 0))
# Each of these with one of the two kinds of masking; all forms run both ways in test_ops.py, dense and packed.
BIDIRECTIONAL = {
    "plain": Case(window=16, batch=2),
    "hidden": Case((25, 25), window=16, batch=2, hidden="some", heads=(2, 1)),
    "window of one token": Case((5, 5), window=1),
    "one window": Case((40, 40), window=40),
    "own directions": Case(window=16, own_directions=True, heads=(2, 1), batch=2),
    "values of another width": Case(window=16, width=40, value_width=80),
    "packed, own directions, transposed": Case(UNEVEN, window=7, own_directions=True, transposed=True, value_width=48),
    "large": Case(window=16, scale=10.0),
}
CAUSAL = {
    "window of five": Case((23, 23), window=5, features=40),
    "one token": Case((1, 1), window=16, width=64),
    "window of 40": Case((90, 90), window=40, features=40),
    "shorter than a window": Case((23, 23), window=64, features=40),
    "grouped": Case((33, 33), window=16, heads=(4, 2)),
    "wide": Case((20, 20), window=16, width=128, value_width=128, features=40),
    "hidden, transposed": Case((30, 30), window=8, batch=2, hidden="some", transposed=True, width=20, value_width=12),
    "packed": Case(UNEVEN, window=16, heads=(2, 1)),
    "keys first, hidden": Case((21, 50), window=16, batch=2, hidden="some"),
    "one query": Case((1, 50), window=8),
    "packed, keys first": Case(PREFIXED, window=16, heads=(2, 1)),
    "packed, keys first, hidden": Case(PREFIXED, window=7, hidden="some"),
}
CASES = BIDIRECTIONAL | {f"causal, {name}": replace(case, is_causal=True) for name, case in CAUSAL.items()}
LOW = [
    ("causal, wide", F16),
    ("hidden", BF16),
    ("packed, own directions, transposed", F16),
    ("causal, packed, keys first, hidden", BF16),
]
CASES |= {f"{name}, {dtype}": replace(CASES[name], dtype=dtype) for name, dtype in LOW}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definition(case):
    check(window, case)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_small_gradients_in_float16(is_causal):
    errors = small_gradients(window, Case(window=16, heads=(2, 1), features=40, is_causal=is_causal))
    # A difference of nearly equal numbers, one of them from the rounded output; no better for large gradients.
    assert errors.pop("query_bias") <= 5e-2
    assert max(errors.values()) <= 3e-3, errors


@pytest.mark.parametrize("lengths", [(0, 0), (0, 20)], ids=["no keys", "keys"])
def test_without_queries_gradients_are_zeros(lengths):
    found = run(window, make(Case(lengths, window=16, is_causal=True)))
    assert found.pop("out").shape == (1, 1, 0, 32)
    assert not any(own.any() for own in found.values())
