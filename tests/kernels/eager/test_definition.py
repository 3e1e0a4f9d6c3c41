"""The torch kernels, with a window and without, against the definition in float64: outputs and all gradients."""

import pytest
import torch
from truth import attention, error, gradients, make_inputs

from favor.kernels import linear_attention
from favor.kernels.eager import bidirectional, causal, window
from favor.kernels.eager.common import exp2

both = pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])

plain_too = pytest.mark.parametrize("window", [0, 16], ids=["plain", "window"])

LENGTHS = [1, 2, 63, 64, 100, 300]
LAYOUTS = ["dense", "padded", "packed", "70 keys first"]
DIMS, FEATURES, GROUPS, WINDOWS = [32, 64, 80, 128], [16, 100, 256], [1, 4], [64, 7, 128, 1000]
# Every length with every layout; widths, numbers of features, groups and windows take turns.
CASES = [
    (length, layout, is_causal, DIMS[(i + j) % 4], FEATURES[(i + 2 * j) % 3], GROUPS[(i + j) % 2], WINDOWS[(i + j) % 4])
    for i, length in enumerate(LENGTHS)
    for j, layout in enumerate(LAYOUTS)
    for is_causal in (False, True)
    if is_causal or layout != LAYOUTS[3]
]
CASES += [(*case[:-1], 0) for case in CASES if case[1] != LAYOUTS[3]]
# From 4096 tokens on, causal chunks are longer.
CASES += [(4097, "padded", True, 32, 16, 1, 0)]
# Queries that begin inside a block, whose number in all heads is that of its keys.
CASES += [
    (1, "1 key first", True, 8, 16, 2, 4),
    (6, "2 keys first", True, 8, 16, 2, 4),
    (2, "6 keys first", True, 8, 16, 4, 8),
]
# So many blocks that sums of sums are summed.
CASES += [(300, layout, is_causal, 8, 16, 1, 1) for layout in ("dense", "padded") for is_causal in (False, True)]


