"""Long recordings in one pass of a Parakeet (FastConformer): landmarks, local and exact attention.

    python -m favor.eval.positions.speech --task time                      noise, full width, 2 layers, random weights
    python -m favor.eval.positions.speech --task error --data_dir DATA     character errors of a small one, trained here

The first task gives time and memory of a pass by minutes of audio; each cell runs in a process of its own on the CPU.
The second trains a small Parakeet with exact attention, on utterances and later also on joined ones of 20 to 60
seconds, and then changes its attention without training. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from favor.eval.common import report
from favor.eval.common.isolated import Failure, isolated, unavailable
from favor.eval.common.program import add_results
from favor.eval.positions import speech_model
from favor.eval.positions.speech_cell import COMPARED, TIMED, configured, measure, pair_bytes
from favor.train.common.program import Parser, program
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import ErrorCounts, character_errors

MINUTES = {"time": [10.0, 30.0, 60.0, 180.0], "error": [1.0, 5.0]}
LIMIT = 12e9  # bytes of a process, without its libraries
ENOUGH = 8e9  # of 60 minutes
STEPS = 3000
POINTS = 0.5  # of the character error rate that landmarks may lose


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.positions.speech", __doc__)
    add = parser.add_argument
    add("--task", choices=list(MINUTES), default="time", help="what is measured")
    add("--minutes", type=float, nargs="+", metavar="M", help="length of recordings; default: that of the tables")
    add("--data_dir", type=Path, help="folder in LibriSpeech's layout, or with manifests, for --task error")
    add("--train_split", default="train", help="split of the data to train on")
    add("--eval_splits", nargs="+", default=["dev", "test"], help="splits of the data to transcribe")
    add("--model_name_or_path", help="folder of the model of an earlier run; by default a new one is trained")
    add("--max_train_steps", type=int, help=f"steps of the training; default: {STEPS}, or 0 if a model is given")
    add("--threads", type=int, default=1, help="threads of the CPU")
    add("--seed", type=int, default=0, help="seed of weights, noise, batches and masks")
    add_results(parser, "positions_speech")
    arguments = parser.parse_args(argv)
    arguments.minutes = sorted(set(arguments.minutes or MINUTES[arguments.task]))
    if arguments.max_train_steps is None:
        arguments.max_train_steps = STEPS if arguments.model_name_or_path is None else 0
    if min(*arguments.minutes, arguments.threads, arguments.max_train_steps + 1) <= 0:
        parser.error("--minutes and --threads must be positive, --max_train_steps at least 0")
    if arguments.task == "error" and arguments.data_dir is None:
        parser.error("--task error needs --data_dir")
    if arguments.task == "time" and (problem := unavailable()) is not None:
        parser.error(problem)
    return arguments


def time_cells(arguments: argparse.Namespace, records: report.Records) -> list[dict[str, Any]]:
    """Measures every way and length that may fit."""
    cells = []
    for minutes in arguments.minutes:
        for label, (backend, _) in TIMED.items():
            of = {"label": label, "minutes": minutes}
            found = records.find(of)
            if found is None and backend == "sdpa" and pair_bytes(minutes) > LIMIT:
                found = {"skipped": f"{pair_bytes(minutes) / 1e9:,.0f} GB by formula"}
            elif found is None:
                answer = isolated(LIMIT, arguments.threads, measure, label, minutes, arguments.seed)
                found = {"skipped": answer.reason} if isinstance(answer, Failure) else answer
                records.add(of, found)
            cells.append({**of, **found})
            print(cells[-1], flush=True)
    return cells


def time_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Writes the table of times and memory."""
    rows = []
    for minutes in dict.fromkeys(cell["minutes"] for cell in cells):
        own = [cell for cell in cells if cell["minutes"] == minutes]
        frames = max(cell.get("frames", 0) for cell in own)
        shown = [
            cell.get("skipped") or f"{cell['cpu_seconds']:.0f} ({cell['seconds']:.0f}), {cell['resident'] / 1e9:.2f}"
            for cell in own
        ]
        rows.append([f"{minutes:g}", f"{frames:,}", *shown])
    text = (
        "An encoder of Parakeet's full width, 2 of its layers, random weights, float32, subsampling 8, one pass over "
        "noise with its mask. Cells: seconds of the CPU (of the wall's clock), then the peak of the process in GB "
        "(10^9 bytes), libraries, weights and features included; each in a process of its own. By formula: bytes of "
        "the biases of all pairs that exact attention holds at once, 16 H L^2."
    )
    return [text, "", *report.table(["minutes", "frames", *TIMED], rows)]


