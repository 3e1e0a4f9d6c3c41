"""Attention written out in float64 over the full L x S matrix, one head at a time."""

import torch

from favor import features
from favor.attention.functional import directions

FAMILIES = ["pos", "gerf", "saderf", "aderf", "sderf", "trig", "relu", "elu"]
POSITIVE = FAMILIES[:5]
NUM_FEATURES = 20


def inputs(length=37, key_length=None, *, batch=2, heads=4, key_heads=2, dim=8, value_dim=5, scale=1.0, seed=0):
    """Random query, key and value in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key_length = length if key_length is None else key_length
    query = scale * randn(batch, heads, length, dim)
    return query, scale * randn(batch, key_heads, key_length, dim), randn(batch, key_heads, key_length, value_dim)


def weights(rf, x, y, omega, real, is_causal, groups):
    """Unnormalised weights `[L, S]` of one head; x holds all `groups` heads that share the keys, one after another."""
    if isinstance(rf, features.SignedFeatures):
        return rf.phi(x[0], omega) @ rf.phi(y, omega).T * rf.log_scale(y).exp()
    if is_causal:
        params = features.Parameters.identity(y.shape[-1], dtype=y.dtype, device="cpu")
    else:
        query_rows = x[:, real] if x.shape[1] == y.shape[0] else x
        params = rf.fit(query_rows.flatten(0, 1), y[real])
    log_x, log_y = rf.log_phi(x[0], omega, params), rf.log_phi(y, omega, params, side="key")
    log_weights = torch.logsumexp(log_x[:, None] + log_y[None], dim=-1)
    return (log_weights - log_weights.max(dim=-1, keepdim=True).values).exp()


def reference_attention(query, key, value, *, name, mask=None, is_causal=False, scale=None, seed=0):
    """What `favor_attention` should return, from the definition."""
    batch, heads, length, dim = query.shape
    key_heads, key_length = key.shape[1:3]
    groups = heads // key_heads
    rf = features.get(name)
    omega = directions(rf, NUM_FEATURES, dim, key_heads, True, seed, 0, 0, torch.device("cpu"), torch.float64)
    root = (dim**-0.5 if scale is None else scale) ** 0.5
    out = torch.zeros(batch, heads, length, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        real = torch.ones(key_length, dtype=torch.bool) if mask is None else mask[b]
        if not real.any():
            continue
        for h in range(heads):
            k = h // groups
            shared = query[b, k * groups : (k + 1) * groups]
            # The head itself first; the order does not matter to the statistics.
            x = root * torch.cat((query[b, h : h + 1], shared[torch.arange(groups) != h - k * groups]))
            w = weights(rf, x, root * key[b, k], omega[k], real, is_causal, groups) * real
            if is_causal:
                w = w.tril(key_length - length)
            total = w.sum(-1, keepdim=True)
            out[b, h] = (w @ value[b, k]) / torch.where(total == 0, 1.0, total)
    return out
