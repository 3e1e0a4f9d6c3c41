"""Bidirectional and cross attention in plain torch, a block of tokens at a time; for any device.

Positive random features turn attention into two softmax attentions through M summaries, one per feature:

    summarise   log_weight_m = log sum_j exp(k_j.uk_m + bias_j),  summary_m = mean of v_j with these weights
    read        out_i = mean of summary_m with weights exp(q_i.uq_m + log_weight_m + offset_m)

Both are online in their long direction, so no feature outlives its block. Nothing is added to any normaliser: the
maxima cancel exactly. On a CPU both are PyTorch's own fused attention if it takes the sizes.

The backward pass computes the features again; with p_im the weights of the read, g the gradient of the output and
delta_i = g_i.out_i, the gradient of the query logits is p_im (g_i.summary_m - delta_i). The summaries then gather
r_m = sum_i p_im g_i and e_m = sum_i p_im delta_i, and with a_jm the weights of the summary, that of the key logits is
a_jm (v_j.r_m - e_m).

Inside this file the G query heads of a key head are rows of it, and batch and key heads are one dimension N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from favor.kernels.eager.common import (
    LN2,
    LOG2E,
    SMALLEST_BLOCK,
    Buffer,
    Inputs,
    exp2,
    fused_attention,
    fused_takes,
    summarise,
    vanish,
    write,
)
from favor.kernels.operands import Geometry, Gradients, Operands, Result, Sequence, sequences

_COPIED = 2**20  # numbers copied at a time, if inputs have to be changed first; more if a thread would have no head


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Computes the attention output and what the backward pass needs.

    Returns:
        output `[B, H, L, dv]`, nothing (the backward pass normalises again), logarithm of the weight of each summary
        with its offset `[n, Hk, M]` and summaries `[n, Hk, M, dv]`, n the number of sequences.
    """
    query, value = operands.query, operands.value
    out, lse, weight, summary = Result.empty("bidirectional", operands, geometry)
    for sequence in sequences(operands, geometry):
        if fused_takes(query, value) and sequence.operands.query.shape[2] and sequence.operands.key.shape[2]:
            for part in _prepared(sequence):
                own, given = (part.summaries, part.columns[1]), part.operands
                project = given.key_directions.expand(given.key.shape[0], -1, -1, -1)
                summary[own], log = fused_attention(project, given.key, given.value, given.key_bias.unsqueeze(2))
                weight[own] = log + given.offset
                rows = _fused_read(part.operands, weight[own], summary[own])
                if rows.shape == out.shape and rows.stride() == out.stride() and rows.dtype == out.dtype:
                    out = rows
                else:
                    out[part.rows] = rows
            continue
        inputs = Inputs.of(sequence)
        top, total, means = summarise(inputs, inputs.key.shape[2])
        # Without a visible key everything is zero: a finite weight and a summary of zeros.
        total.masked_fill_(total == 0, 1.0)
        log_weight = ((top + total.log2()).transpose(1, 2) + inputs.offset) * LN2
        _read(inputs, log_weight, means.div_(total), out[sequence.rows])
        weight[sequence.summaries] = log_weight.view(-1, *weight.shape[1:])
        summary[sequence.summaries] = means.view(-1, *summary.shape[1:])
    return Result(out, lse, weight, summary)


def backward(grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool) -> Gradients:
    """Computes gradients of the loss, from that of the output and from what `forward` returned."""
    saved = saved._replace(summary=saved.summary.to(operands.offset.dtype))
    grads = Gradients.empty(operands, for_directions=for_directions)
    buffers = (Buffer(operands.offset), Buffer(operands.offset))
    for sequence in sequences(operands, geometry):
        inputs, own = Inputs.of(sequence), sequence.summaries
        weight, summary = saved.weight[own].flatten(0, 1).unsqueeze(1), saved.summary[own].flatten(0, 1)
        kept = Result(saved.out[sequence.rows], saved.lse, weight, summary)
        gathered, shares = _backward_queries(inputs, buffers, grad[sequence.rows], kept, grads)
        _backward_keys(inputs, buffers, weight, gathered, shares, grads)
    return grads