def prepare(length, layout, window, *, is_causal=False, **options):
    """Float64 inputs, with a query bias if there is a window, with their packing for the kernel and for the truth."""
    kernel, lengths = {}, None
    if layout == "packed":
        keys = [0, length, max(1, length // 3), 5]
        rows = keys if window else [0, length // 2, 3, 0]
        rows = [0, length, min(1, length // 3), 4] if is_causal else rows
        inputs = make_inputs(sum(rows), sum(keys), **options)
        cumulative = [torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys)]
        kernel = {"cu_seqlens_q": cumulative[0], "cu_seqlens_k": cumulative[1]}
        kernel |= {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys)}
        lengths = (rows, keys)
    else:
        options["batch"] = 2 if length <= 1000 else 1
        first = int(layout.split()[0]) if "first" in layout else 0
        inputs = make_inputs(length, length + first, **{"shared": layout != "padded"} | options)
    if layout == "padded":
        inputs[-1][0, :, : length // 3] = -torch.inf
        inputs[-1][-1, :, length - length // 4 :] = -torch.inf
    generator = torch.Generator().manual_seed(2)
    if window:
        inputs.append(torch.randn(inputs[0].shape[:3], dtype=torch.float64, generator=generator))
    return inputs, kernel, lengths


def form(window, is_causal, scale=0.3):
    """Options of both functions."""
    return {"is_causal": is_causal, **({"window": window, "scale": scale} if window else {})}


def attend(options, packing=None):
    """The function of all inputs that `gradients` takes."""
    options = {**options, **(packing or {}), "kernel": "torch"}
    return lambda *t: linear_attention(*t[:7], query_bias=t[7] if t[7:] else None, **options)


def truth(options, lengths, weight, inputs):
    return gradients(lambda *t: attention(*t, lengths=lengths, **options), inputs, weight)


def draw_weight(inputs):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*inputs[0].shape[:3], inputs[2].shape[3], generator=generator)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_definition(case, poisoned):
    check(*case)


@pytest.mark.parametrize(("layout", "is_causal"), sorted({case[1:3] for case in CASES}))
@pytest.mark.parametrize(("length", "groups"), [(1, 2), (100, 1), (300, 3)])
@pytest.mark.parametrize("window", [0, 64])
def test_values_of_another_width(length, groups, window, layout, is_causal, poisoned):
    """The fused kernel of PyTorch does not take these."""
    check(length, layout, is_causal, 32, 100, groups, window, value_dim=24)


def check(length, layout, is_causal, dim, features, groups, window, value_dim=None):
    sizes = {"dim": dim, "value_dim": value_dim, "features": features, "groups": groups}
    sizes["heads"] = 1 if length >= 300 else 2
    inputs, packing, lengths = prepare(length, layout, window, is_causal=is_causal, **sizes)
    options = form(window, is_causal, dim**-0.5)
    weight = draw_weight(inputs)
    expected = truth(options, lengths, weight, inputs)
    found = gradients(attend(options, packing), [t.float() for t in inputs], weight)
    scale = max(t.norm() for t in expected[1:]).clamp(min=1e-12)
    for f, e in zip(found, expected, strict=True):
        # Gradients that vanish in exact arithmetic (one block) are compared with the others.
        assert (f.double() - e).norm() <= 5e-5 * max(e.norm(), 0.1 * scale)


@both
@pytest.mark.parametrize(("length", "window"), [(150, 64), (63, 0), (300, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_better_than_the_formula_at_that_precision(dtype, length, window, is_causal):
    exact, *_ = prepare(length, "dense", window, dim=32, features=100)
    options = form(window, is_causal, 32**-0.5)
    low = [t.to(dtype) for t in exact[:3]] + [t.float() for t in exact[3:]]
    rounded = [t.double() for t in low]
    weight = draw_weight(exact).to(dtype)
    expected = truth(options, None, weight, rounded)
    plain = truth(options, None, weight, [t.to(dtype) for t in rounded])
    found = gradients(attend(options), low, weight)
    assert found[0].dtype == dtype
    for f, p, e in zip(found, plain, expected, strict=True):
        assert error(f, e) <= 2 * error(p, e)


# Where numbers of heads, chunks or spans that are worked on together are kept; and layouts, widths of values, windows.
TOGETHER = [
    *((bidirectional, "_COPIED", 1, "padded", False, 8, 0, dtype) for dtype in (torch.float64, torch.bfloat16)),
    *((causal, "CHUNK_SIZE", size, LAYOUTS[3], True, 8, 0, torch.float64) for size in (1, 2, 16, 128)),
    *((window, "SPAN", 1, "padded", False, width, 16, torch.float64) for width in (8, 5)),
    *((window, "SPAN", 1, LAYOUTS[3], True, width, 16, torch.float64) for width in (8, 5)),
]


@pytest.mark.parametrize(("module", "name", "size", "layout", "is_causal", "value_dim", "block", "dtype"), TOGETHER)
def test_how_much_is_worked_on_together_does_not_matter(
    module, name, size, layout, is_causal, value_dim, block, dtype, monkeypatch
):
    inputs, *_ = prepare(90, layout, block, groups=2, value_dim=value_dim, heads=3, shared=False)
    inputs = [t.to(dtype if i < 3 or dtype == torch.float64 else torch.float32) for i, t in enumerate(inputs)]
    options, weight = form(block, is_causal), draw_weight(inputs)
    expected = gradients(attend(options), inputs, weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for own in (name, f"FUSED_{name}"):
        monkeypatch.setattr(module, own, size, raising=own == name)
    for f, e in zip(gradients(attend(options), inputs, weight), expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-10)


def test_what_does_not_fit_is_refused():
    inputs = make_inputs(5, 6)
    bias = torch.zeros(1, 2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="5 queries and 6 keys"):
        linear_attention(*inputs, query_bias=bias, window=4)
    with pytest.raises(ValueError, match="window must be positive with a query_bias"):
        linear_attention(*inputs, query_bias=bias)
    with pytest.raises(ValueError, match="window must be positive with a query_bias"):
        linear_attention(*inputs, window=4, is_causal=True)


@both
@plain_too
@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("hidden", [False, True])
def test_large_norms(is_causal, value_dim, window, hidden):
    """Most weights are far below the smallest float32, and blocks differ in scale by more than that."""
    inputs, *_ = prepare(150, "dense", window, groups=2, value_dim=value_dim)
    for i in (3, 4, 6):
        inputs[i] *= 12
    if hidden:  # whole blocks, too; and what is in other blocks counts most
        inputs[6][0, :, :37] = inputs[6][0, :, 60:100] = inputs[6][1, :, 16:] = -torch.inf
        inputs[7:] = [tensor + 1e3 for tensor in inputs[7:]]
        inputs[1] *= torch.linspace(1, 4, 150, dtype=torch.float64)[:, None]
    options, weight = form(window, is_causal, 1.0), draw_weight(inputs)
    expected = truth(options, None, weight, inputs)
    found = gradients(attend(options), [t.float() for t in inputs], weight)
    # The last gradient, of the query bias, is next to nothing here, and what is left of a difference.
    assert max(error(f, e) for f, e in zip(found[:8], expected[:8], strict=True)) < 1e-3


@pytest.mark.parametrize("hidden", [0, 3, 20])
def test_steep_chunks(hidden):
    """Features that rise by thousands of nats inside a chunk, with and without hidden keys before them."""
    inputs = make_inputs(150, 170)
    inputs[1] *= torch.linspace(1, 100, 170, dtype=torch.float64)[:, None]
    inputs[-1] = torch.zeros_like(inputs[-1])
    inputs[-1][:, :, 60 : 60 + hidden] = -torch.inf
    # All features at once: no product of two factors could hold such weights.
    log_weights = torch.logsumexp(
        (inputs[0] @ inputs[3].mT)[..., :, None, :]
        + (inputs[1] @ inputs[4].mT + inputs[5][:, :, None])[..., None, :, :],
        -1,
    )
    log_weights += inputs[-1][:, :, None]
    visible = torch.ones(150, 170, dtype=torch.bool).tril(20)
    expected = log_weights.masked_fill(~visible, -torch.inf).softmax(-1) @ inputs[2]
    found = linear_attention(*(t.float() for t in inputs), is_causal=True)
    assert error(found, expected) < 1e-4
    leaves = [t.float().requires_grad_() for t in inputs]
    linear_attention(*leaves, is_causal=True).sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves[:-1])


@pytest.mark.parametrize("norm", [1, 40, 100])
@pytest.mark.parametrize("shown", [slice(140, None), slice(70, 80), slice(0)], ids=["left", "both", "all"])
def test_chunks_that_see_nothing(norm, shown):
    """Far above the keys that come after them, whose logits are -norm^2 / 2 on average."""
    inputs = make_inputs(200, batch=2)
    inputs[0], inputs[1] = (norm * torch.nn.functional.normalize(t, dim=-1) for t in inputs[:2])
    inputs[-1] = -(8**-0.25 * inputs[1]).square().sum(-1) / 2
    hidden = torch.ones(200, dtype=torch.bool)
    hidden[shown] = False
    inputs[-1][0, :, hidden] = -torch.inf
    weight = torch.randn(2, 2, 200, 8, generator=torch.Generator().manual_seed(1))
    expected = gradients(lambda *t: attention(*t, is_causal=True), inputs, weight)
    found = gradients(lambda *t: linear_attention(*t, is_causal=True), inputs, weight)
    for f, e in zip(found, expected, strict=True):
        assert error(f, e) < 1e-6
    single = gradients(lambda *t: linear_attention(*t, is_causal=True), [t.float() for t in inputs], weight)
    assert all(t.isfinite().all() for t in single)


@both
def test_strides_do_not_matter(is_causal):
    inputs = make_inputs(50, batch=2, groups=2)
    expected = linear_attention(*inputs, is_causal=is_causal)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
    strided[1] = strided[1].repeat_interleave(2, dim=-1)[..., ::2]
    assert strided[1].stride(-1) == 2
    out = linear_attention(*strided, *inputs[3:], is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, -100.0), (torch.float64, -996.0)], ids=str)
def test_weights_are_never_subnormal(dtype, least):
    """Products with such numbers would take a hundred times as long."""
    logits = torch.tensor([0.0, 3.0, 1e4, least + 1, least - 1, 1.3 * least, -torch.inf, torch.nan], dtype=dtype)
    expected = torch.tensor([1.0, 8.0, 8.0, 2.0 ** (least + 1), 0.0, 0.0, 0.0, torch.nan], dtype=dtype)
    torch.testing.assert_close(exp2(logits, 3.0), expected, rtol=1e-6, atol=0.0, equal_nan=True)


@plain_too
@both
@pytest.mark.parametrize("value_dim", [8, 5])
def test_logits_that_are_rounded_to_thousands(is_causal, value_dim, window):
    """At 1e11 neighbouring numbers are 8192 apart: what two ways to one logarithm differ by must not overflow."""
    inputs = [t.float() for t in make_inputs(150, groups=2, value_dim=value_dim)]
    for i in range(3, 7):
        inputs[i] *= 1e11
    options = {"is_causal": is_causal, "window": window}
    if window:
        options |= {
            "query_bias": 1e11 * torch.randn(1, 4, 150, generator=torch.Generator().manual_seed(2)),
            "scale": 1e11,
        }
    weight = torch.randn(1, 4, 150, value_dim, generator=torch.Generator().manual_seed(1))
    out, *grads = gradients(lambda *t: linear_attention(*t, **options), inputs, weight)
    assert out.isfinite().all()
    assert out.abs().max() <= inputs[2].abs().max() * 1.001
    assert out.any(-1).all()
    assert all(grad.isfinite().all() for grad in grads)
    if is_causal:
        torch.testing.assert_close(out[:, ::2, 0], inputs[2][:, :, 0])
