"""Bidirectional and cross attention in plain torch, a block of tokens at a time; for any device.

Positive random features turn attention into two softmax attentions through M landmarks, the features:

    summarise   log_weight_m = log sum_j exp(k_j.uk_m + bias_j),  summary_m = mean of v_j with these weights
    read        out_i = mean of summary_m with weights exp(q_i.uq_m + log_weight_m + offset_m)

Both are online in their long direction, so no feature outlives its block. Nothing is added to any normaliser: the
maxima cancel exactly. On a CPU the two are PyTorch's own fused attention where that takes the sizes, see
`favor.kernels.eager.fused`.

The backward pass computes the features again; with p_im the weights of the read, g the gradient of the output and
delta_i = g_i.out_i, the gradient of the query logits is p_im (g_i.summary_m - delta_i). The landmarks then gather
r_m = sum_i p_im g_i and e_m = sum_i p_im delta_i, and with a_jm the weights of the summary, that of the key logits is
a_jm (v_j.r_m - e_m).

Inside this file the G query heads of a key head are rows of it, and batch and key heads are one dimension N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.eager import fused
from favor.kernels.operands import Geometry, Gradients, Operands, Result, Sequence, sequences

# Numbers in one block of features: it should stay in cache, and be small beside the tensors it is made from; but a
# block costs some twenty calls, however small it is.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 2**19, 2**20

LOG2E, LN2 = 1 / math.log(2), math.log(2)


class Buffer:
    """Memory for one product, used again for the next; fresh pages each time cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def product(self, rows: Tensor, columns: Tensor, factor: float = 1.0) -> Tensor:
        """Rows `[N, R, w]` x columns `[N, w, C]` x a factor; valid until the next product."""
        shape = (rows.shape[0], rows.shape[1], columns.shape[2])
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = rows.new_empty(size)
        out = self._memory[:size].view(shape)
        return torch.baddbmm(out, rows, columns, beta=0.0, alpha=factor, out=out)


def exp2(logits: Tensor) -> Tensor:
    """2^logits, in place, for `logits` relative to a term of the same sum.

    On a CPU, natural exponents below the normal numbers take up to 200 times as long (exp of MKL), and products with
    subnormal numbers 100 times. So this is base 2, and what is too small to count is 0.
    """
    return vanish(logits.exp2_())


def vanish(weights: Tensor) -> Tensor:
    """Puts 0, in place, where a weight is below 2^-100 (float32) or 2^-996 (float64)."""
    return torch.threshold_(weights, 2.0**26 * torch.finfo(weights.dtype).tiny, 0.0)


