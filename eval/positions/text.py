"""T5 with landmarks: its loss on novels without any further training, or time and memory of its encoder.

    python -m favor.eval.positions.text --task loss --data_dir DIR
    python -m favor.eval.positions.text --task speed --threads 1

loss: a small T5 is trained with exact attention on the bytes of novels_train.txt.xz, and is saved. Its task is span
corruption (Raffel et al., 2020) as for ByT5 (Xue et al., 2022): 15 % of the bytes are hidden, in spans of 20 on
average. Then its attention is replaced, and nothing is trained. The same corrupted sequences of novels_valid.txt.xz
are read with each attention. "local" reads the near keys of landmarks alone, which shows what the far keys are worth.

speed: a pass of an encoder of the shape of t5-small, with random weights and without gradients. Each measurement has a
process of its own, and the attentions take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

import favor
from favor.attention.positions import ROWS, Columns, far_field
from favor.eval.common import report
from favor.eval.common.isolated import Failure, isolated
from favor.eval.common.program import add_results
from favor.eval.positions import encoder, spans
from favor.landmark.attention import Landmarks
from favor.landmark.causal import SECTION
from favor.train.common.program import Parser, program

SAMPLES = {2048: 40, 4096: 6, 8192: 3}  # sequences by length
PLAIN = {"num_features": 256, "selected_keys": None}
# Backends, and options that are not their defaults.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("sdpa", {}),
    "landmark": ("landmark", {}),
    "landmark, M = 64, K = 256": ("landmark", {"num_features": 64, "selected_keys": 256}),
    "landmark, M = 64, K = 64": ("landmark", {"num_features": 64, "selected_keys": 64}),
    "favor+, M = 256": ("favor+", {}),
    "local": ("local", {}),
}
WANTED_LENGTH, WANTED_PERCENT = 2048, 1.0
SPEED_LENGTHS = [1024, 2048, 4096, 8192, 16384]
ROUNDS, LONGEST_REPEATED = 3, 2048  # longer passes are measured in one round
LONGEST = {"eager": 4096, "sdpa": 8192}  # tokens; twice as many would take 7 and 18 GB
SPEED_LENGTH, SPEED_RATIO, MEMORY_RATIO = 8192, 5, 10


class Local(Landmarks):
    """Reads the near keys of landmarks and nothing else; cross attention is that of landmarks."""

    name = "local"
    backends = ("local",)  # type: ignore[assignment]


@far_field(Local, step=SECTION // ROWS)
class Nothing:
    """What is far, for `Local`."""

    def __init__(self, *_: Any) -> None:
        pass

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        """Yields nothing."""
        return iter(())


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.positions.text", __doc__)
    add = parser.add_argument
    add("--task", choices=("loss", "speed"), required=True, help="what to measure")
    add("--data_dir", type=Path, help="loss: folder of novels_train.txt.xz and novels_valid.txt.xz")
    add("--model_name_or_path", type=Path, help="loss: the T5 that an earlier run saved, which is not trained again")
    add("--lengths", nargs="+", type=int, help="tokens; default: 2048 to 8192 for loss, 1024 to 16384 for speed")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default: those of torch")
    add_results(parser, "positions_text_TASK")
    given = parser.parse_args(words)
    given.name = given.name.replace("TASK", given.task)
    if given.task == "loss" and given.data_dir is None:
        parser.error("--task loss needs --data_dir, the folder of the novels")
    given.lengths = sorted(given.lengths or (SAMPLES if given.task == "loss" else SPEED_LENGTHS))
    return given


def use(model: T5ForConditionalGeneration, variant: str) -> None:
    """Switches the whole model to an attention."""
    backend, options = VARIANTS[variant]
    if backend in favor.BACKENDS:
        favor.configure(model, backend, exact_below=0, **{**PLAIN, **options})
    else:
        model.set_attn_implementation(backend)


@torch.no_grad()
def read(
    model: T5ForConditionalGeneration, variant: str, pairs: Sequence[tuple[Tensor, Tensor]], exact: Sequence[Tensor]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Reads corrupted sequences with an attention, and compares with the last hidden states of exact attention.

    Returns:
        By name a number of each sequence: "loss"; "encoder", the loss if the decoder stays exact; "error" of the last
        hidden state of the encoder, relative to its norm. And these hidden states.
    """
    found: dict[str, Any] = {}
    use(model, variant)
    hidden = [model.encoder(input_ids=inputs[None]).last_hidden_state for inputs, _ in pairs]
    for name, decoder in (("loss", variant), ("encoder", "sdpa")):
        use(model, decoder)
        found[name] = []
        for own, (_, labels) in zip(hidden, pairs, strict=True):
            logits = model(encoder_outputs=BaseModelOutput(own), labels=labels[None]).logits
            found[name].append(float(cross_entropy(logits[0], labels)))
    found["error"] = [float((a - b).norm() / b.norm()) for a, b in zip(hidden, exact or hidden, strict=True)]
    return found, hidden


