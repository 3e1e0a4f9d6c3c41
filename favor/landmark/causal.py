"""Causal attention through landmarks: a state of M groups of keys that takes in one block of tokens after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from favor.kernels import StreamState
from favor.kernels.dispatch import is_transformed, on_cpu, plain
from favor.kernels.stream.ragged import Waiting
from favor.landmark.grouping import Landmarks, attend_counted, sums_of

BLOCK = 256
# Queries `[B, Hk, G, T, d]`, counts `[B, Hk, T]`, keys and values `[B, Hk, T, d]`, `[B, Hk, T, dv]`.
Tokens = tuple[Tensor, ...]


@dataclass
class Groups:
    """Keys and values of earlier tokens, in groups.

    Attributes:
        counts: tokens in each group, `[B, Hk, n]`; 0 for spare ones.
        key, value: their sums, `[B, Hk, n, d]` and `[B, Hk, n, dv]`, at least float32.
    """

    counts: Tensor
    key: Tensor
    value: Tensor

    def mean(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Gives the mean of each group, given its sum, `key` or `value`."""
        return (sums / self.counts.clamp(min=1).unsqueeze(-1)).to(dtype)

    def joined(self, counts: Tensor, key: Tensor, value: Tensor) -> Groups:
        """Gives these groups together with tokens that become groups of their own."""
        pairs = ((self.counts, counts), (self.key, key), (self.value, value))
        return Groups(*(torch.cat(pair, 2) for pair in pairs))

    def fewer(self, cells: Tensor, number: int) -> Groups:
        """Joins groups to larger ones, given the number of the new group of each, `[B, Hk, n]`."""
        counts, key, value = sums_of(cells, number, self.counts.unsqueeze(-1), self.key, self.value)
        return Groups(counts.squeeze(-1), key, value)


def attention(
    features: Landmarks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int,
    *,
    counts: Tensor,
    scale: float,
    block: int,
    state: StreamState | None = None,
) -> Tensor:
    """Attends from each token to its own block up to itself, and to the groups of all earlier tokens.

    After a block its keys join the groups. If there are then more than M groups, they are grouped again, as the queries
    of the block choose. So no token sees anything of a later token. Keys before the first query are groups of their own
    until the end of the first block.

    Args:
        query: `[B, Hk, G, L, d]`, those of one key head together.
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`, S >= L; hidden ones are zeros, and at the end if S is L.
        num_landmarks: M.
        counts: 1 for keys that count and 0 for others, `[B, Hk, S]`.
        scale: of the logits.
        block: length of a block.
        state: what earlier tokens left, changed in place; S is then L. It holds groups and the tokens of the last block
            if that block is not complete. Only the first piece gets gradients.

    Returns:
        `[B, Hk, G, L, dv]`.

    Raises:
        ValueError: if the state was begun with other features, longer blocks or another batch.
    """
    if state is not None and state.memory is not None:
        return _next(features, (query, counts, key, value), num_landmarks, scale, block, state)
    groups, parts, joining, rest = cut((query, counts, key, value), block, state)
    outs = Pieces(query.shape[3])
    for number, (tokens, own) in enumerate(zip(parts, joining, strict=True), 1):
        outs.append(checkpointed(tokens[0], groups, tokens, scale))
        if own.shape[2] == block and (state is not None or number < len(parts)):
            groups, _ = regrouped(features, groups, (tokens[0], own, *tokens[2:]), num_landmarks, scale)
    if state is not None:
        # No graph, and no view of the whole prompt.
        state.memory = Groups(*(tensor.detach() for tensor in (groups.counts, groups.key, groups.value)))
        state.block = tuple(tensor.detach().clone() for tensor in rest)
    return outs.joined()


@torch.no_grad()
def _next(
    features: Landmarks, fresh: Tokens, num_landmarks: int, scale: float, block: int, state: StreamState
) -> Tensor:
    """Attends with tokens that come after those of a state."""
    begun, groups = state.block, state.memory
    if not isinstance(groups, Groups) or groups.counts.shape[:2] != fresh[1].shape[:2] or length_of(begun) >= block:
        raise ValueError(
            "the state was begun with other features, longer blocks or another batch; begin again with a new "
            "StreamState()."
        )
    groups = Groups(*(tensor.to(fresh[1].dtype) for tensor in (groups.counts, groups.key, groups.value)))
    begun = tuple(earlier.to(later.dtype) for earlier, later in zip(begun, fresh, strict=False))
    outs, start, length = [], 0, fresh[0].shape[3]
    while start < length:
        stop = min(start + block - length_of(begun), length)
        now = (fresh[0][:, :, :, start:stop], *(tensor[:, :, start:stop] for tensor in fresh[1:]))
        tokens = tuple(map(joined_tokens, begun, now)) if begun else tuple(tensor.clone() for tensor in now)
        outs.append(_read(now[0], groups, tokens, scale))
        begun = tokens
        if length_of(tokens) == block:
            done, begun = split_complete(tokens, block) if state.is_ragged else (tokens, ())
            groups, _ = regrouped(features, groups, done, num_landmarks, scale)
        start = stop
    state.memory, state.block = groups, begun
    return torch.cat(outs, 3)


