"""The operators, and which kernel they run."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from truth import attention, gradients, make_inputs

import favor
from favor.kernels import dispatch, linear_attention
from favor.kernels.gpu import common as triton_common
from favor.kernels.operands import Gradients, Operands
from favor.kernels.ops import attention_backward, attention_forward

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton kernels on the CPU, by the interpreter")
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


def test_attention_maps_over_a_new_dimension():
    query, *others = [t.float() for t in make_inputs(9, groups=2)]
    queries = torch.stack([query, 2 * query])
    mapped = torch.vmap(lambda one: linear_attention(one, *others))(queries)
    for one, expected in zip(mapped, queries, strict=True):
        torch.testing.assert_close(one, linear_attention(expected, *others))


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


@interpreted
def test_kernels_are_reported(monkeypatch):
    # The tests switch Triton's interpreter on.
    assert favor.kernels.available() == {"torch": "available", "triton": "available", "auto": "torch"}
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._triton_problem.cache_clear()
    assert "CUDA" in favor.kernels.available()["triton"]
    small = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: small)
        dispatch._triton_problem.cache_clear()
        assert "99 KB of shared memory" in favor.kernels.available()["triton"]
        small.shared_memory_per_block_optin = 163 * 1024
        dispatch._triton_problem.cache_clear()
        assert favor.kernels.available()["auto"] == "triton"
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    dispatch._triton_problem.cache_clear()
    assert "pip install triton" in favor.kernels.available()["triton"]
    dispatch._triton_problem.cache_clear()


@interpreted
def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    inputs = make_inputs(5)
    with pytest.raises(ValueError, match=r'kernel="triton" cannot run: .*float64'):
        linear_attention(*inputs, kernel="triton")
    with pytest.raises(ValueError, match="kernel must be one of 'auto', 'torch', 'triton'; got 'cuda'"):
        linear_attention(*inputs, kernel="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._triton_problem.cache_clear()
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        linear_attention(*(t.float() for t in inputs), kernel="triton")
    dispatch._triton_problem.cache_clear()
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
