"""One table of optimizers through the same checks; head and body as one optimizer; several processes."""

import copy
import io
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from problem import DECAY, EXAMPLES, backward, data, joined, make_head, objective, optimum, start, train
from processes import run_several
from torch.nn.functional import cross_entropy

from favor.optim import BBM, LSPFB, SBM, SPFB, CombinedOptimizer, ProxBoundSGD, SoftmaxBound

BOUND = {
    f"SoftmaxBound {name}": (lambda h, c=name: SoftmaxBound(h, weight_decay=DECAY, curvature=c), 20)
    for name in ("bohning", "diag", "block", "kfac", "exact", "geometric")
}
BATCH = {
    f"BBM {name}": (lambda h, c=name: BBM(h, weight_decay=DECAY, curvature=c), 60)
    for name in ("exact", "bohning", "spectral", "block", "diag", "kfac")
}
TABLE = {
    **BOUND,
    **BATCH,
    "SBM online": (lambda h: SBM(h, EXAMPLES, weight_decay=DECAY), 5),
    "SBM accumulated": (lambda h: SBM(h, EXAMPLES, weight_decay=DECAY, variant="accumulated"), 5),
    "SPFB": (lambda h: SPFB(h, lr=0.3, weight_decay=DECAY), 20),
    "SPFB literal": (lambda h: SPFB(h, weight_decay=DECAY, literal=True, lr=5.0), 20),
    "ProxBoundSGD": (lambda h: ProxBoundSGD(h, lr=0.3, weight_decay=DECAY), 1),
    "LSPFB exact": (lambda h: LSPFB(h, weight_decay=DECAY, rank=2), 20),
    "LSPFB repaired": (lambda h: LSPFB(h, weight_decay=DECAY, rank=2, rule="repaired"), 20),
}
every = pytest.mark.parametrize("name", TABLE)


def make(name, **options):
    factory, batch = TABLE[name]
    head = make_head(**options)
    return factory(head), head, batch


@every
def test_comes_close_to_the_optimum(name):
    optimizer, head, batch = make(name)
    gaps = [value - optimum() for value in train(optimizer, head, batch, 20)]
    first = objective(start()) - optimum()
    assert min(gaps) > -1e-9
    assert gaps[-1] < 0.06 * first


@every
def test_a_bias_is_a_weight_on_one(name):
    (first, without, batch), (second, with_bias, _) = make(name), make(name, bias=True)
    train(first, without, batch, 2)
    train(second, with_bias, batch, 2)
    torch.testing.assert_close(joined(without), joined(with_bias), rtol=1e-9, atol=1e-9)


@every
def test_saved_state_continues_the_trajectory(name):
    optimizer, head, batch = make(name)
    train(optimizer, head, batch, 1)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    resumed_head = copy.deepcopy(head)
    resumed = TABLE[name][0](resumed_head)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    train(optimizer, head, batch, 1, seed=5)
    train(resumed, resumed_head, batch, 1, seed=5)
    assert torch.equal(head.weight, resumed_head.weight)


@pytest.mark.parametrize("what", ["gradient", "input"])
@every
def test_what_is_not_finite_skips_the_step_and_says_so(name, what):
    """The next step is as if the bad one had not been."""
    (optimizer, head, batch), (other, fresh, _) = make(name), make(name)
    x, y = (part[:batch] for part in data())

    def closure(optimizer, head, what=None):
        optimizer.zero_grad()
        loss = backward(head, x, y)
        if what == "gradient":
            head.weight.grad[0, 0] = torch.inf
        if what == "input":
            optimizer.set_batch(x.masked_fill(x == x[0, 1], torch.nan))
        return loss

    with pytest.warns(RuntimeWarning, match="skipped a step: a gradient or an input of the head is not finite"):
        optimizer.step(lambda: closure(optimizer, head, what))
    assert torch.equal(head.weight, start())
    optimizer.step(lambda: closure(optimizer, head))
    other.step(lambda: closure(other, fresh))
    assert torch.equal(head.weight, fresh.weight)