def cut(tokens: Tokens, block: int, state: StreamState | None) -> tuple[Groups, list[Tokens], list[Tensor], Tokens]:
    """Cuts the first piece of a sequence into blocks; see `attention` for the tensors.

    Returns:
        The groups of the keys before the first query, one each; the tokens of each block; which of them are in complete
        blocks, as counts; the tokens that are not.
    """
    query, *others = tokens
    past = others[0].shape[2] - query.shape[3]
    groups = Groups(*(tensor[:, :, :past].to(others[0].dtype) for tensor in others))
    fresh: Tokens = (query, *(tensor[:, :, past:] for tensor in others))
    # Split at once: the gradient of a slice is as long as the whole.
    parts = list(zip(query.split(block, 3), *(tensor.split(block, 2) for tensor in fresh[1:]), strict=True))
    joining, rest = [part[1] for part in parts], parts[-1] if query.shape[3] % block else ()
    if state is not None and state.is_ragged:
        done, rest = split_complete(fresh, block)
        joining = list(done[1].split(block, 2))
    return groups, parts, joining, rest


class Pieces:
    """Pieces `[..., l, dv]` of an output of `length` tokens, one after the other.

    If no gradient is needed, each piece is written to its place at once, so that no piece is held twice.
    """

    def __init__(self, length: int) -> None:
        self.length, self.number = length, 0
        self.apart: list[Tensor] = []
        self.whole: Tensor | None = None

    def append(self, piece: Tensor) -> None:
        """Adds the next piece."""
        if self.whole is None:
            if self.apart or piece.requires_grad or not plain(piece):
                self.apart.append(piece)
                return
            self.whole = piece.new_empty(*piece.shape[:-2], self.length, piece.shape[-1])
        self.whole[..., self.number : self.number + piece.shape[-2], :] = piece
        self.number += piece.shape[-2]

    def joined(self) -> Tensor:
        """Gives the whole output."""
        return torch.cat(self.apart, -2) if self.whole is None else self.whole


def length_of(tokens: Tokens) -> int:
    """Counts the tokens."""
    return tokens[1].shape[2] if tokens else 0


def split_complete(tokens: Tokens, block: int) -> tuple[Tokens, Tokens]:
    """Gives tokens of which only those in complete blocks count, and the other tokens; () if there are none."""
    query, counts, key, value = tokens
    waiting = Waiting.of(counts[:, 0] > 0, block)
    done = (query, counts.masked_fill(waiting.kept.unsqueeze(1), 0.0), key, value)
    if not waiting.order.shape[1]:
        return done, ()
    own = waiting.take(counts, 2).masked_fill(~waiting.is_there.unsqueeze(1), 0.0)
    return done, (waiting.take(query, 3), own, waiting.take(key, 2), waiting.take(value, 2))


def joined_tokens(earlier: Tensor, later: Tensor) -> Tensor:
    """Joins tokens one after the other, `[..., T]` counts or `[..., T, w]` rows."""
    return torch.cat([earlier, later], -1 if earlier.ndim == 3 else -2)


def checkpointed(rows: Tensor, groups: Groups, tokens: tuple[Tensor, ...], scale: float) -> Tensor:
    """Runs `_read`, again in the backward pass, since it would otherwise keep a mask of queries times keys."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return _read(rows, groups, tokens, scale)
    out: Tensor = checkpoint(_read, rows, groups, tokens, scale, use_reentrant=False, preserve_rng_state=False)
    return out


def _read(rows: Tensor, groups: Groups, tokens: tuple[Tensor, ...], scale: float) -> Tensor:
    """Computes the output of queries `[B, Hk, G, l, d]`, which belong to the last of the tokens."""
    _, counts, key, value = tokens
    far_key, far_value = (groups.mean(sums, key.dtype) for sums in (groups.key, groups.value))
    pairs = ((far_key, key), (far_value, value), (groups.counts, counts))
    every_key, every_value, every = (torch.cat(pair, 2) for pair in pairs)
    flat, causal_rows = rows.flatten(2, 3), rows.shape[3]
    out = attend_counted(flat, every_key, every_value, counts=every, scale=scale, causal_rows=causal_rows)
    return out.unflatten(2, rows.shape[2:4])


def regrouped(
    features: Landmarks, groups: Groups, tokens: Tokens, number: int, scale: float
) -> tuple[Groups, Tensor | None]:
    """Gives the groups with a complete block in them, at most M, and the new group of each; None if none changed."""
    rows, counts, key, value = tokens
    joined = groups.joined(counts, key.to(groups.key.dtype), value.to(groups.key.dtype))
    if joined.counts.shape[2] <= number:
        return joined, None
    real, there = _mask((counts > 0).repeat(1, 1, rows.shape[2])), _mask(joined.counts > 0)
    # Not in half precision, whose groups would differ from those of the means that are kept.
    means = joined.mean(joined.key, joined.key.dtype)
    cells = features.cells(rows.flatten(2, 3), means, number, real, there, scale=scale, counts=joined.counts)
    return joined.fewer(cells, number), cells


def _mask(counted: Tensor) -> Tensor | None:
    """Gives None if all tokens count, which saves time on a CPU; on a GPU this test would take longer."""
    return None if on_cpu(counted) and bool(counted.all()) else counted