@dataclass
class Inputs:
    """One sequence, or one batch of equally long ones, as the loops need it.

    Attributes:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        to_query, to_key: directions `[N, M, d]`; offset: `[N, 1, M]`; bias: `[N, S, 1]`; the last two in base 2.
        hidden: `[N, S, 1]`, True for keys with a bias of -inf; None if there are none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    to_query: Tensor
    to_key: Tensor
    offset: Tensor
    bias: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, sequence: Sequence) -> Inputs:
        """The inputs of a sequence or batch; reads the bias once, to see whether any key is hidden."""
        batch, key_heads = sequence.key.shape[:2]

        def per_head(tensor: Tensor) -> Tensor:
            return tensor.expand(batch, *tensor.shape[1:]).flatten(0, 1)

        bias = sequence.key_bias.reshape(batch * key_heads, -1, 1) * LOG2E
        hidden = bias == -torch.inf
        return cls(
            sequence.query,
            sequence.key,
            sequence.value,
            per_head(sequence.query_directions),
            per_head(sequence.key_directions),
            per_head(sequence.offset).unsqueeze(1) * LOG2E,
            bias,
            hidden if bool(hidden.any()) else None,
        )

    @property
    def heads(self) -> int:
        """N, batch times key heads."""
        return self.to_key.shape[0]

    @property
    def groups(self) -> int:
        """G, query heads of a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def width(self) -> int:
        """Width of the values."""
        return self.value.shape[-1]

    def queries(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a tensor `[B, H, L, w]` as `[N, G (stop - start), w]`, in the type of the directions."""
        rows = tensor[:, :, start:stop].to(self.to_query.dtype)
        return rows.reshape(self.heads, -1, tensor.shape[-1])

    def keys(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a tensor `[B, Hk, S, w]` as `[N, stop - start, w]`; hidden ones are zeros, whatever they hold."""
        rows = tensor[:, :, start:stop].to(self.to_key.dtype).reshape(self.heads, -1, tensor.shape[-1])
        return rows if self.hidden is None else rows.masked_fill(self.hidden[:, start:stop], 0.0)

    def blocks(self, rows: int, length: int, smallest: int = _SMALLEST_BLOCK) -> list[tuple[int, int]]:
        """Ranges that cover `length` tokens; each token has `rows` rows of features."""
        budget = min(max(rows * length * self.to_query.shape[-1] // 8, smallest), _LARGEST_BLOCK)
        size = max(64, budget // (rows * self.to_key.shape[1]) // 64 * 64)
        return [(start, min(start + size, length)) for start in range(0, length, size)]


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Attention output and what the backward pass needs.

    Returns:
        output `[B, H, L, dv]`, nothing (the backward pass normalises again), logarithm of the weight of each landmark
        with its offset `[n, Hk, M]` and summary `[n, Hk, M, dv]`, n the number of sequences.
    """
    query, value, offset = operands.query, operands.value, operands.offset
    weight = offset.new_empty(geometry.sequences(query.shape[0]), *offset.shape[1:])
    summary = offset.new_empty(*weight.shape, value.shape[3])
    out = empty_output(query, value)
    for sequence in sequences(operands, geometry):
        if fused.usable(query, value) and sequence.query.shape[2] and sequence.key.shape[2]:
            for part in fused.prepared(sequence):
                own = (part.landmarks, part.columns[1])
                weight[own], summary[own] = fused.summarise(part)
                rows = fused.read(part, weight[own], summary[own])
                if rows.shape == out.shape and rows.stride() == out.stride() and rows.dtype == out.dtype:
                    out = rows
                else:
                    out[part.rows] = rows
            continue
        inputs = Inputs.of(sequence)
        log_weight, means = _landmarks(inputs)
        _read(inputs, log_weight, means, out[sequence.rows])
        weight[sequence.landmarks] = log_weight.view(-1, *weight.shape[1:])
        summary[sequence.landmarks] = means.view(-1, *summary.shape[1:])
    return Result(out, offset.new_empty(0), weight, summary)


def backward(grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool) -> Gradients:
    """Gradients of the loss, from that of the output and from what `forward` returned."""
    grads = empty_gradients(operands, for_directions=for_directions)
    buffers = (Buffer(operands.offset), Buffer(operands.offset))
    for sequence in sequences(operands, geometry):
        inputs = Inputs.of(sequence)
        landmarks = sequence.landmarks
        log_weight, state = saved.weight[landmarks].flatten(0, 1).unsqueeze(1), saved.summary[landmarks].flatten(0, 1)
        here = (grad[sequence.rows], saved.out[sequence.rows])
        gathered, shares = _backward_queries(inputs, buffers, *here, log_weight, state, sequence, grads)
        _backward_keys(inputs, buffers, log_weight, gathered, shares, sequence, grads)
    return grads


def summarise(inputs: Inputs, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Landmarks over the keys before `stop`.

    Returns:
        maximum of the key logits in base 2 `[N, M, 1]` (0 if there is no visible key), sum of 2^(logit - maximum)
        `[N, M, 1]`, and the same sum of values `[N, M, dv]`.
    """
    n, features = inputs.to_key.shape[:2]
    # Finite where nothing is visible yet: 2^(-inf - top) is 0 there.
    top = inputs.to_key.new_full((n, features, 1), torch.finfo(inputs.to_key.dtype).min)
    total, buffer = torch.zeros_like(top), Buffer(top)
    state = inputs.to_key.new_zeros(n, features, inputs.width)
    for start, end in inputs.blocks(n, stop):
        columns, bias = inputs.keys(inputs.key, start, end).transpose(1, 2), inputs.bias[:, start:end].transpose(1, 2)
        weights = buffer.product(inputs.to_key, columns, LOG2E).add_(bias)
        risen = torch.maximum(top, weights.amax(2, keepdim=True))
        decay = exp2(top - risen)
        total.mul_(decay).add_(exp2(weights.sub_(risen)).sum(2, keepdim=True))
        state.mul_(decay).baddbmm_(weights, inputs.keys(inputs.value, start, end))
        top = risen
    return top.masked_fill_(total == 0, 0.0), total, state


def _landmarks(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Log weight `[N, 1, M]` and summary `[N, M, dv]` of the landmarks."""
    top, total, state = summarise(inputs, inputs.key.shape[2])
    # Without a visible key everything is zero: a finite weight and a summary of zeros.
    total.masked_fill_(total == 0, 1.0)
    return ((top + total.log2()).transpose(1, 2) + inputs.offset) * LN2, state.div_(total)


def _read(inputs: Inputs, log_weight: Tensor, summary: Tensor, out: Tensor) -> None:
    """Writes the output."""
    project, buffer = inputs.to_query.transpose(1, 2), Buffer(summary)
    for start, stop in inputs.blocks(inputs.heads * inputs.groups, inputs.query.shape[2], _SMALLEST_BLOCK // 2):
        weights = buffer.product(inputs.queries(inputs.query, start, stop), project).add_(log_weight)
        vanish(torch.softmax(weights, 2, out=weights))
        write(out, start, stop, weights @ summary)


def _backward_queries(
    inputs: Inputs,
    buffers: tuple[Buffer, Buffer],
    grad: Tensor,
    out: Tensor,
    log_weight: Tensor,
    summary: Tensor,
    sequence: Sequence,
    grads: Gradients,
) -> tuple[Tensor, Tensor]:
    """Gradient of the queries; returns what the landmarks gather, `[N, M, dv]` and `[N, 1, M]`."""
    gathered, shares = torch.zeros_like(summary), torch.zeros_like(log_weight)
    project, back = inputs.to_query.transpose(1, 2), summary.transpose(1, 2)
    dq, (first, second) = grads.query[sequence.rows], buffers
    for start, stop in inputs.blocks(inputs.heads * inputs.groups, inputs.query.shape[2]):
        rows, g = inputs.queries(inputs.query, start, stop), inputs.queries(grad, start, stop)
        delta = (g * inputs.queries(out, start, stop)).sum(2, keepdim=True)
        weights = first.product(rows, project).add_(log_weight)
        vanish(torch.softmax(weights, 2, out=weights))
        gathered.baddbmm_(weights.transpose(1, 2), g)
        shares.baddbmm_(delta.transpose(1, 2), weights)
        slopes = second.product(g, back).sub_(delta).mul_(weights)
        write(dq, start, stop, slopes @ inputs.to_query)
        if grads.offset.numel():
            sequence.accumulate(grads.query_directions, slopes.transpose(1, 2) @ rows)
    return gathered, shares


def _backward_keys(
    inputs: Inputs,
    buffers: tuple[Buffer, Buffer],
    log_weight: Tensor,
    gathered: Tensor,
    shares: Tensor,
    sequence: Sequence,
    grads: Gradients,
) -> None:
    project, back = inputs.to_key.transpose(1, 2), gathered.transpose(1, 2)
    shift, ones = inputs.offset - log_weight * LOG2E, torch.ones_like(shares).transpose(1, 2)
    dk, dv, dbias = (grad[sequence.columns] for grad in (grads.key, grads.value, grads.key_bias))
    first, second = buffers
    for start, stop in inputs.blocks(inputs.heads, inputs.key.shape[2]):
        rows, values = inputs.keys(inputs.key, start, stop), inputs.keys(inputs.value, start, stop)
        weights = exp2(first.product(rows, project, LOG2E).add_(shift).add_(inputs.bias[:, start:stop]))
        write(dv, start, stop, weights @ gathered)
        slopes = second.product(values, back).sub_(shares).mul_(weights)
        write(dk, start, stop, slopes @ inputs.to_key)
        write(dbias, start, stop, slopes @ ones)
        if grads.offset.numel():
            sequence.accumulate(grads.key_directions, slopes.transpose(1, 2) @ rows)
            sequence.accumulate(grads.offset, slopes.sum(1))


def write(target: Tensor, start: int, stop: int, rows: Tensor) -> None:
    """Writes rows of a block, `[N, G (stop - start), ...]`, into a tensor `[B, H, L, ...]`."""
    block = target[:, :, start:stop]
    block.copy_(rows.view_as(block))


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Uninitialised `[B, H, L, dv]`; in memory `[B, L, H, dv]` if the queries are, which is how models join heads."""
    batch, heads, length = query.shape[:3]
    if query.is_contiguous():
        return query.new_empty(batch, heads, length, value.shape[-1])
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)


def empty_gradients(operands: Operands, *, for_directions: bool) -> Gradients:
    """Where a backward pass writes (queries, keys, values, biases) and adds up (directions and offsets)."""
    query, key, value, *directions, key_bias, query_bias = operands
    nothing = operands.offset.new_empty(0)
    written = (torch.empty_like(tensor) for tensor in (query, key, value, key_bias))
    added = (torch.zeros_like(tensor) if for_directions else torch.empty_like(nothing) for tensor in directions)
    return Gradients._make((*written, *added, nothing if query_bias is None else torch.empty_like(query_bias)))
