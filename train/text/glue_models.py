"""From a task of GLUE to models and batches: which output of a head is which label, the teacher, token numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedModel

from favor.train.common.arguments import DataArguments, ModelArguments, TrainArguments
from favor.train.common.loop import EpochSampler
from favor.train.common.pretrained import load_switched
from favor.train.common.teacher import Teacher
from favor.train.text.glue_data import GlueData, Task
from favor_command import saved

if TYPE_CHECKING:
    from favor.train.glue import TeacherArguments

RENAME = "if they mean the same, write the names of the task into id2label of its config.json"
NEW_HEAD = f"{RENAME}; --ignore_mismatched_sizes trains a new head"
CHECKED = 1000  # samples of a split, about, whose tokens must be known
HEAD = "ForSequenceClassification"
# Usual words for one label. A word of negation before them makes the opposite label.
WORDS = {
    "entailment": ("entail", "entails", "entailed"),
    "contradiction": ("contradict", "contradicts", "contradictory"),
    "neutral": (),
    "equivalent": ("equivalence", "paraphrase", "duplicate"),
    "acceptable": ("grammatical",),
    "positive": ("pos",),
    "negative": ("neg",),
}
NEGATIONS = ("not", "non", "no", "un")
_LABELS = {word: label for label, words in WORDS.items() for word in (label, *words)}
_NUMBER = re.compile(r"(?:label|class)?_?(\d+)")


def meaning(name: Any) -> str | None:
    """Gives the label that a name means, such as "not entailment" for "NON-ENTAILMENT"; None for an unknown name."""
    word = _plain(name)
    if word in _LABELS:
        return _LABELS[word]
    for negation in NEGATIONS:
        rest = word.removeprefix(negation).strip("_")
        if rest != word and rest in _LABELS:
            return f"not {_LABELS[rest]}"
    return None


def names_of(config: Any) -> list[str]:
    """Gives the names of a model's labels, in the order of its outputs."""
    return [str(name) for _, name in sorted((config.id2label or {}).items())]


def is_classifier(config: Any) -> bool:
    """Tells whether a checkpoint holds a head for classification: its class says so, or without one names of labels."""
    if config.architectures:
        return str(config.architectures[0]).endswith(HEAD)
    return not _by_number(names_of(config))


def label_rows(names: Sequence[str], task: Task, owner: str, way_out: str) -> tuple[list[int], str]:
    """Finds the outputs of a trained head that are the labels of a task, in the order of the task.

    Names are compared without case and hyphens, and usual synonyms are the same. Names that are numbers, such as
    LABEL_1, are the numbers of the task. A score (STS-B) needs one output, whatever its name.

    Returns:
        The numbers of the outputs, and a remark; the remark is empty if names and order are those of the task.

    Raises:
        ValueError: if the labels are not those of the task; the message names the `owner` and ends with the `way_out`.
    """
    wanted = task.labels or ("score",)
    order = list(range(len(wanted)))
    if task.is_regression and len(names) == 1:
        return order, ""
    own, goal = [meaning(name) for name in names], [meaning(label) for label in wanted]
    if len(own) == len(goal) and set(own) == set(goal):
        rows = [own.index(label) for label in goal]
        said = ", ".join(f"{label} is its output {row}" for label, row in zip(wanted, rows, strict=True))
        return rows, "" if rows == order else f"{owner} has the labels in another order than the data: {said}"
    numbers = _by_number(names)
    if len(numbers) == len(wanted):
        return [numbers.index(place) for place in order], (
            f"{owner} has numbers for labels, {', '.join(names)}: they are taken as those of {task.folder}, "
            f"{', '.join(f'{place} {label}' for place, label in enumerate(wanted))}"
        )
    raise ValueError(
        f"{owner} has {', '.join(names[:5])}{', ...' * (len(names) > 5)} for labels, and {task.folder} has "
        f"{', '.join(wanted)}: {way_out}"
    )


def _set_labels(config: Any, task: Task, rows: Sequence[int]) -> None:
    """Writes the names of a task's labels into a config, each at its output of the head."""
    labels = dict(sorted(zip(rows, task.labels or ("score",), strict=True)))
    config.id2label = labels
    config.label2id = {label: row for row, label in labels.items()}
    config.problem_type = "regression" if task.is_regression else "single_label_classification"


def rows_set(config: Any, task: Task) -> list[int]:
    """Gives the outputs of a task's labels, in their order, that `set_labels` wrote."""
    return [config.label2id[label] for label in task.labels or ("score",)]


def _plain(name: Any) -> str:
    return re.sub(r"[\W_]+", "_", str(name).casefold()).strip("_")


def _by_number(names: Sequence[str]) -> list[int]:
    """Gives the numbers that names are, if they are all numbers from 0 on; else an empty list."""
    found = [_NUMBER.fullmatch(_plain(name)) for name in names]
    numbers = [int(match[1]) for match in found if match]
    return numbers if sorted(numbers) == list(range(len(names))) else []


