"""Operands of `chosen_attention` and `choose` for tests, and their formulas over all pairs in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from favor.kernels.operands import ChosenOperands

PLACES = (0, 1, 2, 6, 7)
"""Of query, key, value, far key and far value."""
# Heads that begin at different places, in the middle of a section; the last rows of one are after the last key.
CAUSAL = {
    **{"rows": 64, "keys": 230, "seen": (0, 0, 0), "first": (64, 0), "section": 128},
    **{"chosen": 6, "owns": 3, "means": 2, "width": 20, "value_width": 12},
}
RUNS = {"keys": 80, "seen": (72, 33), "run": 16, "chosen": 3, "means": 5, "width": 32, "value_width": 64}
CASES: list[dict[str, Any]] = [
    CAUSAL,
    RUNS,
    RUNS | {"rows": 1, "chosen": 2, "heads": (4, 2), "value_width": 4},
    {"rows": 5, "owns": 4, "seen": (30, 7, 1)},
    {"rows": 40, "means": 40, "seen": (0, 3)},
    {"chosen": 4, "owns": 1, "run": 2, "means": 3, "seen": (21,), "heads": (1, 1), "width": 256, "value_width": 80},
]


def problem(
    *,
    heads: tuple[int, int] = (2, 1),
    rows: int = 16,
    keys: int = 40,
    seen: tuple[int, ...],
    chosen: int = 0,
    owns: int = 0,
    means: int = 0,
    run: int = 1,
    first: tuple[int, ...] = (7,),
    section: int = 0,
    width: int = 16,
    value_width: int = 16,
    dtype: torch.dtype = torch.float32,
) -> ChosenOperands:
    """Draws operands, on the CPU: runs that are seen, keys of rows among the others, and every second mean.

    With sections, blocks see the keys before their own section.
    """
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(4)
        lead = (heads[0], len(seen))
        limits = torch.tensor(seen, dtype=torch.int32).repeat(heads[0], 1)
        start = torch.tensor(first, dtype=torch.int32 if section else torch.int64)
        if section:
            limits = (start.unsqueeze(1) + torch.arange(len(seen), dtype=torch.int32) * rows) // section * section
        shared = torch.full((*lead, chosen), -1, dtype=torch.int32)
        own = torch.full((*lead, rows, owns), -1, dtype=torch.int32)
        for head in range(heads[0]):
            for block, limit in enumerate(limits[head].tolist()):
                runs = torch.randperm(-(-limit // run), generator=generator)[:chosen]
                shared[head, block, : len(runs)] = runs
                others = torch.arange(limit)[~torch.isin(torch.arange(limit) // run, runs)]
                for row in range(rows):
                    some = others[torch.randperm(len(others), generator=generator)[:owns]]
                    own[head, block, row, : len(some)] = some
        own[torch.rand(own.shape, generator=generator) < 0.2] = -1
        log = torch.randint(0, 9, (*lead, means), generator=generator).float().log()
        log[torch.rand(log.shape, generator=generator) < 0.5] = -torch.inf
        log[:, 0], log[..., 1:2] = -torch.inf, -torch.inf  # the first block sees no mean, and no block the second one

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = draw(*lead, rows, width), draw(heads[1], keys, width), draw(heads[1], keys, value_width)
        far = draw(heads[1], means, width), draw(heads[1], means, value_width)
        size, most = torch.full((heads[0],), run, dtype=torch.int32), chosen * run
        return ChosenOperands(*tokens, shared, own, limits, *far, log, start, size, section, most, width**-0.5)


def weights(given: ChosenOperands) -> Tensor:
    """How often each key and each mean counts for each row, `[N, Z, B, S + F]`."""
    (heads, blocks, rows), keys = given.query.shape[:3], given.key.shape[1]
    number = torch.zeros(heads, blocks, rows, keys, dtype=torch.float64, device="cpu")
    for head in range(heads):
        for block in range(blocks):
            start = int(given.first[head]) + block * rows if given.section else 0
            run = int(given.run[head])
            for p in given.shared[head, block].tolist():
                if p >= 0:
                    number[head, block, :, p * run : min(p * run + run, given.seen[head, block])] += 1
            for row in range(rows):
                if given.section:
                    number[head, block, row, start // given.section * given.section : start + row + 1] += 1
                for j in given.own[head, block, row].tolist():
                    if j >= 0:
                        number[head, block, row, j] += 1
    return torch.cat([number, given.far_log.double().exp().unsqueeze(2).expand(-1, -1, rows, -1)], -1)


def naive(given: ChosenOperands) -> Tensor:
    """The formula of `favor.kernels.chosen`, given float64."""
    groups = len(given.query) // len(given.key)
    pairs = ((given.key, given.far_key), (given.value, given.far_value))
    key, value = (torch.cat(pair, 1).repeat_interleave(groups, 0).unsqueeze(1) for pair in pairs)
    logits = given.scale * given.query @ key.mT + weights(given).log()
    return (
        torch.nan_to_num(logits.masked_fill((logits == -torch.inf).all(-1, True), 0).softmax(-1))
        @ value
        * (logits.amax(-1, True) > -torch.inf)
    )


def converted(given: ChosenOperands, convert: Callable[[Tensor], Tensor]) -> ChosenOperands:
    """The operands with all their tensors converted."""
    return ChosenOperands._make(convert(part) if isinstance(part, Tensor) else part for part in given)


def exact(given: ChosenOperands) -> ChosenOperands:
    """The same numbers in float64."""
    return converted(given, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def results(function: Callable[[ChosenOperands], Tensor], given: ChosenOperands) -> dict[str, Tensor]:
    """Output and gradients."""
    generator = torch.Generator("cpu").manual_seed(1)
    grad = torch.randn(*given.query.shape[:-1], given.value.shape[-1], generator=generator, device="cpu")
    leaves = {given._fields[place]: given[place].clone().requires_grad_() for place in PLACES}
    out = function(given._replace(**leaves))
    grad = grad.to(given.query.dtype).to(out.dtype)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), grad, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def errors(function: Callable[[ChosenOperands], Tensor], given: ChosenOperands) -> dict[str, float]:
    """How far output and gradients are from those of the formula for the same numbers."""
    found, truth = results(function, given), results(naive, exact(given))
    assert all(own.dtype == given.query.dtype and own.shape == truth[name].shape for name, own in found.items())
    # A gradient of zeros has no size of its own.
    sizes = {name: max(1e-3, own.norm().item()) for name, own in truth.items()}
    return {name: (own.double() - truth[name]).norm().item() / sizes[name] for name, own in found.items()}


def poisoned_where_unread(given: ChosenOperands) -> ChosenOperands:
    """The operands with NaN for keys, values and means that no row sees."""
    unseen = weights(given).sum((1, 2)).unflatten(0, (len(given.key), -1)).sum(1) == 0
    near, far = unseen.split((given.key.shape[1], given.far_key.shape[1]), 1)
    hidden = {"key": near, "value": near, "far_key": far, "far_value": far}
    return given._replace(
        **{name: getattr(given, name).masked_fill(own.unsqueeze(-1), torch.nan) for name, own in hidden.items()}
    )


# Heads, blocks, rows, keys, width, bins, and bins of keys that are taken.
CHOICES = [((4, 2), 5, 1, 70, 24, 23, 0), ((2, 1), 2, 20, 90, 6, 17, 8), ((1, 1), 1, 3, 40, 130, 64, 40)]


def choice(
    heads: tuple[int, int], blocks: int, rows: int, keys: int, width: int, number: int, others: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor]:
    """Draws queries, keys, how many are seen, and which are taken; gives them with what `choose` must find."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(2)
        # Products of small whole numbers are exact, and many are equal: then the first key counts.
        query = torch.randint(-2, 3, (heads[0], blocks, rows, width), generator=generator).float()
        key = torch.randint(-2, 3, (heads[1], keys, width), generator=generator).float()
        seen = torch.randint(0, keys + 1, (heads[0], blocks), generator=generator, dtype=torch.int32)
        seen[0, 0], seen[-1, -1] = keys, min(3, keys)
        limit = seen[:, :, None, None].expand(-1, -1, rows, keys)
        place = torch.arange(keys)
        score = query @ key.repeat_interleave(heads[0] // heads[1], 0).unsqueeze(1).mT
        hidden = place >= limit
        taken = None
        if others:
            taken = torch.randint(-1, 4, (heads[0], blocks, others), generator=generator, dtype=torch.int32)
            taken = torch.where(taken < 0, -1, taken * others + torch.arange(others)).to(torch.int32)
            hidden = hidden | (taken.unsqueeze(-1) == place).any(2).unsqueeze(2)
        score = score.masked_fill(hidden, -torch.inf)
        truth = torch.full((heads[0], blocks, rows, number), -1, dtype=torch.int32)
        for own in range(min(number, keys)):
            best = score[..., own::number].amax(-1)
            first = (score[..., own::number] == best.unsqueeze(-1)).int().argmax(-1)
            truth[..., own] = torch.where(best == -torch.inf, -1, first * number + own)
    return (query, key, seen), taken, truth
