"""Selected keys: attention against its definition, and what holds for every choice."""

import pytest
import torch
from pairwise import pairs
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor.landmark import causal as landmark_causal
from favor.landmark.growth import Growth
from favor.landmark.naive import naive_landmark_attention


@pytest.fixture(autouse=True)
def _small_sections(monkeypatch):
    monkeypatch.setattr(landmark_causal, "BLOCK", 16)
    monkeypatch.setattr("favor.landmark.naive.BLOCK", 16)


def inputs(length=50, keys=None, *, batch=2, heads=4, key_heads=2, width=8, value_width=5, norm=1.5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    keys = length if keys is None else keys
    query, key = norm * draw(batch, heads, length, width), norm * draw(batch, key_heads, keys, width)
    return query, key, draw(batch, key_heads, keys, value_width)


def attend(*tensors, selected_keys=12, page_size=3, query_block=4, num_features=6, **options):
    sizes = {"selected_keys": selected_keys, "page_size": page_size, "query_block": query_block}
    return favor.favor_attention(*tensors, features="landmark", num_features=num_features, **sizes, **options)


def exact(query, key, value, is_causal=False):
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


SIZES = [(1, 1), (1, 7), (3, 16), (4, 7)]  # of pages, and of blocks of queries


@pytest.mark.parametrize(*pairs(sizes=SIZES, window=[0, 8, 10], selected_keys=[1, 16, 40]))
def test_bidirectional_attention_is_the_definition(sizes, window, selected_keys):
    page_size, query_block = sizes
    options = {"window": window, "page_size": page_size, "query_block": query_block, "selected_keys": selected_keys}
    tensors = inputs(batch=1)
    torch.testing.assert_close(attend(*tensors, **options), naive_landmark_attention(*tensors, 6, **options))


@pytest.mark.parametrize(*pairs(sizes=SIZES, lengths=[(1, 50), (33, 50), (20, 2)], selected_keys=[1, 16]))
def test_cross_attention_is_the_definition(sizes, lengths, selected_keys):
    page_size, query_block = sizes
    options = {"page_size": page_size, "query_block": query_block, "selected_keys": selected_keys}
    tensors = inputs(*lengths, batch=1)
    torch.testing.assert_close(attend(*tensors, **options), naive_landmark_attention(*tensors, 6, **options))


@pytest.mark.parametrize(*pairs(sizes=SIZES, window=[0, 8, 10], keys=[70, 83], pages=[0, 6]))
def test_causal_attention_is_the_definition(sizes, window, keys, pages):
    """With as few pages as may be, and more."""
    page_size, query_block = sizes
    selected_keys = page_size * (query_block + pages) - (page_size > 1)
    options = {"window": window, "page_size": page_size, "query_block": query_block, "selected_keys": selected_keys}
    tensors = inputs(70, keys, batch=1, heads=2, key_heads=1)
    expected = naive_landmark_attention(*tensors, 6, is_causal=True, **options)
    torch.testing.assert_close(attend(*tensors, is_causal=True, **options), expected)


def test_default_sizes_are_the_definition():
    tensors = inputs(90, heads=2, batch=1)
    for options, chosen in (
        ({"selected_keys": 30}, {}),
        ({"selected_keys": 30, "window": 16}, {}),
        ({"selected_keys": 70, "is_causal": True}, {}),
        ({"selected_keys": 12, "is_causal": True}, {"query_block": 3}),  # few of them are shared out
    ):
        found = favor.favor_attention(*tensors, features="landmark", num_features=6, **options)
        torch.testing.assert_close(found, naive_landmark_attention(*tensors, 6, **options, **chosen))


def test_queries_that_must_not_see_each_other_choose_one_by_one():
    tensors = inputs(20, 40)
    found = attend(*tensors, use_statistics=False)
    alone = [attend(tensors[0][:, :, i : i + 1], *tensors[1:], use_statistics=False) for i in range(20)]
    torch.testing.assert_close(found, torch.cat(alone, 2), rtol=1e-12, atol=1e-12)


def test_the_growth_of_a_block_adds_up():
    for rows in range(1, 40):
        for number in range(rows, 200):
            growth = Growth.of(number, rows)
            assert growth.slots(0)[0] == 0
            assert growth.first >= 1
            assert all(growth.slots(row - 1)[1] == growth.slots(row)[0] for row in range(1, rows))
            assert growth.slots(rows - 1)[1] == number


WAYS = {
    "bidirectional": {},
    "window": {"window": 10},
    "causal": {"is_causal": True},
    "causal, window": {"is_causal": True, "window": 10},
}
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


@pytest.mark.parametrize(*pairs(options=WAYS.values(), length=[1, 17, 63, 100], more=[0, 100]))
def test_as_many_selected_keys_as_keys_are_softmax_attention(options, length, more):
    tensors = inputs(length)
    out = attend(*tensors, num_features=1, page_size=4, query_block=8, selected_keys=max(length, 32) + more, **options)
    wanted = exact(*tensors, is_causal=options.get("is_causal", False))
    assert (out - wanted).norm() <= 1e-12 * wanted.norm()
    single = [tensor.float() for tensor in tensors]
    out = attend(*single, num_features=1, page_size=4, query_block=8, selected_keys=max(length, 32) + more, **options)
    assert (out - wanted).norm() <= 1e-6 * wanted.norm()


@ways
@pytest.mark.parametrize("length", [0, 1, 2, 63, 100])
def test_short_sequences_and_one_group(options, length):
    tensors = [t.requires_grad_() for t in inputs(length)]
    out = attend(*tensors, num_features=1, page_size=4, query_block=3, **options)
    assert out.shape == (2, 4, length, 5)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(t.grad.isfinite().all() for t in tensors)


@ways
def test_the_backward_pass_can_be_repeated_and_then_frees_its_memory(options):
    tensors = [t.requires_grad_() for t in inputs(65)]
    loss = attend(*tensors, **options).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, tensors)))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, tensors)