def time_checks(cells: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks the memory of an hour."""
    hours = [cell for cell in cells if cell["minutes"] == 60 and cell["label"].startswith("landmarks")]
    return [
        report.Check(
            f"{cell['label']}: an hour of audio in less than {ENOUGH / 1e9:g} GB",
            cell.get("skipped") or f"{cell['resident'] / 1e9:.2f} GB",
            cell.get("resident", ENOUGH) < ENOUGH,
        )
        for cell in hours
    ]


def trained(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Makes or loads the model, trains it, and saves it beside the results."""
    if not arguments.max_train_steps and arguments.model_name_or_path is not None:
        return speech_model.load(arguments.model_name_or_path)
    utterances = load_speech(arguments.data_dir, arguments.train_split)[0]
    if arguments.model_name_or_path is not None:
        model, processor = speech_model.load(arguments.model_name_or_path)
    else:
        model, processor = speech_model.build([utterance.text for utterance in utterances], arguments.seed)
    heard = speech_model.hear(utterances, processor.feature_extractor)
    folder = arguments.output_dir / f"{arguments.name}_model"
    is_new = arguments.model_name_or_path is None
    speech_model.train(model, processor, heard, arguments.max_train_steps, arguments.seed, folder, is_new)
    return model, processor


def error_cells(arguments: argparse.Namespace, records: report.Records) -> list[dict[str, Any]]:
    """Transcribes recordings with each attention, and compares outputs of the encoder with those of exact attention."""
    exact, processor = trained(arguments)
    models = {label: configured(copy.deepcopy(exact).eval(), *way) for label, way in COMPARED.items()}
    utterances = [own for split in arguments.eval_splits for own in load_speech(arguments.data_dir, split)[0]]
    heard = speech_model.hear(utterances, processor.feature_extractor)
    cells = []
    for minutes in arguments.minutes:
        for place, recording in enumerate(speech_model.recordings(heard, 60 * minutes)):
            wanted = None
            for label, model in models.items():
                of = {"label": label, "minutes": minutes, "place": place}
                found = records.find(of)
                if found is None:
                    if wanted is None and model is not models[next(iter(COMPARED))]:
                        wanted = speech_model.read(models[next(iter(COMPARED))], processor, recording)[1]
                    text, out = speech_model.read(model, processor, recording)
                    wanted = out if wanted is None else wanted
                    counts = character_errors([recording.text], [text])
                    found = {"counts": vars(counts), "error": float((out - wanted).norm() / wanted.norm())}
                    records.add(of, found)
                cells.append({**of, **found})
            print({key: cells[-1][key] for key in ("minutes", "place")}, flush=True)
    return cells


def rates(cells: Sequence[dict[str, Any]], minutes: float) -> dict[str, dict[str, float]]:
    """Sums up recordings of a length: "cer" in percent, "mean" and "p90" of errors of the output, "number"."""
    found = {}
    for label in COMPARED:
        own = [cell for cell in cells if (cell["label"], cell["minutes"]) == (label, minutes)]
        if own:
            rate = sum((ErrorCounts(**cell["counts"]) for cell in own), ErrorCounts()).rate
            errors = [cell["error"] for cell in own]
            spread = {"mean": float(np.mean(errors)), "p90": float(np.quantile(errors, 0.9))}
            found[label] = {"cer": 100 * rate, **spread, "number": len(own)}
    return found


def error_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Writes the table of error rates."""
    lengths = list(dict.fromkeys(cell["minutes"] for cell in cells))
    summed = {minutes: rates(cells, minutes) for minutes in lengths}
    rows = [
        [label, *("{cer:.2f}, {mean:.3f} ({p90:.3f})".format(**summed[minutes][label]) for minutes in lengths)]
        for label in COMPARED
    ]
    names = [f"{minutes:g} minutes, {next(iter(summed[minutes].values()))['number']} recordings" for minutes in lengths]
    text = (
        "A Parakeet for CTC with characters, trained with exact attention; utterances of a speaker joined to "
        "recordings, which overlap where a speaker has too little; one pass, greedy search, without training of the "
        "attention that is compared. Cells: character error rate in %, then the relative error of the encoder's "
        "output, mean (90th percentile)."
    )
    return [text, "", *report.table(["attention", *names], rows)]


def error_checks(cells: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks the character error rate of landmarks in the longest recordings."""
    if not cells:
        return []
    minutes = cells[-1]["minutes"]
    exact, found = (rates(cells, minutes)[label]["cer"] for label in ("exact (sdpa)", "landmarks"))
    statement = f"at {minutes:g} minutes landmarks lose at most {POINTS} points of exact attention"
    return [report.Check(statement, f"{found:.2f} and {exact:.2f} %", found - exact <= POINTS)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a task and writes its table."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    records = report.Records(arguments.output_dir / f"{arguments.name}.jsonl")
    load = [os.getloadavg()[0]]
    if arguments.task == "time":
        cells = time_cells(arguments, records)
        lines, checks = time_lines(cells), time_checks(cells)
    else:
        cells = error_cells(arguments, records)
        lines, checks = error_lines(cells), error_checks(cells)
    load.append(os.getloadavg()[0])
    folders = ["--data_dir"]
    context = report.context_of("favor.eval.positions.speech", argv, ("transformers", "jiwer"), folders)
    content = {**context, "seed": arguments.seed, "load": load, "cells": cells}
    loads = report.load_line(load, "a pass", "seconds") if arguments.task == "time" else f"Seed {arguments.seed}."
    return report.finish(arguments, ["## Parakeet", "", *lines, "", loads], content, checks)


cli = program("favor.eval.positions.speech", main)


if __name__ == "__main__":
    cli()
