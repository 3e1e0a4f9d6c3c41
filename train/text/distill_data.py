"""The text of a distillation: samples to learn from, of several lengths, and samples that are held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from favor.train.common.loop import VisitSampler, mix
from favor.train.mlm import MaskedTexts
from favor.train.text.samples import Plain, around, samples

if TYPE_CHECKING:
    from favor.train.distill import DistillArguments

IGNORED = -100  # the label of a token that is not predicted
HELD_OUT_SAMPLES = 8  # samples that are not learned from, on which the error is measured


class Texts:
    """Samples of one text; raises ValueError if it is too short.

    Attributes:
        processor: the tokenizer, to be saved with the model.
        ids: to learn from, `[n, max_length]`.
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
        seed = self.arguments.seed
        size = min(self.arguments.per_device_train_batch_size, len(self.ids) // self.processes)
        masked = labels and not decoder
        data = MaskedTexts(self.ids, self.processor, seed) if masked else Plain(self.ids, labels)
        return DataLoader(data, size, sampler=VisitSampler(len(self.ids), seed), drop_last=True)

    def shaped(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Cuts a batch `[B, max_length]` to the length of a step, before the special tokens at the end.

        Some of its samples become pairs.
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


class Pairs:
    """Makes two texts of some samples: the second begins inside the first or right after it, and shares words with it.

    Words that stand in both texts are what a model compares, and what heads that look at equal words look at. `before`
    and `after` are the numbers of special tokens around one text. Raises ValueError if the tokenizer sets no special
    tokens between two texts.
    """

    def __init__(self, tokenizer: Any, before: int, after: int, probability: float) -> None:
        self.before, self.after, self.probability = before, after, probability
        if not probability:
            return
        word = tokenizer("a", add_special_tokens=False)["input_ids"][0]
        joined = {name: torch.tensor(own) for name, own in tokenizer("a", "a").items()}
        template = joined["input_ids"]
        # What stands around the two texts, and one token in the place of each.
        self.templates = {"input_ids": template, "labels": torch.full_like(template, IGNORED)}
        self.types = joined.get("token_type_ids")
        places = (template == word).nonzero()[:, 0].tolist()
        if len(places) != 2 or places[1] == places[0] + 1:
            raise ValueError(
                f"pair_probability needs a tokenizer that sets special tokens between two texts, which "
                f"{type(tokenizer).__name__} does not: leave it out"
            )
        self.places = places

    def __call__(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Gives a batch `[B, n]` of which some samples are pairs of the same number of tokens.

        The generator draws which, and where their texts begin and end. Arguments other than `input_ids` and `labels`
        are kept.
        """
        if not self.probability:
            return batch
        made = {name: own.clone() for name, own in batch.items()}
        if self.types is not None:
            made["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        length = batch["input_ids"].shape[1]
        words = length - len(self.templates["input_ids"]) + 2  # of both texts
        for row in range(len(batch["input_ids"])):
            if words < 4 or torch.rand((), generator=generator) >= self.probability:
                continue
            first = int(torch.randint(words // 4, words - words // 4 + 1, (), generator=generator))
            start = int(torch.randint(first + 1, (), generator=generator))
            for name in self.templates.keys() & batch.keys():
                text = batch[name][row, self.before : length - self.after]
                made[name][row] = self._join(text[:first], text[start : start + words - first], self.templates[name])
            if self.types is not None:
                kinds = (self.types[self.places[0]].expand(first), self.types[self.places[1]].expand(words - first))
                made["token_type_ids"][row] = self._join(*kinds, self.types)
        return made

    def _join(self, first: Tensor, second: Tensor, special: Tensor) -> Tensor:
        """Puts the two texts in the places of the words of the template."""
        a, b = self.places
        special = special.to(first)
        return torch.cat([special[:a], first, special[a + 1 : b], second, special[b + 1 :]])
