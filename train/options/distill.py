r"""Gives a pretrained model linear attention that is close to its exact attention.

    accelerate launch -m favor.train.distill --model_name_or_path DIR --train_file book.txt \
        --attn_implementation favor# --num_features 256 --window 128 --output_dir out/linear

The stages, in one folder:

1. The parameters of the estimator come from a closed form.
2. `attention_steps` steps learn a correction of them, and directions in the place of random ones: each layer is
   compared with exact attention on its own queries, keys and values. The weights of the model do not change. With
   `exact_heads`, the heads that are estimated worst afterwards keep exact attention.
   `--feature_weights` replaces this stage: it learns weights of the features, and parameters for exactly the directions
   that the model will use (`favor.calibrate`).
3. `model_steps` steps train all weights, and the learned directions, so that hidden states and predictions match those
   of the exact model, with `task_weight` also on the words of the text themselves.

With `--audio_dir` the model is one that hears, such as a Whisper or a Conformer: its encoder alone is switched and
learns from recordings.

After each stage the program prints the error of the hidden states on samples that are held out. Samples may begin short
and grow (`--start_length`), have several lengths (`--lengths`), or be pairs of texts (`--pair_probability`). A run that
was stopped continues with `--resume`, to the same weights. `from_pretrained` loads the output folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from favor.train.common.arguments import (
    FREE,
    PRECISIONS,
    SCHEDULE,
    RunArguments,
    check_choice,
    check_positive,
    check_schedule,
    option,
)
from favor.train.common.program import DataclassParser, did_you_mean

NAME = "favor.train.distill"


@dataclass
class DistillArguments:
    """Model, text, attention and schedule."""

    model_name_or_path: str = field(metadata={"help": "Hub name or folder of a pretrained model."})
    output_dir: str = field(metadata={"help": "Folder of the distilled model."})
    train_file: str | None = option(None, "Text to learn from: UTF-8, plain, .gz or .xz.")
    audio_dir: str | None = option(
        None, "Instead of a text: recordings, in LibriSpeech's layout, with manifests, or a folder of audio files."
    )
    split: str | None = option(None, "Split of audio_dir; several are joined by +. Default: all of the folder.")
    join_seconds: float = option(28.0, "Consecutive utterances of a chapter are joined up to this length.")
    attn_implementation: str = option("favor#", "FAVOR backend: favor#, favor++, favor+ or landmark.")
    num_features: int = option(256, "Random features, or means of landmarks in encoders, per head.")
    features: str | None = option(None, "Features of favor#. Default wderf.")
    window: int = option(0, "Tokens of a block in which attention is exact; 0: none. Not for landmark.")
    selected_keys: int | None = option(
        None, "Keys that each block of queries reads exactly, for landmark. Default: 768, in causal layers 1,024."
    )
    exact_below: str = option("0", "Exact attention for fewer tokens than this: a number, or auto.")
    layers: str = option(
        "all",
        "all, or auto: heads that cannot be estimated stay exact, within flop_budget; with landmarks, layers take the "
        "numbers of selected keys with the smallest errors, or stay exact.",
    )
    flop_budget: float = option(
        0.5, "Operations of attention, as a fraction of those of exact attention, for --layers auto."
    )
    max_length: int = option(512, "Tokens of a sample.")
    start_length: int | None = option(
        None, "Tokens of the first samples; the length doubles, in equal parts of a stage, up to max_length."
    )
    lengths: list[int] | None = field(
        default=None,
        metadata={
            "help": "Tokens of the samples of a step, drawn from these. Default: max_length, or as start_length says."
        },
    )
    pair_probability: float = option(
        0.0,
        "Part of the samples that are two texts, as in tasks on pairs of sentences: the second begins inside the first "
        "or right after it, and shares words with it.",
    )
    max_train_samples: int | None = option(
        None, "Samples to learn from, evenly spaced in the text. Default: as many as the steps need, or all there are."
    )
    held_out_samples: int = option(8, "Samples that are not learned from, on which the error is measured.")
    statistics: str | None = option(
        None, "corrected: a correction of each sequence's parameters (default of encoders); calibrated: fixed ones."
    )
    per_device_train_batch_size: int = option(2, "Samples per process and step.")
    calibration_samples: int = option(8, "Samples from which the closed form is computed.")
    feature_weights: bool = option(
        False, "Learn weights of the features (with favor#, also parameters that go with them)."
    )
    attention_steps: int | None = option(
        None, "Steps of learning the parameters of the estimator. Default 300; none with feature_weights or landmarks."
    )
    attention_learning_rate: float = option(3e-3, "Peak learning rate of the corrections in the attention steps.")
    learn_directions: bool = option(
        True, "The attention steps also learn the directions of each head, in the place of random ones."
    )
    directions_learning_rate: float = option(5e-2, "Peak learning rate of the directions.")
    exact_heads: int = option(
        0,
        "After the attention steps, this many key heads of the whole model keep exact attention, with their query "
        "heads: those that are estimated worst on the calibration samples. A decoder with exact heads cannot run with "
        "a cache of constant size.",
    )
    model_steps: int = option(0, "Steps that train the whole model to match the exact one. Default 0: none.")
    model_learning_rate: float = option(2e-5, "Peak learning rate of the model steps.")
    model_directions_learning_rate: float = option(
        5e-3, "Peak learning rate of learned directions in the model steps; 0: they are not trained there."
    )
    hidden_weight: float = option(1.0, "Weight of the relative squared error of the hidden states in the model steps.")
    logits_weight: float = option(1.0, "Weight of the divergence of predictions, if the model makes any.")
    task_weight: float = option(
        0.0, "Weight of the model's own loss: next words, or masked ones (15 %), which the teacher sees masked too."
    )
    ema_decay: float = option(0.0, "Decay of an average of the weights in the model steps, which is saved; 0: none.")
    lr_scheduler_type: str = field(default="cosine", metadata=SCHEDULE)
    warmup_ratio: float = option(0.1, "Warm-up of the model steps, as a fraction of them.")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.")
    mixed_precision: str | None = option(
        None,
        "no, fp16 or bf16, of the model and of its exact self; parameters of the features are learned in float32. "
        "Default: that of accelerate launch, else no.",
    )
    seed: int = option(0, "Seed of the order of samples, dropout and random features.")
    checkpointing_steps: int | None = option(None, "Optimizer steps between checkpoints. Default: no checkpoints.")
    resume: bool = option(False, "Continue from the last checkpoint; steps that are done are not run again.")
    overwrite_output_dir: bool = option(
        False, "Start again in a folder that holds a run; its checkpoints and results are deleted."
    )

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        from favor import registry

        check_positive(
            self,
            *("max_length", "start_length", "per_device_train_batch_size", "calibration_samples"),
            *("max_train_samples", "held_out_samples", "checkpointing_steps", "join_seconds"),
        )
        check_schedule(self.lr_scheduler_type)
        check_choice(self, "mixed_precision", PRECISIONS)
        if (self.train_file is None) == (self.audio_dir is None):
            raise ValueError("give a text, train_file, or recordings, audio_dir: one of them")
        of_text = ("start_length", "lengths", "pair_probability", "task_weight")
        if self.audio_dir is not None and any(getattr(self, name) for name in of_text):
            raise ValueError(f"{', '.join(of_text)} are for text: leave them out with audio_dir")
        if self.audio_dir is None and self.split is not None:
            raise ValueError("split is of recordings: add audio_dir")
        if self.start_length is not None and self.start_length > self.max_length:
            raise ValueError(f"start_length must be at most max_length, got {self.start_length} and {self.max_length}")
        if self.lengths is not None:
            if self.start_length is not None:
                raise ValueError("lengths and start_length both set the length of samples: leave one of them out")
            if not self.lengths or min(self.lengths) < 1 or max(self.lengths) > self.max_length:
                raise ValueError(f"lengths must be between 1 and max_length, {self.max_length}, got {self.lengths}")
        if self.model_directions_learning_rate < 0:
            raise ValueError(
                f"model_directions_learning_rate must not be negative, got {self.model_directions_learning_rate}"
            )
        if not 0 <= self.pair_probability <= 1:
            raise ValueError(f"pair_probability must be between 0 and 1, got {self.pair_probability}")
        for name in ("hidden_weight", "logits_weight", "task_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.model_steps and not (self.hidden_weight or self.logits_weight):
            raise ValueError(
                "hidden_weight and logits_weight are both 0, so nothing of the exact model is matched: set one above "
                "0, or train on text with favor.train.mlm or favor.train.clm"
            )
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must be between 0 and 1, got {self.warmup_ratio}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and less than 1, got {self.ema_decay}")
        if self.feature_weights and (self.attention_steps or self.statistics == "corrected"):
            raise ValueError(
                "feature_weights learns calibrated parameters for fixed directions: leave out attention_steps, and "
                "leave out statistics or set it to calibrated"
            )
        if self.attn_implementation not in registry.BACKENDS:
            known = ", ".join(registry.BACKENDS)
            raise ValueError(
                f"attn_implementation must be one of {known}; got {self.attn_implementation!r}"
                + did_you_mean(self.attn_implementation, registry.BACKENDS)
            )
        landmarks = self.family.selects_keys
        if landmarks and (self.attention_steps or self.feature_weights or self.statistics):
            raise ValueError(
                "landmarks have no parameters to learn: leave out attention_steps, feature_weights and statistics; "
                "model_steps trains the model"
            )
        if self.attention_steps is None:
            self.attention_steps = 0 if self.feature_weights or landmarks else 300
        for name in ("attention_steps", "model_steps", "exact_heads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.exact_heads and (landmarks or self.feature_weights):
            raise ValueError(
                "exact_heads are chosen after the attention steps, which landmarks and feature_weights do not have: "
                "leave exact_heads out"
            )
        if self.exact_heads and not self.attention_steps:
            raise ValueError("exact_heads are chosen after the attention steps: set attention_steps above 0")
        if self.exact_heads and self.layers == "auto":
            raise ValueError("layers auto chooses exact heads itself: leave exact_heads out, or set layers to all")
        directions = self.learn_directions and self.attention_steps
        learns = self.family.needs_statistics or self.feature_weights or directions
        if not landmarks and not (learns and self.family.supports_window):
            raise ValueError(
                "attn_implementation must be favor#, favor++ or landmark, or favor+ with learn_directions or "
                f"feature_weights, got {self.attn_implementation!r}"
            )
        if self.statistics == "corrected" and not self.attention_steps:
            raise ValueError("attention_steps learns the statistics corrected: set attention_steps above 0")
        if self.statistics == "corrected" and not self.family.needs_statistics:
            raise ValueError(
                f"{self.attn_implementation} has no parameters of a sequence to correct: leave out statistics"
            )
        if self.statistics not in (None, "calibrated", "corrected"):
            raise ValueError(f"statistics must be calibrated or corrected, got {self.statistics!r}")
        if self.exact_below != "auto" and not self.exact_below.isdecimal():
            raise ValueError(f"exact_below must be a number of tokens or auto, got {self.exact_below!r}")

    @property
    def family(self) -> Any:
        """The family that the backend runs."""
        from favor import registry

        return registry.family_of(self.attn_implementation, self.features)

    def settings(self, num_processes: int) -> dict[str, Any]:
        """Gives the options that the result depends on."""
        return {name: value for name, value in asdict(self).items() if name not in FREE} | {
            "num_processes": num_processes
        }

    def of_stage(self, folder: str, steps: int, learning_rate: float, warmup_ratio: float) -> RunArguments:
        """Gives the arguments of one stage as a training of its own."""
        return RunArguments(
            output_dir=folder,
            learning_rate=learning_rate,
            weight_decay=0.0,
            max_train_steps=steps,
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_ratio=warmup_ratio,
            max_grad_norm=self.max_grad_norm,
            mixed_precision=self.mixed_precision,
            seed=self.seed,
            checkpointing_steps=self.checkpointing_steps,
            resume=self.resume,
        )

    def options(self) -> dict[str, Any]:
        """Gives the options of the backend."""
        exact_below: int | str = "auto" if self.exact_below == "auto" else int(self.exact_below)
        names = ("num_features", "features", "window", "selected_keys", "seed")
        return {name: getattr(self, name) for name in names} | {"exact_below": exact_below}


def parse_arguments(words: Sequence[str] | None) -> DistillArguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return DataclassParser(NAME, __doc__, [DistillArguments]).parse(words)[0]
