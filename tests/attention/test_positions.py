"""Relative positions by definition: every pair of tokens with its own logit, in float64, with gradients."""

import pytest
import torch

import favor
from favor.attention import linear
from favor.attention.functional import AttentionCall
from favor.attention.positions import Blocks, Clipped, Sinusoidal
from favor.landmark import causal
from favor.landmark.attention import Landmarks
from favor.landmark.far import far

B, H, HK, L, D, M = 2, 4, 2, 330, 8, 24
SCALE = D**-0.5


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positions(kind, query, is_causal):
    """Gives relative positions and their parameters."""
    right = 0 if is_causal else 64
    if kind == "buckets":
        table = drawn(H, 129 + right, 1)
        return Clipped(torch.ones(1, 1, 1, 1, dtype=torch.float64), table, 128, right), table
    if kind == "keys":
        table = drawn(1, 65 + right, D)
        return Clipped(query / 3, table, 64, right), table
    weight = drawn(H, D, 16)
    return Sinusoidal(query, weight, SCALE, 64, 64), weight


def near_pairs(blocks):
    """Marks the pairs of queries and near keys `[L, L]`."""
    block = torch.arange(L) // 64
    return (block >= blocks.first(block).unsqueeze(1)) & (block < blocks.last(block).unsqueeze(1))


def by_features(name, query, key, blocks):
    """Gives the logits of all pairs by positive features."""
    family = favor.features.get(name)
    call = AttentionCall(num_features=M, is_causal=blocks.is_causal, scale=SCALE, seed=3)
    with torch.no_grad():
        parameters, to_query, to_key, offset = linear.prepared(family, query, key[:, ::2], key[:, ::2], call)
    own = linear.query_bias(query, parameters, HK, M, SCALE, None).unsqueeze(-1)
    asked = query @ to_query.repeat_interleave(2, 1).mT + own + offset.repeat_interleave(2, 1).unsqueeze(2)
    bias = linear.key_bias(0.0, key, parameters, SCALE, None, None).unsqueeze(-1)
    return (asked.unsqueeze(3) + (key @ to_key.repeat_interleave(2, 1).mT + bias).unsqueeze(2)).logsumexp(-1)


def by_landmarks(query, key, value, blocks, selected):
    """Gives for every block, by its query and key: the key and the value that stand for it, `[B, H, Z, L, w]`."""
    call = AttentionCall(num_features=M, is_causal=blocks.is_causal, scale=SCALE, seed=0, selected_keys=selected)
    with torch.no_grad():
        made = far(Landmarks(), query, key, value, blocks, call)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    if blocks.is_causal:
        node, chosen = torch.arange(L).expand(B * H, -1) // causal.SECTION, made.shared.long()
        taken = (chosen.unsqueeze(-1) == torch.arange(L)).any(2)
        size = causal.SECTION
    else:
        node = torch.empty(B * H, L, dtype=torch.long)
        found = made.key.unsqueeze(2) == key.unsqueeze(1)  # its place among the sorted keys
        place = found.all(-1).int().argmax(1)
        node, size = place // made.size, made.size
        taken = (made.chosen.unsqueeze(-1) == node[:, None, None]).any(2)
    count = -(-L // size)
    share = torch.nn.functional.one_hot(node, count).to(key.dtype)
    number = share.sum(1, keepdim=True).mT
    means = (share @ (share.mT @ rows / number) for rows in (key, value))
    return [
        torch.where(taken.unsqueeze(-1), rows.unsqueeze(1), mean.unsqueeze(1)).unflatten(0, (B, H))
        for rows, mean in zip((key, value), means, strict=True)
    ]


def expected(kind, relative, query, key, value, blocks, selected):
    near, bias, block = near_pairs(blocks), relative.dense(L, L), torch.arange(L) // 64
    logits = query @ key.mT * SCALE
    values = value.unsqueeze(2)
    if kind == "landmark":
        keys, values = by_landmarks(query, key, value, blocks, selected)
        rows = query.unsqueeze(3)
        far_logits = (rows @ keys[:, :, block].mT).squeeze(3) * SCALE
        values = torch.where(near[:, :, None], value.unsqueeze(2), values[:, :, block])
    else:
        far_logits = by_features(kind, query, key, blocks)
    logits = torch.where(near, logits, far_logits) + bias
    if blocks.is_causal:
        logits = logits.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -torch.inf)
    return (logits.softmax(-1).unsqueeze(3) @ values).squeeze(3)


