"""Causal attention by landmarks piece by piece: pieces are the whole, and what is forgotten was never there."""

import pytest
import torch
from elsewhere import interpreted
from landmark_problem import attend, inputs
from small_sections import set_small_sections

import favor

OPTIONS = {"is_causal": True, "selected_keys": 32}
LONG = 850  # more than three sections of 256 tokens
SHORT = 60  # the same in sections of 16 tokens


@pytest.fixture
def small(monkeypatch):
    """Makes sections small, for many cases in little time."""
    set_small_sections(monkeypatch)


def stream(state, tensors, pieces, mask=None, **options):
    """Output of some pieces that come one after another, `[B, H, L, dv]`."""
    parts = zip(*(tensor.split(pieces, 2) for tensor in tensors), strict=True)
    masks = [None] * len(pieces) if mask is None else mask.split(pieces, 1)
    options = OPTIONS | options
    outs = [attend(*part, key_padding_mask=own, state=state, **options) for part, own in zip(parts, masks, strict=True)]
    return torch.cat(outs, 2)


def begun(tensors, pieces, **options):
    state = favor.kernels.StreamState()
    return state, stream(state, tensors, pieces, **options)


def pieces_of(total, *sizes):
    """Pieces of these sizes, again and again; the last one is what is left."""
    found = []
    while sum(found) < total:
        found.append(min(sizes[len(found) % len(sizes)], total - sum(found)))
    return found


def cuts(total, prompt, *sizes, mixed):
    """Ways to cut so many tokens, by a name."""
    found = {str(size): pieces_of(total, size) for size in (1, *sizes)} | {"whole": [total]}
    return found | {"a prompt, then one by one": [prompt] + [1] * (total - prompt), "mixed": pieces_of(total, *mixed)}


PIECES = cuts(LONG, 500, 7, 64, 300, mixed=(1, 130, 1, 1, 40, 255, 3))
pieces = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
SHORT_PIECES = cuts(SHORT, 35, 8, mixed=(1, 11, 1, 1, 3, 18))
short_pieces = pytest.mark.parametrize("pieces", SHORT_PIECES.values(), ids=SHORT_PIECES)


@pieces
@pytest.mark.parametrize(
    ("selected_keys", "dtype"), [(32, torch.float64), (0, torch.float64), (LONG, torch.float64), (32, torch.bfloat16)]
)
def test_pieces_are_the_whole(pieces, selected_keys, dtype):
    tensors = [tensor.to(dtype) for tensor in inputs(LONG, batch=1, heads=2, key_heads=1)]
    whole = attend(*tensors, **OPTIONS | {"selected_keys": selected_keys})
    if selected_keys == LONG:
        whole = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    _, found = begun(tensors, pieces, selected_keys=selected_keys)
    assert found.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-10)
    else:  # a near tie may fall the other way
        assert (found - whole).double().norm() <= 0.01 * whole.double().norm()


# Which tokens of three rows are padding.
HIDDEN = {
    "left": lambda row, place: place < (0, 5, 21)[row],
    "right": lambda row, place: place >= SHORT - (0, 5, 21)[row],
    "in each piece": lambda row, place: place % 20 >= 20 - (0, 1, 11)[row],
    "scattered": lambda row, place: (place * 7919 + row) % (10**6, 11, 3)[row] == 0,
    "a row without a token": lambda row, place: (place >= 0) & (row == 1),
}


