"""Landmarks of what is far from a block of neighbouring queries, for attention with relative positions.

A node of alike keys has some before the near ones, some among them and some behind: the first and the last are counted
apart, as they have biases of their own. In causal layers sections of 256 keys are far as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.functional import AttentionCall
from favor.attention.positions import ROWS, Blocks, Columns, Far, far_field, for_each_query, in_rows
from favor.kernels.chosen import log_left
from favor.landmark import causal
from favor.landmark.attention import Landmarks
from favor.landmark.bidirectional import Nodes, choose_nodes
from favor.landmark.sorting import order_of


@far_field(Landmarks, step=causal.SECTION // ROWS)
def far(family: Landmarks, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, call: AttentionCall) -> Far:
    """Makes landmarks of keys `[B, Hk, L, w]`, for queries `[B, H, L, w]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (for_each_query(tensor, groups) for tensor in (key, value))
    kind = _Sections if blocks.is_causal else _Nodes
    return kind(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), blocks, call)


class _Nodes:
    """Nodes of alike keys, some of which a block reads one by one."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, call: AttentionCall) -> None:
        (heads, length), device = key.shape[:2], key.device
        lengths = torch.full((heads,), length, device=device)
        order = order_of(key, query.unsqueeze(1), lengths, lengths)
        self.key, self.value = (
            tensor.flatten(0, 1).index_select(0, order).view(tensor.shape) for tensor in (key, value)
        )
        self.block = (order % length // ROWS).view(heads, length)
        self.size = -(-length // call.num_features)
        number = -(-length // self.size)
        size = torch.full_like(lengths, self.size)
        self.nodes = Nodes.of(self.key, self.value, lengths, size, number)
        most = min(-(-call.selected_keys // self.size), number)
        self.chosen = choose_nodes(in_rows(query, blocks), lengths, self.nodes, size, call.selected_keys, most).long()
        # How many keys of each node lie in blocks before a block.
        node = torch.arange(length, device=device) // self.size
        place = (self.block + 1) * number + node
        counts = torch.zeros(heads, (blocks.number + 1) * number, dtype=torch.int32, device=device)
        counts = counts.scatter_add_(1, place, torch.ones_like(place, dtype=torch.int32))
        self.counts = counts.view(heads, -1, number).cumsum(1)
        self.blocks = blocks

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        block = torch.arange(self.blocks.number, device=self.key.device)[some]
        first, last = self.blocks.first(block), self.blocks.last(block)
        before, behind = (end.unsqueeze(-1) for end in ends)
        chosen = self.chosen[:, some]
        if chosen.shape[2]:
            place = chosen.unsqueeze(-1) * self.size + torch.arange(self.size, device=chosen.device)
            place = place.flatten(2)
            real = (place >= 0) & (place < self.key.shape[1])
            place = place.clamp(0, self.key.shape[1] - 1)
            position = self.block.gather(1, place.flatten(1)).view_as(place)
            is_before, is_behind = position < first[:, None], position >= last[:, None]
            bias = torch.where(is_before.unsqueeze(2), before, behind)
            bias = bias.masked_fill(~(real & (is_before | is_behind)).unsqueeze(2), -torch.inf)
            yield Columns(_rows(self.key, place), _rows(self.value, place), bias)
        number = self.counts.shape[2]
        taken = torch.where(chosen < 0, number, chosen)  # a place more for nothing
        left, right = (
            pad(count, (0, 1)).scatter(2, taken, 0)[..., :-1].unsqueeze(2)
            for count in (self.counts[:, first], self.counts[:, -1:] - self.counts[:, last])
        )
        total = left + right * (behind - before).exp()
        bias = before + total.clamp(min=torch.finfo(total.dtype).tiny).log()
        bias = bias.masked_fill(left + right == 0, -torch.inf)
        yield Columns(self.nodes.key.unsqueeze(1), self.nodes.value.unsqueeze(1), bias)


class _Sections:
    """Means of sections, and keys that a block chose by queries that are not later than its first."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, call: AttentionCall) -> None:
        heads, length = key.shape[:2]
        block = torch.arange(blocks.number, device=key.device)
        self.key, self.value = key, value
        seen = (blocks.first(block) * ROWS).to(torch.int32).expand(heads, -1).contiguous()
        place = (block * ROWS).expand(heads, -1)
        samples = query[:, None, :: causal.STEP]
        self.shared = causal.votes(samples, key.unsqueeze(1), place, seen, call.selected_keys, call.kernel)
        self.far_key, self.far_value = (
            pad(tensor, (0, 0, 0, -length % causal.SECTION)).unflatten(1, (-1, causal.SECTION)).mean(2)
            for tensor in (key, value)
        )
        run = torch.ones(heads, dtype=torch.int32, device=key.device)
        sections = self.far_key.shape[1]
        dtype = torch.promote_types(key.dtype, torch.float32)
        self.log = log_left(self.shared, seen, run, run * causal.SECTION, sections, dtype)

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        shared, before = self.shared[:, some], ends[0].unsqueeze(-1)
        place = shared.clamp(min=0)
        bias = before.masked_fill((shared < 0).unsqueeze(2), -torch.inf)
        yield Columns(_rows(self.key, place), _rows(self.value, place), bias)
        yield Columns(self.far_key.unsqueeze(1), self.far_value.unsqueeze(1), before + self.log[:, some].unsqueeze(2))


def _rows(table: Tensor, place: Tensor) -> Tensor:
    """Takes rows of tables `[N, S, w]` at places `[N, Z, C]`, `[N, Z, C, w]`."""
    index = place + torch.arange(len(place), device=place.device)[:, None, None] * table.shape[1]
    return table.flatten(0, 1).index_select(0, index.flatten()).view(*place.shape, table.shape[2])
