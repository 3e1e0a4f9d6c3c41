"""Command-line arguments of `train/glue.py` and those that programs share. They are checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, get_type_hints

from transformers import AttentionInterface, SchedulerType
from typing_extensions import Self

import favor
from favor.train.common.program import DataclassParser, did_you_mean

ADAMW, SOFTMAX_BOUND = "adamw", "softmax_bound"
DEFAULT_SEED = 42
PRECISIONS = ("no", "fp16", "bf16")
# Arguments that do not change the result of a run.
FREE = ("output_dir", "checkpointing_steps", "resume", "overwrite_output_dir", "sequence_parallel")


def option(
    default: Any,
    text: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    choices: Collection[str] = (),
) -> Any:
    """Makes a field of a `Checked` dataclass.

    Args:
        default: its value; a list is not shared. MISSING for an option that is required.
        text: its help; a percent sign needs no escape.
        above, least, below, most: bounds of its value, or of each value of a list. Default None: none.
        choices: its possible values. Default (): all.
    """
    bounds = {"greater than": above, "at least": least, "less than": below, "at most": most}
    bounds = {word: bound for word, bound in bounds.items() if bound is not None}
    metadata = {"help": text.replace("%", "%%"), "bounds": bounds, "allowed": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked:
    """Base of a dataclass whose fields `option` makes; a value that is given, and not allowed, raises ValueError."""

    def __post_init__(self) -> None:
        holds = {"greater than": "__gt__", "at least": "__ge__", "less than": "__lt__", "at most": "__le__"}
        for own in fields(self):  # type: ignore[arg-type]
            value, bounds = getattr(self, own.name), own.metadata.get("bounds", {})
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                if not all(getattr(float(one), holds[word])(float(bound)) for word, bound in bounds.items()):
                    said = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items())
                    raise ValueError(f"{own.name} must be {said}, got {value}")
                if (names := own.metadata.get("allowed")) and one not in names:
                    near = did_you_mean(str(one), names)
                    raise ValueError(f"{own.name} must be one of {', '.join(names)}, got {one!r}{near}")


def check_positive(arguments: Any, *names: str) -> None:
    """Raises ValueError if one of the named values is given and is not above 0."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")


def refuse(*rules: tuple[Any, str]) -> None:
    """Raises ValueError with the message of the first rule whose condition is met."""
    for wrong, message in rules:
        if wrong:
            raise ValueError(message)


@dataclass(kw_only=True)
class BackendArguments(Checked):
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
        super().__post_init__()
        name, known = self.attn_implementation, [*favor.BACKENDS, "sdpa", "eager"]
        # Others may be registered, and a name with / is one of the hub.
        if name is not None and "/" not in name and name not in (*known, *AttentionInterface().valid_keys()):
            near = did_you_mean(name, known)
            raise ValueError(f"attn_implementation must be one of {', '.join(known)}, got {name!r}{near}")
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

    model_name_or_path: str = option(MISSING, "Hub name or folder of a pretrained model.")
    ignore_mismatched_sizes: bool = option(False, "Replace a head for other labels by a new head.")
    trust_remote_code: bool = option(
        False, "Allow code from the checkpoint to run, also that of pickle files: weights that are not in safetensors."
    )
    dropout: float | None = option(
        None, "Every dropout probability of the model. Default: those of the checkpoint.", least=0, below=1
    )


@dataclass
class DataArguments(Checked):
    """The task and its samples."""

    task_name: str = option(MISSING, "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.")
    data_dir: str | None = option(
        None, "Folder of GLUE, or of the task, with TSV files. Default: nyu-mll/glue on the hub."
    )
    max_length: int = option(128, "Greatest number of tokens of a sample; the rest is cut off.", above=0)
    max_train_samples: int | None = option(None, "Train on this number of samples only, the first ones.", above=0)
    max_eval_samples: int | None = option(None, "Evaluate on this number of samples only, the first ones.", above=0)
    distractors: int = option(
        0,
        "Texts of other samples around the one that holds the answer, for QNLI, MNLI and RTE: long documents, which "
        "need a larger max_length.",
        least=0,
    )


