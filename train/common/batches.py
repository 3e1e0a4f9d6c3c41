"""Orders of samples that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


class EpochSampler(Sampler[int]):
    """A random order that depends on the seed and the epoch alone, so that a resumed run repeats it.

    Args:
        length: number of samples.
        seed: seed of the run.
        tokens: length of each sample, to put samples of about the same length into one batch; transformers'
            `LengthGroupedSampler` does so too, but here the batches come in random order. None is a plain permutation.
        batch_size: samples of a batch; needed with `tokens`.
    """

    def __init__(self, length: int, seed: int, tokens: list[int] | None = None, batch_size: int = 1) -> None:
        self.length, self.seed, self.epoch = length, seed, 0
        self.tokens, self.batch_size = tokens, batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator).tolist()
        if self.tokens is None:
            yield from order
            return
        # Lengths are alike inside a batch, and batches are in random order. A last, smaller batch has any lengths.
        full = self.length // self.batch_size
        kept, rest = order[: full * self.batch_size], order[full * self.batch_size :]
        if kept:
            tokens = [self.tokens[sample] for sample in kept]
            grouped = get_length_grouped_indices(tokens, self.batch_size, generator=generator)
            for batch in torch.randperm(full, generator=generator).tolist():
                yield from (kept[i] for i in grouped[batch * self.batch_size : (batch + 1) * self.batch_size])
        yield from rest


def mix(*numbers: int) -> int:
    """Makes one seed from several non-negative numbers; two lists of numbers almost never give the same seed."""
    result = 0
    for number in numbers:
        result = (result * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return result
