"""Labels of a classifier and labels of a task: names say which output of a model is which label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from favor.train.text.glue_data import Task

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

    Args:
        names: of the model's labels, in the order of its outputs.
        task: the task.
        owner: the model, for messages.
        way_out: what to do about other labels, the end of the message.

    Returns:
        The numbers of the outputs, and a remark; the remark is empty if names and order are those of the task.

    Raises:
        ValueError: if the labels are not those of the task.
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


def set_labels(config: Any, task: Task, rows: Sequence[int]) -> None:
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
