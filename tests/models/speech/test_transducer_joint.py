"""The Transducer loss that makes its logits piece by piece: the same as from all logits at once."""

import pytest
import torch
import torch.distributed
from processes import run_two
from torch.nn.parallel import DistributedDataParallel
from transducer_truth import TanhJoint, batch

from favor.models.speech import joint_transducer_loss, transducer_loss
from favor.models.speech.transducer.lattice import Lattice


def make(dropout=0.0, dtype=torch.float64):
    """Encoder and prediction outputs that want gradients, a joint network, and targets with lengths."""
    torch.manual_seed(0)
    logits, *rest = batch()
    hidden = torch.randn(4, logits.shape[1], 5, dtype=dtype, requires_grad=True)
    prediction = torch.randn(4, logits.shape[2], 4, dtype=dtype, requires_grad=True)
    return hidden, prediction, TanhJoint(dropout=dropout).to(dtype), rest


def at_once(hidden, prediction, joint, rest, **options):
    return transducer_loss(joint(hidden[:, :, None], prediction[:, None]), *rest, **options)


def close(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("max_cells", [1, 3, 7, 11, 1 << 14])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "mean_volume"}, {"clamp": 0.05}, {"blank": 6}],
    ids=["mean", "sum", "volume", "clamp", "blank"],
)
def test_same_loss_and_gradients(max_cells, options):
    hidden, prediction, joint, rest = make()
    if options.get("blank"):
        rest[0] = rest[0].clamp(max=5)
    tensors = (hidden, prediction, *joint.parameters())
    expected = at_once(hidden, prediction, joint, rest, **options)
    found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=max_cells, **options)
    close([found], [expected])
    close(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors))


def test_losses_apart_with_weights_and_accumulated():
    hidden, prediction, joint, rest = make()
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    tensors = (hidden, prediction, *joint.parameters())
    expected = at_once(hidden, prediction, joint, rest, reduction="none")
    for _ in range(2):
        found = joint_transducer_loss(hidden, prediction, joint, *rest, reduction="none", max_cells=5)
        close(found, expected)
        (found @ weights).backward()
    close([x.grad for x in tensors], [2 * x for x in torch.autograd.grad(expected @ weights, tensors)])


@pytest.mark.parametrize("wanted", ["hidden", "prediction", "head", "nothing"])
def test_any_part_may_be_frozen(wanted):
    hidden, prediction, joint, rest = make()
    parts = {"hidden": [hidden], "prediction": [prediction], "head": [*joint.head.parameters()], "nothing": []}
    for tensor in (hidden, prediction, *joint.parameters()):
        tensor.requires_grad_(any(tensor is part for part in parts[wanted]))
    expected = at_once(hidden, prediction, joint, rest)
    found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=5)
    close([found], [expected])
    assert found.requires_grad == (wanted != "nothing")
    if parts[wanted]:
        close(torch.autograd.grad(found, parts[wanted]), torch.autograd.grad(expected, parts[wanted]))


def test_without_gradients_only_the_loss_is_computed(monkeypatch):
    hidden, prediction, joint, rest = make()
    expected = at_once(hidden, prediction, joint, rest).detach()
    monkeypatch.delattr(Lattice, "occupancies")
    with torch.no_grad():
        close([joint_transducer_loss(hidden, prediction, joint, *rest)], [expected])
        close([at_once(hidden, prediction, joint, rest)], [expected])


class Model(torch.nn.Module):
    """A joint network as a method, and a weight that is not a leaf."""

    def __init__(self, joint):
        super().__init__()
        self.joint, self.other = joint, torch.nn.Linear(3, 3)
        torch.nn.utils.parametrizations.weight_norm(joint.head)

    def join(self, hidden, prediction):
        return self.joint(hidden, prediction)


@pytest.mark.parametrize("kind", ["method", "closure"])
def test_parameters_are_found_however_the_joint_network_is_made(kind):
    hidden, prediction, joint, rest = make()
    model = Model(joint)
    join = {"method": model.join, "closure": lambda h, p: 2 * model.joint(h, p)}[kind]
    joint_transducer_loss(hidden, prediction, join, *rest, max_cells=5).backward()
    found = [parameter.grad for parameter in model.joint.parameters()]
    expected = torch.autograd.grad(at_once(hidden, prediction, join, rest), [*model.joint.parameters()])
    close(found, expected)
    assert model.other.weight.grad is None


