"""Samples of data sets that are too large to be read at once: their texts are read, tokenised and cut as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor, stack, tensor
from torch.utils.data import Dataset

from favor.train.text.samples import around
from favor_command.saved import check_known

TRAIN, VALIDATION = "train", "validation"
BATCH = 100  # texts that are tokenised at once


def open_split(name: str, split: str) -> IterableDataset:
    """Opens a split of a data set of the hub, NAME or NAME:CONFIGURATION, or of a local folder, as a stream of texts.

    Raises ValueError if the data set or its split cannot be read, or has no column text.
    """
    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        dataset = load_dataset(path, config or None, split=split, streaming=True)
        row: dict[str, Any] = next(iter(dataset), {})
    except (OSError, ValueError, RuntimeError, StopIteration) as error:  # the last one for an empty file
        other = "; or give --validation_file" if split == VALIDATION else ""
        raise ValueError(
            f"dataset_name must be a data set of the hub, or a folder, with the split {split}, got {name}: "
            f"{str(error) or 'an empty file'}{other}"
        ) from error
    if not isinstance(row.get("text", 0), str | None):
        kinds = ", ".join(f"{column} ({type(value).__name__})" for column, value in row.items())
        raise ValueError(f"{name}, {split}, must have texts in the column text, got {kinds or 'no rows'}")
    return dataset.select_columns("text")


def cut(
    dataset: IterableDataset, tokenizer: Any, length: int, name: str, rounds: Iterable[int] = (0,)
) -> Iterator[Tensor]:
    """Joins texts, a line each, and cuts them into samples of `length` tokens, with special tokens around each.

    The data set is read once per number in `rounds`, which is the epoch that its order depends on. What is left of one
    round begins the next one. Raises ValueError if a round is shorter than one sample, or the tokenizer does not know
    the first texts.
    """
    before, after = around(tokenizer)
    held: list[int] = []
    width = length - len(before) - len(after)
    if width < 1:
        raise ValueError(f"max_length must be more than {length - width} special tokens, got {length}")
    for epoch in rounds:
        dataset.set_epoch(epoch)
        read = 0
        for batch in dataset.iter(BATCH):
            texts = [f"{text or ''}\n" for text in batch["text"]]
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            if epoch == read == 0:
                check_known(ids, tokenizer, name)
            held += chain.from_iterable(ids)
            read += sum(map(len, ids))
            whole = len(held) // width * width
            for place in range(0, whole, width):
                yield tensor(before + held[place : place + width] + after)
            del held[:whole]
        if read < width:
            raise ValueError(
                f"{name} has {read} tokens for a process, too few for one sample of {length}: take a larger data set"
            )


def first_samples(name: str, tokenizer: Any, length: int, number: int | None) -> Tensor:
    """Gives the first samples of the split validation `[n, length]`, at most `number` of them."""
    return stack([*islice(cut(open_split(name, VALIDATION), tokenizer, length, name), number)])


class Stream(Dataset[Tensor]):
    """The first `number` samples of the split train, shuffled; it begins again, in another order, when it ends.

    Batches of `batch` samples come from `shares` of the texts by turns. So a process that asks for every `shares`-th
    batch reads and tokenises its own share alone, and all of them together take each text once.

    An item is the same sample in every process, and however often it is read. It is found by reading all samples before
    it in its share: ask for items in rising order. Raises ValueError as `open_split` and `cut` do.
    """

    def __init__(
        self, name: str, tokenizer: Any, length: int, number: int, seed: int, batch: int, shares: int = 1
    ) -> None:
        self.dataset = open_split(name, TRAIN).shuffle(seed=seed)
        self.name, self.tokenizer, self.length, self.number = name, tokenizer, length, number
        self.batch, self.shares = batch, shares
        self.passed: dict[int, tuple[Iterator[Tensor], int]] = {}  # samples of a share, and how many were read

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        batches, place = divmod(index, self.batch)
        turn, share = divmod(batches, self.shares)
        place += turn * self.batch
        samples, passed = self.passed.get(share, (iter(()), self.number))
        if place < passed:
            texts = split_dataset_by_node(self.dataset, share, self.shares)
            samples, passed = cut(texts, self.tokenizer, self.length, self.name, count()), 0
        self.passed[share] = samples, place + 1
        return next(islice(samples, place - passed, None))
