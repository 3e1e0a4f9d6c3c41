"""The operators, and which kernel they run."""

import logging
import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from elsewhere import interpreted
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from truth import attention, gradients, make_inputs

import favor
from favor.kernels import dispatch, linear_attention
from favor.kernels.gpu import common as triton_common
from favor.kernels.naive import naive_linear_attention
from favor.kernels.operands import Gradients, Operands
from favor.kernels.ops import attention_backward, attention_forward

# One row per kernel, which then goes through every form, dense and packed, forward and backward.
KERNELS = [pytest.param("torch"), pytest.param("triton", marks=interpreted)]
FORMS = ["bidirectional", "causal", "window", "causal window"]
both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
WINDOW = 3
LENGTHS = torch.tensor([0, 4, 8], dtype=torch.int32)  # eight tokens, no block of which is left without a summary


# Operators are registered and traced alike for every kernel; the layout of results is compared in all forms below.
RULES = [
    ("torch", "bidirectional", False),
    ("torch", "bidirectional", True),
    ("torch", "causal", False),
    ("torch", "window", True),
    ("torch", "causal window", False),
    pytest.param("triton", "bidirectional", False, marks=interpreted),
]


def arguments(form, packed, dtype=torch.float32):
    """Tensors, cumulative lengths with the query bias, and options, in the order of the operators."""
    inputs = [t.float() for t in make_inputs(8, groups=2, heads=1)]
    inputs[:3] = [t.to(dtype) for t in inputs[:3]]
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(1, 2, 8, generator=generator) if "window" in form else None
    cumulative = (LENGTHS, LENGTHS) if packed else (None, None)
    return inputs, cumulative, (bias, 8, 8, "causal" in form, WINDOW if "window" in form else 0, 0.3)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kernel", "form", "packed"), RULES)
def test_operators_keep_the_rules_of_pytorch(kernel, form, packed):
    directions = dispatch.TABLE[kernel].trains_directions and not packed
    inputs, cumulative, options = arguments(form, packed)
    saved = attention_forward(*inputs, *cumulative, *options, kernel)
    grads = (torch.randn_like(saved[0]), *inputs, *cumulative, *saved, *options, directions, kernel)
    torch.library.opcheck(attention_backward, grads)
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(directions or not 3 <= index < 6)
    if options[0] is not None:
        options[0].requires_grad_()
    torch.library.opcheck(attention_forward, (*inputs, *cumulative, *options, kernel))


