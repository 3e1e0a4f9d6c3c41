"""Landmarks: keys of the sequence itself stand for all of its keys.

The weight exp(q.k) of a key is replaced by exp(q.c), c the mean of the keys that belong to the same landmark as k. In
the form of random features, f_1(q)_m = exp(q.c_m), and f_2(k)_m = 1 if k belongs to landmark m and 0 if not: positive
features, chosen and not drawn. The estimate is not unbiased (its relative error is exp(q.(c - k)) - 1 for each pair),
but it has no variance, and it is exact where there are as many landmarks as keys. Pooled tokens in place of all keys
are known from Nystromformer (Xiong et al., 2021), which takes means of neighbouring ones, and groups from clustered
attention (Vyas et al., 2020), which groups queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from favor.features.moments import attention_received, check_num_queries
from favor.kernels.dispatch import is_exporting, on_cpu
from favor.landmark.equal import first_equal
from favor.registry import Family, register


@register
class Landmarks(Family):
    """Groups of keys: chooses which keys are landmarks, and to which landmark each key belongs.

    Half of the landmarks are the keys that receive most attention from a few queries, the other half are evenly spaced
    among the rest of the sequence. A key belongs to the landmark with the smallest mean (q.(k - c))^2 over queries q:
    the logits of its weight change least. A landmark belongs to itself, so M landmarks for M keys or fewer give exact
    softmax attention. Equal keys count as one: if at most M keys differ, each of these is a landmark.

    Args:
        num_queries: queries, evenly spaced, whose exact attention tells which keys matter; default 32. It costs
            num_queries x S products, and a landmark costs S.

    Raises:
        ValueError: if `num_queries` is less than 1 or more than 16,384.

    Example:
        >>> import torch, favor
        >>> groups = favor.landmark.Landmarks(num_queries=16)
        >>> query, key, value = torch.randn(3, 1, 2, 50, 8)
        >>> out = favor.favor_attention(query, key, value, features=groups, num_features=8)
        >>> out.shape
        torch.Size([1, 2, 50, 8])
    """

    name = "landmark"
    backends = ("landmark", "favor#", "favor_sharp")  # under favor# by its older spelling, features="landmark"
    supports_window = True
    supports_state = True
    operations = 6  # the logits of keys to choose their group, the logits of queries, and the values
    is_drawn = False
    selects_keys = True
    default_selected = (256, 256)  # docs/selected_keys.md
    # speed_landmark_*cpu.md, speed_gpu_*.md; causal ones on a CPU with a window (19 without), on a GPU a bound.
    crossover = {"cpu": (4, 28), "cuda": (48, 1024)}  # noqa: RUF012
    # Both passes, timed by hand at 1,024 to 24,576 tokens; on a GPU not measured: twice the numbers above.
    crossover_selecting = {"cpu": (8, 36), "cuda": (96, 2048)}  # noqa: RUF012

    def __init__(self, *, num_queries: int = 32) -> None:
        check_num_queries(num_queries)
        self.num_queries = num_queries

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_queries={self.num_queries})"

    def cells(
        self,
        query: Tensor | None,
        key: Tensor,
        num_landmarks: int,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        scale: float = 1.0,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Gives the landmark of each key, `[..., S]`: 0 ... M - 1, and M for keys that do not count.

        Args:
            query: `[..., L, d]`, or None where queries must not see each other: landmarks are then evenly spaced and
                distances Euclidean.
            key: `[..., S, d]`, finite also where it does not count.
            num_landmarks: M. With fewer keys some landmarks have no key.
            query_mask, key_mask: boolean `[..., L]` and `[..., S]` (broadcast over heads), True for the rows that
                count.
            scale: of the logits.
            counts: how many tokens each key stands for, `[..., S]`; None means one.

        Raises:
            ValueError: without a key, or if M is less than 1.
        """
        if num_landmarks < 1 or key.shape[-2] == 0:
            raise ValueError(f"there must be a landmark and a key, got M = {num_landmarks} and {key.shape[-2]} keys.")
        with torch.no_grad():
            received, metric = None, None
            key_mask = None if key_mask is None else key_mask.expand(key.shape[:-1])
            if query is not None:
                query_mask = None if query_mask is None else query_mask.expand(query.shape[:-1])
                masks = (query_mask, key_mask)
                received = attention_received(query, key, *masks, self.num_queries, scale=scale, counts=counts)
                metric = metric_of(query.to(received.dtype), query_mask)
            first = first_equal(key, key_mask, counts)
            is_copy = first != torch.arange(key.shape[-2], device=key.device)
            if received is not None:
                received = torch.zeros_like(received).scatter_add(-1, first, received)
            index = _choose(num_landmarks, received, is_copy, key_mask)
            chosen = key.gather(-2, index.unsqueeze(-1).expand(*index.shape, key.shape[-1]))
            chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
            directions = chosen if metric is None else chosen @ metric
            half_square = (directions * chosen).sum(-1) / 2
            if key_mask is not None:
                # Spare landmarks, where fewer keys count than there are landmarks.
                half_square = half_square.masked_fill(~key_mask.gather(-1, index), torch.finfo(chosen.dtype).max)
            cells = _nearest(key, directions, half_square)
            cells = cells.scatter(-1, index, torch.arange(num_landmarks, device=key.device).expand_as(index))
            # Copies go to the landmark of the first one, whatever rounding says, unless they are landmarks too.
            cells = torch.where(is_copy.scatter(-1, index, False), cells.gather(-1, first), cells)
            return cells if key_mask is None else cells.masked_fill(~key_mask, num_landmarks)


