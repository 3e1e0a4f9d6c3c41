"""Command-line arguments of `train/asr.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from favor.train.common.arguments import (
    FREE,
    SCHEDULE,
    ArgumentGroups,
    BackendArguments,
    check_choice,
    check_positive,
    option,
)
from favor.train.speech.objective_arguments import ObjectiveArguments

HUB = "openslr/librispeech_asr"
# Names in `favor.models.conformer.configuration_conformer.PRESETS`, which help does not import.
SIZES = ("tiny", "small", "paper")
# In the place of the folder reverb_dir.
SYNTHETIC = "synthetic"
ARCHITECTURES = ("ctc", "transducer", "whisper")


@dataclass(kw_only=True)
class SpeechModelArguments(BackendArguments):
    """The model: a new one of a preset, or one to continue from."""

    model_name_or_path: str | None = option(
        None, "Hub name or folder of a model to continue from, with its processor. Default: a new model."
    )
    processor_name_or_path: str | None = option(
        None, "Hub name or folder whose tokenizer and features a new model takes. Default: new ones."
    )
    preset: str = option("small", f"Size of a new model: {', '.join(SIZES)}.")
    architecture: str | None = option(
        None,
        f"{', '.join(ARCHITECTURES)}; if it is not the checkpoint's, only the encoder is kept. whisper continues a "
        "Whisper of transformers, with the attention of its encoder switched; ctc puts a new CTC head on the encoder "
        "of a Whisper. Default: the checkpoint's, else ctc.",
    )
    ctc_weight: float = option(0.0, "Weight of a CTC loss added to the Transducer's: above 0 trains both jointly.")
    causal: bool = option(False, "Make a causal encoder, for streaming. Needs normalize none.")
    dropout: float = option(0.1, "Every dropout probability of a new model.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        from favor.models.conformer.configuration_conformer import PRESETS

        super().__post_init__()
        check_choice(self, "preset", PRESETS)
        check_choice(self, "architecture", (None, *ARCHITECTURES))
        if self.architecture == "whisper" and self.model_name_or_path is None:
            raise ValueError("a Whisper is not made new: name one with --model_name_or_path")
        if self.ctc_weight and self.architecture != "transducer":
            raise ValueError("ctc_weight is an option of --architecture transducer")


@dataclass(kw_only=True)
class SpeechDataArguments:
    """The speech, its features and its augmentation."""

    noise_dir: str | None = option(None, "Folder of audio files with noise, added to half of the utterances.")
    reverb_dir: str | None = option(
        None,
        "Folder of audio files with impulse responses of rooms, which reverberate half of the utterances, or "
        f"{SYNTHETIC}: responses of decaying noise.",
    )

    data_dir: str | None = option(
        None, f"LibriSpeech's folder, or one with manifests or tar shards. Default: {HUB} on the hub."
    )
    dataset_config_name: str | None = option(
        None, "Configuration of a hub data set: clean, other or all for LibriSpeech."
    )
    train_split: str = option(
        "train", "Split to train on: a folder of LibriSpeech, a manifest's name without ending, a hub split."
    )
    eval_splits: list[str] = field(default_factory=lambda: ["dev"], metadata={"help": "Splits to evaluate on."})
    extra_manifests: list[str] = field(
        default_factory=list, metadata={"help": "Manifests whose utterances are trained on as well."}
    )
    train_repeats: int = option(
        1, "How often an epoch has each utterance of train_split; those of extra_manifests come once."
    )
    max_train_samples: int | None = option(None, "Train on this number of utterances only, the first ones.")
    max_eval_samples: int | None = option(None, "Evaluate on this number of utterances per split only, the first ones.")
    join_seconds: float = option(
        0.0,
        "Join consecutive utterances of a chapter up to this length, also in evaluation. Default 0: do not.",
    )
    max_bad: float = option(
        0.0, "Most utterances to leave out because they cannot be used: a number, or below 1 a fraction of all."
    )
    resample: bool = option(False, "Convert audio of other rates to 16000 Hz instead of refusing it.")
    tokenizer_type: str = option("unigram", "Kind of a new tokenizer, trained on the transcripts: unigram, bpe, char.")
    vocab_size: int | None = option(None, "Tokens of a new tokenizer. Default: 256, or all characters.")
    lexicon: str | None = option(
        None,
        "Pronunciations, lines WORD<TAB>PH PH; the tokens are then phonemes. Default: those of the checkpoint, if any.",
    )
    num_mel_bins: int = option(80, "Mel bins of a new model.")
    normalize: str = option(
        "utterance", "Normalisation of a new model's features, utterance or none; none has fixed constants."
    )
    speeds: list[float] = field(
        default_factory=lambda: [0.9, 1.0, 1.1],
        metadata={"help": "Speed factors of the audio to draw from; 1 alone: no change."},
    )
    frequency_masks: int = option(2, "Frequency masks of SpecAugment.")
    frequency_width: int = option(27, "Greatest width of a frequency mask, in bins.")
    time_masks: int = option(10, "Time masks of SpecAugment.")
    time_part: float = option(0.05, "Greatest width of a time mask, as a fraction of the utterance.")
    dataloader_num_workers: int = option(0, "Processes that read audio and compute features ahead. Default 0: none.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        from favor.models.conformer.feature_extraction_conformer import NORMALIZE
        from favor.models.speech.tokenizer import MODEL_TYPES

        check_positive(self, "train_repeats", "max_train_samples", "max_eval_samples", "num_mel_bins", "vocab_size")
        check_choice(self, "tokenizer_type", MODEL_TYPES)
        check_choice(self, "normalize", NORMALIZE)
        if self.lexicon is not None and (self.tokenizer_type != "unigram" or self.vocab_size is not None):
            raise ValueError("with lexicon the tokens are its phonemes: leave tokenizer_type and vocab_size out")
        if not self.speeds or min(self.speeds) <= 0:
            raise ValueError(f"speeds must be positive numbers, got {self.speeds}")

    @property
    def limit(self) -> int | float:
        """The option `max_bad` as a number or a fraction, as `favor.train.speech.data.Skipped` takes it."""
        return self.max_bad if 0 < self.max_bad < 1 else int(self.max_bad)


@dataclass(kw_only=True)
class SpeechTrainArguments(ObjectiveArguments):
    """The optimization, with batches measured in seconds of audio."""

    per_device_train_batch_seconds: float = option(
        200.0,
        "Seconds of audio per process and forward pass, padding included, also in evaluation; a number of utterances "
        "says little, since their lengths differ.",
    )
    learning_rate: float = option(1e-3, "Peak learning rate. A Whisper needs less, 1e-5 to 1e-4.")
    encoder_learning_rate: float | None = option(
        None,
        "Peak learning rate of the encoder, if it was trained before; 0 trains the rest alone. Default: the learning "
        "rate.",
    )
    num_train_epochs: float = option(50.0, "Epochs.")
    lr_scheduler_type: str = field(default="cosine", metadata=SCHEDULE)
    warmup_ratio: float = option(0.1, "Warm-up as a fraction of all steps.")
    ema_decay: float = option(
        0.999,
        "Decay of the average of the weights that is evaluated and saved; less in the first steps. 0: no average, the "
        "last weights.",
    )
    eval_epochs: int = option(1, "Epochs between evaluations; the last epoch is always evaluated.")

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        super().__post_init__()
        check_positive(self, "per_device_train_batch_seconds", "eval_epochs")
        if self.encoder_learning_rate is not None and self.encoder_learning_rate < 0:
            raise ValueError(f"encoder_learning_rate must be at least 0, got {self.encoder_learning_rate}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    free: ClassVar[tuple[str, ...]] = (*FREE, "dataloader_num_workers")

    model: SpeechModelArguments
    data: SpeechDataArguments
    train: SpeechTrainArguments
