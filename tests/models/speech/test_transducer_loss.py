"""The Transducer loss: against all alignments, finite differences and torchaudio; whole, and by pieces."""

import importlib
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from favor.models.speech import joint_transducer_loss, transducer_loss
from favor.models.speech import lattice as module

INF, NAN = float("inf"), float("nan")


def by_enumeration(logits: Tensor, target: list[int], blank: int) -> Tensor:
    """Loss of one sequence `[T, U + 1, V]`, summed over all rows of T blanks and U labels that end with a blank."""
    steps = len(logits) + len(target)
    log_p, alignments = logits.log_softmax(-1), []
    for places in combinations(range(steps - 1), len(target)):
        u, total = 0, 0.0
        for step in range(steps):
            total = total + log_p[step - u, u, target[u] if step in places else blank]
            u += step in places
        alignments.append(total)
    return -torch.stack(alignments).logsumexp(0)


def losses(logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank=0):
    """Loss of each sequence `[B]`."""
    rows = zip(logits, targets.tolist(), logit_lengths.tolist(), target_lengths.tolist(), strict=True)
    return torch.stack([by_enumeration(x[:frames, : count + 1], row[:count], blank) for x, row, frames, count in rows])


def batch(frames=(6, 1, 3, 4), labels=(4, 2, 0, 3), vocabulary=7, blank=0, dtype=torch.float64, scale=1.0):
    """Random logits, targets padded with -100, and lengths."""
    generator, shape = torch.Generator().manual_seed(0), (len(frames), max(frames), max(labels) + 1, vocabulary)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary - 1, (len(frames), max(labels)), generator=generator)
    targets += targets >= blank
    for row, count in enumerate(labels):
        targets[row, count:] = -100
    return (logits * scale).to(dtype), targets, torch.tensor(frames), torch.tensor(labels)


