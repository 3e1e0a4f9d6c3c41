"""Inputs and outputs of every kernel, and the parts of a batch that kernels work through one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

Index = tuple[slice, slice, slice]


class Operands(NamedTuple):
    """The tensors of a call of `favor.kernels.linear_attention`.

    Attributes:
        query: `[B, H, L, d]`.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, of the type of `query`; H is a multiple of Hk.
        query_directions, key_directions: uq and uk `[n, Hk, M, d]`, contiguous, float32 (float64 for float64 tokens);
            n is the number of sequences, or 1 if they share the directions.
        offset: `[n, Hk, M]`, contiguous.
        key_bias: `[B, Hk, S]`, contiguous; -inf hides a key.
        query_bias: `[B, H, L]`, contiguous, of the weights outside of the window; None without a window.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    key_bias: Tensor
    query_bias: Tensor | None = None

    @property
    def groups(self) -> int:
        """G, query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    def readable(self) -> Operands:
        """Copies what kernels could not read: tokens whose rows are not in one piece, others if not contiguous."""
        tokens = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in self[:3])
        others = (None if tensor is None else tensor.contiguous() for tensor in self[3:])
        return Operands._make((*tokens, *others))

    def part(self, rows: Index, columns: Index, directions: tuple[slice, slice]) -> Operands:
        """Gives views of some queries, some keys, and the directions and offsets of some sequences and key heads."""
        indices = (rows, columns, columns, directions, directions, directions, columns, rows)
        pairs = zip(self, indices, strict=True)
        return Operands._make(None if tensor is None else tensor[index] for tensor, index in pairs)


class GeometryOptions(TypedDict, total=False):
    """Keywords of `favor.kernels.linear_attention` that say which key a query sees, and how."""

    is_causal: bool
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    window: int
    scale: float


def check_known(options: Any, known: type[Any]) -> None:
    """Raises a TypeError for options that a TypedDict does not name; those of a call are not checked by themselves."""
    unknown = [name for name in options if name not in known.__annotations__]
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}; known are {', '.join(known.__annotations__)}.")


class Geometry(NamedTuple):
    """Which key a query sees, and how.

    Attributes:
        cu_q, cu_k: cumulative lengths `[N + 1]`, int32, of N packed sequences (then B = 1); None if nothing is packed.
        max_q, max_k: the longest sequence of queries and of keys.
        is_causal: whether query i sees keys 0 ... S - L + i only.
        window: tokens of the blocks in which attention is exact; 0 for none.
        scale: of the exact logits.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool = False
    window: int = 0
    scale: float = 1.0

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, query_bias: Tensor | None = None, **options: Unpack[GeometryOptions]
    ) -> Geometry:
        """Checks the options of a call of `favor.kernels.linear_attention`, and puts in the defaults.

        Raises:
            TypeError: for an unknown option.
            ValueError: for a window that does not fit the inputs.
        """
        check_known(options, GeometryOptions)
        window, is_causal = options.get("window", 0), options.get("is_causal", False)
        if (window > 0) != (query_bias is not None) or window < 0:
            raise ValueError(f"window must be positive with a query_bias and 0 without, got {window}.")
        length, keys = query.shape[2], key.shape[2]
        if window and not is_causal and length != keys:
            raise ValueError(
                f"a window needs queries and keys of the same tokens, got {length} queries and {keys} keys."
            )
        given = (options.get("cu_seqlens_q"), options.get("cu_seqlens_k"))
        cu_q, cu_k = (None if ends is None else ends.to(torch.int32) for ends in given)
        max_q, max_k = options.get("max_seqlen_q"), options.get("max_seqlen_k")
        longest = (length if cu_q is None or max_q is None else max_q, keys if cu_k is None or max_k is None else max_k)
        return cls(cu_q, cu_k, *longest, is_causal, window, options.get("scale", 1.0))

    @property
    def form(self) -> str:
        """Which form of a kernel computes it: "window", "causal" or "bidirectional"."""
        return "window" if self.window else "causal" if self.is_causal else "bidirectional"

    def sequences(self, batch_size: int) -> int:
        """Gives the number of sequences: those that are packed, or the size of the batch."""
        return batch_size if self.cu_k is None else self.cu_k.shape[0] - 1


