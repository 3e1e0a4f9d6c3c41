"""The Transducer loss of given logits: against all alignments, finite differences and autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transducer_truth import batch, by_enumeration, by_nodes, losses

from favor.models.speech import transducer_loss
from favor.models.speech.transducer import autograd as transducer_autograd

INF, NAN = float("inf"), float("nan")


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize(
    ("frames", "labels"),
    [([1], [0]), ([1], [3]), ([4], [0]), ([3], [2]), ([2], [5]), ([5], [4]), ([4, 1, 3], [3, 2, 0]), ([2, 4], [4, 1])],
)
def test_is_the_sum_over_all_alignments(frames, labels, blank):
    given = batch(frames, labels, 4, blank)
    expected = losses(*given, blank=blank, one=by_enumeration)
    torch.testing.assert_close(losses(*given, blank=blank), expected, rtol=0, atol=1e-10)
    found = transducer_loss(*given, blank=blank, reduction="none")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_gradient_is_that_of_finite_differences():
    logits, *rest = batch()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: transducer_loss(x, *rest, reduction="none"), logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("piece", [1, 100, 1 << 18])
def test_gradient_is_that_of_autograd(piece, monkeypatch):
    monkeypatch.setattr(transducer_autograd, "PIECE", {"cpu": piece})
    logits, *rest = batch([30, 17, 25], [12, 9, 0], 20, blank=19, scale=3.0)
    logits.requires_grad_()
    weights = torch.tensor([0.3, -2.0, 1.5], dtype=torch.float64)
    expected = losses(logits, *rest, blank=19)
    found = transducer_loss(logits, *rest, blank=19, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected, found = (gradient(loss @ weights, logits) for loss in (expected, found))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_float32_is_accurate_over_500_frames():
    logits, *rest = batch([500, 430], [100, 80], 16, scale=4.0)
    exact, single = logits.clone().requires_grad_(), logits.float().requires_grad_()
    expected, found = (transducer_loss(x, *rest, reduction="none") for x in (exact, single))
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    expected, found = (gradient(loss.sum(), x) for loss, x in ((expected, exact), (found, single)))
    assert (found - expected).abs().max() < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    logits, *rest = batch(dtype=dtype, scale=3.0)
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    expected, found = (transducer_loss(x, *rest, reduction="none") for x in (exact, logits))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    expected, found = (gradient(loss.sum(), x) for loss, x in ((expected, exact), (found, logits)))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_huge_logits():
    logits, *rest = batch([40, 31], [9, 5], 6, dtype=torch.float32, scale=1e4)
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    expected, found = losses(exact, *rest), transducer_loss(logits, *rest, reduction="none")
    assert expected.min() > 1e5
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        gradient(found.sum(), logits).double(), gradient(expected.sum(), exact), rtol=0, atol=1e-4
    )


def test_tokens_of_probability_0():
    """A token that no alignment uses changes nothing, and one that some use takes those away."""
    logits, targets, *lengths = batch([5, 4], [3, 2], 6)
    targets = targets.clamp(max=4)
    without = transducer_loss(logits[..., :5], targets, *lengths)
    logits[..., 5] = -INF
    logits.requires_grad_()
    found = transducer_loss(logits, targets, *lengths)
    torch.testing.assert_close(found, without, rtol=0, atol=1e-12)
    assert not gradient(found, logits)[..., 5].any()

    logits = logits.detach().clone()
    logits[0, 2, 1, targets[0, 1]] = -INF
    logits.requires_grad_()
    found = transducer_loss(logits, targets, *lengths, reduction="none")
    torch.testing.assert_close(found, losses(logits, targets, *lengths, one=by_enumeration), rtol=0, atol=1e-8)
    slope = gradient(found.sum(), logits)
    assert slope.isfinite().all()
    assert slope[0, 2, 1, targets[0, 1]] == 0


def test_an_impossible_target_can_be_left_out():
    logits, *rest = batch()
    logits[1, 0, 0, rest[0][1, 0]] = -INF
    logits.requires_grad_()
    found = transducer_loss(logits, *rest, reduction="none")
    assert found.isposinf().tolist() == [False, True, False, False]
    assert gradient(found.sum(), logits)[1, 0, :3].isnan().all()
    found = transducer_loss(logits, *rest, reduction="none")
    slope = gradient(found[found.isfinite()].sum(), logits)
    assert slope.isfinite().all()
    assert not slope[1].any()
    assert slope[0].any()


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
def test_padding_is_not_read(rubbish):
    logits, targets, frames, labels = batch()
    alone = [
        transducer_loss(logits[i : i + 1, :t, : u + 1], targets[i : i + 1, :u], frames[i : i + 1], labels[i : i + 1])
        for i, (t, u) in enumerate(zip(frames.tolist(), labels.tolist(), strict=True))
    ]
    padded = torch.full((4, 9, 8, 7), rubbish, dtype=torch.float64)
    inside = torch.zeros(padded.shape, dtype=torch.bool)
    for i, (t, u) in enumerate(zip(frames.tolist(), labels.tolist(), strict=True)):
        padded[i, :t, : u + 1] = logits[i, :t, : u + 1]
        inside[i, :t, : u + 1] = True
    padded.requires_grad_()
    targets = torch.nn.functional.pad(targets, (0, 3), value=99)
    found = transducer_loss(padded, targets, frames, labels, reduction="none")
    torch.testing.assert_close(found, torch.stack(alone), rtol=0, atol=1e-12)
    slope = gradient(found.sum(), padded)
    assert torch.equal(slope[~inside], torch.zeros_like(slope[~inside]))
    assert slope[inside].isfinite().all()
    assert slope[inside].ne(0).all()


def test_reductions():
    logits, *rest = batch()
    logits.requires_grad_()
    each = losses(logits, *rest)
    expected = {"sum": each.sum(), "mean": each.mean(), "mean_volume": each.sum() / 9, "none": each}
    for name, value in expected.items():
        found = transducer_loss(logits, *rest, reduction=name)
        torch.testing.assert_close(found, value, rtol=0, atol=1e-12)
        slopes = [gradient(loss.sum(), logits) for loss in (found, losses(logits, *rest) @ weights(name))]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
    torch.testing.assert_close(transducer_loss(logits, *rest), expected["mean"])


def weights(name):
    return torch.full((4,), {"mean": 0.25, "mean_volume": 1 / 9}.get(name, 1.0), dtype=torch.float64)


@pytest.mark.parametrize("clamp", [0.01, 0.2])
def test_clamp_bounds_the_gradient_of_each_loss(clamp):
    logits, *rest = batch()
    logits.requires_grad_()
    scale = torch.tensor([1.0, -3.0, 0.5, 100.0], dtype=torch.float64)
    plain = gradient(losses(logits, *rest).sum(), logits)
    assert plain.abs().max() > clamp
    found = gradient(transducer_loss(logits, *rest, reduction="none", clamp=clamp) @ scale, logits)
    torch.testing.assert_close(found, plain.clamp(-clamp, clamp) * scale.view(-1, 1, 1, 1), rtol=0, atol=1e-12)


def test_layouts_and_types_of_what_is_given():
    logits, targets, frames, labels = batch()
    expected = transducer_loss(logits, targets, frames, labels)
    turned = logits.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_()
    assert not turned.is_contiguous()
    wide_targets = torch.stack([targets, targets], -1).int()[..., 0]
    found = transducer_loss(turned, wide_targets, frames.int(), labels.to(torch.int16))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        gradient(found, turned), gradient(transducer_loss(x := logits.requires_grad_(), targets, frames, labels), x)
    )
    assert not transducer_loss(logits.detach(), targets, frames, labels).requires_grad
    with torch.no_grad():
        assert not transducer_loss(logits, targets, frames, labels).requires_grad


def test_second_derivatives_are_refused():
    logits, *rest = batch()
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match=r"can be differentiated once; .* without create_graph=True"):
        torch.autograd.grad(transducer_loss(logits, *rest), logits, create_graph=True)


def test_logits_changed_before_the_backward_pass_are_noticed():
    leaf, *rest = batch()
    logits = leaf.requires_grad_() * 1
    loss = transducer_loss(logits, *rest)
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sizes(TorchDispatchMode):
    """Number of elements of every new storage."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.found.append(tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_gradient_is_as_large_as_the_logits(dtype, monkeypatch):
    monkeypatch.setattr(transducer_autograd, "PIECE", {"cpu": 2000})
    logits, *rest = batch([30, 20], [9, 9], 200, dtype=dtype)
    logits.requires_grad_()
    with Sizes() as forward:
        loss = transducer_loss(logits, *rest)
    with Sizes() as backward:
        loss.backward()
    size = logits.numel() * logits.element_size() // 4
    assert max(forward.found) <= 4000
    assert sorted(backward.found)[-1] == size
    assert sorted(backward.found)[-2] <= 4000 < size / 10


