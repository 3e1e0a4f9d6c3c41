"""Models for a GLUE task: the one that is trained and its teacher, with labels ordered by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import set_seed
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from favor.train.common.arguments import ModelArguments
from favor.train.common.pretrained import load_switched
from favor.train.common.teacher import Teacher
from favor.train.text.glue_data import Task
from favor.train.text.glue_labels import is_classifier, label_rows, names_of, rows_set, set_labels
from favor_command import saved

if TYPE_CHECKING:
    from favor.train.glue import TeacherArguments

RENAME = "if they mean the same, write the names of the task into id2label of its config.json"
NEW_HEAD = f"{RENAME}; --ignore_mismatched_sizes trains a new head"


def load_model(arguments: ModelArguments, task: Task, seed: int, say: Callable[[str], Any] = print) -> PreTrainedModel:
    """Loads the pretrained model with a head for the task, as `favor.train.common.pretrained.load_switched` does.

    A head that the checkpoint holds keeps the meaning of its outputs: labels are ordered by their names.

    Args:
        arguments: model, backend and its options.
        task: the task.
        seed: draws weights that the checkpoint lacks, and the random features.
        say: takes a remark on labels whose order or names are not those of the data.

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
        set_labels(config, task, rows)

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
    arguments: TeacherArguments,
    given: ModelArguments,
    student: PreTrainedModel,
    task: Task,
    say: Callable[[str], Any],
) -> Teacher:
    """Loads the teacher, with exact attention, as carefully as the student; its labels are ordered as the student's.

    Args:
        arguments: names the teacher.
        given: of the student.
        student: the model that learns.
        task: the task.
        say: takes a remark on labels whose order or names are not those of the data.

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
