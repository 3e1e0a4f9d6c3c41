r"""Fine-tune a pretrained model on a GLUE task, with exact or FAVOR attention.

    accelerate launch -m favor.train.glue --model_name_or_path bert-base-uncased --task_name mrpc \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/mrpc

Without `--data_dir` the task comes from the hub (`nyu-mll/glue`). The output folder gets the model of the last
step, its tokenizer, `all_results.json` and a model card. With `--seeds` each seed has a folder of its own, and the
output folder gets mean and standard deviation. `accelerate launch` decides whether the program runs on a CPU, one GPU
or several.

With `--teacher` the model also learns from one that was fine-tuned on the task with exact attention: from its hidden
states and its predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from favor.train.common.arguments import (
    FREE,
    ArgumentGroups,
    DataArguments,
    HeadArguments,
    ModelArguments,
    TrainArguments,
    option,
)


@dataclass
class TeacherArguments:
    """An exact model to learn from."""

    teacher: str | None = option(None, "Folder or hub name of a model that was fine-tuned with exact attention.")
    task_weight: float = option(1.0, "Weight of the loss of the task, with a teacher.")
    logits_weight: float = option(1.0, "Weight of the divergence from the teacher's predictions.")
    hidden_weight: float = option(1.0, "Weight of the relative squared error of the hidden states of all layers.")
    temperature: float = option(1.0, "Temperature of both predictions where they are compared.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        weights = {name: getattr(self, name) for name in ("task_weight", "logits_weight", "hidden_weight")}
        for name, weight in weights.items():
            if weight < 0:
                raise ValueError(f"{name} must not be negative, got {weight}")
        if not any(weights.values()):
            raise ValueError("task_weight, logits_weight and hidden_weight are all 0, so there is nothing to learn")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {self.temperature}")
        changed = [name for name in (*weights, "temperature") if getattr(self, name) != 1]
        if self.teacher is None and changed:
            raise ValueError(f"{', '.join(changed)} needs a teacher: add --teacher DIR")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a fine-tuning; `settings` leaves out the seeds."""

    free: ClassVar[tuple[str, ...]] = (*FREE, "seed", "seeds")

    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    head: HeadArguments
    teacher: TeacherArguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-glue")
