"""What it costs to cut sequences over processes: bytes exchanged, memory and time, by length and number of processes.

    python -m favor.eval.speed.parallel --lengths 4096 16384 65536 --processes 1 2 4

A pass with all gradients of a small model, float32, one sequence. Each process holds a piece of it and has one thread.
Bytes are those that a process receives, counted at the collectives of torch; memory is by how much that of a process
rises in the pass. Ring attention and gathering of keys, which exact attention needs, are counted by formula.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import favor
from favor.eval.common import report
from favor.eval.common.isolated import release_early, resident_peak, warm_libraries
from favor.eval.common.program import add_results
from favor.train.common.program import Parser, program

NAME = "favor.eval.speed.parallel"
SEED, LAYERS, HEADS, WIDTH, VOCABULARY = 0, 2, 4, 64, 256
# By name: the class of the model, the backend and its options. K and M of landmarks are the defaults.
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "favor+": ("bert", "favor+", {}),
    "favor+, causal": ("llama", "favor+", {}),
    "favor+, causal, window of 64": ("llama", "favor+", {"window": 64}),
    "landmark": ("bert", "landmark", {}),
    "landmark, causal": ("llama", "landmark", {}),
}
LONGEST = {"landmark, causal": 16384}  # tokens: each query searches all keys, so longer ones take minutes


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, default=[4096, 16384, 65536], help="tokens of the whole sequence")
    add("--processes", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to measure", metavar="METHOD")
    add_results(parser, "speed_parallel")
    given = parser.parse_args(words)
    if min(given.processes) < 1 or any(length % number for length in given.lengths for number in given.processes):
        parser.error("each of --lengths must be a multiple of each of --processes, which are at least 1")
    return given


def build(method: str, length: int) -> PreTrainedModel:
    """Makes the model, with equal weights in every process."""
    kind, backend, options = METHODS[method]
    shape: dict[str, Any] = {"hidden_size": HEADS * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    shape |= {"intermediate_size": 2 * HEADS * WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": length}
    torch.manual_seed(SEED)
    model: PreTrainedModel = (
        LlamaForCausalLM(LlamaConfig(**shape))
        if kind == "llama"
        else BertForMaskedLM(BertConfig(**shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    )
    return favor.configure(model, backend, exact_below=0, **options)


class Received(TorchDispatchMode):
    """Counts the bytes that this process receives in collectives."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes, self.bytes = processes, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            if "allgather" not in name and "alltoall" not in name:
                raise NotImplementedError(f"bytes of {name} are not counted")
            arrives = sum(own.nbytes for own in tree_leaves(args[0]) if isinstance(own, Tensor))
            self.bytes += arrives * (self.processes - 1) // self.processes  # its own part it has
        return function(*args, **(kwargs or {}))


