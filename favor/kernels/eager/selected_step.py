"""`favor.kernels.selected.selected_attention` for a token of generation in plain torch: all heads at once.

One query for each block and one section is little work: the loop over heads of `favor.kernels.eager.selected` would
cost more than the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favor.kernels.operands import SelectedOperands

_NUMBERS = 2**22  # of the keys and values that are gathered, at most


def takes(given: SelectedOperands) -> bool:
    """Tells whether these operands are those of single queries that see all near keys, and few of them."""
    blocks = given.query.shape[:3].numel()
    gathered = blocks * given.cell.shape[-1] * (given.key.shape[-1] + given.value.shape[-1])
    return given.query.shape[1] == given.query.shape[3] == 1 and given.first < 0 and gathered <= _NUMBERS


def forward(given: SelectedOperands) -> tuple[Tensor, Tensor]:
    """Computes output `[N, 1, Z, 1, dv]` and logarithms of normalisers `[N, 1, Z, 1]`, inf for rows without keys."""
    dtype = given.counts.dtype
    query = given.query[:, 0, :, 0].to(dtype) * given.scale  # [N, Z, d]
    counts, far_key, far_value = given.counts[:, 0], given.far_key[:, 0].to(dtype), given.far_value[:, 0].to(dtype)
    near_key, near_value = given.near_key[:, 0].to(dtype), given.near_value[:, 0].to(dtype)
    key, value = (_chosen(rows, given).to(dtype) for rows in (given.key, given.value))  # [N, Z, K, w]
    cell = given.cell[:, 0]
    is_hidden = (cell < 0) | (given.since[:, 0] > 0).repeat_interleave(given.page_size, -1)

    far = query @ far_key.transpose(1, 2)  # [N, Z, M]
    group = _gathered(far, cell)  # of each chosen key, [N, Z, K]
    far = far.masked_fill((counts == 0).unsqueeze(1), -torch.inf)
    near = (query @ near_key.transpose(1, 2)).masked_fill((given.near_counts[:, 0] == 0).unsqueeze(1), -torch.inf)
    own = (key @ query.unsqueeze(-1)).squeeze(-1)
    own, group = (logits.masked_fill(is_hidden, -torch.inf) for logits in (own, group))

    top = torch.cat([far, near, own], -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    far, near, own, group = ((logits - top).exp() for logits in (far, near, own, group))
    far, change = far * counts.unsqueeze(1), own - group
    total = far.sum(-1) + near.sum(-1) + change.sum(-1)
    total = total.masked_fill(total <= 0, torch.inf)  # such a row sees nothing
    out = far @ far_value + near @ near_value + (change.unsqueeze(-2) @ value).squeeze(-2)
    out = (out / total.unsqueeze(-1)).to(given.query.dtype)
    return out[:, None, :, None], (top.squeeze(-1) + total.log())[:, None, :, None]


def _chosen(rows: Tensor, given: SelectedOperands) -> Tensor:
    """Gives rows `[N, S, w]` of chosen pages, `[N, Z, nP, w]`; places after the last token give the last row."""
    place = given.pages[:, 0].unsqueeze(-1) * given.page_size + torch.arange(given.page_size, device=rows.device)
    place = place.flatten(1).clamp(max=max(rows.shape[1] - 1, 0))  # [N, Z n P]
    found = rows.gather(1, place.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
    return found.unflatten(1, (-1, given.cell.shape[-1])) if place.shape[1] else found.unsqueeze(1)


def _gathered(logits: Tensor, cell: Tensor) -> Tensor:
    """Gives the logits `[N, Z, M]` of the group of each key `[N, Z, K]`; any number for keys without a group."""
    if not logits.shape[-1]:
        return logits.new_zeros(cell.shape)
    return logits.gather(-1, cell.clamp(min=0))
