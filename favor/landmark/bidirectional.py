"""Attention between all tokens: alike keys under one mean, whole nodes of them exact where they matter.

Keys and queries are sorted so that neighbours are alike. M nodes of neighbouring keys stand each under its mean key,
its mean value and its count. A block of 16 alike queries reads the nodes exactly that matter most to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from favor.attention.functional import AttentionCall
from favor.kernels.chosen import chosen_attention, log_left
from favor.kernels.dispatch import is_exporting, operator
from favor.kernels.exported import first_rows, in_blocks
from favor.kernels.landmarks import node_attention
from favor.kernels.operands import ChosenOperands, NodeOptions
from favor.landmark.sorting import order_of

# Measured in docs/papers/landmark_form.md.
BLOCK = 16  # alike queries that share a choice
_ROWS = 64  # queries that read means alone at a time
SPREAD = 2.0  # standard deviations of the logits of a node that are added to the logit of its mean


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor],
    *,
    means: int,
    selected: int,
    scale: float,
    together: bool,
    is_padded: bool,
    kernel: str = "auto",
) -> Tensor:
    """Computes attention of all queries to all keys.

    Args:
        query: `[N, G, L, d]`, those of one key head together, padding at the end.
        key, value: `[N, S, d]` and `[N, S, dv]`, padding at the end, zeros.
        lengths: how many queries and how many keys count, int64 `[N]`.
        means: M; the number of nodes.
        selected: K; a block reads K keys exactly, in whole nodes, rounded up. 0: means alone are read.
        scale: of the logits.
        together: whether queries may see each other. If not, each chooses for itself, and keys are sorted by keys.
        is_padded: whether fewer keys than S may count. A node has as many keys as without the padding.
        kernel: "auto", "torch" or "triton".

    Returns:
        `[N, G, L, dv]`.
    """
    (heads, groups, length, _), keys = query.shape, key.shape[1]
    of_query, of_key = lengths
    asked = (query, of_query) if together else (key.unsqueeze(1), of_key)
    order = order_of(key, asked[0], of_key, asked[1])
    key, value = (tensor.flatten(0, 1).index_select(0, order).view(tensor.shape) for tensor in (key, value))
    size = ((of_key + (means - 1)) // means).clamp(min=1)
    number = means if is_exporting() else min(means, keys)  # one graph for every length
    nodes = Nodes.of(key, value, of_key, size, number)
    if not selected:
        seen = nodes.count.sum(1, keepdim=True) > 0
        bias = torch.where(seen, nodes.count.log(), 0.0).to(query.dtype)[:, None, None]
        return _softmax(query, nodes.key.unsqueeze(1), nodes.value.unsqueeze(1), bias, scale)
    rows, of_query, of_rows = query.flatten(0, 1), of_query.repeat_interleave(groups), of_key.repeat_interleave(groups)
    block, place = 1, None
    if together:
        block = BLOCK
        place = order_of(rows, key.unsqueeze(1), of_query, of_key)
        rows = rows.flatten(0, 1).index_select(0, place).view(rows.shape)
    blocks = in_blocks(rows, block)
    if is_exporting():
        most = min(selected, number)
    else:
        selected = min(selected, keys)
        most = min(selected if is_padded else -(-selected // -(-keys // means)), number)
    shared = choose_nodes(blocks, of_query, nodes, size, selected, most)
    key, value = (pad(tensor, (0, 0, 0, keys // means)) for tensor in (key, value))  # so that the last run is whole
    out = _read(blocks, key, value, nodes, shared, of_rows, size.repeat_interleave(groups), selected, scale, kernel)
    out = first_rows(out.flatten(1, 2), length)
    if place is not None:
        found = out.flatten(0, 1)
        out = torch.zeros_like(found).index_copy(0, place, found).view(out.shape)
    return out.unflatten(0, (heads, groups))


def fused(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes `attention` of whole heads, `[B, H, L, d]` and `[B, Hk, S, d]`, by one operator.

    Padding is at the end, and may hold anything; that of queries is finite.
    """
    padding = call.query_padding(query.shape[2], key.shape[2])
    key_lengths = None if call.key_mask is None else call.key_mask.sum(1)
    lengths = key_lengths if padding is call.key_mask else None if padding is None else padding.sum(1)
    block = _ROWS if not call.selected_keys else BLOCK if call.use_statistics else 1
    options = NodeOptions(
        means=call.num_features,
        selected=call.selected_keys,
        block=block,
        together=call.use_statistics,
        is_padded=call.key_mask is not None,
        spread=SPREAD,
        scale=call.scale,
    )
    return node_attention(query, key, value, lengths, key_lengths, options, call.kernel)


