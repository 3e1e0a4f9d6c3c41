"""Causal attention in plain torch, a chunk of tokens at a time; for any device.

Queries are aligned with the last keys: with S keys and L <= S queries, query i sees keys 0 ... S - L + i. Keys before a
chunk enter through a state, those of the chunk through the products of features, masked.

Both are scaled by one anchor per feature: the largest logit among the past keys and the first key of the chunk. All
queries of the chunk see those, so each row has a term of 1 and its normaliser does not underflow. Later keys of the
chunk may exceed the anchor; if any does by more than 2^72 the chunk is cut in two. A chunk of one token is exact.

The backward pass computes features and states again: forward in time for the queries, backward in time for the keys,
whose state gathers the gradients of later queries. It divides nothing: weights are 2^(logit - log normaliser). The
weights of later queries are at most 1 at the anchor of the chunk, since they see its keys too, and anchors rise with
time, so moving that state back to an earlier anchor never overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.eager.common import LN2, LOG2E, Buffer, Inputs, exp2, summarise, write
from favor.kernels.operands import Geometry, Gradients, Operands, Result, sequences

# Products inside a chunk cost its size squared; in smaller chunks, passing the state on costs more.
CHUNK_SIZE, _LONG = 64, 4096
_STEEPEST = 72.0


@dataclass
class _Chunk:
    """One chunk: its queries `start:stop`, its keys from `first` on, and its features of keys.

    Attributes:
        anchor: `[N, 1, M]`.
        weights: 2^(key logits + offset - anchor), `[N, C, M]`.
        top: the largest of their logarithms, `[N, 1, M]`.
    """

    start: int
    stop: int
    first: int
    anchor: Tensor
    weights: Tensor
    top: Tensor

    @property
    def keys(self) -> tuple[int, int]:
        return self.first, self.first + self.stop - self.start


@dataclass
class _State:
    """Sums over past keys, `total` `[N, 1, M]` and `values` `[N, M, dv]`, both times 2^-anchor.

    Attributes:
        top: the largest logit among these keys, `[N, 1, M]`, -inf where there is none.
    """

    anchor: Tensor
    total: Tensor
    values: Tensor
    top: Tensor

    @classmethod
    def before(cls, inputs: Inputs) -> _State:
        """Gives the state of the keys that all queries see."""
        top, total, values = summarise(inputs, inputs.prefix)
        top, total = top.transpose(1, 2), total.transpose(1, 2)
        anchor = (top + inputs.offset).masked_fill(total == 0, -torch.inf)
        return cls(anchor, total, values, anchor)

    def move(self, anchor: Tensor) -> None:
        """Moves the sums to a new, finite anchor, which is no lower unless there is nothing so far."""
        decay = exp2(self.anchor - anchor)
        self.total.mul_(decay)
        self.values.mul_(decay.transpose(1, 2))
        self.anchor = anchor

    def add(self, chunk: _Chunk, values: Tensor) -> None:
        """Adds the keys of a chunk, at whose anchor the sums are, given their values."""
        self.total += chunk.weights.sum(1, keepdim=True)
        self.values.baddbmm_(chunk.weights.transpose(1, 2), values)
        self.top = torch.maximum(self.top, chunk.anchor + chunk.top)


def forward(operands: Operands, geometry: Geometry, chunk_size: int | None = None) -> Result:
    """Computes the attention output and the logarithm of the normaliser, infinite where nothing is visible.

    The last two results are empty: the backward pass computes the states again.
    """
    result = Result.empty("causal", operands, geometry)
    for sequence in sequences(operands, geometry):
        inputs = Inputs.of(sequence)
        out, lse = (tensor[sequence.rows] for tensor in result[:2])
        state, size = _State.before(inputs), chunk_size or _size(inputs)
        project, buffer = inputs.query_directions.transpose(1, 2), Buffer(inputs.key_directions)
        for chunk in _chunks(inputs, state, size):
            values = inputs.keys(inputs.value, *chunk.keys)
            weights = buffer.product(inputs.queries(inputs.query, chunk.start, chunk.stop), project, LOG2E)
            weights += chunk.anchor
            top = weights.amax(2, keepdim=True)
            exp2(weights.sub_(top))
            scores = _lower(weights @ chunk.weights.transpose(1, 2))
            total = scores.sum(2, keepdim=True).add_(weights @ state.total.transpose(1, 2))
            rows = (scores @ values).baddbmm_(weights, state.values)
            unseen = total == 0
            rows /= total.masked_fill(unseen, 1.0)
            top = total.log_().add_(top, alpha=LN2).masked_fill_(unseen, torch.inf)
            span = (chunk.start, chunk.stop)
            write(out, *span, rows)
            write(lse, *span, top)
            state.add(chunk, values)
    return result


def backward(grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool) -> Gradients:
    """Computes gradients of the loss, from that of the output and from what `forward` returned."""
    grads = Gradients.empty(operands, for_directions=for_directions)
    for sequence in sequences(operands, geometry):
        inputs = Inputs.of(sequence)
        rows = (grad[sequence.rows], saved.out[sequence.rows], saved.lse[sequence.rows].unsqueeze(3))
        _backward_keys(inputs, rows, _backward_queries(inputs, rows, grads), grads)
    return grads


def _load(inputs: Inputs, saved: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loads gradients `[N, G C, dv]`, their products with the output, and log normalisers in base 2, `[N, G C, 1]`."""
    grad, out, lse = (inputs.queries(tensor, start, stop) for tensor in saved)
    return grad, (grad * out).sum(2, keepdim=True), lse * LOG2E