@pytest.mark.parametrize(
    ("features", "selected", "kind", "is_causal"),
    [
        ("pos", 0, "buckets", True),
        ("gerf", 0, "keys", False),
        ("landmark", 0, "buckets", False),
        ("landmark", 64, "keys", False),
        ("landmark", 0, "keys", True),
        ("landmark", 64, "keys", True),
    ],
)
def test_near_keys_are_exact_and_far_ones_estimated(features, selected, kind, is_causal):
    torch.manual_seed(0)
    query, key, value = drawn(B, H, L, D), drawn(B, HK, L, D), drawn(B, HK, L, D)
    relative, parameter = positions(kind, query, is_causal)
    blocks = Blocks(-(-L // 64), L, relative.left // 64, relative.right // 64, is_causal, 1)
    if features == "landmark" and is_causal:
        blocks = Blocks(blocks.number, L, blocks.before, 0, True, 4)
    options = {"num_features": M, "seed": 3, "is_causal": is_causal, "relative": relative}
    if features == "landmark":
        options["selected_keys"] = selected
    found = favor.favor_attention(query, key, value, features=features, **options)
    repeated = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    wanted = expected(features, relative, query, *repeated, blocks, selected)
    assert torch.allclose(found, wanted, atol=1e-9)
    weight = torch.randn_like(found)
    grads = [
        torch.autograd.grad((out * weight).sum(), (query, key, value, parameter), retain_graph=True)
        for out in (found, wanted)
    ]
    for own, other in zip(*grads, strict=True):
        assert torch.allclose(own, other, atol=1e-8)


@pytest.mark.parametrize("kind", ["buckets", "keys", "waves"])
def test_padding_at_either_end_changes_nothing(kind):
    torch.manual_seed(0)
    query, key, value = (drawn(B, H, L, D).detach() for _ in range(3))
    relative, _ = positions(kind, query, False)
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[0, 200:], mask[1, :77] = False, False
    options = {"features": "landmark", "num_features": M, "selected_keys": 32}
    found = favor.favor_attention(query, key, value, **options, relative=relative, key_padding_mask=mask)
    assert not found[0, :, 200:].any()
    for row, tokens in enumerate((slice(0, 200), slice(77, L))):
        own = [tensor[row : row + 1, :, tokens] for tensor in (query, key, value)]
        alone = favor.favor_attention(*own, **options, relative=relative.part([row], tokens=tokens))
        assert torch.allclose(found[row, :, tokens], alone[0], atol=1e-12)


def test_errors_say_what_was_wrong():
    query = torch.randn(1, 2, 100, D)
    relative, _ = positions("buckets", query.double(), False)
    relative = relative._replace(query=relative.query.float(), key=relative.key[:2].float().detach())
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[0, 50] = False
    with pytest.raises(ValueError, match="padding must be at the start or the end"):
        favor.favor_attention(query, query, query, features="landmark", relative=relative, key_padding_mask=mask)
    with pytest.raises(ValueError, match="trig features take no relative positions"):
        favor.favor_attention(query, query, query, features="trig", relative=relative)
    with pytest.raises(ValueError, match="100 queries and 50 keys"):
        favor.favor_attention(query, *[query[:, :, :50]] * 2, features="landmark", relative=relative)
    waves = Sinusoidal(query, torch.randn(2, D, 16), SCALE)
    with pytest.raises(ValueError, match='take features="landmark" for sinusoidal positions'):
        favor.favor_attention(query, query, query, features="pos", relative=waves)


@pytest.mark.parametrize("kind", ["buckets", "waves"])
def test_half_precision_is_raised_on_a_cpu(kind):
    torch.manual_seed(0)
    query, key, value = (drawn(B, H, L, D).detach() for _ in range(3))
    relative, _ = positions(kind, query, False)
    halved = relative.to(torch.bfloat16)
    options = {"features": "landmark", "num_features": M, "selected_keys": 400}
    found = favor.favor_attention(*(own.bfloat16() for own in (query, key, value)), **options, relative=halved)
    rounded = halved.to(torch.float64)
    wanted = favor.favor_attention(
        *(own.bfloat16().double() for own in (query, key, value)), **options, relative=rounded
    )
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), wanted, atol=2e-2)
