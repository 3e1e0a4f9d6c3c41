"""Speed and memory of FAVOR attention, compared with exact attention and other packages, with results checked first.

    python -m favor.eval.speed                             attention, by length, direction and pass
    python -m favor.eval.speed --model_types bert llama    whole models, in tokens per second

The program writes a Markdown table, JSON and a plot. Results are checked in float64 before they are timed: a cell whose
result is wrong shows FAILED and no time.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from favor.eval.common import launch
from favor.eval.common import report as common
from favor.eval.common.program import device_or_default
from favor.eval.speed import measure, methods, report
from favor.eval.speed import models as speed_models
from favor.eval.speed.cell import Cell, run_pass
from favor.eval.speed.panel import REPEATS, Bench, Contender, Trial
from favor.eval.speed.reference import TOLERANCE
from favor.train.common.program import Parser, program

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("bidirectional", "causal")
PASSES = ("forward", "forward+backward")
LONGEST = {"cpu": 1 << 15, "cuda": 1 << 18}
# Attention: heads, of queries and of keys and values, and their width. Models: layers, in the shape of BERT-base.
HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 8, 8, 64, 12
# Random features, or means of landmarks in encoders, per head.
NUM_FEATURES = 256
# Part of the free memory that a method may need.
MEMORY_SHARE = 0.5
SEED = 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments and fills in defaults that depend on the device; ends the program for bad ones."""
    parser = Parser("favor.eval.speed", __doc__)
    add = parser.add_argument
    add("--model_types", nargs="+", choices=speed_models.MODELS, help="time whole models instead of attention")
    add("--lengths", type=int, nargs="+", help="default: powers of two from 128 to 32768 (CPU) or 262144 (CUDA)")
    add("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="directions of attention")
    add("--passes", nargs="+", choices=PASSES, default=PASSES, help="passes to time")
    add("--methods", nargs="+", choices=methods.GROUPS, default=methods.GROUPS, help="methods to compare")
    add(
        "--families",
        nargs="+",
        default=["pos"],
        help="registry names of families, one row each; NAME@128 with exact blocks of 128 tokens, landmark+256 "
        "with 256 selected keys, landmark+0 with none",
    )
    add("--per_device_eval_batch_size", type=int, default=1, help="sequences of a batch")
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on; default: cuda if there is a GPU, else cpu",
    )
    add("--dtype", choices=DTYPES, help="type of the numbers; default: float32 on a CPU, bfloat16 on CUDA")
    add("--seconds_per_cell", type=float, default=1.0, help="a method slower than this is repeated less often")
    add("--max_seconds", type=float, default=10.0, help="a method whose pass would take longer is skipped")
    add("--cuda_graph", action="store_true", help="time replays of a CUDA graph, without the time of the host")
    add("--skip_memory", action="store_true", help="do not measure peak memory")
    add("--output_dir", type=Path, default=Path("out/results"), help="folder of the results")
    add("--name", help="name of the files; default: speed_cpu, speed_gpu, models_cpu or models_gpu")
    add("--isolate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    import torch

    arguments.device = device_or_default(arguments.device)
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("expected a CUDA device for --device cuda, got none; use --device cpu")
    if arguments.cuda_graph and (not cuda or arguments.model_types):
        parser.error("expected --cuda_graph with --device cuda and without --model_types")
    arguments.dtype = arguments.dtype or ("bfloat16" if cuda else "float32")
    if arguments.lengths is None:
        arguments.lengths = [1 << power for power in range(7, LONGEST[arguments.device].bit_length())]
    if (size := arguments.per_device_eval_batch_size) < 1:
        parser.error(f"expected --per_device_eval_batch_size of at least 1, got {size}")
    arguments.lengths = sorted(set(arguments.lengths))
    if arguments.lengths[0] < 1:
        parser.error(f"expected --lengths of at least 1, got {arguments.lengths[0]}")
    if arguments.name is None:
        arguments.name = ("models_" if arguments.model_types else "speed_") + ("gpu" if cuda else "cpu")
    return arguments


WARM_UP = 1024  # tokens, long enough that every part of each method runs


def attention_contender(bench: Bench, method: methods.Method, cell: Cell) -> Contender:
    """Makes a contender of a method.

    Args:
        bench: settings of all panels.
        method: the method.
        cell: the contender runs cells that differ from it in length alone.
    """

    def refuses(length: int) -> str | None:
        here = replace(cell, length=length)
        needed = method.scratch_bytes(here)
        return method.refuses(here) or _over_limit(needed, bench.memory_limit)

    def start(length: int) -> Trial:
        here = replace(cell, length=length)
        query, key, value, slope = _inputs(here)
        prepared = method.prepare(here)
        own = [
            prepared.layout(tensor.detach()).requires_grad_(tensor.requires_grad)
            for tensor in (query, key, value, slope)
        ]

        def check() -> tuple[str | None, dict[str, Any]]:
            factor = method.factor if here.itemsize == 2 else 1.0
            found = prepared.check(here, query, key, value, factor)
            return (None if found.passed else found.worst), found.to_dict()

        call = partial(run_pass, prepared.attend, *own)
        timed = measure.Recorded(call) if bench.arguments.cuda_graph else call
        peak: Callable[[], int] | None = None
        if here.device == "cuda":
            peak = partial(measure.cuda_peak, call)
        elif bench.server is not None:
            peak = partial(bench.server.peak, {"method": method.name, "cell": asdict(here)})
        return Trial(check, timed, peak, flops=method.flops(here), moved_bytes=here.input_output_bytes)

    return Contender(method.name, method.exponent, refuses, start)


def _over_limit(needed: float, limit: float) -> str | None:
    if needed <= limit:
        return None
    return f"it needs about {needed / 1e9:.3g} GB, the limit is {limit / 1e9:.3g} GB, half of the free memory"


@lru_cache(maxsize=1)
def _inputs(cell: Cell) -> tuple[torch.Tensor, ...]:
    return cell.inputs()


def isolated_peak(request: dict[str, Any]) -> int:
    """Measures peak bytes of one pass in the calling process, as `favor.eval.speed.measure` describes."""
    cell, method = Cell(**request["cell"]), methods.by_name(request["method"])
    warnings.simplefilter("ignore")
    for one in (replace(cell, length=min(WARM_UP, cell.length)), cell):
        prepared, inputs = method.prepare(one), [*one.inputs()]
        if one is not cell:
            run_pass(prepared.attend, *inputs)
    measure.warm_libraries()
    return measure.resident_peak(lambda: run_pass(prepared.attend, *inputs))


def run_attention(bench: Bench) -> Iterator[None]:
    """Runs a panel for each direction and pass; yields after each."""
    arguments = bench.arguments
    chosen = []
    for method in methods.select(arguments.methods, arguments.families, arguments.device):
        if (missing := method.missing()) is None:
            chosen.append(method)
        else:
            bench.note(f"{method.name} skipped: {missing}")
    shape = {
        "batch_size": arguments.per_device_eval_batch_size,
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "num_features": NUM_FEATURES,
    }
    same = {"dtype": arguments.dtype, "device": arguments.device, "seed": SEED}
    for direction in arguments.directions:
        for pass_name in arguments.passes:
            cell = Cell(1, direction == "causal", pass_name != "forward", **shape, **same)
            bench.run(f"{direction}, {pass_name}", [attention_contender(bench, method, cell) for method in chosen])
            _inputs.cache_clear()
            yield


def model_contender(bench: Bench, model: speed_models.Model, backend: str, backward: bool) -> Contender:
    """Makes a contender of a backend of a model.

    Args:
        bench: settings of all panels.
        model: the model.
        backend: the backend.
        backward: whether a pass has a backward pass.
    """
    batch_size = bench.arguments.per_device_eval_batch_size

    def refuses(length: int) -> str | None:
        return _over_limit(model.scratch_bytes(batch_size, length, backward), bench.memory_limit)

    def start(length: int) -> Trial:
        tokens = model.tokens(batch_size, length)
        slope = model.slope(batch_size, length) if backward else None
        call = partial(model.run, tokens, slope)
        peak = partial(_model_peak, model, call) if model.device == "cuda" else None
        return Trial(
            lambda: (model.problem(backend, tokens, slope), None),
            call,
            peak,
            ready=partial(model.use, backend),
            tokens=tokens.numel(),
        )

    return Contender(backend, 2 if backend == "sdpa" else 1, refuses, start)


def _model_peak(model: speed_models.Model, call: Callable[[], object]) -> int:
    """Measures peak bytes of a pass without gradients of earlier passes, which would not count as new memory."""
    model.module.zero_grad(set_to_none=True)
    return measure.cuda_peak(call)


def run_models(bench: Bench) -> Iterator[None]:
    """Runs a panel for each model and pass; yields after each."""
    arguments = bench.arguments
    for name in arguments.model_types:
        model = speed_models.Model.build(
            name,
            layers=LAYERS,
            longest=arguments.lengths[-1],
            num_features=NUM_FEATURES,
            seed=SEED,
            dtype=arguments.dtype,
            device=arguments.device,
        )
        for pass_name in arguments.passes:
            backward = pass_name != "forward"
            contenders = [model_contender(bench, model, backend, backward) for backend in speed_models.BACKENDS]
            bench.run(f"{name}, {pass_name}", contenders)
            yield


def explanation(bench: Bench) -> list[str]:
    """Explains how to read the numbers, as Markdown lines."""
    a, ceilings = bench.arguments, bench.ceilings
    lines = [
        f"Medians of up to {REPEATS} samples (fewer where a pass is slow), methods in turns; quartiles are in the",
        "JSON. Causal rows of data-dependent features (gerf, saderf, aderf, sderf; favor++, favor#) compute what `pos`",
        "computes: statistics of a sequence would show its tokens the future.",
    ]
    if a.model_types:
        return [
            *lines,
            f"Models: random weights, {LAYERS} layers of width 768, 12 heads (llama: 4 key heads),",
            f"batch {a.per_device_eval_batch_size}, {NUM_FEATURES} features, {a.dtype}, seed {SEED}, up to the",
            "last hidden state, without a head; forward+backward includes the gradients of all weights. Before its",
            "time each backend is run once and must give finite numbers and, for FAVOR, others than SDPA.",
        ]
    if a.cuda_graph:
        lines.append("Passes are replayed from CUDA graphs, so the host's share does not count, for any method.")
    return [
        *lines,
        "Inputs: normal, standard deviation 1,",
        f"batch {a.per_device_eval_batch_size}, {HEADS} heads, {KEY_HEADS} key heads, width {HEAD_DIM},",
        f"{NUM_FEATURES} features, {a.dtype}, seed {SEED}. forward+backward gives the gradients of query, key and",
        "value. Before its time each method is compared with its own formula in float64 on the cell's inputs: up to 64",
        "query rows of one head, with a backward all gradients that follow from them. Largest relative error allowed:",
        f"{TOLERANCE[a.dtype]:g}, gradients twice that, performer-pytorch in half precision four times that.",
        "Peak memory: what a pass allocates at its highest point, output and gradients included, inputs not; on a CPU",
        "in a fresh process for each cell, by the high-water mark of its resident memory.",
        "Operations counted, per token and head: FAVOR and performer-pytorch 8 M d forward, 24 M d forward+backward;",
        "landmarks 4 d, thrice that forward+backward, for each key and mean that is read, and nothing for searches;",
        "softmax 4 L d, half of it causal, 3.5 times that forward+backward; fla 4 d^2 and 12 d^2. Roofline: the larger",
        "of operations over the matmul ceiling and bytes of inputs and outputs (with a backward also of their",
        f"gradients) over the copy ceiling, both measured in this run: {ceilings.matmul_flops / 1e12:.3g} TFLOP/s in",
        f"{a.dtype}, {ceilings.copy_bytes / 1e9:.3g} GB/s read plus written. Caches can hold short cells and beat the",
        f"copy ceiling. A method that would need more than {bench.memory_limit / 1e9:.3g} GB is skipped.",
    ]


def shown_command(argv: Sequence[str]) -> str:
    """Gives the command line of this program for a result, without its output folder."""
    return common.shown_command("favor.eval.speed", argv, (), ("--output_dir",))


def context(bench: Bench, argv: Sequence[str]) -> dict[str, Any]:
    """Collects command, machine, versions and settings, with which a run can be repeated."""
    arguments = bench.arguments
    versions = launch.versions()
    for package in ("triton", "performer-pytorch", "flash-linear-attention"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    what = "Whole models" if arguments.model_types else "Attention"
    settings = {key: value for key, value in vars(arguments).items() if key not in ("output_dir", "isolate")}
    settings |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_DIM}
    settings |= {"num_features": NUM_FEATURES, "num_hidden_layers": LAYERS, "repeats": REPEATS}
    return {
        "title": f"{what}: speed and memory on {'a GPU' if arguments.device == 'cuda' else 'a CPU'}",
        "command": shown_command(argv),
        "machine": f"{launch.machine()}, {torch.get_num_threads()} threads",
        "versions": versions,
        "seed": SEED,
        "settings": settings,
        "memory_limit_bytes": bench.memory_limit,
        "ceilings": asdict(bench.ceilings),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code, 1 if a cell failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    if arguments.isolate:
        methods.preload()
        measure.serve(sys.stdin, sys.stdout, isolated_peak)
        return 0
    limit = MEMORY_SHARE * measure.free_bytes(arguments.device)
    bench = Bench(arguments, measure.ceilings(arguments.dtype, arguments.device), limit)
    ceilings = bench.ceilings
    about, lines = context(bench, words), []
    bench.say(f"ceilings: {ceilings.matmul_flops / 1e12:.3g} TFLOP/s, {ceilings.copy_bytes / 1e9:.3g} GB/s")
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*parameters from this sequence would let its tokens see later ones")
        if not arguments.model_types and arguments.device == "cpu" and not arguments.skip_memory:
            if (problem := measure.MemoryServer.problem()) is None:
                bench.server = stack.enter_context(measure.MemoryServer(torch.get_num_threads()))
            else:
                bench.note(problem)
        for _ in run_models(bench) if arguments.model_types else run_attention(bench):
            # Write after each panel, so that an error in a later panel does not lose it.
            lines = report.write(
                bench.results, bench.notes, explanation(bench), about, arguments.output_dir, arguments.name
            )
    print("\n".join(["", *lines, "", f"written: {arguments.name}.md, .json and .png in {arguments.output_dir}"]))
    return int(any(result.status == "failed" for result in bench.results))


cli = program("favor.eval.speed", main)


if __name__ == "__main__":
    cli()