def _chunks(inputs: Inputs, state: _State, size: int) -> Iterator[_Chunk]:
    """Yields chunks in order; moves the state to the anchor of each chunk first."""
    length, prefix = inputs.query.shape[2], inputs.prefix
    start, project, buffer = 0, inputs.key_directions.transpose(1, 2), Buffer(inputs.key_directions)
    while start < length:
        stop = min(start + size, length)
        bias = inputs.key_bias[:, prefix + start : prefix + stop]
        logits = buffer.product(inputs.keys(inputs.key, prefix + start, prefix + stop), project, LOG2E)
        logits.add_(bias).add_(inputs.offset)
        anchor = torch.maximum(state.top, logits[:, :1])
        if inputs.hidden is not None:
            # If nothing was seen so far and the first key is hidden, take the first visible one.
            visible = (~inputs.hidden[:, prefix + start : prefix + stop]).to(torch.uint8).argmax(1, keepdim=True)
            first = logits.gather(1, visible.expand(-1, -1, logits.shape[2]))
            anchor = torch.where(anchor == -torch.inf, first, anchor)
            anchor = anchor.masked_fill(anchor == -torch.inf, 0.0)  # nothing to see in this chunk either
        top = logits.sub_(anchor).amax(1, keepdim=True)
        # A steep chunk is cut; later chunks try the full size again.
        while stop - start > 1 and bool(top.amax() > _STEEPEST):
            stop = (start + stop + 1) // 2
            top = logits[:, : stop - start].amax(1, keepdim=True)
        state.move(anchor)
        yield _Chunk(start, stop, prefix + start, anchor, exp2(logits[:, : stop - start], _STEEPEST), top)
        start = stop


def _size(inputs: Inputs) -> int:
    return CHUNK_SIZE if inputs.query.shape[2] < _LONG else 3 * CHUNK_SIZE // 2


def _backward_queries(inputs: Inputs, saved: tuple[Tensor, ...], grads: Gradients) -> list[tuple[int, int, Tensor]]:
    """Writes the gradient of the queries; returns start, end and anchor of each chunk."""
    sequence, anchors, state = inputs.sequence, [], _State.before(inputs)
    dq, project = grads.query[sequence.rows], inputs.query_directions.transpose(1, 2)
    size = _size(inputs)
    first, second, third = (Buffer(inputs.key_directions) for _ in range(3))
    for chunk in _chunks(inputs, state, size):
        start, stop = chunk.start, chunk.stop
        rows, values = inputs.queries(inputs.query, start, stop), inputs.keys(inputs.value, *chunk.keys)
        g, delta, log_total = _load(inputs, saved, start, stop)
        weights = exp2(first.product(rows, project, LOG2E).add_(chunk.anchor).sub_(log_total))
        slopes = second.product(g, state.values.transpose(1, 2)).baddbmm_(delta, state.total, alpha=-1)
        slopes.baddbmm_(_lower((g @ values.transpose(1, 2)).sub_(delta)), chunk.weights)
        slopes *= weights
        write(dq, start, stop, third.product(slopes, inputs.query_directions))
        if grads.offset.numel():
            sequence.accumulate(grads.query_directions, slopes.transpose(1, 2) @ rows)
            sequence.accumulate(grads.offset, slopes.sum(1))
        state.add(chunk, values)
        anchors.append((start, stop, chunk.anchor))
    return anchors


