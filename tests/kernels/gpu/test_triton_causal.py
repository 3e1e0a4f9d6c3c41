"""Causal kernels against the definition in float64: outputs and all gradients; and chunks whose keys rise steeply."""

from dataclasses import replace

import pytest
import torch
from cases import BF16, F16, Case, check, make, run

from favor.kernels.gpu import causal
from favor.kernels.gpu.chunks import Problem, key_states
from favor.kernels.operands import Geometry

pytestmark = pytest.mark.usefixtures("poisoned")


def cut(chunk_size, segments=None):
    return {"chunk_size": chunk_size, "segments": segments}


def causal_case(lengths=(48, 48), options=None, **rest):
    return Case(lengths, is_causal=True, options=options or cut(16), **rest)


def steep_chunks(case, given):
    return key_states(Problem.of(*given[:2], **case.options)).steep


CASES = {
    "one token": causal_case((1, 1), heads=(2, 2)),
    "two tokens": causal_case((2, 2), features=40),
    "63": causal_case((63, 63), width=64, value_width=64, features=40),
    "own directions": causal_case((40, 40), cut(32, 1), batch=2, heads=(2, 1), own_directions=True),
    "keys first": causal_case((70, 100), cut(32, 2), width=80, value_width=48, features=40),
    "sizes by choice": causal_case((150, 150), cut(None), features=70),
    "transposed": causal_case((33, 70), cut(32, 3), heads=(2, 1), transposed=True),
    "one query": causal_case((1, 90), cut(64)),
    "fewer keys": causal_case((20, 9), batch=2, heads=(2, 2)),
    "narrow": causal_case((40, 40), cut(16, 9), value_width=1, width=1),
    "hidden at the left": causal_case((40, 60), hidden=((0, 36),), features=20),
    "holes": causal_case((60, 90), heads=(2, 1), hidden=((0, 3), (7, 8), (15, 34), (70, 90)), features=20),
    "all hidden": causal_case((20, 20), hidden=((0, 20),)),
    "packed": causal_case(((5, 5), (33, 33), (1, 1), (17, 17)), transposed=True),
    "packed, keys first": causal_case(
        ((5, 9), (0, 0), (20, 41), (0, 18)), cut(16, 2), heads=(2, 1), own_directions=True, transposed=True
    ),
    "packed, fewer keys": causal_case(
        ((9, 4), (7, 0), (17, 17)), cut(16, 1), heads=(2, 1), own_directions=True, transposed=True
    ),
    "packed, hidden": causal_case(((20, 20), (35, 35)), hidden=((0, 6), (18, 31), (54, 55))),
}
LOW = causal_case(
    (33, 50), heads=(2, 1), width=64, value_width=48, features=40, hidden=((0, 9), (30, 40)), transposed=True
)
CASES |= {str(dtype): replace(LOW, dtype=dtype) for dtype in (BF16, F16)}
# With tolerances: the logarithm of the normaliser is in the hundreds, and the backward pass has it in float32. Where
# keys are far along a direction, so is the error of its rounding.
STEEP = {
    "dense": (causal_case((45, 45), cut(32), rise=300.0), 3e-4),
    "grouped": (causal_case((20, 50), cut(32, 2), rise=200.0, heads=(2, 1), features=12), 3e-4),
    "hidden": (causal_case((50, 50), cut(32), rise=400.0, hidden=((0, 3), (16, 22), (40, 41))), 3e-4),
    "packed": (causal_case(((20, 30), (4, 4), (17, 17)), rise=300.0), 3e-4),
    "bfloat16": (causal_case((45, 45), cut(32), rise=200.0, dtype=BF16), 0.1),
    "float16": (causal_case((45, 45), cut(32), rise=200.0, dtype=F16), 0.015),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_definition(case):
    check(causal, case)
    assert not steep_chunks(case, make(case)).any()


@pytest.mark.parametrize(("case", "tolerance"), STEEP.values(), ids=STEEP)
def test_steep_chunks(case, tolerance):
    assert steep_chunks(case, make(case)).any()
    check(causal, case, tolerance)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_attend(shape):
    length, keys = shape
    operands, _, grad = make(causal_case((5, 5), heads=(2, 2)))
    few = {name: getattr(operands, name)[:, :, :keys].contiguous() for name in ("key", "value", "key_bias")}
    operands = operands._replace(query=operands.query[:, :, :length], **few)
    given = operands, Geometry(None, None, length, keys, is_causal=True), grad[:, :, :length]
    assert causal.forward(*given[:2]).lse.isposinf().all()
    assert not any(tensor.any() for tensor in run(causal, given).values())


@pytest.mark.parametrize("position", [1, 16, 37])
def test_the_future_does_not_reach_the_past(position):
    case = causal_case(options=cut(16, 2), features=20)
    (first, *rest), (second, *_), (other, *_) = make(case), make(case), make(case, seed=1)
    for name in ("query", "key", "value", "key_bias"):
        getattr(second, name)[:, :, position:] = getattr(other, name)[:, :, position:]
    outs = [causal.forward(operands, rest[0], **case.options)[:2] for operands in (first, second)]
    for one, changed in zip(*outs, strict=True):
        assert torch.equal(one[:, :, :position], changed[:, :, :position])
        assert not torch.equal(one, changed)


def test_shifts_of_offsets_cancel():
    operands, geometry, _ = make(causal_case((40, 40), features=20))
    moved = operands._replace(offset=operands.offset + 1000.0, key_bias=operands.key_bias + 3000.0)
    outs = [causal.forward(own, geometry, chunk_size=16).out for own in (operands, moved)]
    assert (outs[0] - outs[1]).abs().max() < 3e-3
