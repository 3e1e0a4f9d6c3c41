"""Where the tokens of a batch lie: packed sequences one after another, and padding moved to the end."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from favor.kernels.dispatch import fuses, has_shape_only, is_tracing, kernel_module


@dataclass
class Packing:
    """Where the sequences of a packed batch begin and end.

    Attributes:
        queries, keys: cumulative lengths `[N + 1]`, int32, from 0 to L and to S.
        longest_query, longest_key: the largest lengths.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        is_causal: bool,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
    ) -> Packing:
        """Checks the lengths and bundles them; errors name the argument, what was expected and what came."""
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError("cu_seqlens_q and cu_seqlens_k go together; for self-attention pass one tensor twice.")
        if query.shape[0] != 1:
            raise ValueError(f"packed sequences lie in a batch of size 1, got {query.shape[0]}.")
        _check("cu_seqlens_q", cu_seqlens_q, query.shape[2], query.device)
        _check("cu_seqlens_k", cu_seqlens_k, key.shape[2], query.device)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            counts = f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
            raise ValueError(f"cu_seqlens_q and cu_seqlens_k must count the same sequences, got {counts}.")
        queries = cu_seqlens_q.to(torch.int32)
        keys = queries if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.to(torch.int32)
        if is_causal and queries is not keys and bool((queries.diff() > keys.diff()).any()):
            raise ValueError("causal attention needs at least as many keys as queries in every packed sequence.")
        longest_query, longest_key = (
            int(ends.diff().max()) if most is None else min(int(most), rows.shape[2])
            for ends, most, rows in ((queries, max_seqlen_q, query), (keys, max_seqlen_k, key))
        )
        return cls(queries, keys, longest_query, longest_key)

    def for_kernel(self) -> dict[str, Any]:
        """Gives the arguments of `favor.kernels.linear_attention`."""
        lengths = {"cu_seqlens_q": self.queries, "cu_seqlens_k": self.keys}
        return {**lengths, "max_seqlen_q": self.longest_query, "max_seqlen_k": self.longest_key}

    def only(self, kept: Sequence[int]) -> Packing:
        """Gives the lengths of some of the sequences, by their numbers, as if the others were not there."""
        queries, keys = ([lengths[number] for number in kept] for lengths in (self.query_lengths, self.key_lengths))
        ends = [self.queries.new_tensor([0, *accumulate(own)]) for own in (queries, keys)]
        return Packing(ends[0], ends[0] if queries == keys else ends[1], max(queries), max(keys))

    def split(self, query: Tensor, *keys: Tensor) -> list[tuple[Tensor, ...]]:
        """Gives queries `[1, H, length, d]` of each sequence, with its part of every tensor that goes with the keys."""
        parts = [tensor.split(self.key_lengths, dim=2) for tensor in keys]
        return list(zip(query.split(self.query_lengths, dim=2), *parts, strict=True))

    def each(
        self, attend: Callable[..., Tensor], family: Any, query: Tensor, key: Tensor, value: Tensor, call: Any
    ) -> Tensor:
        """Computes attention of one sequence after another, by a method that does not know of packing."""
        alone = replace(call, packing=None)
        outs = [attend(family, *part, alone) for part in self.split(query, key, value)]
        return torch.cat(outs, dim=2)

    # Each read makes a GPU wait, so the lengths are read once.
    @cached_property
    def query_lengths(self) -> list[int]:
        """The number of queries of each sequence."""
        return self.queries.diff().tolist()

    @cached_property
    def key_lengths(self) -> list[int]:
        """The number of keys of each sequence."""
        return self.query_lengths if self.keys is self.queries else self.keys.diff().tolist()


def _check(name: str, lengths: Tensor, total: int, device: torch.device) -> None:
    if lengths.is_floating_point() or lengths.ndim != 1 or len(lengths) < 2:
        raise ValueError(
            f"{name} must hold the cumulative lengths [0, ..., {total}] as integers, one more than there are "
            f"sequences; got shape {tuple(lengths.shape)} of {lengths.dtype}."
        )
    if lengths.device != device:
        raise ValueError(f"{name} must be on {device} like query, got {lengths.device}.")
    if not torch.compiler.is_compiling() and has_shape_only(lengths):
        raise ValueError(f"{name} must hold numbers, and one on meta or a fake one has none: unpack the batch.")
    # Reading the values would make a GPU wait.
    if device.type == "cpu" and not (lengths[0] == 0 and lengths[-1] == total and bool((lengths.diff() >= 0).all())):
        raise ValueError(f"{name} must rise from 0 to {total}, got {lengths.tolist()}.")


@dataclass
class Compaction:
    """A permutation of the tokens of each sequence: real ones first, in their order.

    Attributes:
        order: old place of each new token, `[B, S]`.
        places: new place of each old token, `[B, S]`.
        mask: boolean `[B, S]`, True for real tokens in their new places.
    """

    order: Tensor
    places: Tensor
    mask: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Compaction | None:
        """Makes a permutation for a mask `[B, S]`; None if all padding is at the end.

        A mask is looked at once, and not again by the other layers of a model: a GPU would wait each time.
        """
        if is_tracing(mask) or mask.is_inference():  # then nothing tells whether it was changed
            return None if _ends_in_padding(mask) else cls.to_front(mask)
        if mask not in _SEEN or _SEEN[mask][0] != mask._version:
            _SEEN[mask] = (mask._version, None if _ends_in_padding(mask) else cls.to_front(mask))
        return _SEEN[mask][1]

    @classmethod
    def to_front(cls, mask: Tensor) -> Compaction:
        """Makes a permutation for a mask `[B, S]` without a look at its contents, for which a GPU would wait."""
        real = mask.cumsum(1)
        places = torch.where(mask, real - 1, real[:, -1:] + (~mask).cumsum(1) - 1)
        tokens = torch.arange(mask.shape[1], device=mask.device).expand_as(places)
        order = torch.empty_like(places).scatter(1, places, tokens)
        return cls(order, places, mask.gather(1, order))

    def move(self, rows: Tensor) -> Tensor:
        """Puts rows `[B, H, L, w]` in their new places; fewer rows than tokens are the last ones, after zeros."""
        missing = self.order.shape[1] - rows.shape[2]
        if missing:
            rows = torch.nn.functional.pad(rows, (0, 0, missing, 0))
        return _gather(rows, self.order)

    def back(self, rows: Tensor, length: int) -> Tensor:
        """Puts the last `length` tokens of `[B, H, S, w]` back in their old places."""
        return _gather(rows, self.places)[:, :, rows.shape[2] - length :]


# By mask: its version, and its permutation.
_SEEN: MutableMapping[Tensor, tuple[int, Compaction | None]] = WeakIdKeyDictionary()


def _ends_in_padding(mask: Tensor) -> bool:
    return not is_tracing(mask) and bool((mask[:, 1:] <= mask[:, :-1]).all())


def _gather(rows: Tensor, order: Tensor) -> Tensor:
    return rows.gather(2, order[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))


class Cleaned(torch.autograd.Function):
    """Puts 0 for NaN and infinity in rows `[B, H, L, d]` whose mask `[B, L]` is False; one launch for each pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, mask: Tensor) -> Tensor:
        """Keeps the rows, which say where numbers were replaced."""
        ctx.save_for_backward(query, mask)
        return kernel_module("triton", "tokens").cleaned(query, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Passes no gradient to what was replaced."""
        query, mask = ctx.saved_tensors
        if torch.is_grad_enabled() or not fuses(query):
            return torch.where(mask[:, None, :, None] | query.isfinite(), grad, 0.0), None
        return kernel_module("triton", "tokens").cleaned(query, mask, grad), None
