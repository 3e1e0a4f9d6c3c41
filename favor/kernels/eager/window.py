"""Attention that is exact inside blocks of tokens and linear between them, in plain torch; for any device.

The sequence is cut into blocks of `window` tokens. A query weighs the keys of its own block by exp(scale q.k), and
those of the other blocks (of earlier ones if causal) by the estimate exp(query_bias) sum_m exp(q.uq_m + k.uk_m +
offset_m + key_bias), under one normaliser. Each block has its own summaries, over the keys outside of it: those of the
parts before and after it together, so that nothing is subtracted. A query then takes one softmax over M summaries and
its block:

    summarise   for every block, log weight and mean value of each feature over the keys outside
    read        softmax over [q.uq_m + log_weight_m, scale q.k_j - query_bias]

On a CPU both are PyTorch's own fused attention if it takes the sizes: a query attends to the summaries of its
block and, apart from that, to the keys of its block; the two outputs are then mixed by their normalisers.

In a causal layer with more keys than queries, queries are the last rows; blocks are counted from the first key.

The backward pass mirrors it: what the queries of a block send to its summaries is gathered per block, and joined for
the keys of each block over all other blocks, by the same sums. Log weights and means of the summaries are `[N, b, M]`
and `[N, b, M, dv]` here, for b blocks and N = batch x key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.eager.blocks import FUSED_SPAN, SPAN, WIDEST, Blocks, Span, States
from favor.kernels.eager.common import LN2, LOG2E, Buffer, exp2, fused_attention, fused_takes, write
from favor.kernels.operands import Geometry, Gradients, Operands, Result


def forward(operands: Operands, geometry: Geometry) -> Result:
    """Computes the attention output and what the backward pass needs.

    Returns:
        output `[B, H, L, dv]`, logarithm of the normaliser `[B, H, L]`, infinite where nothing is visible, and log
        weights and summaries of every block, see `Result.empty`.
    """
    result, buffers = Result.empty("window", operands, geometry), (Buffer(operands.offset), Buffer(operands.offset))
    use_fused = fused_takes(operands.query, operands.value)
    for blocks in Blocks.parts(operands, geometry, FUSED_SPAN if use_fused else SPAN):
        out, lse, weight, summary = _own(result, blocks)
        states = _fused_states(blocks) if use_fused else _states(blocks, buffers[0])
        top, total, values = states.outside(before=True, after=not geometry.is_causal, values=summary)
        values.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
        torch.mul(top + total.log2() + blocks.inputs.offset, LN2, out=weight)  # -inf without a key
        for span in _with_queries(blocks):
            if use_fused:
                rows, log = _fused_read(blocks, weight, summary, span)
            else:
                rows, log = _read(blocks, buffers, weight, summary, span)
            blocks.write_queries(out, rows, span)
            blocks.write_queries(lse, log.masked_fill_(log == -torch.inf, torch.inf), span)
    return result


def backward(grad: Tensor, operands: Operands, geometry: Geometry, saved: Result, for_directions: bool) -> Gradients:
    """Computes gradients of the loss, from that of the output and from what `forward` returned."""
    grads = Gradients.empty(operands, for_directions=for_directions)
    # The forward pass may be that of the Triton kernels, which keep summaries in the type of the values.
    saved = saved._replace(summary=saved.summary.to(operands.offset.dtype))
    buffers = tuple(Buffer(operands.offset) for _ in range(4))
    for blocks in Blocks.parts(operands, geometry, SPAN):
        if blocks.prefix:  # keys of blocks before the first query get nothing from a block of their own
            grads.key[blocks.sequence.columns].zero_()
            grads.value[blocks.sequence.columns].zero_()
        sent = _backward_queries(blocks, buffers, grad[blocks.sequence.rows], _own(saved, blocks), grads)
        _backward_keys(blocks, buffers, sent.outside(before=not geometry.is_causal, after=True), grads)
    return grads


def _own(result: Result, blocks: Blocks) -> Result:
    """Gives views of output and normaliser of a part, and of its log weights `[N, b, M]` and means `[N, b, M, dv]`."""
    index = (slice(blocks.first, blocks.first + blocks.number), *blocks.sequence.columns[:2])
    weight, summary = (tensor[index].movedim(0, 2).flatten(0, 1) for tensor in result[2:])
    return Result(result.out[blocks.sequence.rows], result.lse[blocks.sequence.rows], weight, summary)


def _states(blocks: Blocks, buffer: Buffer) -> States:
    inputs = blocks.inputs
    states, project = States.uninitialised(inputs, blocks.number), inputs.key_directions.transpose(1, 2)
    for span in blocks.spans():
        weights = buffer.product(blocks.keys(inputs.key, span), project, LOG2E)
        weights = blocks.apart(weights.add_(inputs.key_bias[:, slice(*span.keys)]), span)
        top = weights.amax(1, keepdim=True)
        exp2(weights.sub_(top.masked_fill(top == -torch.inf, 0.0)))
        states.write(span.blocks, top=top, total=weights.sum(1))
        states.write_values(span.blocks, weights.transpose(1, 2), blocks.apart(blocks.keys(inputs.value, span), span))
    return states


def _read(
    blocks: Blocks, buffers: tuple[Buffer, ...], weight: Tensor, summary: Tensor, span: Span
) -> tuple[Tensor, Tensor]:
    """Gives output `[N s, rows, dv]` of a span and log of its normaliser `[N s, rows, 1]`, -inf where that is 0."""
    rows, (keys, values) = blocks.queries(blocks.inputs.query, span), blocks.keys_and_values(span)
    far, near = _logits(blocks, buffers, rows, keys, weight, span)
    top = torch.maximum(far.amax(2, keepdim=True), near.amax(2, keepdim=True))
    top.masked_fill_(top == -torch.inf, 0.0)
    total = exp2(far.sub_(top)).sum(2, keepdim=True)
    total += exp2(near.sub_(top)).sum(2, keepdim=True)
    sums = (far @ _of_span(summary, span)).baddbmm_(near, values)
    return sums.div_(total.masked_fill(total == 0, 1.0)), total.log_().add_(top, alpha=LN2)


def _fused_states(blocks: Blocks) -> States:
    """Computes sums over the keys of every block, by the fused kernel."""
    inputs, found = blocks.inputs, []
    for span in blocks.spans():
        keys, values = (_side_by_side(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
        bias = _side_by_side(inputs.key_bias[:, slice(*span.keys)], span).transpose(2, 3) * LN2
        directions = inputs.key_directions.unsqueeze(1).expand(-1, span.number, -1, -1)
        means, log_weight = fused_attention(directions, keys, values, bias)
        top, total = log_weight * LOG2E, torch.ones_like(log_weight)
        if inputs.hidden is not None:
            nothing = (bias == -torch.inf).all(3)
            top, total = top.masked_fill_(nothing, -torch.inf), total.masked_fill_(nothing, 0.0)
        found.append(States(top, total, means))
    if not found:
        return States.uninitialised(inputs, 0)
    return found[0] if len(found) == 1 else States(*(torch.cat(tensors, 1) for tensors in zip(*found, strict=True)))


def _fused_read(blocks: Blocks, weight: Tensor, summary: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Reads a span by the fused kernel: its output and the logarithm of its normaliser, as `_read` gives them."""
    inputs = blocks.inputs
    rows, bias = (_side_by_side(t, span) for t in (blocks.queries(inputs.query, span), _query_bias(blocks, span)))
    keys, values = (_side_by_side(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
    directions = inputs.query_directions.unsqueeze(1).expand(-1, span.number, -1, -1)
    log_weight = weight[:, slice(*span.blocks)].unsqueeze(2)
    far, log_far = fused_attention(rows, directions, summary[:, slice(*span.blocks)], log_weight)
    log_far = log_far.masked_fill(log_weight.amax(3) == -torch.inf, -torch.inf)
    near, log_near = _near(blocks, span, rows, keys, values)
    log_near = log_near - bias.squeeze(-1)
    share = torch.sigmoid(log_near - log_far).nan_to_num_(0.0).unsqueeze(-1)
    out, log = torch.lerp(far, near, share), torch.logaddexp(log_far, log_near)
    return out.flatten(0, 1), log.flatten(0, 1).unsqueeze(-1)


def _near(blocks: Blocks, span: Span, rows: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scale, is_causal = blocks.geometry.scale, blocks.geometry.is_causal
    if is_causal and blocks.inputs.hidden is None and blocks.inputs.groups == 1 and not span.skipped:
        return fused_attention(rows, keys, values, scale=scale, is_causal=True)
    unseen = blocks.unseen(span)
    if unseen is None:
        return fused_attention(rows, keys, values, scale=scale)
    unseen = unseen.view(-1, span.number if unseen.shape[0] > 1 else 1, *unseen.shape[1:])
    bias = torch.zeros_like(unseen, dtype=rows.dtype).masked_fill_(unseen, -torch.inf)
    near, log_near = fused_attention(rows, keys, values, bias, scale=scale)
    return near, log_near.masked_fill(unseen.all(3), -torch.inf)


def _side_by_side(rows: Tensor, span: Span) -> Tensor:
    """Gives the rows of a span `[N, ..., w]` as `[N, s, ..., w]`."""
    return rows.unflatten(1, (span.number, -1))


def _with_queries(blocks: Blocks) -> list[Span]:
    return [span for span in blocks.spans() if span.queries[1]]


def _of_span(summaries: Tensor, span: Span) -> Tensor:
    """Gives the summaries of the blocks of a span, `[N s, M, dv]`."""
    return summaries[:, slice(*span.blocks)].flatten(0, 1)


def _logits(
    blocks: Blocks, buffers: tuple[Buffer, ...], rows: Tensor, keys: Tensor, weight: Tensor, span: Span
) -> tuple[Tensor, Tensor]:
    """Computes the logits of the summaries and, less the query bias, those of the own block; in base 2.

    Rows are the queries of the span, `[N, rows, d]`, and keys its keys, `[N s, tokens, d]`.
    """
    far = blocks.apart(buffers[0].product(rows, blocks.inputs.query_directions.transpose(1, 2), LOG2E), span)
    far.add_(_of_span(weight.unsqueeze(-2), span), alpha=LOG2E)
    near = buffers[1].product(blocks.apart(rows, span), keys.transpose(1, 2), blocks.geometry.scale * LOG2E)
    unseen = blocks.unseen(span)
    if unseen is not None:
        near.masked_fill_(unseen, -torch.inf)
    return far, near.sub_(blocks.apart(_query_bias(blocks, span), span), alpha=LOG2E)


def _query_bias(blocks: Blocks, span: Span) -> Tensor:
    """Gives the bias of the queries of a span, `[N, rows, 1]`."""
    query_bias = blocks.sequence.operands.query_bias
    assert query_bias is not None  # with a window there is one, see `Geometry.of`
    return blocks.queries(query_bias.unsqueeze(-1), span)


def _backward_queries(
    blocks: Blocks, buffers: tuple[Buffer, ...], grad: Tensor, saved: Result, grads: Gradients
) -> States:
    """Writes gradients of queries and query bias, and those of keys and values inside the blocks.

    Returns:
        what the summaries of each block gather, with the negative of their log weight as top.
    """
    inputs, part, scale, weight = blocks.inputs, blocks.sequence, blocks.geometry.scale, saved.weight
    sent = States.uninitialised(inputs, blocks.number)
    torch.mul(weight, -LOG2E, out=sent.top)
    sent.top.masked_fill_(sent.top == torch.inf, -torch.inf)
    spans = _with_queries(blocks)
    unread = spans[0].blocks[0] if spans else blocks.number  # blocks before the first query
    sent.total[:, :unread], sent.values[:, :unread] = 0.0, 0.0
    dq, dquery_bias = grads.query[part.rows], grads.query_bias[part.rows]
    dk, dv = grads.key[part.columns], grads.value[part.columns]
    for span in spans:

        def load(tensor: Tensor, span: Span = span) -> Tensor:
            return blocks.apart(blocks.queries(tensor, span), span)

        rows, (keys, values) = blocks.queries(inputs.query, span), blocks.keys_and_values(span)
        far, near = _logits(blocks, buffers, rows, keys, weight, span)
        norm = load(saved.lse.unsqueeze(-1)) * LOG2E
        exp2(far.sub_(norm))
        exp2(near.sub_(norm))
        g = load(grad)
        delta = (g * load(saved.out)).sum(2, keepdim=True)
        sent.write(span.blocks, total=delta.transpose(1, 2) @ far)
        sent.write_values(span.blocks, far.transpose(1, 2), g)
        write(dv, *span.keys, near.transpose(1, 2) @ g)
        far_slopes = buffers[2].product(g, _of_span(saved.summary, span).transpose(1, 2)).sub_(delta).mul_(far)
        near_slopes = buffers[3].product(g, values.transpose(1, 2)).sub_(delta).mul_(near)
        far_rows = far_slopes.view(inputs.heads, -1, far.shape[2])
        own_rows = blocks.apart(far_rows @ inputs.query_directions, span).baddbmm_(near_slopes, keys, alpha=scale)
        blocks.write_queries(dq, own_rows, span)
        write(dk, *span.keys, (near_slopes.transpose(1, 2) @ blocks.apart(rows, span)).mul_(scale))
        blocks.write_queries(dquery_bias, far_slopes.sum(2), span)
        if grads.offset.numel():
            part.accumulate(grads.query_directions, far_rows.transpose(1, 2) @ rows)
    return sent


def _backward_keys(blocks: Blocks, buffers: tuple[Buffer, ...], sent: States, grads: Gradients) -> None:
    """Adds the gradients that keys and values get from the queries of other blocks."""
    inputs, part, (first, second, *_) = blocks.inputs, blocks.sequence, buffers
    dk, dv, dbias = (grad[part.columns] for grad in (grads.key, grads.value, grads.key_bias))
    project, shift = inputs.key_directions.transpose(1, 2), sent.top + inputs.offset
    for span in blocks.spans():
        keys = blocks.keys(inputs.key, span)
        weights = first.product(keys, project, LOG2E).add_(inputs.key_bias[:, slice(*span.keys)])
        own = exp2(blocks.apart(weights, span).add_(_of_span(shift.unsqueeze(-2), span)), WIDEST)
        gathered = _of_span(sent.values, span)
        _add(dv, span, own @ gathered)
        values = blocks.apart(blocks.keys(inputs.value, span), span)
        slopes = second.product(values, gathered.transpose(1, 2))
        slopes = slopes.sub_(_of_span(sent.total.unsqueeze(-2), span)).mul_(own).view(weights.shape)
        _add(dk, span, slopes @ inputs.key_directions)
        write(dbias, *span.keys, slopes.sum(2))
        if grads.offset.numel():
            part.accumulate(grads.key_directions, slopes.transpose(1, 2) @ keys)
            part.accumulate(grads.offset, slopes.sum(1))


def _add(target: Tensor, span: Span, rows: Tensor) -> None:
    """Adds rows `[N s, tokens, w]` or `[N, s tokens, w]` to the tokens of a span of a tensor `[B, Hk, S, w]`."""
    block = target[:, :, slice(*span.keys)]
    block += rows.view_as(block)