def run_and_foretell(operator, *given):
    """The results of an operator, which must be laid out as its fake says."""
    found = operator(*given)
    with FakeTensorMode() as mode:
        foretold = operator(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given))
    for real, fake in zip(found, foretold, strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
        assert not real.numel() or real.stride() == fake.stride()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_in_half_precision_are_laid_out_as_their_fakes_say(kernel):
    inputs, cumulative, options = arguments("window", True, torch.bfloat16)
    run_and_foretell(attention_forward, *inputs, *cumulative, *options, kernel)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_follows_the_definition(kernel, form, packed):
    """Output and all gradients; those of the directions too, which a kernel may leave to the torch kernel."""
    inputs, cumulative, options = arguments(form, packed)
    weight = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    operands = [t.double() for t in (*inputs, options[0]) if t is not None]
    lengths = ([4, 4], [4, 4]) if packed else None
    chosen = {"is_causal": options[3], "window": options[4], "scale": options[5], "lengths": lengths}
    out, *expected = gradients(lambda *t: attention(*t, **chosen), operands, weight)
    expected = dict(zip(Operands._fields, expected, strict=False))
    saved = run_and_foretell(attention_forward, *inputs, *cumulative, *options, kernel)
    torch.testing.assert_close(saved[0].double(), out, rtol=1e-4, atol=1e-5)
    for directions in (False, True):
        backward = (weight, *inputs, *cumulative, *saved, *options, directions, kernel)
        found = Gradients(*run_and_foretell(attention_backward, *backward))._asdict()
        found = {name: grad for name, grad in found.items() if grad.numel()}
        left_out = set() if directions else {"query_directions", "key_directions", "offset"}
        assert set(found) == set(expected) - left_out
        for name, ours in found.items():
            torch.testing.assert_close(ours.double(), expected[name], rtol=1e-4, atol=1e-5)


class Watching(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


@both
def test_the_way_around_the_operators_gives_the_same(is_causal):
    inputs = [t.float() for t in make_inputs(9, groups=2)]
    weight = torch.randn(1, 4, 9, 8)

    def run():
        return gradients(lambda *t: linear_attention(*t, is_causal=is_causal), inputs, weight)

    alone = run()
    with Watching() as watching:
        watched = run()
    assert {"favor.linear_attention.default", "favor.linear_attention_backward.default"} <= set(watching.seen)
    for ours, theirs in zip(alone, watched, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    inputs = [t.float().requires_grad_() for t in make_inputs(9, groups=2)]
    (slope,) = torch.autograd.grad(linear_attention(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_attention_backward"):
        slope.square().sum().backward()


@interpreted
@both
def test_gradients_in_half_precision_do_not_depend_on_whose_are_asked_for(is_causal):
    inputs = [t.float() for t in make_inputs(60, groups=2)]
    tokens = [3 * t.bfloat16() for t in inputs[:2]] + [inputs[2].bfloat16()]
    weight = torch.randn(1, 4, 60, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for training in (False, True):
        leaves = [t.detach().requires_grad_() for t in tokens]
        directions = [t.detach().requires_grad_(training) for t in inputs[3:6]]
        out = linear_attention(*leaves, *directions, inputs[6], is_causal=is_causal, kernel="triton")
        found.append(torch.autograd.grad(out, leaves, weight))
    for fixed, trained in zip(*found, strict=True):
        assert (fixed - trained).float().norm() <= 8e-3 * fixed.float().norm()


@pytest.fixture
def fresh():
    """Forgets what is known of this machine, after each change and at the end."""
    yield dispatch._triton_problem.cache_clear
    dispatch._triton_problem.cache_clear()


@interpreted
def test_kernels_are_reported(monkeypatch, fresh):
    # The tests switch Triton's interpreter on.
    assert favor.kernels.available() == {"torch": "available", "triton": "available", "auto": "torch"}
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fresh()
    assert "CUDA" in favor.kernels.available()["triton"]
    gpu = SimpleNamespace()
    replaced = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda index: gpu}
    for size, name, answer in ((99, "triton", "99 KB of shared memory"), (163, "auto", "triton")):
        gpu.shared_memory_per_block_optin = size * 1024
        fresh()
        with patch.multiple(torch.cuda, **replaced):
            assert answer in favor.kernels.available()[name]
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    fresh()
    assert "pip install triton" in favor.kernels.available()["triton"]


@interpreted
def test_a_kernel_that_cannot_run_is_refused(monkeypatch, fresh):
    inputs = make_inputs(5)
    with pytest.raises(ValueError, match=r'kernel="triton" cannot run: .*float64'):
        linear_attention(*inputs, kernel="triton")
    with pytest.raises(ValueError, match="kernel must be one of 'auto', 'torch', 'triton'; got 'cuda'"):
        linear_attention(*inputs, kernel="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fresh()
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        linear_attention(*(t.float() for t in inputs), kernel="triton")
    with pytest.raises(ValueError, match="relu features have no Triton kernel"):
        favor.favor_attention(*inputs[:3], features="relu", kernel="triton")


def test_falling_back_is_logged_once(caplog):
    class OnDevice:
        device, dtype, shape = torch.device("cuda"), torch.float64, (1, 1, 1, 8)

    dispatch._report.cache_clear()
    with caplog.at_level(logging.WARNING, "favor.kernels"):
        assert [dispatch.pick("auto", OnDevice, OnDevice) for _ in range(3)] == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "float64" in caplog.text


def test_choices_are_timed_where_the_work_is_worth_it():
    choices = ("first", "second")
    assert triton_common.worth_timing(choices, torch.empty(2, 8, 512, 64, device="meta")) == ("first",)
    assert triton_common.worth_timing(choices, torch.empty(1, 8, 16384, 64, device="meta")) == choices


@pytest.mark.parametrize(
    ("programs", "length", "pieces"), [(2, 4096, 16), (1, 262144, 251), (264, 4096, 1), (1000, 100, 1), (0, 4096, 1)]
)
def test_sequences_are_cut_until_the_device_is_full(programs, length, pieces):
    """132 multiprocessors with two programs each, of which up to 5 % may be idle; pieces of 256 tokens or more."""
    assert triton_common.split_count(programs, length, 264) == pieces


# The definition itself, against loops over pairs of tokens and features that share nothing with it.
TWO = torch.tensor([0, 2, 6], dtype=torch.int32)


def weigh(operands, head, i, j, past, options):
    """How much query i, the (past + i)-th token, weighs key j."""
    query, key, _, query_directions, key_directions, offset, key_bias, query_bias = operands
    if math.isinf(key_bias[0, head // 2, j]) or (options.get("is_causal") and j > past + i):
        return 0.0
    q, k = query[0, head, i].tolist(), key[0, head // 2, j].tolist()
    if "window" in options and (past + i) // options["window"] == j // options["window"]:
        return math.exp(options["scale"] * sum(a * b for a, b in zip(q, k, strict=True)))
    total = 0.0
    for m in range(offset.shape[2]):
        uq, uk = (t[0, head // 2, m].tolist() for t in (query_directions, key_directions))
        dots = sum(a * b for a, b in zip([*q, *k], [*uq, *uk], strict=True))
        total += math.exp(dots + offset[0, head // 2, m] + key_bias[0, head // 2, j])
    return total * (1.0 if query_bias is None else math.exp(query_bias[0, head, i]))


def by_loops(operands, options):
    query, key, value = operands[:3]
    out, past = torch.zeros(1, 4, query.shape[2], value.shape[3], dtype=torch.float64), key.shape[2] - query.shape[2]
    for head in range(4):
        for i in range(query.shape[2]):
            weights = [weigh(operands, head, i, j, past, options) for j in range(key.shape[2])]
            for j, own in enumerate(weights):
                out[0, head, i] += own / (sum(weights) or 1.0) * value[0, head // 2, j]
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_pairs_and_features_one_by_one(is_causal, window, packed):
    keys = 6 if packed or not is_causal else 8
    inputs = make_inputs(6, keys, dim=3, value_dim=2, features=4, groups=2)
    inputs[6][0, 0, 1] = inputs[6][0, 1, :2] = -torch.inf
    bias = torch.randn(1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if window else None
    options = {"is_causal": is_causal} | ({"window": window, "scale": 0.7} if window else {})
    packing = {"cu_seqlens_q": TWO, "cu_seqlens_k": TWO} if packed else {}
    parts = [slice(0, 2), slice(2, 6)] if packed else [slice(None)]
    outs = []
    for own in parts:
        query, key, value, key_bias = (inputs[i][:, :, own] for i in (0, 1, 2, 6))
        operands = (query, key, value, *inputs[3:6], key_bias, None if bias is None else bias[:, :, own])
        outs.append(by_loops(operands, options))
    found = naive_linear_attention(*inputs, query_bias=bias, **options, **packing)
    torch.testing.assert_close(found, torch.cat(outs, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend", [naive_linear_attention, linear_attention])
def test_unknown_options_are_refused(attend):
    with pytest.raises(TypeError, match="unknown options: causal; known are is_causal, cu_seqlens_q"):
        attend(*make_inputs(3), causal=True)
