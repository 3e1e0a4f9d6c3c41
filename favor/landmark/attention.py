"""Attention through landmarks: groups of keys under one mean key, mean value and count; see `favor.landmark.Landmarks`.

    out_i = sum_m n_m exp(q_i.c_m) v_m / sum_m n_m exp(q_i.c_m)

is softmax attention with M keys c_m, values v_m and biases log n_m, which PyTorch's `scaled_dot_product_attention`
computes on every device. Gradients pass through the means; which key belongs to which landmark is a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.call import AttentionCall
from favor.kernels import exported
from favor.kernels.dispatch import is_exporting
from favor.landmark import causal as landmark_causal
from favor.landmark import causal_selected, kept
from favor.landmark.grouping import Landmarks, attend_counted, sums_of
from favor.landmark.selected import Selection, bidirectional, windowed

# Numbers in keys and landmarks of all blocks at a time: little memory on a CPU, few launches on a GPU.
_NUMBERS, _NUMBERS_OF_GPU = 2**20, 2**26


def attend(family: Landmarks, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes the attention output `[B, H, L, dv]` through landmarks.

    Half precision is raised to float32 on a CPU, as for other features; elsewhere keys and values stay in half
    precision, and only their means are taken in float32.

    Raises:
        ValueError: if the number of landmarks is less than 1.
    """
    if call.packing is not None:
        return call.packing.each(attend, family, query, key, value, call)
    num_landmarks, window, key_mask, scale = call.num_features, call.window, call.key_mask, call.scale
    if num_landmarks < 1:
        raise ValueError(f"num_features must be a positive integer, got {num_landmarks}.")
    (batch, heads, length), (key_heads, keys) = query.shape[:3], key.shape[1:3]
    if 0 in (batch, length, keys):
        zeros = query[..., :0].sum(-1, keepdim=True) + key[..., :0].sum() + value[..., :0].sum()  # a part of the graph
        return zeros.expand(-1, -1, -1, value.shape[-1])
    groups, block, selection = heads // key_heads, window or landmark_causal.BLOCK, Selection.of(call, keys)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)  # whatever padding holds
    shared, precision = query.unflatten(1, (key_heads, groups)), torch.promote_types(query.dtype, torch.float32)
    counts = key.new_ones(key.shape[:3], dtype=precision)
    counts = counts if key_mask is None else counts * key_mask[:, None]
    if call.is_causal and call.state is None and length <= block:
        # All keys that the block of queries sees are at hand, and are taken unchanged, in their own precision.
        own = None if key_mask is None else counts
        out = attend_counted(shared.flatten(2, 3), key, value, counts=own, scale=scale, causal_rows=length)
        return out.view(batch, heads, length, -1)
    if _raises_half_precision(query):
        shared, key, value = shared.to(precision), key.to(precision), value.to(precision)
    query_mask = call.query_padding(length, keys)
    asking = shared
    if selection is not None and query_mask is not None:  # padding must not influence what its block chooses
        asking = shared.masked_fill(~query_mask[:, None, None, :, None], 0.0)
    if call.is_causal and selection is not None:
        setting = kept.Setting(family, selection, num_landmarks, scale, block)
        return causal_selected.attention(setting, asking, key, value, counts, call.state).flatten(1, 2)
    if call.is_causal:
        out = landmark_causal.attention(
            family, shared, key, value, num_landmarks, counts=counts, scale=scale, block=block, state=call.state
        )
        return out.flatten(1, 2)
    rows = shared.flatten(2, 3)
    if not is_exporting():  # one graph for every length
        num_landmarks = min(num_landmarks, keys)  # further ones would have no key
    cells = family.cells(
        rows if call.use_statistics else None,
        key,
        num_landmarks,
        None if query_mask is None else query_mask[:, None].repeat(1, 1, groups),
        None if key_mask is None else key_mask[:, None],
        scale=scale,
    )
    if selection is not None and not window:
        out = bidirectional(selection, shared, asking, key, value, cells, counts, num_landmarks, scale)
        return out.flatten(1, 2)
    if window:
        out = _windowed(shared, asking, key, value, cells, num_landmarks, scale, window, selection)
        return out.flatten(1, 2)
    sizes, *sums = sums_of(cells, num_landmarks, counts.unsqueeze(-1), key, value)
    means = ((own / sizes.clamp(min=1)).to(rows.dtype) for own in sums)
    return attend_counted(rows, *means, counts=sizes.squeeze(-1), scale=scale).view(batch, heads, length, -1)