def metric_of(query: Tensor, mask: Tensor | None) -> Tensor:
    """Gives the matrix A of queries `[..., L, d]` for which c'A c is the sum of all (q.c)^2, `[..., d, d]`.

    It is Euclidean where no query counts (`mask` is boolean, `[..., L]`), or one is not finite.
    """
    rows = query if mask is None else query.masked_fill(~mask.unsqueeze(-1), 0.0)
    metric = rows.transpose(-1, -2) @ rows
    trace = torch.diagonal(metric, dim1=-2, dim2=-1).sum(-1, keepdim=True).unsqueeze(-1)
    eye = torch.eye(rows.shape[-1], dtype=metric.dtype, device=metric.device)
    return torch.where((trace > 0) & trace.isfinite(), metric, eye)


def _choose(number: int, received: Tensor | None, is_copy: Tensor, mask: Tensor | None) -> Tensor:
    """Chooses the landmarks, as indices `[..., M]`: half by attention received, the others evenly spaced in the rest.

    Copies of earlier keys are landmarks only where there are more landmarks than other keys.
    """
    keys, device = is_copy.shape[-1], is_copy.device
    rest = ~is_copy if mask is None else mask & ~is_copy
    heavy = torch.empty(*is_copy.shape[:-1], 0, dtype=torch.int64, device=device)
    if received is not None:
        received = received.masked_fill(~rest, -2.0).masked_fill(is_copy, -1.0)
        received = pad(received, (0, number // 2), value=-3.0)  # there may be fewer keys
        heavy = received.topk(number // 2, -1).indices.clamp(max=keys - 1)
        rest, is_copy = rest.scatter(-1, heavy, False), is_copy.scatter(-1, heavy, False)
    spaced = number - heavy.shape[-1]
    left, step = rest.sum(-1, keepdim=True), torch.arange(spaced, device=device)
    wanted = torch.where(left < spaced, step, (2 * step + 1) * left // (2 * spaced))
    # The rest in order, then copies; all others share the place after them.
    place = torch.where(rest, rest.cumsum(-1) - 1, keys).where(~is_copy, left + is_copy.cumsum(-1) - 1)
    order = place.new_zeros(*place.shape[:-1], keys + 1)
    order = order.scatter(-1, place, torch.arange(keys, device=device).expand_as(place))
    index = order.gather(-1, wanted.clamp(max=keys - 1))
    return torch.cat([heavy, index], -1).sort(-1).values


def _nearest(key: Tensor, directions: Tensor, half_square: Tensor) -> Tensor:
    """Finds the index of the largest key . direction - half_square, `[..., S]`, some keys at a time."""
    if is_exporting():  # one graph for every length has no loop
        return _largest(key.to(directions.dtype) @ directions.mT - half_square.unsqueeze(-2))
    columns = directions.reshape(-1, *directions.shape[-2:]).transpose(1, 2)
    bias = half_square.reshape(columns.shape[0], 1, -1)
    rows = key.reshape(columns.shape[0], -1, key.shape[-1])
    # As much as stays in cache on a CPU; few launches on a GPU.
    numbers = 2**18 if key.device.type == "cpu" else 2**26
    parts = rows.split(max(64, numbers // max(directions.shape[:-1].numel(), 1)), dim=1)
    indices = [_largest(torch.bmm(part.to(columns.dtype), columns).sub_(bias)) for part in parts]
    return torch.cat(indices, 1).view(key.shape[:-1])


def _largest(scores: Tensor) -> Tensor:
    """Finds the index of the largest number of each row; numpy finds it several times as fast on a CPU."""
    if on_cpu(scores):
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.max(-1).indices


def sums_of(cells: Tensor, number: int, *tensors: Tensor) -> list[Tensor]:
    """Sums tensors `[..., S, w]` over the keys of each landmark, `[..., M, w]`, at least float32.

    Cells are `[..., S]`; keys with a cell of M count nowhere.
    """
    lead, places = cells.shape[:-1], number + 1
    heads = math.prod(lead)  # `lead.numel()` and `len` are not symbols to a tracer
    first = torch.arange(0, heads * places, places, device=cells.device).view(*lead, 1)
    flat = (cells + first).flatten()

    def total(tensor: Tensor) -> Tensor:
        rows = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).reshape(flat.shape[0], tensor.shape[-1])
        empty = rows.new_zeros(heads * places, rows.shape[-1])
        return empty.index_add(0, flat, rows).view(*lead, places, rows.shape[-1])[..., :number, :]

    return [total(tensor) for tensor in tensors]


def attend_counted(
    query: Tensor, key: Tensor, value: Tensor, *, counts: Tensor | None, scale: float, causal_rows: int = 0
) -> Tensor:
    """Computes softmax attention in which key m counts `counts[..., m]` times.

    Queries that see nothing that counts give zeros if the values they see are zeros.

    Args:
        query, key, value: `[B, Hk, R, d]`, `[B, Hk, T, d]`, `[B, Hk, T, dv]`.
        counts: `[B, Hk, T]`; None means one each.
        scale: of the logits.
        causal_rows: number of tokens of the queries, which are those of the last keys, one head after another; each
            query sees the keys up to its own. 0: queries see all keys.
    """
    width, keys, bias = value.shape[-1], key.shape[-2], None
    if causal_rows > 1:  # a single one sees all
        later = query.new_full((causal_rows, keys), -torch.inf).triu(keys - causal_rows + 1)
        bias = later.repeat(query.shape[-2] // causal_rows, 1)
    if counts is not None:
        own = counts.log().masked_fill(counts.sum(-1, keepdim=True) == 0, 0.0).to(query.dtype).unsqueeze(-2)
        bias = own if bias is None else own + bias
    if query.device.type == "cpu" and width != query.shape[-1]:
        # The fused kernel needs equal widths; the other kernel would form all weights.
        largest = max(width, query.shape[-1])
        query, key, value = (pad(tensor, (0, largest - tensor.shape[-1])) for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)[..., :width]
