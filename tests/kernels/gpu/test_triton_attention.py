"""Kernels of attention against the definition in float64: outputs and all gradients, and what each form has alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from truth import error as relative_error

from favor.kernels.gpu import bidirectional, causal, window
from favor.kernels.gpu.chunks import Problem, key_states
from favor.kernels.naive import naive_linear_attention
from favor.kernels.operands import Geometry, Operands

Given = tuple[Operands, Geometry, Tensor]
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A dense batch, or packed sequences.

    Attributes:
        lengths: of queries and keys: a pair, or one for each packed sequence.
        hidden: spans of keys; or "some": all of the first sequence, a third at the left of the last, and others.
        transposed: whether tokens come before heads in memory, with gaps between the rows.
        rise: how far some keys are above the others along one of the directions.
        options: of the host functions.
    """

    lengths: tuple[Any, ...] = (40, 40)
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    width: int = 32
    value_width: int = 32
    features: int = 16
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    window: int = 0
    own_directions: bool = False
    hidden: Any = ()
    transposed: bool = False
    scale: float = 1.0
    grad_scale: float = 1.0
    rise: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether `lengths` are those of packed sequences."""
        return isinstance(self.lengths[0], tuple)

    @property
    def geometry(self) -> Geometry:
        """Which key a query sees."""
        pairs = self.lengths if self.is_packed else (self.lengths,)
        ends = [torch.tensor([0, *(pair[i] for pair in pairs)]).cumsum(0).int() for i in (0, 1)]
        longest = (max(pair[i] for pair in pairs) for i in (0, 1))
        packing = ends if self.is_packed else (None, None)
        return Geometry(*packing, *longest, self.is_causal, self.window, 0.5 * self.width**-0.5)


def make(case: Case, seed: int = 0) -> Given:
    """Draws operands and the gradient of the output; hidden keys and their values are NaN."""
    torch.manual_seed(seed)
    (heads, key_heads), geometry = case.heads, case.geometry
    pairs = case.lengths if case.is_packed else (case.lengths,)
    length, size = (sum(pair[i] for pair in pairs) for i in (0, 1))

    def tokens(heads: int, length: int, width: int, scale: float = 1.0) -> Tensor:
        if case.transposed:
            drawn = torch.randn(case.batch, length, heads, width + 3)[..., :width].transpose(1, 2)
        else:
            drawn = torch.randn(case.batch, heads, length, width)
        return (scale * drawn).to(case.dtype)

    def per_head(*shape: int) -> Tensor:
        number = max(case.batch, len(pairs)) if case.own_directions else 1
        return torch.randn(number, key_heads, case.features, *shape)

    query, key = tokens(heads, length, case.width, case.scale), tokens(key_heads, size, case.width, case.scale)
    value = tokens(key_heads, size, case.value_width)
    directions = [per_head(case.width) * case.width**-0.5 for _ in range(2)]
    if case.rise:
        # Some keys after the first one of their chunk are far along some direction.
        for step, place in enumerate(range(5, size, 9)):
            along = directions[1][:, :, step % case.features]
            along = along / along.square().sum(-1, keepdim=True)
            key[:, :, place] += (case.rise * (1 + step % 3) / 3 * along[0]).to(case.dtype)
    bias = torch.randn(case.batch, key_heads, size)
    if case.hidden == "some":
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[0, :, : pairs[0][1]] = -torch.inf
        bias[-1, :, size - pairs[-1][1] : size - pairs[-1][1] * 2 // 3] = -torch.inf
    else:
        for start, stop in case.hidden:
            bias[:, :, start:stop] = -torch.inf
    key, value = (tensor.masked_fill(bias.isneginf().unsqueeze(3), torch.nan) for tensor in (key, value))
    query_bias = torch.randn(case.batch, heads, length) if case.window else None
    operands = Operands(query, key, value, *directions, per_head(), bias, query_bias)
    return operands, geometry, tokens(heads, length, case.value_width, case.grad_scale)


def truth(given: Given, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The output and the gradients of tokens and biases, with everything in one type."""
    operands, geometry, grad = given
    leaves = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in operands]
    form = {"is_causal": geometry.is_causal, "window": geometry.window, "scale": geometry.scale}
    form |= {"cu_seqlens_q": geometry.cu_q, "cu_seqlens_k": geometry.cu_k}
    out = naive_linear_attention(*leaves[:7], query_bias=leaves[7], **form)
    out.backward(grad.to(dtype))
    gradients = {name: leaf.grad for name, leaf in zip(Operands._fields, leaves, strict=True) if leaf is not None}
    return {"out": out.detach()} | gradients


