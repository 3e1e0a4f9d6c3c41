r"""Word and character error rates of a saved speech model, and its speed.

    python -m favor.eval.asr --model_name_or_path out/asr --data_dir LibriSpeech --eval_splits dev-clean test-clean \
        --beam_size 8 --attn_implementation favor# --num_features 128 --output_dir out/asr_errors

The model is a ConformerForCTC or a ConformerForTransducer, saved with its processor by `favor.train.asr`. Its attention
may be switched to another backend, without training. Each split is transcribed by greedy search and, with `--beam_size`
above 1, by beam search. With `--language_model` or `--hotwords` the beam search of CTC scores words, and with
`--known_words` it finds no others than those of the language model. The
output folder gets `asr.md`, `asr.json` and, for each split, `<split>.jsonl` with the reference and the hypotheses of
every utterance. The program runs in one process, on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from favor.train.common.arguments import BackendArguments, check_positive, option
from favor.train.common.program import DataclassParser
from favor.train.speech.arguments import HUB


@dataclass(kw_only=True)
class EvaluationArguments:
    """The model, the speech and the output folder."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of a model saved with its processor."})
    output_dir: str = field(metadata={"help": "Folder of all results."})
    data_dir: str | None = option(
        None, f"LibriSpeech's folder, or one with manifests or tar shards. Default: {HUB} on the hub."
    )
    dataset_config_name: str | None = option(
        None, "Configuration of a hub data set: clean, other or all for LibriSpeech."
    )
    eval_splits: list[str] = field(default_factory=lambda: ["dev"], metadata={"help": "Splits to transcribe."})
    beam_size: int | None = option(
        None,
        "Hypotheses of the beam search. Default: 50 with a language model or hotwords, 200 with known words, else 1, "
        "greedy search alone.",
    )
    language_model: str | None = option(
        None, "N-gram model of words for the beam search of CTC: an ARPA file or a binary file of KenLM."
    )
    lm_weight: float | None = option(
        None, "Weight of the language model's log probability, often called alpha. Default: 0.5."
    )
    word_score: float | None = option(
        None, "Added for each word, with a language model; often called beta. Default: 1.5."
    )
    hotwords: list[str] = field(
        default_factory=list,
        metadata={"help": "Words or quoted phrases that the beam search of CTC finds more easily."},
    )
    known_words: bool = option(
        False, "Find words of the language model alone; needs a tokenizer of characters, and takes no hotwords."
    )
    lexicon: str | None = option(
        None,
        "Pronunciations for a model of phonemes, lines WORD<TAB>PH PH. Default: those in the model's folder, if any.",
    )
    hotword_weight: float | None = option(None, "Added for each hotword in the text. Default: 10.")
    per_device_eval_batch_seconds: float = option(
        200.0,
        "Seconds of audio per process and forward pass, padding included; a number of utterances says little, since "
        "their lengths differ.",
    )
    chunk_seconds: float | None = option(
        None, "Let a Conformer hear in chunks of this length, as in a stream. Default: whole utterances."
    )
    left_chunks: int | None = option(
        None, "Chunks that are seen before each chunk, with exact attention. Default: all."
    )
    max_eval_samples: int | None = option(
        None, "Number of utterances per split, evenly spaced over its order, which is by speaker in LibriSpeech."
    )
    max_bad: float = option(
        0.0, "Most utterances to leave out because they cannot be used: a number, or below 1 a fraction of all."
    )
    resample: bool = option(False, "Convert audio of other sampling rates than the model's instead of refusing it.")
    seed: int | None = option(None, "Seed of the random features. Default: the model's own.")
    device: str | None = option(None, "Device of the model. Default: cuda if there is a GPU, else cpu.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        check_positive(self, "beam_size", "per_device_eval_batch_seconds", "max_eval_samples", "chunk_seconds")
        if self.left_chunks is not None and self.chunk_seconds is None:
            raise ValueError("left_chunks has no effect without chunk_seconds: add --chunk_seconds 0.64")
        if not self.eval_splits or len(set(self.eval_splits)) != len(self.eval_splits):
            raise ValueError(f"eval_splits must be different names, at least one, got {self.eval_splits}")


def parse_arguments(words: Sequence[str] | None) -> tuple[BackendArguments, EvaluationArguments]:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    parser = DataclassParser("favor.eval.asr", __doc__, [BackendArguments, EvaluationArguments])
    backend, arguments = parser.parse(words)
    return backend, arguments
