"""Whole chapters in one pass of a Conformer: time and peak memory by minutes of audio, linear and exact attention.

    python -m favor.eval.long_form                                            noise, random weights
    python -m favor.eval.long_form --data_dir DATA --split test --model_name_or_path MODEL       and word error rates

Utterances of one speaker's chapters, in order, make one recording. Each cell runs in processes of its own on the CPU,
one for its time and one for its memory. Nothing is timed unless, at the shortest duration, all logits are finite and
those of sdpa and eager agree. A cell that needs too much memory is skipped or fails; the others still run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from favor.eval.common import report
from favor.eval.common.launch import Backend
from favor.eval.common.program import add_results
from favor.eval.speech import long_form_report
from favor.eval.speech.long_form_cell import (
    RATE,
    Failure,
    Recording,
    Setup,
    available,
    check,
    isolated,
    measure_memory,
    measure_time,
    transcripts,
)
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor
from favor.models.conformer.configuration_conformer import subsampled_frames
from favor.train.common.program import Parser, program
from favor.train.speech.arguments import SIZES
from favor.train.speech.data import Utterance
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors
from favor_command.saved import read_config

EXACT = ("sdpa", "eager")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.long_form", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, nargs="+", default=[1, 2, 5, 10, 20, 60], metavar="M", help="minutes of audio")
    add("--backends", nargs="+", default=["favor#", *EXACT], help="sdpa, eager, favor#, favor+, favor++, favor#:sderf")
    add("--preset", choices=SIZES, default="small", help="size of a model with random weights")
    add("--model_name_or_path", help="a trained ConformerForCTC in place of the preset")
    add("--num_features", type=int, default=128, help="random features per head of the FAVOR backends")
    add("--data_dir", type=Path, help="LibriSpeech's folder or one with manifests; default: noise")
    add("--split", default="test", help="split of the data")
    add("--max_gigabytes", type=float, default=16.0, help="greatest memory of a process, without its libraries")
    add("--max_exact_minutes", type=float, default=20.0, help="longest audio for sdpa and eager")
    add("--repeats", type=int, default=3, help="passes over recordings of up to 2 minutes")
    add("--long_repeats", type=int, default=1, help="passes over longer recordings")
    add("--threads", type=int, help="CPU threads; default: those of torch")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "long_form_cpu")
    arguments = parser.parse_args(argv)
    arguments.threads = torch.get_num_threads() if arguments.threads is None else arguments.threads
    try:
        arguments.backends = [Backend.parse(text) for text in dict.fromkeys(arguments.backends)]
    except ValueError as error:
        parser.error(str(error))
    arguments.minutes = sorted(set(arguments.minutes))
    if min(*arguments.minutes, arguments.max_gigabytes, arguments.max_exact_minutes) <= 0:
        parser.error("--minutes, --max_gigabytes and --max_exact_minutes must be positive")
    if min(arguments.repeats, arguments.long_repeats, arguments.threads, arguments.num_features) < 1:
        parser.error("--repeats, --long_repeats, --threads and --num_features must be at least 1")

    if (problem := available()) is not None:
        parser.error(problem)
    return arguments


TOLERANCE = 1e-3
# Logits, their scaled copy or softmax, and the rest of an earlier one: about three matrices L x L per head.
EAGER_MATRICES = 3


def longest_speaker(utterances: Sequence[Utterance]) -> list[Utterance]:
    """Selects the utterances of the speaker who speaks longest, in order of chapters and names."""
    lengths: dict[str, float] = {}
    for utterance in utterances:
        speaker = utterance.speaker or ""
        lengths[speaker] = lengths.get(speaker, 0.0) + (utterance.seconds or 0.0)
    chosen = max(lengths, key=lambda speaker: lengths[speaker])
    own = [utterance for utterance in utterances if (utterance.speaker or "") == chosen]
    return sorted(own, key=lambda utterance: (utterance.chapter or "", utterance.id))


def encoder_frames(recording: Recording) -> int:
    """Counts the encoder frames L of a recording, with the default windows and subsampling."""
    return subsampled_frames(ConformerFeatureExtractor().num_frames(round(recording.seconds * RATE)))


def refusal(backend: Backend, minutes: float, frames: int, heads: int, arguments: argparse.Namespace) -> str | None:
    """Says why a cell is not tried; None if it is tried.

    Args:
        backend: backend of the cell.
        minutes: length of its recording.
        frames: frames of the encoder, L.
        heads: heads of attention; eager needs three matrices of heads x L x L numbers.
        arguments: with `max_gigabytes` and `max_quadratic_minutes`.
    """
    if backend.name in EXACT and minutes > arguments.max_exact_minutes:
        return f"its time is quadratic, the limit is {arguments.max_exact_minutes:g} minutes"
    needed = EAGER_MATRICES * 4.0 * heads * frames**2 / 1e9 if backend.name == "eager" else 0.0
    if needed > arguments.max_gigabytes:
        return f"it needs about {needed:.3g} GB, the limit is {arguments.max_gigabytes:g} GB"
    return None


def problem(answer: dict[str, Any] | Failure) -> str | None:
    """Says what is wrong with the logits that `long_form_cell.check` found; None if nothing is wrong."""
    if isinstance(answer, Failure):
        return answer.reason
    broken = [label for label, finite in answer["finite"].items() if not finite]
    if broken:
        return f"logits of {', '.join(broken)} are not finite"
    difference = answer["difference"]
    if difference is not None and not difference <= TOLERANCE:
        return f"logits of sdpa and eager differ by {difference:.2g}, more than {TOLERANCE:g}"
    return None


def run_cell(
    arguments: argparse.Namespace, setup: Setup, backend: Backend, minutes: float, recording: Recording, heads: int
) -> dict[str, Any]:
    """Measures one cell; its "status" is "ok", "failed" or "skipped", the last two with a "reason".

    Args:
        arguments: of the program.
        setup: of all cells.
        backend: backend of the cell.
        minutes: length of the recording.
        recording: the audio.
        heads: heads of attention.
    """
    frames = encoder_frames(recording)
    cell: dict[str, Any] = {"backend": backend.label, "minutes": minutes, "seconds": recording.seconds}
    cell |= {"frames": frames, "repeated": recording.repeated}
    if (reason := refusal(backend, minutes, frames, heads, arguments)) is not None:
        return cell | {"status": "skipped", "reason": reason}
    repeats = arguments.repeats if minutes <= 2 else arguments.long_repeats
    limit = 1e9 * arguments.max_gigabytes
    found = isolated(limit, setup.threads, measure_time, setup, backend, recording, repeats)
    memory = found
    if not isinstance(found, Failure):
        memory = isolated(limit, setup.threads, measure_memory, setup, backend, recording)
    if isinstance(memory, Failure):
        return cell | {"status": "failed", "reason": memory.reason}
    return cell | {"status": "ok", "repeats": repeats, **found, "bytes": memory}


def add_word_errors(cells: list[dict[str, Any]], setup: Setup, backends: Sequence[Backend], recordings: Any) -> None:
    """Adds "wer" of the long pass and "utterance_wer" of its utterances one by one, as fractions (less is better).

    Args:
        cells: entries of the results, to be added to.
        setup: of all cells.
        backends: all backends.
        recordings: by minutes.
    """
    for backend in backends:
        own = [cell for cell in cells if cell["backend"] == backend.label and cell["status"] == "ok"]
        if not own:
            continue
        longest = recordings[own[-1]["minutes"]].utterances
        unique = list({utterance.id: utterance for utterance in longest}.values())
        texts = isolated(None, setup.threads, transcripts, setup, backend, unique)
        if isinstance(texts, Failure):
            print(f"{backend.label}: no word error rates of single utterances, {texts.reason}", flush=True)
            continue
        heard = {utterance.id: text for utterance, text in zip(unique, texts, strict=True)}
        for cell in own:
            recording = recordings[cell["minutes"]]
            references = [utterance.text for utterance in recording.utterances]
            hypotheses = [heard[utterance.id] for utterance in recording.utterances]
            cell["utterance_wer"] = word_errors(references, hypotheses).rate
            cell["wer"] = word_errors([recording.text], [cell["text"]]).rate


def progress(cell: dict[str, Any]) -> str:
    """Describes one cell in a line."""
    name = f"{cell['backend']} at {cell['minutes']:g} minutes"
    if cell["status"] != "ok":
        return f"{name} {cell['status']}: {cell['reason']}"
    clocks = f"{cell['pass']['seconds']:.3g} s ({cell['pass']['cpu_seconds']:.3g} s of the CPU)"
    return f"{name}: {clocks}, {cell['bytes']['pass'] / 1e6:.4g} MB"


def make_recordings(arguments: argparse.Namespace) -> dict[float, Recording]:
    """Makes a recording of each duration, by minutes; raises ValueError for data that cannot be read."""
    if arguments.data_dir is None:
        return {minutes: Recording(60 * minutes, seed=arguments.seed) for minutes in arguments.minutes}
    utterances = longest_speaker(load_speech(arguments.data_dir, arguments.split)[0])
    return {minutes: Recording.of(utterances, 60 * minutes) for minutes in arguments.minutes}


def attention_heads(setup: Setup) -> int:
    """Counts the attention heads; raises ValueError if a checkpoint is not a `ConformerForCTC` that is not causal."""
    if setup.model_name_or_path is None:
        return ConformerConfig.preset(setup.preset).num_attention_heads
    config = read_config(setup.model_name_or_path)
    if not isinstance(config, ConformerConfig) or config.architectures != ["ConformerForCTC"] or config.causal:
        raise ValueError(
            f"model_name_or_path must be a ConformerForCTC that is not causal, got {config.architectures}, "
            f"causal={getattr(config, 'causal', None)}, in {setup.model_name_or_path}."
        )
    return config.num_attention_heads


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    given = ("preset", "model_name_or_path", "num_features", "seed", "threads")
    setup = Setup(**{name: getattr(arguments, name) for name in given})
    torch.set_num_threads(setup.threads)
    heads, recordings = attention_heads(setup), make_recordings(arguments)
    load = [os.getloadavg()[0]]
    shortest = recordings[arguments.minutes[0]]
    tried = (arguments.minutes[0], encoder_frames(shortest), heads, arguments)
    checked = [backend for backend in arguments.backends if refusal(backend, *tried) is None]
    answer = isolated(None, setup.threads, check, setup, checked, shortest)
    if (wrong := problem(answer)) is not None:
        print(f"{arguments.minutes[0]:g} minutes: {wrong}: no times are given")
        return 1
    cells = []
    for minutes, recording in recordings.items():
        for backend in arguments.backends:
            cells.append(run_cell(arguments, setup, backend, minutes, recording, heads))
            print(progress(cells[-1]), flush=True)
    if setup.model_name_or_path is not None and arguments.data_dir is not None:
        add_word_errors(cells, setup, arguments.backends, recordings)
    load.append(os.getloadavg()[0])
    folders = ["--data_dir"]
    if setup.model_name_or_path is not None and Path(setup.model_name_or_path).is_dir():
        folders.append("--model_name_or_path")
    command = report.shown_command("favor.eval.long_form", words, folders, ["--output_dir"])
    found = long_form_report.checks(cells, arguments.max_gigabytes)
    lines = long_form_report.lines(cells, answer, arguments, load)
    content = {
        **report.context(command, ("transformers", "numpy")),
        "seed": arguments.seed,
        "preset": None if setup.model_name_or_path else setup.preset,
        "num_features": setup.num_features,
        "load": load,
        "check": answer,
        "cells": [{key: value for key, value in cell.items() if key != "text"} for cell in cells],
    }
    report.write(arguments.output_dir, arguments.name, lines, content, found)
    long_form_report.plot(cells, arguments.output_dir / f"{arguments.name}.png")
    print("\n".join(["", *lines, "", *(each.line() for each in found)]))
    return int(not all(each.holds for each in found))


cli = program("favor.eval.long_form", main)


if __name__ == "__main__":
    cli()
