"""The operators of `favor.kernels.chosen` in plain torch: one head after another, some blocks of queries at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from favor.kernels.eager.common import LN2, LOG2E, Buffer, exp2, vanish
from favor.kernels.operands import ChosenOperands

# Numbers of keys gathered, or of scores held, at a time: on a CPU they stay in the cache of each thread.
_NUMBERS, _NUMBERS_OF_GPU = 2**19, 2**25
_NUMBERS_OF_ONE = 2**22  # the same for single queries, which read them once
_ROWS = 64  # queries searched at a time at least, where there are as many: fewer make slow products
_LOWEST = -8388609  # the digits of the smallest finite number of float32


def choose(query: Tensor, key: Tensor, seen: Tensor, taken: Tensor | None, number: int) -> Tensor:
    """Computes `favor.kernels.chosen.choose`."""
    query, key = _raised(query), _raised(key)
    heads, blocks, rows = query.shape[:3]
    groups, length = heads // len(key), key.shape[1]
    if blocks == rows == 1 and heads * length <= _NUMBERS_OF_ONE:
        return _choose_once(query[:, 0], key, seen.squeeze(1), taken, number)
    chosen = torch.full((heads, blocks, rows, number), -1, dtype=torch.int32, device=query.device)
    most = max(2 * _numbers(query) // max(length * rows, 1), 1)
    least = 0 if taken is None else taken.shape[-1]  # if there are no more keys, all of them are taken
    place = torch.arange(-(-length // number) * number, dtype=torch.int32, device=query.device)
    memory = Buffer(query)
    for head, limits in enumerate(seen.tolist()):
        columns = key[head // groups].T
        for first, last in _runs(limits, most, -(-_ROWS // rows)):
            limit = max(limits[first:last])
            if limit <= least:
                continue
            some = place[: -(-limit // number) * number]
            found = memory.empty((last - first) * rows, len(some))
            torch.mm(query[head, first:last].flatten(0, 1), columns[:, :limit], out=found[:, :limit])
            hidden = some >= seen[head, first:last].unsqueeze(1)
            if taken is not None:
                hidden |= _taken(taken[head, first:last], some)
            scores = found.view(last - first, rows, -1, number)
            chosen[head, first:last] = _best(scores, hidden, some.view(-1, number), limits[first:last])
    return chosen


def _choose_once(query: Tensor, key: Tensor, seen: Tensor, taken: Tensor | None, number: int) -> Tensor:
    """Chooses for one query `[N, 1, r]` of each head: too little work for a loop over heads."""
    limits = seen.tolist()
    limit = max(limits)
    if limit <= (0 if taken is None else taken.shape[-1]):  # all of them are taken
        return query.new_full((len(query), 1, 1, number), -1, dtype=torch.int32)
    place = torch.arange(-(-limit // number) * number, dtype=torch.int32, device=query.device)
    hidden = place >= seen.unsqueeze(1)
    if taken is not None:
        hidden |= _taken(taken[:, 0], place)
    found = query.new_empty(len(key), len(query) // len(key), len(place))
    torch.bmm(query.view(*found.shape[:2], -1), key[:, :limit].mT, out=found[..., :limit])
    scores = found.view(len(query), 1, -1, number)
    return _best(scores, hidden, place.view(-1, number), limits).unsqueeze(1)


def _raised(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _numbers(tensor: Tensor) -> int:
    return _NUMBERS * torch.get_num_threads() if tensor.device.type == "cpu" else _NUMBERS_OF_GPU


def _runs(limits: Sequence[object], most: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Yields first and last block of runs: at most `most` blocks that see equally many keys, or `least` of any."""
    first = 0
    while first < len(limits):
        last = first + 1
        while last < len(limits) and (last - first < least or limits[last] == limits[first]) and last - first < most:
            last += 1
        yield first, last
        first = last


def _taken(taken: Tensor, place: Tensor) -> Tensor:
    """Marks the keys at `place`, all from 0 on, that are taken, `[z, n]`; `taken` has the key of each bin, `[z, C]`."""
    number = taken.shape[-1]
    padded = pad(place, (0, -len(place) % number)).view(-1, number)
    return (taken.unsqueeze(1) == padded).flatten(1)[:, : len(place)]