def losses(given: argparse.Namespace) -> tuple[list[str], dict[str, Any], list[report.Check]]:
    """Measures the losses; gives the lines of the report, its numbers and its checks."""
    favor.register_features(Local)
    saved = given.model_name_or_path or given.output_dir / f"{given.name}_t5"
    if given.model_name_or_path is None:
        spans.train(spans.read_bytes(given.data_dir / "novels_train.txt.xz")).save_pretrained(saved)
    model = T5ForConditionalGeneration.from_pretrained(saved).eval()
    text = spans.read_bytes(given.data_dir / "novels_valid.txt.xz")
    results: list[dict[str, Any]] = []
    base: dict[str, Any] = {}
    for length in given.lengths:
        width, number = spans.bytes_of(length), SAMPLES.get(length, 4)
        generator = torch.Generator().manual_seed(spans.SEED)
        places = [(len(text) - width) * place // max(number - 1, 1) for place in range(number)]
        pairs = [spans.corrupt(text[place : place + width], generator) for place in places]
        exact: list[Tensor] = []
        for variant in VARIANTS:
            found, hidden = read(model, variant, pairs, exact)
            if not exact:  # the first is sdpa
                exact, base = hidden, found
            results.append({"tokens": length, "attention": variant, "samples": number, **summary(found, base)})
            print("  ".join(loss_row(results[-1])), flush=True)
    lines = ["# T5 with landmarks: loss", "", LOSS_TEXT, "", *report.table(LOSS_HEADER, list(map(loss_row, results)))]
    wanted = [own for own in results if (own["tokens"], own["attention"]) == (WANTED_LENGTH, "landmark")]
    statement = (
        f"landmarks at their defaults are within {WANTED_PERCENT:g} % of the exact loss at {WANTED_LENGTH} tokens"
    )
    checks = [report.Check(statement, f"{own['above']:+.2f} %", own["above"] <= WANTED_PERCENT) for own in wanted]
    return lines, {"results": results}, checks


def summary(found: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Gives means over sequences, and how many percent the losses are above those of exact attention.

    The standard error of this difference is that of the pairs of losses of the same sequences.
    """
    exact, number = statistics.fmean(base["loss"]), len(found["loss"])
    apart = {name: [100 * (a - b) / exact for a, b in zip(found[name], base["loss"], strict=True)] for name in found}
    deviation = statistics.stdev(apart["loss"]) if number > 1 else 0.0
    return {
        "loss": statistics.fmean(found["loss"]),
        "above": statistics.fmean(apart["loss"]),
        "standard_error": deviation / math.sqrt(number),
        "encoder_above": statistics.fmean(apart["encoder"]),
        "error": statistics.fmean(found["error"]),
        "error_p90": sorted(found["error"])[max(math.ceil(0.9 * number) - 1, 0)],
    }


LOSS_HEADER = ["tokens", "sequences", "attention", "loss", "above exact, %", "encoder alone, %", "error", "error, p90"]
LOSS_TEXT = (
    "Loss: nats of a byte of hidden spans, teacher forcing, the same sequences for all. Above exact: all attention of "
    "the model is switched, with the standard error over sequences; encoder alone: the decoder stays exact. Error: of "
    "the last hidden state of the encoder, relative to exact attention, mean and 90th percentile of sequences."
)


def loss_row(own: dict[str, Any]) -> list[str]:
    """Writes a row of the table of losses."""
    above = ["", ""]
    if own["attention"] != "sdpa":
        above = [f"{own['above']:+.2f} ± {own['standard_error']:.2f}", f"{own['encoder_above']:+.2f}"]
    numbers = [f"{own['loss']:.4f}", *above, f"{own['error']:.4f}", f"{own['error_p90']:.4f}"]
    return [f"{own['tokens']:,}", str(own["samples"]), own["attention"], *numbers]


def speeds(given: argparse.Namespace) -> tuple[list[str], dict[str, Any], list[report.Check]]:
    """Measures time and memory; gives the lines of the report, its numbers and its checks."""
    known = report.Records(given.output_dir / f"{given.name}.jsonl")
    results = []
    for length in given.lengths:
        backends = [own for own in encoder.BACKENDS if length <= LONGEST.get(own, length)]
        times: dict[str, dict[str, list[float]]] = {own: {} for own in backends}
        for turn in range(ROUNDS if length <= LONGEST_REPEATED else 1):
            for backend in [*backends[turn % len(backends) :], *backends[: turn % len(backends)]]:
                of = (encoder.measure_time, backend, length)
                for name, seconds in once(known, given.threads, turn, *of).items():
                    times[backend].setdefault(name, []).extend(seconds)
        for backend in backends:
            memory = once(known, given.threads, 0, encoder.measure_memory, backend, length)
            middle = {name: statistics.median(seconds) for name, seconds in times[backend].items()}
            results.append({"tokens": length, "attention": backend, **middle, **memory})
            print("  ".join(speed_row(results[-1], results)), flush=True)
    rows = [speed_row(own, results) for own in results]
    text = SPEED_TEXT.format(threads=given.threads, rounds=ROUNDS, longest=LONGEST_REPEATED)
    lines = ["# T5 with landmarks: time and memory", "", text, "", *report.table(SPEED_HEADER, rows)]
    return lines, {"results": results}, speed_checks(results)


def once(known: report.Records, threads: int, turn: int, task: Any, backend: str, length: int) -> dict[str, Any]:
    """Measures in a process of its own, unless an earlier run did; raises RuntimeError if the process fails."""
    of = [task.__name__, backend, length, turn, threads]
    result = known.find(of)
    if result is None:
        result = isolated(None, threads, task, backend, length)
        if isinstance(result, Failure):
            raise RuntimeError(f"{backend} with {length} tokens: {result.reason}")
        known.add(of, result)
    return result


SPEED_HEADER = ["tokens", "attention", "encoder, s", "of it attention, s", "peak, MB"]
SPEED_HEADER += ["encoder, times as fast", "attention, times as fast", "memory, 1 of"]
SPEED_TEXT = (
    "One pass of the encoder of t5-small (6 layers, width 512, 8 heads of 64) with random weights, one sequence, "
    "float32, {threads} CPU threads: medians of the processor time, the attentions in turns: {rounds} rounds up to "
    "{longest:,} tokens, one pass of longer ones. "
    "Attention: the function that transformers calls between the projections, and what makes the biases. Peak: by how "
    "much the memory of the process rises. The last columns compare with sdpa, which transformers runs by default."
)


def against(own: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[float]:
    """Compares encoder, attention and memory with sdpa; gives nothing where sdpa was not measured."""
    for other in results:
        if (other["tokens"], other["attention"]) == (own["tokens"], "sdpa"):
            return [other[name] / own[name] for name in ("cpu", "attention_cpu", "peak")]
    return []


def speed_row(own: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[str]:
    """Writes a row of the table of times."""
    numbers = [f"{own['cpu']:.3g}", f"{own['attention_cpu']:.3g}", f"{own['peak'] / 1e6:.4g}"]
    ratios = [] if own["attention"] == "sdpa" else [f"{ratio:.3g}" for ratio in against(own, results)]
    return [f"{own['tokens']:,}", own["attention"], *numbers, *(ratios or [""] * 3)]


def speed_checks(results: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks attention and memory of landmarks at the length of interest."""
    for own in results:
        if (own["tokens"], own["attention"]) == (SPEED_LENGTH, "landmark") and against(own, results):
            _, attention, memory = against(own, results)
            return [
                report.Check(f"attention is {SPEED_RATIO} times as fast", f"{attention:.3g}", attention >= SPEED_RATIO),
                report.Check(f"memory is 1/{MEMORY_RATIO} at most", f"1/{memory:.3g}", memory >= MEMORY_RATIO),
            ]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check fails."""
    given = parse_arguments(argv)
    torch.set_num_threads(given.threads)
    before = os.getloadavg()[0]
    lines, content, checks = (losses if given.task == "loss" else speeds)(given)
    load = (before, os.getloadavg()[0])
    lines += ["", report.load_line(load, "a process", "seconds")] if given.task == "speed" else []
    facts = report.context_of(
        "favor.eval.positions.text", argv, ("transformers",), ("--data_dir",), "--model_name_or_path"
    )
    return report.finish(given, lines, {**facts, "seed": spans.SEED, "load": load, **content}, checks)


cli = program("favor.eval.positions.text", main)


if __name__ == "__main__":
    cli()
