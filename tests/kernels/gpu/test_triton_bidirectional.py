"""Bidirectional kernels against the definition in float64: outputs and all gradients."""

from dataclasses import replace

import pytest
from cases import BF16, F16, Case, check, small_gradients

from favor.kernels.gpu import bidirectional

pytestmark = pytest.mark.usefixtures("poisoned")
UNEVEN = ((5, 7), (0, 3), (33, 0), (1, 1), (20, 50), (0, 0))
IN_TWO, IN_THREE = {"splits": 2}, {"splits": 3}
CASES = {
    "plain": Case((40, 33), 2, (2, 2)),
    "one token": Case((1, 1), width=64),
    "two tokens, many keys": Case((2, 150), features=40, options={"splits": 5}),
    "63": Case((63, 63), width=64, value_width=80, features=40),
    "grouped": Case((33, 70), heads=(4, 2), options=IN_THREE),
    "own directions": Case((33, 40), 2, (2, 1), own_directions=True, options=IN_TWO),
    "many features": Case((20, 40), width=80, value_width=16, features=128),
    "128 wide": Case((20, 20), width=128, value_width=128, features=40),
    "hidden": Case((33, 50), 2, (2, 1), hidden="some", options=IN_TWO),
    "hidden, transposed": Case((33, 40), 2, hidden="some", transposed=True, width=20, value_width=12),
    "packed": Case(UNEVEN, heads=(2, 1), options=IN_TWO),
    "packed, own directions, transposed": Case(UNEVEN, own_directions=True, transposed=True, value_width=40),
    "packed, hidden": Case(UNEVEN, hidden="some"),
    "several blocks in a piece": Case((150, 500), options=IN_TWO),
    "large": Case((33, 40), scale=30.0, width=64),
    "large, many features": Case((16, 32), scale=30.0, features=64, width=128),
}
LOW = [("grouped", BF16), ("many features", F16), ("hidden", F16), ("packed", BF16), ("large", BF16), ("large", F16)]
CASES |= {f"{name}, {dtype}": replace(CASES[name], dtype=dtype) for name, dtype in LOW}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definition(case):
    check(bidirectional, case)


def test_small_gradients_in_float16():
    errors = small_gradients(bidirectional, Case((32, 64), heads=(4, 1), features=100))
    assert max(errors.values()) <= 3e-3, errors
