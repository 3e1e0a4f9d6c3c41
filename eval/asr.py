r"""Word and character error rates of a saved speech model, and its speed.

    python -m favor.eval.asr --model_name_or_path out/asr --data_dir LibriSpeech --eval_splits dev-clean test-clean \
        --beam_size 8 --attn_implementation favor# --num_features 128 --output_dir out/asr_errors

The model is a ConformerForCTC or a ConformerForTransducer, saved with its processor by `favor.train.asr`. Its attention
may be switched to another backend, without training. Each split is transcribed by greedy search and, with `--beam_size`
above 1, by beam search. With `--language_model` or `--hotwords` the beam search of CTC scores words, and with
`--known_words` it finds no others than those of the language model. The
output folder gets `asr.md`, `asr.json` and, for each split, `<split>.jsonl` with the reference and the hypotheses of
every utterance. `accelerate launch` decides whether one process or several transcribe the batches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import PreTrainedConfig

import favor
from favor.eval.common import report
from favor.eval.common.processes import processes, shared_program
from favor.eval.common.program import device_or_default
from favor.integrations.modules import evaluating
from favor.models.conformer import Chunks
from favor.models.conformer.chunks import check_chunks
from favor.models.conformer.modeling_conformer import ConformerPreTrainedModel
from favor.models.speech import ConformerProcessor, Pronunciations
from favor.models.speech.pronunciations import lexicon_of
from favor.models.speech.word_beam import Scorer, searched_words
from favor.train.common.arguments import BackendArguments, check_positive, option
from favor.train.common.lock import hold_together, releases_locks
from favor.train.common.program import DataclassParser
from favor.train.speech.arguments import HUB, Arguments, SpeechDataArguments, SpeechModelArguments, SpeechTrainArguments
from favor.train.speech.data import Utterance, long_enough
from favor.train.speech.loaders import evaluation_loader
from favor.train.speech.model import CLASSES, make_model, make_processor, saved_architecture
from favor.train.speech.sources import load_speech
from favor.train.speech.transcribe import transcribe
from favor.train.speech.word_errors import character_errors, word_errors
from favor_command.saved import read_config


@dataclass(kw_only=True)
class EvaluationArguments:
    """The model, the speech and the output folder."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of a model saved with its processor."})
    output_dir: str = field(metadata={"help": "Folder of all results."})
    data_dir: str | None = option(
        None, f"LibriSpeech, a folder with manifests or tar shards, or NAME[:CONFIGURATION] of the hub. Default: {HUB}."
    )
    eval_splits: list[str] = field(default_factory=lambda: ["dev"], metadata={"help": "Splits to transcribe."})
    beam_size: int | None = option(
        None,
        "Hypotheses of the beam search. Default: 50 with a language model or hotwords, 200 with known words, else 1, "
        "greedy search alone.",
    )
    language_model: str | None = option(None, "N-gram model for the search: an ARPA file, or a binary one of KenLM.")
    lm_weight: float | None = option(None, "Weight of its log probability, often called alpha. Default: 0.5.")
    word_score: float | None = option(None, "Added for each word with it, often called beta. Default: 1.5.")
    hotwords: list[str] = field(
        default_factory=list,
        metadata={"help": "Words or quoted phrases that the beam search of CTC finds more easily."},
    )
    hotword_weight: float | None = option(None, "Added for each hotword in the text. Default: 10.")
    known_words: bool = option(False, "Find words of the language model alone; for tokens that are characters.")
    lexicon: str | None = option(None, "Pronunciations for a model of phonemes. Default: those in its folder, if any.")
    per_device_eval_batch_seconds: float = option(200.0, "Seconds of audio per forward pass, padding included.")
    chunk_seconds: float | None = option(None, "Length of chunks for a Conformer, as in a stream. Default: no chunks.")
    left_chunks: int | None = option(None, "Chunks seen before each chunk, with exact attention. Default: all.")
    max_eval_samples: int | None = option(None, "Utterances per split, evenly spaced over its order. Default: all.")
    max_bad: float = option(0.0, "Most unusable utterances to leave out: a number, or below 1 a fraction of all.")
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
    arguments.device = device_or_default(arguments.device)
    return backend, arguments


def speech_config(path: str) -> PreTrainedConfig:
    """Reads the configuration of a saved speech model, a folder or a hub name."""
    config: PreTrainedConfig = read_config(path)
    if saved_architecture(config) is None:
        kinds = " or a ".join(kind.__name__ for kinds in CLASSES.values() for kind in kinds.values())
        raise ValueError(f"{path} must hold a {kinds}, got {config.architectures or 'no architecture'}")
    return config


