"""Attention by landmarks from its definition, over all pairs of tokens in float64: the truth for tests and benchmarks.

    out_i = (sum_j exp(q_i.k_j) v_j + sum_m n_im exp(q_i.c_m) w_m) / (the same sum of weights)

j are the keys that query i reads exactly, c_m and w_m are means of keys and values, and n_im says how often a mean
counts; queries hold the scale. In encoders a mean is a node of alike keys, which is read exactly or counts with all of
its keys. In causal attention it is a closed section, less the keys that the block of the query chose. Memory and time
are quadratic in the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.landmark.attention import Landmarks
from favor.landmark.bidirectional import BLOCK as TOGETHER
from favor.landmark.bidirectional import SPREAD
from favor.landmark.causal import BLOCK, PART, SECTION, SHARE, SINK, STEP
from favor.landmark.sorting import CENTRES, SAMPLED


def naive_landmark_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    selected_keys: int | None = None,
    use_statistics: bool = True,
) -> Tensor:
    """Computes `favor.favor_attention` with `features="landmark"` from its definition, for tokens without padding.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        num_landmarks: M.
        is_causal: query i sees keys 0 ... S - L + i.
        scale: of the logits, 1/sqrt(d) by default.
        selected_keys: K, by default that of `Landmarks`.
        use_statistics: False if queries of encoders must not see each other.

    Returns:
        `[B, H, L, dv]`, float64.
    """
    query, key, value = query.double(), key.double(), value.double()
    query = query * (query.shape[3] ** -0.5 if scale is None else scale)
    number = Landmarks.default_selected[is_causal] if selected_keys is None else selected_keys
    heads = query.unflatten(1, (key.shape[1], -1)).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    outs = []
    for x, y, v in zip(*heads, strict=True):
        if is_causal:
            outs += [_causal(own, y, v, number) for own in x]
        else:
            outs += _encoder(x, y, v, num_landmarks, number, use_statistics)
    return torch.stack(outs).unflatten(0, query.shape[:2])


def _read(query: Tensor, key: Tensor, value: Tensor, exact: Tensor, means: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Reads exact keys, boolean `[L, S]`, and mean keys and values that count so often, `[L, F]`."""
    far_key, far_value, count = means
    times = torch.cat([exact.double(), count], 1)
    return (query @ torch.cat([key, far_key]).T + times.log()).softmax(1) @ torch.cat([value, far_value])


def _encoder(query: Tensor, key: Tensor, value: Tensor, means: int, selected: int, together: bool) -> list[Tensor]:
    """Computes the heads `[G, L, d]` of one key head."""
    order = _order(key, query if together else key[None])
    key, value = key[order], value[order]
    node = torch.arange(len(key)) // -(-len(key) // means)
    size = node.bincount()
    mean, far_value, square = (torch.stack([t[node == m].mean(0) for m in node.unique()]) for t in (key, value, key**2))
    variance, chosen = square - mean**2, min(-(-selected // int(size[0])), len(size))
    outs = []
    for own in query:
        place = _order(own, key[None]) if together else torch.arange(len(own))
        exact, count = torch.zeros(len(own), len(key), dtype=torch.bool), size.double().repeat(len(own), 1)
        for block in place.split(TOGETHER if together else 1):
            score = own[block].mean(0) @ mean.T + SPREAD * (own[block].square().mean(0) @ variance.T).clamp(0).sqrt()
            best = score.topk(chosen).indices
            exact[block] = torch.isin(node, best)
            count[block[:, None], best] = 0
        outs.append(_read(own, key, value, exact, (mean, far_value, count)))
    return outs


def _order(rows: Tensor, others: Tensor) -> Tensor:
    """Sorts rows `[n, d]` by their nearest centre: by logits with some of the other side `[G, m, d]`."""
    logits = rows @ _spread(others, SAMPLED).T
    centres = _spread(logits[None], CENTRES)
    rank = torch.empty(CENTRES, dtype=torch.int64)
    rank[_halved(centres, torch.arange(CENTRES))] = torch.arange(CENTRES)
    distance = torch.cdist(logits, centres, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = (distance < distance.amin(1, keepdim=True) + 1e-9).int().argmax(1)  # of equal centres the first
    return rank[nearest].argsort(stable=True)


def _spread(rows: Tensor, number: int) -> Tensor:
    """Takes evenly spaced rows from the first to the last, of heads `[G, n, d]` in turn."""
    places = [step * (rows.shape[1] - 1) // (number - 1) for step in range(number)]
    return torch.stack([rows[step % len(rows), place] for step, place in enumerate(places)])


def _halved(points: Tensor, places: Tensor) -> Tensor:
    """Orders places of points: halves at the median of the coordinate that varies most, and so on in each."""
    if len(places) == 1:
        return places
    axis = points[places].var(0, correction=0).argmax()
    places = places[points[places, axis].argsort(stable=True)]
    return torch.cat([_halved(points, half) for half in places.chunk(2)])


def _causal(query: Tensor, key: Tensor, value: Tensor, selected: int) -> Tensor:
    """Computes one head."""
    (length, width), keys = query.shape, len(key)
    past, number, place = keys - length, min(selected, keys), torch.arange(keys)
    samples = {j: query[j - past] for j in range(past, keys) if j % STEP == 0}
    first = torch.stack([*samples.values()][: BLOCK // STEP]) if past == 0 else query[:1]
    samples[past // BLOCK * BLOCK] = query[0]  # of earlier queries nothing is known
    varies = first.square().mean(0) * key[:BLOCK].var(0, correction=0)
    kept = varies.topk(max(width // PART, 1)).indices
    sections = pad(torch.cat([key, value], 1), (0, 0, 0, -keys % SECTION)).unflatten(0, (-1, SECTION))
    far_key, far_value = sections.mean(1).split([width, value.shape[1]], 1)
    exact, count = torch.zeros(length, keys, dtype=torch.bool), torch.zeros(length, len(sections)).double()
    for begin in range(past // BLOCK * BLOCK, keys, BLOCK):
        rows = slice(max(begin - past, 0), min(begin + BLOCK, keys) - past)
        section = begin // SECTION * SECTION
        voters = (samples.get(begin - STEP * n, torch.zeros(width).double()) for n in range(BLOCK // STEP))
        votes = (key @ torch.stack([*voters]).sum(0)).masked_fill(place >= section, -torch.inf)
        shared = _best_of_bins(votes[None], number)[0]
        # The first bins hold the first keys.
        shared = torch.where(place % max(number, 1) < SINK, place < min(SINK, number, section), shared)
        found = (query[rows][:, kept] @ key[:, kept].T).masked_fill(shared | (place >= section), -torch.inf)
        near = (place >= section) & (place <= place[past:][rows, None])
        exact[rows] = shared | _best_of_bins(found, number // SHARE) | near
        closed = torch.arange(len(sections)) < section // SECTION
        taken = pad(shared, (0, -keys % SECTION)).unflatten(0, (-1, SECTION)).sum(1)
        count[rows] = (SECTION - taken) * closed
    return _read(query, key, value, exact, (far_key, far_value, count))


def _best_of_bins(scores: Tensor, number: int) -> Tensor:
    """Marks the largest score of each of so many bins, `[n, S]`; score j is in bin j mod number."""
    if not number:
        return torch.zeros_like(scores, dtype=torch.bool)
    bins = pad(scores, (0, -scores.shape[1] % number), value=-torch.inf).unflatten(1, (-1, number))
    best = torch.zeros_like(bins, dtype=torch.bool).scatter(1, bins.argmax(1, keepdim=True), True).flatten(1)
    return best[:, : scores.shape[1]] & (scores > -torch.inf)