class Result(NamedTuple):
    """Output of a forward pass; parts that the backward pass of its kernel does not need are empty.

    Attributes:
        out: `[B, H, L, dv]`.
        lse: logarithm of the normaliser `[B, H, L]`.
        weight: logarithm of the weight of each feature summary: `[n, Hk, M]`, or `[b, B, Hk, M]` for b blocks.
        summary: the summaries, weighted means of values: `[n, Hk, M, dv]` or `[b, B, Hk, M, dv]`.
    """

    out: Tensor
    lse: Tensor
    weight: Tensor
    summary: Tensor

    @classmethod
    def empty(
        cls,
        form: str,
        operands: Operands,
        geometry: Geometry,
        *,
        joins_heads: bool = False,
        keeps_lse: bool = False,
        rounds_summaries: bool = False,
    ) -> Result:
        """Makes uninitialised memory for the result of one form of a kernel, with summaries for its backward pass.

        A window has summaries per block: b is the number of blocks, with room for one partial block per sequence.

        Args:
            form: "bidirectional", "causal" or "window".
            operands, geometry: what the kernel is given.
            joins_heads: the output lies `[B, L, H, dv]` in memory. Otherwise it does only if the queries do, which is
                how models join heads.
            keeps_lse: bidirectional attention keeps the normaliser, too.
            rounds_summaries: those of a window have the type of the values; otherwise, that of the offset.
        """
        query, value, offset = operands.query, operands.value, operands.offset
        (batch, heads, length), width = query.shape[:3], value.shape[3]
        if query.is_contiguous() and not joins_heads:
            out = query.new_empty(batch, heads, length, width)
        else:
            out = query.new_empty(batch, length, heads, width).transpose(1, 2)
        lse = offset.new_empty(query.shape[:3] if keeps_lse or form != "bidirectional" else 0)
        if form == "causal":
            return cls(out, lse, offset.new_empty(0), offset.new_empty(0))
        if form == "window":
            shape = (value.shape[2] // geometry.window + geometry.sequences(1), *value.shape[:2], offset.shape[-1])
        else:
            shape = (geometry.sequences(batch), *offset.shape[1:])
        of_values = value if rounds_summaries and form == "window" else offset
        return cls(out, lse, offset.new_empty(shape), of_values.new_empty(*shape, width))


class Gradients(NamedTuple):
    """Gradients of `Operands`; empty for directions and offset unless asked for, and for a bias that is not given."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    query_bias: Tensor

    @classmethod
    def empty(cls, operands: Operands, *, for_directions: bool) -> Gradients:
        """Makes memory for a backward pass, which writes gradients of tokens and biases and adds up the others."""
        query, key, value, *directions, key_bias, query_bias = operands
        nothing = operands.offset.new_empty(0)
        written = (torch.empty_like(tensor) for tensor in (query, key, value, key_bias))
        added = (torch.zeros_like(tensor) if for_directions else torch.empty_like(nothing) for tensor in directions)
        return cls._make((*written, *added, nothing if query_bias is None else torch.empty_like(query_bias)))


@dataclass
class Sequence:
    """One sequence of a packed batch, or a whole batch that is not packed, or some heads of these.

    Attributes:
        batch: the operands of the whole batch.
        operands: its own, which are views of these.
        rows, columns: index of its queries and of its keys in the whole batch.
        summaries: index of its summaries among those of all sequences.
        directions: index of its directions, offsets and their gradients among those of all sequences and key heads.
    """

    batch: Operands
    operands: Operands
    rows: Index
    columns: Index
    summaries: slice
    directions: tuple[slice, slice]

    def accumulate(self, total: Tensor, update: Tensor) -> None:
        """Adds an update per sequence and key head `[N, ...]` to a total `[n, Hk, ...]` (n = 1: shared by all)."""
        own = total[self.directions]
        update = update.view(-1, *own.shape[1:])
        own += update.sum(0, keepdim=True) if own.shape[0] == 1 else update

    def parts(self, number: int) -> Iterator[Sequence]:
        """Cuts a batch into parts of at most this many key heads, counting those of all sequences of a batch."""
        (batch, heads), groups = self.operands.key.shape[:2], self.operands.groups
        together, number = max(1, number // heads), min(number, heads)
        for first, head in product(range(0, batch, together), range(0, heads, number)):
            some, own = slice(first, first + together), slice(head, head + number)
            asking = slice(groups * head, groups * (head + number))
            # A packed sequence, which is a batch of one, is told apart by its place in the whole batch.
            summaries, directions = (self.summaries, self.directions[0]) if batch == 1 else (some, some)
            if self.batch.offset.shape[0] == 1:
                directions = slice(None)
            rows, columns = (some, asking, self.rows[2]), (some, own, self.columns[2])
            some_operands = self.batch.part(rows, columns, (directions, own))
            yield Sequence(self.batch, some_operands, rows, columns, summaries, (directions, own))


def sequences(operands: Operands, geometry: Geometry) -> Iterator[Sequence]:
    """Yields the sequences of a batch; all of it at once if it is not packed."""
    cu_q, cu_k, everything = geometry.cu_q, geometry.cu_k, slice(None)
    if cu_q is None or cu_k is None:
        every = (everything, everything, everything)
        yield Sequence(operands, operands, every, every, everything, (everything, everything))
        return
    ends = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    for index, (rows, columns) in enumerate(ends):
        own = slice(index, index + 1)
        directions = (own if operands.offset.shape[0] > 1 else everything, everything)
        of_rows, of_columns = (everything, everything, slice(*rows)), (everything, everything, slice(*columns))
        part = operands.part(of_rows, of_columns, directions)
        yield Sequence(operands, part, of_rows, of_columns, own, directions)


class ChosenOperands(NamedTuple):
    """The arguments of `favor.kernels.chosen.chosen_attention`, with batch and heads in one dimension.

    Attributes:
        query: `[N, Z, R, d]`: Z blocks of R queries.
        key, value: `[Nk, S, d]` and `[Nk, S, dv]`; N is a multiple of Nk.
        shared: what each block chose, int32 `[N, Z, C]`: runs of keys. Run p of a head with `run` r has the keys p r to
            p r + r - 1, all in S, of which those before `seen` count. All blocks of a head that see equally many have
            as many; -1 at the end for none.
        own: places of the keys that each query chose, int32 `[N, Z, R, O]`; -1 for none.
        seen: how many of the first keys a block could choose from, int32 `[N, Z]`. With sections, blocks of different
            sections see different numbers.
        far_key, far_value: means, `[Nk, F, d]` and `[Nk, F, dv]`.
        far_log: logarithm of how often each mean counts, `[N, Z, F]`, float32 at least; -inf for never.
        first: place of the first query among the keys, int32 `[N]`; read only with sections.
        run: keys of a run, int32 `[N]`.
        section: a query sees the keys of its own section up to itself, sections of so many keys; 0 for no near keys.
            All queries of a block are in one section.
        most: keys that a block chooses, rounded up to whole runs. A block that sees no more keys chose them all.
        scale: of the logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shared: Tensor
    own: Tensor
    seen: Tensor
    far_key: Tensor
    far_value: Tensor
    far_log: Tensor
    first: Tensor
    run: Tensor
    section: int
    most: int
    scale: float


class NodeOptions(NamedTuple):
    """The numbers of a call of `favor.kernels.landmarks.node_attention`.

    Attributes:
        means: M, nodes of sorted keys.
        selected: K; a block reads K keys exactly, in whole nodes, rounded up. 0: means alone are read.
        block: alike queries that share a choice.
        together: whether queries are sorted, so that those of a block are alike. If not, they stay in their order, and
            keys are sorted by keys.
        is_padded: whether fewer keys than there are may count.
        spread: standard deviations of the logits of a node that are added to the logit of its mean.
        scale: of the logits.
    """

    means: int
    selected: int
    block: int
    together: bool
    is_padded: bool
    spread: float
    scale: float

    def number(self, keys: int) -> int:
        """Gives how many nodes there are room for."""
        return min(self.means, keys)

    def most(self, keys: int) -> int:
        """Gives how many nodes a block may choose at most."""
        selected = min(self.selected, keys)
        return min(selected if self.is_padded else -(-selected // -(-keys // self.means)), self.number(keys))


class SectionOptions(NamedTuple):
    """The numbers of a call of `favor.kernels.landmarks.section_attention`.

    Attributes:
        selected: K, keys that a block chooses.
        section: keys of a mean; a query reads those of its own section up to itself exactly.
        block: queries that share a choice.
        step: every so many queries one votes for its block.
        sink: first keys, exact for all queries.
        share: a query chooses one key for itself for so many of its block.
        part: a query searches one coordinate of so many.
        scale: of the logits.
    """

    selected: int
    section: int
    block: int
    step: int
    sink: int
    share: int
    part: int
    scale: float

    def rank(self, width: int) -> int:
        """Gives in how many coordinates queries search."""
        return max(width // self.part, 1)


class SectionTables(NamedTuple):
    """Tables that earlier tokens left behind, with room for S tokens in whole sections; all contiguous.

    Attributes:
        key, value: `[B, Hk, S, d]` and `[B, Hk, S, dv]`.
        far_key, far_value: their sums over each section, float32.
        samples: every so many queries, `[B, H, n, d]`; the last place is for nothing.
        coordinates: those in which queries search, int64 `[B, H, r]`.
        searched: these coordinates of the keys, `[B, H, S, r]`.
        length: tokens of each sequence, int64 `[B]`.
        shared: what the block of the last token chose, int32 `[B, H, 1, K]`.
        chooses: whether the block of the next token has to choose.
    """

    key: Tensor
    value: Tensor
    far_key: Tensor
    far_value: Tensor
    samples: Tensor
    coordinates: Tensor
    searched: Tensor
    length: Tensor
    shared: Tensor
    chooses: bool
