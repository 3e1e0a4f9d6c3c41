"""Time and state of a causal Conformer for each piece of a stream, with linear and with exact attention.

    python -m favor.eval.streaming

One recording of noise comes in pieces of several lengths. After some minutes of audio the program measures the
computing time of pieces one after another, the backends in turns. Nothing is timed unless the logits of all streams
equal those of one pass over the whole recording.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import favor
from favor.eval.common import report
from favor.eval.common.launch import Backend
from favor.eval.common.program import add_results
from favor.eval.speech.long_form_cell import RATE, SEED, Setup, noise
from favor.models.conformer import ConformerFeatureExtractor, ConformerForCTC, ConformerStream
from favor.train.common.program import Parser, program

EXACT = "sdpa"
BACKENDS = ("favor+", "favor++", "favor#", EXACT)
# Audio before the first piece that is timed, so that every piece of the length of an encoder frame gives a frame.
START_SECONDS = 1.28
# Audio of the comparison with a whole pass, and the difference of logits that is allowed.
CHECK_SECONDS, TOLERANCE = 5.0, 1e-3
REPEATS = 40  # pieces that are timed in each measurement
ADVANCE_SECONDS = 5.12  # of a piece between the measurements, where nothing is timed
GROWTH = 1.5


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.streaming", __doc__)
    add = parser.add_argument
    add("--pieces_ms", type=int, nargs="+", default=[40, 80, 160, 320, 640], metavar="MS", help="lengths of pieces")
    minutes = "minutes of audio after which pieces are timed"
    add("--minutes", type=float, nargs="+", default=[0, 0.5, 2, 5], metavar="M", help=minutes)
    add("--backends", nargs="+", choices=BACKENDS, default=["favor+", "favor#", EXACT], help="backends to compare")
    Setup.add_options(parser)
    add_results(parser, "streaming_cpu")
    arguments = parser.parse_args(argv)
    for name in ("pieces_ms", "minutes", "backends"):
        setattr(arguments, name, list(dict.fromkeys(getattr(arguments, name))))
    arguments.minutes.sort()
    if min(*arguments.pieces_ms, arguments.threads, arguments.num_features) < 1:
        parser.error("--pieces_ms, --threads and --num_features must be at least 1")
    if arguments.minutes[0] < 0:
        parser.error("--minutes must not be negative")
    return arguments


def make_extractor(setup: Setup) -> ConformerFeatureExtractor:
    """Loads or makes the feature extractor; raises ValueError if that of a checkpoint cannot stream."""
    extractor = setup.extractor()
    if extractor.normalize != "none":
        raise ValueError(
            f'model_name_or_path must be a model for streaming, with features of normalize="none"; those of '
            f"{setup.model_name_or_path} have {extractor.normalize!r}."
        )
    return extractor


def build(backend: str, extractor: ConformerFeatureExtractor, setup: Setup) -> ConformerForCTC:
    """Makes the causal model in evaluation mode; the parameters of favor++ and favor# are calibrated on noise."""
    model = setup.build(Backend(backend))
    calibrated = (model.config.favor or {}).get("statistics") == "calibrated"
    if backend in ("favor#", "favor++") and not calibrated:
        batch = extractor(noise(30.0, SEED + 2), sampling_rate=RATE)
        favor.calibrate(model, [dict(batch)], attn_implementation=backend)
    return model.eval()


def feed(stream: ConformerStream, audio: np.ndarray, samples: int) -> Tensor:
    """Gives the logits `[1, L, V]` of audio `[n]` that a stream reads in pieces of so many samples."""
    return torch.cat([stream.feed(audio[start : start + samples]) for start in range(0, len(audio), samples)], dim=1)