@dataclass(kw_only=True)
class FolderArguments(Checked):
    """The output folder, and what serves to continue in it."""

    output_dir: str = option(MISSING, "Folder of all results.")
    mixed_precision: str | None = option(
        None, "no, fp16 or bf16. Default: that of accelerate launch, else no.", choices=PRECISIONS
    )
    seed: int | None = option(None, "Seed of new weights, order of samples, dropout and random features. Default 42.")
    checkpointing_steps: int | None = option(
        None, "Optimizer steps between checkpoints. Default: no checkpoints.", above=0
    )
    resume: bool = option(False, "Continue from the last checkpoint; what is finished is not run again.")
    overwrite_output_dir: bool = option(
        False, "Start again in a folder that holds a run; its checkpoints and results are deleted."
    )


@dataclass(kw_only=True)
class RunArguments(FolderArguments):
    """The optimization."""

    weight_decay: ClassVar[float] = 0.01
    lr_scheduler_type: ClassVar[str] = "cosine"

    learning_rate: float = option(5e-5, "Peak learning rate.", above=0)
    num_train_epochs: float = option(3.0, "Epochs.", above=0)
    max_train_steps: int | None = option(None, "Optimizer steps; replaces num_train_epochs.", above=0)
    gradient_accumulation_steps: int = option(1, "Forward and backward passes per optimizer step.", above=0)
    warmup_ratio: float = option(0.0, "Warm-up as a fraction of all steps.")
    sequence_parallel: int = option(
        1,
        "Processes that cut every sequence into pieces and act as one, for long sequences. It needs FAVOR attention, "
        "exact_below 0, and a multiple of this number of processes. Default 1: sequences are whole.",
        above=0,
    )


@dataclass(kw_only=True)
class BatchedRunArguments(RunArguments):
    """Sizes of batches, and what is usual for text."""

    weight_decay: float = option(  # type: ignore[misc]
        0.01, "Weight decay of matrices; biases and normalisations are not decayed."
    )
    lr_scheduler_type: str = option(  # type: ignore[misc]
        "linear",
        "Schedule of the learning rate: linear, cosine, constant, or another that transformers has.",
        choices=[kind.value for kind in SchedulerType],
    )
    per_device_train_batch_size: int = option(32, "Samples per process and forward pass.", above=0)
    per_device_eval_batch_size: int = option(64, "Samples per process and forward pass in evaluation.", above=0)


@dataclass(kw_only=True)
class TrainArguments(BatchedRunArguments):
    """One seed or several, and the order of the samples."""

    seed: list[int] = option(  # type: ignore[assignment]  # noqa: RUF009
        [DEFAULT_SEED],
        "Seed of new weights, order of samples, dropout and random features. With several there is one training per "
        "seed, then mean and standard deviation.",
    )
    group_by_length: bool = option(
        False, "Put samples of about the same length into one batch: less padding, but another order."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.seed)) != len(self.seed):
            raise ValueError(f"the numbers of seed must be different, got {self.seed}")


@dataclass
class HeadArguments(Checked):
    """The optimizer of the output layer."""

    head_optimizer: str = option(
        ADAMW,
        f"Optimizer of the output layer: {ADAMW}, or {SOFTMAX_BOUND} (favor.optim.SoftmaxBound, no weight decay).",
        choices=(ADAMW, SOFTMAX_BOUND),
    )
    head_learning_rate: float | None = option(
        None,
        f"Peak learning rate of the output layer. Default: 1 for {SOFTMAX_BOUND}, else that of the other layers.",
        above=0,
    )


class ArgumentGroups:
    """Base of a dataclass whose fields are dataclasses of arguments: one command line, one dictionary."""

    free: ClassVar[tuple[str, ...]] = FREE

    @classmethod
    def parse(cls, argv: list[str] | None, description: str | None = None, program: str = "favor") -> Self:
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
        """Gives the options that the result depends on; processes that cut sequences count as one.

        Raises ValueError for a number of processes that sequence_parallel does not divide.
        """
        every = self.to_dict()
        cut = every.get("sequence_parallel", 1)
        if num_processes % cut:
            raise ValueError(
                f"sequence_parallel {cut} takes a multiple of {cut} processes, got {num_processes}: start the program "
                f"with accelerate launch --num_processes {cut}, or on CPUs with ACCELERATE_USE_CPU=true torchrun "
                f"--nproc_per_node {cut}"
            )
        kept = {name: value for name, value in every.items() if name not in self.free}
        return kept | {"num_processes": num_processes // cut}