def load(path: str, backend: BackendArguments, seed: int | None = None) -> tuple[Any, ConformerProcessor]:
    """Loads a saved model with the backend that the arguments name, on the CPU, and its processor."""
    config = speech_config(path)
    given = SpeechModelArguments(model_name_or_path=path, **asdict(backend))
    arguments = Arguments(given, SpeechDataArguments(), SpeechTrainArguments(output_dir=""))
    processor = make_processor(arguments, ())
    return make_model(arguments, processor, (config.favor or {}).get("seed", 0) if seed is None else seed), processor


def recognise(
    model: Any,
    processor: Any,
    utterances: Sequence[Utterance],
    *,
    beam_size: int = 1,
    scorer: Scorer | None = None,
    chunks: Chunks | None = None,
    lexicon: Pronunciations | None = None,
    batch_seconds: float = 200.0,
    is_shared: bool = False,
) -> tuple[list[str], float]:
    """Transcribes utterances with a model on its device, greedily if `beam_size` is 1.

    The scorer is for the beam search of CTC, `chunks` are those of a stream, the lexicon is for tokens that are
    phonemes, and `batch_seconds` of audio, padding included, are in a forward pass. If `is_shared`, all processes of
    `accelerate launch` must call this with the same utterances, and share the batches.

    Returns:
        One text per utterance, in order, and the seconds of reading and decoding the files, features, model and search
        together.
    """
    state = processes()
    found: list[tuple[int, str]] = []
    own = slice(state.process_index, None, state.num_processes) if is_shared else slice(None)
    loader = evaluation_loader(utterances, processor, batch_seconds, choose=lambda batches: batches[own])
    start = time.perf_counter()
    with evaluating(model):
        for batch in loader:
            indices = batch.pop("index").tolist()
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
            texts = transcribe(model, inputs, processor.tokenizer, beam_size, scorer, chunks, lexicon)
            found += zip(indices, texts, strict=True)
    pairs = gather_object(found) if is_shared else found
    return [text for _, text in sorted(pairs)], time.perf_counter() - start


