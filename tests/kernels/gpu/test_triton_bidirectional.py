"""Bidirectional kernels against float64 softmax weights over the whole matrix of queries and keys."""

from dataclasses import dataclass, replace

import pytest
import torch
from truth import attention, gradients

from favor.kernels.gpu import bidirectional as triton_bidirectional
from favor.kernels.operands import Geometry, Operands

NAMES = ("out", "dq", "dk", "dv", "dbias")


@dataclass(frozen=True)
class Case:
    """Lengths are a pair for one batch, and lists of pairs for packed sequences."""

    lengths: tuple = (100, 64)
    batch: int = 2
    heads: tuple = (2, 2)
    width: int = 32
    value_width: int = 32
    features: int = 16
    dtype: torch.dtype = torch.float32
    own_directions: bool = False
    hidden: bool = False
    transposed: bool = False
    splits: int | None = None
    scale: float = 1.0
    grad_scale: float = 1.0

    @property
    def packed(self):
        return isinstance(self.lengths[0], tuple)

    @property
    def pairs(self):
        return self.lengths if self.packed else (self.lengths,) * self.batch


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_directions: torch.Tensor
    key_directions: torch.Tensor
    offset: torch.Tensor
    key_bias: torch.Tensor
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    max_q: int
    max_k: int
    grad: torch.Tensor


def make(case):
    torch.manual_seed(0)
    heads, key_heads = case.heads
    batch = 1 if case.packed else case.batch
    length, size = (sum(pair[i] for pair in case.pairs) if case.packed else case.lengths[i] for i in (0, 1))

    def tokens(heads, length, width, scale=1.0):
        shape = (batch, length, heads, width) if case.transposed else (batch, heads, length, width)
        drawn = (torch.randn(shape) * scale).to(case.dtype)
        return drawn.transpose(1, 2) if case.transposed else drawn

    def per_head(*shape):
        return torch.randn(len(case.pairs) if case.own_directions else 1, key_heads, case.features, *shape)

    query, key = tokens(heads, length, case.width, case.scale), tokens(key_heads, size, case.width, case.scale)
    value = tokens(key_heads, size, case.value_width)
    bias = torch.randn(batch, key_heads, size)
    if case.hidden:
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[0, :, : case.pairs[0][1] if case.packed else size] = -torch.inf
        key.masked_fill_((bias == -torch.inf).unsqueeze(3), torch.nan)
        value.masked_fill_((bias == -torch.inf).unsqueeze(3), torch.nan)
    cu_q, cu_k = (
        torch.tensor([0, *(pair[i] for pair in case.pairs)]).cumsum(0).to(torch.int32) if case.packed else None
        for i in (0, 1)
    )
    longest = [max(pair[i] for pair in case.pairs) for i in (0, 1)] if case.packed else [0, 0]
    directions = [per_head(case.width) * case.width**-0.5 for _ in range(2)]
    grad = tokens(heads, length, case.value_width, case.grad_scale)
    return Inputs(query, key, value, *directions, per_head(), bias, cu_q, cu_k, *longest, grad)


def formula(inputs, dtype):
    """Output, and gradients of query, key, value and bias, with everything in `dtype`."""
    query, key, value, *directions, bias = (getattr(inputs, name).to(dtype) for name in Operands._fields[:7])
    lengths = None if inputs.cu_q is None else [own.diff().tolist() for own in (inputs.cu_q, inputs.cu_k)]
    leaves = [query, key, value, bias]
    return gradients(
        lambda q, k, v, b: attention(q, k, v, *directions, b, lengths=lengths), leaves, inputs.grad.to(dtype)
    )


def run(inputs, splits=None):
    arguments = [getattr(inputs, name) for name in list(Inputs.__annotations__)[:-1]]
    bundles = Operands(*arguments[:7]), Geometry(*arguments[7:])
    saved = triton_bidirectional.forward(*bundles, splits=splits)
    return [saved.out, *triton_bidirectional.backward(inputs.grad, *bundles, saved, splits=splits)[:4]], saved