@ways
def test_equal_keys_give_the_mean_of_the_values(options):
    query, key, value = inputs(65)
    key = key[:, :, :1].expand_as(key)
    mean = value.mean(2, keepdim=True).expand_as(value)
    if "is_causal" in options:
        mean = value.cumsum(2) / torch.arange(1, 66)[:, None]
    torch.testing.assert_close(attend(query, key, value, **options), mean.repeat_interleave(2, 1))


@ways
def test_gradients_by_finite_differences(options):
    """At a generic point, where a small step changes neither groups nor choice."""
    tensors = [t.requires_grad_() for t in inputs(26, batch=1, heads=2, key_heads=1, width=4, value_width=3)]
    run = lambda *given: attend(*given, num_features=3, selected_keys=8, page_size=2, **options)  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_for_any_subset_of_inputs(options, subset):
    tensors = inputs(40)
    full = [t.clone().requires_grad_() for t in tensors]
    attend(*full, **options).square().sum().backward()
    some = [t.clone().requires_grad_(i in subset) for i, t in enumerate(tensors)]
    attend(*some, **options).square().sum().backward()
    for place, (ours, theirs) in enumerate(zip(some, full, strict=True)):
        if place in subset:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        else:
            assert ours.grad is None


@ways
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(options, side):
    """Values and gradients, whatever the padding holds."""
    real, total = 41, 64
    places = {"left": torch.arange(23, 64), "right": torch.arange(41)}.get(
        side, torch.cat([torch.arange(5, 12), torch.arange(30, 64)])
    )
    plain = [t.requires_grad_() for t in inputs(real, batch=1)]
    wanted = attend(*plain, **options)
    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (wanted * weight).sum().backward()
    found = []
    for fill in (0.0, 5.0, torch.nan):
        padded = [torch.full((2, t.shape[1], total, t.shape[3]), fill, dtype=torch.float64) for t in plain]
        for tensor, own in zip(padded, plain, strict=True):
            tensor[1:, :, places] = own.detach()
        padded = [t.requires_grad_() for t in padded]
        mask = torch.zeros(2, total, dtype=torch.bool)
        mask[0, 20:40] = mask[1, places] = True
        padded[0].data[0] = padded[1].data[0, :1] = padded[2].data[0] = 1.0
        out = attend(*padded, key_padding_mask=mask, **options)
        (out[1:, :, places] * weight).sum().backward()
        torch.testing.assert_close(out[1:, :, places], wanted, rtol=1e-10, atol=1e-10)
        for tensor, own in zip(padded, plain, strict=True):
            torch.testing.assert_close(tensor.grad[1:, :, places], own.grad, rtol=1e-8, atol=1e-10)
        found.append(out[1:, :, places])
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize(*pairs(shape=[(1, 1), (3, 4), (4, 7), (4, 20)], window=[0, 10], past=[0, 21]))
def test_nothing_later_shows_in_causal_attention(shape, window, past):
    """Bit for bit, wherever a block is cut."""
    page_size, query_block = shape
    sizes = {"selected_keys": 24 * page_size, "page_size": page_size, "query_block": query_block, "window": window}
    query, key, value = inputs(70, 70 + past)
    out = attend(query, key, value, is_causal=True, **sizes)
    for now in (1, 17, 30, 45, 69):
        later = [t.clone() for t in (query, key, value)]
        for tensor, first in zip(later, (now, past + now, past + now), strict=True):
            tensor[:, :, first:] = 50 * torch.randn_like(tensor[:, :, first:])
        changed = attend(*later, is_causal=True, **sizes)
        assert torch.equal(changed[:, :, :now], out[:, :, :now])
        assert not torch.allclose(changed[:, :, now:], out[:, :, now:])


