"""What the kernels should compute, as one product of features over all pairs, in whatever type the inputs have."""

import torch


def attention(query, key, value, to_query, to_key, offset, bias, *, is_causal=False, lengths=None):
    """Attention from the definition, like `favor.kernels.linear_attention`; `lengths` are those of packed sequences."""
    inputs = (query, key, value, to_query, to_key, offset, bias)
    if lengths is None:
        return _attention(*inputs, is_causal)
    outs = []
    for index, (q, k, v, b) in enumerate(
        zip(*(t.split(n, 2) for t, n in zip((query, key, value, bias), lengths, strict=True)), strict=True)
    ):
        own = slice(index, index + 1) if to_query.shape[0] > 1 else slice(None)
        outs.append(_attention(q, k, v, to_query[own], to_key[own], offset[own], b, is_causal))
    return torch.cat(outs, dim=2)


def _attention(query, key, value, to_query, to_key, offset, bias, is_causal):
    groups = query.shape[1] // key.shape[1]
    key, value, bias, to_query, to_key, offset = (
        t.repeat_interleave(groups, 1) for t in (key, value, bias, to_query, to_key, offset)
    )
    length, key_length = query.shape[2], key.shape[2]
    if not key_length:
        return (query * 0) @ query.new_zeros(query.shape[-1], value.shape[-1])
    hidden = bias.isneginf()
    key, value = key.masked_fill(hidden[..., None], 0), value.masked_fill(hidden[..., None], 0)
    log_key = key @ to_key.mT + offset[..., None, :] + bias.masked_fill(hidden, 0)[..., None]
    log_query = query @ to_query.mT
    top = log_key.detach().masked_fill(hidden[..., None], -torch.inf).amax(-2, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0)
    rows = log_query + top
    phi_key = (log_key - top).masked_fill(hidden[..., None], -torch.inf).exp()
    weights = (rows - rows.detach().amax(-1, keepdim=True)).exp() @ phi_key.mT
    if is_causal:
        weights = weights * torch.ones(length, key_length, dtype=torch.bool).tril(key_length - length)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1) @ value


def make_inputs(
    length, key_length=None, *, dim=8, value_dim=None, features=16, heads=2, groups=1, batch=1, shared=True, seed=0
):
    """Operands in float64; directions and bias have the sizes they have in attention."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key_length = length if key_length is None else key_length
    root, number = dim**-0.25, 1 if shared else batch
    query, key = randn(batch, heads * groups, length, dim), randn(batch, heads, key_length, dim)
    value = randn(batch, heads, key_length, value_dim or dim)
    directions = (root * randn(number, heads, features, dim) for _ in range(2))
    return [query, key, value, *directions, randn(number, heads, features), -(root * key).square().sum(-1) / 2]


def gradients(function, inputs, weight):
    """Output and gradients of (output * weight).sum()."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    (out * weight.to(out.dtype)).sum().backward()
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def error(found, expected):
    """Relative error in the Frobenius norm, in float64."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def window_attention(
    query, key, value, to_query, to_key, offset, bias, query_bias, *, window, scale, is_causal=False, lengths=None
):
    """Attention that is exact inside blocks of `window` tokens; `lengths` are those of queries and of keys, if packed.

    One softmax over logits that are scale q.k inside a block, and log sum_m exp(q.uq_m + k.uk_m + offset_m)
    + query_bias + key_bias between blocks.
    """
    inputs, options = (query, key, value, to_query, to_key, offset, bias, query_bias), (window, scale, is_causal)
    if lengths is None:
        return _window_attention(*inputs, *options)
    rows, keys = lengths
    pieces = [t.split(n, 2) for t, n in ((query, rows), (key, keys), (value, keys), (bias, keys), (query_bias, rows))]
    outs = []
    for index, (q, k, v, b, c) in enumerate(zip(*pieces, strict=True)):
        own = slice(index, index + 1) if to_query.shape[0] > 1 else slice(None)
        outs.append(_window_attention(q, k, v, to_query[own], to_key[own], offset[own], b, c, *options))
    return torch.cat(outs, dim=2)


def _window_attention(query, key, value, to_query, to_key, offset, bias, query_bias, window, scale, is_causal):
    groups = query.shape[1] // key.shape[1]
    key, value, bias, to_query, to_key, offset = (
        t.repeat_interleave(groups, 1) for t in (key, value, bias, to_query, to_key, offset)
    )
    length, key_length = query.shape[2], key.shape[2]
    if not key_length:
        return (query * 0) @ query.new_zeros(query.shape[-1], value.shape[-1])
    hidden = bias.isneginf()
    key, value = key.masked_fill(hidden[..., None], 0), value.masked_fill(hidden[..., None], 0)
    log_key = key @ to_key.mT + offset[..., None, :]
    top = log_key.detach().amax(-2, keepdim=True)
    rows = query @ to_query.mT + top
    peak = rows.detach().amax(-1, keepdim=True)
    estimate = ((rows - peak).exp() @ (log_key - top).exp().mT).log() + peak
    logits = estimate + query_bias[..., None] + bias.masked_fill(hidden, 0)[..., None, :]
    rows, columns = torch.arange(key_length - length, key_length)[:, None], torch.arange(key_length)
    logits = torch.where(rows // window == columns // window, scale * query @ key.mT, logits)
    visible = ~hidden[..., None, :]
    if is_causal:
        visible = visible & (columns <= rows)
    logits = logits.masked_fill(~visible, -torch.inf)
    weights = (logits - logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1) @ value
