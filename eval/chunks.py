"""Error rates of saved Conformers by the length of the chunks that they hear, and the curves of their trainings."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval import asr
from favor.eval.common import report
from favor.eval.options.chunks import parse_arguments
from favor.train.common import checkpoint
from favor.train.common.arguments import BackendArguments
from favor.train.common.program import program
from favor.train.speech.data import Utterance
from favor.train.speech.sources import load_speech

WHOLE = "whole"


def measure(path: str, splits: dict[str, list[Utterance]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures WER and CER in percent of one model, by split and length of a chunk, and reads its training.

    Args:
        path: folder of the model.
        splits: utterances of each.
        arguments: of the program.
    """
    model, processor = asr.load(path, BackendArguments())
    rates: dict[str, dict[str, Any]] = {}
    for split, utterances in splits.items():
        rates[split] = {}
        for seconds in (None, *arguments.chunk_seconds):
            left = None if seconds is None else arguments.left_chunks
            chunks = asr.chunks_of(model, processor, seconds, left)
            texts, _ = asr.recognise(model, processor, utterances, chunks=chunks)
            found = asr.error_rates([utterance.text for utterance in utterances], texts)
            rates[split][WHOLE if seconds is None else f"{seconds:g}"] = {name: found[name] for name in ("wer", "cer")}
    results = checkpoint.read_json(Path(path) / checkpoint.RESULTS)
    return {
        "parameters": model.num_parameters(),
        "rates": rates,
        "training": {name: results[name] for name in ("history", "steps", "seconds_per_step")}
        | {"command": training_command(results["command"])},
    }


def training_command(command: str) -> str:
    """Writes the command of a training without the paths of the machine it ran on."""
    words = report.local_names(shlex.split(command))
    return report.shown_command("favor.train.asr", words[3:], ["--data_dir"], ["--output_dir"])


def rates_table(models: dict[str, dict[str, Any]]) -> list[str]:
    """Makes the table of error rates: a row per split and model, a column per length of a chunk."""
    first = next(iter(next(iter(models.values()))["rates"].values()))
    header = ["split", "model", *(length if length == WHOLE else f"{length} s" for length in first)]
    splits = next(iter(models.values()))["rates"]
    rows = [
        [split, name, *(f"{own['wer']:.1f} ({own['cer']:.1f})" for own in model["rates"][split].values())]
        for split in splits
        for name, model in models.items()
    ]
    return report.table(header, rows)


def curve_table(history: Sequence[dict[str, Any]]) -> list[str]:
    """Makes the table of a training: at each evaluation the mean loss since the one before, and the error rates."""
    known = [entry for entry in history if "metrics" in entry]
    rows, step, total = [], 0, 0.0
    for entry in known:
        now = entry["train_loss"] * entry["step"]
        loss = (now - total) / max(1, entry["step"] - step)
        rows.append([str(entry["step"]), f"{loss:.3f}", *(f"{value:.1f}" for value in entry["metrics"].values())])
        step, total = entry["step"], now
    return report.table(["step", "loss", *(name.replace("_", " ") for name in known[-1]["metrics"])], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    splits = {}
    for split in arguments.eval_splits:
        utterances, _ = load_speech(arguments.data_dir, split)
        splits[split] = asr.evenly_spaced(utterances, arguments.max_eval_samples)
    models = {Path(path).resolve().name: measure(path, splits, arguments) for path in arguments.models}
    before = "all chunks" if arguments.left_chunks is None else f"{arguments.left_chunks} chunks"
    sizes = ", ".join(f"{split} {len(part)}" for split, part in splits.items())
    facts = f"WER % (CER %) of greedy search, less is better. Utterances: {sizes}."
    if arguments.chunk_seconds:
        facts += f" In chunks of the given length, a chunk sees itself and {before} before."
    lines = [f"# Error rates of {', '.join(models)}", "", facts, "", *rates_table(models)]
    for name, model in models.items():
        training = model["training"]
        pace = f"{training['steps']} steps of {training['seconds_per_step']:.2f} s (median)"
        size = f"{model['parameters']} parameters, {pace}."
        lines += ["", f"## Training of {name}", "", size, "", "```bash", training["command"], "```", ""]
        lines += curve_table(training["history"])
    command = report.shown_command("favor.eval.chunks", report.local_names(words), ["--data_dir"], ["--output_dir"])
    content = report.context(command, ("transformers", "jiwer")) | {"models": models, "facts": facts}
    report.write(arguments.output_dir, arguments.name, lines, content, [])
    print("\n".join(lines))
    return 0


cli = program("favor.eval.chunks", main)


if __name__ == "__main__":
    cli()