def _windowed(
    query: Tensor,
    asking: Tensor,
    key: Tensor,
    value: Tensor,
    cells: Tensor,
    number: int,
    scale: float,
    window: int,
    selection: Selection | None,
) -> Tensor:
    """Attends from each block of tokens to its own keys, and to landmarks without them; some heads at a time.

    Queries are `[B, Hk, G, L, d]`, the output too; `asking` are those that select keys.
    """
    length, lead = query.shape[3], query.shape[:2]
    flat = [tensor.flatten(0, 1) for tensor in (query, asking, key, value, cells)]
    if is_exporting():
        out = _blocks(*flat, number=number, scale=scale, window=window, blocks=exported.blocks_of(length, window))
        return exported.first_rows(out, length).unflatten(0, lead)
    window = min(window, length)
    blocks = -(-length // window)
    numbers = _NUMBERS if key.device.type == "cpu" else _NUMBERS_OF_GPU
    together = max(numbers // (blocks * (number + window) * key.shape[3]), 1)
    parts = [tensor.split(together) for tensor in flat]
    options: dict[str, Any] = {"number": number, "scale": scale, "window": window, "blocks": blocks}
    options["selection"] = selection
    outs = [_blocks(*part, **options)[:, :, :length] for part in zip(*parts, strict=True)]
    return torch.cat(outs).unflatten(0, lead)


def _blocks(
    query: Tensor,
    asking: Tensor,
    key: Tensor,
    value: Tensor,
    cells: Tensor,
    *,
    number: int,
    scale: float,
    window: int,
    blocks: int,
    selection: Selection | None = None,
) -> Tensor:
    """Attends block by block: queries `[N, G, L, d]` (twice), keys, values `[N, L, d or dv]`, landmarks `[N, L]`."""
    missing = blocks * window - query.shape[2]

    def cut(tensor: Tensor) -> Tensor:
        return pad(tensor, (0, 0, 0, missing)).unflatten(-2, (-1, window))

    rows = cut(query).transpose(1, 2)  # [N, blocks, G, window, d]
    near_key, near_value = cut(key), cut(value)
    of_keys = cells.masked_fill(cells == number, -1)
    cells = pad(cells, (0, missing), value=number).unflatten(1, (-1, window))
    real = (cells < number).to(torch.promote_types(key.dtype, torch.float32))
    counts, *sums = sums_of(cells, number, real.unsqueeze(-1), near_key, near_value)
    apart = counts.sum(1, keepdim=True) - counts
    far = [(own.sum(1, keepdim=True) - own) / apart.clamp(min=1) for own in sums]
    apart = apart.squeeze(-1)
    if selection is not None:
        groups = (apart, far[0].to(near_key.dtype), far[1].to(near_key.dtype))
        queries = (rows, cut(asking).transpose(1, 2))
        return windowed(selection, queries, groups, (real, near_key, near_value), (key, value, of_keys), scale)
    operands = [torch.cat([f.to(near.dtype), near], 2) for f, near in zip(far, (near_key, near_value), strict=True)]
    out = attend_counted(rows.flatten(2, 3), *operands, counts=torch.cat([apart, real], 2), scale=scale)
    return out.unflatten(2, rows.shape[2:4]).transpose(1, 2).flatten(2, 3)


def _raises_half_precision(query: Tensor) -> bool:
    """Tells whether half precision is raised to float32: on a CPU it is."""
    return query.device.type == "cpu"
