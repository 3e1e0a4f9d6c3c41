"""Speed and memory of FAVOR attention, compared with exact attention and another package, with results checked first.

    python -m favor.eval.speed                             attention, by length, direction and pass
    python -m favor.eval.speed --model_types bert llama    whole models, in tokens per second
    python -m favor.eval.speed --passes decode             one token after many others

The program writes a Markdown table, JSON and a plot. Results are checked in float64 before they are timed: a cell whose
result is wrong shows FAILED and no time.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from favor.eval.common import isolated, launch
from favor.eval.common.program import device_or_default
from favor.eval.common.report import shown_command
from favor.eval.speed import measure, methods, models, report
from favor.eval.speed.reference import TOLERANCE
from favor.train.common.program import Parser, program

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("bidirectional", "causal")
PASSES = ("forward", "forward+backward", "decode")
LONGEST = {"cpu": 1 << 15, "cuda": 1 << 18}
# Attention: heads and their width. Models: layers, in the shape of BERT-base.
HEADS, HEAD_DIM, LAYERS = 8, 64, 12
# Random features, or means of landmarks in encoders, per head.
NUM_FEATURES = 256
REPEATS = 20  # greatest number of measurements of a method in a cell
MEMORY_SHARE = 0.5  # part of the free memory that a method may take on a CPU
SEED = 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments and fills in defaults that depend on the device; ends the program for bad ones."""
    parser = Parser("favor.eval.speed", __doc__)
    add = parser.add_argument
    add("--model_types", nargs="+", choices=models.MODELS, help="time whole models instead of attention")
    add("--lengths", type=int, nargs="+", help="default: powers of two from 128 to 32768 (CPU) or 262144 (CUDA)")
    add("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="directions of attention")
    add("--passes", nargs="+", choices=PASSES, default=PASSES[:2], help="passes to time; decode is causal only")
    add("--methods", nargs="+", choices=methods.GROUPS, default=methods.GROUPS, help="methods to compare")
    families = "registry names of families, one row each; NAME@128 with exact blocks of 128 tokens, landmark+256 with "
    add("--families", nargs="+", default=["pos"], help=families + "256 selected keys, landmark+0 with none")
    add("--per_device_eval_batch_size", type=int, default=1, help="sequences of a batch")
    add("--device", choices=("cpu", "cuda"), help="device to run on; default: cuda if there is a GPU, else cpu")
    add("--dtype", choices=DTYPES, help="type of the numbers; default: float32 on a CPU, bfloat16 on CUDA")
    add("--seconds_per_cell", type=float, default=1.0, help="a method slower than this is repeated less often")
    add("--max_seconds", type=float, default=10.0, help="a method whose pass would take longer is skipped")
    add("--cuda_graph", action="store_true", help="time replays of a CUDA graph, without the time of the host")
    add("--skip_memory", action="store_true", help="do not measure peak memory")
    add("--profile", action="store_true", help="also say what takes longest in a pass at the longest length")
    add("--output_dir", type=Path, default=Path("out/results"), help="folder of the results")
    add("--name", help="name of the files; default: speed_cpu, speed_gpu, models_cpu or models_gpu")
    arguments = parser.parse_args(argv)
    arguments.device = device_or_default(arguments.device)
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("expected a CUDA device for --device cuda, got none; use --device cpu")
    if arguments.cuda_graph and (not cuda or arguments.model_types or "decode" in arguments.passes):
        parser.error("expected --cuda_graph with --device cuda, without --model_types and without --passes decode")
    if "decode" in arguments.passes and (arguments.model_types or "causal" not in arguments.directions):
        parser.error("expected --passes decode with --directions causal and without --model_types")
    arguments.dtype = arguments.dtype or ("bfloat16" if cuda else "float32")
    if arguments.lengths is None:
        arguments.lengths = [1 << power for power in range(7, LONGEST[arguments.device].bit_length())]
    arguments.lengths = sorted(set(arguments.lengths))
    leasts = {"per_device_eval_batch_size": arguments.per_device_eval_batch_size, "lengths": arguments.lengths[0]}
    for name, least in leasts.items():
        if least < 1:
            parser.error(f"expected --{name} of at least 1, got {least}")
    if arguments.name is None:
        arguments.name = ("models_" if arguments.model_types else "speed_") + ("gpu" if cuda else "cpu")
    return arguments


@dataclass(frozen=True)
class Trial:
    """One contender prepared for one length."""

    check: Callable[[], tuple[str | None, dict[str, Any] | None]]
    call: Callable[[], object]
    peak: Callable[[], int] | None = None
    ready: Callable[[], object] = lambda: None
    tokens: int | None = None


@dataclass(frozen=True)
class Contender:
    """One row of a panel: `refuses` says why it cannot run at all, `start` prepares it for a length."""

    name: str
    exponent: int
    refuses: str | None
    start: Callable[[int], Trial]


@dataclass
class Bench:
    """Runs panels: contenders at growing lengths, which are checked first and then timed in turns."""

    arguments: argparse.Namespace
    results: list[report.Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.perf_counter() - self.began:4.0f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line; the report repeats it."""
        self.notes.append(text)
        self.say(text)

    def run(self, panel: str, contenders: Sequence[Contender]) -> None:
        """Runs all lengths of a panel, the shortest first; what is skipped once is skipped at longer lengths too."""
        history: dict[str, dict[int, float]] = {c.name: {} for c in contenders}
        skipped = {c.name: c.refuses for c in contenders}
        for length in self.arguments.lengths:
            here = [report.Result(panel, contender.name, length) for contender in contenders]
            trials: dict[str, tuple[Trial, measure.Stopwatch]] = {}
            for contender, result in zip(contenders, here, strict=True):
                reason = skipped[contender.name] or self._too_slow(history[contender.name], length, contender.exponent)
                if reason is None:
                    self._open(contender, result, trials)
                else:
                    result.status, result.reason = "skipped", reason
            self._time(here, trials)
            for result in here:
                where = f"{panel}: {result.method}"
                if result.timing is not None:
                    history[result.method][length] = result.timing.median
                elif result.status == "failed":
                    self.note(f"{where} FAILED at L = {length}: {result.reason}")
                elif skipped[result.method] is None or length == self.arguments.lengths[0]:
                    skipped[result.method] = result.reason
                    self.note(f"{where} skipped from L = {length} on: {result.reason}")
            self.results += here
            times = (f"{r.method} {1e3 * r.timing.median:.3g} ms" for r in here if r.timing is not None)
            self.say(f"{panel}, L = {length}: " + ", ".join(times))

    def _too_slow(self, history: dict[int, float], length: int, exponent: int) -> str | None:
        expected, limit = measure.predict(history, length, exponent), self.arguments.max_seconds
        if expected is None or expected <= limit:
            return None
        return f"a pass would take about {expected:.3g} s, the limit is {limit:g} s (--max_seconds)"

    def _open(
        self, contender: Contender, result: report.Result, trials: dict[str, tuple[Trial, measure.Stopwatch]]
    ) -> None:
        """Prepares a contender, adds it to `trials`, checks it, and runs it once to warm it up."""
        device = self.arguments.device
        try:
            trial = contender.start(result.length)
            start = time.perf_counter()
            problem, result.check = trial.check()
            expected = time.perf_counter() - start
            if problem is not None:
                result.status, result.reason = "failed", problem
                return
            # After a long check a CPU is warm; on a GPU the check may have been long because it compiled kernels.
            if device == "cuda" or expected < self.arguments.seconds_per_cell:
                trial.ready()
                expected = measure.seconds(trial.call, device)
            trials[contender.name] = (trial, measure.Stopwatch(trial.call, trial.ready, expected))
        except Exception as error:
            _explain(error, result)

    def _time(self, results: Sequence[report.Result], trials: dict[str, tuple[Trial, measure.Stopwatch]]) -> None:
        arguments = self.arguments
        watches = {name: watch for name, (_, watch) in trials.items()}
        timings = measure.interleaved(watches, arguments.device, REPEATS, arguments.seconds_per_cell)
        for result in (result for result in results if result.method in trials):
            trial, timing = trials[result.method][0], timings[result.method]
            if isinstance(timing, Exception):
                _explain(timing, result)
                continue
            result.timing = timing
            if arguments.profile and result.length == arguments.lengths[-1]:
                trial.ready()
                result.profile = measure.profile(trial.call, arguments.device)
            if trial.tokens is not None:
                result.tokens_per_second = trial.tokens / timing.median
            if trial.peak is not None and not arguments.skip_memory:
                trial.ready()
                try:
                    result.peak_bytes = trial.peak()
                except RuntimeError as error:
                    self.note(f"{result.panel}: {result.method} at L = {result.length}: no peak memory: {error}")


def _explain(error: Exception, result: report.Result) -> None:
    """Records an error: a method that runs out of memory is skipped, any other error is a failure."""
    result.status = "skipped" if isolated.out_of_memory(error) else "failed"
    result.reason = isolated.reason_of(error)
    gc.collect()
    if result.status == "skipped" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def attention_contender(bench: Bench, method: methods.Method, cell: methods.Cell) -> Contender:
    """Makes a contender of a method, which runs cells that differ from the given one in length alone."""

    def start(length: int) -> Trial:
        here = replace(cell, length=length)
        call = partial(methods.run_pass, method.prepare(here)[0], here.inputs())

        def check() -> tuple[str | None, dict[str, Any]]:
            found = method.check(here)
            return (None if found.passed else found.worst), asdict(found)

        peak: Callable[[], int] | None = None
        if here.decode:  # its first call reads the other tokens
            return Trial(check, call, ready=cache(call))
        if here.device == "cuda":
            peak = partial(measure.cuda_peak, call)
        elif isolated.unavailable() is None:
            peak = partial(_isolated_peak, method.name, here)
        return Trial(check, measure.Recorded(call) if bench.arguments.cuda_graph else call, peak)

    return Contender(method.name, method.exponent, method.refuses(cell), start)


def _isolated_peak(name: str, cell: methods.Cell) -> int:
    found = isolated.isolated(memory_limit(cell.device), torch.get_num_threads(), methods.peak_of, name, cell)
    if isinstance(found, isolated.Failure):
        raise RuntimeError(found.reason)
    return found


def memory_limit(device: str) -> float | None:
    """Gives the bytes that a method may take; a GPU has its own limit."""
    return None if device == "cuda" or isolated.unavailable() else MEMORY_SHARE * measure.free_bytes()


def run_attention(bench: Bench) -> Iterator[None]:
    """Runs a panel for each direction and pass; yields after each."""
    arguments = bench.arguments
    chosen = methods.select(arguments.methods, arguments.families, arguments.device)
    options = {"heads": HEADS, "head_dim": HEAD_DIM, "num_features": NUM_FEATURES, "seed": SEED}
    options |= {"batch_size": arguments.per_device_eval_batch_size, "dtype": arguments.dtype}
    options["device"] = arguments.device
    if arguments.device == "cpu" and not arguments.skip_memory:
        if (problem := isolated.unavailable()) is not None:
            bench.note(problem)
        else:  # starts the server, whose imports would slow down passes that are timed
            isolated.isolated(None, 1, methods.by_name, "none")
    for direction in arguments.directions:
        for pass_name in arguments.passes:
            if pass_name == "decode" and direction != "causal":
                continue
            cell = methods.Cell(2, direction == "causal", "backward" in pass_name, **options)
            cell = replace(cell, decode=pass_name == "decode")
            bench.run(f"{direction}, {pass_name}", [attention_contender(bench, method, cell) for method in chosen])
            methods.Cell.inputs.cache_clear()
            yield


def model_contender(bench: Bench, model: models.Model, backend: str, backward: bool) -> Contender:
    """Makes a contender of a backend of a model; `backward` says whether a pass has a backward pass."""

    def start(length: int) -> Trial:
        batch_size = bench.arguments.per_device_eval_batch_size
        inputs, slope = model.inputs(batch_size, length)
        given = (inputs, slope if backward else None)
        call, ready = partial(model.run, *given), partial(model.use, backend)
        peak = partial(_model_peak, model, call) if bench.arguments.device == "cuda" else None
        return Trial(lambda: (model.problem(backend, *given), None), call, peak, ready, batch_size * length)

    return Contender(backend, 2 if backend == "sdpa" else 1, None, start)


def _model_peak(model: models.Model, call: Callable[[], object]) -> int:
    """Measures peak bytes of a pass without gradients of earlier passes, which would not count as new memory."""
    model.module.zero_grad(set_to_none=True)
    return measure.cuda_peak(call)


def run_models(bench: Bench) -> Iterator[None]:
    """Runs a panel for each model and pass; yields after each."""
    arguments = bench.arguments
    for name in arguments.model_types:
        sizes = {"layers": LAYERS, "longest": arguments.lengths[-1], "num_features": NUM_FEATURES, "seed": SEED}
        model = models.Model.build(name, **sizes, dtype=getattr(torch, arguments.dtype))
        model.module.to(arguments.device)
        for pass_name in arguments.passes:
            backward = pass_name != "forward"
            contenders = [model_contender(bench, model, backend, backward) for backend in models.BACKENDS]
            bench.run(f"{name}, {pass_name}", contenders)
            yield


def explanation(arguments: argparse.Namespace) -> list[str]:
    """Explains how to read the numbers, as Markdown lines."""
    shape = f"batch {arguments.per_device_eval_batch_size}, {NUM_FEATURES} features, {arguments.dtype}, seed {SEED}"
    lines = [
        f"Medians of up to {REPEATS} samples (fewer where a pass is slow), methods in turns; quartiles are in the",
        "JSON. Causal rows of data-dependent features (gerf, saderf, aderf, sderf; favor++, favor#) compute what `pos`",
        "computes: statistics of a sequence would show its tokens the future. On a CPU a method that takes more than",
        "half of the free memory is skipped.",
    ]
    if arguments.model_types:
        return [
            *lines,
            f"Models: random weights, {LAYERS} layers, {shape}, up to the last hidden state, without a head. Width 768",
            "and 12 heads (llama: 4 key heads; gemma: 4 heads of width 256, one key head, a window of 512 in five",
            "layers of six; conformer: width 512, 8 heads). Tokens are patches of a ViT, and frames of a Conformer.",
            "forward+backward includes the gradients of all weights. Before its time each backend is run once and must",
            "give finite numbers and, for FAVOR, others than SDPA.",
        ]
    if arguments.cuda_graph:
        lines.append("Passes are replayed from CUDA graphs, so the host's share does not count, for any method.")
    return [
        *lines,
        f"Inputs: normal, standard deviation 1, {HEADS} heads of width {HEAD_DIM}, {shape}. forward+backward gives",
        "the gradients of query, key and value; decode is a step with the last of L tokens, after a state of the",
        "others, or with their keys and values. fla takes the features of `pos`, which torch computes. Before its time",
        "each method is compared with its own formula in",
        "float64 on the cell's inputs: up to 64 query rows of one head, with a backward all gradients that follow from",
        f"them; landmarks on up to {methods.LANDMARKS_CHECKED:,} tokens. Largest relative error allowed:",
        f"{TOLERANCE[arguments.dtype]:g}, gradients twice that, performer-pytorch in half precision four times that,",
        f"landmarks at least {methods.LANDMARKS_TOLERANCE:g}.",
        "Peak memory: what a pass allocates at its highest point, output and gradients included, inputs not; on a CPU",
        "in a fresh process for each cell, by the high-water mark of its resident memory.",
    ]


def context(arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Collects command, machine, versions and settings, with which a run can be repeated."""
    what = "Whole models" if arguments.model_types else "Attention"
    settings = {key: value for key, value in vars(arguments).items() if key != "output_dir"}
    settings |= {"num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    settings |= {"num_features": NUM_FEATURES, "num_hidden_layers": LAYERS, "repeats": REPEATS}
    return {
        "title": f"{what}: speed and memory on {'a GPU' if arguments.device == 'cuda' else 'a CPU'}",
        "command": shown_command("favor.eval.speed", argv, (), ("--output_dir",)),
        "machine": f"{launch.machine()}, {torch.get_num_threads()} threads",
        "versions": launch.versions("triton", methods.PERFORMER, methods.FLA),
        "seed": SEED,
        "settings": settings,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 1 if a cell failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    bench, about, lines = Bench(arguments), context(arguments, words), list[str]()
    place = (arguments.output_dir, arguments.name)
    with isolated.limited(memory_limit(arguments.device)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*parameters from this sequence would let its tokens see later ones")
        for _ in run_models(bench) if arguments.model_types else run_attention(bench):
            # Write after each panel, so that an error in a later panel does not lose it.
            lines = report.write(bench.results, bench.notes, explanation(arguments), about, *place)
    print("\n".join(["", *lines, "", f"written: {arguments.name}.md, .json and .png in {arguments.output_dir}"]))
    return int(any(result.status == "failed" for result in bench.results))


cli = program("favor.eval.speed", main)


if __name__ == "__main__":
    cli()
