"""The operators, and which kernel they run."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from truth import gradients, make_inputs

import favor
from favor.kernels import dispatch, linear_attention
from favor.kernels.gpu import common as triton_common
from favor.kernels.ops import attention_backward, attention_forward

LENGTHS = torch.tensor([0, 4, 9], dtype=torch.int32)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton kernels on the CPU, by the interpreter")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "directions"),
    [("torch", False), ("torch", True), pytest.param("triton", False, marks=interpreted)],
)
def test_operators_keep_the_rules_of_pytorch(is_causal, packed, kernel, directions):
    inputs = [t.float() for t in make_inputs(9, groups=2)]
    lengths = (LENGTHS, LENGTHS, 5, 5) if packed else (None, None, 9, 9)
    forward = (*lengths[:2], None, *lengths[2:], is_causal, 0, 1.0, kernel)
    saved = attention_forward(*inputs, *forward)
    options = (None, *lengths[2:], is_causal, 0, 1.0, directions, kernel)
    torch.library.opcheck(attention_backward, (torch.randn_like(saved[0]), *inputs, *lengths[:2], *saved, *options))
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(directions or not 3 <= index < 6)
    torch.library.opcheck(attention_forward, (*inputs, *forward))


class Watching(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
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
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
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
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["dense", "packed"])
def test_both_kernels_run_behind_the_same_call(is_causal, lengths):
    inputs = [t.float() for t in make_inputs(9, groups=2)]
    weight = torch.randn(1, 4, 9, 8)
    runs = {
        kernel: gradients(
            lambda *t, kernel=kernel: linear_attention(
                *t[:3], *(u.detach() for u in t[3:6]), t[6],
                is_causal=is_causal, cu_seqlens_q=lengths, cu_seqlens_k=lengths, kernel=kernel,
            ),
            inputs,
            weight,
        )
        for kernel in ("torch", "triton")
    }  # fmt: skip
    for ours, theirs in zip(runs["torch"], runs["triton"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@interpreted
def test_triton_leaves_gradients_of_directions_to_the_torch_kernel():
    inputs = [t.float() for t in make_inputs(9, groups=2)]
    for is_causal in (False, True):
        runs = [
            gradients(
                lambda *t, kernel=kernel: linear_attention(*t, is_causal=is_causal, kernel=kernel),  # noqa: B023
                inputs,
                torch.ones(1, 4, 9, 8),
            )
            for kernel in ("torch", "triton")
        ]
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
    assert triton_common._pieces(programs, length, 264, 256) == pieces