def evenly_spaced(utterances: Sequence[Utterance], number: int | None) -> list[Utterance]:
    """Cuts the utterances into `number` equal parts and takes the middle one of each; None takes all utterances."""
    total = len(utterances)
    if number is None or number >= total:
        return list(utterances)
    return [utterances[(2 * part + 1) * total // (2 * number)] for part in range(number)]


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, Any]:
    """Computes WER and CER in percent (less is better), and the counts of words and characters behind them."""
    words, characters = word_errors(references, hypotheses), character_errors(references, hypotheses)
    counts = [{**asdict(found), "reference": found.reference_length} for found in (words, characters)]
    return {"wer": 100 * words.rate, "cer": 100 * characters.rate, "words": counts[0], "characters": counts[1]}


def evaluate_split(
    model: Any,
    processor: Any,
    utterances: Sequence[Utterance],
    arguments: EvaluationArguments,
    scorer: Scorer | None = None,
    lexicon: Pronunciations | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures error rates and times of each search on one split; also gives a row per utterance with all texts."""
    audio = sum(utterance.seconds or 0 for utterance in utterances)
    result: dict[str, Any] = {"utterances": len(utterances), "audio_hours": audio / 3600, "searches": {}}
    rows: list[dict[str, Any]] = [{"id": u.id, "seconds": u.seconds, "reference": u.text} for u in utterances]
    chunks = None
    if arguments.chunk_seconds is not None:
        if not isinstance(model, ConformerPreTrainedModel):
            raise ValueError(f"chunk_seconds is for Conformers, got {type(model).__name__}: leave it out")
        frame = model.config.samples_per_frame / processor.feature_extractor.sampling_rate
        chunks = Chunks.lasting(arguments.chunk_seconds, frame, arguments.left_chunks)
        check_chunks(model.encoder, chunks)
    options: dict[str, Any] = {"lexicon": lexicon, "chunks": chunks}
    options["batch_seconds"] = arguments.per_device_eval_batch_seconds
    # Do not time what runs once per process, such as compiling a kernel.
    recognise(model, processor, sorted(utterances, key=lambda u: u.seconds or 0)[:1], **options)
    searches: dict[str, dict[str, Any]] = {"greedy": {}}
    beam_size = arguments.beam_size or (1 if scorer is None else scorer.beam_size)
    if beam_size > 1:
        names = ("language_model", "known_words", "hotwords")
        with_words = [name.replace("_", " ") for name in names if getattr(arguments, name)]
        searches[", ".join([f"beam {beam_size}", *with_words])] = {"beam_size": beam_size, "scorer": scorer}
    for name, search in searches.items():
        texts, seconds = recognise(model, processor, utterances, is_shared=True, **search, **options)
        rates = error_rates([utterance.text for utterance in utterances], texts)
        result["searches"][name] = {**rates, "seconds": seconds, "real_time_factor": seconds / audio}
        for row, text in zip(rows, texts, strict=True):
            row[name] = text
    return result, rows


def report_lines(content: dict[str, Any]) -> list[str]:
    """Writes the Markdown report, with one row per split and search."""
    rows, skipped = [], []
    for split, result in content["splits"].items():
        skipped += [f"- {split}: {name}" for name in result["skipped"]]
        for search, found in result["searches"].items():
            cells = [split, search]
            for rate, unit in (("wer", "words"), ("cer", "characters")):
                kinds = (str(found[unit][kind]) for kind in ("substitutions", "deletions", "insertions"))
                cells += [f"{found[rate]:.2f}", " / ".join(kinds)]
            times = [f"{result['audio_hours']:.3f}", f"{found['seconds']:.1f}", f"{found['real_time_factor']:.4f}"]
            rows.append([*cells, *times, str(len(result["skipped"]))])
    header = ["split", "search", "WER %", "S / D / I", "CER %", "S / D / I", "hours", "seconds", "RTF", "left out"]
    options = f", {json.dumps(content['favor'])}" if content["favor"] else ""
    said = "one process" if (number := processes().num_processes) == 1 else f"{number} processes that share the batches"
    return [
        f"# Speech recognition of {content['model']}",
        "",
        f"- {content['architecture']}, {content['parameters']} parameters, {content['device']}",
        f"- Attention: `{content['attn_implementation']}`{options}",
        *([] if content["chunks"] is None else [f"- In chunks, as in a stream: {content['chunks']}"]),
        "",
        *report.table(header, rows),
        "",
        "S / D / I: substitutions, deletions, insertions, in words and in characters. Seconds: reading and decoding",
        f"the files, features, model and search together, in {said}, after a first utterance that is not timed.",
        "RTF, the real-time factor, is these seconds over those of the audio.",
        *(["", "Left out:", "", *skipped] if skipped else []),
    ]


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    backend, arguments = parse_arguments(argv)
    folder, max_bad = Path(arguments.output_dir), SpeechDataArguments(max_bad=arguments.max_bad).limit
    if arguments.data_dir is not None and folder.resolve() == Path(arguments.data_dir).resolve():
        raise ValueError(f"output_dir must not be data_dir, whose manifests have the names of results, got {folder}")
    hold_together(folder)
    model, processor = load(arguments.model_name_or_path, backend, arguments.seed)
    model.to(arguments.device)
    names = ("known_words", "language_model", "lm_weight", "word_score", "hotwords", "hotword_weight")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    lexicon = lexicon_of(arguments.lexicon, arguments.model_name_or_path)
    scorer = searched_words(model, processor.tokenizer, arguments.beam_size, lexicon=lexicon, **options)
    before = "all" if arguments.left_chunks is None else arguments.left_chunks
    content: dict[str, Any] = {
        "model": Path(arguments.model_name_or_path).resolve().name,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "device": model.device.type,
        "attn_implementation": model.config._attn_implementation,
        "favor": model.config.favor if model.config._attn_implementation in favor.BACKENDS else None,
        "chunks": None if arguments.chunk_seconds is None else f"{arguments.chunk_seconds:g} s, {before} before each",
        "splits": {},
    }
    options = {"max_bad": max_bad, "sampling_rate": processor.feature_extractor.sampling_rate}
    for split in arguments.eval_splits:
        with processes().main_process_first():
            utterances, skipped = load_speech(arguments.data_dir or HUB, split, prepared=folder / "prepared", **options)
        utterances = evenly_spaced(utterances, arguments.max_eval_samples)
        utterances = long_enough(utterances, processor, skipped, model.subsampled_lengths)
        result, rows = evaluate_split(model, processor, utterances, arguments, scorer, lexicon)
        content["splits"][split] = {**result, "skipped": skipped.reasons}
        if processes().is_main_process:
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    content |= report.context_of("favor.eval.asr", argv, ("transformers", "jiwer"), ["--data_dir"])
    report.write(folder, "asr", report_lines(content), content, ())
    processes().print("\n".join(report_lines(content)))
    return 0


cli = shared_program("favor.eval.asr", main)


if __name__ == "__main__":
    cli()