@pytest.mark.usefixtures("small")
@short_pieces
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("selected_keys", [6, SHORT])
def test_rows_with_padding_are_each_alone(hidden, pieces, selected_keys):
    place, options = torch.arange(SHORT), OPTIONS | {"selected_keys": selected_keys}
    mask = torch.stack([~hidden(row, place) for row in range(3)])
    tensors = [tensor.masked_fill(~mask[:, None, :, None], 7.0) for tensor in inputs(SHORT, batch=3)]
    _, found = begun(tensors, pieces, mask=mask, **options)
    for row, own in enumerate(mask):
        if own.any():
            alone = attend(*(tensor[row : row + 1, :, own] for tensor in tensors), **options)
            torch.testing.assert_close(found[row : row + 1, :, own], alone, rtol=1e-9, atol=1e-10)
    assert found.isfinite().all()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kernel", "hidden"), [("torch", 0), ("torch", 5), pytest.param("triton", 5, marks=interpreted)]
)
def test_room_for_all_tokens_changes_nothing(kernel, hidden):
    """Each token then chooses for its block, and the first tokens decide without a look at how many there are."""
    tensors, state = [tensor.float() for tensor in inputs(30, heads=2, key_heads=1)], favor.kernels.StreamState(room=40)
    mask = torch.arange(30) >= torch.tensor([[0], [hidden]])
    sizes = [5, *[1] * 4, 6, *[1] * 3, 2, 8, 1, 1]
    found = stream(state, tensors, sizes, mask if hidden else None, selected_keys=6, kernel=kernel)
    expected = attend(*tensors, key_padding_mask=mask, is_causal=True, selected_keys=6)
    real = mask[:, None, :, None]
    torch.testing.assert_close(found * real, expected * real, rtol=1e-4, atol=1e-5)
    assert state.memory.key.shape[2] == 48


def forget(state, tokens):
    """Forgets tokens as a cache does."""
    state.memory.forget(tokens)
    state.tokens -= tokens
    state.shown -= tokens


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("left", [1, 5, 7, 8, 15, 16, 19, 31, 33, 50])
@pytest.mark.parametrize("pieces", [[40], [19, 1, 20], [1] * 40], ids=["whole", "mixed", "one by one"])
def test_what_is_forgotten_was_never_there(left, pieces):
    tensors, others = inputs(SHORT), inputs(SHORT, seed=5)
    joined = [torch.cat([one[:, :, :left], other[:, :, :40]], 2) for one, other in zip(tensors, others, strict=True)]
    whole = attend(*joined, **OPTIONS | {"selected_keys": 6})
    state, _ = begun(tensors, [left, SHORT - left], selected_keys=6)
    forget(state, SHORT - left)
    found = stream(state, [tensor[:, :, left:] for tensor in joined], pieces, selected_keys=6)
    torch.testing.assert_close(found, whole[:, :, left:], rtol=1e-9, atol=1e-10)


def test_a_state_of_inference_mode_goes_on_outside():
    tensors = inputs(LONG, batch=1, heads=2, key_heads=1)
    with torch.inference_mode():
        state, _ = begun([tensor[:, :, :300] for tensor in tensors], [299, 1])
    found = stream(state, [tensor[:, :, 300:] for tensor in tensors], [1, LONG - 301])
    torch.testing.assert_close(found, attend(*tensors, **OPTIONS)[:, :, 300:], rtol=1e-9, atol=1e-10)


def test_a_state_holds_no_graph_and_only_the_first_piece_has_one():
    tensors = [tensor.requires_grad_() for tensor in inputs(400, batch=1)]
    state = favor.kernels.StreamState()
    first = stream(state, [tensor[:, :, :300] for tensor in tensors], [300])
    assert first.requires_grad
    whole = attend(*(tensor[:, :, :300] for tensor in tensors), **OPTIONS)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (first, whole)]
    assert all(map(torch.equal, *grads))
    assert not stream(state, [tensor[:, :, 300:] for tensor in tensors], [1, 99]).requires_grad
    assert not any(tensor.requires_grad for tensor in vars(state.memory).values())


def test_a_state_holds_tokens_and_little_else():
    """Keys, values, a quarter of the keys for each query head, every 16th query, and sums of whole sections."""
    tensors = inputs(LONG, batch=1, heads=2, key_heads=1, width=16, value_width=16)
    state, _ = begun(tensors, [LONG - 1, 1])
    tokens = 1024
    numbers = tokens * 32 + 2 * tokens * 4 + 2 * tokens // 16 * 16 + tokens // 256 * 32
    assert state.nbytes <= 8 * (numbers + 2 * 32 + 2 * 4 + 1)
