"""The forward pass of `favor.kernels.eager.window` with the fused kernel of CPUs, where that can run.

A query attends to the landmarks of its block and to the keys of its block apart; the two are then mixed by their
normalisers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.eager import fused
from favor.kernels.eager.bidirectional import LN2, LOG2E
from favor.kernels.eager.window_blocks import Blocks, Span
from favor.kernels.eager.window_states import States


def states(blocks: Blocks) -> States:
    """Sums over the keys of every block."""
    inputs, found = blocks.inputs, []
    for span in blocks.spans():
        keys, values = (_apart(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
        bias = _apart(inputs.bias[:, slice(*span.keys)], span).transpose(2, 3) * LN2
        directions = inputs.to_key.unsqueeze(1).expand(-1, span.number, -1, -1)
        means, log_weight = fused.attend(directions, keys, values, bias)
        top, total = log_weight * LOG2E, torch.ones_like(log_weight)
        if inputs.hidden is not None:
            nothing = (bias == -torch.inf).all(3)
            top, total = top.masked_fill_(nothing, -torch.inf), total.masked_fill_(nothing, 0.0)
        found.append(States(top, total, means))
    if not found:
        return States.uninitialised(inputs, 0)
    return found[0] if len(found) == 1 else States(*(torch.cat(tensors, 1) for tensors in zip(*found, strict=True)))


def read(
    blocks: Blocks, weight: Tensor, summary: Tensor, scale: float, query_bias: Tensor, span: Span
) -> tuple[Tensor, Tensor]:
    """Output `[N s, rows, dv]` of a span and logarithm of its normaliser `[N s, rows, 1]`, -inf where that is 0."""
    inputs = blocks.inputs
    rows, bias = (_apart(blocks.queries(tensor, span), span) for tensor in (inputs.query, query_bias.unsqueeze(-1)))
    keys, values = (_apart(blocks.keys(tensor, span), span) for tensor in (inputs.key, inputs.value))
    directions = inputs.to_query.unsqueeze(1).expand(-1, span.number, -1, -1)
    log_weight = weight[:, slice(*span.blocks)].unsqueeze(2)
    far, log_far = fused.attend(rows, directions, summary[:, slice(*span.blocks)], log_weight)
    log_far = log_far.masked_fill(log_weight.amax(3) == -torch.inf, -torch.inf)
    near, log_near = _near(blocks, span, rows, keys, values, scale)
    log_near = log_near - bias.squeeze(-1)
    share = torch.sigmoid(log_near - log_far).nan_to_num_(0.0).unsqueeze(-1)
    out, log = torch.lerp(far, near, share), torch.logaddexp(log_far, log_near)
    return out.flatten(0, 1), log.flatten(0, 1).unsqueeze(-1)


def _near(
    blocks: Blocks, span: Span, rows: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the keys of their block."""
    if blocks.is_causal and blocks.inputs.hidden is None and blocks.inputs.groups == 1 and not span.skipped:
        return fused.attend(rows, keys, values, scale=scale, is_causal=True)
    unseen = blocks.unseen(span)
    if unseen is None:
        return fused.attend(rows, keys, values, scale=scale)
    unseen = unseen.view(-1, span.number if unseen.shape[0] > 1 else 1, *unseen.shape[1:])
    bias = torch.zeros_like(unseen, dtype=rows.dtype).masked_fill_(unseen, -torch.inf)
    near, log_near = fused.attend(rows, keys, values, bias, scale=scale)
    return near, log_near.masked_fill(unseen.all(3), -torch.inf)


def _apart(rows: Tensor, span: Span) -> Tensor:
    """Rows of a span `[N, ..., w]` as `[N, s, ..., w]`."""
    return rows.unflatten(1, (span.number, -1))