@every
def test_float32_follows_float64(name):
    (first, double, batch), (second, single, _) = make(name), make(name, dtype=torch.float32)
    train(first, double, batch, 2)
    train(second, single, batch, 2)
    torch.testing.assert_close(joined(single), joined(double), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("curvature", ["exact", "bohning", "spectral", "block", "diag", "kfac"])
def test_bbm_never_increases_the_objective(curvature, rate):
    head = make_head(weight=4 * start())
    values = [objective(joined(head))]
    values += train(BBM(head, lr=rate, weight_decay=DECAY, curvature=curvature), head, EXAMPLES, 40)
    assert max(after - before for before, after in pairwise(values)) < 1e-14


def network():
    torch.manual_seed(0)
    body, head = torch.nn.Linear(4, 6), torch.nn.Linear(6, 5)
    return torch.nn.Sequential(body, torch.nn.Tanh(), head)


def combined(model):
    return CombinedOptimizer(torch.optim.AdamW(model[0].parameters(), lr=1e-2), SoftmaxBound(model[2]))


def passes(model, optimizer, scaler=None, steps=3):
    x, y = data()
    for i in range(steps):
        loss = cross_entropy(model(x[20 * i : 20 * i + 20].float()), y[20 * i : 20 * i + 20])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def test_it_is_both_optimizers_and_calls_a_closure_once():
    one, two, calls, (x, y) = network(), network(), [], data()
    optimizer, parts = combined(one), combined(two).optimizers

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = cross_entropy(one(x.float()), y)
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure) > 0
        cross_entropy(two(x.float()), y).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    assert calls == [1] * 3
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_loss_scaling_changes_nothing_and_skips_overflow():
    plain, scaled = network(), network()
    passes(plain, combined(plain))
    optimizer = combined(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = data()
    (scaler.scale(cross_entropy(scaled(x[:20].float()), y[:20])) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    passes(scaled, optimizer, scaler)
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_scheduler_reaches_all_groups_before_and_after_loading():
    model = network()
    optimizer = combined(model)
    passes(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    again = network()
    again.load_state_dict(model.state_dict())
    resumed = combined(again)
    resumed.load_state_dict(state)
    for each in (optimizer, resumed):
        torch.optim.lr_scheduler.LambdaLR(each, lambda _: 0.5)
        assert [group["lr"] for part in each.optimizers for group in part.param_groups] == [5e-3, 0.5]
    passes(model, optimizer)
    passes(again, resumed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_refusals():
    model = network()
    with pytest.raises(ValueError, match="at least one optimizer"):
        CombinedOptimizer()
    with pytest.raises(ValueError, match="hold the same parameter"):
        CombinedOptimizer(torch.optim.AdamW(model.parameters()), SoftmaxBound(model[2]))
    optimizer = combined(model)
    with pytest.raises(ValueError, match="holds 0 optimizers, expected 2"):
        optimizer.load_state_dict({})
    with pytest.raises(TypeError, match="before they are combined"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


OPTIMIZERS = {name: TABLE[name][0] for name in [*BOUND, "SPFB", "BBM exact", "BBM spectral", "BBM kfac"]}


def share(step, rank, world):
    """Rows of a process, and the part of each in the loss: in the second step the last of several has no rows."""
    begin, size = 20 * step, 20 // world
    if step == 0:
        return slice(begin + rank * size, begin + (rank + 1) * size), 1 / size
    if world == 1:
        return slice(begin, begin + 20), 1 / 40
    return (slice(begin, begin + 20), 1 / 20) if rank == 0 else (slice(0, 0), 1.0)


def run(rank, world, folder):
    """Two steps with every optimizer on this process's rows; gradients averaged as DDP does."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    x, y = data()
    found = {}
    for name, factory in OPTIMIZERS.items():
        head = make_head()
        optimizer = factory(head)
        for step in range(2):
            rows, weight = share(step, rank, world)

            def closure(rows=rows, weight=weight, head=head, optimizer=optimizer):
                optimizer.zero_grad()
                loss = cross_entropy(head(x[rows]), y[rows], reduction="sum") * weight
                loss.backward()
                if world == 1:
                    optimizer.set_batch(x[rows], torch.full((20,), weight, dtype=torch.float64))
                else:
                    dist.all_reduce(head.weight.grad)
                    head.weight.grad /= world
                return loss

            optimizer.step(closure)
        found[name] = joined(head)
    if rank == 0:
        torch.save(found, folder / f"{world}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one_with_all_rows(tmp_path):
    run_several(run, 2, tmp_path)
    run(0, 1, tmp_path)
    two, one = torch.load(tmp_path / "2.pt"), torch.load(tmp_path / "1.pt")
    for name in OPTIMIZERS:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
