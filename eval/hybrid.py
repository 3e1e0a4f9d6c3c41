"""Time and memory of an encoder with the local and global layers of ModernBERT, by length."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertModel

import favor
from favor.eval.common import report
from favor.eval.options.hybrid import parse_arguments
from favor.eval.speed.measure import release_early, resident_peak
from favor.train.common.program import program


def build(arguments: argparse.Namespace) -> ModernBertModel:
    """Makes the model, with random weights."""
    torch.manual_seed(arguments.seed)
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "vocab_size": 50368,
    }
    config = ModernBertConfig(
        **sizes,
        num_hidden_layers=arguments.num_hidden_layers,
        max_position_embeddings=max(arguments.lengths),
        local_attention=128,
    )
    return ModernBertModel(config).eval()


@torch.no_grad()
def run(model: ModernBertModel, backend: str, ids: Tensor, arguments: argparse.Namespace) -> Tensor:
    """Switches the backend and gives the last hidden state `[1, L, 768]`.

    Args:
        model: the encoder.
        backend: "sdpa" or a backend of favor.
        ids: tokens `[1, L]`.
        arguments: of the program.
    """
    if backend == "sdpa":
        model.set_attn_implementation("sdpa")
    else:
        favor.configure(model, backend, num_features=arguments.num_features, exact_below=0)
    return model(input_ids=ids).last_hidden_state


def measure(model: ModernBertModel, arguments: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """Measures median seconds, and peak bytes above those before the pass, by backend and length."""
    generator = torch.Generator().manual_seed(arguments.seed)
    tokens = {length: torch.randint(1000, 50000, (1, length), generator=generator) for length in arguments.lengths}
    backends = ["sdpa", *arguments.backends]
    results: dict[str, dict[int, dict[str, float]]] = {backend: {} for backend in backends}
    for length, ids in tokens.items():
        samples: dict[str, list[float]] = {backend: [] for backend in backends}
        for repeat in range(arguments.repeats + 1):
            for backend in backends:
                start = time.perf_counter()
                hidden = run(model, backend, ids, arguments)
                if not hidden.isfinite().all():
                    raise RuntimeError(f"{backend} gives numbers that are not finite at {length} tokens")
                if repeat:  # the first pass warms up
                    samples[backend].append(time.perf_counter() - start)
        for backend in backends:
            results[backend][length] = {"seconds": statistics.median(samples[backend])}
            print(f"{length} tokens, {backend}: {results[backend][length]['seconds']:.3g} s", flush=True)
    release_early()
    for length, ids in tokens.items():
        for backend in backends:
            results[backend][length]["bytes"] = resident_peak(lambda b=backend, i=ids: run(model, b, i, arguments))
    return results


def checks_of(results: dict[str, Any], lengths: Sequence[int], backend: str) -> list[report.Check]:
    """Checks speed, growth of time, and memory of a linear encoder at the two greatest lengths."""
    most, before = lengths[-1], lengths[-2] if len(lengths) > 1 else lengths[-1]
    own, exact = results[backend], results["sdpa"]
    faster = exact[most]["seconds"] / own[most]["seconds"]
    growth = own[most]["seconds"] / own[before]["seconds"]
    memory = own[most]["bytes"] / exact[most]["bytes"]
    limit = 1.1 * most / before
    return [
        report.Check(f"{backend} is at least 3 times as fast as sdpa at {most} tokens", f"{faster:.2f} x", faster >= 3),
        report.Check(f"its time grows at most {limit:.2g} x from {before} tokens", f"{growth:.2f} x", growth <= limit),
        report.Check("its peak memory is at most 0.7 of that of sdpa", f"{memory:.2f}", memory <= 0.7),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    torch.set_num_threads(arguments.threads)
    model = build(arguments)
    results = measure(model, arguments)
    rows = []
    for length in arguments.lengths:
        exact = results["sdpa"][length]
        for backend, own in ((name, cells[length]) for name, cells in results.items()):
            seconds, peak = own["seconds"], own["bytes"]
            speed, memory = exact["seconds"] / seconds, peak / exact["bytes"]
            rows.append([str(length), backend, f"{seconds:.3g}", f"{speed:.2f}", f"{peak / 1e6:.0f}", f"{memory:.2f}"])
    header = ["tokens", "backend", "seconds", "x as fast as sdpa", "peak MB", "x of sdpa's memory"]
    global_layers = (model.config.layer_types or []).count("full_attention")
    lines = [
        "# An encoder with local and global layers",
        "",
        f"ModernBERT's geometry: {arguments.num_hidden_layers} layers ({global_layers} global, the others see 64 "
        "tokens on each side), 768 wide, 12 heads, random weights, float32, batch 1, forward; "
        f"{arguments.num_features} features or means of landmarks in the global layers. Medians of {arguments.repeats} "
        "passes in turns; memory above that before the pass. More speed and less memory are better.",
        "",
        *report.table(header, rows),
    ]
    checks = checks_of(results, arguments.lengths, arguments.backends[0])
    command = report.shown_command("favor.eval.hybrid", words, [], ["--output_dir"])
    content = {**report.context(command, ("transformers",)), "seed": arguments.seed, "results": results}
    report.write(arguments.output_dir, arguments.name, lines, content, checks)
    print("\n".join(["", *lines, "", *(check.line() for check in checks)]))
    return 0


cli = program("favor.eval.hybrid", main)


if __name__ == "__main__":
    cli()