PIECES = [[90], [1] * 90, [40] + [1] * 50, [17, 1, 1, 30, 1, 40], [16] * 5 + [10], [5, 85], [33, 57]]


@pytest.mark.parametrize(*pairs(pieces=PIECES, window=[0, 8, 10], shape=[(1, 1), (4, 7)]))
def test_pieces_are_the_whole(pieces, window, shape):
    page_size, query_block = shape
    sizes = {"selected_keys": 9 * page_size, "page_size": page_size, "query_block": query_block, "window": window}
    tensors, state = inputs(90), favor.kernels.StreamState()
    whole = attend(*tensors, is_causal=True, **sizes)
    parts = zip(*(t.split(pieces, 2) for t in tensors), strict=True)
    found = torch.cat([attend(*part, is_causal=True, state=state, **sizes) for part in parts], 2)
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)


def test_padded_queries_choose_nothing():
    """Of some queries over more keys, padding among them; what it holds must not reach the real ones."""
    query, key, value = inputs(30, 60, batch=1)
    mask = torch.ones(1, 60, dtype=torch.bool)
    mask[:, 39:41] = False
    options = {"is_causal": True, "window": 8, "page_size": 2, "selected_keys": 12, "key_padding_mask": mask}
    out = attend(query, key, value, **options)
    query[:, :, 9:11] *= -7
    assert torch.equal(attend(query, key, value, **options)[:, :, mask[0, 30:]], out[:, :, mask[0, 30:]])


@pytest.mark.parametrize("keys", [40, 30])
def test_padded_queries_of_cross_attention_choose_nothing(keys):
    query, key, value = inputs(30, keys, batch=1)
    mask = (torch.arange(30) >= 7).expand(1, -1)
    out = attend(query, key, value, query_padding_mask=mask)
    torch.testing.assert_close(out[:, :, 7:], attend(query[:, :, 7:], key, value), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [30, 41, 64])
def test_padded_keys_of_cross_attention_change_nothing(length):
    query, key, value = inputs(length, 41, batch=1)
    wanted = attend(query, key, value)
    rows = [torch.cat([torch.full_like(t[:, :, :23], 5.0), t], 2) for t in (key, value)]
    mask = (torch.arange(64) >= 23).expand(1, -1)
    everyone = torch.ones(1, length, dtype=torch.bool)
    found = attend(query, *rows, key_padding_mask=mask, query_padding_mask=everyone)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [10, 60])
def test_too_few_keys_for_a_causal_block_are_refused(length):
    """Of short sequences, which are exact, too: the next one may be longer."""
    with pytest.raises(ValueError, match="3 pages are too few for 4 queries"):
        attend(*inputs(length), is_causal=True, page_size=4, selected_keys=9)


@pytest.mark.parametrize("window", [0, 8])
def test_padded_queries_attend_as_they_do_in_softmax_attention(window: int) -> None:
    """Models that mix tokens after attention, such as Conformers, see what padding attends to."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.arange(40) < 29).unsqueeze(0)
    options = {"features": "landmark", "num_features": 4, "selected_keys": 40, "window": window}
    found = favor.favor_attention(query, key, value, key_padding_mask=mask, **options)
    exact = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
    torch.testing.assert_close(found, exact)