def load_model(arguments: ModelArguments, task: Task, seed: int, say: Callable[[str], Any] = print) -> PreTrainedModel:
    """Loads the pretrained model with a head for the task, as `favor.train.common.pretrained.load_switched` does.

    A head that the checkpoint holds keeps the meaning of its outputs: labels are ordered by their names. `say` takes a
    remark on labels whose order or names are not those of the data.

    Raises:
        ValueError: if the head of the checkpoint has other labels, and `ignore_mismatched_sizes` is not set.
    """
    path, other = arguments.model_name_or_path, False

    def adapt(config: Any) -> None:
        nonlocal other
        rows, names = list(range(task.num_labels)), names_of(config)
        if is_classifier(config):
            try:
                rows, remark = label_rows(names, task, path, NEW_HEAD)
            except ValueError as error:
                if not arguments.ignore_mismatched_sizes:
                    raise
                other = len(names) == task.num_labels
                remark = f"{str(error).removesuffix(f': {NEW_HEAD}')}: a new head is trained"
            if remark:
                say(remark)
        _set_labels(config, task, rows)

    model = load_switched(arguments, AutoModelForSequenceClassification, seed, adapt)
    if other:  # transformers makes a new head only for another number of labels
        set_seed(seed)
        body = f"{model.base_model_prefix}."
        head = {n: own for n, own in type(model)(model.config).state_dict().items() if not n.startswith(body)}
        if len(head) == len(model.state_dict()):
            raise ValueError(f"cannot tell the head of a {type(model).__name__} from its other layers: {RENAME}")
        model.load_state_dict(head, strict=False)
    return model


def load_teacher(
    arguments: TeacherArguments, given: ModelArguments, student: PreTrainedModel, task: Task, say: Callable[[str], Any]
) -> Teacher:
    """Loads the teacher, with exact attention, as carefully as the student; its labels are ordered as the student's.

    `say` takes a remark on labels whose order or names are not those of the data.

    Raises:
        ValueError: if it was not fine-tuned on a task with the same labels, or has another vocabulary.
    """
    path = str(arguments.teacher)
    remote = {"trust_remote_code": given.trust_remote_code}
    config = saved.read_config(path, **remote)
    if not is_classifier(config):
        raise ValueError(
            f"expected a teacher that was fine-tuned on {task.folder}; {path} holds a "
            f"{(config.architectures or ['model'])[0]}"
        )
    rows, remark = label_rows(names_of(config), task, path, f"give a teacher that was fine-tuned on {task.folder}")
    if remark:
        say(remark)
    # Which output of the teacher has the label of each output of the student.
    columns = [rows[rows_set(student.config, task).index(output)] for output in range(len(rows))]
    if config.vocab_size != student.config.vocab_size:
        raise ValueError(
            f"teacher and student read the same tokens: the vocabulary of {path} has {config.vocab_size} and that of "
            f"{given.model_name_or_path} has {student.config.vocab_size}"
        )
    safe = None if given.trust_remote_code else True
    exact = {"attn_implementation": "sdpa", "dtype": torch.float32, "use_safetensors": safe}
    model = saved.load_model(AutoModelForSequenceClassification, path, **exact, **remote)
    weights = {"hidden_weight": arguments.hidden_weight, "logits_weight": arguments.logits_weight}
    return Teacher(model.eval(), **weights, task_weight=1.0, is_regression=task.is_regression, columns=columns)


def tokenized(
    dataset: Dataset, task: Task, tokenizer: Any, arguments: DataArguments, rows: Sequence[int] | None = None
) -> Dataset:
    """Turns sentences into token numbers, without padding, and labels into `rows`, the outputs for them, if given."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        texts = [batch[column] for column in task.sentences]
        encoded = tokenizer(*texts, truncation=True, max_length=arguments.max_length)
        if rows is None or task.is_regression:
            return encoded
        return encoded | {"label": [rows[label] for label in batch["label"]]}

    words = [name for name in dataset.column_names if name != "label"]
    return dataset.map(encode, batched=True, remove_columns=words)


def check_samples(splits: Iterable[Dataset], task: Task, tokenizer: Any) -> None:
    """Raises ValueError if more than a third of the tokens of all splits are unknown; rows are taken evenly spaced."""
    rows = (split[:: len(split) // CHECKED or 1]["input_ids"] for split in splits)
    saved.check_known(chain.from_iterable(rows), tokenizer, f"the samples of {task.folder}")


def cut_off(samples: Dataset, max_length: int) -> str:
    """Says how many documents have the greatest length, so that longer ones lost their end; empty if none has."""
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

    Batches are padded to their longest sample, rounded up to a multiple of `multiple`, if given. Labels to train are
    `rows`, the model's output for each label; those of development sets stay. Raises ValueError if the tokenizer does
    not know the samples to train.
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
