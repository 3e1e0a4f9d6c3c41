"""Linear attention from its definition, over all pairs of tokens: the truth that tests and benchmarks compare with.

A query i and a key j that it sees have the weight

    w_ij = sum_m exp(q_i.uq_m + k_j.uk_m + offset_m + key_bias_j)    without a window, or in another block
    w_ij = exp(scale q_i.k_j)                                        inside a block of the window

and, if there is a window, those of other blocks are multiplied by exp(query_bias_i). The output is

    out_i = sum_j w_ij v_j / sum_j w_ij,    0 if the query sees no key.

A key with a bias of -inf is never seen. Causal queries are those of the last keys: query i sees keys 0 ... S - L + i.
Memory and time are quadratic in the length. Sums have the type of the inputs; float64 gives the truth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from favor.kernels.operands import Geometry, GeometryOptions, Operands


def naive_linear_attention(
    *operands: Tensor, query_bias: Tensor | None = None, **geometry: Unpack[GeometryOptions]
) -> Tensor:
    """Computes `favor.kernels.linear_attention` from its definition.

    Args:
        operands: query, key, value, query_directions, key_directions, offset, key_bias as in `linear_attention`, all of
            one type.
        query_bias: as in `linear_attention`.
        geometry: is_causal, cu_seqlens_q, cu_seqlens_k, window and scale as in `linear_attention`.

    Returns:
        `[B, H, L, dv]`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for a window that does not fit the inputs.
    """
    given, form = Operands._make((*operands, query_bias)), Geometry.of(operands[0], operands[1], query_bias, **geometry)
    if form.cu_q is None or form.cu_k is None:
        return _attention(given, form)
    rows, columns = form.cu_q.diff().tolist(), form.cu_k.diff().tolist()
    own = [given.query.split(rows, 2), *(t.split(columns, 2) for t in (given.key, given.value, given.key_bias))]
    biases = [None] * len(rows) if query_bias is None else query_bias.split(rows, 2)
    outs = []
    for index, (query, key, value, key_bias, bias) in enumerate(zip(*own, biases, strict=True)):
        directions = (t if t.shape[0] == 1 else t[index : index + 1] for t in operands[3:6])
        outs.append(_attention(Operands._make((query, key, value, *directions, key_bias, bias)), form))
    return torch.cat(outs, 2)


def _attention(given: Operands, form: Geometry) -> Tensor:
    """Computes attention of one sequence, or of a batch of equally long ones."""
    query, length, keys = given.query, given.query.shape[2], given.key.shape[2]
    if not keys:
        return (query * 0) @ query.new_zeros(query.shape[-1], given.value.shape[-1])
    per_head = (tensor.repeat_interleave(given.groups, 1) for tensor in given[1:7])
    key, value, query_directions, key_directions, offset, key_bias = per_head
    hidden = key_bias.isneginf().unsqueeze(-1)
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    rows = torch.arange(keys - length, keys, device=query.device)[:, None]
    columns = torch.arange(keys, device=query.device)
    visible = ~hidden.mT & (columns <= rows) if form.is_causal else ~hidden.mT
    log_key = (key @ key_directions.mT + offset.unsqueeze(-2) + key_bias.unsqueeze(-1)).masked_fill(hidden, -torch.inf)
    # The largest key of each feature, and then the largest feature of each query, have a logarithm of 0.
    top = log_key.detach().amax(-2, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0)
    log_query = query @ query_directions.mT + top
    peak = log_query.detach().amax(-1, keepdim=True)
    weights = (log_query - peak).exp() @ (log_key - top).exp().mT
    if form.window and given.query_bias is not None:
        inside = rows // form.window == columns // form.window
        estimate = weights.masked_fill(inside | ~visible, 1).log() + peak + given.query_bias.unsqueeze(-1)
        logits = torch.where(inside, form.scale * query @ key.mT, estimate).masked_fill(~visible, -torch.inf)
        weights = (logits - logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0)).exp()
    weights = weights * visible
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1) @ value
