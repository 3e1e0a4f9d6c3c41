"""Command-line arguments of `train/asr.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from favor.models.conformer.configuration_conformer import PRESETS
from favor.models.speech.tokenizer import MODEL_TYPES
from favor.train.common.arguments import FREE, ArgumentGroups, BackendArguments, Checked, RunArguments, option, refuse

HUB = "openslr/librispeech_asr"
SIZES = tuple(PRESETS)
SYNTHETIC = "synthetic"  # in the place of the folder reverb_dir
HIDDEN_WEIGHT = 2.0  # of the error of a Conformer's predictions of its teacher's hidden states, in the loss
ARCHITECTURES = ("ctc", "transducer", "whisper")


@dataclass(kw_only=True)
class SpeechModelArguments(BackendArguments):
    """The model: a new one of a preset, or one to continue from."""

    model_name_or_path: str | None = option(
        None, "Hub name or folder of a model to continue from, with its processor. Default: a new model."
    )
    preset: str = option("small", f"Size of a new model: {', '.join(SIZES)}.", choices=PRESETS)
    architecture: str | None = option(
        None,
        f"{', '.join(ARCHITECTURES)}; if it is not the checkpoint's, only the encoder is kept. whisper continues a "
        "Whisper of transformers, with the attention of its encoder switched; ctc puts a new CTC head on the encoder "
        "of a Whisper. Default: the checkpoint's, else ctc.",
        choices=ARCHITECTURES,
    )
    ctc_weight: float = option(0.0, "Weight of a CTC loss added to the Transducer's: above 0 trains both jointly.")
    causal: bool = option(False, "Make a causal encoder, for streaming.")
    dropout: float = option(0.1, "Every dropout probability of a new model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        new = self.model_name_or_path is None
        refuse(
            (self.architecture == "whisper" and new, "a Whisper is not made new: name one with --model_name_or_path"),
            (
                self.ctc_weight and self.architecture != "transducer",
                "ctc_weight is an option of --architecture transducer",
            ),
        )


@dataclass(kw_only=True)
class SpeechDataArguments(Checked):
    """The speech, its features and its augmentation."""

    noise_dir: str | None = option(None, "Folder of audio files with noise, added to half of the utterances.")
    reverb_dir: str | None = option(
        None,
        "Folder of audio files with impulse responses of rooms, which reverberate half of the utterances, or "
        f"{SYNTHETIC}: responses of decaying noise.",
    )

    data_dir: str | None = option(
        None,
        "LibriSpeech's folder, or one with manifests or tar shards, or a data set of the hub, NAME or "
        f"NAME:CONFIGURATION. Default: {HUB}.",
    )
    train_split: str = option(
        "train", "Split to train on: a folder of LibriSpeech, a manifest's name without ending, a hub split."
    )
    eval_splits: list[str] = option(["dev"], "Splits to evaluate on.")
    extra_manifests: list[str] = option([], "Manifests whose utterances are trained on as well.")
    max_train_samples: int | None = option(None, "Train on this number of utterances only, the first ones.", above=0)
    max_eval_samples: int | None = option(
        None, "Evaluate on this number of utterances per split only, the first ones.", above=0
    )
    join_seconds: float = option(
        0.0,
        "Join consecutive utterances of a chapter up to this length, also in evaluation. Default 0: do not.",
    )
    max_bad: float = option(
        0.0, "Most utterances to leave out because they cannot be used: a number, or below 1 a fraction of all."
    )
    tokenizer_type: str = option(
        "unigram", "Kind of a new tokenizer, trained on the transcripts: unigram, bpe, char.", choices=MODEL_TYPES
    )
    vocab_size: int | None = option(None, "Tokens of a new tokenizer. Default: 256, or all characters.", above=0)
    lexicon: str | None = option(
        None,
        "Pronunciations, lines WORD<TAB>PH PH; the tokens are then phonemes. Default: those of the checkpoint, if any.",
    )
    speeds: list[float] = option(
        [0.9, 1.0, 1.1], "Speed factors of the audio to draw from; 1 alone: no change.", above=0
    )
    spec_augment: list[float] | None = option(
        None,
        "SpecAugment: number of frequency masks, their greatest width in bins, number of time masks, their greatest "
        "width as a fraction of the utterance. Default: 2 27 10 0.05.",
    )
    dataloader_num_workers: int = option(0, "Processes that read audio and compute features ahead. Default 0: none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (
                self.spec_augment is not None and len(self.spec_augment) != 4,
                f"spec_augment must be four numbers, got {self.spec_augment}",
            ),
            (
                self.lexicon is not None and (self.tokenizer_type != "unigram" or self.vocab_size is not None),
                "with lexicon the tokens are its phonemes: leave tokenizer_type and vocab_size out",
            ),
        )

    @property
    def limit(self) -> int | float:
        """The option `max_bad` as a number or a fraction, as `favor.train.speech.data.Skipped` takes it."""
        return self.max_bad if 0 < self.max_bad < 1 else int(self.max_bad)


@dataclass(kw_only=True)
class SpeechTrainArguments(RunArguments):
    """The optimization, with batches measured in seconds of audio, and teachers."""

    dynamic_chunk: float = option(
        0.0,
        "Fraction of the batches that a Conformer sees in chunks, so that it can stream too. Default 0: none.",
        least=0,
        most=1,
    )
    whisper_teacher: str | None = option(
        None,
        "Folder of a Whisper, or of CTC on its encoder, whose hidden states a Conformer also learns to predict.",
    )
    per_device_train_batch_seconds: float = option(
        200.0,
        "Seconds of audio per process and forward pass, padding included, also in evaluation; a number of utterances "
        "says little, since their lengths differ.",
        above=0,
    )
    learning_rate: float = option(1e-3, "Peak learning rate. A Whisper needs less, 1e-5 to 1e-4.", above=0)
    encoder_learning_rate: float | None = option(
        None,
        "Peak learning rate of the encoder, if it was trained before; 0 trains the rest alone. Default: the learning "
        "rate.",
        least=0,
    )
    num_train_epochs: float = option(50.0, "Epochs.", above=0)
    warmup_ratio: float = option(0.1, "Warm-up as a fraction of all steps.")
    ema_decay: float = option(
        0.999,
        "Decay of the average of the weights that is evaluated and saved; less in the first steps. 0: no average, the "
        "last weights.",
        least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (
                self.sequence_parallel > 1 and (self.dynamic_chunk or self.whisper_teacher),
                "sequence_parallel cuts recordings into pieces: it does not go with dynamic_chunk and whisper_teacher",
            ),
        )


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    free: ClassVar[tuple[str, ...]] = (*FREE, "dataloader_num_workers")

    model: SpeechModelArguments
    data: SpeechDataArguments
    train: SpeechTrainArguments

    def __post_init__(self) -> None:
        """Takes the tokenizer and the features of a new model from here, if a program sets it."""
        self.processor: str | None = None

    @property
    def normalize(self) -> str:
        """How the features of a new model are normalised: chunks and streams cannot wait for the whole utterance."""
        given = self.model.causal or self.train.dynamic_chunk or self.train.whisper_teacher
        return "none" if given and self.model.model_name_or_path is None else "utterance"

    def settings(self, num_processes: int) -> dict[str, Any]:
        """Gives what the result depends on, with the values that a run of earlier versions may have chosen."""
        weight = HIDDEN_WEIGHT if self.train.whisper_teacher else 1.0
        then = {"normalize": self.normalize, "hidden_weight": weight, "processor_name_or_path": self.processor}
        return super().settings(num_processes) | then
