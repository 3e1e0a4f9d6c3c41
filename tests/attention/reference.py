"""Attention written out in float64 over the full L x S matrix, one head at a time."""

import math

import torch

import favor
from favor import features
from favor.attention.directions import Draw, directions

# "@" and a number: with exact blocks of so many tokens, where attention has such blocks. "+" and a number: with so many
# selected keys; "alone": each query chooses them for itself. The definition of landmarks is in tests/landmark.
POSITIVE = ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "opposite", "pos@8", "wderf@16"]
SOFTMAX = [*POSITIVE, "landmark+0", "landmark+6", "landmark+6 alone"]
FAMILIES = [*SOFTMAX, "trig", "relu", "elu"]
NUM_FEATURES = 20


def inputs(length=37, key_length=None, *, batch=2, heads=4, key_heads=2, dim=8, value_dim=5, scale=1.0, seed=0):
    """Random query, key and value in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    key_length = length if key_length is None else key_length
    query = scale * randn(batch, heads, length, dim)
    return query, scale * randn(batch, key_heads, key_length, dim), randn(batch, key_heads, key_length, value_dim)


def family_and_window(name, query, key, is_causal):
    """Registry name and window of an entry of the list above, for these inputs."""
    name, _, window = name.partition("+")[0].partition("@")
    return name, int(window or 0) if is_causal or query.shape[2] == key.shape[2] else 0


def attend(*tensors, name, mask=None, num_features=NUM_FEATURES, **options):
    """`favor_attention` for an entry of the list above."""
    if "+" in name:
        name, *alone = name.split()
        options = {"selected_keys": int(name.partition("+")[2]), "use_statistics": not alone} | options
    name, window = family_and_window(name, *tensors[:2], options.get("is_causal", False))
    return favor.favor_attention(
        *tensors, features=name, window=window, num_features=num_features, key_padding_mask=mask, **options
    )


def weights(rf, x, y, omega, real, is_causal, own, window):
    """Unnormalised weights `[L, S]` of head `own` among those that share the keys, x `[G, L, d]`."""
    if isinstance(rf, features.SignedFeatures):
        return rf.phi(x[own], omega) @ rf.phi(y, omega).T * rf.log_scale(y).exp()
    if is_causal:
        params = features.Parameters.identity(y.shape[-1], dtype=y.dtype, device="cpu")
    else:
        query_rows = x[:, real] if x.shape[1] == y.shape[0] else x
        params = rf.fit(query_rows.flatten(0, 1), y[real])
    log_x, log_y = rf.log_phi(x[own], omega, params), rf.log_phi(y, omega, params, side="key")
    log_weights = torch.logsumexp(log_x[:, None] + log_y[None], dim=-1) - math.log(len(omega))
    if window:
        columns = real.cumsum(0) - 1  # blocks are counted in real tokens
        rows = columns[y.shape[0] - x.shape[1] :]
        inside = rows[:, None] // window == columns // window
        log_weights = torch.where(inside, x[own] @ y.T, log_weights)
    log_weights = log_weights.masked_fill(~real, -torch.inf)
    return (log_weights - log_weights.max(dim=-1, keepdim=True).values).exp()


def reference_attention(query, key, value, *, name, mask=None, is_causal=False, scale=None, seed=0):
    """What `favor_attention` should return, from the definition."""
    batch, heads, length, dim = query.shape
    key_heads, key_length = key.shape[1:3]
    groups = heads // key_heads
    name, window = family_and_window(name, query, key, is_causal)
    rf = features.get(name)
    omega = directions(Draw(rf, NUM_FEATURES, dim, key_heads, True, seed, 0, 0, torch.device("cpu"), torch.float64))
    root = (dim**-0.5 if scale is None else scale) ** 0.5
    out = torch.zeros(batch, heads, length, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        real = torch.ones(key_length, dtype=torch.bool) if mask is None else mask[b]
        if not real.any():
            continue
        for h in range(heads):
            k = h // groups
            shared = query[b, k * groups : (k + 1) * groups]
            w = weights(rf, root * shared, root * key[b, k], omega[k], real, is_causal, h - k * groups, window) * real
            if is_causal:
                w = w.tril(key_length - length)
            total = w.sum(-1, keepdim=True)
            out[b, h] = (w @ value[b, k]) / torch.where(total == 0, 1.0, total)
    return out
