"""The text of a distillation: samples to learn from, short ones first, and samples that are held out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from favor.train.mlm import MaskedTexts
from favor.train.options.distill import DistillArguments
from favor.train.text.language import VisitSampler
from favor.train.text.samples import around, samples

MASKED = 0.15


class Plain(Dataset[dict[str, Tensor]]):
    """Samples `[n, length]` as the model's arguments; with labels for the next words, if `labels` is set."""

    def __init__(self, ids: Tensor, labels: bool) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, visit: int) -> dict[str, Tensor]:
        ids = self.ids[visit % len(self.ids)]
        return {"input_ids": ids, "labels": ids} if self.labels else {"input_ids": ids}


class Texts:
    """Samples of one text.

    Args:
        arguments: of the program.
        tokenizer: that of the model.
        processes: that learn.

    Attributes:
        processor: the tokenizer, to be saved with the model.
        ids: to learn from, `[n, max_length]`.

    Raises:
        ValueError: if the text is too short.
    """

    def __init__(self, arguments: DistillArguments, tokenizer: Any, processes: int) -> None:
        self.arguments, self.processor = arguments, tokenizer
        steps = max(arguments.attention_steps or 0, arguments.model_steps)
        needed = steps * arguments.per_device_train_batch_size * processes
        number = arguments.train_samples or max(needed, arguments.calibration_samples)
        held = arguments.held_out_samples
        ids = samples(str(arguments.train_file), tokenizer, arguments.max_length, number + held, arguments.seed)
        if len(ids) <= held + processes:
            raise ValueError(
                f"{arguments.train_file} has {len(ids)} samples of {arguments.max_length} tokens, of which {held} are "
                "held out: give a longer text, or a smaller max_length or held_out_samples"
            )
        self._held, self.ids = ids[:held], ids[held:]
        self.after = len(around(tokenizer)[1])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def held_out(self) -> list[dict[str, Tensor]]:
        """Batches of one sample, on which the error is measured."""
        return [{"input_ids": own} for own in self._held.split(1)]

    def first(self, number: int) -> list[dict[str, Tensor]]:
        """Gives the first samples to learn from, as batches of one."""
        return [{"input_ids": own} for own in self.ids[:number].split(1)]

    def loader(self, labels: bool, decoder: bool) -> DataLoader[dict[str, Tensor]]:
        """Makes a loader of the samples in an order of the seed; with labels for the words themselves, or without."""
        seed, size = self.arguments.seed, min(self.arguments.per_device_train_batch_size, len(self.ids))
        data: Dataset[dict[str, Tensor]] = Plain(self.ids, labels)
        if labels and not decoder:
            data = MaskedTexts(self.ids, self.processor, MASKED, seed)
        return DataLoader(data, size, sampler=VisitSampler(len(self.ids), seed), drop_last=True)

    def shortened(self, batch: dict[str, Tensor], done: float) -> dict[str, Tensor]:
        """Cuts a batch to the length of its time, before the special tokens at the end.

        Args:
            batch: tensors `[B, max_length]`.
            done: the part of the steps that is done, in [0, 1).
        """
        lengths = growing_lengths(self.arguments.start_length, self.arguments.max_length)
        length = lengths[int(done * len(lengths))]
        if length == self.arguments.max_length:
            return batch
        kept = max(length - self.after, 0)
        return {name: torch.cat([own[:, :kept], own[:, own.shape[1] - self.after :]], 1) for name, own in batch.items()}


def growing_lengths(start: int | None, longest: int) -> list[int]:
    """Gives the lengths that samples take one after another: doubled from `start`, and at last `longest`."""
    lengths = []
    while start is not None and start < longest:
        lengths.append(start)
        start *= 2
    return [*lengths, longest]
