"""Kernels of windowed attention against the definition in float64: outputs and all gradients."""

from dataclasses import dataclass, replace

import pytest
import torch
from truth import error, gradients, window_attention

from favor.kernels import linear_attention


@dataclass(frozen=True)
class Case:
    """Lengths are a pair for one batch, and pairs for packed sequences; `hidden` keys are those of a padded batch."""

    lengths: tuple = (40, 40)
    window: int = 16
    is_causal: bool = False
    batch: int = 1
    heads: tuple = (1, 1)
    width: int = 32
    value_width: int = 32
    features: int = 16
    dtype: torch.dtype = torch.float32
    own_directions: bool = False
    hidden: bool = False
    transposed: bool = False
    magnitude: float = 1.0

    @property
    def packed(self):
        return isinstance(self.lengths[0], tuple)

    @property
    def options(self):
        return {"window": self.window, "scale": 0.5 * self.width**-0.5, "is_causal": self.is_causal}

    @property
    def pieces(self):
        """Lengths of the packed queries, and of the packed keys."""
        return tuple([pair[i] for pair in self.lengths] for i in (0, 1)) if self.packed else None

    @property
    def packing(self):
        if not self.packed:
            return {}
        cumulative = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in self.pieces]
        longest = {"max_seqlen_q": max(self.pieces[0]), "max_seqlen_k": max(self.pieces[1])}
        return {"cu_seqlens_q": cumulative[0], "cu_seqlens_k": cumulative[1], **longest}


