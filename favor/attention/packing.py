"""Packed batches: the cumulative lengths of sequences that lie one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from favor.kernels.dispatch import has_shape_only


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
    ) -> Packing | None:
        """Checks the lengths and bundles them; gives None if the batch is not packed.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.
        """
        if cu_seqlens_q is None and cu_seqlens_k is None:
            return None
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k go together; for self-attention pass the same tensor twice."
            )
        if query.shape[0] != 1:
            raise ValueError(f"packed sequences lie in a batch of size 1, got {query.shape[0]}.")
        for name, lengths, total in (
            ("cu_seqlens_q", cu_seqlens_q, query.shape[2]),
            ("cu_seqlens_k", cu_seqlens_k, key.shape[2]),
        ):
            _check(name, lengths, total, query.device)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must count the same sequences, "
                f"got {len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}."
            )
        queries = cu_seqlens_q.to(torch.int32)
        packing = cls(
            queries,
            queries if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.to(torch.int32),
            _longest(cu_seqlens_q) if max_seqlen_q is None else min(int(max_seqlen_q), query.shape[2]),
            _longest(cu_seqlens_k) if max_seqlen_k is None else min(int(max_seqlen_k), key.shape[2]),
        )
        if is_causal and cu_seqlens_q is not cu_seqlens_k and bool((cu_seqlens_q.diff() > cu_seqlens_k.diff()).any()):
            raise ValueError("causal attention needs at least as many keys as queries in every packed sequence.")
        return packing

    def for_kernel(self) -> dict[str, Any]:
        """Gives the arguments of `favor.kernels.linear_attention`."""
        return {
            "cu_seqlens_q": self.queries,
            "cu_seqlens_k": self.keys,
            "max_seqlen_q": self.longest_query,
            "max_seqlen_k": self.longest_key,
        }

    def only(self, kept: Sequence[int]) -> Packing:
        """Gives the lengths of some of the sequences, by their numbers, as if the others were not there."""
        queries, keys = ([lengths[number] for number in kept] for lengths in (self._query_lengths, self.key_lengths))
        ends = [torch.tensor([0, *accumulate(own)], dtype=torch.int32) for own in (queries, keys)]
        device = self.queries.device
        first = ends[0].to(device)
        return Packing(first, first if queries == keys else ends[1].to(device), max(queries), max(keys))

    def split(self, query: Tensor, *keys: Tensor) -> list[tuple[Tensor, ...]]:
        """Gives queries `[1, H, length, d]` of each sequence, with its part of every tensor that goes with the keys."""
        parts = [self.split_keys(tensor) for tensor in keys]
        return list(zip(self.split_queries(query), *parts, strict=True))

    def each(self, attend: Callable[..., Tensor], family: Any, *operands: Any) -> Tensor:
        """Computes attention of one sequence after another, by a method that does not know of packing.

        Args:
            attend: the method.
            family: what computes the attention.
            *operands: query, key, value and the call.
        """
        query, key, value, call = operands
        alone = replace(call, packing=None)
        outs = [attend(family, *part, alone) for part in self.split(query, key, value)]
        return torch.cat(outs, dim=2)

    def split_queries(self, query: Tensor) -> tuple[Tensor, ...]:
        """Gives the queries of each sequence, `[1, H, length, d]`."""
        return query.split(self._query_lengths, dim=2)

    def split_keys(self, key: Tensor) -> tuple[Tensor, ...]:
        """Gives the keys (or values) of each sequence, `[1, Hk, length, d]`."""
        return key.split(self.key_lengths, dim=2)

    # Each read makes a GPU wait, so the lengths are read once.
    @cached_property
    def _query_lengths(self) -> list[int]:
        return self.queries.diff().tolist()

    @cached_property
    def key_lengths(self) -> list[int]:
        """The number of keys of each sequence."""
        return self._query_lengths if self.keys is self.queries else self.keys.diff().tolist()


def _longest(cumulative: Tensor) -> int:
    return int(cumulative.diff().max()) if len(cumulative) > 1 else 0


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