def run(kernel: ModuleType, given: Given, **options: Any) -> dict[str, Tensor]:
    """The same by a kernel; only the torch kernel has gradients of directions."""
    operands, geometry, grad = given
    saved = kernel.forward(operands, geometry, **options)
    assert not any(tensor.isnan().any() for tensor in saved[:2])
    gradients = kernel.backward(grad, operands, geometry, saved, **options)._asdict()
    for name in ("query_directions", "key_directions", "offset", *(["query_bias"] if not geometry.window else [])):
        assert not gradients.pop(name).numel()
    for name, tensor in gradients.items():
        like = getattr(operands, name)
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
    return {"out": saved.out} | gradients


def small_gradients(kernel: ModuleType, case: Case) -> dict[str, float]:
    """Errors in float16 where gradients of tokens are normal numbers, and those of the logits are too small for it."""
    operands, *rest = make(replace(case, dtype=F16, scale=2.0**-10, grad_scale=2.0**-9))
    for directions in operands[3:5]:
        directions *= 2.0**10
    operands.value.mul_(2.0**-4)
    found, exact = run(kernel, (operands, *rest)), truth((operands, *rest))
    return {name: relative_error(own, exact[name]) for name, own in found.items()}


def check(kernel: ModuleType, case: Case, tolerance: float | None = None) -> None:
    """Compares them by the largest error, relative to the largest number.

    The default tolerance is that of float32, to which twice the error of the definition in the type of the tokens comes
    if numbers are rounded, or large.
    """
    given = make(case)
    found, exact, plain = run(kernel, given, **case.options), truth(given), truth(given, case.dtype)
    largest = max(exact[name].abs().max() for name in found if name != "out")
    assert found["out"].dtype == case.dtype
    for name, own in found.items():
        # Gradients that vanish in exact arithmetic are compared with the others.
        size = max(exact[name].abs().max(), 0.1 * largest if name != "out" else 0.1)
        allowed = (tolerance or 2e-5) * size
        if tolerance is None and (case.dtype != torch.float32 or case.scale > 1):
            allowed += 2 * (plain[name].double() - exact[name]).nan_to_num(0).abs().max()
        error = (own.double() - exact[name]).abs().max()
        assert error <= allowed, (name, error / size, allowed / size)


pytestmark = pytest.mark.usefixtures("poisoned")
UNEVEN = ((5, 7), (0, 3), (33, 0), (1, 1), (20, 50), (0, 0))
EVEN = ((5, 5), (20, 20), (0, 0), (16, 16), (1, 1))
PREFIXED = ((5, 7), (20, 30), (0, 20), (1, 33), (0, 0))
IN_TWO, IN_THREE = {"splits": 2}, {"splits": 3}


def cut(chunk_size, segments=None):
    return {"chunk_size": chunk_size, "segments": segments}


def causal_case(lengths=(48, 48), options=None, **rest):
    return Case(lengths, is_causal=True, options=options or cut(16), **rest)


def steep_chunks(case, given):
    return key_states(Problem.of(*given[:2], **case.options)).steep


