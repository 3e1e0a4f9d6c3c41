"""The text of a distillation: samples to learn from, of several lengths, and samples that are held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from favor.train.common.batches import mix
from favor.train.mlm import MaskedTexts
from favor.train.text.language import VisitSampler
from favor.train.text.pairs import IGNORED, Pairs
from favor.train.text.samples import around, samples

if TYPE_CHECKING:
    from favor.train.distill import DistillArguments

MASKED = 0.15
# Samples that are not learned from, on which the error is measured.
HELD_OUT_SAMPLES = 8


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
        closed_form: samples that the closed form needs.

    Attributes:
        processor: the tokenizer, to be saved with the model.
        ids: to learn from, `[n, max_length]`.

    Raises:
        ValueError: if the text is too short.
    """

    def __init__(self, arguments: DistillArguments, tokenizer: Any, processes: int, closed_form: int) -> None:
        self.arguments, self.processor, self.processes = arguments, tokenizer, processes
        steps = max(arguments.attention_steps or 0, arguments.model_steps)
        number = max(steps * arguments.per_device_train_batch_size * processes, closed_form, processes)
        held = HELD_OUT_SAMPLES
        ids = samples(str(arguments.train_file), tokenizer, arguments.max_length, number + held, arguments.seed)
        check_number(len(ids), processes, f"{arguments.train_file} (samples of {arguments.max_length} tokens)")
        before, after = around(tokenizer)
        least = len(before) + len(after) + 2
        if min(arguments.lengths or [least]) < least:
            raise ValueError(
                f"lengths must be at least {least}, with the tokens around a text; got {min(arguments.lengths)}"
            )
        self._held, self.ids = ids[:held], ids[held:]
        self.before, self.after = len(before), len(after)
        self.pairs = Pairs(tokenizer, self.before, self.after, arguments.pair_probability)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def held_out(self) -> list[dict[str, Tensor]]:
        """Batches of one sample, on which the error is measured."""
        return self._single(self._held)

    def first(self, number: int) -> list[dict[str, Tensor]]:
        """Gives the first samples to learn from, as batches of one."""
        return self._single(self.ids[:number])

    def _single(self, ids: Tensor) -> list[dict[str, Tensor]]:
        """Gives batches of one sample, with the lengths and pairs of the samples to learn from."""
        lengths = self.arguments.lengths or [self.arguments.max_length]
        made = []
        for place, own in enumerate(ids.split(1)):
            batch = self._cut({"input_ids": own}, lengths[place % len(lengths)])
            made.append(self.pairs(batch, torch.Generator().manual_seed(mix(self.arguments.seed, place))))
        return made

    def loader(self, labels: bool, decoder: bool) -> DataLoader[dict[str, Tensor]]:
        """Makes a loader of the samples in an order of the seed; with labels for the words themselves, or without."""
        seed, size = (
            self.arguments.seed,
            min(self.arguments.per_device_train_batch_size, len(self.ids) // self.processes),
        )
        data: Dataset[dict[str, Tensor]] = Plain(self.ids, labels)
        if labels and not decoder:
            data = MaskedTexts(self.ids, self.processor, MASKED, seed)
        return DataLoader(data, size, sampler=VisitSampler(len(self.ids), seed), drop_last=True)

    def shaped(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Cuts a batch to the length of a step, before the special tokens at the end, and makes pairs of some samples.

        Args:
            batch: tensors `[B, max_length]`.
            step: how many steps are done.
        """
        generator = torch.Generator().manual_seed(mix(self.arguments.seed, step))
        length = self.arguments.max_length
        if drawn := self.arguments.lengths:
            length = drawn[int(torch.randint(len(drawn), (), generator=generator))]
        made = self.pairs(self._cut(batch, length), generator)
        if "labels" in made:  # a sample that has lost all its masked words says its first word
            lost = (made["labels"] == IGNORED).all(1)
            made["labels"][lost, self.before] = made["input_ids"][lost, self.before]
        return made

    def _cut(self, batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """Cuts samples to a length, before the special tokens at the end."""
        kept = length - self.after
        return {n: torch.cat([own[:, :kept], own[:, own.shape[1] - self.after :]], 1) for n, own in batch.items()}


def check_number(number: int, processes: int, source: str) -> None:
    """Raises ValueError if some samples are held out and a process has none left to learn from."""
    if number < HELD_OUT_SAMPLES + processes:
        raise ValueError(
            f"{source}: {number} samples, of which {HELD_OUT_SAMPLES} are held out, are too few for {processes} "
            "processes. Give more data, or shorter samples"
        )
