"""Causal kernels against float64 attention over the whole matrix of queries and keys."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from favor.kernels.gpu.causal import op as triton_causal
from favor.kernels.gpu.causal.problem import Problem
from favor.kernels.gpu.causal.states import key_states
from favor.kernels.operands import Geometry, Operands

NAMES = ("out", "lse", "query", "key", "value", "key_bias")


@dataclass(frozen=True)
class Case:
    """One dense batch, or packed sequences if there are `lengths`; `options` go to the host functions."""

    length: int = 48
    keys: int | None = None
    lengths: tuple = ()
    batch: int = 1
    heads: tuple = (2, 2)
    width: int = 32
    value_width: int = 32
    features: int = 16
    dtype: torch.dtype = torch.float32
    own_directions: bool = False
    transposed: bool = False
    hidden: tuple = ()
    rise: float = 0.0
    options: dict = field(default_factory=lambda: {"chunk_size": 16})


@dataclass
class Inputs:
    """Tensors in the order of the host functions, without the four lengths, and those."""

    tensors: list
    ends: tuple
    grad: torch.Tensor

    @property
    def bundles(self):
        return Operands(*self.tensors), Geometry(*self.ends, is_causal=True)


def make(case, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        # The generator is the CPU's, whatever the default device.
        return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())

    pairs = case.lengths or ((case.length, case.keys or case.length),)
    total = [sum(pair[i] for pair in pairs) for i in (0, 1)]
    batch, (heads, key_heads) = case.batch, case.heads
    number = (len(case.lengths) or batch) if case.own_directions else 1

    def tokens(heads, length, width):
        if case.transposed:
            # Unlike a tensor that is only transposed, it has gaps between the rows.
            return randn(batch, length, heads, width + 3)[..., :width].transpose(1, 2).to(case.dtype)
        return randn(batch, heads, length, width).to(case.dtype)

    root = case.width**-0.25
    query, key = tokens(heads, total[0], case.width), tokens(key_heads, total[1], case.width)
    value, grad = tokens(key_heads, total[1], case.value_width), tokens(heads, total[0], case.value_width)
    directions = [root * randn(number, key_heads, case.features, case.width) for _ in range(2)]
    bias = -(root * key.float()).square().sum(-1) / 2
    if case.rise:
        # Some keys after the first one of their chunk are far along some direction.
        for step, position in enumerate(range(5, total[1], 9)):
            along = directions[1][:, :, step % case.features]
            along = along / along.square().sum(-1, keepdim=True)
            key[:, :, position] += (case.rise * (1 + step % 3) / 3 * along[0]).to(case.dtype)
    for start, stop in case.hidden:
        bias[:, :, start:stop] = -torch.inf
        key[:, :, start:stop] = value[:, :, start:stop] = torch.nan
    ends = (None, None, max(p[0] for p in pairs), max(p[1] for p in pairs))
    if case.lengths:
        ends = (*(torch.tensor([0, *(p[i] for p in pairs)]).cumsum(0).int() for i in (0, 1)), *ends[2:])
    offset = randn(number, key_heads, case.features)
    return Inputs([query, key, value, *directions, offset, bias], ends, grad)


def attention(query, key, value, to_query, to_key, offset, bias):
    """Output and logarithm of the normaliser, by weights that are logarithms of sums over the features."""
    groups = query.shape[1] // key.shape[1]
    key, value, bias, to_query, to_key, offset = (
        t.repeat_interleave(groups, 1) for t in (key, value, bias, to_query, to_key, offset)
    )
    length, keys = query.shape[2], key.shape[2]
    hidden = bias.isneginf()[..., None]
    key, value, bias = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), bias[..., None].masked_fill(hidden, 0)
    log_key = key @ to_key.mT + offset[:, :, None] + bias
    weights = torch.logsumexp((query @ to_query.mT)[:, :, :, None] + log_key[:, :, None], dim=-1)
    seen = torch.ones(length, keys, dtype=torch.bool).tril(keys - length) & ~hidden.mT
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.where(seen | blind, weights, -torch.inf)
    return (weights.softmax(-1) @ value).masked_fill(blind, 0), weights.logsumexp(-1).masked_fill(
        blind[..., 0], torch.inf
    )


def expected(case, inputs, dtype=torch.float64):
    """Output, logarithm of the normaliser and gradients."""
    leaves = [tensor.to(dtype) for tensor in inputs.tensors]
    for index in (0, 1, 2, 6):
        leaves[index].requires_grad_()
    query, key, value, to_query, to_key, offset, bias = leaves
    outs = []
    pairs = case.lengths or ((query.shape[2], key.shape[2]),)
    queries, keys = ([pair[i] for pair in pairs] for i in (0, 1))
    tokens = zip(query.split(queries, 2), *(t.split(keys, 2) for t in (key, value, bias)), strict=True)
    for index, (q, k, v, b) in enumerate(tokens):
        own = slice(index, index + 1) if case.lengths and case.own_directions else slice(None)
        if k.shape[2]:
            outs.append(attention(q, k, v, to_query[own], to_key[own], offset[own], b))
        else:
            outs.append((q @ q.new_zeros(q.shape[3], v.shape[3]), q.new_full(q.shape[:3], torch.inf)))
    out, lse = (torch.cat(parts, dim=2) for parts in zip(*outs, strict=True))
    (out * inputs.grad.to(dtype)).sum().backward()
    return [out.detach(), lse.detach(), *(leaves[index].grad for index in (0, 1, 2, 6))]


def run(case, inputs):
    forward = triton_causal.forward(*inputs.bundles, **case.options)
    backward = triton_causal.backward(inputs.grad, *inputs.bundles, forward, **case.options)[:4]
    for result, like in zip(backward, (inputs.tensors[index] for index in (0, 1, 2, 6)), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
    return [*forward[:2], *backward]


def errors(found, truth):
    """Largest one of each result, relative to its largest entry (or 0.1: a single key has no gradient at all)."""
    found, truth = ([t.double().masked_fill(t.isposinf(), 1e4) for t in tensors] for tensors in (found, truth))
    return {
        name: (f - t).abs().max().item() / max(t.abs().max().item(), 0.1) if t.numel() else 0.0
        for name, f, t in zip(NAMES, found, truth, strict=True)
    }


def check(case, tolerance=1e-5):
    inputs = make(case)
    found = errors(run(case, inputs), expected(case, inputs))
    assert max(found.values()) < tolerance, found


def steep_chunks(case, inputs):
    return key_states(Problem.of(*inputs.bundles, **case.options)).steep


@pytest.mark.parametrize(
    "case",
    [
        Case(1),
        Case(2, features=40),
        Case(63, heads=(1, 1), width=64, value_width=64, features=40),
        Case(40, batch=2, heads=(2, 1), own_directions=True, options={"chunk_size": 32, "segments": 1}),
        Case(70, 100, heads=(1, 1), width=80, value_width=48, features=40, options={"chunk_size": 32, "segments": 2}),
        Case(150, heads=(1, 1), features=70, options={}),
        Case(40, 70, batch=2, heads=(2, 1), transposed=True, options={"chunk_size": 32, "segments": 3}),
        Case(1, 90, options={"chunk_size": 64}),
        Case(20, 9, batch=2),
        Case(40, heads=(1, 1), value_width=1, width=1, options={"chunk_size": 16, "segments": 9}),
    ],
)
def test_follows_the_definition(case, poisoned):
    check(case)


@pytest.mark.parametrize(
    ("hidden", "keys"),
    [
        (((0, 21),), 60),
        (((0, 40),), 90),
        (((40, 60),), 60),
        (((0, 3), (7, 8), (15, 34), (59, 60)), 90),
        (((0, 60),), 60),
    ],
    ids=["left", "left, keys first", "right", "holes, keys first", "all"],
)
def test_hidden_keys(hidden, keys, poisoned):
    check(Case(60, keys, heads=(2, 1), hidden=hidden, features=20))


@pytest.mark.parametrize(
    ("lengths", "heads", "own", "segments"),
    [
        (((5, 5), (33, 33), (1, 1), (17, 17)), (1, 1), False, None),
        (((5, 9), (0, 0), (20, 41), (0, 18), (16, 16)), (2, 1), True, 2),
        (((9, 4), (7, 0), (17, 17)), (2, 1), True, 1),
    ],
)
def test_packed_sequences(lengths, heads, own, segments, poisoned):
    options = {"chunk_size": 16, "segments": segments}
    check(Case(lengths=lengths, heads=heads, own_directions=own, transposed=True, options=options))


def test_packed_sequences_with_hidden_keys(poisoned):
    check(Case(lengths=((20, 20), (35, 35)), heads=(1, 1), hidden=((0, 6), (18, 31), (54, 55))))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_attend(shape, poisoned):
    inputs = make(Case(length=5))
    lengths = (shape[0], shape[1], shape[1], None, None, None, shape[1])
    inputs.tensors = [t if n is None else t[:, :, :n] for t, n in zip(inputs.tensors, lengths, strict=True)]
    inputs.tensors[6] = inputs.tensors[6].contiguous()
    inputs.grad, inputs.ends = inputs.grad[:, :, : shape[0]], (None, None, *shape)
    out, lse, *gradients = run(Case(), inputs)
    assert not out.any()
    assert lse.isposinf().all()
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(50, 70, heads=(2, 1), width=64, value_width=48, features=40, hidden=((0, 9), (40, 60)), transposed=True),
        Case(45, heads=(1, 1), rise=200.0, options={"chunk_size": 32}),
    ],
    ids=["grouped and hidden", "steep"],
)
def test_half_precision(case, dtype, poisoned):
    case = replace(case, dtype=dtype)
    inputs = make(case)
    truth = expected(case, inputs)
    found, plain = errors(run(case, inputs), truth), errors(expected(case, inputs, dtype), truth)
    # Where keys are far along a direction, so is the error of its rounding.
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype] * (1 if not case.rise else 5)
    assert all(found[name] <= min(2 * plain[name] + 1e-3, limit) for name in NAMES), (found, plain)


@pytest.mark.parametrize(
    "case",
    [
        Case(45, heads=(1, 1), rise=300.0, options={"chunk_size": 32}),
        Case(40, 70, rise=200.0, heads=(2, 1), features=12, options={"chunk_size": 64, "segments": 2}),
        Case(50, heads=(1, 1), rise=400.0, hidden=((0, 3), (16, 22), (40, 41)), options={"chunk_size": 32}),
        Case(lengths=((30, 40), (4, 4), (17, 17)), heads=(1, 1), rise=300.0),
    ],
    ids=["dense", "grouped", "hidden", "packed"],
)
def test_steep_chunks(case, poisoned):
    assert steep_chunks(case, make(case)).any()
    # The logarithm of the normaliser is in the hundreds, and the backward pass has it in float32.
    check(case, tolerance=3e-4)


def test_steep_values_stay_exact(poisoned):
    """Every query after it sees little but the one key that rises, exactly."""
    case = Case(64, options={"chunk_size": 64})
    inputs = make(case)
    key, to_key = inputs.tensors[1], inputs.tensors[4]
    along = to_key[0, :, 3] / to_key[0, :, 3].square().sum(-1, keepdim=True)
    key[:, :, 20] += 400.0 * along
    assert steep_chunks(case, inputs).all()
    found, truth = run(case, inputs), expected(case, inputs)
    assert (found[0] - truth[0]).abs().max() <= 1e-5 * truth[0].abs().max()


def test_chunks_that_do_not_rise_are_not_steep():
    assert not steep_chunks(Case(64), make(Case(64))).any()


@pytest.mark.parametrize("position", [1, 16, 37])
def test_the_future_does_not_reach_the_past(position):
    case = Case(48, heads=(1, 1), features=20, options={"chunk_size": 16, "segments": 2})
    first, second = make(case), make(case)
    for tensor, index in ((0, 0), (1, 1), (2, 2), (6, 6)):
        other = make(case, seed=1).tensors[index]
        second.tensors[tensor][:, :, position:] = other[:, :, position:]
    outs = [triton_causal.forward(*inputs.bundles, **case.options)[:2] for inputs in (first, second)]
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one[:, :, :position], other[:, :, :position])
        assert not torch.equal(one, other)


def test_shifts_of_offsets_cancel():
    case = Case(40, features=20)
    inputs = make(case)
    out = triton_causal.forward(*inputs.bundles, **case.options)[0]
    inputs.tensors[5] = inputs.tensors[5] + 1000.0
    inputs.tensors[6] = inputs.tensors[6] + 3000.0
    moved = triton_causal.forward(*inputs.bundles, **case.options)[0]
    assert (out - moved).abs().max() < 3e-3