class TanhJoint(nn.Module):
    """A usual joint network, in float64 unless cast."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.hidden, self.prediction = nn.Linear(5, 8), nn.Linear(4, 8, bias=False)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 7)
        self.double()

    def forward(self, hidden, prediction):
        return self.head(self.dropout(torch.tanh(self.hidden(hidden) + self.prediction(prediction))))


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


def close(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize(
    ("frames", "labels"),
    [([1], [0]), ([1], [3]), ([4], [0]), ([4, 1, 3], [3, 2, 0]), ([2, 4, 9], [5, 1, 4])],
)
def test_loss_and_gradient_are_those_of_all_alignments(frames, labels, blank, monkeypatch):
    logits, *rest = batch(frames, labels, 5, blank, scale=3.0)
    logits.requires_grad_()
    weights = torch.tensor([0.3, -2.0, 1.5], dtype=torch.float64)[: len(frames)]
    expected = losses(logits, *rest, blank)
    slope = gradient(expected @ weights, logits)
    for piece in (1, 25, 1 << 18):
        monkeypatch.setattr(module, "PIECE", {"cpu": piece})
        found = transducer_loss(logits, *rest, blank=blank, reduction="none")
        close([found, gradient(found @ weights, logits)], [expected, slope], 1e-12)


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale", "tolerance"),
    [
        (([500, 430], [100, 80], 16), torch.float32, 4.0, 3e-5),
        (([40, 31], [9, 5], 6), torch.float32, 1e4, 1e-4),
        ((), torch.bfloat16, 3.0, 4e-3),
        ((), torch.float16, 3.0, 5e-4),
    ],
    ids=["long", "huge", "bfloat16", "float16"],
)
def test_precision_is_that_of_float32(sizes, dtype, scale, tolerance):
    """Over many frames, with huge logits, and from half precision, in which the gradient is rounded."""
    logits, *rest = batch(*sizes, dtype=dtype, scale=scale)
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    expected, found = (transducer_loss(x, *rest, reduction="none") for x in (exact, logits))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    expected, found = (gradient(loss.sum(), x) for loss, x in ((expected, exact), (found, logits)))
    assert found.dtype == dtype
    close([found.double()], [expected], tolerance)


def test_tokens_of_probability_0():
    """A token that no alignment uses changes nothing, and one that some use takes those away."""
    logits, targets, *lengths = batch([5, 4], [3, 2], 6)
    targets = targets.clamp(max=4)
    without = transducer_loss(logits[..., :5], targets, *lengths)
    logits[..., 5] = -INF
    logits.requires_grad_()
    found = transducer_loss(logits, targets, *lengths)
    close([found], [without], 1e-12)
    assert not gradient(found, logits)[..., 5].any()
    logits.data[0, 2, 1, targets[0, 1]] = -INF
    found = transducer_loss(logits, targets, *lengths, reduction="none")
    close([found], [losses(logits, targets, *lengths)], 1e-8)
    slope = gradient(found.sum(), logits)
    assert slope.isfinite().all()
    assert slope[0, 2, 1, targets[0, 1]] == 0


def test_an_impossible_target_can_be_left_out():
    logits, *rest = batch()
    logits[1, 0, 0, rest[0][1, 0]] = -INF
    logits.requires_grad_()
    found = transducer_loss(logits, *rest, reduction="none")
    assert found.isposinf().tolist() == [False, True, False, False]
    sums = found.sum(), found[found.isfinite()].sum()
    all_of, some = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in sums)
    assert all_of[1, 0, :3].isnan().all()
    assert some.isfinite().all()
    assert [bool(row.any()) for row in some] == [True, False, True, True]


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
def test_padding_is_not_read(rubbish):
    logits, targets, frames, labels = batch()
    inside = (torch.arange(9) < frames[:, None])[..., None] & (torch.arange(8) <= labels[:, None])[:, None]
    padded = torch.nn.functional.pad(logits, (0, 0, 0, 3, 0, 3))
    padded = padded.masked_fill(~inside[..., None], rubbish).requires_grad_()
    targets = torch.nn.functional.pad(targets, (0, 3), value=99)
    found = transducer_loss(padded, targets, frames, labels, reduction="none")
    close([found], [losses(logits, targets, frames, labels)], 1e-12)
    slope = gradient(found.sum(), padded)
    assert not slope[~inside].any()
    assert slope[inside].isfinite().all()
    assert slope[inside].ne(0).all()


def test_layouts_and_types_of_what_is_given():
    logits, targets, frames, labels = batch()
    logits.requires_grad_()
    expected = transducer_loss(logits, targets, frames, labels)
    turned = logits.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_()
    wide_targets = torch.stack([targets, targets], -1).int()[..., 0]
    found = transducer_loss(turned, wide_targets, frames.int(), labels.to(torch.int16))
    close([found, gradient(found, turned)], [expected, gradient(expected, logits)])
    assert not transducer_loss(logits.detach(), targets, frames, labels).requires_grad


def test_what_cannot_be_differentiated_is_noticed():
    """Second derivatives, and logits that have changed before the backward pass."""
    leaf, *rest = batch()
    logits = leaf.requires_grad_() * 1
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(transducer_loss(logits, *rest), logits, create_graph=True)
    loss = transducer_loss(logits, *rest)
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Sizes(TorchDispatchMode):
    """Number of bytes of every new storage."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        old, new = ([x.untyped_storage() for x in tree_leaves(own) if isinstance(x, Tensor)] for own in (args, out))
        known = {one.data_ptr() for one in old}
        self.found += [one.nbytes() for one in new if one.data_ptr() not in known]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_gradient_is_as_large_as_the_logits(dtype, monkeypatch):
    monkeypatch.setattr(module, "PIECE", {"cpu": 2000})
    logits, *rest = batch([30, 20], [9, 9], 200, dtype=dtype)
    logits.requires_grad_()
    with Sizes() as forward:
        loss = transducer_loss(logits, *rest)
    with Sizes() as backward:
        loss.backward()
    assert max(forward.found) <= 16000
    *others, largest = sorted(backward.found)
    assert largest == logits.numel() * logits.element_size()
    assert others[-1] <= 16000 < largest / 10


