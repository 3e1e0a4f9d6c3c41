"""Whole chapters in one pass of a Conformer: time and peak memory by minutes of audio, linear and exact attention.

    python -m favor.eval.long_form                                            noise, random weights
    python -m favor.eval.long_form --data_dir DATA --split test --model_name_or_path MODEL       and word error rates

Utterances of one speaker's chapters, in order, make one recording. Each cell runs in processes of its own on the CPU,
one for its time and one for its memory. Nothing is timed unless, at the shortest duration, all logits are finite and
those of sdpa and eager agree. A cell that needs too much memory fails; the others still run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from favor.eval.common import report
from favor.eval.common.isolated import Failure, isolated, unavailable
from favor.eval.common.launch import Backend
from favor.eval.common.program import add_results
from favor.eval.speech.long_form_cell import Recording, Setup, check, measure_memory, measure_time, transcripts
from favor.models.conformer import ConformerConfig
from favor.train.common.program import Parser, program
from favor.train.speech.data import Utterance
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors
from favor_command.saved import read_config

EXACT = ("sdpa", "eager")
TOLERANCE = 1e-3
# Passes over recordings of up to 2 minutes, and over longer ones.
REPEATS, LONG_REPEATS = 3, 1
# Of eager attention's peak memory, what a linear one may need.
MEMORY_SHARE = 0.25
Cell = dict[str, Any]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.long_form", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, nargs="+", default=[1, 2, 5, 10, 20, 60], metavar="M", help="minutes of audio")
    add("--backends", nargs="+", default=["favor#", *EXACT], help="sdpa, eager, favor#, favor+, favor++, favor#:sderf")
    Setup.add_options(parser)
    add("--data_dir", type=Path, help="LibriSpeech's folder or one with manifests; default: noise")
    add("--split", default="test", help="split of the data")
    add("--max_gigabytes", type=float, default=16.0, help="greatest memory of a process, without its libraries")
    add("--max_exact_minutes", type=float, default=20.0, help="longest audio for sdpa and eager")
    add_results(parser, "long_form_cpu")
    arguments = parser.parse_args(argv)
    try:
        arguments.backends = [Backend.parse(text) for text in dict.fromkeys(arguments.backends)]
    except ValueError as error:
        parser.error(str(error))
    arguments.minutes = sorted(set(arguments.minutes))
    if min(*arguments.minutes, arguments.max_gigabytes, arguments.max_exact_minutes) <= 0:
        parser.error("--minutes, --max_gigabytes and --max_exact_minutes must be positive")
    if min(arguments.threads, arguments.num_features) < 1:
        parser.error("--threads and --num_features must be at least 1")
    if (problem := unavailable()) is not None:
        parser.error(problem)
    return arguments


def longest_speaker(utterances: Sequence[Utterance]) -> list[Utterance]:
    """Selects the utterances of the speaker who speaks longest, in order of chapters and names."""
    speakers: dict[str, list[Utterance]] = {}
    for utterance in utterances:
        speakers.setdefault(utterance.speaker or "", []).append(utterance)
    own = max(speakers.values(), key=lambda spoken: sum(utterance.seconds or 0.0 for utterance in spoken))
    return sorted(own, key=lambda utterance: (utterance.chapter or "", utterance.id))


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
    arguments: argparse.Namespace, setup: Setup, backend: Backend, minutes: float, recording: Recording
) -> Cell:
    """Measures one cell; its "status" is "ok", "failed" or "skipped", the last two with a "reason"."""
    cell: Cell = {"backend": backend.label, "minutes": minutes, "seconds": recording.seconds}
    cell |= {"repeated": recording.repeated}
    if backend.name in EXACT and minutes > arguments.max_exact_minutes:
        reason = f"its time is quadratic, the limit is {arguments.max_exact_minutes:g} minutes"
        return cell | {"status": "skipped", "reason": reason}
    repeats, limit = REPEATS if minutes <= 2 else LONG_REPEATS, 1e9 * arguments.max_gigabytes
    memory = found = isolated(limit, setup.threads, measure_time, setup, backend, recording, repeats)
    if not isinstance(found, Failure):
        memory = isolated(limit, setup.threads, measure_memory, setup, backend, recording)
    if isinstance(memory, Failure):
        return cell | {"status": "failed", "reason": memory.reason}
    return cell | {"status": "ok", "repeats": repeats, **found, "bytes": memory}


def add_word_errors(cells: list[Cell], setup: Setup, backends: Sequence[Backend], recordings: Any) -> None:
    """Adds "wer" of the long pass and "utterance_wer" of its utterances one by one, as fractions (less is better)."""
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


def progress(cell: Cell) -> str:
    """Describes one cell in a line."""
    name = f"{cell['backend']} at {cell['minutes']:g} minutes"
    if cell["status"] != "ok":
        return f"{name} {cell['status']}: {cell['reason']}"
    clocks = f"{cell['pass']['seconds']:.3g} s ({cell['pass']['cpu_seconds']:.3g} s of the CPU)"
    return f"{name}: {clocks}, {cell['bytes']['pass'] / 1e6:.4g} MB"


def check_model(setup: Setup) -> None:
    """Raises ValueError if a checkpoint is not a `ConformerForCTC` that is not causal."""
    if setup.model_name_or_path is None:
        return
    config = read_config(setup.model_name_or_path)
    if not isinstance(config, ConformerConfig) or config.architectures != ["ConformerForCTC"] or config.causal:
        raise ValueError(
            f"model_name_or_path must be a ConformerForCTC that is not causal, got {config.architectures}, "
            f"causal={getattr(config, 'causal', None)}, in {setup.model_name_or_path}."
        )


def report_lines(
    cells: Sequence[Cell], check: dict[str, Any], setup: Setup, arguments: argparse.Namespace, load: Sequence[float]
) -> list[str]:
    """Writes the Markdown report."""
    audio = "noise"
    if arguments.data_dir is not None:
        audio = f"utterances of one speaker of {arguments.split}, one after another"
    settings = (
        f"ConformerForCTC, {setup.label}; {setup.num_features} features in the FAVOR backends, float32, batch 1, no "
        f"padding; audio: {audio}. Medians of {REPEATS} passes up to 2 minutes and {LONG_REPEATS} "
        "above. Time and memory of a cell each come from a process of its own, after one short pass; the features' "
        "time is not in that of the pass. Memory is the high-water mark of resident memory, while free blocks go back "
        f"to the system at once. A process may take {arguments.max_gigabytes:g} GB beyond its libraries. "
        f"{report.load_line(load, 'a pass', 'seconds')}"
    )
    apart = {label: own for label, own in check["distance"].items() if own is not None and label != "sdpa"}
    said = "logits of {} differ from those of sdpa by {:.2g} (relative norm)"
    distances = [said.format(*pair) for pair in apart.items()]
    lines = ["# Whole chapters in one pass", "", settings, ""]
    if distances:
        lines += [f"At {cells[0]['minutes']:g} minutes {', '.join(distances)}.", ""]
    times = _table(cells, lambda cell: "{seconds:.3g} ({cpu_seconds:.3g})".format(**cell["pass"]))
    sizes = _table(cells, lambda cell: f"{cell['bytes']['pass'] / 1e6:.0f} ({cell['bytes']['total'] / 1e6:.0f})")
    lines += ["Seconds of one pass, in brackets of the CPU alone:", "", *times]
    memory = "Peak memory of one pass in MB (10^6 bytes; output included, features not), in brackets over the loaded"
    lines += [f"{memory} model, audio and features included:", "", *sizes]
    lines += ["Recordings and their features:", "", *_features(cells), ""]
    if any("wer" in cell for cell in cells):
        title = "Word error rate of the long pass in percent, in brackets of the same utterances one by one:"
        lines += [title, "", *_table(cells, _words)]
    if missing := [cell for cell in cells if cell["status"] != "ok"]:
        lines += ["Skipped or failed:", "", *(f"- {progress(cell)}" for cell in missing)]
    return lines


def _table(cells: Sequence[Cell], show: Callable[[Cell], str]) -> list[str]:
    """Writes a row per duration and a column per backend."""
    labels = list(dict.fromkeys(cell["backend"] for cell in cells))
    known = {(cell["minutes"], cell["backend"]): cell for cell in cells}
    minutes = dict.fromkeys(cell["minutes"] for cell in cells)
    shown = {place: show(cell) if cell["status"] == "ok" else cell["status"] for place, cell in known.items()}
    rows = [[f"{each:g}", *(shown[each, label] for label in labels)] for each in minutes]
    return [*report.table(["minutes", *labels], rows), ""]


def _words(cell: Cell) -> str:
    return f"{100 * cell['wer']:.1f} ({100 * cell['utterance_wer']:.1f})" if "wer" in cell else "-"


def _features(cells: Sequence[Cell]) -> list[str]:
    """Writes a row per duration, with numbers of the first backend that ran."""
    rows: dict[float, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: cell["status"] != "ok"):
        numbers = ["-"] * 4
        if cell["status"] == "ok":
            times = [f"{cell['features'][clock]:.3g}" for clock in ("seconds", "cpu_seconds")]
            numbers = [str(cell["frames"]), *times, f"{cell['bytes']['features'] / 1e6:.0f}"]
        told = "yes" if cell["repeated"] else "no"
        rows.setdefault(cell["minutes"], [f"{cell['minutes']:g}", f"{cell['seconds']:.0f}", told, *numbers])
    header = ["minutes", "seconds of audio", "utterances repeated", "encoder frames L"]
    header += ["features, s", "features, s of the CPU", "features, peak MB"]
    return report.table(header, [rows[minutes] for minutes in sorted(rows)])


def checks(cells: Sequence[Cell], max_gigabytes: float) -> list[report.Check]:
    """Checks the first FAVOR backend against exact attention at the longest duration that both have run."""
    favors = [cell for cell in cells if cell["backend"] not in EXACT]
    if not favors:
        return []
    label = favors[0]["backend"]
    done = {(cell["backend"], cell["minutes"]): cell for cell in cells if cell["status"] == "ok"}
    longest = max((cell for cell in favors if cell["backend"] == label), key=lambda cell: cell["minutes"])
    ok = longest["status"] == "ok"
    peak = longest["bytes"]["resident"] / 1e9 if ok else float("inf")
    statement = f"{label} transcribes {longest['minutes']:g} minutes in one pass within {max_gigabytes:g} GB"
    numbers = f"{peak:.3g} GB resident, libraries included" if ok else longest["reason"]
    found = [report.Check(statement, numbers, peak <= max_gigabytes)]
    last: dict[str, float] = {}  # by backend, the longest duration that both have run
    for name in EXACT:
        both = [minutes for other, minutes in done if other == name and (label, minutes) in done]
        last |= {name: max(both)} if both else {}
    if "eager" in last:
        here, there = (done[name, last["eager"]]["bytes"] for name in (label, "eager"))
        share = here["pass"] / there["pass"]
        statement = f"at {last['eager']:g} minutes {label} needs at most {MEMORY_SHARE:g} of eager's peak memory"
        numbers = f"{here['pass'] / 1e6:.0f} of {there['pass'] / 1e6:.0f} MB, {share:.3f}; over the loaded model "
        numbers += f"{here['total'] / there['total']:.3f}"
        found.append(report.Check(statement, numbers, share <= MEMORY_SHARE))
    for minutes in sorted(set(last.values())):
        if ("sdpa", minutes) in done:
            mine, other = (done[name, minutes]["pass"] for name in (label, "sdpa"))
            numbers = f"{mine['seconds']:.3g} and {other['seconds']:.3g} s, of the CPU {mine['cpu_seconds']:.3g} and "
            statement = f"at {minutes:g} minutes {label} takes less time than sdpa"
            holds = mine["seconds"] < other["seconds"]
            found.append(report.Check(statement, f"{numbers}{other['cpu_seconds']:.3g} s", holds))
    return found


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draws time and peak memory of a pass over minutes of audio, all axes logarithmic; nothing if no cell has run."""
    done = [cell for cell in cells if cell["status"] == "ok"]
    if not done:
        return
    figure, ticks = Figure(figsize=(9, 3.8)), sorted({cell["minutes"] for cell in done})
    shown = {"time of a pass, s": ("pass", "seconds", 1), "peak memory of a pass, MB": ("bytes", "pass", 1e6)}
    for axes, (name, (part, number, unit)) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        for label in dict.fromkeys(cell["backend"] for cell in done):
            points = [(c["seconds"] / 60, c[part][number] / unit) for c in done if c["backend"] == label]
            style = {"linestyle": "-" if label.startswith("favor") else "--", "marker": "o", "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xscale="log", yscale="log", xlabel="minutes of audio", ylabel=name)
        axes.set_xticks(ticks, [f"{minutes:g}" for minutes in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    arguments = parse_arguments(argv)
    setup = Setup.of(arguments)
    torch.set_num_threads(setup.threads)
    check_model(setup)
    recordings = {minutes: Recording(60 * minutes) for minutes in arguments.minutes}
    if arguments.data_dir is not None:
        utterances = longest_speaker(load_speech(arguments.data_dir, arguments.split)[0])
        recordings = {minutes: Recording.of(utterances, 60 * minutes) for minutes in arguments.minutes}
    load = [os.getloadavg()[0]]
    shortest = arguments.minutes[0]
    tried = [own for own in arguments.backends if own.name not in EXACT or shortest <= arguments.max_exact_minutes]
    answer = isolated(None, setup.threads, check, setup, tried, recordings[shortest])
    if (wrong := problem(answer)) is not None:
        print(f"{shortest:g} minutes: {wrong}: no times are given")
        return 1
    cells = []
    for minutes, recording in recordings.items():
        for backend in arguments.backends:
            cells.append(run_cell(arguments, setup, backend, minutes, recording))
            print(progress(cells[-1]), flush=True)
    if setup.model_name_or_path is not None and arguments.data_dir is not None:
        add_word_errors(cells, setup, arguments.backends, recordings)
    load.append(os.getloadavg()[0])
    folders = ["--data_dir", *setup.folders]
    content = {
        **report.context_of("favor.eval.long_form", argv, ("transformers", "numpy"), folders),
        **setup.facts(),
        "load": load,
        "check": answer,
        "cells": [{key: value for key, value in cell.items() if key != "text"} for cell in cells],
    }
    lines = report_lines(cells, answer, setup, arguments, load)
    code = report.finish(arguments, lines, content, checks(cells, arguments.max_gigabytes))
    plot(cells, arguments.output_dir / f"{arguments.name}.png")
    return code


cli = program("favor.eval.long_form", main)


if __name__ == "__main__":
    cli()