def test_hooks_see_one_gradient():
    hidden, prediction, joint, rest = make()
    plain = torch.autograd.grad(at_once(hidden, prediction, joint, rest), joint.head.weight)[0]
    seen, done = [], []
    joint.head.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
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

    close([loss(0.0)], [loss(0.0)], 0)
    found = loss(0.0)
    state = torch.get_rng_state()
    torch.rand(5)
    slope = torch.autograd.grad(found, hidden)[0]
    assert torch.equal(torch.rand(3), torch.rand(3, generator=after(state, 5)))
    expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
    close([(slope * direction).sum()], [expected.detach()], 1e-8)
    joint.eval()
    assert (found - loss(0.0)).abs() > 1e-3


def after(state, count):
    generator = torch.Generator()
    generator.set_state(state)
    torch.rand(count, generator=generator)
    return generator


def test_probing_takes_no_random_numbers():
    hidden, prediction, joint, rest = make(dropout=0.4)
    calls = []

    def counted(h, p):
        calls.append(torch.get_rng_state())
        return joint(h, p)

    state = torch.get_rng_state()
    joint_transducer_loss(hidden, prediction, counted, *rest)
    assert all(torch.equal(state, one) for one in calls[:2])


def test_autocast():
    hidden, prediction, joint, rest = make(dtype=torch.float32)
    tensors = (hidden, prediction, *joint.parameters())
    exact = torch.autograd.grad(at_once(hidden, prediction, joint, rest), tensors)
    types = []
    joint.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            joint(hidden[:, :, None], prediction[:, None])  # weights in autocast's cache must not lack a graph
        whole = at_once(hidden, prediction, joint, rest)
        found = joint_transducer_loss(hidden, prediction, joint, *rest, max_cells=7)
    assert found.dtype == torch.float32
    before = len(types)
    found_slopes = torch.autograd.grad(found, tensors)
    assert len(types) > before
    assert set(types) == {torch.bfloat16}
    assert all(x.dtype == torch.float32 for x in found_slopes)
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=0)
    for slope, expected in zip(found_slopes, exact, strict=True):
        assert (slope - expected).norm() < 0.03 * expected.norm()