def _read(
    blocks: Tensor,
    key: Tensor,
    value: Tensor,
    nodes: Nodes,
    shared: Tensor,
    lengths: Tensor,
    size: Tensor,
    selected: int,
    scale: float,
    kernel: str,
) -> Tensor:
    """Attends with blocks of queries to the nodes that they chose, and to the means of all others."""
    run, seen = size.to(torch.int32), lengths.to(torch.int32).unsqueeze(-1).repeat(1, blocks.shape[1])
    given = ChosenOperands(
        query=blocks,
        key=key,
        value=value,
        shared=shared,
        own=torch.empty(*blocks.shape[:3], 0, device=key.device, dtype=torch.int32),
        seen=seen,
        far_key=nodes.key,
        far_value=nodes.value,
        far_log=log_left(shared, seen, run, run, nodes.count.shape[1], nodes.count.dtype),
        first=run,  # not read
        run=run,
        section=0,
        most=selected,
        scale=scale,
    )
    return chosen_attention(given, kernel)


def _softmax(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    width = value.shape[-1]
    if width != query.shape[-1]:  # the fused kernel of a CPU needs equal widths; the other one forms all weights
        largest = max(width, query.shape[-1])
        query, key, value = (pad(tensor, (0, largest - tensor.shape[-1])) for tensor in (query, key, value))
    if is_exporting():
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    else:  # a compiler has wrong layouts of gradients for fewer key heads
        rows = query.flatten(1, 2).unsqueeze(1)
        out = scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale).view(*query.shape[:3], -1)
    return out[..., :width]


@dataclass(frozen=True)
class Nodes:
    """Nodes of neighbouring keys: node m has the sorted keys m r ... m r + r - 1, r as many as M nodes need.

    Attributes:
        count: of keys in each node, `[N, M]`, float32 at least.
        key, value: their means, `[N, M, d]` and `[N, M, dv]`.
        variance: of the keys in each coordinate, `[N, M, d]`, float32 at least.
    """

    count: Tensor
    key: Tensor
    value: Tensor
    variance: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor, lengths: Tensor, size: Tensor, number: int) -> Nodes:
        """Sums up sorted keys `[N, S, d]` and values, zeros behind those that count, by lengths `[N]` and r, `[N]`."""
        precision, size = torch.promote_types(key.dtype, torch.float32), size.unsqueeze(-1)
        first = torch.arange(number, device=key.device) * size
        count = (lengths.unsqueeze(-1) - first).clamp(min=0).minimum(size).to(precision)
        node = (torch.arange(key.shape[1], device=key.device) // size).clamp(max=number - 1)
        index = (node + torch.arange(key.shape[0], device=key.device).unsqueeze(-1) * number).flatten()
        raised, divisor = key.to(precision), count.clamp(min=1).unsqueeze(-1)
        sums = (
            rows.new_zeros(count.numel(), rows.shape[2]).index_add(0, index, rows.flatten(0, 1)).view(*count.shape, -1)
            for rows in (raised, value.to(precision), raised.detach().square())
        )
        mean, mean_value, square = (own / divisor for own in sums)
        variance = square - mean.detach().square()
        return cls(count, mean.to(key.dtype), mean_value.to(key.dtype), variance)


def _choose(
    blocks: Tensor, lengths: Tensor, mean: Tensor, variance: Tensor, count: Tensor, size: Tensor, wanted: int, most: int
) -> Tensor:
    heads, lead, blocks, mean = count.shape[0], blocks.shape[:2], blocks.to(count.dtype), mean.to(count.dtype)
    place = torch.arange(lead[1] * blocks.shape[2], device=blocks.device).view(-1, blocks.shape[2])
    real = (place < lengths.view(-1, 1, 1)).to(blocks.dtype)
    weight = (real / real.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(2)
    rows = (weight @ blocks).view(heads, -1, blocks.shape[3])
    squares = (weight @ blocks.square()).view(heads, -1, blocks.shape[3])
    score = rows @ mean.mT + SPREAD * (squares @ variance.clamp(min=0).mT).sqrt()
    best, found = score.masked_fill(count.unsqueeze(1) == 0, -torch.inf).topk(most, -1)
    behind = torch.arange(most, device=blocks.device) >= -(-wanted // size).view(-1, 1, 1)
    return found.masked_fill((best == -torch.inf) | behind, -1).to(torch.int32).view(*lead, most)


_choose_operator = operator(
    "choose_nodes",
    "(Tensor blocks, Tensor lengths, Tensor mean, Tensor variance, Tensor count, Tensor size, SymInt selected, "
    "SymInt most) -> Tensor",
    _choose,
    lambda blocks, *others: blocks.new_empty(*blocks.shape[:2], others[-1], dtype=torch.int32),
)


@torch.no_grad()
def choose_nodes(blocks: Tensor, lengths: Tensor, nodes: Nodes, size: Tensor, selected: int, most: int) -> Tensor:
    """Chooses nodes for each block of queries by the logit of the mean key and its spread, at the mean of the block.

    Blocks are `[N G, Z, B, d]`, of which `lengths` `[N G]` queries count; a node has `size` `[N]` keys. Gives nodes for
    `selected` keys, int32 `[N G, Z, most]`, best first; -1 at the end.
    """
    return _choose_operator(blocks, lengths, nodes.key, nodes.variance, nodes.count, size, selected, most)
