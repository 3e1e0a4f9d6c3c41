"""Which keys become landmarks, and how close attention through them is."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor import features
from favor.landmark import causal as landmark_causal


def clustered(length, centres, spread, seed=0):
    """Queries, keys around a few centres, values, `[1, 2, length, 16]`, in float64."""
    generator = torch.Generator().manual_seed(seed)
    middle = 3 * torch.randn(1, 2, centres, 16, dtype=torch.float64, generator=generator)
    query, noise, value = torch.randn(3, 1, 2, length, 16, dtype=torch.float64, generator=generator)
    member = torch.randint(centres, (length,), generator=generator)
    return 2 * query, middle[:, :, member] + spread * noise, value


def error_of(tensors, **options):
    is_causal = options.get("is_causal", False)
    exact = scaled_dot_product_attention(*tensors, is_causal=is_causal)
    out = favor.favor_attention(*tensors, features="landmark", **options)
    return ((out - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_error_falls_with_the_distance_of_keys_from_their_landmark(is_causal):
    """Means of keys leave an error of the second order in that distance, as values are independent of keys."""
    options = {"num_features": 64, "window": 32, "is_causal": is_causal}
    wide, narrow = (error_of(clustered(300, 8, spread), **options) for spread in (0.2, 0.02))
    assert narrow < wide / 5
    assert wide < 0.3


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_error_falls_with_the_number_of_landmarks(is_causal):
    tensors = clustered(400, 200, 0.3)
    errors = [error_of(tensors, num_features=number, window=16, is_causal=is_causal) for number in (16, 64, 256, 400)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_a_sharp_head_is_far_closer_than_by_random_features():
    """Each query looks at one of twelve keys: what random features cannot do, a landmark for that key can."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 1, 512, 32, dtype=torch.float64, generator=generator)
    query = 3 * key[:, :, torch.randint(12, (512,), generator=generator)]
    exact = scaled_dot_product_attention(query, key, value)
    found = {}
    for name in ("landmark", "wderf"):
        out = favor.favor_attention(query, key, value, features=name, num_features=128)
        found[name] = ((out - exact).norm() / exact.norm()).item()
    assert found["landmark"] < 0.05
    assert found["wderf"] > 0.5


def test_half_are_the_keys_that_receive_most_attention_and_the_others_are_evenly_spaced():
    generator = torch.Generator().manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(1, 64, 8, generator=generator), dim=-1)
    wanted = [3, 5, 40, 41]
    query = 20 * key[:, wanted].repeat_interleave(16, 1)
    cells = features.Landmarks().cells(query, key, 8)[0]
    members = [cells.eq(m).nonzero().flatten().tolist() for m in range(8)]
    # Landmarks are numbered in the order of their keys; the rest has 60 keys, of which the 8th, 23rd, 38th, 53rd.
    rest = [j for j in range(64) if j not in wanted]
    chosen = sorted([*wanted, rest[7], rest[22], rest[37], rest[52]])
    assert all(key in group for key, group in zip(chosen, members, strict=True))
    assert sum(map(len, members)) == 64


