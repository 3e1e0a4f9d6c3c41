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

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.chunked import Gradients, Inputs, empty_gradients, empty_output
from favor.kernels.chunked_window_states import States
from favor.kernels.sequences import Sequence, sequences

_SPAN = 2**20  # numbers in the logits of the blocks that are worked on together


class _Memory:
    """Memory for one product at a time, used again for the next; fresh pages each time cost more than arithmetic."""

    def __init__(self, inputs: Inputs) -> None:
        self._flat = inputs.to_key.new_empty(0)

    def product(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Rows `[n, R, w]` x columns `[n, w, C]`; valid until the next product."""
        shape = (rows.shape[0], rows.shape[1], columns.shape[2])
        if self._flat.numel() < math.prod(shape):
            self._flat = rows.new_empty(math.prod(shape))
        return torch.bmm(rows, columns, out=self._flat[: math.prod(shape)].view(shape))


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

    def load(self, target: Tensor, tensor: Tensor, span: tuple[int, int], *, of_queries: bool) -> Tensor:
        """Copies rows of `[B, H, L, w]` that lie in these blocks into `[s N, G size, w]`, zeros past the ends."""
        shift = self.prefix if of_queries else 0
        start, stop = span[0] * self.size - shift, span[1] * self.size - shift
        rows = tensor[:, :, max(start, 0) : stop]
        missing = (max(-start, 0), max(stop - tensor.shape[2], 0))
        if any(missing):
            rows = torch.nn.functional.pad(rows, (0, 0, *missing))
        number, (batch, heads) = span[1] - span[0], self.inputs.key.shape[:2]
        rows = rows.unflatten(2, (number, self.size)).unflatten(1, (heads, -1)).permute(3, 0, 1, 2, 4, 5)
        target.unflatten(0, (number, batch, heads)).unflatten(3, (-1, self.size)).copy_(rows)
        return target

    def cut(self, tensor: Tensor, span: tuple[int, int], *, of_queries: bool) -> Tensor:
        """The same rows in memory of their own."""
        rows = self.size * tensor.shape[1] // self.inputs.key.shape[1]
        shape = ((span[1] - span[0]) * self.inputs.heads, rows, tensor.shape[3])
        return self.load(self.inputs.to_query.new_empty(shape), tensor, span, of_queries=of_queries)

    def load_keys(self, target: Tensor, tensor: Tensor, span: tuple[int, int]) -> Tensor:
        """Copies rows of keys or values; hidden ones are zeros, whatever they hold."""
        self.load(target, tensor, span, of_queries=False)
        hidden = self.hidden(span)
        return target if hidden is None else target.masked_fill_(hidden, 0.0)

    def load_bias(self, target: Tensor, span: tuple[int, int]) -> None:
        """Copies the bias of the keys into `[s N, size, 1]`, -inf past the end."""
        self.load(target, self.inputs.bias.view(*self.inputs.key.shape[:3], 1), span, of_queries=False)
        hidden = self.hidden(span)
        if hidden is not None:
            target.masked_fill_(hidden, -torch.inf)

    def hidden(self, span: tuple[int, int]) -> Tensor | None:
        """`[s N, size, 1]`, True for keys out of sight; None if there are none."""
        if self.inputs.hidden is None and span[1] * self.size <= self.inputs.key.shape[2]:
            return None
        bias = self.inputs.bias
        visible = torch.ones_like(bias) if self.inputs.hidden is None else (~self.inputs.hidden).to(bias.dtype)
        return self.cut(visible.view(*self.inputs.key.shape[:3], 1), span, of_queries=False) == 0

    def store(self, target: Tensor, rows: Tensor, span: tuple[int, int], *, of_queries: bool) -> None:
        """Writes `[s N, G size, w]` into `[B, H, L, w]`; the reverse of `cut`."""
        shift = self.prefix if of_queries else 0
        start, stop = span[0] * self.size - shift, span[1] * self.size - shift
        rows = rows.reshape(span[1] - span[0], self.inputs.heads, -1, self.size, rows.shape[-1]).permute(1, 2, 0, 3, 4)
        rows = rows.reshape(*target.shape[:2], stop - start, target.shape[-1])
        first = max(start, 0)
        target[:, :, first:stop] = rows[:, :, first - start : target.shape[2] - start]

    def buffer(self, rows: int, width: int, *, of_queries: bool = False) -> Tensor:
        """Uninitialised `[s N, rows, width]` for the longest span."""
        longest = max((stop - start for start, stop in self.spans(of_queries=of_queries)), default=0)
        return self.inputs.to_key.new_empty(longest * self.inputs.heads, rows, width)

    def repeated(self, target: Tensor, per_head: Tensor) -> None:
        """Copies `[N, ...]` into `[s N, ...]`, for each block of a span."""
        target.unflatten(0, (-1, self.inputs.heads)).copy_(per_head)

    def hide(self, logits: Tensor) -> None:
        """Puts -inf where a query of a causal layer would see a later key of its block, `[s N, G size, size]`."""
        if self.is_causal:
            later = torch.ones(self.size, self.size, dtype=torch.bool, device=logits.device).triu_(1)
            logits.unflatten(1, (-1, self.size)).masked_fill_(later, -torch.inf)


class _Reader:
    """Reads, for the queries of a span of blocks, M landmarks and the `size` keys of their block, side by side.

    Query bias and log weights are two more columns of the factors of one product, which then needs no further pass.

    Attributes:
        rows: queries `[s N, G size, d + 2]`, with a column of ones and the query bias.
        targets: directions and scaled keys `[s N, M + size, d + 2]`, with log weights (or 0, -inf) and 0 (or -1).
        values: `[s N, size, dv]`.
        features: M.
    """

    def __init__(
        self, inputs: Inputs, blocks: _Blocks, query_bias: Tensor, landmarks: tuple[Tensor, Tensor], scale: float
    ) -> None:
        (self.features, self.dim), size = inputs.to_query.shape[1:], blocks.size
        self.inputs, self.blocks, self.query_bias, self.scale = inputs, blocks, query_bias, scale
        self.weight, self.summary = landmarks
        self._memory, self._values = _Memory(inputs), blocks.buffer(size, inputs.width, of_queries=True)
        self._rows = blocks.buffer(inputs.groups * size, self.dim + 2, of_queries=True)
        self._rows[:, :, self.dim] = 1.0
        self._targets = blocks.buffer(self.features + size, self.dim + 2, of_queries=True)
        blocks.repeated(self._targets[:, : self.features, : self.dim], inputs.to_query)
        self._targets[:, : self.features, -1], self._targets[:, self.features :, -1] = 0.0, -1.0

    def read(self, span: tuple[int, int]) -> Tensor:
        """Attention weights `[s N, G size, M + size]`; they and the attributes are valid until the next reading."""
        blocks, features, dim = self.blocks, self.features, self.dim
        number = (span[1] - span[0]) * self.inputs.heads
        self.rows, self.targets = self._rows[:number], self._targets[:number]
        blocks.load(self.rows[:, :, :dim], self.inputs.query, span, of_queries=True)
        blocks.load(self.rows[:, :, dim + 1 :], self.query_bias, span, of_queries=True)
        blocks.load_keys(self.targets[:, features:, :dim], self.inputs.key, span).mul_(self.scale)
        self.targets[:, :features, dim] = self.weight[slice(*span)].flatten(0, 1)
        self.targets[:, features:, dim], hidden = 0.0, blocks.hidden(span)
        if hidden is not None:
            self.targets[:, features:, dim].masked_fill_(hidden[..., 0], -torch.inf)
        self.values = blocks.load_keys(self._values[:number], self.inputs.value, span)
        logits = self._memory.product(self.rows, self.targets.transpose(1, 2))
        blocks.hide(logits[:, :, features:])
        dead = None if hidden is None else (logits == -torch.inf).all(-1, keepdim=True)  # queries that see nothing
        torch.softmax(logits, -1, out=logits)
        return logits if dead is None else logits.masked_fill_(dead, 0.0)

    def means(self, span: tuple[int, int]) -> Tensor:
        """Means of the values of the landmarks, `[s N, M, dv]`."""
        return self.summary[slice(*span)].flatten(0, 1)


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
        reader, memory = _Reader(inputs, blocks, own_bias, (weight, summary), scale), _Memory(inputs)
        for span in blocks.spans(of_queries=True):
            weights = reader.read(span)
            rows = memory.product(weights[:, :, : reader.features], reader.means(span))
            rows.baddbmm_(weights[:, :, reader.features :], reader.values)
            blocks.store(own, rows, span, of_queries=True)
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
    states, memory = States.uninitialised(inputs, blocks.number), _Memory(inputs)
    (features, dim), size = inputs.to_key.shape[1:], blocks.size
    left, right = blocks.buffer(features, dim + 1), blocks.buffer(size, dim + 1)
    blocks.repeated(left[:, :, :dim], inputs.to_key)
    left[:, :, dim] = 1.0
    own = blocks.buffer(size, inputs.width)
    for span in blocks.spans(of_queries=False):
        number = (span[1] - span[0]) * inputs.heads
        blocks.load_keys(right[:number, :, :dim], inputs.key, span)
        blocks.load_bias(right[:number, :, dim:], span)
        weights = memory.product(left[:number], right[:number].transpose(1, 2))
        top, total, values = (tensor[slice(*span)].flatten(0, 1) for tensor in states)
        torch.amax(weights, 2, keepdim=True, out=top)
        weights.sub_(top.masked_fill(top == -torch.inf, 0.0)).exp_()
        torch.sum(weights, 2, keepdim=True, out=total)
        torch.bmm(weights, blocks.load_keys(own[:number], inputs.value, span), out=values)
    top, total, values = states.outside(before=True, after=not blocks.is_causal, values=summary)
    values.div_(total.masked_fill(total == 0, 1.0))
    torch.add(top + total.log(), inputs.offset.transpose(1, 2), out=weight.unsqueeze(-1))


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
    sent = States.uninitialised(inputs, blocks.number)
    torch.neg(weight.unsqueeze(-1), out=sent.top)
    sent.top.masked_fill_(sent.top == torch.inf, -torch.inf)
    unread = blocks.prefix // blocks.size  # blocks before the first query
    sent.total[:unread], sent.values[:unread] = 0.0, 0.0
    dq, dk, dv = grads.query[sequence.rows], grads.key[sequence.columns], grads.value[sequence.columns]
    reader, memory = _Reader(inputs, blocks, query_bias, (weight, summary), scale), _Memory(inputs)
    features, dim = reader.features, reader.dim
    for span in blocks.spans(of_queries=True):
        weights, g = reader.read(span), blocks.cut(grad, span, of_queries=True)
        to_landmarks, to_keys = weights[:, :, :features], weights[:, :, features:]
        delta = (g * blocks.cut(out, span, of_queries=True)).sum(2, keepdim=True)
        _, total, values = (tensor[slice(*span)].flatten(0, 1) for tensor in sent)
        torch.bmm(to_landmarks.transpose(1, 2), g, out=values)
        torch.bmm(to_landmarks.transpose(1, 2), delta, out=total)
        blocks.store(dv, to_keys.transpose(1, 2) @ g, span, of_queries=False)
        targets = torch.cat((reader.means(span), reader.values), dim=1).transpose(1, 2)
        slopes = memory.product(g, targets).sub_(delta).mul_(weights)
        blocks.store(dq, slopes @ reader.targets[:, :, :dim], span, of_queries=True)
        outside, inside, rows = slopes[:, :, :features], slopes[:, :, features:], reader.rows[:, :, :dim]
        blocks.store(dk, (inside.transpose(1, 2) @ rows).mul_(scale), span, of_queries=False)
        blocks.store(dquery_bias, outside.sum(2, keepdim=True), span, of_queries=True)
        if grads.offset.numel():
            update = (outside.transpose(1, 2) @ rows).unflatten(0, (-1, inputs.heads)).sum(0)
            sequence.accumulate(grads.query_directions, update)
    return sent


def _backward_keys(inputs: Inputs, blocks: _Blocks, sent: States, sequence: Sequence, grads: Gradients) -> None:
    """Adds the gradients that keys and values get from the queries of other blocks."""
    dk, dv, dbias = (grad[sequence.columns] for grad in (grads.key, grads.value, grads.key_bias))
    first, second, (features, dim), size = _Memory(inputs), _Memory(inputs), inputs.to_key.shape[1:], blocks.size
    left, right = blocks.buffer(size, dim + 2), blocks.buffer(features, dim + 2)
    blocks.repeated(right[:, :, :dim], inputs.to_key)
    left[:, :, dim], right[:, :, dim + 1] = 1.0, 1.0
    own = blocks.buffer(size, inputs.width)
    for span in blocks.spans(of_queries=False):
        number = (span[1] - span[0]) * inputs.heads
        top, shares, gathered = (tensor[slice(*span)].flatten(0, 1) for tensor in sent)
        rows = blocks.load_keys(left[:number, :, :dim], inputs.key, span)
        blocks.load_bias(left[:number, :, dim + 1 :], span)
        values, directions = blocks.load_keys(own[:number], inputs.value, span), right[:number, :, :dim]
        blocks.repeated(right[:number, :, dim : dim + 1], inputs.offset.transpose(1, 2))
        right[:number, :, dim : dim + 1] += top
        weights = first.product(left[:number], right[:number].transpose(1, 2)).exp_()
        inside = blocks.cut(dv, span, of_queries=False)
        blocks.store(dv, inside.baddbmm_(weights, gathered), span, of_queries=False)
        slopes = second.product(values, gathered.transpose(1, 2)).sub_(shares.transpose(1, 2)).mul_(weights)
        inside = blocks.cut(dk, span, of_queries=False)
        blocks.store(dk, inside.baddbmm_(slopes, directions), span, of_queries=False)
        blocks.store(dbias.unsqueeze(-1), slopes.sum(2, keepdim=True), span, of_queries=False)
        if grads.offset.numel():
            heads = (-1, inputs.heads)
            sequence.accumulate(grads.key_directions, (slopes.transpose(1, 2) @ rows).unflatten(0, heads).sum(0))
            sequence.accumulate(grads.offset, slopes.sum(1).unflatten(0, heads).sum(0))