def _best(scores: Tensor, hidden: Tensor, place: Tensor, limits: list[int]) -> Tensor:
    """Gives the key with the largest score of each bin, -1 for none, `[z, B, bins]`.

    The largest with its place is slow to find on a CPU. In float32 the place is put in the last digits of the score:
    so many as the limit of the block needs.

    Args:
        scores: `[z, B, depth, bins]`; overwritten.
        hidden: keys that do not count, `[z, depth bins]`.
        place: all keys, int32 `[depth, bins]`.
        limits: how many keys each block sees.
    """
    (blocks, _, depth), number = scores.shape[:3], scores.shape[3]
    if scores.dtype != torch.float32 or depth > 2**12:
        best, row = scores.masked_fill_(hidden.view(blocks, 1, depth, number), -torch.inf).max(2)
        absent = best == -torch.inf
    else:
        low = [(1 << (max(limit - 1, 0) // number).bit_length()) - 1 for limit in limits]
        mask = place.new_tensor(low).view(-1, 1, 1)
        digits, is_hidden = scores.view(torch.int32).flatten(2), hidden.to(torch.int32).neg_().unsqueeze(1)
        places = (place // number).flatten()
        digits.bitwise_and_((is_hidden | mask).bitwise_not_())
        digits.bitwise_or_((is_hidden & (places ^ _LOWEST)).bitwise_xor_(places))  # `where` is slow
        digits = scores.amax(2).view(torch.int32)
        absent, row = digits == _LOWEST, digits & mask
    found = row * number + place[0]
    absent |= found >= place.new_tensor(limits).view(-1, 1, 1)  # scores that are no numbers
    return torch.where(absent, -1, found).to(torch.int32)


class _Part(NamedTuple):
    """Some blocks of one head that see the same near keys: z blocks of B rows, which read n keys and means each.

    Attributes:
        blocks: which.
        query: times the scale in base 2, `[z, B, d]`.
        near: the near keys.
        shared: runs of keys, int64 `[zC]`.
        own: places of keys, int32 `[zB, O]`; 0 for none.
        cuts: how many of n are near keys, means, shared and own keys.
    """

    blocks: slice
    query: Tensor
    near: slice
    shared: Tensor
    own: Tensor
    cuts: tuple[int, int, int, int]


class _Head:
    """The operands of one query head, and memory that its parts use in turn."""

    def __init__(self, given: ChosenOperands, head: int, memory: dict[str, Buffer]) -> None:
        self.run, self.section, self.memory = int(given.run[head]), given.section, memory
        self.most = given.most
        key_head, size = head // (len(given.query) // len(given.key)), given.query.shape[2]
        self.query, self.scale = given.query[head], given.scale
        self.key, self.value = given.key[key_head], given.value[key_head]
        self.far_key, self.far_value = given.far_key[key_head], given.far_value[key_head]
        shared, self.own, self.far_log = given.shared[head].long(), given.own[head], given.far_log[head] * LOG2E
        self.shared = shared[:, : -(-given.most // self.run)]  # heads with shorter runs have more
        self.first, self.seen = int(given.first[head]) if self.section else 0, given.seen[head].tolist()
        starts = [self.first + size * block for block in range(len(self.seen))]
        self.sections = [start // self.section * self.section if self.section else 0 for start in starts]
        self.widths = (self.shared >= 0).sum(1).tolist()
        counts = pad(self.far_log > -torch.inf, (1, 0)) * torch.arange(
            self.far_log.shape[1] + 1, device=self.own.device
        )
        self.far_widths = counts.amax(1).tolist()  # means behind are never read
        self.gaps = (self.own < 0).flatten(1).any(1).tolist()
        self.later = self.query.new_full((self.section, self.section), -torch.inf).triu_(1)
        self.holes = self._holes(given.seen[head].view(-1, 1, 1))

    def _holes(self, seen: Tensor) -> Tensor | None:
        """Gives -inf for places of chosen runs without a key, else 0, `[Z, 1, C run]`; None if all have one."""
        last = self.shared.unsqueeze(2) * self.run + self.run
        if not bool((last > seen).any()):
            return None
        place = last - self.run + torch.arange(self.run, device=seen.device)
        return self.query.new_zeros(place.shape).masked_fill_(place >= seen, -torch.inf).flatten(1).unsqueeze(1)

    def parts(self) -> Iterator[_Part]:
        """Cuts the work so that what is gathered stays small, and computes logits."""
        gathered = max(self.shared.shape[1] * self.run, 1) * self.query.shape[2]
        groups = list(zip(self.seen, self.sections, strict=True))
        for first, last in _runs(groups, max(_numbers(self.query) // gathered, 1)):
            part = self._part(slice(first, last), *groups[first])
            if any(part.cuts):
                yield part

    def _part(self, blocks: slice, seen: int, section: int) -> _Part:
        query = self.query[blocks] * (self.scale * LOG2E)
        first, length = self._first(blocks), len(self.key) if self.section else 0
        near = slice(min(section, length), min(section + min(first + query[..., 0].numel(), self.section), length))
        shared = self.shared[blocks, : max(self.widths[blocks])]
        own = self.own[blocks].flatten(0, 1)
        own = own if seen > self.most else own[:, :0]
        cuts = (near.stop - near.start, max(self.far_widths[blocks]), shared.shape[1] * self.run, own.shape[1])
        return _Part(blocks, query, near, shared.flatten(), own.clamp(min=0), cuts)

    def _first(self, blocks: slice) -> int:
        """Gives the place of the first row in its section."""
        return self.first + blocks.start * self.query.shape[1] - self.sections[blocks.start]

    def logits(self, part: _Part) -> Tensor:
        """Computes logits in base 2, `[z, B, n]`."""
        logits = self.products(part, part.query, self.key, self.far_key, "logits")
        near, far, shared, own = logits.split(part.cuts, 2)
        if part.cuts[0]:
            rows, first = near.flatten(0, 1), self._first(part.blocks)
            rows += self.later[first : first + len(rows), : part.cuts[0]]
        far += self.far_log[part.blocks, : part.cuts[1]].unsqueeze(1)
        if self.holes is not None:
            shared += self.holes[part.blocks, :, : part.cuts[2]]
        if part.cuts[3] and any(self.gaps[part.blocks]):
            own.masked_fill_(self.own[part.blocks] < 0, -torch.inf)
        return logits

    def products(self, part: _Part, rows: Tensor, table: Tensor, far_table: Tensor, name: str) -> Tensor:
        """Multiplies rows `[z, B, w]` with those of a table and of means that they read, `[z, B, n]`."""
        result = self.memory[name].empty(*rows.shape[:2], sum(part.cuts))
        near, far, shared, own = result.split(part.cuts, 2)
        flat = rows.flatten(0, 1)
        if part.cuts[0]:
            torch.mm(flat, table[part.near].T, out=near.flatten(0, 1))
        if part.cuts[1]:
            torch.mm(flat, far_table[: part.cuts[1]].T, out=far.flatten(0, 1))
        if part.cuts[2]:
            torch.bmm(rows, self._gathered(part, table).mT, out=shared)
        if part.cuts[3]:
            own.copy_(_own_products(flat, table, part.own).view_as(own))
        return result

    def add_sums(self, part: _Part, weights: Tensor, table: Tensor, far_table: Tensor, result: Tensor) -> None:
        """Adds the rows of a table and of means that are read, times weights `[z, B, n]`, to `result`, `[z, B, w]`."""
        near, far, shared, own = weights.split(part.cuts, 2)
        rows = result.flatten(0, 1)
        if part.cuts[0]:
            rows.addmm_(near.flatten(0, 1), table[part.near])
        if part.cuts[1]:
            rows.addmm_(far.flatten(0, 1), far_table[: part.cuts[1]])
        if part.cuts[2]:
            result.baddbmm_(shared, self._gathered(part, table))
        if part.cuts[3]:
            weights = own.reshape(part.own.shape)
            rows += embedding_bag(part.own, table, mode="sum", per_sample_weights=weights)  # nothing is gathered

    def scatter(self, part: _Part, weights: Tensor, rows: Tensor, table: Tensor, far_table: Tensor) -> None:
        """Adds rows `[z, B, w]`, times weights `[z, B, n]`, to those of a table and of means that they read."""
        near, far, shared, own = weights.split(part.cuts, 2)
        flat = rows.flatten(0, 1)
        if part.cuts[0]:
            table[part.near].addmm_(near.flatten(0, 1).T, flat)
        if part.cuts[1]:
            far_table[: part.cuts[1]].addmm_(far.flatten(0, 1).T, flat)
        if part.cuts[2]:
            found = torch.bmm(shared.mT, rows, out=self.memory["rows"].empty(len(rows), part.cuts[2], rows.shape[2]))
            runs = self._runs(table)
            runs.index_add_(0, part.shared, found.view(-1, runs.shape[1]))  # many times as fast with int64
        if part.cuts[3]:
            found = own.reshape(len(flat), -1, 1) * flat.unsqueeze(1)
            table.index_add_(0, part.own.flatten().long(), found.flatten(0, 1))

    def _runs(self, table: Tensor) -> Tensor:
        """Gives a table `[S, w]` by runs, `[S // run, run w]`."""
        return table[: len(table) // self.run * self.run].view(-1, self.run * table.shape[1])

    def _gathered(self, part: _Part, table: Tensor) -> Tensor:
        """Gives the chosen rows of each block, `[z, C run, w]`, in memory that the next call overwrites."""
        return self.memory["rows"].rows(self._runs(table), part.shared).view(-1, part.cuts[2], table.shape[1])


@cache
def _accept_sparse() -> None:
    """Has PyTorch say now, unheard, that its sparse matrices are new; it says so once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _own_products(rows: Tensor, table: Tensor, own: Tensor) -> Tensor:
    """Multiplies each row `[n, w]` with its own rows of a table `[S, w]` at places `[n, O]`: `[n, O]`."""
    if rows.device.type != "cpu":
        return torch.bmm(table[own.flatten()].view(*own.shape, -1), rows.unsqueeze(2)).squeeze(2)
    _accept_sparse()  # nothing is gathered, which takes longer than the products
    ends = torch.arange(0, own.numel() + 1, own.shape[1], dtype=own.dtype)
    shape, zeros = (len(rows), len(table)), rows.new_zeros(own.numel())
    places = torch.sparse_csr_tensor(ends, own.flatten(), zeros, shape, check_invariants=False)
    return torch.sparse.sampled_addmm(places, rows, table.T, beta=0.0, out=places).values().view(own.shape)


def _prepared(given: ChosenOperands) -> ChosenOperands:
    """Gives tokens and means in float32 at least."""
    query, key, value, far_key, far_value, far_log = (
        _raised(tensor).contiguous()
        for tensor in (given.query, given.key, given.value, given.far_key, given.far_value, given.far_log)
    )
    return given._replace(query=query, key=key, value=value, far_key=far_key, far_value=far_value, far_log=far_log)


def forward(given: ChosenOperands) -> tuple[Tensor, Tensor]:
    """Computes `favor.kernels.chosen.chosen_attention`: the output and the logarithm of the normaliser."""
    dtypes, given = (given.query.dtype, given.far_log.dtype), _prepared(given)
    if given.section and given.query.shape[1:3] == (1, 1):
        out, lse = _one_query(given)
        return out.to(dtypes[0]), lse.to(dtypes[1])
    out = given.query.new_zeros(*given.query.shape[:3], given.value.shape[2])
    lse = given.query.new_full((*given.query.shape[:3], 1), -torch.inf)
    memory = {name: Buffer(out) for name in ("logits", "rows")}
    lowest, tiny = torch.finfo(out.dtype).min, torch.finfo(out.dtype).tiny
    for number in range(len(out)):
        head = _Head(given, number, memory)
        for part in head.parts():
            logits, result = head.logits(part), out[number, part.blocks]
            top = logits.amax(2, keepdim=True).clamp_(min=lowest)
            weights = vanish(logits.sub_(top).exp2_())
            total = weights.sum(2, keepdim=True)
            head.add_sums(part, weights, head.value, head.far_value, result)
            result /= total.clamp(min=tiny)
            lse[number, part.blocks] = total.log2_().add_(top).mul_(LN2)
    return out.to(dtypes[0]), lse.squeeze(3).to(dtypes[1])


def _one_query(given: ChosenOperands) -> tuple[Tensor, Tensor]:
    """Computes one query of each head: too little work for a loop over heads. Runs are single keys here."""
    (heads, _, _, width), (key_heads, length) = given.query.shape, given.key.shape[:2]
    groups, first = heads // key_heads, given.first.unsqueeze(1)
    begin = first // given.section * given.section
    near = begin + torch.arange(int((first - begin).max()) + 1, dtype=torch.int32, device=first.device)
    own = torch.where(given.seen > given.most, given.own[:, 0, 0], -1)
    place = torch.cat([torch.where(near > first, -1, near), given.shared[:, 0], own], 1)
    hidden, count = (place < 0).unsqueeze(1), place.shape[1]
    base = torch.arange(key_heads, device=place.device).repeat_interleave(groups) * length
    rows = place.clamp(min=0) + base.unsqueeze(1)
    query, far_log = given.query[:, 0] * (given.scale * LOG2E), given.far_log * LOG2E
    out, lse = query.new_empty(heads, 1, given.value.shape[2]), query.new_empty(heads, 1, 1)
    memory, lowest = Buffer(query), torch.finfo(query.dtype).min
    step = max(_NUMBERS_OF_ONE // (count * width * groups), 1)
    for start in range(0, key_heads, step):
        own_keys, part = slice(start, start + step), slice(start * groups, (start + step) * groups)
        some = query[part]
        far = some.unflatten(0, (-1, groups)).squeeze(2) @ given.far_key[own_keys].mT
        far = far.flatten(0, 1).unsqueeze(1) + far_log[part]
        found = memory.rows(given.key.flatten(0, 1), rows[part].flatten()).view(len(some), count, width)
        exact = (some @ found.mT).masked_fill_(hidden[part], -torch.inf)
        top = torch.maximum(exact.amax(2, keepdim=True), far.amax(2, keepdim=True)).clamp_(min=lowest)
        exact, far = (vanish(logits.sub_(top).exp2_()) for logits in (exact, far))
        total = exact.sum(2, keepdim=True) + far.sum(2, keepdim=True)
        means = far.squeeze(1).unflatten(0, (-1, groups)) @ given.far_value[own_keys]
        weights = exact.squeeze(1)
        found = embedding_bag(rows[part], given.value.flatten(0, 1), mode="sum", per_sample_weights=weights)
        out[part] = (found + means.flatten(0, 1)).unsqueeze(1) / total
        lse[part] = total.log2_().add_(top).mul_(LN2)
    return out.unsqueeze(1), lse.squeeze(2).unsqueeze(1)


def backward(grad: Tensor, given: ChosenOperands, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Computes the gradients of queries, keys, values, and mean keys and values; weights are computed again."""
    dtype, given = given.query.dtype, _prepared(given)
    grad, lse = _raised(grad), _raised(lse).unsqueeze(3) * LOG2E
    lse.masked_fill_(lse == -torch.inf, 0.0)  # nothing is seen: all logits are -inf
    delta = (grad * out).sum(3, keepdim=True)
    of_query = torch.zeros_like(given.query)
    tables = (given.key, given.value, given.far_key, given.far_value)
    of_key, of_value, of_far_key, of_far_value = sums = [torch.zeros_like(table) for table in tables]
    memory = {name: Buffer(of_query) for name in ("logits", "rows", "slope")}
    for number in range(len(of_query)):
        head, own = _Head(given, number, memory), number // (len(of_query) // len(of_key))
        for part in head.parts():
            rows = grad[number, part.blocks]
            weights = exp2(head.logits(part).sub_(lse[number, part.blocks]))
            head.scatter(part, weights, rows, of_value[own], of_far_value[own])
            slope = head.products(part, rows, head.value, head.far_value, "slope")
            slope.sub_(delta[number, part.blocks]).mul_(weights)
            head.scatter(part, slope, part.query, of_key[own], of_far_key[own])
            head.add_sums(part, slope, head.key, head.far_key, of_query[number, part.blocks])
    of_query *= given.scale
    of_key *= LN2  # queries were in base 2
    of_far_key *= LN2
    return tuple(tensor.to(dtype) for tensor in (of_query, *sums))
