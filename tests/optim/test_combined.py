"""Head and body as one optimizer: loss scaling, schedules, state; and several processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from problem import data, joined, make_head
from processes import run_two
from test_optimizers import BOUND, TABLE
from torch.nn.functional import cross_entropy

from favor.optim import CombinedOptimizer, SoftmaxBound


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
    run_two(run, 2, tmp_path)
    run(0, 1, tmp_path)
    two, one = torch.load(tmp_path / "2.pt"), torch.load(tmp_path / "1.pt")
    for name in OPTIMIZERS:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