def make(dropout=0.0, dtype=torch.float64):
    """Encoder and prediction outputs that want gradients, a joint network, and targets with lengths."""
    torch.manual_seed(0)
    logits, *rest = batch()
    hidden = torch.randn(4, logits.shape[1], 5, dtype=dtype, requires_grad=True)
    prediction = torch.randn(4, logits.shape[2], 4, dtype=dtype, requires_grad=True)
    return hidden, prediction, TanhJoint(dropout=dropout).to(dtype), rest


def at_once(hidden, prediction, joint, rest, **options):
    return transducer_loss(joint(hidden[:, :, None], prediction[:, None]), *rest, **options)


@pytest.mark.parametrize("max_cells", [1, 3, 7, 11, 1 << 14])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"blank": 6}], ids=str)
def test_pieces_have_the_loss_and_the_gradients_of_the_whole(max_cells, options):
    """And no more cells at a time than allowed."""
    (hidden, prediction, joint, rest), cells = make(), []
    if "blank" in options:
        rest[0] = rest[0].clamp(max=5)
    tensors = (hidden, prediction, *joint.parameters())
    each = losses(joint(hidden[:, :, None], prediction[:, None]), *rest, blank=options.get("blank", 0))
    expected = {"sum": each.sum(), "none": each}.get(options.get("reduction"), each.mean())
    joint.register_forward_hook(lambda module, given, logits: cells.append(logits[..., 0].numel()))
    found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=max_cells, **options)
    close([found], [expected])
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)[: found.numel()].reshape(found.shape)
    close(*(torch.autograd.grad((loss * weights).sum(), tensors) for loss in (found, expected)))
    assert max(cells) <= max_cells
    assert sum(cells) == 2 * int((rest[1] * (rest[2] + 1)).sum())


@pytest.mark.parametrize("wanted", ["hidden", "prediction", "head", "nothing"])
def test_any_part_may_be_frozen(wanted):
    hidden, prediction, joint, rest = make()
    parts = {"hidden": [hidden], "prediction": [prediction], "head": [*joint.head.parameters()], "nothing": []}
    for tensor in (hidden, prediction, *joint.parameters()):
        tensor.requires_grad_(any(tensor is part for part in parts[wanted]))
    expected = at_once(hidden, prediction, joint, rest)
    found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=5)
    assert found.requires_grad == (wanted != "nothing")
    if parts[wanted]:
        close(torch.autograd.grad(found, parts[wanted]), torch.autograd.grad(expected, parts[wanted]))


def test_hooks_see_one_gradient():
    hidden, prediction, joint, rest = make()
    plain = gradient(at_once(hidden, prediction, joint, rest), joint.head.weight)
    seen, done = [], []
    joint.head.weight.register_hook(lambda slope: seen.append(slope) or 2 * slope)
    joint.head.weight.register_post_accumulate_grad_hook(done.append)
    joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=3).backward()
    close([*seen, joint.head.weight.grad], [plain, 2 * plain])
    assert len(done) == 1


def test_dropout_is_the_same_in_both_passes():
    """So the gradient is that of the loss with those dropped units, and random numbers go on as without it."""
    hidden, prediction, joint, rest = make(dropout=0.4)
    direction = torch.randn_like(hidden)

    def loss(step):
        torch.manual_seed(3)
        return joint_transducer_loss(hidden + step * direction, prediction, joint, *rest, max_cells=7)

    found = loss(0.0)
    state = torch.get_rng_state()
    slope = gradient(found, hidden)
    assert torch.equal(torch.get_rng_state(), state)
    expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
    close([(slope * direction).sum()], [expected.detach()], 1e-8)
    joint.eval()
    assert (found - loss(0.0)).abs() > 1e-3


