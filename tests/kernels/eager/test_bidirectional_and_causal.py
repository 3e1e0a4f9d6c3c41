"""What only the torch kernels without a window do; test_definition.py has what all have in common."""

import pytest
import torch
from truth import attention, error, gradients, make_inputs

from favor.kernels import linear_attention
from favor.kernels.eager import bidirectional, causal
from favor.kernels.eager.common import exp2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_copies_of_a_few_heads(dtype, monkeypatch):
    """Hidden keys and low precision are copied for the fused kernel, some heads at a time."""
    inputs = make_inputs(40, groups=2, heads=3, batch=2, shared=False)
    inputs[-1][0, :, 30:] = -torch.inf
    inputs[:3] = [t.to(dtype) for t in inputs[:3]]
    inputs[3:] = [t.to(dtype if dtype == torch.float64 else torch.float32) for t in inputs[3:]]
    expected = linear_attention(*inputs)
    monkeypatch.setattr(bidirectional, "_COPIED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(linear_attention(*inputs), expected)


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


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_size_of_chunks_does_not_matter(size, monkeypatch):
    inputs = make_inputs(100, 130, groups=2)
    weight = torch.randn(1, 4, 100, 8, dtype=torch.float64)
    expected = gradients(lambda *t: linear_attention(*t, is_causal=True), inputs, weight)
    monkeypatch.setattr(causal, "CHUNK_SIZE", size)
    for f, e in zip(gradients(lambda *t: linear_attention(*t, is_causal=True), inputs, weight), expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
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


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
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