def test_a_key_belongs_to_the_landmark_that_changes_its_logits_least():
    """Distances are those that queries see: a direction in which no query has a component does not count."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 200, 8, generator=generator)
    query[..., 4:] = 0
    seen = features.Landmarks().cells(query, key, 16)
    assert torch.equal(features.Landmarks().cells(query[0], key[0], 16), seen[0])
    key[..., 4:] *= 100
    assert torch.equal(features.Landmarks().cells(query, key, 16), seen)
    alone = features.Landmarks().cells(None, key, 16)
    assert not torch.equal(alone, seen)
    landmarks = key[0, (2 * torch.arange(16) + 1) * 200 // 32]
    assert torch.equal(alone[0], torch.cdist(key[0], landmarks).argmin(1))


def test_a_landmark_belongs_to_itself_where_distances_are_rounding():
    query, key = torch.randn(2, 1, 50, 8, generator=torch.Generator().manual_seed(0))
    for given in (None, query):
        cells = features.Landmarks().cells(given, key + 1e5, 50)
        assert torch.equal(cells[0], torch.arange(50))


def test_gradients_are_those_of_the_means():
    """Finite differences, where no key changes its landmark."""
    tensors = [t[:, :, :24].detach().clone().requires_grad_() for t in clustered(24, 24, 0.1)]
    for options in ({}, {"window": 5}, {"is_causal": True, "window": 5}):

        def run(*inputs, options=options):
            return favor.favor_attention(*inputs, features="landmark", num_features=6, **options)

        assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("pieces", [[300], [1] * 40 + [260], [130, 1, 1, 40, 128], [16] * 18 + [12]])
def test_pieces_are_the_whole(window, pieces, monkeypatch):
    """The state holds no more than the groups and one block, whatever the pieces."""
    monkeypatch.setattr(landmark_causal, "BLOCK", 128)
    tensors = [t.repeat(2, 1, 1, 1) for t in clustered(300, 60, 0.5)]
    tensors[0] = tensors[0].repeat(1, 2, 1, 1)
    options = {"features": "landmark", "num_features": 24, "is_causal": True, "window": window}
    whole = favor.favor_attention(*tensors, **options)
    state, sizes = favor.kernels.StreamState(), []
    outs = []
    for part in zip(*(t.split(pieces, 2) for t in tensors), strict=True):
        outs.append(favor.favor_attention(*part, **options, state=state))
        sizes.append(state.nbytes)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-10, atol=1e-10)
    block = window or landmark_causal.BLOCK
    assert max(sizes) <= 8 * 2 * 2 * (24 + block) * (16 + 16 + 1) + 8 * 2 * 4 * block * 16


def landmark(*tensors, **options):
    return favor.favor_attention(*tensors, features="landmark", num_features=24, **options)


def test_a_state_goes_on_with_its_own_kind_only():
    tensors = clustered(60, 20, 0.5)
    state = favor.kernels.StreamState()
    landmark(*tensors, is_causal=True, state=state)
    with pytest.raises(ValueError, match="begun with other features, longer blocks or another batch"):
        landmark(*(t[:, :, :1] for t in tensors), is_causal=True, state=state, window=16)
    favor.favor_attention(*tensors, features="pos", is_causal=True, state=(state := favor.kernels.StreamState()))
    with pytest.raises(ValueError, match="begun with other features"):
        landmark(*tensors, is_causal=True, state=state)


def test_a_state_holds_no_graph():
    tensors = [t.requires_grad_() for t in clustered(60, 20, 0.5)]
    state = favor.kernels.StreamState()
    assert landmark(*(t[:, :, :40] for t in tensors), is_causal=True, window=16, state=state).requires_grad
    assert not landmark(*(t[:, :, 40:] for t in tensors), is_causal=True, window=16, state=state).requires_grad
    assert not any(t.requires_grad for t in (state.memory.key, state.memory.value, *state.block))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value_width", [16, 4])
def test_no_tensor_of_queries_times_landmarks_is_kept(is_causal, value_width):
    query, key, value = (t.float().requires_grad_() for t in clustered(1024, 60, 0.5))
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.setdefault(t.data_ptr(), t) is None or t, lambda t: t
    ):
        tensors = (query, key, value[..., :value_width])
        favor.favor_attention(*tensors, features="landmark", num_features=256, is_causal=is_causal)
    # Queries, keys and values of 2 heads; with blocks of 128 tokens three times as many groups of keys as keys.
    assert max(t.numel() for t in sizes.values()) <= 2 * 1024 * 17
    assert sum(t.numel() for t in sizes.values()) < 2 * 1024 * 16 * (16 if is_causal else 8)


def test_a_first_block_without_a_query_keeps_the_past():
    """Its queries are padding, as in the second turn of a batch of conversations; the next block's are not."""
    query, key, value = clustered(64, 4, 0.1)
    mask = torch.ones(1, 64, dtype=torch.bool)
    mask[:, 40:48] = False
    options = {"is_causal": True, "window": 8}
    out = landmark(query[:, :, 40:], key, value, key_padding_mask=mask, **options)[:, :, 8:]
    kept = [t[:, :, mask[0]] for t in (key, value)]
    exact = scaled_dot_product_attention(query[:, :, 48:], *kept, attn_mask=torch.ones(16, 56).tril(40).bool())
    assert (out - exact).norm() / exact.norm() < 0.2


def test_a_query_that_is_not_finite_stays_alone():
    query, key, value = clustered(200, 4, 0.1)
    exact = scaled_dot_product_attention(query, key, value)
    query[:, :, 7] = torch.nan
    out = landmark(query, key, value)
    rows = torch.arange(200) != 7
    assert out[:, :, 7].isnan().all()
    assert (out - exact)[:, :, rows].norm() / exact[:, :, rows].norm() < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 16}, {"is_causal": True, "window": 16}])
def test_half_precision_that_is_not_raised(dtype, options, monkeypatch):
    """What other devices than a CPU compute: means in float32, then attention in the type of the inputs."""
    tensors = [t.to(dtype) for t in clustered(200, 30, 0.3)]
    exact = landmark(*(t.double() for t in tensors), **options)
    monkeypatch.setattr("favor.landmark.attention._raises_half_precision", lambda query: False)
    out = landmark(*tensors, **options)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() / exact.norm() < 0.03


def test_errors_say_what_was_expected():
    tensors = clustered(12, 3, 0.1)
    with pytest.raises(ValueError, match="num_queries must be from 1 to 16384, got 0"):
        features.Landmarks(num_queries=0)
    with pytest.raises(ValueError, match="there must be a landmark and a key, got M = 3 and 0 keys"):
        features.Landmarks().cells(None, torch.zeros(1, 0, 8), 3)
    with pytest.raises(ValueError, match="num_features must be a positive integer, got 0"):
        favor.favor_attention(*tensors, features="landmark", num_features=0)
    with pytest.raises(ValueError, match="landmark features have no Triton kernel"):
        favor.favor_attention(*tensors, features="landmark", kernel="triton")
    given = features.Parameters.identity(16, dtype=torch.float64, device="cpu")
    with pytest.raises(ValueError, match="landmark features have no parameters"):
        favor.favor_attention(*tensors, features="landmark", parameters=given)


def test_padded_queries_choose_nothing():
    """Blocks that hold padding alone, whose keys join the groups in the course of a causal sequence."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 4, dtype=torch.float64, generator=generator) for n in (4, 25, 25))
    mask = torch.ones(1, 25, dtype=torch.bool)
    mask[:, 5:22] = False  # of the queries, the first
    options = {"features": "landmark", "num_features": 4, "window": 1, "is_causal": True, "key_padding_mask": mask}
    out = favor.favor_attention(query, key, value, **options)
    query[:, :, 0] = torch.tensor([9.0, -9.0, 9.0, 9.0])
    changed = favor.favor_attention(query, key, value, **options)
    torch.testing.assert_close(changed[:, :, 1:], out[:, :, 1:], rtol=0, atol=0)
