"""`favor.kernels.selected.selected_attention` in plain torch: one head after another, some blocks of queries at a time.

Logits stand as `[..., keys, rows]`, so that the weight that a chosen key has in its group is a row to copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels.eager.common import LN2, LOG2E, exp2
from favor.kernels.operands import SelectedOperands

# Numbers of the keys and values that are gathered at a time: what stays in cache on a CPU, few launches on a GPU.
_NUMBERS, _NUMBERS_OF_GPU = 2**20, 2**26
_GRADIENTS = 2**24  # numbers of their gradients that are added up at a time


@dataclass
class _Part:
    """Some query blocks of one head: all of some sections, or some of one section.

    Attributes:
        f, z: sections and blocks.
        rows: queries times the scale in base 2, `[x, zR, d]`.
        columns: of each block, `[xz, d, R]`.
        pages: of each block, `[xzn]`.
        key, value: of these pages, `[xz, K, d]` and `[xz, K, dv]`.
        place: row of the weights of the groups of each chosen key, `[xzK]`.
        hidden: which rows do not see a chosen key, `[xz, K, R]` or broadcast to it; None if all see all.
    """

    f: slice
    z: slice
    rows: Tensor
    columns: Tensor
    pages: Tensor
    key: Tensor
    value: Tensor
    place: Tensor
    hidden: Tensor | None


@dataclass
class _Weights:
    """Weights, or at first their logits: of groups without counts `[x, M, zR]`, near keys `[x, T, zR]`, chosen keys."""

    far: Tensor
    near: Tensor
    own: Tensor


class _Head:
    """The operands of one head."""

    def __init__(self, given: SelectedOperands, table: Tensor, number: int) -> None:
        self.given, self.table = given, table
        self.query, self.counts, self.far_key, self.far_value = (t[number] for t in given[:4])
        self.near_counts, self.near_key, self.near_value = (t[number] for t in given[4:7])
        self.pages, self.cell, self.since = (t[number] for t in given[9:12])
        self.sections, self.blocks, self.size, self.width = self.query.shape
        self.weighted = self.far_value * self.counts.unsqueeze(-1)
        self.hides = bool((self.since > 0).any()) or bool((self.cell < 0).any())

    def parts(self) -> Iterator[_Part]:
        """Cuts the work so that what is gathered stays small."""
        numbers = _NUMBERS if self.query.device.type == "cpu" else _NUMBERS_OF_GPU
        each = max(self.pages.shape[-1] * self.table.shape[-1], self.counts.shape[-1] * self.size, 1)
        together = max(numbers // each, 1)
        sections = max(together // self.blocks, 1)
        for f in range(0, self.sections, sections):
            for z in range(0, self.blocks, together):
                yield self._part(slice(f, f + sections), slice(z, z + together))

    def _part(self, f: slice, z: slice) -> _Part:
        query = self.query[f, z] * (self.given.scale * LOG2E)
        sections, blocks = query.shape[:2]
        pages, cell = self.pages[f, z].flatten(), self.cell[f, z].flatten(0, 1)
        both = self.table.index_select(0, pages).view(
            sections * blocks, cell.shape[-1], self.table.shape[-1] // self.given.page_size
        )
        first = torch.arange(sections, device=cell.device).view(-1, 1, 1) * self.counts.shape[-1]
        place = cell.clamp(min=0).unflatten(0, (sections, blocks)) + first
        place = place * blocks + torch.arange(blocks, device=cell.device).view(-1, 1)
        hidden = None
        if self.hides:
            late = self.since[f, z].flatten(0, 1).repeat_interleave(self.given.page_size, -1).unsqueeze(-1)
            hidden = (late > torch.arange(self.size, device=cell.device)) | (cell < 0).unsqueeze(-1)
        columns = query.flatten(0, 1).transpose(1, 2)
        key, value = both[..., : self.width], both[..., self.width :]
        return _Part(f, z, query.flatten(1, 2), columns, pages, key, value, place.flatten(), hidden)

    def logits(self, part: _Part) -> _Weights:
        """Logits in base 2, -inf for what a row does not see."""
        far = self.far_key[part.f] @ part.rows.transpose(1, 2)
        far.masked_fill_((self.counts[part.f] == 0).unsqueeze(-1), -torch.inf)
        near = self.near_key[part.f] @ part.rows.transpose(1, 2)
        if near.shape[1]:
            near.masked_fill_(self._hidden(part), -torch.inf)
        own = torch.bmm(part.key, part.columns)
        return _Weights(far, near, own if part.hidden is None else own.masked_fill_(part.hidden, -torch.inf))

    def _hidden(self, part: _Part) -> Tensor:
        """Which near keys a row does not see, `[x, T, zR]` or broadcast to it."""
        absent = (self.near_counts[part.f] == 0).unsqueeze(-1)
        if self.given.first < 0:
            return absent
        block = torch.arange(self.blocks, device=absent.device)[part.z] % self.given.per_head
        row = (block.unsqueeze(-1) * self.size + torch.arange(self.size, device=absent.device)).flatten()
        return absent | (torch.arange(absent.shape[1], device=absent.device).unsqueeze(-1) > row + self.given.first)

    def largest(self, logits: _Weights, part: _Part) -> Tensor:
        """The largest logit of each row, `[x, zR]`; 0 if it sees nothing."""
        tops = [t.amax(1) for t in (logits.far, logits.near) if t.shape[1]]
        if logits.own.shape[1]:
            tops.append(logits.own.amax(1).view(part.rows.shape[:2]))
        top = tops[0]
        for other in tops[1:]:
            top = torch.maximum(top, other)
        return top.masked_fill(top == -torch.inf, 0.0)

    def exponentials(self, logits: _Weights, part: _Part, top: Tensor) -> tuple[_Weights, Tensor]:
        """Weights 2^(logits - top), in place, and those that chosen keys have in their groups, `[xz, K, R]`."""
        far, near = (exp2(t.sub_(top.unsqueeze(1)), 64.0) for t in (logits.far, logits.near))
        own = exp2(logits.own.sub_(top.view(-1, 1, self.size)), 64.0)
        replaced = far.view(-1, self.size).index_select(0, part.place).view(own.shape)
        if part.hidden is not None:
            replaced.masked_fill_(part.hidden, 0.0)
        return _Weights(far, near, own), replaced


def _tables(given: SelectedOperands) -> Tensor:
    """Keys and values of each page in one row, `[N, pages, P (d + dv)]`: one copy gathers both."""
    both = torch.cat([given.key, given.value], -1)
    both = pad(both, (0, 0, 0, -both.shape[1] % given.page_size))
    return both.view(len(both), -1, given.page_size * both.shape[-1])


def forward(given: SelectedOperands) -> tuple[Tensor, Tensor]:
    """Output `[N, F, Z, R, dv]` and the logarithms of the normalisers, `[N, F, Z, R]`, inf for rows that see nothing."""
    out = given.query.new_empty(*given.query.shape[:-1], given.value.shape[-1])
    lse = given.query.new_empty(given.query.shape[:-1])
    for number, table in enumerate(_tables(given)):
        head = _Head(given, table, number)
        for part in head.parts():
            logits = head.logits(part)
            top = head.largest(logits, part)
            weights, replaced = head.exponentials(logits, part, top)
            changes = weights.own.sub_(replaced)
            total = (head.counts[part.f].unsqueeze(1) @ weights.far).squeeze(1)
            total = total + weights.near.sum(1) + changes.sum(1).view_as(total)
            values = torch.bmm(changes.transpose(1, 2), part.value).view(*part.rows.shape[:2], -1)
            values = torch.baddbmm(values, weights.far.transpose(1, 2), head.weighted[part.f])
            if weights.near.shape[1]:
                values = torch.baddbmm(values, weights.near.transpose(1, 2), head.near_value[part.f])
            empty = total <= 0
            total = total.masked_fill(empty, 1.0)
            values = (values / total.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0)
            place = out[number, part.f, part.z]
            place.copy_(values.view(place.shape))
            logarithm = ((top + total.log2()) * LN2).masked_fill(empty, torch.inf)
            lse[number, part.f, part.z] = logarithm.view(place.shape[:-1])
    return out, lse


class _Scatter:
    """Adds gradients of gathered pages to those of all pages, many at a time."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.rows, self.places, self.held = total, [], [], 0

    def add(self, places: Tensor, rows: Tensor) -> None:
        self.places.append(places)
        self.rows.append(rows)
        self.held += rows.numel()
        if self.held > _GRADIENTS:
            self.flush()

    def flush(self) -> None:
        if self.held:
            _add_rows(self.total, torch.cat(self.places), torch.cat(self.rows))
        self.rows, self.places, self.held = [], [], 0


