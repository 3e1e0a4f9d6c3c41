"""Operands of `selected_attention` for tests, and its formula over all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favor.kernels.operands import SelectedOperands


def problem(
    *,
    heads: int = 2,
    sections: int = 2,
    blocks: int = 4,
    rows: int = 4,
    groups: int = 5,
    near: int = 8,
    keys: int = 22,
    pages: int = 3,
    page_size: int = 4,
    width: int = 3,
    value_width: int = 5,
    per_head: int = 2,
    first: int = -1,
    norm: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> SelectedOperands:
    """Draws operands: chosen pages that differ within a block, a group without a key, hidden near and chosen keys."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (norm * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    lead, precision = (heads, sections), torch.promote_types(dtype, torch.float32)
    cell = torch.randint(0, groups - 1, (*lead, keys), generator=generator)
    key, value = draw(heads, keys, width), draw(heads, keys, value_width)
    counts = torch.zeros(*lead, groups, dtype=precision)
    sums = [torch.zeros(*lead, groups, w, dtype=precision) for w in (width, value_width)]
    hidden = torch.rand(*lead, keys, generator=generator) < 0.1
    for h in range(heads):
        for f in range(sections):
            for j in (~hidden[h, f]).nonzero().flatten().tolist():
                m = int(cell[h, f, j])
                counts[h, f, m] += 1
                sums[0][h, f, m] += key[h, j]
                sums[1][h, f, m] += value[h, j]
    means = [(total / counts.clamp(min=1).unsqueeze(-1)).to(dtype) for total in sums]
    every = -(-keys // page_size)
    scores = torch.rand(*lead, blocks, every, generator=generator)
    chosen = scores.argsort(-1)[..., :pages]
    cell = torch.nn.functional.pad(cell.masked_fill(hidden, -1), (0, -keys % page_size), value=-1)
    of_pages = cell.unflatten(-1, (-1, page_size)).unsqueeze(2).expand(-1, -1, blocks, -1, -1)
    own = torch.take_along_dim(of_pages, chosen.unsqueeze(-1), 3).flatten(3)
    since = torch.randint(0, rows + 1, chosen.shape, generator=generator)
    return SelectedOperands(
        draw(*lead, blocks, rows, width),
        counts,
        *means,
        (torch.rand(*lead, near, generator=generator) < 0.8).to(precision),
        draw(*lead, near, width),
        draw(*lead, near, value_width),
        key,
        value,
        chosen,
        own,
        since,
        page_size,
        per_head,
        first,
        0.7,
    )


def naive(given: SelectedOperands) -> Tensor:
    """Computes `selected_attention` row by row, from the weights of its definition."""
    out = given.query.new_zeros(*given.query.shape[:-1], given.value.shape[-1])
    outs: dict[Any, Tensor] = {}
    for n, f, z, r in torch.cartesian_prod(*map(torch.arange, out.shape[:4])).tolist():
        q = given.query[n, f, z, r]
        there = given.counts[n, f] > 0
        far = torch.where(there, (given.scale * given.far_key[n, f] @ q).exp(), 0.0)
        weights, values = [far * given.counts[n, f]], [given.far_value[n, f]]
        for j, page in enumerate(given.pages[n, f, z].tolist()):
            for place in range(given.page_size):
                cell = int(given.cell[n, f, z, j * given.page_size + place])
                if int(given.since[n, f, z, j]) <= r and cell >= 0:
                    token = page * given.page_size + place
                    weights.append(((given.scale * given.key[n, token] @ q).exp() - far[cell]).view(1))
                    values.append(given.value[n, token].view(1, -1))
        last = given.first + z % given.per_head * given.query.shape[3] + r if given.first >= 0 else 10**9
        for j in (given.near_counts[n, f] > 0).nonzero().flatten().tolist():
            if j <= last:
                weights.append((given.scale * given.near_key[n, f, j] @ q).exp().view(1))
                values.append(given.near_value[n, f, j].view(1, -1))
        weight = torch.cat(weights)
        outs[n, f, z, r] = weight @ torch.cat(values) / weight.sum()
    return torch.stack([outs[place] for place in sorted(outs)]).view_as(out)
