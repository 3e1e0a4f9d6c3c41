"""Causal attention that goes on where it stopped: one token at a time, or pieces of any length.

The size of the state does not depend on the length so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from favor.kernels.dispatch import is_tracing, kernel_module, operator, pick
from favor.kernels.operands import Operands, check_known

_SPAN = 16  # tokens worked on together without a window: their pairwise weights take SPAN^2 M numbers per head
# The arguments of an operator have to be flat; their order is that of saved graphs, and cannot change.
_DECODE = (
    "(Tensor query, Tensor key, Tensor value, Tensor query_directions, Tensor key_directions, Tensor offset, "
    "Tensor key_bias, Tensor(a7!) log_weight, Tensor(a8!) summary, str kernel) -> Tensor"
)


@dataclass
class DecodeState:
    """State that past keys leave behind: for each feature their total weight and the weighted mean of their values.

    Attributes:
        log_weight: logarithm of the sum of exp(key.uk_m + key_bias), `[B, Hk, M]`; -inf before the first key.
        summary: `[B, Hk, M, dv]`. Both are float32 (float64 for float64 models).

    Example:
        >>> import torch
        >>> from favor.kernels import DecodeState
        >>> DecodeState(torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8, 4)).summary.shape
        torch.Size([1, 2, 8, 4])
    """

    log_weight: Tensor
    summary: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        key_heads: int,
        num_features: int,
        value_width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DecodeState:
        """Makes the state before the first token."""
        shape = (batch_size, key_heads, num_features)
        log_weight = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(log_weight, torch.zeros(*shape, value_width, dtype=dtype, device=device))

    @classmethod
    @torch.no_grad()
    def from_keys(
        cls, key: Tensor, value: Tensor, key_directions: Tensor, key_bias: Tensor, *, kernel: str = "auto"
    ) -> DecodeState:
        """Makes the state after a prompt, from which decoding goes on.

        Args:
            key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
            key_directions: `[n, Hk, M, d]`, n = 1 or B; key_bias: `[B, Hk, S]`.
            kernel: "auto", "torch" or "triton".
        """
        module = kernel_module(pick(kernel, key, value), "decode")
        key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (key, value))
        directions, bias = key_directions.contiguous(), key_bias.contiguous()
        with torch.cuda.device_of(key):
            summary, log_weight, *_ = module.summarise(directions, key, bias, value, None, key.shape[2])
        return cls(log_weight, summary)


@torch.no_grad()
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    state: DecodeState,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Does one step of causal attention: adds a key to the state, in place, and reads it with a query. No gradient.

    Args:
        query: `[B, H, 1, d]`; key, value: `[B, Hk, 1, d]`, `[B, Hk, 1, dv]`.
        query_directions, key_directions, offset: as in `linear_attention`.
        key_bias: `[B, Hk, 1]`; -inf leaves the state unchanged.
        state: changed in place.
        kernel: "auto", "torch" or "triton".

    Returns:
        `[B, H, 1, dv]`, what `linear_attention` with `is_causal` gives for the last token.

    Raises:
        ValueError: if there is more than one token, or the kernel cannot run.

    Example:
        >>> import torch
        >>> from favor.kernels import DecodeState, decode
        >>> q, k, v = torch.randn(3, 1, 2, 1, 4)
        >>> uq, uk, offset = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), torch.zeros(1, 2, 8)
        >>> state = DecodeState(torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8, 4))
        >>> out = decode(q, k, v, uq, uk, offset, torch.zeros(1, 2, 1), state)
        >>> torch.allclose(out, v)  # one key, so its value
        True
    """
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise ValueError(f"decode takes one token at a time, got {query.shape[2]} queries and {key.shape[2]} keys.")
    *operands, _ = Operands(query, key, value, query_directions, key_directions, offset, key_bias).readable()
    return _decode(*operands, state.log_weight, state.summary, kernel)


def _step(*arguments: Any) -> Tensor:
    query, _, value, *_, kernel = arguments
    with torch.cuda.device_of(query):
        return kernel_module(pick(kernel, query, value), "decode").decode(*arguments[:-1])


_decode = operator(
    "decode",
    _DECODE,
    _step,
    lambda query, key, value, *others: query.new_empty(*query.shape[:3], value.shape[-1]),
    "log_weight",
    "summary",
)


