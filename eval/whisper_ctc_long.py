"""Long recordings by CTC on Whisper's encoder: one pass, windows with overlap, and a stream with look-ahead.

    python -m favor.eval.whisper_ctc_long out/whisper_ctc --data_dir DATA --split dev+test --minutes 10 30

Utterances one after another make a recording. Its text is found in each way, and by utterances alone for comparison: by
greedy search, or among the words of a language model. Each way runs in a process of its own; its seconds are those of
reading the files, features and search, and its memory is the greatest resident memory of the process, with libraries,
model and audio. One pass of exact attention is quadratic in the length, so it has a limit.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import favor
from favor.eval import asr
from favor.eval.common import report
from favor.eval.common.isolated import Failure, isolated
from favor.eval.common.program import add_results
from favor.eval.speech.long_form_cell import Recording
from favor.models.speech import Transcript
from favor.models.speech.pronunciations import lexicon_of
from favor.models.speech.word_beam import search_emissions, searched_words
from favor.train.common.arguments import BackendArguments
from favor.train.common.program import Parser, program
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors

WAYS = ("utterances", "windows", "stream", "one pass, local", "one pass, exact", "one pass, landmark")
SLIDING_WINDOW = 375  # frames of 20 ms before and after each that local attention sees
EXACT_MINUTES = 10.0
RATE = 16000


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper_ctc_long", __doc__)
    add = parser.add_argument
    parser.add_place("model_name_or_path", "model", "folder of a model that favor.train.asr has saved")
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--split", default="dev+test", help="split of the data; several are joined by +")
    add("--minutes", type=float, nargs="+", default=[10.0, 30.0], metavar="M", help="minutes of audio")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the text is found")
    add("--language_model", type=Path, help="ARPA file or binary file of KenLM; default: greedy search")
    add("--lm_weight", type=float, default=0.7, help="weight of the language model")
    add("--word_score", type=float, default=0.0, help="score of each word")
    add("--step", type=float, default=1.0, help="seconds of a step of the stream")
    add("--look_ahead", type=float, default=1.0, help="seconds that the stream looks ahead")
    add("--context", type=float, default=10.0, help="seconds that the stream looks back")
    add_results(parser, "whisper_ctc_long")
    arguments = parser.parse_args(argv)
    if min(arguments.minutes) <= 0:
        parser.error("--minutes must be positive")
    arguments.minutes = sorted(set(arguments.minutes))
    return arguments


@torch.no_grad()
def text_of(model: Any, processor: Any, recording: Recording, way: str, arguments: argparse.Namespace) -> str:
    """Finds the text of a recording."""
    spoken = lexicon_of(None, arguments.model)
    scorer = None
    if arguments.language_model is not None:
        weights = {name: getattr(arguments, name) for name in ("language_model", "lm_weight", "word_score")}
        scorer = searched_words(model, processor.tokenizer, None, True, spoken, **weights)
    if way == "utterances":
        search: Any = {"scorer": scorer, "beam_size": scorer.beam_size if scorer else 1, "lexicon": spoken}
        return " ".join(asr.recognise(model, processor, recording.utterances, batch_seconds=60, **search)[0])
    audio = recording.samples()
    if way == "stream":
        times = {"step": arguments.step, "look_ahead": arguments.look_ahead, "context": arguments.context}
        stream = model.stream(processor, **times, scorer=scorer, lexicon=spoken)
        for start in range(0, len(audio), RATE):
            stream.feed(audio[start : start + RATE])
        stream.finish()
        return str(stream.text)
    inputs = processor(audio, sampling_rate=RATE)
    if "local" in way:
        model.config.sliding_window = SLIDING_WINDOW
    if "local" in way or "landmark" in way:  # every FAVOR backend runs local attention in linear time
        favor.configure(model, "landmark", exact_below=0)
    logits = model.window_logits(**inputs)[0] if way == "windows" else model(inputs["input_features"]).logits
    (emissions,) = search_emissions(logits, [logits.shape[1]], scorer, blank=model.config.pad_token_id)
    return Transcript.of(emissions, processor, 1.0, spoken).text


def measure(recording: Recording, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one way; gives "seconds", "cpu_seconds", "peak_bytes" and the "text"."""
    model, processor = asr.load(arguments.model, BackendArguments())
    start, cpu = time.perf_counter(), time.process_time()
    text = text_of(model.eval(), processor, recording, way, arguments)
    found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu, "text": text}
    return {**found, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def run_cell(minutes: float, recording: Recording, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one way in a process of its own; its "status" is "ok", "failed" or "skipped"."""
    cell: dict[str, Any] = {"minutes": minutes, "way": way, "audio_seconds": recording.seconds}
    if "exact" in way and minutes > EXACT_MINUTES:
        return cell | {"status": "skipped", "reason": f"the limit is {EXACT_MINUTES:g} minutes"}
    found = isolated(None, 1, measure, recording, way, arguments)
    if isinstance(found, Failure):
        return cell | {"status": "failed", "reason": found.reason}
    return cell | {"status": "ok", **found, "wer": word_errors([recording.text], [found["text"]]).rate}


def table_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Makes the Markdown table."""
    rows = []
    for cell in cells:
        numbers = [cell.get("reason", ""), "", ""]
        if cell["status"] == "ok":
            speed = f"{cell['cpu_seconds']:.1f}"
            numbers = [f"{100 * cell['wer']:.2f}", speed, f"{cell['peak_bytes'] / 1e6:.0f}"]
        rows.append([f"{cell['minutes']:g}", cell["way"], *numbers])
    return report.table(["minutes", "way", "WER %", "CPU seconds", "peak MB"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    arguments = parse_arguments(argv)
    utterances = load_speech(arguments.data_dir, arguments.split)[0]
    cells = []
    for minutes in arguments.minutes:
        recording = Recording.of(utterances, 60 * minutes)
        for way in arguments.ways:
            cells.append(run_cell(minutes, recording, way, arguments))
            print(table_lines(cells[-1:])[-1], flush=True)
    times = f"step {arguments.step:g} s, look-ahead {arguments.look_ahead:g} s, context {arguments.context:g} s"
    search = "Greedy search"
    if arguments.language_model is not None:
        weights = f"lm_weight {arguments.lm_weight:g}, word_score {arguments.word_score:g}"
        search = f"Search among the words of {arguments.language_model.name}, {weights}, for the stream at its end"
    facts = (
        f"{search}. Utterances of {arguments.split} one after another. Less is better everywhere. Windows: 15 s, "
        f"10 s of which are kept. Stream: {times}. Positions begin again every 30 s. Local "
        f"attention: {SLIDING_WINDOW} frames of 20 ms before and after each."
    )
    content = report.context_of("favor.eval.whisper_ctc_long", argv, ("transformers", "jiwer"), ["--data_dir"])
    content |= {"cells": cells, "facts": facts}
    lines = [f"# Long recordings: {Path(arguments.model).resolve().name}", "", facts, "", *table_lines(cells)]
    return report.finish(arguments, lines, content)


cli = program("favor.eval.whisper_ctc_long", main)


if __name__ == "__main__":
    cli()
