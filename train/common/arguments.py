"""Command-line arguments of `train/glue.py` and those that programs share. They are checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from transformers import AttentionInterface, SchedulerType

import favor
from favor.train.common.program import DataclassParser, did_you_mean

ADAMW, SOFTMAX_BOUND = "adamw", "softmax_bound"
DEFAULT_SEED = 42
# How help shows the option lr_scheduler_type.
SCHEDULE = {
    "help": "Schedule of the learning rate: linear, cosine, constant, or another of transformers.SchedulerType.",
    "metavar": "NAME",
}
# Arguments that do not change the result of a run.
PRECISIONS = (None, "no", "fp16", "bf16")
FREE = ("output_dir", "checkpointing_steps", "resume", "overwrite_output_dir", "report_to")


def option(default: Any, text: str) -> Any:
    """Makes a dataclass field with a help text; a percent sign in the text needs no escape."""
    return field(default=default, metadata={"help": text.replace("%", "%%")})


def check_positive(arguments: Any, *names: str) -> None:
    """Raises ValueError if one of the named values is given and is not above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")


def check_backend(name: str | None) -> None:
    """Raises ValueError for an attention backend that transformers does not know; a name with / is one of the hub."""
    known = [*favor.BACKENDS, "sdpa", "eager"]
    if name is not None and "/" not in name and name not in (*known, *AttentionInterface().valid_keys()):
        raise ValueError(
            f"attn_implementation must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )


def check_choice(arguments: Any, name: str, allowed: Collection[str | None]) -> None:
    """Raises ValueError if a field is none of the allowed values; None stands for an option that is not given."""
    value, names = getattr(arguments, name), [choice for choice in allowed if choice is not None]
    if value not in allowed:
        near = did_you_mean(str(value), names)
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}{near}")


def check_schedule(name: str) -> None:
    """Raises ValueError for a learning rate schedule that transformers does not know."""
    known = [kind.value for kind in SchedulerType]
    if name not in known:
        raise ValueError(
            f"lr_scheduler_type must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}"
        )


@dataclass(kw_only=True)
class BackendArguments:
    """The attention backend and its options."""

    attn_implementation: str | None = option(
        None,
        "landmark, favor+, favor++, favor#, another of favor.BACKENDS, sdpa or eager. Default: that of the checkpoint, "
        "else the model's own.",
    )
    num_features: int | None = option(
        None, "Random features, or means of landmarks in encoders, per head. Default: the checkpoint's, else 256."
    )
    features: str | None = option(
        None, "Features of favor#: wderf (default), cderf, sderf, saderf, aderf, or landmark."
    )
    window: int | None = option(
        None, "Tokens of a block in which attention is exact. Default 0: none. Not for landmark."
    )
    exact_below: str | None = option(
        None, "Exact attention for fewer tokens than this: a number, 0 for never, auto (default) by speed."
    )
    selected_keys: int | None = option(
        None, "Keys that each block of queries reads exactly, for landmark. Default: 768, in causal layers 1,024."
    )

    def __post_init__(self) -> None:
        """Checks the backend and its options; raises ValueError."""
        check_backend(self.attn_implementation)
        if self.exact_below not in (None, "auto") and not self.exact_below.isdecimal():
            raise ValueError(f"exact_below must be a number of tokens or auto, got {self.exact_below!r}")
        favor.FavorConfig.from_dict(self.favor_options())
        if self.features is not None and self.attn_implementation not in (None, "favor#", "favor_sharp"):
            raise ValueError(f"features is an option of favor#, not of {self.attn_implementation}")

    def favor_options(self) -> dict[str, Any]:
        """Gives the options of the FAVOR backends that the user set."""
        names = ("num_features", "features", "window", "selected_keys")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.exact_below is not None:
            options["exact_below"] = "auto" if self.exact_below == "auto" else int(self.exact_below)
        return options

    def without_effect(self) -> str | None:
        """Gives a remark on options that exact attention does not use; None if there are none."""
        if self.attn_implementation not in ("sdpa", "eager") or not self.favor_options():
            return None
        return f"{self.attn_implementation} is exact attention: it does not use {', '.join(self.favor_options())}"