@dataclass
class StreamState:
    """State of causal attention: all that earlier tokens leave behind for later ones; `extend` changes it in place.

    Attributes:
        memory: state of all tokens or, with blocks (a window, or attention by landmarks), of the tokens in complete
            blocks: a dataclass of tensors. None before the first token.
        block: tensors of the tokens in the block that is not complete: with a window their key, value and key bias.
        is_ragged: whether some tokens may be padding, as when the sequences of a batch have different lengths.
        window: length of the exact blocks of positive features; 0 for none.
        tokens: how many tokens there were, with padding.
        room: N, for programs that are compiled or recorded once for all tokens: memory for N tokens is made with the
            first ones, and keeps its address; `tokens` and `shown` then count the first piece alone. 0: it grows.
        spare: memory that `restart` has left for the next first piece.
        shown: for landmarks, how many last tokens no sequence of the batch hides. Only these can be forgotten: behind a
            piece that is padded at its right, the tokens of the state are not those of the batch's columns.

    Example:
        >>> import torch, favor
        >>> state = favor.kernels.StreamState()
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> out = favor.favor_attention(q, k, v, features="pos", num_features=16, is_causal=True, state=state)
        >>> state.memory is None
        False
    """

    memory: Any = None
    block: tuple[Tensor, ...] = ()
    is_ragged: bool = False
    window: int = 0
    tokens: int = 0
    shown: int = 0
    room: int = 0
    spare: Any = None

    def note(self, mask: Tensor | None, length: int, will_forget: bool) -> None:
        """Notes which of the next `length` tokens are padding, by a mask `[B, length]`, read if `shown` is needed."""
        self.is_ragged = self.is_ragged or mask is not None
        if self.room and self.memory is not None:
            return
        self.tokens += length
        self.shown += length
        if not will_forget or mask is None or length == 1:
            return
        columns = [False] if is_tracing(mask) else mask.all(0).tolist()
        if False in columns:
            self.shown = columns[::-1].index(False)

    def settle(self, memory: Any) -> None:
        """Takes the memory of the first piece; with `room`, into the tensors that `restart` has left, if they fit."""
        self.memory, left = memory, self.spare
        if not self.room:
            return
        new, self.spare = self._memory(), None
        self.memory = left if type(left) is type(memory) else None
        old = self._memory()
        if [(own.shape, own.dtype, own.device) for own in old] == [(own.shape, own.dtype, own.device) for own in new]:
            for own, one in zip(old, new, strict=True):
                own.copy_(one)
            return
        with torch.inference_mode(False):  # what is made in it cannot be changed in place outside of it
            self.memory = type(memory)(*(own.clone() for own in new))
        for own in () if is_tracing(*new) else self._memory():
            torch._dynamo.mark_static_address(own)

    def restart(self) -> None:
        """Makes this the state before the first token, and leaves its memory for the next first piece."""
        self.spare = self.spare if self.memory is None else self.memory
        self.memory, self.block, self.is_ragged, self.tokens, self.shown = None, (), False, 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in (*self._memory(), *self.block))

    def _memory(self) -> list[Tensor]:
        return [] if self.memory is None else [getattr(self.memory, field.name) for field in fields(self.memory)]

    @torch.no_grad()
    def begin(
        self, key: Tensor, value: Tensor, key_directions: Tensor, key_bias: Tensor, window: int, kernel: str = "auto"
    ) -> None:
        """Makes this the state after a prompt, whatever it was before; the arguments are those of `extend`."""
        if window and self.room:
            raise ValueError(
                f"a cache with max_cache_len keeps no open block of a window; use window=0 (it is {window}), or leave "
                "max_cache_len out."
            )
        self.window = window
        if window and self.is_ragged and key.shape[2]:
            bias, self.block = _split((key, value, key_bias), window, key_directions.dtype)
            past = (key, value, bias)
        else:
            complete = key.shape[2] - key.shape[2] % window if window else key.shape[2]
            past, rest = zip(*(tensor.tensor_split([complete], 2) for tensor in (key, value, key_bias)), strict=True)
            self.block = _cleaned(rest[0], rest[1], rest[2], key_directions.dtype) if rest[0].shape[2] else ()
        self.settle(DecodeState.from_keys(past[0], past[1], key_directions, past[2], kernel=kernel))

    @property
    def can_join(self) -> bool:
        """Whether `joined` takes it: it has tokens, and positive features without blocks, which may begin anywhere."""
        return isinstance(self.memory, DecodeState) and not self.window

    @classmethod
    def joined(cls, states: Sequence[StreamState]) -> StreamState:
        """Makes one state of a batch of those of its rows, whose lengths may differ.

        Args:
            states: for which `can_join` holds, or without tokens, but not all of them without tokens.

        Returns:
            A state with memory of its own; `split` undoes the joining.

        Raises:
            ValueError: for other states, or if no state has tokens.
        """
        begun = [state for state in states if state.memory is not None]
        if not begun or not all(state.can_join for state in begun):
            raise ValueError(
                "states that join must be of positive features without a window, and one must have tokens."
            )
        known = begun[0].memory
        empty = DecodeState(torch.full_like(known.log_weight[:1], -torch.inf), torch.zeros_like(known.summary[:1]))
        rows = [state.memory or empty for state in states]
        return cls(
            DecodeState(torch.cat([row.log_weight for row in rows]), torch.cat([row.summary for row in rows])),
            is_ragged=True,
        )

    def split(self) -> list[StreamState]:
        """Gives a state of its own for each row of a state that `joined` has made."""
        return [
            StreamState(DecodeState(weight.clone(), summary.clone()))
            for weight, summary in zip(self.memory.log_weight.split(1), self.memory.summary.split(1), strict=True)
        ]

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to every tensor of the state, whose first dimension is the batch."""
        if self.memory is not None:
            self.memory = type(self.memory)(*map(function, self._memory()))
        self.block = tuple(map(function, self.block))


class StreamOptions(TypedDict, total=False):
    """Keywords of `extend`."""

    window: int
    scale: float
    kernel: str


@torch.no_grad()
def extend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    state: StreamState,
    *,
    query_bias: Tensor | None = None,
    **options: Unpack[StreamOptions],
) -> Tensor:
    """Computes causal attention of the next tokens, given the state of all before them. No gradient.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, L, d]`, `[B, Hk, L, dv]`, any L.
        query_directions, key_directions, offset, key_bias: as in `linear_attention`, n = 1.
        state: `StreamState()` before the first token; changed in place.
        query_bias, window, scale: as in `linear_attention`; blocks are counted from the very first token.
        kernel: for a single token without a window, "auto" (default), "torch" or "triton"; all else is plain torch.

    Returns:
        `[B, H, L, dv]`: the rows that `linear_attention` with `is_causal` gives for these tokens of the whole sequence.

    Raises:
        TypeError: for an unknown option.
        ValueError: if the state was begun with other features, another batch or a longer window.

    Example:
        >>> import torch
        >>> from favor.kernels import StreamState, extend, linear_attention
        >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
        >>> uq, uk, offset = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), torch.zeros(1, 2, 8)
        >>> bias, state = torch.zeros(1, 2, 6), StreamState()
        >>> pieces = [extend(*(t[:, :, s] for t in (q, k, v)), uq, uk, offset, bias[..., s], state)
        ...           for s in (slice(0, 4), slice(4, 6))]
        >>> whole = linear_attention(q, k, v, uq, uk, offset, bias, is_causal=True)
        >>> torch.allclose(torch.cat(pieces, dim=2), whole, atol=1e-5)
        True
    """
    check_known(options, StreamOptions)
    window, scale, length = options.get("window", 0), options.get("scale", 1.0), query.shape[2]
    operands = Operands(query, key, value, query_directions, key_directions, offset, key_bias, query_bias)
    _prepare(state, operands, window)
    if length == 1 and not window:
        return decode(*operands[:7], state.memory, kernel=options.get("kernel", "auto"))
    parts, start = [], 0
    while start < length:
        held = state.block[0].shape[2] if state.block else 0
        stop = min(start + (window or _SPAN) - held, length)
        now = (slice(None), slice(None), slice(start, stop))
        parts.append(_piece(state, operands.part(now, now, (slice(None), slice(None))), window, scale))
        start = stop
    return torch.cat(parts, dim=2) if parts else query.new_empty(*query.shape[:3], value.shape[-1])


def _prepare(state: StreamState, operands: Operands, window: int) -> None:
    """Checks that a state fits the operands, begins one that is empty, and brings it to their type."""
    (batch, heads, *_), width = operands.key.shape, operands.value.shape[-1]
    dtype, sizes = operands.offset.dtype, (batch, heads, operands.offset.shape[-1])
    if state.memory is None:
        state.memory = DecodeState.empty(*sizes, width, dtype=dtype, device=operands.key.device)
    if not isinstance(state.memory, DecodeState) or state.memory.log_weight.shape != sizes:
        raise ValueError(
            "the state was begun with other features, another number of them or another batch; begin again with a new "
            "StreamState()."
        )
    if state.block and state.block[0].shape[2] >= window:
        raise ValueError(
            f"the state holds {state.block[0].shape[2]} tokens of a block, so it was begun with a longer window than "
            f"{window}; begin again with a new StreamState()."
        )
    if not state.room and state.memory.log_weight.is_inference() and not torch.is_inference_mode_enabled():
        state.change(torch.clone)  # tensors made in inference mode cannot be changed in place outside of it
    if state.memory.log_weight.dtype != dtype:
        state.change(lambda tensor: tensor.to(dtype))
    state.window = window


def _piece(state: StreamState, operands: Operands, window: int, scale: float) -> Tensor:
    """Computes output `[B, H, l, dv]` of tokens that end in the same block, or span; adds them to the state."""
    query, key, value, query_directions, key_directions, offset, key_bias, query_bias = operands
    dtype, heads = offset.dtype, key.shape[1]
    queries = query.to(dtype).unflatten(1, (heads, -1))
    rows = queries @ query_directions.transpose(-1, -2).unsqueeze(2) + offset[:, :, None, None]
    block = _cleaned(key, value, key_bias, dtype)
    if state.block:
        block = tuple(torch.cat(pair, dim=2) for pair in zip(state.block, block, strict=True))
    if query_bias is None:
        logits = block[0] @ key_directions.transpose(-1, -2) + block[2].unsqueeze(-1)
        near = (rows.unsqueeze(4) + logits[:, :, None, None]).logsumexp(-1)
    else:
        near = scale * queries @ block[0].transpose(-1, -2).unsqueeze(2)
        near = near - query_bias.to(dtype).unflatten(1, (heads, -1)).unsqueeze(-1)
        near = near.masked_fill((block[2] == -torch.inf)[:, :, None, None], -torch.inf)
    out = _read(rows, near, block, state.memory).flatten(1, 2).to(query.dtype)
    complete = not window or block[0].shape[2] == window
    state.block, bias = () if complete else block, block[2]
    if complete and window and state.is_ragged:
        bias, state.block = _split(block, window, dtype)
    if complete:
        memory, new = state.memory, DecodeState.from_keys(block[0], block[1], key_directions, bias)
        risen = torch.logaddexp(memory.log_weight, new.log_weight)
        share = torch.where(risen == -torch.inf, -torch.inf, new.log_weight - risen).exp().unsqueeze(-1)
        memory.summary += share * (new.summary - memory.summary)
        memory.log_weight.copy_(risen)
    return out


def _cleaned(key: Tensor, value: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Copies key, value and bias into memory of their own; hidden keys become zeros, whatever they hold."""
    hidden = (bias == -torch.inf).unsqueeze(-1)
    return (*(t.to(dtype).masked_fill(hidden, 0.0) for t in (key, value)), bias.to(dtype, copy=True))


def _split(block: tuple[Tensor, ...], window: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gives the bias of keys in complete blocks, -inf for the others; and key, value and bias of the others, or ().

    If a sequence has fewer of these others than another one, tokens that are hidden come first.
    """
    real = block[2][:, 0] > -torch.inf
    rank = real.cumsum(1)
    kept = real & (rank > rank[:, -1:] // window * window)
    bias, longest = block[2].masked_fill(kept.unsqueeze(1), -torch.inf), int(kept.sum(1).max())
    if not longest:
        return bias, ()
    order = kept.to(torch.uint8).argsort(dim=1, stable=True)[:, kept.shape[1] - longest :]
    places = (order.view(len(order), 1, -1, *[1] * (tensor.ndim - 3)) for tensor in block)
    rest = [torch.take_along_dim(tensor, own, 2) for tensor, own in zip(block, places, strict=True)]
    hidden = ~kept.gather(1, order).unsqueeze(1)
    return bias, _cleaned(rest[0], rest[1], rest[2].masked_fill(hidden, -torch.inf), dtype)


def _read(rows: Tensor, near: Tensor, block: tuple[Tensor, ...], memory: DecodeState) -> Tensor:
    """Computes one softmax over the features and the keys at hand, for queries that are the last rows of the block."""
    length, size = near.shape[-2:]
    later = torch.ones(length, size, dtype=torch.bool, device=near.device).triu(size - length + 1)
    near = near.masked_fill(later, -torch.inf)
    weights = torch.cat((rows + memory.log_weight[:, :, None, None], near), dim=-1).softmax(-1)
    far, near = weights.nan_to_num(0.0).split((rows.shape[-1], size), dim=-1)  # a query that sees no key has only -inf
    return far @ memory.summary.unsqueeze(2) + near @ block[1].unsqueeze(2)
