"""One table of optimizers through the same checks."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from problem import DECAY, EXAMPLES, backward, data, joined, make_head, objective, optimum, start, train

from favor.optim import BBM, LSPFB, SBM, SPFB, ProxBoundSGD, SoftmaxBound

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
