"""Attention that is exact inside blocks of tokens and linear between them, in plain torch; for any device.

The sequence is cut into blocks of `window` tokens. A query weighs the keys of its own block by exp(scale q.k), and
those of the other blocks (of earlier ones if causal) by the estimate exp(query_bias) sum_m exp(q.uq_m + k.uk_m +
offset_m + key_bias), under one normaliser. Each block has its own landmarks, over the keys outside of it: those of the
parts before and after it together, so that nothing is subtracted. A query then takes one softmax over M landmarks and
its block:

    summarise   for every block, log weight and mean value of each feature over the keys outside
    read        softmax over [q.uq_m + log_weight_m, scale q.k_j - query_bias]

On a CPU the forward pass is that of `favor.kernels.eager.window_fused` where it can be.

In a causal layer with more keys than queries, queries are the last rows; blocks are counted from the first key.

The backward pass mirrors it: what the queries of a block send to its landmarks is gathered per block, and joined for
the keys of each block over all other blocks, by the same sums. Log weights and means of the landmarks are `[N, b, M]`
and `[N, b, M, dv]` here, for b blocks and N = batch x key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.eager import fused
from favor.kernels.eager import window_fused as chunked_window_fused
from favor.kernels.eager.bidirectional import LN2, LOG2E, Buffer, empty_gradients, empty_output, exp2, write
from favor.kernels.eager.window_blocks import FUSED_SPAN, SPAN, Blocks, Span
from favor.kernels.eager.window_states import States
from favor.kernels.operands import Geometry, Gradients, Operands, Result, Sequence, sequences


def first_block(geometry: Geometry, index: int) -> int:
    """Where the blocks of a packed sequence begin among those of all; sequence i leaves room for i partial blocks."""
    return 0 if geometry.cu_k is None else int(geometry.cu_k[index]) // geometry.window + index


def _given(query_bias: Tensor | None) -> Tensor:
    assert query_bias is not None  # with a window there is one, see `favor.kernels.linear_attention`
    return query_bias


def empty_landmarks(operands: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Uninitialised log weights `[b, B, Hk, M]` and summaries `[b, B, Hk, M, dv]` of the landmarks of every block."""
    value, offset = operands.value, operands.offset
    shape = (value.shape[2] // geometry.window + geometry.sequences(1), *value.shape[:2], offset.shape[-1])
    return offset.new_empty(shape), offset.new_empty(*shape, value.shape[-1])


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Attention output and what the backward pass needs.

    Returns:
        output `[B, H, L, dv]`, logarithm of the normaliser `[B, H, L]`, infinite where nothing is visible, and log
        weights and summaries of the landmarks of every block, see `empty_landmarks`.
    """
    query, offset, query_bias = operands.query, operands.offset, _given(operands.query_bias)
    out, lse = empty_output(query, operands.value), offset.new_empty(query.shape[:3])
    landmarks, buffers = empty_landmarks(operands, geometry), (Buffer(offset), Buffer(offset))
    use_fused = fused.usable(query, operands.value)
    budget = FUSED_SPAN if use_fused else SPAN
    for index, sequence in enumerate(sequences(operands, geometry)):
        for part, blocks in Blocks.parts(sequence, geometry.window, geometry.is_causal, budget):
            weight, summary = _own(landmarks, first_block(geometry, index), blocks, part)
            states = chunked_window_fused.states(blocks) if use_fused else _states(blocks, buffers[0])
            _summarise(blocks, states, weight, summary)
            for span in _with_queries(blocks):
                operands_of_span = (weight, summary, geometry.scale, query_bias[part.rows], span)
                if use_fused:
                    rows, log = chunked_window_fused.read(blocks, *operands_of_span)
                else:
                    rows, log = _read(blocks, buffers, *operands_of_span)
                blocks.write_queries(out[part.rows], rows, span)
                blocks.write_queries(lse[part.rows], log.masked_fill_(log == -torch.inf, torch.inf), span)
    return Result(out, lse, *landmarks)


def backward(grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool) -> Gradients:
    """Gradients of the loss, from that of the output and from what `forward` returned."""
    grads, query_bias = empty_gradients(operands, for_directions=for_directions), _given(operands.query_bias)
    # Triton kernels, whose forward pass this may go back over, keep summaries in the type of the values.
    landmarks = (saved.weight, saved.summary.to(operands.offset.dtype))
    buffers = tuple(Buffer(operands.offset) for _ in range(4))
    for index, sequence in enumerate(sequences(operands, geometry)):
        for part, blocks in Blocks.parts(sequence, geometry.window, geometry.is_causal, SPAN):
            own = _own(landmarks, first_block(geometry, index), blocks, part)
            if blocks.prefix:  # keys of blocks before the first query get nothing from a block of their own
                grads.key[part.columns].zero_()
                grads.value[part.columns].zero_()
            here = (grad[part.rows], saved.out[part.rows], saved.lse[part.rows], query_bias[part.rows])
            biases = grads.query_bias[part.rows]
            sent = _backward_queries(blocks, buffers, *here, biases, *own, geometry.scale, part, grads)
            _backward_keys(blocks, buffers, sent.outside(before=not geometry.is_causal, after=True), part, grads)
    return grads


def _own(landmarks: tuple[Tensor, Tensor], first: int, blocks: Blocks, part: Sequence) -> tuple[Tensor, Tensor]:
    """Views of the log weights `[N, b, M]` and means `[N, b, M, dv]` of a part."""
    index = (slice(first, first + blocks.number), *part.columns[:2])
    weight, summary = (tensor[index].movedim(0, 2).flatten(0, 1) for tensor in landmarks)
    return weight, summary


def _states(blocks: Blocks, buffer: Buffer) -> States:
    """Sums over the keys of every block."""
    inputs = blocks.inputs
    states, project = States.uninitialised(inputs, blocks.number), inputs.to_key.transpose(1, 2)
    for span in blocks.spans():
        weights = buffer.product(blocks.keys(inputs.key, span), project, LOG2E)
        weights = blocks.apart(weights.add_(inputs.bias[:, slice(*span.keys)]), span)
        top = weights.amax(1, keepdim=True)
        exp2(weights.sub_(top.masked_fill(top == -torch.inf, 0.0)))
        states.write(span.blocks, top=top, total=weights.sum(1))
        states.write_values(span.blocks, weights.transpose(1, 2), blocks.apart(blocks.keys(inputs.value, span), span))
    return states


def _summarise(blocks: Blocks, states: States, weight: Tensor, summary: Tensor) -> None:
    """Writes log weights, -inf without a key, and means of the keys outside each block."""
    top, total, values = states.outside(before=True, after=not blocks.is_causal, values=summary)
    values.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
    torch.mul(top + total.log2() + blocks.inputs.offset, LN2, out=weight)


def _read(
    blocks: Blocks,
    buffers: tuple[Buffer, ...],
    weight: Tensor,
    summary: Tensor,
    scale: float,
    query_bias: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor]:
    """Output `[N s, rows, dv]` of a span and logarithm of its normaliser `[N s, rows, 1]`, -inf where that is 0."""
    inputs, rows = blocks.inputs, blocks.queries(blocks.inputs.query, span)
    keys, values = (blocks.apart(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
    far, near, bias = _logits(blocks, buffers, rows, keys, weight, scale, query_bias, span)
    top = torch.maximum(far.amax(2, keepdim=True), near.amax(2, keepdim=True) - bias)
    top.masked_fill_(top == -torch.inf, 0.0)
    total = exp2(far.sub_(top)).sum(2, keepdim=True)
    total += exp2(near.sub_(top + bias)).sum(2, keepdim=True)
    sums = (far @ _of_span(summary, span)).baddbmm_(near, values)
    return sums.div_(total.masked_fill(total == 0, 1.0)), total.log_().add_(top, alpha=LN2)


def _with_queries(blocks: Blocks) -> list[Span]:
    return [span for span in blocks.spans() if span.queries[1]]


def _of_span(landmarks: Tensor, span: Span) -> Tensor:
    """Landmarks of the blocks of a span, `[N s, M, dv]`."""
    return landmarks[:, slice(*span.blocks)].flatten(0, 1)


def _logits(
    blocks: Blocks,
    buffers: tuple[Buffer, ...],
    rows: Tensor,
    keys: Tensor,
    weight: Tensor,
    scale: float,
    query_bias: Tensor,
    span: Span,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the landmarks and, without the query bias, of the own block; and that bias; all in base 2.

    Rows are the queries of the span, `[N, rows, d]`, and keys its keys, `[N s, tokens, d]`.
    """
    far = blocks.apart(buffers[0].product(rows, blocks.inputs.to_query.transpose(1, 2), LOG2E), span)
    far.add_(_of_span(weight.unsqueeze(-2), span), alpha=LOG2E)
    near = buffers[1].product(blocks.apart(rows, span), keys.transpose(1, 2), scale * LOG2E)
    unseen = blocks.unseen(span)
    if unseen is not None:
        near.masked_fill_(unseen, -torch.inf)
    return far, near, blocks.apart(blocks.queries(query_bias.unsqueeze(-1), span), span) * LOG2E


def _backward_queries(
    blocks: Blocks,
    buffers: tuple[Buffer, ...],
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query_bias: Tensor,
    dquery_bias: Tensor,
    weight: Tensor,
    summary: Tensor,
    scale: float,
    part: Sequence,
    grads: Gradients,
) -> States:
    """Gradients of queries and query bias, and those of keys and values inside the blocks.

    Returns:
        what the landmarks of each block gather, with the negative of their log weight as top.
    """
    inputs = blocks.inputs
    sent = States.uninitialised(inputs, blocks.number)
    torch.mul(weight, -LOG2E, out=sent.top)
    sent.top.masked_fill_(sent.top == torch.inf, -torch.inf)
    spans = _with_queries(blocks)
    unread = spans[0].blocks[0] if spans else blocks.number  # blocks before the first query
    sent.total[:, :unread], sent.values[:, :unread] = 0.0, 0.0
    dq, dk, dv = grads.query[part.rows], grads.key[part.columns], grads.value[part.columns]
    for span in spans:

        def load(tensor: Tensor, span: Span = span) -> Tensor:
            return blocks.apart(blocks.queries(tensor, span), span)

        rows = blocks.queries(inputs.query, span)
        keys, values = (blocks.apart(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
        far, near, bias = _logits(blocks, buffers, rows, keys, weight, scale, query_bias, span)
        norm = load(lse.unsqueeze(-1)) * LOG2E
        exp2(far.sub_(norm))
        exp2(near.sub_(norm + bias))
        g = load(grad)
        delta = (g * load(out)).sum(2, keepdim=True)
        sent.write(span.blocks, total=delta.transpose(1, 2) @ far)
        sent.write_values(span.blocks, far.transpose(1, 2), g)
        write(dv, *span.keys, near.transpose(1, 2) @ g)
        far_slopes = buffers[2].product(g, _of_span(summary, span).transpose(1, 2)).sub_(delta).mul_(far)
        near_slopes = buffers[3].product(g, values.transpose(1, 2)).sub_(delta).mul_(near)
        far_rows = far_slopes.view(inputs.heads, -1, far.shape[2])
        own_rows = blocks.apart(far_rows @ inputs.to_query, span).baddbmm_(near_slopes, keys, alpha=scale)
        blocks.write_queries(dq, own_rows, span)
        write(dk, *span.keys, (near_slopes.transpose(1, 2) @ blocks.apart(rows, span)).mul_(scale))
        blocks.write_queries(dquery_bias, far_slopes.sum(2), span)
        if grads.offset.numel():
            part.accumulate(grads.query_directions, far_rows.transpose(1, 2) @ rows)
    return sent


def _backward_keys(blocks: Blocks, buffers: tuple[Buffer, ...], sent: States, part: Sequence, grads: Gradients) -> None:
    """Adds the gradients that keys and values get from the queries of other blocks."""
    inputs, (first, second, *_) = blocks.inputs, buffers
    dk, dv, dbias = (grad[part.columns] for grad in (grads.key, grads.value, grads.key_bias))
    project, shift = inputs.to_key.transpose(1, 2), sent.top + inputs.offset
    for span in blocks.spans():
        keys = blocks.keys(inputs.key, span)
        weights = first.product(keys, project, LOG2E).add_(inputs.bias[:, slice(*span.keys)])
        own = exp2(blocks.apart(weights, span).add_(_of_span(shift.unsqueeze(-2), span)))
        gathered = _of_span(sent.values, span)
        _add(dv, span, own @ gathered)
        values = blocks.apart(blocks.keys(inputs.value, span), span)
        slopes = second.product(values, gathered.transpose(1, 2))
        slopes = slopes.sub_(_of_span(sent.total.unsqueeze(-2), span)).mul_(own).view(weights.shape)
        _add(dk, span, slopes @ inputs.to_key)
        write(dbias, *span.keys, slopes.sum(2))
        if grads.offset.numel():
            part.accumulate(grads.key_directions, slopes.transpose(1, 2) @ keys)
            part.accumulate(grads.offset, slopes.sum(1))


def _add(target: Tensor, span: Span, rows: Tensor) -> None:
    """Adds rows `[N s, tokens, w]` or `[N, s tokens, w]` to the tokens of a span of a tensor `[B, Hk, S, w]`."""
    block = target[:, :, slice(*span.keys)]
    block += rows.view_as(block)