def _backward_keys(
    inputs: Inputs, saved: tuple[Tensor, ...], anchors: list[tuple[int, int, Tensor]], grads: Gradients
) -> None:
    prefix = inputs.prefix
    memory = [Buffer(inputs.key_directions) for _ in range(4)]
    # What later queries send back: sums of their weights, at the anchor of the chunk, times gradient and times delta.
    gathered = inputs.offset.new_zeros(*inputs.key_directions.shape[:2], inputs.value.shape[-1])
    shares = torch.zeros_like(inputs.offset)
    project, above = inputs.query_directions.transpose(1, 2), torch.full_like(shares, torch.inf)
    for start, stop, anchor in reversed(anchors):
        # Anchors rise with time, except over chunks before the first visible key.
        decay, above = exp2(anchor - above), anchor
        gathered.mul_(decay.transpose(1, 2))
        shares.mul_(decay)
        g, delta, log_total = _load(inputs, saved, start, stop)
        queries = inputs.queries(inputs.query, start, stop)
        weights = exp2(memory[0].product(queries, project, LOG2E).add_(anchor).sub_(log_total))
        first, last = prefix + start, prefix + stop
        rows, own = _key_weights(inputs, memory[1], anchor, first, last)
        values = inputs.keys(inputs.value, first, last)
        dv = memory[3].product(own, gathered).baddbmm_(_lower(weights @ own.transpose(1, 2)).transpose(1, 2), g)
        slopes = memory[2].product(values, gathered.transpose(1, 2)).sub_(shares)
        slopes.baddbmm_(_lower((g @ values.transpose(1, 2)).sub_(delta)).transpose(1, 2), weights).mul_(own)
        _store_keys(inputs, memory[3], (first, last), rows, dv, slopes, grads)
        gathered.baddbmm_(weights.transpose(1, 2), g)
        shares.baddbmm_(delta.transpose(1, 2), weights)
    for start, stop in inputs.blocks(inputs.heads, prefix):
        rows, own = _key_weights(inputs, memory[1], above, start, stop)
        values = inputs.keys(inputs.value, start, stop)
        slopes = memory[2].product(values, gathered.transpose(1, 2)).sub_(shares).mul_(own)
        _store_keys(inputs, memory[3], (start, stop), rows, memory[3].product(own, gathered), slopes, grads)


def _key_weights(inputs: Inputs, buffer: Buffer, anchor: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Gives the rows of the keys, and 2^(key logits + offset - anchor) `[N, C, M]`."""
    rows = inputs.keys(inputs.key, start, stop)
    logits = buffer.product(rows, inputs.key_directions.transpose(1, 2), LOG2E)
    logits.add_(inputs.key_bias[:, start:stop]).add_(inputs.offset).sub_(anchor)
    return rows, exp2(logits, _STEEPEST)


def _store_keys(
    inputs: Inputs, buffer: Buffer, span: tuple[int, int], rows: Tensor, dv: Tensor, slopes: Tensor, grads: Gradients
) -> None:
    """Writes the gradients of some keys, given those of their values and of their logits."""
    columns = inputs.sequence.columns
    write(grads.value[columns], *span, dv)
    write(grads.key[columns], *span, buffer.product(slopes, inputs.key_directions))
    write(grads.key_bias[columns], *span, slopes.sum(2))
    if grads.offset.numel():
        inputs.sequence.accumulate(grads.key_directions, slopes.transpose(1, 2) @ rows)


def _lower(scores: Tensor) -> Tensor:
    """Gives the scores `[N, G C, C]` of each query on the keys of its chunk, zero for later keys."""
    scores.unflatten(1, (-1, scores.shape[2])).tril_()
    return scores