def _add_rows(total: Tensor, places: Tensor, rows: Tensor) -> None:
    """Adds rows `[n, w]` to those of `total` at their places; on a CPU the gradient of an embedding is fastest."""
    if total.device.type == "cpu":
        total += torch.ops.aten.embedding_dense_backward(rows, places, len(total), -1, False)
    else:
        total.index_add_(0, places, rows)


def backward(grad: Tensor, given: SelectedOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, far key and value, near key and value, key and value."""
    found = [torch.zeros_like(given[place]) for place in (0, 2, 3, 5, 6)]
    tables = _tables(given)
    totals = torch.zeros_like(tables)
    share = (grad * out).sum(-1)
    for number, table in enumerate(tables):
        head, scatter = _Head(given, table, number), _Scatter(totals[number])
        for part in head.parts():
            own = [tensor[number] for tensor in found]
            _part_backward(head, part, grad[number], share[number], lse[number], own, scatter)
        scatter.flush()
    width = given.key.shape[-1]
    both = totals.view(len(totals), -1, width + given.value.shape[-1])[:, : given.key.shape[1]]
    return (*found, both[..., :width].contiguous(), both[..., width:].contiguous())


def _part_backward(
    head: _Head, part: _Part, grad: Tensor, share: Tensor, lse: Tensor, found: list[Tensor], scatter: _Scatter
) -> None:
    """Adds the gradients of some query blocks."""
    f, z, size = part.f, part.z, head.size
    of_query, far_key, far_value, near_key, near_value = found
    weights, replaced = head.exponentials(head.logits(part), part, lse[f, z].flatten(1) / LN2)
    query = head.query[f, z] * head.given.scale
    rows, of_rows = query.flatten(1, 2), query.flatten(0, 1)
    g, of_g = grad[f, z].flatten(1, 2), grad[f, z].flatten(0, 1)
    d = share[f, z].flatten(1).unsqueeze(1)

    # The chosen keys.
    slope = torch.bmm(part.value, of_g.transpose(1, 2)).sub_(d.view(-1, 1, size))
    moved = replaced * slope
    values = torch.bmm(weights.own - replaced, of_g)
    slope.mul_(weights.own)
    both = torch.cat([torch.bmm(slope, of_rows), values], -1)
    scatter.add(part.pages, both.view(len(part.pages), head.table.shape[-1]))
    result = torch.bmm(slope.transpose(1, 2), part.key).view_as(rows)

    # The groups, without what the chosen keys took from them.
    far = weights.far * head.counts[f].unsqueeze(-1)
    far_value[f] += far @ g
    slope = (head.far_value[f] @ g.transpose(1, 2)).sub_(d).mul_(far)
    taken = torch.zeros_like(slope).view(-1, size)
    _add_rows(taken, part.place, moved.view(-1, size))
    slope -= taken.view_as(slope)
    far_key[f] += slope @ rows
    result = torch.baddbmm(result, slope.transpose(1, 2), head.far_key[f])
    if weights.near.shape[1]:
        near_value[f] += weights.near @ g
        slope = (head.near_value[f] @ g.transpose(1, 2)).sub_(d).mul_(weights.near)
        near_key[f] += slope @ rows
        result = torch.baddbmm(result, slope.transpose(1, 2), head.near_key[f])
    of_query[f, z] = (result * head.given.scale).view(query.shape)
