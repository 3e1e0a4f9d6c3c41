"""Kernels of the Transducer loss: Triton against torch and all alignments, torchaudio as far as it is there."""

import importlib

import pytest
import torch
from transducer_truth import TanhJoint, batch, by_enumeration, losses

from favor.kernels import dispatch
from favor.models.speech import joint_transducer_loss, transducer_loss
from favor.models.speech.transducer import lattice as transducer_lattice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned(monkeypatch):
    original = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: original(*args, **kwargs).fill_(torch.nan))


def both(kernel, logits, *rest):
    """Losses and the gradient of their weighted sum."""
    logits = logits.clone().to(DEVICE).requires_grad_()
    found = transducer_loss(logits, *rest, reduction="none", kernel=kernel)
    weights = torch.linspace(1, 2, len(found), device=DEVICE, dtype=found.dtype)
    return found.detach().cpu(), torch.autograd.grad(found @ weights, logits)[0].cpu()


@pytest.mark.parametrize(
    ("frames", "labels"),
    [([1], [0]), ([4], [0]), ([1], [3]), ([4, 2, 3], [3, 2, 0]), ([3, 3], [1, 1]), ([2], [7]), ([9, 12], [10, 16])],
)
def test_triton_is_the_same_as_torch(frames, labels, poisoned):
    given = batch(frames, labels, 6)
    found, expected = both("triton", *given), both("torch", *given)
    if max(labels) < 8:
        torch.testing.assert_close(found[0], losses(*given, one=by_enumeration), rtol=0, atol=1e-8)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_sums_over_lattices_with_closed_ways(poisoned):
    from favor.models.speech.transducer import lattice_gpu as triton_transducer

    torch.manual_seed(0)
    blank, label = (torch.randn(9, 3, 5, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for part in (blank, label):
        part[torch.rand(part.shape, device=DEVICE) < 0.3] = -torch.inf
    label[:, :, 0] = -torch.inf
    expected, found = transducer_lattice.ways_to(blank, label), triton_transducer.ways_to(blank, label)
    assert expected[-1].isinf().any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    others = blank.clone(), label.clone()
    transducer_lattice.add_ways_from(blank, label)
    triton_transducer.add_ways_from(*others)
    torch.testing.assert_close(others, (blank, label), rtol=0, atol=1e-12)


def test_triton_with_huge_logits_and_tokens_of_probability_0(poisoned):
    logits, targets, *lengths = batch([12, 7], [6, 3], 5, scale=1e4)
    logits[0, 3, 2, targets[0, 2]] = -torch.inf
    logits[1, 0, 0, targets[1, 0]] = logits[1, 0, 0, 0] = -torch.inf  # no way on from the start
    found, expected = both("triton", logits, targets, *lengths), both("torch", logits, targets, *lengths)
    assert expected[0].isfinite().tolist() == [True, False]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_triton_for_the_joint_network(poisoned):
    torch.manual_seed(0)
    _, *rest = batch()
    hidden, prediction, joint = torch.randn(4, 6, 5).double(), torch.randn(4, 5, 4).double(), TanhJoint()
    tensors = [x.to(DEVICE).requires_grad_() for x in (hidden, prediction)]
    joint.to(DEVICE)
    slopes = [
        torch.autograd.grad(joint_transducer_loss(*tensors, joint, *rest, kernel=kernel, max_cells=6), tensors)
        for kernel in ("triton", "torch")
    ]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)


def test_auto_takes_triton_on_cuda_where_it_can(monkeypatch):
    monkeypatch.setattr(dispatch, "available", lambda: {"triton": "available"})
    assert transducer_lattice.pick("auto", torch.device("cuda"), 1024) == "triton"
    assert transducer_lattice.pick("auto", torch.device("cuda"), 1025) == "torch"
    assert transducer_lattice.pick("auto", torch.device("cpu"), 10) == "torch"
    with pytest.raises(ValueError, match="it takes at most 1023 labels, got 1024"):
        transducer_lattice.pick("triton", torch.device("cuda"), 1025)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="the logits are on cpu, not on a CUDA device"):
        transducer_lattice.pick("triton", torch.device("cpu"), 10)
    monkeypatch.setattr(dispatch, "available", lambda: {"triton": "triton is not installed"})
    assert transducer_lattice.pick("auto", torch.device("cuda"), 10) == "torch"
    with pytest.raises(ValueError, match=r'kernel="triton" cannot run: triton is not installed\. Use kernel="auto"'):
        transducer_lattice.pick("triton", torch.device("cuda"), 10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"clamp": 0.05}, {"reduction": "sum"}], ids=["mean", "clamp", "sum"])
def test_torchaudio_agrees(options):
    try:
        rnnt_loss = importlib.import_module("torchaudio.functional").rnnt_loss
    except Exception as reason:  # a build for another torch or without a CUDA library fails in many ways
        pytest.skip(str(reason))
    logits, targets, *lengths = batch([20, 14, 9], [8, 5, 2], 11, dtype=torch.float32)
    logits.requires_grad_()
    theirs = rnnt_loss(logits, targets.clamp(min=0).int(), *(length.int() for length in lengths), blank=0, **options)
    found = [transducer_loss(logits, targets, *lengths, **options), theirs]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in found), rtol=0, atol=1e-5)
