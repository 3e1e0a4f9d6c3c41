"""Positive features of what is far from a block of queries, for attention with relative positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from favor.attention.functional import AttentionCall
from favor.attention.linear import key_bias, prepared, query_bias
from favor.attention.positions import Blocks, Columns, far_field, for_each_query, in_rows
from favor.features import PositiveFeatures


@far_field(PositiveFeatures)
class FarFeatures:
    """States of the keys before and behind the near ones: a weight and a mean value for each feature.

    The keys are those of blocks that end before the near keys of a block of queries, or begin behind them.
    """

    def __init__(
        self, family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, call: AttentionCall
    ) -> None:
        if query.shape[-1] != value.shape[-1] or getattr(family, "alpha", 0) != 0:
            raise ValueError(
                "positive features with relative positions need features of the softmax kernel (alpha = 0) and "
                'constant biases of far keys; take features="landmark" for sinusoidal positions.'
            )
        parameters, to_query, to_key, offset = prepared(family, query, key, value, call)
        groups, number = query.shape[1] // key.shape[1], to_key.shape[-2]
        own = query_bias(query, parameters, key.shape[1], number, call.scale, None).unsqueeze(-1)
        self.own = in_rows(own.flatten(0, 1), blocks)
        self.directions, self.offset = (
            for_each_query(tensor.expand(query.shape[0], *tensor.shape[1:]), groups).flatten(0, 1).unsqueeze(1)
            for tensor in (to_query.to(query.dtype) / call.scale, offset.unsqueeze(2))
        )  # [N, 1, M, d] and [N, 1, 1, M]
        bias = key_bias(family.alpha, key, parameters, call.scale, None, None).unsqueeze(-1)
        answers = key.to(offset.dtype) @ to_key.to(offset.dtype).mT + bias
        answers, value = (for_each_query(tensor, groups).flatten(0, 1) for tensor in (answers, value))
        hidden = in_rows(torch.ones_like(answers[:1, :, :1], dtype=torch.bool), blocks).logical_not()
        logits = in_rows(answers, blocks).masked_fill(hidden, -torch.inf)
        values, self.blocks = in_rows(value, blocks), blocks
        self.before = _states(logits, values)
        self.behind = None if blocks.is_causal else _states(logits.flip(1), values.flip(1))

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        """Yields the features of the keys before, and of those behind."""
        block = torch.arange(self.blocks.number, device=self.own.device)[some]
        places = self.blocks.first(block), self.blocks.number - self.blocks.last(block)
        for states, place, end in zip((self.before, self.behind), places, ends, strict=True):
            if states is not None:
                bias = self.own[:, some] + end.unsqueeze(-1) + self.offset + states[0][:, place].unsqueeze(2)
                yield Columns(self.directions, states[1][:, place], bias)


def _states(logits: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the log weight and the mean value of each feature over the first 0, 1, ... Z blocks.

    Args:
        logits: `[N, Z, R, M]`, -inf for no key.
        value: `[N, Z, R, dv]`.

    Returns:
        `[N, Z + 1, M]`, and `[N, Z + 1, M, dv]`, zeros of nothing.
    """
    own = logits.logsumexp(2)
    means = (logits - own.unsqueeze(2)).exp().mT.to(value.dtype) @ value
    weight, mean = torch.full_like(own[:, 0], -torch.inf), torch.zeros_like(means[:, 0])
    states = [(weight, mean)]
    for weight_here, mean_here in zip(own.unbind(1), means.unbind(1), strict=True):
        total = torch.logaddexp(weight, weight_here)
        share = (weight_here - total).exp().unsqueeze(-1)
        weight, mean = total, mean + share.to(mean.dtype) * (mean_here - mean)
        states.append((weight, mean))
    return torch.stack([weight for weight, _ in states], 1), torch.stack([mean for _, mean in states], 1)