def test_a_pass_without_gradients_leaves_autocast_alone():
    """Weights that it casts without autograd must not be what later layers find in its cache."""
    hidden, prediction, joint, rest = make(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            joint_transducer_loss(hidden, prediction, joint, *rest)
        joint(hidden, prediction[:, :1]).sum().backward()
    assert all(parameter.grad is not None for parameter in joint.parameters())


def test_half_precision_sums_in_float32():
    _, *rest = batch([30], [19])
    _, _, joint, _ = make()
    hidden, prediction = torch.randn(1, 30, 5), torch.randn(1, 20, 4)
    given = [x.bfloat16().requires_grad_() for x in (hidden, prediction)]
    joint.bfloat16()
    tensors = (*given, joint.head.bias)
    found = torch.autograd.grad(joint_transducer_loss(*given, joint, *rest, max_cells=1), tensors)
    assert all(slope.dtype == torch.bfloat16 for slope in found)
    exact = [x.detach().double().requires_grad_() for x in given]
    joint.double()
    tensors = (*exact, joint.head.bias)
    for one, other in zip(found, torch.autograd.grad(at_once(*exact, joint, rest), tensors), strict=True):
        assert (one - other).norm() < 0.006 * other.norm()


def test_changes_before_the_backward_pass_are_noticed():
    hidden, prediction, joint, rest = make()
    loss = joint_transducer_loss(hidden, prediction, joint, *rest)
    with torch.no_grad():
        joint.head.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused():
    hidden, prediction, joint, rest = make()
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(joint_transducer_loss(hidden, prediction, joint, *rest), hidden, create_graph=True)


@pytest.mark.parametrize("max_cells", [1, 4, 9])
def test_no_more_cells_at_a_time_than_allowed(max_cells):
    hidden, prediction, joint, rest = make()
    cells = []

    def counted(h, p):
        cells.append(h.shape[0] * p.shape[1])
        return joint(h, p)

    joint_transducer_loss(hidden, prediction, counted, *rest, max_cells=max_cells).backward()
    assert max(cells) <= max_cells
    real = sum(t * (u + 1) for t, u in zip(rest[1].tolist(), rest[2].tolist(), strict=True))
    assert sum(cells) == 2 * real + 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": torch.zeros(4, 6, 5).int()}, TypeError, r"hidden must be a floating-point tensor \[B, T, H\]"),
        ({"hidden": torch.zeros(4, 5)}, ValueError, r"hidden must be \[B, T, H\]"),
        ({"hidden": torch.zeros(4, 0, 5)}, ValueError, r"hidden must be \[B, T, H\] with no dimension of size 0"),
        ({"prediction": torch.zeros(4, 5)}, ValueError, r"prediction must be \[B, U \+ 1, P\]"),
        ({"prediction": torch.zeros(3, 5, 4)}, ValueError, r"same batch and device, got \[4, 6, 5\] .* \[3, 5, 4\]"),
        ({"prediction": torch.zeros(4, 4, 4).double()}, ValueError, r"targets must be \[4, 3\]"),
        ({"joint": lambda h, p: h @ torch.ones(5, 7).double()}, ValueError, r"got torch.float64 \[2, 1, 7\]"),
        ({"joint": lambda h, p: (h.sum(-1) + p.sum(-1)).long()}, ValueError, r"joint must turn \[1, 1, 5\] and"),
        ({"max_cells": 0}, ValueError, "max_cells must be at least 1, got 0"),
        ({"kernel": "library"}, ValueError, "kernel must be one of 'auto', 'torch', 'triton'; got 'library'"),
        ({"reduction": "both"}, ValueError, "reduction must be one of"),
        ({"blank": 7}, ValueError, "blank must be an id from 0 to 6, got 7"),
    ],
)
def test_errors(changes, error, message):
    hidden, prediction, joint, rest = make()
    names = ("targets", "logit_lengths", "target_lengths")
    given = {"hidden": hidden, "prediction": prediction, "joint": joint, **dict(zip(names, rest, strict=True))}
    given["max_cells"] = 10
    assert joint_transducer_loss(**given).isfinite()
    with pytest.raises(error, match=message):
        joint_transducer_loss(**{**given, **changes})


class Trained(torch.nn.Module):
    """What a training step of a Transducer is to DDP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.joint = torch.nn.Linear(5, 5).double(), TanhJoint()

    def forward(self, hidden, prediction, *rest):
        return joint_transducer_loss(self.encoder(hidden), prediction, self.joint, *rest, max_cells=5)


# DDP gives its process group up with Python's lock held. A thread of gloo that has just ended a sum wants the lock too,
# and the two wait for each other (torch 2.13). So a model lives as long as its process.
KEPT = []


def ddp_worker(rank, world, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        hidden, prediction, _, rest = make()
        mine = slice(rank * 4 // world, (rank + 1) * 4 // world)
        model = DistributedDataParallel(Trained())
        for _ in range(2):  # DDP raises in the second step if a gradient of the first did not come
            model.zero_grad()
            model(hidden[mine], prediction[mine], *(x[mine] for x in rest)).backward()
        torch.save([parameter.grad for parameter in model.parameters()], folder / f"{rank}.pt")
        KEPT.append(model)
    finally:
        torch.distributed.destroy_process_group()


def check_ddp(world, folder):
    hidden, prediction, _, rest = make()
    model = Trained()
    model(hidden, prediction, *rest).backward()
    for rank in range(world):
        close(torch.load(folder / f"{rank}.pt"), [parameter.grad for parameter in model.parameters()])


@pytest.mark.slow
def test_ddp_over_two_processes(tmp_path):
    run_two(ddp_worker, 2, tmp_path)
    check_ddp(2, tmp_path)