def check(case):
    inputs = make(case)
    results, saved = run(inputs, case.splits)
    truth = formula(inputs, torch.float64)
    plain = formula(inputs, case.dtype)
    for name, result, exact, rounded in zip(NAMES, results, truth, plain, strict=True):
        assert result.dtype == (torch.float32 if name == "dbias" else case.dtype)
        assert torch.isfinite(result).all(), name
        size = exact.abs().max().item() if exact.numel() else 0.0
        error = (result.double() - exact).abs().max().item() if exact.numel() else 0.0
        floor = 0.1 * (case.grad_scale if name != "out" else 1.0)
        allowed = (1e-4 if case.dtype == torch.float32 else 1e-3) * max(size, floor)
        if case.dtype != torch.float32 or case.scale > 1.0:
            allowed += 2.0 * (rounded.double() - exact).nan_to_num(0.0).abs().max().item()
        assert error <= allowed, (name, error, allowed, size)
    if not case.transposed:
        assert all(x.is_contiguous() for x in results[1:])
    assert results[0].transpose(1, 2).is_contiguous()
    assert all(torch.isfinite(x).all() for x in saved)


UNEVEN = ((5, 7), (0, 3), (33, 0), (1, 1), (20, 50), (0, 0))
CASES = {
    "plain": Case((40, 33)),
    "one token": Case((1, 1), 1, width=64),
    "two tokens, many keys": Case((2, 150), 1, features=40, splits=5),
    "63": Case((63, 63), 1, (1, 1), width=64, value_width=80, features=40),
    "grouped": Case((33, 70), 1, heads=(4, 2), splits=3),
    "own directions": Case((33, 40), own_directions=True, heads=(2, 1), splits=2),
    "many features": Case((20, 40), 1, (1, 1), width=80, value_width=16, features=128),
    "128 wide": Case((20, 20), 1, (1, 1), width=128, value_width=128, features=40),
    "hidden": Case((33, 50), hidden=True, heads=(2, 1), splits=2),
    "hidden, transposed": Case((33, 40), hidden=True, transposed=True, width=20, value_width=12),
    "packed": Case(UNEVEN, heads=(2, 1), splits=2),
    "packed, own directions, transposed": Case(UNEVEN, own_directions=True, transposed=True, value_width=40),
    "packed, hidden": Case(UNEVEN, heads=(1, 1), hidden=True),
    "large": Case((33, 40), 1, (1, 1), scale=30.0, width=64),
    "large, many features": Case((16, 32), 1, (1, 1), scale=30.0, features=64, width=128),
}
BF16, F16 = torch.bfloat16, torch.float16
LOW = [
    ("grouped", BF16),
    ("many features", F16),
    *((name, t) for name in ("hidden", "packed", "large") for t in (BF16, F16)),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float32(case):
    check(case)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("name", "dtype"), LOW, ids=str)
def test_half_precision(name, dtype):
    check(replace(CASES[name], dtype=dtype))


@pytest.mark.usefixtures("poisoned")
def test_small_gradients_in_float16():
    """Gradients of tokens are normal numbers, while those of the logits are too small for float16."""
    case = Case((32, 64), 1, heads=(4, 1), features=100, dtype=torch.float16, scale=2.0**-10, grad_scale=2.0**-9)
    inputs = make(case)
    inputs.query_directions *= 2.0**10
    inputs.key_directions *= 2.0**10
    inputs.value *= 2.0**-4
    exact = formula(inputs, torch.float64)
    for name, result, truth in zip(NAMES, run(inputs)[0], exact, strict=True):
        error = ((result.double() - truth).norm() / truth.norm()).item()
        assert error <= 3e-3, (name, error)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
def test_a_thousand_tokens():
    check(Case((1000, 1000), 1, heads=(1, 1), splits=4))
