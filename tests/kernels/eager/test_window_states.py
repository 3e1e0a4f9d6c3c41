"""Sums of the states of other blocks, against the same sums in float64 without any scale."""

import pytest
import torch

from favor.kernels.eager.blocks import States

DIRECTIONS = [(True, True), (True, False), (False, True)]


def draw(blocks, spread, nothing=()):
    """States of two heads and five features whose tops differ by up to `spread`; `nothing` are blocks without keys."""
    generator = torch.Generator().manual_seed(blocks)
    top = spread * (torch.rand(2, blocks, 5, generator=generator) - 0.5)
    states = States(
        top,
        1 + torch.rand(2, blocks, 5, generator=generator),
        torch.randn(2, blocks, 5, 3, generator=generator),
    )
    for block in nothing:
        states.top[:, block], states.total[:, block], states.values[:, block] = -torch.inf, 0.0, 0.0
    return states


def expected(states, before, after):
    """Logarithm in base 2 of the summed totals, and the mean values, of the other blocks."""
    blocks = states.top.shape[1]
    index = torch.arange(blocks)
    chosen = (before & (index < index[:, None])) | (after & (index > index[:, None]))
    scale = (states.top.double()[:, None] + chosen.log()[None, :, :, None]).exp2()  # [N, b, b', M]
    total = (scale * states.total[:, None]).sum(2)
    values = (scale.unsqueeze(-1) * states.values[:, None]).sum(2)
    return total.log2(), values / total.masked_fill(total == 0, 1.0).unsqueeze(-1)


def check(states, before, after):
    log_total, means = expected(states, before, after)
    found = states.outside(before=before, after=after)
    assert torch.equal(found.top == -torch.inf, log_total == -torch.inf)
    visible = found.total.masked_fill(found.total == 0, 1.0)
    torch.testing.assert_close((found.top + visible.log2()).double(), log_total, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close((found.values / visible.unsqueeze(-1)).double(), means, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), DIRECTIONS, ids=["others", "before", "after"])
@pytest.mark.parametrize("spread", [3.0, 300.0], ids=["level", "steep"])
@pytest.mark.parametrize("blocks", [1, 2, 16, 17, 40, 300])
def test_the_other_blocks_are_summed(blocks, spread, before, after):
    check(draw(blocks, spread), before, after)


@pytest.mark.parametrize("nothing", [(0,), (1, 2), (0, 1, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("spread", [3.0, 300.0], ids=["level", "steep"])
def test_blocks_without_keys_add_nothing(nothing, spread):
    check(draw(4, spread, nothing), True, True)