def make(case):
    """Query, key, value, directions, offset and both biases, and the gradient of the output."""
    torch.manual_seed(0)
    heads, key_heads = case.heads
    batch = 1 if case.packed else case.batch
    length, size = map(sum, case.pieces) if case.packed else case.lengths

    def tokens(heads, length, width):
        shape = (batch, length, heads, width) if case.transposed else (batch, heads, length, width)
        return torch.randn(shape).transpose(1, 2) if case.transposed else torch.randn(shape)

    def per_head(*shape):
        number = len(case.lengths) if case.packed else case.batch
        return torch.randn(number if case.own_directions else 1, key_heads, case.features, *shape)

    query, key = case.magnitude * tokens(heads, length, case.width), tokens(key_heads, size, case.width)
    value, grad = tokens(key_heads, size, case.value_width), tokens(heads, length, case.value_width)
    bias = torch.randn(batch, key_heads, size)
    if case.hidden:
        for row, first, last in ((0, 0, size // 3), (batch - 1, size - size // 4, size), (batch // 2, 0, size)):
            bias[row, :, first:last] = -torch.inf
        key, value = (x.masked_fill((bias == -torch.inf).unsqueeze(3), torch.nan) for x in (key, value))
    directions = [per_head(case.width) * case.width**-0.5 for _ in range(2)]
    query, key, value, grad = (x.to(case.dtype) for x in (query, key, value, grad))
    return [query, key, value, *directions, per_head(), bias, torch.randn(batch, heads, length)], grad


def fixed(function, for_directions):
    """The function without gradients of directions and offset, unless they are asked for."""
    return function if for_directions else lambda *t: function(*t[:3], *(x.detach() for x in t[3:6]), *t[6:])


def run(case, inputs, grad, for_directions=False):
    def attend(*t):
        return linear_attention(*t[:7], query_bias=t[7], kernel="triton", **case.options, **case.packing)

    return gradients(fixed(attend, for_directions), inputs, grad)


def formula(case, inputs, grad, dtype, for_directions=False):
    def attend(*t):
        return window_attention(*t, lengths=case.pieces, **case.options)

    return gradients(fixed(attend, for_directions), [x.to(dtype) for x in inputs], grad.to(dtype))


def check(case, for_directions=False):
    inputs, grad = make(case)
    found = run(case, inputs, grad, for_directions)
    exact = formula(case, inputs, grad, torch.float64, for_directions)
    plain = formula(case, inputs, grad, case.dtype, for_directions)
    largest = max(x.norm() for x in exact[1:])
    for index, (ours, expected, rounded) in enumerate(zip(found, exact, plain, strict=True)):
        assert torch.isfinite(ours).all(), index
        # Gradients that vanish in exact arithmetic are compared with the others.
        allowed = 5e-5 * max(expected.norm(), 0.1 * largest)
        if case.dtype != torch.float32:
            allowed = max(allowed, 2.0 * (rounded.double() - expected).nan_to_num(0.0).norm())
        assert (ours.double() - expected).norm() <= allowed, (index, error(ours, expected), error(rounded, expected))
    assert found[0].dtype == case.dtype
    assert found[0].transpose(1, 2).is_contiguous()


UNEVEN = ((5, 5), (20, 20), (0, 0), (16, 16), (1, 1))
PREFIXED = ((5, 7), (20, 30), (0, 20), (1, 33), (0, 0))
# Each of these with one of the two kinds of masking; all forms run both ways in test_ops.py, dense and packed.
BIDIRECTIONAL = {
    "plain": Case(batch=2),
    "hidden": Case((25, 25), batch=3, hidden=True, heads=(2, 1)),
    "window of one token": Case((5, 5), 1),
    "one window": Case((40, 40), 40),
    "own directions": Case(own_directions=True, heads=(2, 1), batch=2),
    "values of another width": Case(width=40, value_width=80),
    "packed, own directions, transposed": Case(UNEVEN, 7, own_directions=True, transposed=True, value_width=48),
    "large": Case(magnitude=10.0),
}
CAUSAL = {
    "window of five": Case((23, 23), 5, features=40),
    "one token": Case((1, 1), width=64),
    "window of 40": Case((90, 90), 40, features=40),
    "shorter than a window": Case((23, 23), 64, features=40),
    "grouped": Case((33, 33), heads=(4, 2)),
    "wide": Case((20, 20), 16, width=128, value_width=128, features=40),
    "hidden, transposed": Case((30, 30), 8, batch=3, hidden=True, transposed=True, width=20, value_width=12),
    "packed": Case(UNEVEN, heads=(2, 1)),
    "keys first, hidden": Case((21, 50), batch=3, hidden=True),
    "one query": Case((1, 50), 8),
    "packed, keys first": Case(PREFIXED, heads=(2, 1)),
    "packed, keys first, hidden": Case(PREFIXED, 7, hidden=True),
}
CASES = BIDIRECTIONAL | {f"causal, {name}": replace(case, is_causal=True) for name, case in CAUSAL.items()}
BF16, F16 = torch.bfloat16, torch.float16
LOW = [
    ("causal, wide", F16),
    ("hidden", BF16),
    ("packed, own directions, transposed", F16),
    ("causal, packed, keys first, hidden", BF16),
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
@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.float32), ("causal, packed, keys first", BF16)], ids=str)
def test_directions_learn_from_the_torch_kernel(name, dtype):
    """It takes the summaries that the Triton kernel left."""
    check(replace(CASES[name], dtype=dtype), for_directions=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_small_gradients_in_float16(is_causal):
    """Gradients of tokens are normal numbers, while those of the logits are too small for float16."""
    case = Case(batch=1, heads=(2, 1), features=40, dtype=torch.float16, magnitude=2.0**-10, is_causal=is_causal)
    inputs, grad = make(case)
    inputs[3] *= 2.0**10
    inputs[2] *= 2.0**-4
    grad *= 2.0**-9
    exact = formula(case, inputs, grad, torch.float64)
    *others, query_bias = (error(ours, x) for ours, x in zip(run(case, inputs, grad), exact, strict=True))
    assert max(others) <= 3e-3
    # A difference of nearly equal numbers, one of them from the rounded output; no better for large gradients.
    assert query_bias <= 5e-2


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lengths", [(0, 0), (0, 20)], ids=["no keys", "keys"])
def test_without_queries_gradients_are_zeros(lengths):
    out, *grads = run(case := Case(lengths, is_causal=True), *make(case))
    assert out.shape == (1, 1, 0, 32)
    assert not any(x.any() for x in grads)