def bad(**changes):
    """Arguments, one of them replaced."""
    names = ("logits", "targets", "logit_lengths", "target_lengths")
    return {**dict(zip(names, batch(dtype=torch.float32), strict=True)), **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"logits": torch.zeros(4, 6, 5, 7, dtype=torch.long)},
            TypeError,
            "logits must be a floating-point .*got torch.int64",
        ),
        ({"logits": [1.0]}, TypeError, "logits must be a floating-point tensor .* list"),
        ({"logits": torch.zeros(4, 6, 7)}, ValueError, r"logits must be \[B, T, U \+ 1, V\] .* \[4, 6, 7\]"),
        ({"logits": torch.zeros(4, 0, 5, 7)}, ValueError, r"no dimension of size 0, got \[4, 0, 5, 7\]"),
        ({"logits": torch.zeros(4, 6, 4, 7)}, ValueError, r"targets must be \[4, 3\]"),
        ({"targets": torch.ones(4, 4)}, TypeError, "targets must be a tensor of integers, got torch.float32"),
        ({"targets": torch.ones(4, 4).bool()}, TypeError, "targets must be a tensor of integers, got torch.bool"),
        ({"targets": torch.ones(3, 4).long()}, ValueError, r"targets must be \[4, 4\] .* got \[3, 4\]"),
        ({"targets": torch.zeros(4, 4).long()}, ValueError, r"other than the blank, 0, .* got 0 at \[0, 0\]"),
        ({"targets": torch.full((4, 4), 7)}, ValueError, r"from 0 to 6 .* got 7 at \[0, 0\]"),
        ({"targets": torch.full((4, 4), -1)}, ValueError, r"got -1 at \[0, 0\]"),
        ({"blank": 7}, ValueError, "blank must be an id from 0 to 6, got 7"),
        ({"blank": -1}, ValueError, "blank must be an id from 0 to 6, got -1"),
        ({"logit_lengths": [6, 1, 3, 4]}, TypeError, "logit_lengths must be a tensor of integers, got list"),
        ({"logit_lengths": torch.tensor([6, 1, 3])}, ValueError, r"logit_lengths must be \[4\]"),
        ({"logit_lengths": torch.tensor([7, 1, 3, 4])}, ValueError, "logit_lengths must be from 1 to 6, got 1 to 7"),
        ({"logit_lengths": torch.tensor([6, 0, 3, 4])}, ValueError, "logit_lengths must be from 1 to 6, got 0 to 6"),
        ({"target_lengths": torch.tensor([5, 2, 0, 3])}, ValueError, "target_lengths must be from 0 to 4, got 0 to 5"),
        ({"target_lengths": torch.tensor([4, -1, 0, 3])}, ValueError, "target_lengths must be from 0 to 4, got -1"),
        ({"target_lengths": torch.tensor([[4, 2, 0, 3]])}, ValueError, r"target_lengths must be \[4\]"),
        ({"reduction": "batch"}, ValueError, "reduction must be one of 'none', .* got 'batch'"),
        ({"clamp": 0.0}, ValueError, "clamp must be positive, or None for no limit; got 0.0"),
        ({"clamp": -1.0}, ValueError, "clamp must be positive"),
        ({"kernel": "cuda"}, ValueError, "kernel must be one of 'auto', 'torch', 'triton'; got 'cuda'"),
    ],
)
def test_errors(changes, error, message):
    assert transducer_loss(**bad()).isfinite()
    with pytest.raises(error, match=message):
        transducer_loss(**bad(**changes))


def test_truth_by_nodes_is_truth():
    logits, targets, *_ = batch([4], [3], 5)
    assert torch.isclose(by_nodes(logits[0], targets[0].tolist(), 0), by_enumeration(logits[0], targets[0].tolist(), 0))
