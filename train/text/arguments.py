"""Command-line arguments of the programs that train language models."""

from __future__ import annotations

from dataclasses import dataclass, field

from favor.train.common.arguments import (
    SOFTMAX_BOUND,
    ArgumentGroups,
    BatchedRunArguments,
    HeadArguments,
    ModelArguments,
    check_positive,
    option,
)


@dataclass(kw_only=True)
class TextArguments:
    """The text, and the output layer."""

    train_file: str = field(metadata={"help": "Text to learn from: UTF-8, plain, .gz or .xz."})
    validation_file: str | None = option(
        None, "Text to evaluate on. Default: 5 % of the samples of train_file, which are not trained on."
    )
    max_length: int = option(128, "Tokens of a sample.")
    max_train_samples: int | None = option(
        None,
        "Take this number of samples, evenly spaced over the text; without validation_file, 5 % of them to evaluate "
        "on.",
    )
    max_eval_samples: int | None = option(500, "Evaluate on at most this number of samples.")
    untie_head: bool = option(
        False, f"Give the output layer weights of its own; needed for {SOFTMAX_BOUND} and head_learning_rate."
    )

    def __post_init__(self) -> None:
        """Checks the numbers; raises ValueError."""
        check_positive(self, "max_length", "max_train_samples", "max_eval_samples")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    text: TextArguments
    train: BatchedRunArguments
    head: HeadArguments