def measure(rank: int, processes: int, method: str, length: int, folder: str) -> None:
    """Measures one pass in a process, and writes what it found to a file of the folder."""
    torch.set_num_threads(1)
    release_early()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    model, group = build(method, length), dist.group.WORLD
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(SEED))
    is_causal = METHODS[method][0] == "llama"
    batch = favor.shard({"input_ids": ids, "labels": ids}, group, is_causal=is_causal)
    options = {"num_items_in_batch": length} if is_causal else {}
    warm_libraries()

    def one_pass() -> None:
        model(**batch, **options).loss.backward()

    received = Received(processes)
    with ExitStack() as inside:
        if processes > 1:
            inside.enter_context(favor.sequence_parallel(group))
        with received:  # it is the first pass, and slower: its time is not kept
            _, peak, _ = resident_peak(one_pass)
        model.zero_grad()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        one_pass()
        found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    found |= {"peak": peak, "bytes": received.bytes / LAYERS}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def cell(method: str, length: int, processes: int) -> dict[str, float]:
    """Measures one pass in so many processes; gives the largest number of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, method, length, folder)
        torch.multiprocessing.start_processes(measure, arguments, nprocs=processes, start_method="forkserver")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
    return {name: max(own[name] for own in found) for name in found[0]}


def by_formula(length: int, processes: int) -> float:
    """Counts the bytes of a layer that a process receives with exact attention, both passes, float32.

    Keys and values go round, and backwards with their gradients. To gather them once, and to bring their gradients
    back, takes 2/3 of it, and memory for those of all.
    """
    return 3 * 2 * length * HEADS * WIDTH * 4 * (processes - 1) / processes


HEADER = ["method", "tokens", "processes", "MB received", "of keys and values", "memory, MB", "of one process"]
HEADER += ["CPU, s", "wall clock, s"]
TEXT = (
    "One pass with all gradients of a model of {layers} layers with {heads} heads of {width}, float32, one sequence. "
    "Received: by a process in a layer, both passes; then as a part of the keys and values of the whole sequence. "
    "Memory: by how much that of a process rises. CPU: of the process that takes longest. Processes have one thread "
    "each and share the cores."
)


def row(own: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[str]:
    """Writes a row of the table."""
    keys = 2 * own["tokens"] * HEADS * WIDTH * 4
    alone = [
        one["peak"]
        for one in results
        if (one["method"], one["tokens"], one["processes"]) == (own["method"], own["tokens"], 1)
    ]
    cells = [own["method"], f"{own['tokens']:,}", str(own["processes"])]
    cells += [f"{own['bytes'] / 1e6:.3g}", f"{own['bytes'] / keys:.3g}", f"{own['peak'] / 1e6:.4g}"]
    share = f"{own['peak'] / alone[0]:.2f}" if alone and own["processes"] > 1 else ""
    return [*cells, share, f"{own['cpu']:.3g}", f"{own['wall']:.3g}"]


def checks_of(results: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks what should not depend on the length, and the memory of four processes."""
    checks = []
    for method in ("favor+", "favor+, causal"):
        found = {own["tokens"]: own["bytes"] for own in results if own["method"] == method and own["processes"] == 4}
        if len(found) > 1:
            said = ", ".join(f"{tokens:,}: {number:,.0f}" for tokens, number in found.items())
            checks.append(
                report.Check(f"bytes of {method} do not depend on the length", said, len(set(found.values())) == 1)
            )
    for own in results:
        if own["processes"] == 4 and own["tokens"] == max(other["tokens"] for other in results):
            share = row(own, results)[6]
            if share:
                holds = float(share) <= 0.3
                checks.append(report.Check(f"{own['method']}: memory is 0.3 of one process at most", share, holds))
    return checks


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check fails."""
    given = parse_arguments(argv)
    known, results = report.Records(given.output_dir / f"{given.name}.jsonl"), []
    for length in sorted(given.lengths):
        for method in (own for own in given.methods if length <= LONGEST.get(own, length)):
            for processes in sorted(given.processes):
                of = [method, length, processes]
                found = known.find(of)
                if found is None:
                    found = cell(*of)
                    known.add(of, found)
                results.append({"method": method, "tokens": length, "processes": processes, **found})
                print("  ".join(row(results[-1], results)), flush=True)
    formulas = [
        [f"{length:,}", str(processes), f"{by_formula(length, processes) / 1e6:.3g}"]
        for length in sorted(given.lengths)
        for processes in sorted(given.processes)
        if processes > 1
    ]
    lines = ["# Sequences cut over processes", "", TEXT.format(layers=LAYERS, heads=HEADS, width=WIDTH), ""]
    lines += report.table(HEADER, [row(own, results) for own in results])
    lines += ["", "Exact attention in a ring, by formula: MB that a process receives in a layer.", ""]
    lines += report.table(["tokens", "processes", "MB"], formulas)
    content = {**report.context_of(NAME, argv, ("transformers",)), "seed": SEED, "results": results}
    return report.finish(given, lines, content, checks_of(results))


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