def _prepared(sequence: Sequence) -> Iterator[Sequence]:
    """Prepares a sequence for the fused kernel: hidden keys and values are zeros, all in the precision of the sums.

    Gives all heads at once if nothing has to be copied, else some at a time. In bfloat16 the kernel would be twice
    as fast on some CPUs, but rounding the directions changes logits as much as rounding queries and keys does.
    """
    given = sequence.operands
    hidden, dtype = given.key_bias == -torch.inf, given.offset.dtype
    any_hidden = bool(hidden.any())
    if not any_hidden and given.query.dtype == dtype:
        yield sequence
        return
    rows = 2 * given.key.shape[2] + given.groups * given.query.shape[2]
    together = max(_COPIED // (rows * given.key.shape[3]), torch.get_num_threads())
    for part in sequence.parts(together):
        query, key, value = (tensor.to(dtype) for tensor in part.operands[:3])
        if any_hidden:
            unseen = (part.operands.key_bias == -torch.inf).unsqueeze(-1)
            key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
        yield replace(part, operands=part.operands._replace(query=query, key=key, value=value))


def _fused_read(operands: Operands, log_weight: Tensor, summary: Tensor) -> Tensor:
    query, directions, groups = operands.query, operands.query_directions, operands.groups
    if groups > 1:
        per_key_head = (directions, summary, log_weight)
        directions, summary, log_weight = (tensor.repeat_interleave(groups, 1) for tensor in per_key_head)
    return fused_attention(query, directions.expand(query.shape[0], -1, -1, -1), summary, log_weight.unsqueeze(2))[0]


def _read(inputs: Inputs, log_weight: Tensor, summary: Tensor, out: Tensor) -> None:
    project, buffer = inputs.query_directions.transpose(1, 2), Buffer(summary)
    for start, stop in inputs.blocks(inputs.heads * inputs.groups, inputs.query.shape[2], SMALLEST_BLOCK // 2):
        weights = buffer.product(inputs.queries(inputs.query, start, stop), project).add_(log_weight)
        vanish(torch.softmax(weights, 2, out=weights))
        write(out, start, stop, weights @ summary)


def _backward_queries(
    inputs: Inputs, buffers: tuple[Buffer, Buffer], grad: Tensor, saved: Result, grads: Gradients
) -> tuple[Tensor, Tensor]:
    """Writes the gradient of the queries; returns what the summaries gather, `[N, M, dv]` and `[N, 1, M]`."""
    sequence, summary = inputs.sequence, saved.summary
    gathered, shares = torch.zeros_like(summary), torch.zeros_like(saved.weight)
    project, back = inputs.query_directions.transpose(1, 2), summary.transpose(1, 2)
    dq, (first, second) = grads.query[sequence.rows], buffers
    for start, stop in inputs.blocks(inputs.heads * inputs.groups, inputs.query.shape[2]):
        rows, g = inputs.queries(inputs.query, start, stop), inputs.queries(grad, start, stop)
        delta = (g * inputs.queries(saved.out, start, stop)).sum(2, keepdim=True)
        weights = first.product(rows, project).add_(saved.weight)
        vanish(torch.softmax(weights, 2, out=weights))
        gathered.baddbmm_(weights.transpose(1, 2), g)
        shares.baddbmm_(delta.transpose(1, 2), weights)
        slopes = second.product(g, back).sub_(delta).mul_(weights)
        write(dq, start, stop, slopes @ inputs.query_directions)
        if grads.offset.numel():
            sequence.accumulate(grads.query_directions, slopes.transpose(1, 2) @ rows)
    return gathered, shares


def _backward_keys(
    inputs: Inputs,
    buffers: tuple[Buffer, Buffer],
    log_weight: Tensor,
    gathered: Tensor,
    shares: Tensor,
    grads: Gradients,
) -> None:
    """Writes the gradients of keys, values and key biases, from what the summaries gathered."""
    sequence, project, back = inputs.sequence, inputs.key_directions.transpose(1, 2), gathered.transpose(1, 2)
    shift, ones = inputs.offset - log_weight * LOG2E, torch.ones_like(shares).transpose(1, 2)
    dk, dv, dbias = (grad[sequence.columns] for grad in (grads.key, grads.value, grads.key_bias))
    first, second = buffers
    for start, stop in inputs.blocks(inputs.heads, inputs.key.shape[2]):
        rows, values = inputs.keys(inputs.key, start, stop), inputs.keys(inputs.value, start, stop)
        weights = exp2(first.product(rows, project, LOG2E).add_(shift).add_(inputs.key_bias[:, start:stop]))
        write(dv, start, stop, weights @ gathered)
        slopes = second.product(values, back).sub_(shares).mul_(weights)
        write(dk, start, stop, slopes @ inputs.key_directions)
        write(dbias, start, stop, slopes @ ones)
        if grads.offset.numel():
            sequence.accumulate(grads.key_directions, slopes.transpose(1, 2) @ rows)
            sequence.accumulate(grads.offset, slopes.sum(1))
