"""Batches of GLUE's samples: token numbers, padded to the longest sample of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from favor.train.common.arguments import DataArguments, TrainArguments
from favor.train.common.batches import EpochSampler
from favor.train.text.glue_data import GlueData, Task
from favor_command.saved import check_known

CHECKED = 1000  # samples of a split, about, whose tokens must be known


def tokenized(
    dataset: Dataset, task: Task, tokenizer: Any, arguments: DataArguments, rows: Sequence[int] | None = None
) -> Dataset:
    """Turns sentences into token numbers, without padding.

    Args:
        dataset: one split.
        task: names the columns with sentences.
        tokenizer: that of the model.
        arguments: greatest length.
        rows: the output of the model for each label, which then replaces the label. Default None: labels stay.
    """

    def encode(batch: dict[str, list]) -> dict[str, list]:
        texts = [batch[column] for column in task.sentences]
        encoded = tokenizer(*texts, truncation=True, max_length=arguments.max_length)
        if rows is None or task.is_regression:
            return encoded
        return encoded | {"label": [rows[label] for label in batch["label"]]}

    words = [name for name in dataset.column_names if name != "label"]
    return dataset.map(encode, batched=True, remove_columns=words)


def check_samples(splits: Iterable[Dataset], task: Task, tokenizer: Any) -> None:
    """Raises ValueError if more than a third of the tokens of all splits are unknown; rows are taken evenly spaced.

    Args:
        splits: token numbers.
        task: names the data set in the message.
        tokenizer: that made them.
    """
    rows = (split[:: len(split) // CHECKED or 1]["input_ids"] for split in splits)
    check_known(chain.from_iterable(rows), tokenizer, f"the samples of {task.folder}")


def cut_off(samples: Dataset, max_length: int) -> str:
    """Says how many documents have the greatest length, so that longer ones lost their end; empty if none has.

    Args:
        samples: token numbers.
        max_length: greatest length.
    """
    number = sum(len(ids) == max_length for ids in samples["input_ids"])
    if not number:
        return ""
    return (
        f"{number} of {len(samples)} documents to train reach --max_length and are cut off there, which may remove the "
        f"sentence that counts; --max_length above {max_length} keeps more of them"
    )


def make_loaders(
    data: GlueData,
    tokenizer: Any,
    arguments: DataArguments,
    train: TrainArguments,
    seed: int,
    multiple: int | None,
    rows: Sequence[int],
) -> tuple[DataLoader, dict[str, DataLoader]]:
    """Makes loaders of the training set, shuffled by seed and epoch, and of each development set, in order.

    Args:
        data: the splits.
        tokenizer: that of the model.
        arguments: greatest length.
        train: sizes of batches.
        seed: of the order.
        multiple: batches are padded to their longest sample, rounded up to a multiple of this. None: not rounded.
        rows: the output of the model for each label. Labels to train are outputs, those of development sets stay.

    Raises:
        ValueError: if the tokenizer does not know the samples to train.
    """
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    samples = tokenized(data.train, data.task, tokenizer, arguments, rows)
    check_samples([samples], data.task, tokenizer)
    size = train.per_device_train_batch_size
    tokens = [len(ids) for ids in samples["input_ids"]] if train.group_by_length else None
    train_loader = DataLoader(samples, size, sampler=EpochSampler(len(samples), seed, tokens, size), collate_fn=collate)
    eval_loaders = {
        split: DataLoader(
            tokenized(part, data.task, tokenizer, arguments), train.per_device_eval_batch_size, collate_fn=collate
        )
        for split, part in data.evaluation.items()
    }
    return train_loader, eval_loaders