def difference(model: Any, extractor: ConformerFeatureExtractor, audio: np.ndarray, piece: int) -> float:
    """Computes the greatest difference between logits of a stream and of a whole pass; inf if the frames differ."""
    with torch.no_grad():
        whole = model(**extractor(audio, sampling_rate=RATE)).logits
    found = feed(model.stream(extractor), audio, piece)
    if found.shape != whole.shape or not bool(found.isfinite().all()):
        return float("inf")
    return (found - whole).abs().max().item()


def branch(stream: ConformerStream) -> ConformerStream:
    """Copies a stream with its state; both use one model."""
    shared = [stream.feature_extractor, *stream.model.modules()]
    return copy.deepcopy(stream, {id(part): part for part in shared})


def measure(
    models: Mapping[str, Any], extractor: ConformerFeatureExtractor, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measures the times of pieces of every length after `arguments.minutes` of audio."""
    starts = [max(60 * minutes, START_SECONDS) for minutes in arguments.minutes]
    longest = max(arguments.pieces_ms) / 1000
    audio = noise(starts[-1] + REPEATS * longest)
    streams = {name: model.stream(extractor) for name, model in models.items()}
    rows, place = [], 0
    for minutes, start in zip(arguments.minutes, starts, strict=True):
        former, place = place, round(start * RATE)
        if place > former:
            for stream in streams.values():
                feed(stream, audio[former:place], round(ADVANCE_SECONDS * RATE))
        for piece_ms in arguments.pieces_ms:
            branches = {name: branch(stream) for name, stream in streams.items()}
            piece = round(RATE * piece_ms / 1000)
            found = measure_pieces(branches, audio[place : place + REPEATS * piece], piece)
            rows += [{"piece_ms": piece_ms, "minutes": minutes, "seconds": start, **row} for row in found]
        done = ", ".join(f"{row['backend']} {row['cpu']:.1f}" for row in rows[-len(streams) :])
        print(f"after {minutes:g} minutes, ms of the CPU for a piece of {piece_ms} ms: {done}", flush=True)
    return rows


def measure_pieces(streams: Mapping[str, ConformerStream], audio: np.ndarray, piece: int) -> list[dict[str, Any]]:
    """Measures the times of pieces of audio `[n]`, of `piece` samples, one after another, the backends in turns.

    Returns:
        A row per backend: "backend", milliseconds "median" and "upper" (95 %) of wall-clock time and "cpu" (median),
        computing time over audio time (less is better) as "factor" and "cpu_factor", "state_bytes" at the end.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in streams}  # ms, of the wall's clock and the CPU
    for start in range(0, len(audio), piece):
        for name, stream in streams.items():
            wall, cpu = time.perf_counter(), time.process_time()
            stream.feed(audio[start : start + piece])
            times[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    rows, heard = [], 1e3 * len(audio) / RATE
    for name, stream in streams.items():
        wall, own = np.array(times[name]).T
        numbers = {"median": np.median(wall), "upper": np.percentile(wall, 95), "cpu": np.median(own)}
        numbers |= {"factor": wall.sum() / heard, "cpu_factor": own.sum() / heard}
        found = {key: float(value) for key, value in numbers.items()}
        rows.append({"backend": name, **found, "state_bytes": stream.state_bytes})
    return rows


def checks(rows: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks that state and time of a FAVOR stream do not grow, and that it is faster than the speaker."""
    found = []
    for name in dict.fromkeys(row["backend"] for row in rows if row["backend"] != EXACT):
        own = [row for row in rows if row["backend"] == name]
        parts = [[row for row in own if row["piece_ms"] == piece] for piece in {row["piece_ms"] for row in own}]
        growth = max(max(r["state_bytes"] for r in part) / min(r["state_bytes"] for r in part) for part in parts)
        slower = [part[-1]["cpu"] / part[0]["cpu"] for part in parts]
        factors, last = [part[-1]["cpu_factor"] for part in parts], f"after {own[-1]['minutes']:g} minutes"
        times, below = (f"{min(values):.2f} to {max(values):.2f}" for values in (slower, factors))
        later = f"a piece takes at most {GROWTH} times the CPU time that it took at the beginning"
        statements = (
            (f"the state is as large {last} as at the beginning, within 1 %", f"{growth:.4f} times", growth <= 1.01),
            (later, times, max(slower) <= GROWTH),
            (f"{last} the CPU time of a piece is below its length", f"{below} of it", max(factors) < 1),
        )
        found += [report.Check(f"{name}: {text}", *rest) for text, *rest in statements]
    return found


def report_lines(
    rows: Sequence[dict[str, Any]],
    differences: Mapping[str, float],
    latency: float,
    setup: Setup,
    load: Sequence[float],
) -> list[str]:
    """Writes the Markdown report."""
    names = list(differences)
    known = {(row["piece_ms"], row["minutes"], row["backend"]): row for row in rows}
    places = sorted({(row["piece_ms"], row["minutes"]) for row in rows})

    def table(show: Any) -> list[str]:
        cells = [
            [f"{piece:g}", f"{after:g}", *(show(known[piece, after, name]) for name in names)]
            for piece, after in places
        ]
        return report.table(["piece, ms", "after minutes", *names], cells)

    return [
        "# Streaming",
        "",
        f"Causal ConformerForCTC, {setup.label}; {setup.num_features} features, float32, batch 1, noise. Parameters of "
        f"favor++ and favor# are calibrated on noise. {REPEATS} pieces one after another, features and "
        "greedy search included, the backends in turns. sdpa keeps all keys and values in one tensor a layer, made "
        f"anew for each piece. {report.load_line(load, 'a piece', 'milliseconds')}",
        "",
        f"Latency of the model besides computing: {1e3 * latency:.0f} ms from the beginning of an encoder frame until "
        "its last sample is there, and up to one piece more until that is passed on.",
        "",
        "Greatest difference between the logits of a stream and of the whole, over all lengths of pieces: "
        + ", ".join(f"{name} {value:.1g}" for name, value in differences.items())
        + ".",
        "",
        "Computing time of a piece in ms: median (95 %) by the wall's clock, then median of the CPU:",
        "",
        *table(lambda row: f"{row['median']:.1f} ({row['upper']:.1f}), {row['cpu']:.1f}"),
        "",
        "Computing time over the length of the audio (real-time factor), in brackets of the CPU:",
        "",
        *table(lambda row: f"{row['factor']:.3f} ({row['cpu_factor']:.3f})"),
        "",
        "State in MB (10^6 bytes) after those pieces:",
        "",
        *table(lambda row: f"{row['state_bytes'] / 1e6:.2f}"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    arguments = parse_arguments(argv)
    setup = Setup.of(arguments, causal=True)
    torch.set_num_threads(setup.threads)
    load = [os.getloadavg()[0]]
    extractor = make_extractor(setup)
    models = {name: build(name, extractor, setup) for name in arguments.backends}
    pieces, audio = [round(RATE * ms / 1000) for ms in arguments.pieces_ms], noise(CHECK_SECONDS)
    differences = {
        name: max(difference(model, extractor, audio, piece) for piece in pieces) for name, model in models.items()
    }
    wrong = [f"{name} by {value:.2g}" for name, value in differences.items() if not value <= TOLERANCE]
    if wrong:
        print(f"streamed logits differ from those of a whole pass: {', '.join(wrong)}: no times are given")
        return 1
    rows = measure(models, extractor, arguments)
    load.append(os.getloadavg()[0])
    latency = next(iter(models.values())).stream(extractor).latency
    content = report.context_of("favor.eval.streaming", argv, ("transformers", "numpy"), setup.folders)
    content |= {**setup.facts(), "load": load, "latency_seconds": latency, "differences": differences, "rows": rows}
    return report.finish(arguments, report_lines(rows, differences, latency, setup, load), content, checks(rows))


cli = program("favor.eval.streaming", main)


if __name__ == "__main__":
    cli()
