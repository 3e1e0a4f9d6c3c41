"""Decoding step by step against causal attention, and passes over tokens and the roots of their moments, in float64."""

from functools import partial

import pytest
import torch
from truth import attention

import favor
from favor.attention.linear import Form
from favor.kernels.gpu import tokens as triton_tokens
from favor.kernels.gpu.common import Blocks, within_memory
from favor.kernels.gpu.decode import decode
from favor.kernels.gpu.summary import summarise

pytestmark = pytest.mark.usefixtures("poisoned")
STEPS = 3


def make(batch, heads, key_heads, width, value_width, features, shared, dtype, steps=STEPS, scale=1.0):
    torch.manual_seed(0)

    def tokens(heads, width, scale=1.0):
        return (torch.randn(batch, steps, heads, width) * scale).to(dtype).transpose(1, 2)

    def per_head(*shape):
        return torch.randn(1 if shared else batch, key_heads, features, *shape)

    query, key = tokens(heads, width, scale), tokens(key_heads, width, scale)
    directions = [per_head(width) * width**-0.5 for _ in range(2)]
    return query, key, tokens(key_heads, value_width), *directions, per_head(), torch.randn(batch, key_heads, steps)


def steps(inputs, start, log_weight, summary, **options):
    query, key, value, *parameters, bias = inputs
    outs = []
    for step in range(start, query.shape[2]):
        one = slice(step, step + 1)
        tokens = (x[:, :, one] for x in (query, key, value))
        outs.append(decode(*tokens, *parameters, bias[:, :, one].contiguous(), log_weight, summary, **options))
    return torch.cat(outs, 2)


def fresh_state(inputs):
    _, key, value, directions, *_ = inputs
    log_weight = torch.full((*key.shape[:2], directions.shape[2]), -torch.inf)
    return log_weight, torch.full((*log_weight.shape, value.shape[3]), torch.nan)


def check(inputs, out, start=0):
    dtype = inputs[0].dtype
    exact, plain = (
        attention(*(part.to(kind) for part in inputs), is_causal=True)[:, :, start:] for kind in (torch.float64, dtype)
    )
    assert out.dtype == dtype
    error, size = (out.double() - exact).abs().max(), exact.abs().max()
    allowed = 1e-4 * size if dtype == torch.float32 else 2 * (plain.double() - exact).abs().max() + 1e-3 * size
    assert error <= allowed, (error, allowed)


