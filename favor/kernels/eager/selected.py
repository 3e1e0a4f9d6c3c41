"""`favor.kernels.selected.selected_attention` in plain torch: one head after another, some blocks of queries at a time.

Logits stand as `[..., keys, rows]`, so that the weight that a chosen key has in its group is a row to copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.kernels.eager import selected_step
from favor.kernels.eager.common import LN2, LOG2E, Buffer, exp2
from favor.kernels.operands import SelectedOperands

# Numbers of the keys and values that are gathered at a time: as much as stays in cache on a CPU, few launches on a GPU;
# of short sequences an eighth of all, but not fewer than the third number, for each part has its cost.
_NUMBERS, _NUMBERS_OF_GPU, _LEAST_NUMBERS = 2**20, 2**26, 2**19
_SMALL = 60.0  # logits in base 2 whose exponentials, and sums of these, are far from overflow and underflow


@dataclass
class _Part:
    """Some query blocks of one head: all of some sections, or some of one section.

    Attributes:
        f, z: sections and blocks.
        rows: queries times the scale in base 2, `[x, zR, d]`.
        columns: of each block, `[xz, d, R]`.
        pages: of each block, `[xzn]`.
        key: of these pages, `[xz, K, d]`.
        place: row of the weights of the groups of each chosen key, `[xzK]`.
        late: which rows do not see a page since a later one chose it, `[xz, n, R]`; None if there is no such row in the
            head.
        hidden: which rows do not see a key of a page, broadcasts to `[xz, n, P, R]`; None if all see all.
    """

    f: slice
    z: slice
    rows: Tensor
    columns: Tensor
    pages: Tensor
    key: Tensor
    place: Tensor
    late: Tensor | None
    hidden: Tensor | None


@dataclass
class _Weights:
    """Weights, or at first their logits: of groups without counts `[x, M, zR]`, near keys `[x, T, zR]`, chosen keys."""

    far: Tensor
    near: Tensor
    own: Tensor


class _Head:
    """The operands of one head."""

    def __init__(self, given: SelectedOperands, number: int, memory: dict[str, Buffer], is_small: bool) -> None:
        self.given, self.memory, self.is_small = given, memory, is_small
        self.query, self.counts, self.far_key, self.far_value = (t[number] for t in given[:4])
        self.near_counts, self.near_key, self.near_value = (t[number] for t in given[4:7])
        self.key_table, self.value_table = (_by_page(t[number], given.page_size) for t in given[7:9])
        self.pages, self.cell, self.since = (t[number] for t in given[9:12])
        self.sections, self.blocks, self.size, self.width = self.query.shape
        self.weighted = self.far_value * self.counts.unsqueeze(-1)
        absent = (self.cell < 0).unflatten(-1, (-1, given.page_size))
        self.absent = absent if bool((absent & (self.since < self.size).unsqueeze(-1)).any()) else None
        self.cell = self.cell.clamp(min=0)
        self.is_late = bool((self.since > 0).any())
        self.lacks_near = bool((self.near_counts == 0).any())
        self.last = self._last()
        self.later: dict[tuple[int, int], Tensor] = {}
        # Absent groups stand at the mean of the others, so that they do not raise the largest logit.
        total = self.counts.sum(-1, keepdim=True)
        self.nothing = total == 0
        middle = (self.counts / total.clamp(min=1)).to(self.far_key.dtype).unsqueeze(1) @ self.far_key
        self.far_key = torch.where((self.counts > 0).unsqueeze(-1), self.far_key, middle)
        if is_small:
            return
        # The largest norms of groups `[F, 1]`, of near keys up to each `[F, T]`, and of pages if most are read.
        self.far_norm = _norms(self.far_key).amax(1, keepdim=True) if self.far_key.shape[1] else None
        self.near_norm = _norms(self.near_key).cummax(1).values if self.near_key.shape[1] else None
        self.page_norm = None
        if self.pages.numel() >= len(self.key_table):
            self.page_norm = _norms(self.key_table.unflatten(1, (given.page_size, -1))).amax(1)

    def _last(self) -> Tensor:
        """Gives the last near key that each row sees, `[Z, R]`."""
        length, device = self.near_key.shape[1], self.query.device
        if self.given.first < 0:
            return torch.full((self.blocks, self.size), length - 1, device=device)
        block = torch.arange(self.blocks, device=device).unsqueeze(-1) % self.given.per_head
        row = block * self.size + torch.arange(self.size, device=device)
        return (row + self.given.first).clamp(max=length - 1)

    def parts(self) -> Iterator[_Part]:
        """Cuts the work so that what is gathered stays small."""
        numbers = _NUMBERS if self.query.device.type == "cpu" else _NUMBERS_OF_GPU
        numbers = min(numbers, max((self.given.key.numel() + self.given.value.numel()) // 8, _LEAST_NUMBERS))
        gathered = self.pages.shape[-1] * (self.key_table.shape[-1] + self.value_table.shape[-1])
        together = max(numbers // max(gathered, self.counts.shape[-1] * self.size, 1), 1)
        sections = max(together // self.blocks, 1)
        for f in range(0, self.sections, sections):
            for z in range(0, self.blocks, together):
                yield self._part(slice(f, f + sections), slice(z, z + together))

    def _part(self, f: slice, z: slice) -> _Part:
        query = self.query[f, z] * (self.given.scale * LOG2E)
        sections, blocks = query.shape[:2]
        pages, cell = self.pages[f, z].flatten(), self.cell[f, z].flatten(0, 1)
        key = self.memory["key"].rows(self.key_table, pages).view(*cell.shape, self.width)
        section = torch.arange(sections, device=cell.device).view(-1, 1, 1)
        first = section * (self.counts.shape[-1] * blocks) + torch.arange(blocks, device=cell.device).view(-1, 1)
        place = torch.add(first.view(-1, 1), cell, alpha=blocks)
        late = hidden = None
        if self.is_late:
            since = self.since[f, z].flatten(0, 1).to(torch.int32).unsqueeze(-1)
            late = since > torch.arange(self.size, device=cell.device, dtype=torch.int32)
            hidden = late.unsqueeze(2)
        if self.absent is not None:
            absent = self.absent[f, z].flatten(0, 1).unsqueeze(-1)
            hidden = absent if hidden is None else hidden | absent
        columns = query.flatten(0, 1).transpose(1, 2)
        return _Part(f, z, query.flatten(1, 2), columns, pages, key, place.flatten(), late, hidden)

    def value(self, part: _Part, memory: str) -> Tensor:
        """Gives the values of the pages of a part, `[xz, K, dv]`."""
        rows = self.memory[memory].rows(self.value_table, part.pages)
        return rows.view(*part.key.shape[:2], self.far_value.shape[-1])

    def hide(self, part: _Part, numbers: Tensor, value: float) -> Tensor:
        """Puts a value, in place, where a row does not see a chosen key, `[xz, K, R]`."""
        if part.hidden is not None:
            numbers.unflatten(1, (-1, self.given.page_size)).masked_fill_(part.hidden, value)
        return numbers

    def large(self, part: _Part) -> Tensor | None:
        """Marks rows whose logits may be so large that exponentials need a shift, `[x, zR]`; None if there are none.

        The test uses |q| |k| of the keys that a row sees: nothing depends on other keys, not even rounding.
        """
        if self.is_small:
            return None
        sections, rows = part.rows.shape[:2]
        lead = (len(part.columns), self.pages.shape[-1])
        if self.page_norm is None:
            norm = _norms(part.key).view(*lead, self.given.page_size).amax(-1, keepdim=True)
        else:
            norm = self.page_norm[part.pages].view(*lead, 1)
        if part.late is not None:
            norm = norm.masked_fill(part.late, 0.0)
        norm = pad(norm, (0, 0, 0, 1)).amax(1).expand(-1, self.size).reshape(sections, rows)
        if self.near_norm is not None:
            norm = torch.maximum(norm, self.near_norm[part.f, self.last[part.z].flatten()])
        if self.far_norm is not None:
            norm = torch.maximum(norm, self.far_norm[part.f])
        is_large = ~(_norms(part.rows) * norm <= _SMALL)
        return is_large if bool(is_large.any()) else None

    def logits(self, part: _Part) -> _Weights:
        """Computes logits in base 2, -inf for near keys that a row does not see; any for other hidden keys."""
        columns = part.rows.transpose(1, 2)
        far = self.memory["far"].product(self.far_key[part.f], columns)
        near = self.memory["near"].product(self.near_key[part.f], columns)
        if near.shape[1]:
            near += self._later(part)
            if self.lacks_near:
                near.masked_fill_((self.near_counts[part.f] == 0).unsqueeze(-1), -torch.inf)
        return _Weights(far, near, self.memory["own"].product(part.key, part.columns))

    def _later(self, part: _Part) -> Tensor:
        """Gives -inf for near keys that a row does not see since they come later, `[T, zR]`, else 0."""
        edges = (part.z.start, part.rows.shape[1])
        if edges not in self.later:
            place = torch.arange(self.near_key.shape[1], device=part.rows.device)
            is_later = place.unsqueeze(-1) > self.last[part.z].flatten()
            self.later[edges] = part.rows.new_zeros(is_later.shape).masked_fill_(is_later, -torch.inf)
        return self.later[edges]

    def largest(self, logits: _Weights, part: _Part) -> Tensor:
        """Gives the largest logit of each row, `[x, zR]`; 0 if it sees nothing."""
        tops = [t.amax(1) for t in (logits.far, logits.near) if t.shape[1]]
        if logits.far.shape[1]:
            tops[0].masked_fill_(self.nothing[part.f], -torch.inf)
        if logits.own.shape[1]:
            tops.append(logits.own.amax(1).view(part.rows.shape[:2]))
        top = tops[0]
        for other in tops[1:]:
            top = torch.maximum(top, other)
        return top.masked_fill(top == -torch.inf, 0.0)

    def exponentials(self, logits: _Weights, part: _Part, top: Tensor | None) -> tuple[_Weights, Tensor]:
        """Computes weights 2^(logits - top), in place, and those that chosen keys have in their groups, `[xz, K, R]`.

        None for `top` means 0, for small logits.
        """
        far, near, own = logits.far, logits.near, logits.own
        if top is None:
            far, near, own = (t.exp2_() for t in (far, near, own))
        else:
            far, near = (exp2(t.sub_(top.unsqueeze(1)), 64.0) for t in (far, near))
            own = exp2(own.sub_(top.view(-1, 1, self.size)), 64.0)
        replaced = self.memory["replaced"].rows(far.view(-1, self.size), part.place).view(own.shape)
        return _Weights(far, near, own), replaced


def _memory(given: SelectedOperands) -> dict[str, Buffer]:
    """By name, what each part fills and the next one uses again."""
    return defaultdict(partial(Buffer, given.query))


def _by_page(rows: Tensor, size: int) -> Tensor:
    """Gives rows `[S, w]` by page, `[pages, P w]`."""
    missing = -len(rows) % size
    return (pad(rows, (0, 0, 0, missing)) if missing else rows).reshape(-1, size * rows.shape[-1])


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)


def _is_small(given: SelectedOperands) -> bool:
    """Whether no row of `_Head.large` can be large, by the largest norms of all, which are found much sooner.

    The margin is for rounding: what this says must not depend on keys that a row does not see.
    """
    largest = [_norms(rows).amax() for rows in (given.far_key, given.near_key, given.key) if rows.numel()]
    if not (largest and given.query.numel()):
        return True
    product = _norms(given.query).amax() * abs(given.scale * LOG2E) * torch.stack(largest).amax()
    return bool(product < 0.99 * _SMALL)


def forward(given: SelectedOperands) -> tuple[Tensor, Tensor]:
    """Computes output `[N, F, Z, R, dv]` and logarithms of normalisers `[N, F, Z, R]`, inf for rows without keys."""
    if selected_step.takes(given):
        return selected_step.forward(given)
    dtype, given = given.query.dtype, given.raised()
    # Fresh memory that is touched part by part costs a CPU several times as much as all of it at once.
    out = given.query.new_empty(*given.query.shape[:-1], given.value.shape[-1]).zero_()
    lse = given.query.new_empty(given.query.shape[:-1])
    memory, is_small = _memory(given), _is_small(given)
    for number in range(len(out)):
        head = _Head(given, number, memory, is_small)
        for part in head.parts():
            logits, top, large = head.logits(part), None, head.large(part)
            if large is not None:
                head.hide(part, logits.own, -torch.inf)
                top = head.largest(logits, part).masked_fill_(~large, 0.0)
            weights, replaced = head.exponentials(logits, part, top)
            changes = head.hide(part, weights.own.sub_(replaced), 0.0)
            total = (head.counts[part.f].to(weights.far.dtype).unsqueeze(1) @ weights.far).squeeze(1)
            total = total + weights.near.sum(1) + changes.sum(1).view_as(total)
            own_values = head.value(part, "key")  # in the memory of the keys, which are no longer needed
            values = torch.bmm(changes.transpose(1, 2), own_values).view(*part.rows.shape[:2], -1)
            values.baddbmm_(weights.far.transpose(1, 2), head.weighted[part.f])
            if weights.near.shape[1]:
                values.baddbmm_(weights.near.transpose(1, 2), head.near_value[part.f])
            total.masked_fill_(total <= 0, torch.inf)  # such a row sees nothing
            place = out[number, part.f, part.z]
            torch.div(values.view(place.shape), total.view(*place.shape[:-1], 1), out=place)
            logarithm = total.log2() if top is None else top + total.log2()
            lse[number, part.f, part.z] = logarithm.view(place.shape[:-1]) * LN2
    return out.to(dtype), lse


def backward(grad: Tensor, given: SelectedOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of query, far key and value, near key and value, key and value."""
    dtype, given = given.query.dtype, given.raised()
    grad, out = grad.to(lse.dtype), out.to(lse.dtype)
    read = (given.query, given.far_key, given.far_value, given.near_key, given.near_value)
    found = list(map(torch.zeros_like, read))
    totals = [
        rows.new_zeros(len(rows), -(-rows.shape[1] // given.page_size), given.page_size * rows.shape[2])
        for rows in (given.key, given.value)
    ]
    memory, is_small = _memory(given), _is_small(given)
    for number in range(len(out)):
        head, own = _Head(given, number, memory, is_small), [tensor[number] for tensor in (*found, *totals)]
        for part in head.parts():
            f, z = part.f, part.z
            g, level = grad[number, f, z], lse[number, f, z] / LN2
            share = (g * out[number, f, z]).sum(-1)
            large, top, inverse = head.large(part), None, torch.exp2(-level)
            if large is not None:
                inverse.masked_fill_(large.view_as(level), 1.0)
                top = level.flatten(1).masked_fill(~large, 0.0)
            # The weights are not divided by the normaliser, but the slopes are.
            slopes = g * inverse.unsqueeze(-1), share * inverse
            weights, replaced = head.exponentials(head.logits(part), part, top)
            for weight in (weights.own, replaced):
                head.hide(part, weight, 0.0)
            _part_backward(head, part, weights, replaced, slopes, own)
    of_key, of_value = (
        total.view(len(rows), -1, rows.shape[2])[:, : rows.shape[1]].contiguous()
        for total, rows in zip(totals, (given.key, given.value), strict=True)
    )
    return tuple(tensor.to(dtype) for tensor in (*found, of_key, of_value))


def _part_backward(
    head: _Head,
    part: _Part,
    weights: _Weights,
    replaced: Tensor,
    slopes: tuple[Tensor, Tensor],
    found: list[Tensor],
) -> None:
    """Adds the gradients of some query blocks; `slopes` are those of the output and of the normaliser's logarithm."""
    f, z, size, memory = part.f, part.z, head.size, head.memory
    of_query, far_key, far_value, near_key, near_value, key_pages, value_pages = found
    query = head.query[f, z] * head.given.scale
    rows, of_rows = query.flatten(1, 2), query.flatten(0, 1)
    g, of_g = slopes[0].flatten(1, 2), slopes[0].flatten(0, 1)
    d = slopes[1].flatten(1).unsqueeze(1)

    # The chosen keys.
    changes = torch.sub(weights.own, replaced, out=memory["changes"].empty(*replaced.shape))
    values = memory["gradients"].product(changes, of_g)
    value_pages.index_add_(0, part.pages, values.view(len(part.pages), value_pages.shape[1]))
    slope = memory["slope"].product(head.value(part, "value"), of_g.transpose(1, 2)).sub_(d.view(-1, 1, size))
    moved = replaced.mul_(slope)
    slope.mul_(weights.own)
    keys = memory["gradients"].product(slope, of_rows)
    key_pages.index_add_(0, part.pages, keys.view(len(part.pages), key_pages.shape[1]))
    result = torch.bmm(slope.transpose(1, 2), part.key).view_as(rows)

    # The groups, without what the chosen keys took from them.
    counts = head.counts[f].unsqueeze(-1)
    far_value[f] += (weights.far @ g).mul_(counts)
    columns = torch.cat([g, -d.transpose(1, 2)], -1).transpose(1, 2)
    slope = memory["far slope"].product(torch.cat([head.weighted[f], counts], -1), columns).mul_(weights.far)
    slope.view(-1, size).index_add_(0, part.place, moved.view(-1, size), alpha=-1)
    far_key[f] += slope @ rows
    result.baddbmm_(slope.transpose(1, 2), head.far_key[f])
    if weights.near.shape[1]:
        near_value[f] += weights.near @ g
        slope = (head.near_value[f] @ g.transpose(1, 2)).sub_(d).mul_(weights.near)
        near_key[f] += slope @ rows
        result.baddbmm_(slope.transpose(1, 2), head.near_key[f])
    of_query[f, z] = (result * head.given.scale).view(query.shape)
