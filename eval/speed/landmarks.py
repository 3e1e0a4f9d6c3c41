"""The right output of attention through landmarks, for some query rows: what the fast code chooses, summed in float64.

The choice is made by the parts of `favor.landmark` in the type that is timed, since one wrong last digit may choose
another key that is as good.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.eval.speed.reference import Rows, Sample
from favor.kernels.chosen import choose
from favor.landmark import bidirectional, causal
from favor.landmark.bidirectional import Nodes, choose_nodes
from favor.landmark.causal import BLOCK, SECTION, SHARE, STEP, Past
from favor.landmark.sorting import order_of

Choice = tuple[Tensor, Tensor, Tensor]


def landmark_rows(sample: Sample, means: int, selected: int) -> Rows:
    """Computes the output of some rows, `[R, dv]`.

    Args:
        sample: the rows.
        means: M, nodes of keys in encoders.
        selected: K, keys that a block reads exactly.
    """
    query, key = sample.tokens
    if query.device.type == "cpu":
        query, key = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (query, key))
    if sample.causal:
        exact, mean, left = _causal(sample, query, key, selected)
    else:
        exact, mean, left = _nodes(sample, query, key, means, selected)
    widths, pairs = (sample.key.shape[1], sample.value.shape[1]), torch.cat([sample.key, sample.value], 1)
    number = left.shape[1]
    sums = pairs.new_zeros(number, sum(widths)).index_add(0, mean, pairs)
    far_key, far_value = (sums / mean.bincount(minlength=number).clamp(min=1).unsqueeze(1)).split(widths, 1)
    logits = sample.query @ torch.cat([sample.key, far_key]).T * widths[0] ** -0.5
    times = torch.cat([exact.double(), left.double()], 1)
    return (logits + times.log()).softmax(-1) @ torch.cat([sample.value, far_value]), 1.0


def _nodes(sample: Sample, query: Tensor, key: Tensor, means: int, selected: int) -> Choice:
    """Chooses for rows of an encoder.

    Args:
        sample: the rows.
        query, key: `[B, H, L, d]` and `[B, Hk, L, d]`.
        means, selected: M and K.

    Returns:
        Which keys each row reads exactly, boolean `[R, L]`; the mean of each key, `[L]`; how often each mean counts for
        each row, `[R, F]`.
    """
    (batch, heads), (key_heads, length) = query.shape[:2], key.shape[1:3]
    groups, number, run = heads // key_heads, min(means, length), -(-length // means)
    key, rows = key.flatten(0, 1), query.reshape(-1, groups * length, query.shape[3]).unflatten(1, (groups, length))
    lengths = torch.full((batch * key_heads,), length, device=key.device)
    order = order_of(key, rows, lengths, lengths).view(-1, length)
    key = key.flatten(0, 1)[order]
    of_head, own = sample.batch * key_heads + sample.key_head, sample.batch * heads + sample.head
    step = torch.arange(length, device=key.device)
    node = torch.empty_like(step).index_copy(0, order[of_head] - of_head * length, step // run)
    left = node.bincount(minlength=number).expand(len(sample.rows), -1)
    if not selected:
        return torch.zeros(len(left), length, dtype=torch.bool, device=key.device), node, left
    rows, repeated = rows.flatten(0, 1), lengths.repeat_interleave(groups)
    place = order_of(rows, key.unsqueeze(1), repeated, lengths).view(-1, length)
    blocks = pad(rows.flatten(0, 1)[place], (0, 0, 0, -length % bidirectional.BLOCK))
    blocks = blocks.unflatten(1, (-1, bidirectional.BLOCK))
    size, selected = torch.full_like(lengths, run), min(selected, length)
    most = min(-(-selected // run), number)
    chosen = choose_nodes(blocks, repeated, Nodes.of(key, key, lengths, size, number), size, selected, most)[own]
    block = torch.empty_like(step).index_copy(0, place[own] - own * length, step // bidirectional.BLOCK)
    is_chosen = _marked(chosen[block[sample.rows]], number)
    return is_chosen[:, node], node, left.masked_fill(is_chosen, 0)


def _causal(sample: Sample, query: Tensor, key: Tensor, selected: int) -> Choice:
    """Chooses for rows of a decoder; the choice of a head does not depend on others."""
    query, key = query[sample.batch, sample.head][None, None], key[sample.batch, sample.key_head][None, None]
    length, rows = key.shape[2], sample.rows
    samples = query[:, :, ::STEP]
    kept = causal.coordinates(samples[:, :, : BLOCK // STEP], key[:, :, :BLOCK])
    index = causal.indexed(key, kept)
    start = torch.arange(0, length, BLOCK, device=key.device).unsqueeze(0)
    shared = causal.votes(Past(key, key, key, key, samples, kept, index), start, selected, "auto")
    blocks = pad(query, (0, 0, 0, -length % BLOCK)).unflatten(2, (-1, BLOCK))[0]
    blocks = blocks.gather(3, kept[0, :, None, None].expand(*blocks.shape[:3], -1))
    number = shared.shape[2] // SHARE
    seen = (start // SECTION * SECTION).to(torch.int32)
    own = choose(blocks, index[0], seen, number, taken=shared, kernel="auto")
    place, limit = torch.arange(length, device=key.device), (rows // SECTION * SECTION).unsqueeze(1)
    by_block = _marked(shared[0, rows // BLOCK], length)
    near = (place >= limit) & (place <= rows.unsqueeze(1))
    exact = by_block | _marked(own[0].flatten(0, 1)[rows], length) | near
    taken = pad(by_block, (0, -length % SECTION)).unflatten(1, (-1, SECTION)).sum(2)
    closed = torch.arange(taken.shape[1], device=key.device) < limit // SECTION
    return exact, place // SECTION, (SECTION - taken) * closed


def _marked(places: Tensor, number: int) -> Tensor:
    """Marks places `[R, n]` among `number`, boolean `[R, number]`; -1 is none."""
    marks = torch.zeros(len(places), number + 1, dtype=torch.bool, device=places.device)
    return marks.scatter(1, torch.where(places < 0, number, places).long(), True)[:, :number]
