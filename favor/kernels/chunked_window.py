"""Attention that is exact inside blocks of tokens and linear between them, in plain torch; for any device.

The sequence is cut into blocks of `window` tokens. A query weighs the keys of its own block by exp(scale q.k), and
those of the other blocks (of earlier ones if causal) by the estimate exp(query_bias) sum_m exp(q.uq_m + k.uk_m +
offset_m + key_bias), under one normaliser. Each block has its own landmarks, over the keys outside of it: those of the
parts before and after it together, so that nothing is subtracted. A query then takes one softmax over M landmarks and
its block:

    summarise   for every block, log weight and mean value of each feature over the keys outside
    read        softmax over [q.uq_m + log_weight_m, scale q.k_j - query_bias]

In a causal layer with more keys than queries, queries are the last rows; blocks are counted from the first key.

The backward pass mirrors it: what the queries of a block send to its landmarks is gathered per block, and joined for
the keys of each block over all other blocks, by the same sweeps. Blocks come first in the tensors of this file:
`[s, N, ...]` for s blocks and N = batch x key heads, flattened to one dimension for matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from favor.kernels.chunked import Gradients, Inputs, empty_gradients, empty_output
from favor.kernels.sequences import Sequence, sequences

_SPAN = 2**20  # numbers in the logits of the blocks that are worked on together


class States(NamedTuple):
    """Sums over keys times exp(-top), for each block and feature: `[b, N, M, 1]`, `[b, N, M, 1]`, `[b, N, M, w]`.

    Top is -inf where there is nothing.
    """

    top: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def empty(cls, inputs: Inputs, blocks: int, width: int) -> States:
        """States without a key."""
        shape = (blocks, inputs.heads, inputs.to_key.shape[1])
        top = inputs.to_key.new_full((*shape, 1), -torch.inf)
        return cls(top, torch.zeros_like(top), inputs.to_key.new_zeros(*shape, width))

    def add(self, index: int, other: States, own: int) -> None:
        """Adds block `own` of other states to block `index`, in place."""
        top, total, values = (tensor[index] for tensor in self)
        risen = torch.maximum(top, other.top[own])
        base = risen.masked_fill(risen == -torch.inf, 0.0)
        decay, weight = (top - base).exp_(), (other.top[own] - base).exp_()
        total.mul_(decay).addcmul_(other.total[own], weight)
        values.mul_(decay).addcmul_(other.values[own], weight)
        top.copy_(risen)

    def outside(self, *, before: bool, after: bool, values: Tensor | None = None) -> States:
        """For each block the sum over the blocks before it, after it, or both; `values` is memory to use."""
        values = torch.empty_like(self.values) if values is None else values
        result = States(torch.empty_like(self.top), torch.empty_like(self.total), values)
        blocks = range(self.top.shape[0])
        running = States(*(torch.zeros_like(tensor[:1]) for tensor in self))
        running.top.fill_(-torch.inf)
        for block in blocks if before else ():
            for target, tensor in zip(result, running, strict=True):
                target[block] = tensor[0]
            running.add(0, self, block)
        running.top.fill_(-torch.inf)
        running.total.zero_()
        running.values.zero_()
        for block in reversed(blocks) if after else ():
            if before:
                result.add(block, running, 0)
            else:
                for target, tensor in zip(result, running, strict=True):
                    target[block] = tensor[0]
            running.add(0, self, block)
        return result


@dataclass
class _Blocks:
    """A sequence cut into blocks.

    Attributes:
        inputs: the sequence.
        size: tokens of a block.
        prefix: keys before the first query.
        is_causal: whether later blocks, and later keys of the same block, are out of sight.
    """

    inputs: Inputs
    size: int
    prefix: int
    is_causal: bool

    @property
    def number(self) -> int:
        return -(-self.inputs.key.shape[2] // self.size)

    def spans(self, *, of_queries: bool) -> list[tuple[int, int]]:
        """Ranges of blocks to work on together; those before the first query only for keys."""
        inputs, first = self.inputs, self.prefix // self.size if of_queries else 0
        rows = inputs.heads * self.size * (inputs.groups if of_queries else 1)
        step = max(1, _SPAN // (rows * (inputs.to_key.shape[1] + self.size)))
        return [(start, min(start + step, self.number)) for start in range(first, self.number, step)]

    def cut(self, tensor: Tensor, span: tuple[int, int], *, of_queries: bool, fill: float = 0.0) -> Tensor:
        """Rows of `[B, H, L, w]` that lie in these blocks, `[s N, G size, w]`; `fill` where the sequence has none."""
        inputs, shift = self.inputs, self.prefix if of_queries else 0
        start, stop = span[0] * self.size - shift, span[1] * self.size - shift
        rows = tensor[:, :, max(start, 0) : stop].to(inputs.to_query.dtype)
        missing = (max(-start, 0), max(stop - tensor.shape[2], 0))
        if any(missing):
            rows = torch.nn.functional.pad(rows, (0, 0, *missing), value=fill)
        rows = rows.reshape(inputs.heads, -1, span[1] - span[0], self.size, tensor.shape[-1])
        return rows.permute(2, 0, 1, 3, 4).reshape((span[1] - span[0]) * inputs.heads, -1, tensor.shape[-1])

    def keys(self, tensor: Tensor, span: tuple[int, int]) -> Tensor:
        """Rows of keys or values; hidden ones are zeros, whatever they hold."""
        rows = self.cut(tensor, span, of_queries=False)
        hidden = self.hidden(span)
        return rows if hidden is None else rows.masked_fill(hidden, 0.0)

    def bias(self, span: tuple[int, int]) -> Tensor:
        """Bias of the keys `[s N, size, 1]`, -inf past the end."""
        bias = self.inputs.bias.view((*self.inputs.key.shape[:3], 1))
        return self.cut(bias, span, of_queries=False, fill=-torch.inf)

    def hidden(self, span: tuple[int, int]) -> Tensor | None:
        """`[s N, size, 1]`, True for keys out of sight; None if there are none."""
        inside = span[1] * self.size <= self.inputs.key.shape[2]
        return None if self.inputs.hidden is None and inside else self.bias(span) == -torch.inf

    def store(self, target: Tensor, rows: Tensor, span: tuple[int, int], *, of_queries: bool) -> None:
        """Writes `[s N, G size, w]` into `[B, H, L, w]`; the reverse of `cut`."""
        shift = self.prefix if of_queries else 0
        start, stop = span[0] * self.size - shift, span[1] * self.size - shift
        rows = rows.view(span[1] - span[0], self.inputs.heads, -1, self.size, rows.shape[-1]).permute(1, 2, 0, 3, 4)
        rows = rows.reshape(*target.shape[:2], stop - start, target.shape[-1])
        first = max(start, 0)
        target[:, :, first:stop] = rows[:, :, first - start : target.shape[2] - start]

    def per_head(self, tensor: Tensor, span: tuple[int, int]) -> Tensor:
        """`[N, ...]` as `[s N, ...]`, for each block of a span."""
        return tensor.repeat(span[1] - span[0], *(1,) * (tensor.ndim - 1))

    def exact_logits(
        self, rows: Tensor, keys: Tensor, query_bias: Tensor, scale: float, hidden: Tensor | None
    ) -> Tensor:
        """Scale q.k - query_bias, `[s N, G size, size]`, -inf for keys out of sight."""
        logits = torch.baddbmm(query_bias, rows, keys.transpose(1, 2), beta=-1, alpha=scale)
        if hidden is not None:
            logits.masked_fill_(hidden.transpose(1, 2), -torch.inf)
        if self.is_causal:
            later = torch.ones(self.size, self.size, dtype=torch.bool, device=rows.device).triu_(1)
            logits.view(logits.shape[0], -1, self.size, self.size).masked_fill_(later, -torch.inf)
        return logits


def first_block(cu_k: Tensor | None, index: int, window: int) -> int:
    """Where the blocks of a packed sequence begin among those of all; sequence i leaves room for i partial blocks."""
    return 0 if cu_k is None else int(cu_k[index]) // window + index


def empty_landmarks(offset: Tensor, value: Tensor, window: int, cu_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised log weights `[b, B, Hk, M]` and summaries `[b, B, Hk, M, dv]` of the landmarks of every block."""
    number = 1 if cu_k is None else cu_k.shape[0] - 1
    shape = (value.shape[2] // window + number, *value.shape[:2], offset.shape[-1])
    return offset.new_empty(shape), offset.new_empty(*shape, value.shape[-1])


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    query_bias: Tensor,
    window: int,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention output and what the backward pass needs; arguments as in `favor.kernels.linear_attention`.

    Returns:
        output `[B, H, L, dv]`, nothing (the backward pass normalises again), and log weights and summaries of the
        landmarks of every block, see `empty_landmarks`.
    """
    out, landmarks = empty_output(query, value), empty_landmarks(offset, value, window, cu_k)
    operands = (query, key, value, query_directions, key_directions, offset, key_bias, cu_q, cu_k)
    for index, sequence in enumerate(sequences(*operands)):
        inputs, blocks = _cut(sequence, window, is_causal)
        first = first_block(cu_k, index, window)
        weight, summary = (tensor[first : first + blocks.number].flatten(1, 2) for tensor in landmarks)
        _summarise(inputs, blocks, weight, summary)
        own, own_bias = out[sequence.rows], query_bias[sequence.rows].unsqueeze(-1)
        for span in blocks.spans(of_queries=True):
            values = blocks.keys(inputs.value, span)
            to_landmarks, to_keys, _, _ = _weights(inputs, blocks, own_bias, weight, scale, span)
            rows = to_landmarks @ summary[slice(*span)].flatten(0, 1)
            blocks.store(own, rows.baddbmm_(to_keys, values), span, of_queries=True)
    return out, offset.new_empty(0), *landmarks


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    query_bias: Tensor,
    window: int,
    scale: float,
    is_causal: bool,
    out: Tensor,
    lse: Tensor,
    weight: Tensor,
    summary: Tensor,
    for_directions: bool,
) -> tuple[Gradients, Tensor]:
    """Gradients of the loss, from that of the output and from what `forward` returned; last that of `query_bias`."""
    operands = (query, key, value, query_directions, key_directions, offset, key_bias)
    grads, dquery_bias = empty_gradients(*operands, for_directions), torch.empty_like(query_bias)
    for index, sequence in enumerate(sequences(*operands, cu_q, cu_k)):
        inputs, blocks = _cut(sequence, window, is_causal)
        first = first_block(cu_k, index, window)
        own_weight, own_summary = (t[first : first + blocks.number].flatten(1, 2) for t in (weight, summary))
        bias = (query_bias[sequence.rows].unsqueeze(-1), dquery_bias[sequence.rows].unsqueeze(-1))
        if blocks.prefix:  # keys of blocks before the first query get nothing from a block of their own
            grads.key[sequence.columns].zero_()
            grads.value[sequence.columns].zero_()
        here = (grad[sequence.rows], out[sequence.rows])
        sent = _backward_queries(inputs, blocks, *here, *bias, own_weight, own_summary, scale, sequence, grads)
        _backward_keys(inputs, blocks, sent.outside(before=not is_causal, after=True), sequence, grads)
    return grads, dquery_bias


def _cut(sequence: Sequence, window: int, is_causal: bool) -> tuple[Inputs, _Blocks]:
    inputs = Inputs.of(sequence)
    prefix = inputs.key.shape[2] - inputs.query.shape[2] if is_causal else 0
    return inputs, _Blocks(inputs, window, prefix, is_causal)


def _summarise(inputs: Inputs, blocks: _Blocks, weight: Tensor, summary: Tensor) -> None:
    """Writes log weight `[b, N, M]`, -inf without a key, and summary `[b, N, M, dv]` of the keys outside each block."""
    states = States.empty(inputs, blocks.number, inputs.width)
    for span in blocks.spans(of_queries=False):
        rows = blocks.keys(inputs.key, span).transpose(1, 2)
        logits = torch.baddbmm(blocks.bias(span).transpose(1, 2), blocks.per_head(inputs.to_key, span), rows)
        top, total, values = (tensor[slice(*span)].flatten(0, 1) for tensor in states)
        torch.amax(logits, 2, keepdim=True, out=top)
        weights = logits.sub_(top.masked_fill(top == -torch.inf, 0.0)).exp_()
        torch.sum(weights, 2, keepdim=True, out=total)
        torch.bmm(weights, blocks.keys(inputs.value, span), out=values)
    top, total, values = states.outside(before=True, after=not blocks.is_causal, values=summary)
    values.div_(total.masked_fill(total == 0, 1.0))
    torch.add(top + total.log(), inputs.offset.transpose(1, 2), out=weight.unsqueeze(-1))


def _weights(
    inputs: Inputs, blocks: _Blocks, query_bias: Tensor, weight: Tensor, scale: float, span: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the landmarks `[s N, G size, M]` and of own keys `[s N, G size, size]`, then the queries and keys."""
    rows, keys = blocks.cut(inputs.query, span, of_queries=True), blocks.keys(inputs.key, span)
    bias, hidden = blocks.cut(query_bias, span, of_queries=True), blocks.hidden(span)
    project = blocks.per_head(inputs.to_query, span).transpose(1, 2)
    landmarks = torch.baddbmm(weight[slice(*span)].flatten(0, 1).unsqueeze(1), rows, project)
    exact = blocks.exact_logits(rows, keys, bias, scale, hidden)
    top = torch.maximum(landmarks.amax(2, keepdim=True), exact.amax(2, keepdim=True))
    top.masked_fill_(top == -torch.inf, 0.0)
    landmarks.sub_(top).exp_()
    exact.sub_(top).exp_()
    total = landmarks.sum(2, keepdim=True).add_(exact.sum(2, keepdim=True))
    total.masked_fill_(total == 0, 1.0)
    return landmarks.div_(total), exact.div_(total), rows, keys


def _backward_queries(
    inputs: Inputs,
    blocks: _Blocks,
    grad: Tensor,
    out: Tensor,
    query_bias: Tensor,
    dquery_bias: Tensor,
    weight: Tensor,
    summary: Tensor,
    scale: float,
    sequence: Sequence,
    grads: Gradients,
) -> States:
    """Gradients of queries and query bias, and those of keys and values inside the blocks.

    Returns:
        what the landmarks of each block gather, with the negative of their log weight as top.
    """
    sent = States.empty(inputs, blocks.number, inputs.width)
    sent.top.copy_(weight.unsqueeze(-1).neg())
    sent.top.masked_fill_(sent.top == torch.inf, -torch.inf)
    dq, dk, dv = grads.query[sequence.rows], grads.key[sequence.columns], grads.value[sequence.columns]
    for span in blocks.spans(of_queries=True):
        to_landmarks, to_keys, rows, keys = _weights(inputs, blocks, query_bias, weight, scale, span)
        g = blocks.cut(grad, span, of_queries=True)
        delta = (g * blocks.cut(out, span, of_queries=True)).sum(2, keepdim=True)
        _, total, values = (tensor[slice(*span)].flatten(0, 1) for tensor in sent)
        torch.bmm(to_landmarks.transpose(1, 2), g, out=values)
        torch.bmm(to_landmarks.transpose(1, 2), delta, out=total)
        inside = torch.baddbmm(delta, g, blocks.keys(inputs.value, span).transpose(1, 2), beta=-1).mul_(to_keys)
        blocks.store(dv, to_keys.transpose(1, 2) @ g, span, of_queries=False)
        blocks.store(dk, (inside.transpose(1, 2) @ rows).mul_(scale), span, of_queries=False)
        mean = summary[slice(*span)].flatten(0, 1).transpose(1, 2)
        slopes = torch.baddbmm(delta, g, mean, beta=-1).mul_(to_landmarks)
        blocks.store(dquery_bias, slopes.sum(2, keepdim=True), span, of_queries=True)
        directions = blocks.per_head(inputs.to_query, span)
        blocks.store(dq, torch.baddbmm(slopes @ directions, inside, keys, alpha=scale), span, of_queries=True)
        if grads.offset.numel():
            update = (slopes.transpose(1, 2) @ rows).unflatten(0, (-1, inputs.heads)).sum(0)
            sequence.accumulate(grads.query_directions, update)
    return sent


def _backward_keys(inputs: Inputs, blocks: _Blocks, sent: States, sequence: Sequence, grads: Gradients) -> None:
    """Adds the gradients that keys and values get from the queries of other blocks."""
    dk, dv, dbias = (grad[sequence.columns] for grad in (grads.key, grads.value, grads.key_bias))
    for span in blocks.spans(of_queries=False):
        rows, values = blocks.keys(inputs.key, span), blocks.keys(inputs.value, span)
        top, shares, gathered = (tensor[slice(*span)].flatten(0, 1) for tensor in sent)
        directions = blocks.per_head(inputs.to_key, span)
        shift = top.transpose(1, 2) + blocks.per_head(inputs.offset, span)
        weights = torch.baddbmm(shift, rows, directions.transpose(1, 2)).add_(blocks.bias(span)).exp_()
        inside = blocks.cut(dv, span, of_queries=False)
        blocks.store(dv, torch.baddbmm(inside, weights, gathered), span, of_queries=False)
        slopes = (values @ gathered.transpose(1, 2)).sub_(shares.transpose(1, 2)).mul_(weights)
        inside = blocks.cut(dk, span, of_queries=False)
        blocks.store(dk, torch.baddbmm(inside, slopes, directions), span, of_queries=False)
        blocks.store(dbias.unsqueeze(-1), slopes.sum(2, keepdim=True), span, of_queries=False)
        if grads.offset.numel():
            heads = (-1, inputs.heads)
            sequence.accumulate(grads.key_directions, (slopes.transpose(1, 2) @ rows).unflatten(0, heads).sum(0))
            sequence.accumulate(grads.offset, slopes.sum(1).unflatten(0, heads).sum(0))
