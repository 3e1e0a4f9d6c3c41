"""Causal attention by landmarks piece by piece: a state that keeps all keys and values, of which few are read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.functional import AttentionCall
from favor.kernels import StreamState
from favor.kernels.dispatch import on_cpu, plain
from favor.kernels.landmarks import is_fused, step
from favor.kernels.operands import SectionTables
from favor.landmark import causal
from favor.landmark.causal import BLOCK, SECTION, STEP, Past


@dataclass
class Kept(Past):
    """Holds what earlier tokens leave behind, with room for whole sections of S tokens; all tables are contiguous.

    Attributes:
        length: tokens of each sequence, int64 `[B]`.
        shared: what the block of the last token chose, int32 `[B, H, K]`; K is 0 if that is not known.
    """

    length: Tensor
    shared: Tensor

    @classmethod
    def of(cls, past: Past, length: Tensor, room: int = 0, selected: int = 0) -> Kept:
        """Copies what the first tokens leave behind, of which `length` `[B]` are no padding.

        With `room` for so many tokens in all, no table is made anew later, also not that of `selected` keys.
        """
        keys = past.key.shape[2]
        total = -(-max(keys, room) // SECTION) * SECTION
        number = min(selected, total) if room else 0
        shared = torch.zeros(*past.samples.shape[:2], number, dtype=torch.int32, device=length.device)
        kept = cls(**{name: table.detach() for name, table in vars(past).items()}, length=length, shared=shared)
        kept.samples = pad(kept.samples, (0, 0, 0, 1))
        kept._add(total - keys)
        return kept

    def grow(self, tokens: int) -> None:
        """Makes room for so many tokens in all."""
        missing = -(-tokens // SECTION) * SECTION - self.key.shape[2]
        if missing > 0:
            self._add(missing)

    def _add(self, missing: int) -> None:
        steps = {"key": 1, "value": 1, "index": 1, "samples": STEP, "far_key": SECTION, "far_value": SECTION}
        for name, tokens in steps.items():
            setattr(self, name, pad(getattr(self, name), (0, 0, 0, missing // tokens)).contiguous())

    def find_coordinates(self) -> None:
        """Finds in which coordinates queries search, by the first 64 tokens, and indexes the keys."""
        self.coordinates = causal.coordinates(self.samples[:, :, : BLOCK // STEP], self.key[:, :, :BLOCK])
        self.index = causal.indexed(self.key, self.coordinates).contiguous()

    def decide(self, few: Tensor) -> None:
        """Finds the coordinates of rows that had few tokens, by a mask `[B]`: the first 64 decide, and are indexed."""
        found = causal.coordinates(self.samples[:, :, : BLOCK // STEP], self.key[:, :, :BLOCK])
        self.coordinates.copy_(torch.where(few[:, None, None], found, self.coordinates))
        self.index[:, :, :BLOCK] = causal.indexed(self.key[:, :, :BLOCK], self.coordinates)

    def append(self, query: Tensor, key: Tensor, value: Tensor, counts: Tensor) -> Tensor:
        """Writes tokens `[B, H or Hk, L, .]` behind the others, and gives their places `[B, L]`.

        The first `counts` `[B]` are no padding, which is zeros. Their coordinates are still missing in the index.
        """
        place = self.length.unsqueeze(1) + torch.arange(key.shape[2], device=key.device)
        causal.write(self.key, place, key)
        causal.write(self.value, place, value)
        slot = torch.where(place % STEP == 0, place // STEP, self.samples.shape[2] - 1)
        causal.write(self.samples, slot, query)
        section = (place // SECTION)[:, None, :, None]
        for sums, rows in ((self.far_key, key), (self.far_value, value)):
            sums.scatter_add_(2, section.expand(-1, *rows.shape[1:2], -1, rows.shape[3]), rows.to(sums.dtype))
        self.length += counts
        return place

    def convert(self, dtype: torch.dtype) -> None:
        """Brings everything to the type of the next tokens; sums are float32 at least."""
        precision = torch.promote_types(dtype, torch.float32)
        for name in ("key", "value", "samples", "index", "far_key", "far_value"):
            wanted = precision if name.startswith("far") else dtype
            if getattr(self, name).dtype != wanted:
                setattr(self, name, getattr(self, name).to(wanted))

    def forget(self, tokens: int) -> None:
        """Forgets the last tokens of each sequence."""
        self.length = self.length - tokens
        there = (torch.arange(self.key.shape[2], device=self.key.device) < self.length.unsqueeze(1))[:, None, :, None]
        self.far_key, self.far_value = (  # anew: what was made in inference mode cannot be changed outside of it
            torch.where(there, rows, 0.0).unflatten(2, (-1, SECTION)).sum(3, dtype=self.far_key.dtype)
            for rows in (self.key, self.value)
        )
        self.shared = self.shared[:, :, :0]


def counted(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Counts the tokens of each sequence that are not padding, int64 `[B]`, of `[B, H, L, d]` by a mask `[B, L]`."""
    if mask is None:
        return torch.full(tokens.shape[:1], tokens.shape[2], dtype=torch.int64, device=tokens.device)
    return mask.sum(1)


def attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Computes causal attention of the tokens that come after those of the call's state, which is changed in place.

    Tensors are those of `favor.landmark.causal.attention`, of the same tokens; padding is zeros. Only the first piece
    has a graph. Raises a ValueError if the state was begun with other options or another batch.
    """
    state, options = call.state, (call.selected_keys, call.scale, call.kernel)
    assert state is not None
    one_operator = is_fused(call.kernel, query, value)
    if state.memory is None and one_operator:
        out, known = causal.fused(query, key, value, call)
        state.settle(Kept.of(known, counted(call.key_mask, key), state.room, call.selected_keys))
        return out
    if state.memory is None:
        counts = counted(call.key_mask, key)
        past = torch.zeros_like(counts)
        known = causal.past_of(query, key, value, past, True)
        state.settle(Kept.of(known, counts, state.room, call.selected_keys))
        return causal.read_past(known, query, past, True, *options)
    kept, length = _checked(query, key, value, state), query.shape[2]
    # The first 64 tokens decide; shorter rows of a batch may have had fewer until now.
    before = state.tokens - length
    decides = (state.is_ragged or before < BLOCK) and state.tokens // BLOCK > before // BLOCK
    if state.room:  # the host knows the tokens of the first piece alone
        decides = state.is_ragged or state.tokens < BLOCK
    with torch.no_grad():
        if not state.room:
            kept.grow(state.tokens)
        if length == 1 and one_operator and plain(query, key, value):
            return _step(kept, query, key, value, call, decides)
        place = kept.append(query, key, value, counted(call.key_mask, key))
        if decides and state.room:
            kept.decide(place[:, 0] < BLOCK)
        if decides and not state.room:
            kept.find_coordinates()
        else:
            causal.write(kept.index, place, causal.indexed(key, kept.coordinates))
        if length == 1:
            return _one(kept, query, place[:, 0], state, *options)
        if not state.room:
            kept.shared = kept.shared[:, :, :0]
        return causal.read_past(kept, query, place[:, 0], False, *options)


def _checked(query: Tensor, key: Tensor, value: Tensor, state: StreamState) -> Kept:
    begun, sizes = state.memory, (query.shape[:2], key.shape[:2], query.shape[3], value.shape[3])
    if isinstance(begun, Kept):
        known = (begun.samples.shape[:2], begun.key.shape[:2], begun.key.shape[3], begun.value.shape[3])
    if not isinstance(begun, Kept) or known != sizes:
        raise ValueError(
            "the state was begun with other options or another batch; begin again with a new StreamState()."
        )
    made = not state.room and any(getattr(begun, field.name).is_inference() for field in fields(begun))
    if made and not torch.is_inference_mode_enabled():
        state.change(torch.clone)  # tensors made in inference mode cannot be changed in place outside of it
    kept: Kept = state.memory
    kept.convert(key.dtype)
    return kept


def _one(
    kept: Kept, query: Tensor, place: Tensor, state: StreamState, selected: int, scale: float, kernel: str
) -> Tensor:
    """Attends with one more token, whose block has chosen unless it begins with it."""
    batch, heads = query.shape[:2]
    begin = place // BLOCK * BLOCK
    begins = (state.tokens - 1) % BLOCK == 0
    if state.is_ragged and not state.room:  # a GPU would wait for an answer
        begins = not on_cpu(place) or bool((begin == place).any())
    shared, seen = kept.shared, (place // SECTION * SECTION).unsqueeze(1)
    if state.room or begins or not shared.shape[2]:
        known = (kept.samples, kept.key, begin.unsqueeze(1), causal.per_head(seen, heads))
        shared = causal.votes(*known, selected, kernel).view(batch, heads, -1)
    if not state.room:
        kept.shared = shared
    shared = shared.flatten(0, 1).unsqueeze(1)
    out = causal.read_blocks(kept, query.flatten(0, 1)[:, None], place, seen, shared, scale, kernel)
    return out.view(batch, heads, 1, -1)


def _step(kept: Kept, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, decides: bool) -> Tensor:
    """Does what `append` and `_one` do by one kernel, which also looks where a block begins without an answer."""
    state, selected = call.state, min(call.selected_keys, kept.key.shape[2])
    assert state is not None
    chooses = bool(state.room) or state.is_ragged or (state.tokens - 1) % BLOCK == 0 or not kept.shared.shape[2]
    if chooses and kept.shared.shape[2] != selected:
        kept.shared = kept.shared.new_empty(*kept.shared.shape[:2], selected)
    tables = SectionTables(
        key=kept.key,
        value=kept.value,
        far_key=kept.far_key,
        far_value=kept.far_value,
        samples=kept.samples,
        coordinates=kept.coordinates,
        searched=kept.index,
        length=kept.length,
        shared=kept.shared.unsqueeze(2),
        chooses=chooses,
    )
    counts = None if call.key_mask is None else counted(call.key_mask, key)
    out = step(query, key, value, counts, tables, causal.options_of(call), call.kernel)
    if decides and state.room:
        kept.decide(kept.length <= BLOCK)
    elif decides:
        kept.find_coordinates()
    return out
