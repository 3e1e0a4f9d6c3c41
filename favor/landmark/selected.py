"""Selected keys: landmarks stand for the many keys that hardly matter to a query; the few that matter are exact.

    weight of key j for query i = exp(scale q_i.k_j)     if its page was chosen for the block of query i
                                = exp(scale q_i.c_g)     else, c_g the mean of its group

Which keys are near, in groups or chosen is the only approximation: with all pages chosen this is softmax attention.
Choosing exact keys together with means of others under one normaliser is known from clustered attention (Vyas et al.,
2020), MRA-2 (Zeng et al., 2022), RetroInfer and Multipole Attention (2025); means that count as often as they have
members from ToMe (Bolya et al., 2023). `favor.landmark.pages` says how keys are found.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.call import AttentionCall
from favor.kernels.dispatch import is_exporting, is_transformed
from favor.kernels.operands import SelectedOperands
from favor.kernels.selected import selected_attention
from favor.landmark import causal as landmark_causal
from favor.landmark.grouping import sums_of
from favor.landmark.growth import Growth
from favor.landmark.pages import Pages, choose, filled

# Measured: docs/selected_keys.md.
PAGE_SIZE, QUERY_BLOCK = {False: 16, True: 4}, {False: 32, True: 16}  # bidirectional, causal


@dataclass(frozen=True)
class Selection:
    """How keys are selected.

    Attributes:
        pages: chosen for each block of queries.
        size: keys of a page, P.
        rows: queries of a block, R.
        kernel: "auto", "torch" or "triton".
    """

    pages: int
    size: int
    rows: int
    kernel: str

    @classmethod
    def of(cls, call: AttentionCall, keys: int) -> Selection | None:
        """Reads a call; None if no keys are selected.

        Queries that must not see each other, as in the cross attention of a decoder, choose one by one. Causal pages
        divide a section, so that every earlier key is in a page that can be chosen; if few pages are chosen, blocks are
        shorter than the default. Other pages are no longer than the sequence.

        Args:
            call: the call.
            keys: their number.

        Raises:
            ValueError: in an exported program, which has no operator for selected keys, under torch.func, or for too
                few keys for a causal block.
        """
        if not call.selected_keys:
            return None
        if is_exporting():
            raise ValueError("selected keys cannot be exported: set selected_keys=0.")
        if is_transformed():
            raise ValueError("selected keys do not go through torch.func: set selected_keys=0.")
        size = call.page_size or PAGE_SIZE[call.is_causal]
        # A causal page belongs to one section.
        size = gcd(size, call.window or landmark_causal.BLOCK) if call.is_causal else min(size, keys)
        pages, rows = -(-call.selected_keys // size), call.query_block or QUERY_BLOCK[call.is_causal]
        if call.is_causal and not call.query_block:
            rows = min(rows, pages)
        if not (call.is_causal or call.use_statistics):
            rows = 1
        if call.is_causal:
            Growth.of(pages, rows)  # refuses too few pages now, before a long sequence needs them
        return cls(pages, size, rows, call.kernel)

    @property
    def growth(self) -> Growth:
        """How the pages of a causal block are shared out."""
        return Growth.of(self.pages, self.rows)

    def cells(self, cells: Tensor, pages: Tensor) -> Tensor:
        """Gives the group of each key of pages `[N, Z, n]`, `[N, Z, nP]`, given all cells `[N, S]`; -1 for none."""
        missing = -cells.shape[1] % self.size
        of_pages = (pad(cells, (0, missing), value=-1) if missing else cells).unflatten(1, (-1, self.size))
        index = pages.flatten(1).unsqueeze(-1).expand(-1, -1, self.size)
        return of_pages.gather(1, index).to(torch.int32).view(*pages.shape[:2], -1)  # half the memory

    def blocks(self, rows: Tensor) -> Tensor:
        """Cuts rows `[..., T, w]` into blocks `[..., T/R, R, w]`, with zeros at the end; one of T if R is larger."""
        size = min(self.rows, rows.shape[-2])
        return filled(rows, size).unflatten(-2, (-1, size))


def bidirectional(
    selection: Selection,
    query: Tensor,
    asking: Tensor,
    key: Tensor,
    value: Tensor,
    cells: Tensor,
    counts: Tensor,
    number: int,
    scale: float,
) -> Tensor:
    """Computes attention of all queries, without a window.

    Args:
        selection: how keys are selected.
        query, asking: `[B, Hk, G, L, d]`, those that attend and those that select: zeros for those that do not count.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, hidden ones zeros.
        cells: the group of each key, `[B, Hk, S]`; `number` for hidden ones.
        counts: 1 for keys that count and 0 for others, `[B, Hk, S]`.
        number: of groups.
        scale: of the logits.

    Returns:
        `[B, Hk, G, L, dv]`.
    """
    lead, (groups, length) = query.shape[:2], query.shape[2:4]
    sizes, *sums = sums_of(cells, number, counts.unsqueeze(-1), key, value)
    means = [(total / sizes.clamp(min=1)).to(query.dtype).flatten(0, 1).unsqueeze(1) for total in sums]
    rows = selection.blocks(query)  # [B, Hk, G, n, R, d]
    flat = rows.flatten(0, 1).flatten(1, 2)  # [N, Z, R, d]
    keys, values, counts, cells = (tensor.flatten(0, 1) for tensor in (key, value, counts, cells))
    pages, since = choose(
        Pages.of(keys, counts > 0, selection.size),
        selection.blocks(asking).flatten(0, 1).flatten(1, 2),
        selection.pages,
    )
    cell = selection.cells(cells.masked_fill(counts == 0, -1), pages)
    nothing = (tensor.new_empty(len(keys), 1, 0, *tensor.shape[2:]) for tensor in (counts, keys, values))
    near_counts, near_key, near_value = nothing
    operands = SelectedOperands(
        query=flat.unsqueeze(1),
        counts=sizes.flatten(0, 1).squeeze(-1).unsqueeze(1),
        far_key=means[0],
        far_value=means[1],
        near_counts=near_counts,
        near_key=near_key,
        near_value=near_value,
        key=keys,
        value=values,
        pages=pages.unsqueeze(1),
        cell=cell.unsqueeze(1),
        since=since.unsqueeze(1),
        page_size=selection.size,
        per_head=rows.shape[3],
        first=-1,
        scale=scale,
    )
    out = selected_attention(operands, selection.kernel)
    out = out.squeeze(1).unflatten(0, lead).unflatten(2, (groups, -1)).flatten(3, 4)
    return out if out.shape[3] == length else out[:, :, :, :length]  # a slice costs a copy of its gradient


def windowed(
    selection: Selection,
    queries: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor, Tensor],
    near: tuple[Tensor, Tensor, Tensor],
    tokens: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Computes attention of blocks of tokens that see their own keys exactly.

    Args:
        selection: how keys are selected.
        queries: those that attend and those that select, `[N, F, G, w, d]`, of F blocks of w tokens; of the latter,
            zeros do not count.
        far: counts and means of the groups outside of each block, `[N, F, M]`, `[N, F, M, d]` and `[N, F, M, dv]`.
        near: counts, keys and values of each block, `[N, F, w]`, `[N, F, w, d]` and `[N, F, w, dv]`.
        tokens: keys, values and groups of all tokens, `[N, L, d]`, `[N, L, dv]` and `[N, L]`; -1 for hidden ones.
        scale: of the logits.

    Returns:
        `[N, G, F w, dv]`.
    """
    (sections, groups, window), (key, value, cells) = queries[0].shape[1:4], tokens
    rows, asking = map(selection.blocks, queries)  # [N, F, G, n, R, d]
    blocks, per_head = rows.flatten(2, 3), rows.shape[3]
    section = torch.arange(sections, device=key.device).repeat_interleave(blocks.shape[2])
    begin, end = section * window, (section + 1) * window
    own = (-(-begin // selection.size), end // selection.size)
    pages, since = choose(
        Pages.of(key, cells >= 0, selection.size), asking.flatten(2, 3).flatten(1, 2), selection.pages, near=own
    )
    place = (pages.unsqueeze(-1) * selection.size + torch.arange(selection.size, device=key.device)).flatten(2)
    is_near = (place >= begin.unsqueeze(-1)) & (place < end.unsqueeze(-1))
    cell = selection.cells(cells, pages).masked_fill(is_near, -1)
    chosen = [tensor.unflatten(1, (sections, -1)) for tensor in (pages, cell, since)]
    operands = SelectedOperands(
        query=blocks,
        counts=far[0],
        far_key=far[1],
        far_value=far[2],
        near_counts=near[0],
        near_key=near[1],
        near_value=near[2],
        key=key,
        value=value,
        pages=chosen[0],
        cell=chosen[1],
        since=chosen[2],
        page_size=selection.size,
        per_head=per_head,
        first=-1,
        scale=scale,
    )
    out = selected_attention(operands, selection.kernel)
    out = out.unflatten(2, (groups, per_head)).flatten(3, 4)[:, :, :, :window]  # [N, F, G, w, dv]
    return out.transpose(1, 2).flatten(2, 3)