def test_autocast():
    """The gradients of 600 pieces are summed in float32."""
    joint, rest = make(dtype=torch.float32)[2], batch([30], [19])[1:]
    hidden, prediction = (torch.randn(1, *size, requires_grad=True) for size in ((30, 5), (20, 4)))
    tensors = (hidden, prediction, *joint.parameters())
    exact = torch.autograd.grad(at_once(hidden, prediction, joint, rest), tensors)
    types = []
    joint.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():  # weights in autocast's cache must not lack a graph, here and in later layers
            joint_transducer_loss(hidden, prediction, joint, *rest)
        whole = at_once(hidden, prediction, joint, rest)
        found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=1)
    assert found.dtype == torch.float32
    found_slopes = torch.autograd.grad(found, tensors)
    assert set(types) == {torch.bfloat16}
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=0)
    for slope, expected in zip(found_slopes, exact, strict=True):
        assert slope.dtype == torch.float32
        assert (slope - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": torch.zeros(4, 6, 5, 7).long()}, TypeError, "logits must be a floating-point .*got torch.int64"),
        ({"logits": torch.zeros(4, 6, 7)}, ValueError, r"logits must be \[B, T, U \+ 1, V\] .* \[4, 6, 7\]"),
        ({"logits": torch.zeros(4, 0, 5, 7)}, ValueError, r"no dimension of size 0, got \[4, 0, 5, 7\]"),
        ({"logits": torch.zeros(4, 6, 4, 7)}, ValueError, r"targets must be \[4, 3\]"),
        ({"targets": torch.ones(4, 4).bool()}, TypeError, "targets must be a tensor of integers, got torch.bool"),
        ({"targets": torch.zeros(4, 4).long()}, ValueError, r"other than the blank, 0, .* got targets \[0\]"),
        ({"targets": torch.full((4, 4), 7)}, ValueError, r"from 0 to 6, got 7"),
        ({"targets": torch.full((4, 4), -1)}, ValueError, r"got targets \[-1\]"),
        ({"blank": 7}, ValueError, "from 0 to 6, got 7"),
        ({"blank": -1}, ValueError, "blank at least 0"),
        ({"logit_lengths": [6, 1, 3, 4]}, TypeError, "logit_lengths must be a tensor of integers, got list"),
        ({"logit_lengths": torch.tensor([7, 1, 3, 4])}, ValueError, "logit_lengths must be from 1 to 6, got 1 to 7"),
        ({"target_lengths": torch.tensor([4, -1, 0, 3])}, ValueError, "target_lengths must be from 0 to 4, got -1"),
        ({"reduction": "batch"}, ValueError, "reduction must be one of 'none', .* got 'batch'"),
        ({"prediction": torch.zeros(4, 5)}, ValueError, r"prediction must be \[B, U \+ 1, P\]"),
        ({"prediction": torch.zeros(3, 5, 4)}, ValueError, r"same batch and device, got \[4, 6, 5\] .* \[3, 5, 4\]"),
        ({"joint": lambda h, p: h @ torch.ones(5, 7).double()}, ValueError, r"got torch.float64 \[6, 1, 7\]"),
        ({"joint": lambda h, p: (h.sum(-1) + p.sum(-1)).long()}, ValueError, "joint must turn .* floating-point"),
        ({"max_cells": 0}, ValueError, "max_cells must be at least 1, got 0"),
    ],
)
def test_errors(changes, error, message):
    given = dict(zip(("logits", "targets", "logit_lengths", "target_lengths"), batch(dtype=torch.float32), strict=True))
    call = transducer_loss
    if {"prediction", "joint", "max_cells"} & changes.keys():
        call, hidden, prediction, joint, _ = joint_transducer_loss, *make()
        del given["logits"]
        given |= {"hidden": hidden, "prediction": prediction, "joint": joint}
    with pytest.raises(error, match=message):
        call(**given | changes)


@pytest.mark.filterwarnings("ignore")
def test_torchaudio_agrees():
    try:
        rnnt_loss = importlib.import_module("torchaudio.functional").rnnt_loss
    except Exception as reason:  # a build for another torch or without a CUDA library fails in many ways
        pytest.skip(str(reason))
    logits, targets, *lengths = batch([20, 14, 9], [8, 5, 2], 11, dtype=torch.float32)
    logits.requires_grad_()
    theirs = rnnt_loss(logits, targets.clamp(min=0).int(), *(length.int() for length in lengths), blank=0)
    found = [transducer_loss(logits, targets, *lengths), theirs]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    torch.testing.assert_close(*(gradient(loss, logits) for loss in found), rtol=0, atol=1e-5)
