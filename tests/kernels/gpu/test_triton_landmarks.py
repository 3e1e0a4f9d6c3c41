"""Landmarks as one operator of Triton kernels, against their definition over all pairs in float64."""

from itertools import pairwise

import pytest
import torch
from small_sections import SIZES, set_small_sections

import favor
from favor.kernels import StreamState
from favor.kernels.gpu.sorting import sort
from favor.landmark import naive
from favor.landmark.sorting import order_of

pytestmark = pytest.mark.usefixtures("poisoned")
# Sizes (heads, key heads, queries, keys, width, width of values) and options.
ENCODERS = {
    "nodes": ((2, 1, 37, 30, 16, 8), {"num_features": 8, "selected_keys": 10}),
    "means alone": ((2, 2, 40, 40, 16, 16), {"num_features": 8, "selected_keys": 0}),
    "queries apart": ((1, 1, 20, 30, 24, 16), {"num_features": 8, "selected_keys": 8, "use_statistics": False}),
    "all keys": ((1, 1, 20, 20, 8, 8), {"num_features": 4, "selected_keys": 100}),
    "fewer keys than nodes": ((1, 1, 20, 5, 8, 8), {"num_features": 16, "selected_keys": 2}),
}
CAUSAL = {
    "sections": ((2, 1, 35, 35, 16, 8), {"selected_keys": 8}),
    "means alone, causal": ((1, 1, 37, 37, 8, 8), {"selected_keys": 0}),
    "a short sequence": ((1, 1, 5, 5, 8, 8), {"selected_keys": 4}),
}
CASES = {**ENCODERS, **{name: (sizes, {"is_causal": True, **own}) for name, (sizes, own) in CAUSAL.items()}}


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    set_small_sections(monkeypatch)
    for name, size in SIZES.items():
        monkeypatch.setattr(naive, name, size)


def draw(sizes, batch=1, dtype=torch.float32):
    """Query, key and value whose products are exact in float32, `[B, L, H, d]` in memory; and a gradient."""
    heads, key_heads, length, keys, width, value_width = sizes
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(length, heads, width), (keys, key_heads, width), (keys, key_heads, value_width)]
    shapes.append((length, heads, value_width))
    rows = [torch.randint(-2, 3, (batch, *shape), generator=generator, device="cpu") for shape in shapes]
    return [tensor.to(torch.empty(0).device, dtype).transpose(1, 2) for tensor in rows]


def results(function, tokens, slope):
    leaves = [token.detach().clone().requires_grad_() for token in tokens]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]


def close(found, expected, tolerance=1e-5):
    for own, truth in zip(found, expected, strict=True):
        assert (own.double() - truth).norm() <= tolerance * truth.norm().clamp(min=1e-6)


def attend(*tokens, **options):
    return favor.favor_attention(*tokens, features="landmark", kernel="triton", **options)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name):
    sizes, options = CASES[name]
    *tokens, slope = draw(sizes)
    means = options.get("num_features", 0)
    others = {key: value for key, value in options.items() if key != "num_features"}
    exact = results(lambda *t: naive.naive_landmark_attention(*t, means, **others), [t.double() for t in tokens], slope)
    close(results(lambda *t: attend(*t, **options), tokens, slope), exact)


@pytest.mark.parametrize("name", ["nodes", "sections"])
def test_padding_changes_nothing(name):
    (_, _, _, length, *widths), options = CASES[name]
    sizes = (1, 1, length, length, *widths)
    *tokens, slope = draw(sizes, batch=2)
    real = length - 7
    mask = torch.arange(sizes[3]) < torch.tensor([[sizes[3]], [real]])
    hidden = ~mask[:, None, :, None]
    found = results(
        lambda *t: attend(*t, key_padding_mask=mask, **options).masked_fill(hidden, 0.0),
        [token.masked_fill(hidden, torch.nan) for token in tokens],
        slope,
    )
    for row, length in enumerate((sizes[3], real)):
        alone = [token[row : row + 1, :, :length] for token in tokens]
        expected = results(lambda *t: attend(*t, **options), alone, slope[row : row + 1, :, :length])
        close([own[row : row + 1, :, :length] for own in found], [own.double() for own in expected])


@pytest.mark.parametrize("name", ["fewer keys than nodes", "a short sequence"])
def test_bfloat16_is_near_float32(name):
    """Their choices have no near ties."""
    sizes, options = CASES[name]
    *tokens, _ = draw(sizes, dtype=torch.bfloat16)
    expected, found = attend(*(token.float() for token in tokens), **options), attend(*tokens, **options)
    assert found.dtype == torch.bfloat16
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(0.9) < 0.02


def test_pieces_give_the_output_of_all():
    """Begins with less than a block, of which some is padding; single tokens end the first block and a section."""
    generator = torch.Generator("cpu").manual_seed(0)  # without ties, which plain torch breaks otherwise
    shapes = [(2, heads, 27, 8) for heads in (2, 1, 1)]
    tokens = [torch.randn(shape, generator=generator, device="cpu").to(torch.empty(0).device) for shape in shapes]
    options, state = {"is_causal": True, "selected_keys": 6}, StreamState()
    mask = torch.ones(2, 27, dtype=torch.bool)
    mask[1, :3] = False
    expected = favor.favor_attention(*tokens, features="landmark", kernel="torch", key_padding_mask=mask, **options)
    found = []
    for first, last in pairwise((0, 5, 6, 7, 8, 9, 15, 16, 17, 26, 27)):
        piece = (token[:, :, first:last] for token in tokens)
        found.append(attend(*piece, key_padding_mask=mask[:, first:last], state=state, **options))
    difference = (torch.cat(found, 2) - expected).masked_fill(~mask[:, None, :, None], 0.0)
    assert difference.norm() <= 1e-5 * expected.norm()


# Rows and others (batch, heads, length), and whether some of both are padding.
ORDERS = [((2, 1, 60), (2, 2, 40), True), ((1, 2, 260), (1, 1, 70), False), ((1, 1, 5), (1, 1, 7), True)]


@pytest.mark.parametrize(("rows", "others", "is_padded"), ORDERS, ids=str)
def test_rows_are_in_the_order_of_plain_torch(rows, others, is_padded):
    generator = torch.Generator("cpu").manual_seed(0)
    own, other = (torch.randint(-3, 4, (*size, 10), generator=generator, device="cpu") for size in (rows, others))
    batch, lengths = (
        rows[0],
        [torch.tensor([size[2], size[2] - size[2] // 3][: size[0]], device="cpu") for size in (rows, others)],
    )
    if not is_padded:
        lengths = [torch.full((batch,), size[2], device="cpu") for size in (rows, others)]
    heads, shared = max(rows[1], 1), max(rows[1] // others[1], 1)
    grouped = other.double().unflatten(1, (heads // shared, -1)).flatten(0, 1)
    counts = lengths[0].repeat_interleave(heads), lengths[1].repeat_interleave(heads // shared)
    expected = order_of(own.double().flatten(0, 1), grouped, *counts).view(rows) % rows[2]
    device = torch.empty(0).device
    given = [length.to(device) if is_padded else None for length in lengths]
    found = sort(own.float().to(device), other.float().to(device), *given, (2 * own).float().to(device))
    assert torch.equal(found.order.cpu().long(), expected)
    place = expected.unsqueeze(-1).expand(own.shape)
    assert torch.equal(found.key.cpu(), own.float().gather(2, place))
    assert torch.equal(found.value.cpu(), 2 * own.float().gather(2, place))
