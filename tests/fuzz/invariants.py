"""Conditions that every call of `favor_attention` must satisfy."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import favor
from favor.features import SignedFeatures
from favor.kernels import StreamState

from .attention import Call

# How far two ways to compute the same may be apart where logits are at most `_MODERATE`, in sizes of a value.
_TOLERANCE = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 0.05, "float16": 0.01}
_MODERATE = 15.0


def check(call: Call) -> None:
    """Runs a call, with its gradients and in pieces, and two others to compare, which its seed chooses."""
    run = _Run(call)
    try:
        out = run.attend(*run.tensors)
    except (ValueError, TypeError):
        if not call.may_be_refused:
            raise
        return
    run.check_output(out)
    run.check_gradients(out)
    run.check_pieces(out)
    if run.is_comparable:
        comparisons = [run.check_padding, run.check_rows, run.check_past, run.check_exact]
        for first in (call.seed, call.seed + 1):
            comparisons[first % len(comparisons)](out)


class _Run:
    """The tensors of a call, and what is compared with what.

    Attributes:
        tensors: query, key, value.
        keys: boolean `[B, S]`, True for real keys; queries `[B, L]`, True for queries that are no padding.
        visible: boolean `[B, L, S]`, True for keys that a query sees.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.tensors, self.mask = call, call.tensors(), call.mask()
        (rows, columns), batch = call.lengths, len(call.padding)
        everything = torch.ones(batch, columns, dtype=torch.bool)
        self.keys = everything if self.mask is None else self.mask
        queries = self.keys[:, columns - rows :] if call.is_self and not call.packed and rows <= columns else None
        self.queries = torch.ones(batch, rows, dtype=torch.bool) if queries is None else queries
        self.visible = self.keys.unsqueeze(1).expand(-1, rows, -1)
        if call.packed:
            numbers = torch.arange(len(call.packed))
            owners = [numbers.repeat_interleave(torch.tensor([pair[i] for pair in call.packed])) for i in (0, 1)]
            self.visible = self.visible & (owners[0].unsqueeze(1) == owners[1])
            first = [torch.tensor([0, *(pair[i] for pair in call.packed)]).cumsum(0)[owners[i]] for i in (0, 1)]
            ahead = torch.tensor([pair[1] - pair[0] for pair in call.packed])[owners[0]]
            row, column = torch.arange(rows) - first[0] + ahead, torch.arange(columns) - first[1]
        else:
            row, column = torch.arange(columns - rows, columns), torch.arange(columns)
        if call.is_causal:
            self.visible = self.visible & (column <= row.unsqueeze(1))

    @property
    def is_comparable(self) -> bool:
        """Whether rounding is small enough to compare values."""
        return self.call.logits <= _MODERATE and max(self.call.query_norm, self.call.key_norm) <= 36

    def attend(self, *tensors: Tensor, mask: Tensor | None = None, **changes: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*parameters from this sequence")
            options = {"key_padding_mask": self.mask if mask is None else mask, **self.call.options(), **changes}
            return favor.favor_attention(*tensors, **options)

    def check_output(self, out: Tensor) -> None:
        """Its shape and type; numbers, and no larger ones than the values; zeros without a key."""
        query, _, value = self.tensors
        assert out.shape == (*query.shape[:3], value.shape[3]), f"the output has shape {tuple(out.shape)}"
        assert out.dtype == query.dtype, f"the output is {out.dtype}"
        unseen = ~self.visible.any(2)
        assert not out.transpose(1, 2)[unseen].any(), "a query without a key does not give zeros"
        real = out.transpose(1, 2)[self.queries]
        # Weights of trigonometric features may be negative, their sum next to nothing, and the quotient too large.
        averages = self.call.features != "trig"
        good = real.isfinite() if averages or self.call.dtype != "float16" else ~real.isnan()
        assert good.all(), f"the output has {int((~good).sum())} numbers that are not finite"
        if averages and out.numel() and value.numel():
            largest, allowed = value.abs().max(), 1 + _TOLERANCE[self.call.dtype]
            assert real.abs().amax() <= largest * allowed if real.numel() else True, "the output exceeds the values"

    def check_gradients(self, out: Tensor) -> None:
        """Finite for real tokens, whatever the padding holds, and zero for padded keys."""
        call, tensors = self.call, [t.requires_grad_() for t in self.poisoned()]
        found = self.attend(*tensors)
        weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
        (found * weight).transpose(1, 2)[self.queries].sum().backward()
        # Gradients of exact attention overflow in float16, too; those of maps that divide by a norm, at small ones.
        norm, divides = max(call.query_norm, call.key_norm), isinstance(call.family, SignedFeatures)
        large = call.dtype == "float16" and (norm > 30 or divides)
        if large and norm > 1e3:
            return
        masks = {"query": self.queries, "key": self.keys, "value": self.keys}
        for (name, real), tensor in zip(masks.items(), tensors, strict=True):
            grad = tensor.grad.transpose(1, 2)
            good = ~grad[real].isnan() if large else grad[real].isfinite()
            assert good.all(), f"{int((~good).sum())} gradients of the {name} are not finite"
            assert name == "query" or not grad[~real].any(), f"padding of the {name} has a gradient"

    def poisoned(self) -> list[Tensor]:
        """The tensors, with NaN and infinity where they are padding."""
        poisoned = []
        for tensor, real in zip(self.tensors, (self.queries, self.keys, self.keys), strict=True):
            bad = torch.tensor([torch.nan, torch.inf])[torch.arange(tensor.shape[2]) % 2].to(tensor.dtype)
            poisoned.append(torch.where(real[:, None, :, None], tensor, bad[:, None]))
        return poisoned

    def check_padding(self, out: Tensor) -> None:
        """What padding holds does not matter."""
        if self.mask is not None:
            self.close("with other padding", self.attend(*self.poisoned()), out)

    def check_rows(self, out: Tensor) -> None:
        """A row of the batch, or a packed sequence, is as if it were alone."""
        if self.call.packed:
            lengths = [[pair[i] for pair in self.call.packed] for i in (0, 1, 1)]
            parts = zip(*(t.split(own, 2) for t, own in zip(self.tensors, lengths, strict=True)), strict=True)
            alone = {"cu_seqlens_q": None, "cu_seqlens_k": None}
            self.close(
                "one packed sequence after another", torch.cat([self.attend(*p, **alone) for p in parts], 2), out
            )
        elif len(self.call.padding) > 1:
            rows = [slice(i, i + 1) for i in range(len(self.call.padding))]
            outs = [self.attend(*(t[row] for t in self.tensors), mask=self.keys[row]) for row in rows]
            self.close("one row after another", torch.cat(outs), out)

    def check_past(self, out: Tensor) -> None:
        """A causal query sees nothing of what comes later."""
        call, (rows, columns) = self.call, self.call.lengths
        if not call.is_causal or call.packed or rows < 2:
            return
        now = call.seed % (rows - 1) + 1
        later = [tensor.clone() for tensor in self.tensors]
        for tensor, first in zip(later, (now, columns - rows + now, columns - rows + now), strict=True):
            tensor[:, :, first:] = -3 * tensor[:, :, first:].flip(2)
        self.close("with another future", self.attend(*later)[:, :, :now], out[:, :, :now])

    @torch.no_grad()
    def check_pieces(self, out: Tensor) -> None:
        """Causal attention goes on from a state as if there had been no pieces."""
        if not self.call.pieces:
            return
        state, mask = StreamState(), self.mask
        cuts = [self.call.length * i // self.call.pieces for i in range(self.call.pieces + 1)]
        outs = []
        for start, stop in pairwise(cuts):
            own = None if mask is None else mask[:, start:stop]
            outs.append(self.attend(*(t[:, :, start:stop] for t in self.tensors), key_padding_mask=own, state=state))
        self.check_output(torch.cat(outs, 2))
        if self.is_comparable:
            self.close("in pieces", torch.cat(outs, 2), out)

    def check_exact(self, out: Tensor) -> None:
        """As many means or selected keys as keys, or a window of all keys, is softmax attention."""
        if self.call.is_exact:
            query, key, value = (tensor.double() for tensor in self.tensors)
            key, value = (tensor.repeat_interleave(self.call.groups, 1) for tensor in (key, value))
            scale = self.call.dim**-0.5 if self.call.scale is None else self.call.scale
            logits = (scale * query @ key.mT).masked_fill(~self.visible.unsqueeze(1), -torch.inf)
            self.close("of softmax attention", logits.softmax(-1).nan_to_num(0.0) @ value, out)

    def close(self, what: str, found: Tensor, out: Tensor) -> None:
        """Compares the rows of real queries."""
        real = self.queries[:, : out.shape[2]]
        difference = (found.double() - out.double()).transpose(1, 2)[real].abs()
        largest = difference.max().item() if difference.numel() else 0.0
        size = max(1.0, self.tensors[2].abs().max().item() if self.tensors[2].numel() else 0.0)
        assert largest <= _TOLERANCE[self.call.dtype] * size, f"the output {what} differs by {largest:.3g}"
