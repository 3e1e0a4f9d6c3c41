"""Chosen keys of both kernels against a formula over all pairs in float64, and the choice against brute force."""

from functools import partial

import pytest
import torch
from torch.utils._device import device_decorator

from favor.kernels.chosen import choose, chosen_attention, log_left
from favor.kernels.operands import ChosenOperands

FLOATS = ("query", "key", "value", "far_key", "far_value")
# Heads that begin at different places, in the middle of a section; the last rows of one are after the last key.
CAUSAL = {"rows": 16, "keys": 58, "seen": (0, 0, 0), "first": (16, 0), "section": 32, "chosen": 6}
CAUSAL |= {"owns": 3, "means": 2, "width": 20, "value_width": 12}
RUNS = {"keys": 80, "seen": (72, 33), "run": 16, "chosen": 3, "means": 5, "width": 32, "value_width": 64}
SMALL = {"rows": 8, "seen": (0, 9, 30), "chosen": 2, "owns": 2, "means": 3}
CASES = [
    CAUSAL,
    RUNS,
    RUNS | {"rows": 1, "chosen": 2, "heads": (4, 2), "value_width": 4},
    {"rows": 5, "owns": 4, "seen": (30, 7, 1)},
    {"rows": 40, "means": 40, "seen": (0, 3)},
    {"chosen": 4, "owns": 1, "run": 2, "means": 3, "seen": (21,), "heads": (1, 1), "width": 256, "value_width": 80},
]
on_cpu = partial(device_decorator, torch.device("cpu"))
both_kernels = pytest.mark.parametrize("kernel", ["torch", "triton"])
of_causal_layers_and_encoders = pytest.mark.parametrize("options", [CAUSAL, RUNS], ids=["causal", "encoder"])
pytestmark = pytest.mark.usefixtures("poisoned")


@on_cpu
def problem(
    *, seen, heads=(2, 1), rows=16, keys=40, chosen=0, owns=0, means=0, run=1, first=(7,), section=0, width=16, **other
):
    """Operands: runs that are seen, keys of rows among the others, and every second mean.

    With sections, blocks see the keys before their own section.
    """
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

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(other.get("dtype", torch.float32))

    values = other.get("value_width", 16)
    tokens = draw(*lead, rows, width), draw(heads[1], keys, width), draw(heads[1], keys, values)
    far = draw(heads[1], means, width), draw(heads[1], means, values)
    size, most = torch.full((heads[0],), run, dtype=torch.int32), chosen * run
    return ChosenOperands(*tokens, shared, own, limits, *far, log, start, size, section, most, width**-0.5)


def weights(given):
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


def naive(given):
    """The formula of `favor.kernels.chosen`, given float64."""
    groups = len(given.query) // len(given.key)
    pairs = ((given.key, given.far_key), (given.value, given.far_value))
    key, value = (torch.cat(pair, 1).repeat_interleave(groups, 0).unsqueeze(1) for pair in pairs)
    logits = given.scale * given.query @ key.mT + weights(given).log()
    blind = (logits == -torch.inf).all(-1, True)
    return logits.masked_fill(blind, 0).softmax(-1) @ value * ~blind


def converted(given, convert):
    """The operands with all their tensors converted."""
    return ChosenOperands._make(convert(part) if isinstance(part, torch.Tensor) else part for part in given)


def exact(given):
    return converted(given, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def by(kernel):
    """Computes it by a kernel, on its device."""
    device = torch.empty(0).device if kernel == "triton" else "cpu"
    return lambda given: chosen_attention(converted(given, lambda tensor: tensor.to(device)), kernel).cpu()


def results(function, given):
    """Output and gradients."""
    generator = torch.Generator("cpu").manual_seed(1)
    grad = torch.randn(*given.query.shape[:-1], given.value.shape[-1], generator=generator, device="cpu")
    leaves = {name: getattr(given, name).clone().requires_grad_() for name in FLOATS}
    out = function(given._replace(**leaves))
    grad = grad.to(given.query.dtype).to(out.dtype)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), grad, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def errors(function, given):
    """How far output and gradients are from those of the formula for the same numbers."""
    found, truth = results(function, given), results(naive, exact(given))
    assert all(own.dtype == given.query.dtype and own.shape == truth[name].shape for name, own in found.items())
    # A gradient of zeros has no size of its own.
    sizes = {name: max(1e-3, own.norm().item()) for name, own in truth.items()}
    return {name: (own.double() - truth[name]).norm().item() / sizes[name] for name, own in found.items()}


def poisoned_where_unread(given):
    """The operands with NaN for keys, values and means that no row sees."""
    unseen = weights(given).sum((1, 2)).unflatten(0, (len(given.key), -1)).sum(1) == 0
    near, far = unseen.split((given.key.shape[1], given.far_key.shape[1]), 1)
    hidden = {"key": near, "value": near, "far_key": far, "far_value": far}
    return given._replace(
        **{name: getattr(given, name).masked_fill(own.unsqueeze(-1), torch.nan) for name, own in hidden.items()}
    )


