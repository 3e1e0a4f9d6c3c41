"""Attention whose logits depend on the distance of query and key: near keys exact, all others by features or landmarks.

    logit of query i and key j = scale q_i.k_j + b_i(j - i)

Queries are cut into blocks of neighbours. A block reads the keys around it exactly, as far as b_i varies. What lies
before and behind comes in columns that a family of features makes, with the constant that b_i has there, or with keys
that hold their positions. A family says how in a function that is marked with `far_field`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from favor.attention.functional import AttentionCall
from favor.features import Parameters
from favor.kernels.dispatch import is_tracing
from favor.kernels.eager.common import Buffer
from favor.registry import Family

ROWS = 64  # queries of a block
_LOGITS, _LOGITS_OF_GPU = 2**21, 2**27  # logits held at a time: on a CPU they stay in its cache
ALL = slice(None)
Place = slice | list[int]


class Clipped(NamedTuple):
    """Biases b_i(t) = query_i . key_t of distances t = j - i, constant from -left and from `right` on.

    Shaw et al. (2018), and with query = 1 Raffel et al. (2020).

    Attributes:
        query: `[B, H, L, r]`; B, H and L may be 1, if all have the same.
        key: `[H, left + 1 + right, r]`, or with H = 1 for all heads.
        left, right: the largest distances that are told apart.
    """

    query: Tensor
    key: Tensor
    left: int
    right: int

    def part(self, rows: Place = ALL, heads: Place = ALL, tokens: Place = ALL) -> Clipped:
        """Gives those of some rows of the batch, some heads and some queries."""
        return self._replace(query=take(self.query, rows, heads, tokens), key=take(self.key, heads))

    def to(self, dtype: torch.dtype) -> Clipped:
        """Converts the tensors."""
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype))

    def dense(self, length: int, keys: int) -> Tensor:
        """Gives the biases of all pairs `[B, H, L, S]`; queries belong to the last keys."""
        table = self.query @ self.key.mT
        place = torch.arange(keys, device=table.device)
        index = (place - place[keys - length :, None]).clamp(-self.left, self.right) + self.left
        return table.expand(-1, -1, length, -1).gather(3, index.expand(*table.shape[:2], -1, -1))

    def near(self, most: int) -> Clipped:
        """Gives the biases of distances up to `most`."""
        return self

    def far(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Gives queries `[B, H, L, w]` and keys `[B, H, S, w]` whose products and `ends` are logits of far keys."""
        return query, key

    def ends(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the biases before and behind near keys, of those of all distances, `[..., left + 1 + right]`."""
        return table[..., 0], table[..., -1]


class Sinusoidal(NamedTuple):
    """Biases b_i(t) = scale query_i . W r(-t), with r(t) of sin(w_f t) and cos(w_f t), w_f = 10000^(-2 f / D).

    Transformer-XL (Dai et al., 2019, section 3.3). By the addition formulas b_i(j - i) is a product of a vector of i
    and one of j, the "factorized" attention of Funnel-Transformer (Dai et al., 2020, appendix A.2): far keys hold
    their sines and cosines.

    Attributes:
        query: `[B, H, L, d]`.
        weight: W, `[H, d, D]`, for sine and cosine in turn.
        scale: of the logits.
        left, right: distances up to which b_i is exact, whatever `frequencies` are.
        frequencies: how many of the D / 2 far keys hold, the lowest; None for all.
    """

    query: Tensor
    weight: Tensor
    scale: float
    left: int = 128
    right: int = 128
    frequencies: int | None = None

    def part(self, rows: Place = ALL, heads: Place = ALL, tokens: Place = ALL) -> Sinusoidal:
        """Gives those of some rows of the batch, some heads and some queries."""
        return self._replace(query=take(self.query, rows, heads, tokens), weight=take(self.weight, heads))

    def to(self, dtype: torch.dtype) -> Sinusoidal:
        """Converts the tensors."""
        return self._replace(query=self.query.to(dtype), weight=self.weight.to(dtype))

    def dense(self, length: int, keys: int) -> Tensor:
        """Gives the biases of all pairs `[B, H, L, S]`; queries belong to the last keys."""
        return self.near(keys).dense(length, keys)

    def near(self, most: int) -> Clipped:
        """Gives the biases of distances up to `most`."""
        sine, cosine = self._waves(torch.arange(most, -most - 1, -1, device=self.query.device))
        position = torch.stack([sine, cosine], -1).flatten(1)
        return Clipped(self.query * self.scale, position @ self.weight.mT, most, most)

    def far(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Gives queries `[B, H, L, w]` and keys `[B, H, S, w]` whose products are the logits of far keys."""
        number = self.weight.shape[-1] // 2
        left_out = 0 if self.frequencies is None else max(number - self.frequencies, 0)
        sine, cosine = (wave[:, left_out:] for wave in self._waves(torch.arange(key.shape[2], device=key.device)))
        moved = self.query @ self.weight[..., 2 * left_out :]
        of_sine, of_cosine = moved[..., ::2], moved[..., 1::2]
        turned = of_sine * sine + of_cosine * cosine, of_cosine * sine - of_sine * cosine
        position = torch.cat([cosine, sine], -1).expand(*key.shape[:3], -1)
        return torch.cat([query, *turned], -1), torch.cat([key, position], -1)

    def ends(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Gives zeros: far keys hold their positions."""
        zero = table.new_zeros(1, 1, 1)
        return zero, zero

    def _waves(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        width = self.weight.shape[-1]
        frequency = 10000.0 ** (-torch.arange(0, width, 2, device=distance.device, dtype=torch.float64) / width)
        angle = distance.unsqueeze(-1) * frequency
        return angle.sin().to(self.query.dtype), angle.cos().to(self.query.dtype)


def take(tensor: Tensor, *places: Place) -> Tensor:
    """Takes places along the first dimensions, each of which may be 1 for all."""
    for dimension, place in enumerate(places):
        if tensor.shape[dimension] > 1:
            tensor = tensor[(*(ALL,) * dimension, place)]
    return tensor


@dataclass(frozen=True)
class Blocks:
    """Which keys are near: those of `before` blocks before that of the query, of its own, and of `behind` more.

    Attributes:
        number: of blocks.
        length: of the sequence.
        step: in causal attention near keys begin at every so many blocks.
    """

    number: int
    length: int
    before: int
    behind: int
    is_causal: bool
    step: int

    def first(self, block: Tensor) -> Tensor:
        """Gives the first block with near keys."""
        return (block - self.before).clamp(min=0) // self.step * self.step

    def last(self, block: Tensor) -> Tensor:
        """Gives the block after the last one with near keys."""
        return (block + self.behind + 1).clamp(max=self.number)

    @property
    def most_before(self) -> int:
        """The most blocks of near keys before that of the query."""
        return self.before + self.step - 1

    @property
    def most(self) -> int:
        """The most blocks that a near key is away, rounded up."""
        return max(self.most_before, self.behind) + 1


class Columns(NamedTuple):
    """Holds what some blocks read: keys and values `[N, Z or 1, C, w]`, and biases `[N, Z or 1, R or 1, C]`."""

    key: Tensor
    value: Tensor
    bias: Tensor


class Far(Protocol):
    """Holds what a family makes of the keys of some heads of one sequence, or of several of equal lengths."""

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        """Yields what is far from some Z blocks.

        Args:
            some: which.
            ends: the biases before and behind the near keys, `[N, Z or 1, R or 1]`.
        """


# By kind of family: `step`, and a function of the family, queries `[B, H, L, w]`, keys and values `[B, Hk, L, w]`,
# blocks and the call.
_FAR: dict[type[Any], tuple[Callable[..., Far], int]] = {}


def far_field(kind: type[Family], step: int = 1) -> Callable[[Callable[..., Far]], Callable[..., Far]]:
    """Makes a function compute what is far for a kind of family, which may need a `step` of blocks; a decorator."""

    def add(make: Callable[..., Far]) -> Callable[..., Far]:
        _FAR[kind] = make, step
        return make

    return add


def relative_attention(family: Family, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes `favor.favor_attention` with `relative`.

    Raises:
        ValueError: if queries and keys are not those of the same tokens, a sequence has padding in its middle, or the
            family has no far field.
    """
    found = next((_FAR[kind] for kind in type(family).__mro__ if kind in _FAR), None)
    if found is None:
        raise ValueError(f"{family.name} features take no relative positions; use landmarks or positive features.")
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    if length != key.shape[2] or call.packing is not None or call.state is not None:
        raise ValueError(
            "relative positions are for self-attention of whole sequences, without packing and without a state; got "
            f"{length} queries and {key.shape[2]} keys."
        )
    if not isinstance(call.relative, Clipped | Sinusoidal):
        raise TypeError(f"relative must be Clipped or Sinusoidal, got {type(call.relative).__name__}.")
    given, outs = query.dtype, []
    raised = torch.promote_types(given, torch.float32) if query.device.type == "cpu" else given
    query, key, value = query.to(raised), key.to(raised), value.to(raised)
    positions = call.relative.to(raised)
    for rows, tokens in _sequences(call.key_mask, query):
        own = [tensor[rows, :, tokens] for tensor in (query, key, value)]
        most, parts = max(1, _budget(query) // max(own[0][:, :groups].numel(), 1)), []
        for first in range(0, key.shape[1], most):
            heads = slice(first, min(first + most, key.shape[1]))
            asking = slice(heads.start * groups, heads.stop * groups)
            relative = positions.part(rows, asking, tokens)
            some = replace(_of_heads(call, heads, key.shape[1]), relative=relative)
            parts.append(_attend(family, found, own[0][:, asking], own[1][:, heads], own[2][:, heads], some))
        outs.append(pad(torch.cat(parts, 1), (0, 0, tokens.start, length - tokens.stop)))
    return torch.cat(outs).to(given)


def _budget(query: Tensor) -> int:
    return _LOGITS if query.device.type == "cpu" else _LOGITS_OF_GPU


def _sequences(mask: Tensor | None, query: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields rows of the batch that have the same padding, and the tokens that are none."""
    if mask is None:
        yield ALL, slice(0, query.shape[2])
        return
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * place).amax(1)
    first = last - mask.sum(1)
    whole = (mask == ((place > first.unsqueeze(1)) & (place <= last.unsqueeze(1)))).all(1)
    places = torch.stack([first, last, whole], 1).tolist()
    if not all(whole for *_, whole in places):
        raise ValueError(
            "relative positions count distances, so padding must be at the start or the end of each sequence, and not "
            'between its tokens. Move it, or use attn_implementation="sdpa".'
        )
    row = 0
    for (begin, end, _), same in groupby(places):
        number = len(list(same))
        yield slice(row, row + number), slice(begin, end)
        row += number


def _of_heads(call: AttentionCall, heads: slice, number: int) -> AttentionCall:
    """Gives a call of some of its key heads, without its masks."""
    first, total = call.key_heads or (0, number)

    def own(parameters: Parameters | None) -> Parameters | None:
        if parameters is None or parameters.factor.ndim < 3 or parameters.factor.shape[-3] == 1:
            return parameters
        return parameters.heads(range(heads.start, heads.stop))

    stored = {"parameters": own(call.parameters), "correction": own(call.correction)}
    return replace(call, key_mask=None, query_mask=None, key_heads=(first + heads.start, total), **stored)  # type: ignore[arg-type]


def _attend(
    family: Family,
    found: tuple[Callable[..., Far], int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
) -> Tensor:
    """Computes attention without padding."""
    (make, step), relative = found, call.relative
    (batch, number, length), groups = query.shape[:3], query.shape[1] // key.shape[1]
    if not length:
        return for_each_query(value, groups)
    reach, step = max(relative.left, call.window), step if call.is_causal else 1
    behind = 0 if call.is_causal else -(-max(relative.right, call.window) // ROWS)
    blocks = Blocks(-(-length // ROWS), length, -(-reach // ROWS), behind, call.is_causal, step)
    asking_far, answering_far = relative.far(query, key)
    far = make(family, asking_far, answering_far, value, blocks, call)
    key, value = (for_each_query(tensor, groups) for tensor in (key, value))
    field = _Near(query, key, value, relative.near(blocks.most * ROWS), blocks)
    asking_rows, memory = in_rows(asking_far.flatten(0, 1), blocks), tuple(Buffer(query) for _ in range(3))

    def attend(some: slice) -> Tensor:
        near, table = field.columns(some)
        return _softmax(asking_rows[:, some], [near, *far.columns(some, relative.ends(table))], call.scale, memory)

    most = max(1, _budget(query) // (batch * number * ROWS * 1024))
    pieces = [slice(first, min(first + most, blocks.number)) for first in range(0, blocks.number, most)]
    keeps = torch.is_grad_enabled() and len(pieces) > 1
    outs = [checkpoint(attend, some, use_reentrant=False) if keeps else attend(some) for some in pieces]
    return torch.cat(outs, 1).flatten(1, 2)[:, :length].unflatten(0, (batch, number))


def for_each_query(tensor: Tensor, groups: int) -> Tensor:
    """Repeats what belongs to key heads, `[B, Hk, ...]`, for the query heads of each."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def in_rows(tensor: Tensor, blocks: Blocks) -> Tensor:
    """Cuts `[N, L, w]` into blocks, `[N, Z, 64, w]`, with zeros at the end."""
    return pad(tensor, (0, 0, 0, blocks.number * ROWS - tensor.shape[1])).unflatten(1, (-1, ROWS))


def _joined(memory: Buffer, parts: list[Tensor], dimension: int) -> Tensor:
    """Joins tensors; on a CPU in memory that serves one piece after another, as fresh pages cost more than the copy."""
    if parts[0].device.type != "cpu" or is_tracing(*parts):
        return torch.cat(parts, dimension)
    shape = list(parts[0].shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    return torch.cat(parts, dimension, out=memory.empty(*shape))


def _softmax(query: Tensor, columns: list[Columns], scale: float, memory: tuple[Buffer, ...]) -> Tensor:
    """Attends with blocks `[N, Z, R, w]` to all columns; keys that are narrower meet the first entries of queries."""
    lead = (*query.shape[:3], -1)
    widths = {tensor.shape[-1] for own in columns for tensor in own[:2]}
    if not torch.is_grad_enabled() and widths == {query.shape[-1]}:
        keys, values = ([own[n].expand(*query.shape[:2], -1, -1) for own in columns] for n in (0, 1))
        wholes = zip(memory, (keys, values, [own.bias.expand(*lead) for own in columns]), (2, 2, 3), strict=True)
        joined = (_joined(*whole).to(query.dtype) for whole in wholes)
        rows, key, value, bias = (tensor.flatten(0, 1).unsqueeze(1) for tensor in (query, *joined))
        return scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale).view(*lead)
    logits = [(query[..., : own.key.shape[-1]] @ own.key.mT).to(own.bias.dtype) * scale + own.bias for own in columns]
    weights = torch.cat(logits, -1).softmax(-1).to(query.dtype).split([part.shape[-1] for part in logits], -1)
    return sum(part @ own.value for part, own in zip(weights, columns, strict=True))  # type: ignore[return-value]


class _Near:
    """The near keys of all blocks of some heads."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, near: Clipped, blocks: Blocks) -> None:
        self.blocks, length = blocks, query.shape[2]
        before, width = blocks.most_before, blocks.most_before + 1 + blocks.behind
        around = (0, 0, before * ROWS, (blocks.number + blocks.behind) * ROWS - length)
        self.key, self.value = (
            pad(tensor.flatten(0, 1), around).unfold(1, width * ROWS, ROWS).mT for tensor in (key, value)
        )  # [N, Z, W, d]
        self.place = torch.arange(width * ROWS, device=query.device) - before * ROWS
        distance = self.place - torch.arange(ROWS, device=query.device).unsqueeze(1)
        self.index, self.later = distance.clamp(-near.left, near.right) + near.left, distance > 0
        asked = near.query.expand(*query.shape[:2], -1, -1).flatten(0, 1)
        self.asked = asked.unsqueeze(1) if asked.shape[1] == 1 else in_rows(asked, blocks)
        self.answers = near.key.expand(query.shape[1], -1, -1).repeat(query.shape[0], 1, 1).mT.unsqueeze(1)

    def columns(self, some: slice) -> tuple[Columns, Tensor]:
        """Gives the near keys of some blocks, and the biases of all distances `[N, Z or 1, R or 1, T]`."""
        blocks = self.blocks
        table = (self.asked if self.asked.shape[1] == 1 else self.asked[:, some]) @ self.answers
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        bias = table.expand(-1, -1, ROWS, -1).gather(3, self.index.expand(*table.shape[:2], -1, -1))
        block = torch.arange(blocks.number, device=bias.device)[some, None, None]
        place = self.place + block * ROWS
        hidden = (place < blocks.first(block) * ROWS) | (place >= blocks.length)
        if blocks.is_causal:
            hidden = hidden | self.later
        return Columns(self.key[:, some], self.value[:, some], bias.masked_fill(hidden, -torch.inf)), table