@dataclass(kw_only=True)
class ModelArguments(BackendArguments):
    """The model and its attention."""

    model_name_or_path: str = field(metadata={"help": "Hub name or folder of a pretrained model."})
    ignore_mismatched_sizes: bool = option(False, "Replace a head for other labels by a new head.")
    trust_remote_code: bool = option(
        False, "Allow code from the checkpoint to run, also that of pickle files: weights that are not in safetensors."
    )
    dropout: float | None = option(None, "Every dropout probability of the model. Default: those of the checkpoint.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        super().__post_init__()
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {self.dropout}")


@dataclass
class DataArguments:
    """The task and its samples."""

    task_name: str = field(metadata={"help": "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli."})
    data_dir: str | None = option(
        None, "Folder of GLUE, or of the task, with TSV files. Default: nyu-mll/glue on the hub."
    )
    max_length: int = option(128, "Greatest number of tokens of a sample; the rest is cut off.")
    max_train_samples: int | None = option(None, "Train on this number of samples only, the first ones.")
    max_eval_samples: int | None = option(None, "Evaluate on this number of samples only, the first ones.")
    distractors: int = option(
        0,
        "Texts of other samples around the one that holds the answer, for QNLI, MNLI and RTE: long documents, which "
        "need a larger max_length.",
    )

    def __post_init__(self) -> None:
        """Checks the numbers; raises ValueError."""
        check_positive(self, "max_length", "max_train_samples", "max_eval_samples")
        if self.distractors < 0:
            raise ValueError(f"distractors must not be negative, got {self.distractors}")


@dataclass(kw_only=True)
class RunArguments:
    """The optimization and its output folder."""

    output_dir: str = field(metadata={"help": "Folder of all results."})
    learning_rate: float = option(5e-5, "Peak learning rate.")
    weight_decay: float = option(0.01, "Weight decay of matrices; biases and normalisations are not decayed.")
    num_train_epochs: float = option(3.0, "Epochs.")
    max_train_steps: int | None = option(None, "Optimizer steps; replaces num_train_epochs.")
    gradient_accumulation_steps: int = option(1, "Forward and backward passes per optimizer step.")
    lr_scheduler_type: str = field(default="linear", metadata=SCHEDULE)
    warmup_ratio: float = option(0.0, "Warm-up as a fraction of all steps.")
    max_grad_norm: float = option(
        1.0, f"Gradients are clipped to this norm, except those of a head with {SOFTMAX_BOUND}; 0: no clipping."
    )
    mixed_precision: str | None = option(None, "no, fp16 or bf16. Default: that of accelerate launch, else no.")
    seed: int | None = option(None, "Seed of new weights, order of samples, dropout and random features. Default 42.")
    checkpointing_steps: int | None = option(None, "Optimizer steps between checkpoints. Default: no checkpoints.")
    resume: bool = option(False, "Continue from the last checkpoint; a finished seed is not trained again.")
    overwrite_output_dir: bool = option(
        False, "Start again in a folder that holds a run; its checkpoints and results are deleted."
    )
    report_to: str = option("none", "tensorboard or none.")

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        check_positive(
            self,
            "gradient_accumulation_steps",
            "max_train_steps",
            "checkpointing_steps",
            "num_train_epochs",
            "learning_rate",
        )
        check_choice(self, "report_to", ("tensorboard", "none"))
        check_choice(self, "mixed_precision", PRECISIONS)
        check_schedule(self.lr_scheduler_type)


@dataclass(kw_only=True)
class BatchedRunArguments(RunArguments):
    """Sizes of batches."""

    per_device_train_batch_size: int = option(32, "Samples per process and forward pass.")
    per_device_eval_batch_size: int = option(64, "Samples per process and forward pass in evaluation.")

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        super().__post_init__()
        check_positive(self, "per_device_train_batch_size", "per_device_eval_batch_size")


@dataclass(kw_only=True)
class TrainArguments(BatchedRunArguments):
    """One seed or several, and the order of the samples."""

    seed: list[int] = field(  # type: ignore[assignment]
        default_factory=lambda: [DEFAULT_SEED],
        metadata={
            "help": "Seed of new weights, order of samples, dropout and random features. With several there is one "
            "training per seed, then mean and standard deviation."
        },
    )
    group_by_length: bool = option(
        False, "Put samples of about the same length into one batch: less padding, but another order."
    )

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        super().__post_init__()
        if len(set(self.seed)) != len(self.seed):
            raise ValueError(f"the numbers of seed must be different, got {self.seed}")


@dataclass
class HeadArguments:
    """The optimizer of the output layer."""

    head_optimizer: str = option(
        ADAMW,
        f"Optimizer of the output layer: {ADAMW}, or {SOFTMAX_BOUND} (favor.optim.SoftmaxBound, no weight decay).",
    )
    head_learning_rate: float | None = option(
        None, f"Peak learning rate of the output layer. Default: 1 for {SOFTMAX_BOUND}, else that of the other layers."
    )

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        check_positive(self, "head_learning_rate")
        check_choice(self, "head_optimizer", (ADAMW, SOFTMAX_BOUND))


Groups = TypeVar("Groups", bound="ArgumentGroups")


class ArgumentGroups:
    """Base of a dataclass whose fields are dataclasses of arguments: one command line, one dictionary."""

    free: ClassVar[tuple[str, ...]] = FREE

    @classmethod
    def parse(
        cls: type[Groups], argv: list[str] | None, description: str | None = None, program: str = "favor"
    ) -> Groups:
        """Reads a command line; an unknown option ends the process, as `Parser.refuse` says.

        Args:
            argv: the words without the program's name. None reads those of this process.
            description: text of the program's help.
            program: the program's name.

        Raises:
            ValueError: for a value that cannot be used; the message says which, and what was expected.
        """
        return cls(*cls.parser(description, program).parse(argv))

    @classmethod
    def parser(cls, description: str | None = None, program: str = "favor") -> DataclassParser:
        """Makes the parser of all fields."""
        hints = get_type_hints(cls)
        return DataclassParser(program, description, [hints[group.name] for group in fields(cls)])  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Gives every argument with its value."""
        groups = [asdict(getattr(self, group.name)) for group in fields(self)]  # type: ignore[arg-type]
        return {name: value for group in groups for name, value in group.items()}

    def settings(self, num_processes: int) -> dict[str, Any]:
        """Gives the options that the result depends on."""
        kept = {name: value for name, value in self.to_dict().items() if name not in self.free}
        return kept | {"num_processes": num_processes}