BIDIRECTIONAL = {
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
    "packed, own directions, transposed": Case(UNEVEN, own_directions=True, transposed=True, value_width=40),
    "packed, hidden": Case(UNEVEN, heads=(2, 1), hidden="some", options=IN_TWO),
    "several blocks in a piece": Case((150, 500), options=IN_TWO),
    "large": Case((33, 40), scale=30.0, width=64),
    "large, many features": Case((16, 32), scale=30.0, features=64, width=128),
}
# Each of these with one of the two kinds of masking; all forms run both ways in test_ops.py, dense and packed.
WINDOW = {
    "plain": Case(window=16, batch=2),
    "hidden": Case((25, 25), window=16, batch=2, hidden="some", heads=(2, 1)),
    "window of one token": Case((5, 5), window=1),
    "one window": Case((40, 40), window=40),
    "own directions": Case(window=16, own_directions=True, heads=(2, 1), batch=2),
    "values of another width": Case(window=16, width=40, value_width=80),
    "packed, own directions, transposed": Case(EVEN, window=7, own_directions=True, transposed=True, value_width=48),
    "large": Case(window=16, scale=10.0),
}
CAUSAL_WINDOW = {
    "window of five": Case((23, 23), window=5, features=40),
    "one token": Case((1, 1), window=16, width=64),
    "window of 40": Case((90, 90), window=40, features=40),
    "shorter than a window": Case((23, 23), window=64, features=40),
    "wide": Case((20, 20), window=16, width=128, value_width=128, features=40),
    "hidden, transposed": Case((30, 30), window=8, batch=2, hidden="some", transposed=True, width=20, value_width=12),
    "keys first, hidden": Case((21, 50), window=16, batch=2, hidden="some"),
    "one query": Case((1, 50), window=8),
    "packed, keys first, hidden": Case(PREFIXED, window=7, heads=(4, 2), hidden="some"),
}
WINDOW |= {f"causal, {name}": replace(case, is_causal=True) for name, case in CAUSAL_WINDOW.items()}
CAUSAL = {
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
    "packed, keys first": causal_case(
        ((5, 9), (0, 0), (20, 41), (0, 18)), cut(16, 2), heads=(2, 1), own_directions=True, transposed=True
    ),
    "packed, fewer keys": causal_case(
        ((9, 4), (7, 0), (17, 17)), cut(16, 1), heads=(2, 1), own_directions=True, transposed=True
    ),
    "packed, hidden": causal_case(((20, 20), (35, 35)), hidden=((0, 6), (18, 31), (54, 55))),
}
CAUSAL["low"] = causal_case(
    (33, 50), heads=(2, 1), width=64, value_width=48, features=40, hidden=((0, 9), (30, 40)), transposed=True
)
TABLES = {bidirectional: BIDIRECTIONAL, window: WINDOW, causal: CAUSAL}
LOW = {
    bidirectional: {BF16: ("packed, hidden", "large"), F16: ("hidden", "large")},
    window: {
        BF16: ("causal, packed, keys first, hidden",),
        F16: ("packed, own directions, transposed",),
    },
    causal: {BF16: ("low",), F16: ("low",)},
}
for kernel, rows in LOW.items():
    TABLES[kernel] |= {f"{name}, {d}": replace(TABLES[kernel][name], dtype=d) for d in rows for name in rows[d]}
CASES = {
    f"{kernel.__name__[18:]}: {name}": (kernel, case) for kernel in TABLES for name, case in TABLES[kernel].items()
}
# With tolerances: the logarithm of the normaliser is in the hundreds, and the backward pass has it in float32. Where
# keys are far along a direction, so is the error of its rounding.
STEEP = {
    "grouped": (causal_case((20, 50), cut(32, 2), rise=200.0, heads=(2, 1), features=12), 3e-4),
    "hidden": (causal_case((50, 50), cut(32), rise=400.0, hidden=((0, 3), (16, 22), (40, 41))), 3e-4),
    "packed": (causal_case(((20, 30), (4, 4), (17, 17)), rise=300.0), 3e-4),
    "bfloat16": (causal_case((45, 45), cut(32), rise=200.0, dtype=BF16), 0.1),
    "float16": (causal_case((45, 45), cut(32), rise=200.0, dtype=F16), 0.015),
}


@pytest.mark.parametrize(("kernel", "case"), CASES.values(), ids=CASES)
def test_equals_the_definition(kernel, case):
    check(kernel, case)
    assert kernel is not causal or not steep_chunks(case, make(case)).any()


@pytest.mark.parametrize(("case", "tolerance"), STEEP.values(), ids=STEEP)
def test_steep_chunks(case, tolerance):
    assert steep_chunks(case, make(case)).any()
    check(causal, case, tolerance)


def test_small_gradients_in_float16():
    assert max(small_gradients(bidirectional, Case((32, 64), heads=(4, 1), features=100)).values()) <= 3e-3
    for is_causal in (False, True):
        errors = small_gradients(window, Case(window=16, heads=(2, 1), features=40, is_causal=is_causal))
        # A difference of nearly equal numbers, one of them from the rounded output; no better for large gradients.
        assert errors.pop("query_bias") <= 5e-2
        assert max(errors.values()) <= 3e-3, errors


@pytest.mark.parametrize("lengths", [(0, 0), (0, 20)], ids=["no keys", "keys"])
def test_without_queries_gradients_are_zeros(lengths):
    found = run(window, make(Case(lengths, window=16, is_causal=True)))
    assert found.pop("out").shape == (1, 1, 0, 32)
    assert not any(own.any() for own in found.values())


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