CASES = {
    "plain": (2, 2, 2, 32, 32, 16, True, torch.float32, None, 1.0),
    "grouped, own directions": (2, 8, 2, 20, 12, 100, False, torch.float32, None, 1.0),
    "wide, many features": (1, 4, 1, 80, 128, 270, True, torch.float32, None, 1.0),
    "more heads than a block": (1, 20, 1, 16, 16, 16, True, torch.float32, None, 1.0),
    "more heads than a program takes": (1, 71, 1, 16, 20, 16, True, torch.float32, None, 1.0),
    "one piece": (1, 4, 2, 16, 16, 100, True, torch.float32, 1, 1.0),
    "three pieces": (1, 4, 2, 16, 16, 100, True, torch.float32, 3, 1.0),
    "bfloat16": (1, 4, 1, 64, 64, 256, True, torch.bfloat16, None, 1.0),
    "float16": (1, 2, 2, 64, 40, 100, True, torch.float16, None, 1.0),
    "large": (1, 2, 1, 64, 64, 64, True, torch.float32, None, 30.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_from_an_empty_state(case):
    *sizes, splits, scale = case
    inputs = make(*sizes, scale=scale)
    check(inputs, steps(inputs, 0, *fresh_state(inputs), splits=splits))


def test_hidden_keys_hold_nan_and_leave_the_state():
    inputs = make(2, 4, 2, 32, 32, 40, True, torch.float32, steps=5)
    _, key, value, *_, bias = inputs
    bias[0, :, :2] = -torch.inf
    bias[1, 0, 3] = -torch.inf
    for tensor in (key, value):
        tensor.masked_fill_((bias == -torch.inf)[..., None], torch.nan)
    log_weight, summary = fresh_state(inputs)
    out = steps(inputs, 0, log_weight, summary)
    assert not out[0, :, :2].any()
    check(inputs, out)
    before = log_weight.clone(), summary.clone()
    hidden = [x[:, :, :1] for x in (inputs[0], key * torch.nan, value * torch.nan)]
    decode(*hidden, *inputs[3:6], torch.full((2, 2, 1), -torch.inf), log_weight, summary)
    torch.testing.assert_close(log_weight, before[0], rtol=0.0, atol=1e-6)
    assert torch.equal(summary, before[1])


def test_state_comes_from_a_summary_and_ends_as_one():
    inputs = make(2, 4, 2, 32, 24, 40, False, torch.float32, steps=8)
    _, key, value, _, directions, _, bias = inputs
    past = 5
    seen = (key[:, :, :past], bias[:, :, :past].contiguous(), value[:, :, :past])
    summary, log_weight, _ = summarise(directions, *seen, None, past)
    check(inputs, steps(inputs, past, log_weight, summary), past)
    whole = summarise(directions, key, bias, value, None, key.shape[2])
    torch.testing.assert_close(summary, whole[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_weight, whole[1], rtol=1e-5, atol=1e-5)


def tokens(dtype, batch=2, heads=3, length=150, width=24):
    torch.manual_seed(0)
    # A view with gaps between its rows, as a projection cut into heads leaves it.
    return (torch.randn(batch, length, heads, width + 8)[..., :width].transpose(1, 2) + 3).to(dtype)


@pytest.mark.parametrize(
    ("terms", "width", "dtype"),
    [
        ("weight", 24, torch.float32),
        ("matrix", 64, torch.bfloat16),
        ("matrix shift weight", 24, torch.bfloat16),
        ("matrix shift weight", 128, torch.float16),
        ("matrix linear", 128, torch.float32),
        ("matrix linear", 24, torch.float16),
        ("linear weight", 64, torch.float16),
        ("linear weight", 128, torch.bfloat16),
        ("", 64, torch.float32),
    ],
)
def test_forms_and_their_gradients(terms, width, dtype, poisoned):
    rows = tokens(dtype, length=70, width=width)
    matrix = torch.randn(2, 3, width, width) / width**0.5 if "matrix" in terms else None
    shift = torch.randn(3, width) if "shift" in terms else None
    linear = torch.randn(2, 1, width) if "linear" in terms else None
    weight = -0.3 if "weight" in terms else 0.0
    hidden = torch.rand(2, 1, 70) < 0.3
    hidden[1] = False
    grad = torch.randn(2, 3, 70)
    exact = [None if x is None else x.double() for x in (matrix, shift, linear)]
    leaf = rows.double().requires_grad_()
    value = Form(*exact, weight).of(leaf, torch.float64)
    (slope,) = (
        torch.autograd.grad(
            (value * grad.double()).masked_fill(hidden, 0.0).sum(), leaf, allow_unused=True, materialize_grads=True
        )
        if value.requires_grad
        else (torch.zeros_like(leaf),)
    )

    rows = rows.masked_fill(hidden.unsqueeze(-1), torch.nan)
    numbers = (weight, 1.0, 0.0)
    found = triton_tokens.form(rows, matrix, shift, linear, numbers, None, ~hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), value.detach().masked_fill(hidden, -torch.inf), rtol=1e-5, atol=1e-4)
    gradient = triton_tokens.form(rows, matrix, shift, linear, numbers, None, ~hidden, grad)
    assert gradient.dtype == dtype
    rounding = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    torch.testing.assert_close(gradient.double(), slope, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "weighting", "dtype"),
    [
        (24, "none", torch.bfloat16),
        (64, "none", torch.float32),
        (24, "mask", torch.float16),
        (64, "mask", torch.bfloat16),
        (24, "shares", torch.float32),
        (64, "shares", torch.float16),
    ],
)
def test_moments(width, weighting, dtype, poisoned):
    rows = tokens(dtype, length=700, width=width)
    weights = None if weighting == "none" else torch.rand(2, 3, 700)
    if weighting == "mask":
        weights = (weights < 0.5).float()
    if weights is not None:
        weights[0, 1] = 0.0
        weights[1, 2, :600] = 0.0
    exact = torch.ones(2, 3, 700, dtype=torch.float64) if weights is None else weights.double()
    share = exact / exact.sum(-1, keepdim=True).clamp(min=1e-9)
    mean = (share.unsqueeze(-1) * rows.double()).sum(-2)
    centred = rows.double() - mean.unsqueeze(-2)
    cov = (share.unsqueeze(-1) * centred).mT @ centred
    if weights is not None:
        rows = rows.masked_fill((weights == 0).unsqueeze(-1), torch.nan)
    found = triton_tokens.moments(rows, weights)
    torch.testing.assert_close(found[0].double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), cov, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [5, 24, 64])
def test_roots(width):
    torch.manual_seed(0)
    factor = torch.randn(2, 3, width, 2 * width, dtype=torch.float64)
    matrix = 7 * factor @ factor.mT
    matrix[1, 1] = 0.0
    matrix[1, 2, 0, 0] = torch.nan
    root, inverse = triton_tokens.newton_schulz(matrix.float(), 24)
    values, vectors = torch.linalg.eigh(matrix[0])
    exact = vectors * values.sqrt().unsqueeze(-2) @ vectors.mT
    torch.testing.assert_close(root[0].double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    eye = torch.eye(width, dtype=torch.float64).expand(3, width, width)
    torch.testing.assert_close(exact @ inverse[0].double(), eye, rtol=1e-3, atol=1e-3)
    assert (root[1, 1] == 0).all()
    assert root[1, 2].isnan().any()
    assert root[1, 0].isfinite().all()


@pytest.mark.parametrize(("window", "family"), [(16, "pos"), (0, "gerf"), (0, "wderf"), (16, "wderf")])
def test_attention_with_fused_passes_is_the_same(window, family, monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 60, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, 40:] = False
    features = favor.features.get(family, **({"factorization": "cholesky"} if family == "wderf" else {}))
    options = {"features": features, "num_features": 32}
    modules = ("attention.linear", "features.moments", "features.linalg")
    results = []
    for fused in (False, True):
        asked = set()
        for module in modules:
            answer = partial(lambda asked, name, fused, rows: asked.add(name) or fused, asked, module, fused)
            monkeypatch.setattr(f"favor.{module}.fuses", answer)
        out = favor.favor_attention(query, key, value, key_padding_mask=mask, window=window, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
        assert asked == set(modules[: {"pos": 1, "gerf": 2, "wderf": 3}[family]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_choices_leave_each_group_of_warps_enough_columns():
    choices = (Blocks(64, 16, 8, 2), Blocks(64, 64, 8, 2))
    assert within_memory(choices, True, 64, 64) == (Blocks(64, 16, 4, 2), Blocks(64, 64, 8, 2))
    assert within_memory(choices, True, 16, 64) == (Blocks(64, 16, 4, 2), Blocks(64, 64, 4, 2))
    assert within_memory(choices, False, 16, 64) == choices
