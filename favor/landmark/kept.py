"""Causal attention by landmarks piece by piece: a state that keeps all keys and values, of which few are read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from favor.attention.functional import AttentionCall
from favor.kernels import StreamState
from favor.kernels.dispatch import on_cpu
from favor.kernels.landmarks import is_fused
from favor.landmark import causal
from favor.landmark.causal import BLOCK, SECTION, STEP, Past


@dataclass
class Kept(Past):
    """Holds what earlier tokens leave behind, with room for whole sections of S tokens.

    Attributes:
        length: tokens of each sequence, int64 `[B]`.
        shared: what the block of the last token chose, int32 `[B, H, K]`; K is 0 if that is not known.
    """

    length: Tensor
    shared: Tensor

    @classmethod
    def of(cls, past: Past, length: Tensor) -> Kept:
        """Copies what the first tokens leave behind, of which `length` `[B]` are no padding."""
        shared = torch.empty(*past.samples.shape[:2], 0, dtype=torch.int32, device=length.device)
        kept = cls(**{name: table.detach() for name, table in vars(past).items()}, length=length, shared=shared)
        kept.samples = pad(kept.samples, (0, 0, 0, 1))
        kept._add(-kept.key.shape[2] % SECTION)
        return kept

    def grow(self, tokens: int) -> None:
        """Makes room for so many tokens in all."""
        missing = -(-tokens // SECTION) * SECTION - self.key.shape[2]
        if missing > 0:
            self._add(missing)

    def _add(self, missing: int) -> None:
        steps = {"key": 1, "value": 1, "index": 1, "samples": STEP, "far_key": SECTION, "far_value": SECTION}
        for name, step in steps.items():
            setattr(self, name, pad(getattr(self, name), (0, 0, 0, missing // step)))

    def find_coordinates(self) -> None:
        """Finds in which coordinates queries search, by the first 64 tokens, and indexes the keys."""
        self.coordinates = causal.coordinates(self.samples[:, :, : BLOCK // STEP], self.key[:, :, :BLOCK])
        self.index = causal.indexed(self.key, self.coordinates)

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
        self.length = self.length + counts
        return place

    def convert(self, dtype: torch.dtype) -> None:
        """Brings everything to the type of the next tokens; sums are float32 at least."""
        precision = torch.promote_types(dtype, torch.float32)
        for name in ("key", "value", "samples", "index", "far_key", "far_value"):
            setattr(self, name, getattr(self, name).to(precision if name.startswith("far") else dtype))

    def forget(self, tokens: int) -> None:
        """Forgets the last tokens of each sequence."""
        self.length = self.length - tokens
        there = (torch.arange(self.key.shape[2], device=self.key.device) < self.length.unsqueeze(1))[:, None, :, None]
        dtype = self.far_key.dtype
        self.far_key, self.far_value = (  # anew: what was made in inference mode cannot be changed outside of it
            torch.where(there, rows, 0.0).unflatten(2, (-1, SECTION)).sum(3, dtype=dtype)
            for rows in (self.key, self.value)
        )
        self.shared = self.shared[:, :, :0]


def attention(query: Tensor, key: Tensor, value: Tensor, counts: Tensor, call: AttentionCall) -> Tensor:
    """Computes causal attention of the tokens that come after those of the call's state, which is changed in place.

    Tensors are those of `favor.landmark.causal.attention`, of the same tokens, and `counts`, int64 `[B]`: how many of
    the first are no padding, which is zeros. Only the first piece has a graph. Raises a ValueError if the state was
    begun with other options or another batch.
    """
    state, options = call.state, (call.selected_keys, call.scale, call.kernel)
    assert state is not None
    if state.memory is None:
        if is_fused(call.kernel, query, value):
            out, known = causal.fused(query, key, value, *options)
            state.memory = Kept.of(known, counts)
            return out
        past = torch.zeros_like(counts)
        known = causal.past_of(query, key, value, past, True)
        state.memory = Kept.of(known, counts)
        return causal.read_past(known, query, past, True, *options)
    kept, length = _checked(query, key, value, state), query.shape[2]
    with torch.no_grad():
        kept.grow(state.tokens)
        place = kept.append(query, key, value, counts)
        # The first 64 tokens decide; shorter rows of a batch may have had fewer until now.
        before = state.tokens - length
        if (state.is_ragged or before < BLOCK) and state.tokens // BLOCK > before // BLOCK:
            kept.find_coordinates()
        else:
            causal.write(kept.index, place, causal.indexed(key, kept.coordinates))
        if length == 1:
            return _one(kept, query, place[:, 0], state, *options)
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
    made = any(getattr(begun, field.name).is_inference() for field in fields(begun))
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
    if state.is_ragged:  # a GPU would wait for an answer
        begins = not on_cpu(place) or bool((begin == place).any())
    if begins or not kept.shared.shape[2]:
        kept.shared = causal.votes(kept, begin.unsqueeze(1), selected, kernel).view(batch, heads, -1)
    shared, seen = kept.shared.flatten(0, 1).unsqueeze(1), (place // SECTION * SECTION).unsqueeze(1)
    blocks = query.flatten(0, 1)[:, None]
    out = causal.read_blocks(kept, blocks, place, seen, shared, scale, kernel)
    return out.view(batch, heads, 1, -1)