@both_kernels
@pytest.mark.parametrize("options", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(options, kernel):
    given = problem(**options)
    found = errors(by(kernel), exact(given) if kernel == "torch" else given)
    assert max(found.values()) <= (1e-12 if kernel == "torch" else 5e-6), found
    if kernel == "triton":  # what no row sees is not even read
        clean, other = results(by(kernel), given), results(by(kernel), poisoned_where_unread(given))
        for name in clean:
            torch.testing.assert_close(other[name], clean[name], msg=name)


@pytest.mark.parametrize(("options", "dtype"), [(CAUSAL, torch.float16), (RUNS, torch.bfloat16)], ids=str)
def test_triton_in_half_precision_is_as_good_as_plain_torch(options, dtype):
    given = problem(dtype=dtype, **options)
    found, others = errors(by("triton"), given), errors(by("torch"), given)
    for name, own in found.items():
        assert own <= 2 * others[name], (name, own, others[name])
        assert own <= {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], (name, own)


@of_causal_layers_and_encoders
def test_work_in_many_parts_and_rows_that_stand_apart_change_nothing(options, monkeypatch):
    given = exact(problem(**options))
    whole = results(by("torch"), given)
    apart = given._replace(**{name: getattr(given, name).mT.contiguous().mT for name in FLOATS})
    torch.testing.assert_close(by("torch")(apart), whole["out"])
    monkeypatch.setattr("favor.kernels.eager.chosen._NUMBERS", 1)
    for name, own in results(by("torch"), given).items():
        torch.testing.assert_close(own, whole[name], msg=name)


@both_kernels
@pytest.mark.parametrize(("dtype", "steep"), [(torch.float32, 1), (torch.float32, 1e3), (torch.float16, 30)], ids=str)
def test_rows_that_see_nothing_give_zeros_and_large_norms_stay_finite(dtype, steep, kernel):
    given = problem(dtype=dtype, **SMALL)
    found = results(by(kernel), given._replace(query=given.query * steep, key=given.key * min(steep, 30)))
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert found["out"][:, 1:].ne(0).any(-1).all()
    assert not found["out"][:, 0].any()
    assert not found["query"][:, 0].any()


# Heads, blocks, rows, keys, width, bins, and bins of keys that are taken.
CHOICES = [((4, 2), 5, 1, 70, 24, 23, 0), ((2, 1), 2, 20, 90, 6, 17, 8), ((1, 1), 1, 3, 40, 130, 64, 40)]


@on_cpu
def choice(heads, blocks, rows, keys, width, number, others):
    """Queries, keys, how many are seen, and which are taken, with what `choose` must find."""
    generator = torch.Generator().manual_seed(2)
    # Products of small whole numbers are exact, and many are equal: then the first key counts.
    query = torch.randint(-2, 3, (heads[0], blocks, rows, width), generator=generator).float()
    key = torch.randint(-2, 3, (heads[1], keys, width), generator=generator).float()
    seen = torch.randint(0, keys + 1, (heads[0], blocks), generator=generator, dtype=torch.int32)
    seen[0, 0], seen[-1, -1] = keys, min(3, keys)
    place = torch.arange(keys)
    score = query @ key.repeat_interleave(heads[0] // heads[1], 0).unsqueeze(1).mT
    hidden, taken = place >= seen[:, :, None, None].expand(-1, -1, rows, keys), None
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


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_triton_finds_the_best_key_of_each_bin(case):
    given, taken, truth = choice(*case)
    device = torch.empty(0).device
    taken = None if taken is None else taken.to(device)
    found = choose(*(tensor.to(device) for tensor in given), truth.shape[3], taken=taken, kernel="triton")
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu(), truth)


@pytest.mark.parametrize(
    ("dtype", "numbers"), [(torch.float64, 1), (torch.float64, 2**19), (torch.float32, 1)], ids=str
)
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_torch_finds_the_best_key_of_each_bin(case, numbers, dtype, monkeypatch):
    monkeypatch.setattr("favor.kernels.eager.chosen._NUMBERS", numbers)
    (query, key, seen), taken, truth = choice(*case)
    number = truth.shape[3]
    found = choose(query.to(dtype), key.to(dtype), seen, number, taken=taken, kernel="torch")
    assert found.dtype == torch.int32
    # A block that sees no more keys than it has bins took all of them, which the case does not know.
    blocks = torch.ones_like(seen, dtype=torch.bool) if taken is None else seen > taken.shape[-1]
    keys = key.repeat_interleave(len(query) // len(key), 0)
    scores = torch.nn.functional.pad(query @ keys.unsqueeze(1).mT, (0, 1), value=-torch.inf)
    best = [scores.gather(3, own.long() % scores.shape[3])[blocks] for own in (found, truth)]  # -1: the last one
    if dtype == torch.float64:
        assert torch.equal(found[blocks], truth[blocks])
    # In float32 the place takes the last digits of a score, so another one of equal keys may be found.
    torch.testing.assert_close(*best, rtol=1e-4, atol=1e-3)
    assert ((found < 0) | (found % number == torch.arange(number)))[blocks].all()


@pytest.mark.parametrize(("run", "span", "keys"), [(1, 16, 70), (8, 8, 70), (8, 16, 64)])
def test_what_a_block_chose_is_taken_from_the_means(run, span, keys):
    """By counting keys one by one: keys of runs, and whole runs that are means."""
    number = -(-keys // span)
    shared = torch.tensor([[[3, 0, -1], [keys // run - 1, 2, 1]]], dtype=torch.int32)
    seen = torch.tensor([[keys - 5, keys]], dtype=torch.int32)
    facts = (torch.tensor([size], dtype=torch.int32) for size in (run, span))
    found = log_left(shared, seen, *facts, number, torch.float64).exp()
    for block in range(2):
        chosen = {int(p) * run + j for p in shared[0, block] if p >= 0 for j in range(run)}
        left = [j for j in range(int(seen[0, block])) if j not in chosen]
        torch.testing.assert_close(
            found[0, block], torch.bincount(torch.tensor(left) // span, minlength=number).double()
        )
