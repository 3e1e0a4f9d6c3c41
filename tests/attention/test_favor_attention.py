"""`favor_attention` against the definition, and the invariants every family has to keep."""

from itertools import product

import numpy as np
import pytest
import torch
from pairwise import pairs
from reference import FAMILIES, NUM_FEATURES, POSITIVE, SOFTMAX, attend, inputs, reference_attention
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor import features
from favor.decomposition import KLNMF
from favor.kernels import StreamState
from favor.optim import low_rank_bound

pytestmark = pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")


LENGTHS = [(1, 1), (37, 37), (63, 63), (20, 37), (1, 37), (100, 100)]
# Every family with every length, causal or not and padded or not; lengths take turns.
DEFINED = [
    (*case, *LENGTHS[(number + turn) % len(LENGTHS)])
    for number, case in enumerate(product([*POSITIVE, "trig", "relu", "elu"], [False, True], [False, True]))
    for turn in (0, 3)
]


@pytest.mark.parametrize(("name", "is_causal", "padded", "length", "key_length"), DEFINED)
def test_equals_the_definition(name, is_causal, padded, length, key_length):
    tensors = inputs(length, key_length)
    mask = None
    if padded:
        mask = torch.ones(2, key_length, dtype=torch.bool)
        mask[0, : key_length // 3] = False
        mask[1, key_length - key_length // 4 :] = False
    out = attend(*tensors, name=name, mask=mask, is_causal=is_causal, scale=0.3)
    expected = reference_attention(*tensors, name=name, mask=mask, is_causal=is_causal, scale=0.3)
    if padded and "@" in name:
        # Blocks are those of real tokens; rows of padding belong to none in particular.
        real = mask[:, None, key_length - length :, None]
        out, expected = out * real, expected * real
    torch.testing.assert_close(out, expected, rtol=1e-9 if name == "trig" else 1e-10, atol=1e-10)


@pytest.mark.parametrize(
    *pairs(name=SOFTMAX, is_causal=[False, True], scale=[1, 4], dtype=[torch.float32, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_lower_precision_has_its_own_accuracy(name, is_causal, scale, dtype):
    """An epsilon anywhere in the normaliser fails here: weights of exp(-100) are ordinary at scale 4."""
    low = [t.to(dtype) for t in inputs(256, key_heads=4, dim=32, value_dim=32, scale=scale)]
    exact = attend(*[t.double() for t in low], name=name, is_causal=is_causal)
    out = attend(*low, name=name, is_causal=is_causal)
    assert out.dtype == dtype
    assert out.isfinite().all()
    # The parameters of wDERF come from softmax rows and an inverse, both in float32.
    allowed = 1e-2 if dtype != torch.float32 else 3e-5 if name.startswith("wderf") else 1e-5
    assert (out.double() - exact).norm() / exact.norm() < allowed


def real_tokens(side, real, total):
    """Marks real tokens, where padding is at the left, at the right or in the middle."""
    place = torch.arange(total)
    return {"left": place >= total - real, "right": place < real}.get(side, (place < 10) | (place >= total - real + 10))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(name, is_causal, side):
    """Outputs and gradients of real tokens are those without padding, whatever the padding holds."""
    real, total = 41, 64
    # Trigonometric normalisers come close to zero at larger norms, which magnifies rounding.
    scale = 0.3 if name == "trig" else 1.0
    plain = [t.float().requires_grad_() for t in inputs(real, batch=1, scale=scale)]
    expected = attend(*plain, name=name, is_causal=is_causal)
    generator = torch.Generator().manual_seed(9)
    out_weight = torch.randn(expected.shape, generator=generator)
    (expected * out_weight).sum().backward()

    tokens = real_tokens(side, real, total)
    padded = []
    for tensor in plain:
        batch = torch.randn(3, *tensor.shape[1:2], total, tensor.shape[-1], generator=generator) * 5
        batch[1:, :, ::2] = torch.nan
        batch[1, :, tokens] = tensor.detach()[0]
        padded.append(batch)
    mask = torch.stack([torch.ones_like(tokens), tokens, torch.zeros_like(tokens)])  # the third row is all padding
    padded = [t.requires_grad_() for t in padded]
    out = attend(*padded, name=name, mask=mask, is_causal=is_causal)
    (out[1:2, :, tokens] * out_weight).sum().backward()
    torch.testing.assert_close(out[1, :, tokens], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    for tensor, alone in zip(padded, plain, strict=True):
        torch.testing.assert_close(tensor.grad[1, :, tokens], alone.grad[0], rtol=1e-5, atol=1e-5)
        assert not tensor.grad[::2].any()
        assert not tensor.grad[1, :, ~tokens].any()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_of_fewer_queries_than_keys_changes_nothing(name, is_causal, side):
    """Causal queries are the last tokens, with their padding; others have a mask of their own."""
    keys = real_tokens(side, 41, 64)
    queries = keys[-30:] if is_causal else real_tokens(side, 23, 30)
    tensors, masks = inputs(int(queries.sum()), 41, batch=1, scale=0.3), (queries, keys, keys)
    padded = [
        torch.full((1, t.shape[1], len(m), t.shape[3]), 5.0).double() for t, m in zip(tensors, masks, strict=True)
    ]
    for target, tensor, mask in zip(padded, tensors, masks, strict=True):
        target[:, :, mask] = tensor
    options = {} if is_causal else {"query_padding_mask": queries[None]}
    out = attend(*padded, name=name, mask=keys[None], is_causal=is_causal, **options)
    expected = attend(*tensors, name=name, is_causal=is_causal)
    torch.testing.assert_close(out[:, :, queries], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("length", "padded"), [(200, False), (37, True)])
def test_the_future_does_not_change_the_past(name, length, padded):
    """At no place: with padding at the left its last place often has to predict the first token."""
    tensors, now, mask = inputs(length), length // 2, None
    if padded:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, : now - 5] = mask[1, 3:7] = mask[1, now - 1] = False
    out = attend(*tensors, name=name, mask=mask, is_causal=True)
    later = [t.clone() for t in tensors]
    for tensor in later:
        tensor[:, :, now:] = 50 * torch.randn_like(tensor[:, :, now:])
    changed = attend(*later, name=name, mask=mask, is_causal=True)
    assert torch.equal(changed[:, :, :now], out[:, :, :now])
    assert not torch.allclose(changed[:, :, now:], out[:, :, now:])


@pytest.mark.parametrize("name", ["gerf", "saderf", "aderf", "sderf"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"use_statistics": False}], ids=["causal", "without"])
def test_causal_statistics_fall_back_to_favor_plus_and_say_so(name, options):
    tensors = inputs()
    with pytest.warns(UserWarning, match=r"computes FAVOR\+"):
        out = attend(*tensors, name=name, **options)
    assert torch.equal(out, attend(*tensors, name="pos", is_causal="is_causal" in options))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_gradients_hold_the_parameters_fixed_for_any_subset_of_inputs(name, is_causal):
    tensors = [t.requires_grad_() for t in inputs(19, batch=1, heads=2, key_heads=1, scale=0.7)]
    reference = (attend if "landmark" in name else reference_attention)(*tensors, name=name, is_causal=is_causal)
    weight = torch.randn_like(reference)
    expected = torch.autograd.grad((reference * weight).sum(), tensors)
    for subset in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
        some = [t.detach().requires_grad_(i in subset) for i, t in enumerate(tensors)]
        (attend(*some, name=name, is_causal=is_causal) * weight).sum().backward()
        for i, tensor in enumerate(some):
            if i in subset:
                torch.testing.assert_close(tensor.grad, expected[i], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", [features.PosRF, features.GERF, features.ADERF, features.SDERF])
def test_gaussian_kernel_attention(family):
    """alpha = -1/2 is attention with the weights exp(-|x - y|^2 / 2)."""
    query, key, value = inputs(12, heads=2, key_heads=2, scale=0.7)
    distances = torch.cdist(query * 8**-0.25, key * 8**-0.25)
    exact = (-distances.square() / 2).softmax(-1) @ value
    out = favor.favor_attention(query, key, value, features=family(alpha=-0.5), num_features=65536)
    assert (out - exact).norm() / exact.norm() < 0.05


def test_elu_is_its_formula_and_relu_knows_no_scale():
    query, key, value = inputs(12, heads=2, key_heads=2, value_dim=8)
    phi_x, phi_y = (torch.nn.functional.elu(rows * 8**-0.25) + 1 for rows in (query, key))
    weights = phi_x @ phi_y.mT
    expected = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(attend(query, key, value, name="elu"), expected, rtol=1e-10, atol=1e-10)
    scaled = attend(7 * query, key, value, name="relu")
    torch.testing.assert_close(scaled, attend(query, key, value, name="relu"))


def test_directions_depend_on_seed_layer_and_redraw():
    """And those drawn in inference mode serve training."""
    tensors = inputs(30)
    changes = ({"seed": 987}, {"seed": 1}, {"layer": 1}, {"redraw": 1})
    with torch.inference_mode():
        outs = [attend(*tensors, name="pos", **options).clone() for options in changes]
    assert not any(torch.allclose(one, two) for i, one in enumerate(outs) for two in outs[:i])
    tensors[0].requires_grad_()
    again = attend(*tensors, name="pos", seed=987)
    again.sum().backward()
    assert torch.equal(again, outs[0])
    assert tensors[0].grad.isfinite().all()


def test_user_given_parameters():
    """A general DERF goes through attention like the built-in ones; parameters are taken in the type of the inputs."""
    tensors = inputs(9, heads=2, key_heads=2)
    identity = torch.eye(8, dtype=torch.float64)
    plain = attend(*tensors, name="pos")
    rf = features.DERF(0 * identity, identity, identity)
    torch.testing.assert_close(favor.favor_attention(*tensors, features=rf, num_features=NUM_FEATURES), plain)
    for name in ("gerf", "pos"):
        torch.testing.assert_close(attend(*tensors, name=name, **GIVEN), plain)


SIZES = {"query": (2, 4, 5, 8), "key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}
GIVEN = {"parameters": features.Parameters.identity(8, dtype=torch.float32, device="cpu")}
ENDS = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 2, 5])}
ONE = {name: torch.zeros(1, *shape[1:]) for name, shape in SIZES.items()}
PACKED = ONE | ENDS
ERRORS = [
    ({"query": torch.zeros(2, 4, 8)}, ValueError, r"query must be \[batch, heads, length, width\]"),
    ({"query": torch.zeros(2, 4, 5, 8, dtype=torch.long)}, TypeError, "query must be a floating-point"),
    ({"key": torch.zeros(2, 2, 5, 7)}, ValueError, "key must have the batch size 2 and width 8"),
    ({"value": torch.zeros(2, 2, 6, 7)}, ValueError, "value must agree with key"),
    ({"key": torch.zeros(2, 3, 5, 8), "value": torch.zeros(2, 3, 5, 8)}, ValueError, "multiple of the key heads"),
    ({"key_padding_mask": torch.ones(2, 5)}, TypeError, "key_padding_mask must be boolean"),
    ({"key_padding_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"key_padding_mask must be \[2, 5\]"),
    ({"query": torch.zeros(2, 4, 6, 8), "is_causal": True}, ValueError, "at least as many keys"),
    ({"scale": -1.0}, ValueError, "scale must be positive"),
    ({"features": "softmax"}, ValueError, "features must be one of"),
    ({"features": 3}, TypeError, "RandomFeatures instance or Landmarks"),
    ({"num_features": 0}, ValueError, "num_features must be a positive integer"),
    ({"num_features": 0, "features": "landmark"}, ValueError, "num_features must be a positive integer, got 0"),
    ({"selected_keys": -1, "features": "landmark"}, ValueError, "selected_keys must be from 0 to"),
    ({"window": 4, "features": "landmark"}, ValueError, "a window needs positive features"),
    ({"packing": None}, TypeError, "unknown argument packing; its options are correction"),
    ({"key_mask": None}, TypeError, "unknown argument key_mask"),
    ({"key_heads": (2, 3)}, ValueError, "key_heads must be the number of the first of 2 key heads"),
    (GIVEN | {"features": "relu"}, ValueError, "relu features have no parameters"),
    (GIVEN | {"features": "landmark"}, ValueError, "landmark features have no parameters"),
    ({"parameters": features.Parameters.identity(7, dtype=torch.float32, device="cpu")}, ValueError, r"got \(7, 7\)"),
    ({"window": 4, "features": "relu"}, ValueError, "a window needs positive features"),
    ({"window": 4, "features": features.SDERF(alpha=-0.5)}, ValueError, "a window needs .* of the softmax kernel"),
    ({"window": 4, "query": torch.zeros(2, 4, 3, 8)}, ValueError, "got 3 queries and 5 keys; use window=0"),
    (PACKED | {"window": 4}, ValueError, "packed queries and keys of the same lengths"),
    (PACKED | {"cu_seqlens_k": None}, ValueError, "go together"),
    (PACKED | {"cu_seqlens_k": torch.tensor([0, 1, 2, 5])}, ValueError, "same sequences, got 2 and 3"),
    (PACKED | {"cu_seqlens_q": torch.tensor([0, 7])}, ValueError, r"from 0 to 5, got \[0, 7\]"),
    (PACKED | {"cu_seqlens_q": torch.tensor([0.0, 3, 5])}, ValueError, r"lengths \[0, ..., 5\] as integers"),
    ({name: tensor.to("meta") for name, tensor in PACKED.items()}, ValueError, "cu_seqlens_q must hold numbers"),
    (PACKED | {"key_padding_mask": torch.ones(1, 5, dtype=torch.bool)}, ValueError, "no padding"),
    (PACKED | {"is_causal": True}, ValueError, "at least as many keys as queries in every"),
    (ENDS, ValueError, "batch of size 1, got 2"),
    ({"state": StreamState()}, ValueError, "is_causal=False"),
    (PACKED | {"state": StreamState(), "cu_seqlens_q": ENDS["cu_seqlens_k"]}, ValueError, "and lengths"),
    ({"state": StreamState(), "is_causal": True, "features": "relu"}, ValueError, "positive features"),
]


@pytest.mark.parametrize(("change", "error", "message"), ERRORS)
def test_errors_say_what_was_expected(change, error, message):
    arguments = {name: torch.zeros(shape) for name, shape in SIZES.items()} | {"features": "pos"} | change
    with pytest.raises(error, match=message):
        favor.favor_attention(**arguments)


@pytest.mark.parametrize("name", ["pos", "pos@16", "relu", "landmark+0", "landmark+6", "landmark+6 alone"])
@pytest.mark.parametrize(("padded", "is_causal"), [(False, False), (True, False), (False, True)])
def test_nan_in_a_query_is_seen_there_alone(name, padded, is_causal):
    """Also beside keys that are hidden, and in a block that is cut short."""
    query, key, value = inputs(40)
    query[0, 0, 3] = torch.nan
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 35:] = False
    out = attend(query, key, value, name=name, mask=mask if padded else None, is_causal=is_causal)
    assert torch.equal(out.isnan().all(-1).nonzero(), torch.tensor([[0, 0, 3]]))
    assert out.isfinite().sum() == out.numel() - 5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_autocast_does_not_reach_the_features(name, is_causal):
    """Mixed precision hands over bfloat16 tensors; exponents in bfloat16 would be off by several per cent."""
    tensors = [t.bfloat16() for t in inputs(65, scale=2)]
    expected = attend(*tensors, name=name, is_causal=is_causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(*tensors, name=name, is_causal=is_causal), expected)
        single = attend(*[t.float() for t in tensors], name=name, is_causal=is_causal)
    assert torch.equal(single.bfloat16(), expected)


NOTHING = [(0, 5, 5, 8), (2, 0, 5, 8), (2, 0, 0, 8), (2, 3, 0, 8), (2, 5, 5, 0)]


@pytest.mark.parametrize(*pairs(name=FAMILIES, sizes=NOTHING, is_causal=[False, True]))
def test_nothing_in_nothing_out(name, sizes, is_causal):
    batch, length, keys, value_dim = sizes
    is_causal = is_causal and keys >= length
    shapes = ((4, length, 8), (2, keys, 8), (2, keys, value_dim))
    tensors = [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]
    out = attend(*tensors, name=name, is_causal=is_causal)
    assert out.shape == (batch, 4, length, value_dim)
    assert not any(slope.any() for slope in torch.autograd.grad(out.sum(), tensors))


ROWS = [7, 1, 30, 0, 12]


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("columns", [ROWS, [9, 4, 30, 2, 12]], ids=["self", "cross"])
def test_a_packed_sequence_is_as_if_it_were_alone(name, is_causal, columns):
    if "@" in name and not is_causal and columns is not ROWS:
        pytest.skip("cross attention has no window")
    packed = [t.requires_grad_() for t in inputs(sum(ROWS), sum(columns), batch=1, scale=0.5)]
    alone = [t.detach().clone().requires_grad_() for t in packed]
    lengths = {"cu_seqlens_q": cumulative(ROWS), "cu_seqlens_k": cumulative(columns)}
    out = attend(*packed, name=name, is_causal=is_causal, **lengths)
    parts = zip(*(t.split(n, 2) for t, n in zip(alone, (ROWS, columns, columns), strict=True)), strict=True)
    expected = torch.cat([attend(*part, name=name, is_causal=is_causal) for part in parts], dim=2)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for tensors, result in ((packed, out), (alone, expected)):
        (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)).sum().backward()
        assert all(t.grad.isfinite().all() for t in tensors)
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "size", "most"),
    [("pos", "window", 2**30), ("landmark", "selected_keys", 2**30), ("landmark", "num_features", 2**18)],
)
@pytest.mark.parametrize(("is_causal", "pieces"), [(False, False), (True, False), (True, True)])
def test_a_size_beyond_the_sequence_is_that_of_the_sequence(family, size, most, is_causal, pieces):
    """Also that of a state in causal attention, which is softmax attention then if the size is not that of features."""
    outs, query, key, value = [], *inputs(64)
    for number in (64, most):
        options, state = {"num_features": 8, "selected_keys": 0, "features": family, size: number}, StreamState()
        cuts = [7, 1, 32, 1, 64 - 41] if pieces else [64]
        parts = zip(*(tensor.split(cuts, 2) for tensor in (query, key, value)), strict=True)
        options |= {"state": state} if pieces else {}
        outs.append(torch.cat([favor.favor_attention(*part, is_causal=is_causal, **options) for part in parts], 2))
        assert state.nbytes < 2**18
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
    if size != "num_features" or not is_causal:
        exact = scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(outs[0], exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", ["window", "selected_keys", "num_features", "key_heads"])
def test_typing_mistakes_are_refused(size):
    wanted = (0, 10**15) if size == "key_heads" else 10**15
    with pytest.raises(ValueError, match=size):
        favor.favor_attention(*inputs(64), **{"features": "pos" if size == "window" else "landmark", size: wanted})
    if size != "key_heads":
        with pytest.raises(ValueError, match=f"{size} must be at most"):
            favor.FavorConfig(**{size: wanted})


def test_sizes_elsewhere():
    """Components of a factorization, and the rank of a bound."""
    with pytest.raises(ValueError, match="n_components must be at most 6 for X"):
        KLNMF(n_components=10**9).fit(np.ones((6, 3)))
    theta, given = torch.zeros(4).double(), torch.randn(2, 3, 4).double()
    whole, more = (low_rank_bound(theta, given, rank=rank).curvature.dense() for rank in (4, 10**9))
    torch.testing.assert_close(more, whole)


def test_the_state_of_a_window_does_not_grow_with_padding():
    state, sizes = StreamState(), []
    mask = torch.arange(20) >= torch.tensor([0, 3, 19, 11]).unsqueeze(1)
    options = {"features": "pos", "window": 7, "num_features": 6, "is_causal": True, "state": state}
    for length in [20, *[1] * 40]:
        favor.favor_attention(*torch.ones(3, 4, 4, length, 8), **options, key_padding_mask=mask if length > 1 else None)
        assert not state.block or state.block[1].shape[2] < 7
        sizes.append(state.nbytes)
    assert max(sizes) == max(sizes[20:]) <= 2 * min(sizes[20:])
