"""Time of a token in generation after contexts of growing length, and size of the cache."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import favor
from favor.eval.common import report
from favor.eval.options.generation import parse_arguments
from favor.eval.speed.models import Model
from favor.train.common.program import program

TOLERANCE = 1e-3
WAYS = ("sdpa, DynamicCache", "favor, DynamicCache", "favor, FavorCache")


class Way:
    """One way to generate: a backend and a cache.

    Args:
        name: one of `WAYS`.
        model: the model whose backend is switched.
        arguments: of the program.
    """

    def __init__(self, name: str, model: Model, arguments: argparse.Namespace) -> None:
        self.name, self.model, self.arguments = name, model, arguments
        self.cache: Any = favor.FavorCache() if name == WAYS[2] else DynamicCache()
        self.milliseconds: list[float] = []

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next tokens; gives the last hidden state, `[B, 768]`."""
        if self.name == WAYS[0]:
            self.model.use("sdpa")
        else:
            self.model.use(self.arguments.attn_implementation)
            favor.configure(self.model.module, window=self.arguments.window)
        _wait(self.arguments.device)
        clock = time.perf_counter()
        hidden = self.model.module(input_ids=tokens, past_key_values=self.cache, use_cache=True).last_hidden_state
        _wait(self.arguments.device)
        self.milliseconds.append(1e3 * (time.perf_counter() - clock))
        return hidden[:, -1]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        if isinstance(self.cache, favor.FavorCache):
            return self.cache.nbytes
        return sum(tensor.nbytes for layer in self.cache.layers for tensor in (layer.keys, layer.values))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(model: Model, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures, for each way, milliseconds of a token and of the context, and bytes of the cache.

    Also gives the largest difference between the hidden states with the two caches.

    Args:
        model: the decoder.
        context: number of tokens before those that are timed.
        arguments: of the program.
    """
    tokens = model.tokens(arguments.per_device_eval_batch_size, context + arguments.tokens)
    ways = [Way(name, model, arguments) for name in WAYS]
    error = torch.zeros(())
    for start, stop in [(0, context), *((context + i, context + i + 1) for i in range(arguments.tokens))]:
        _, expected, found = (way.read(tokens[:, start:stop]) for way in ways)
        error = torch.maximum(error, ((found - expected).float().norm() / expected.float().norm()).cpu())
    result = {
        way.name: {
            "milliseconds": statistics.median(way.milliseconds[2:]),
            "context_milliseconds": way.milliseconds[0],
            "bytes": way.nbytes,
        }
        for way in ways
    }
    return {"ways": result, "error": error.item()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if the caches disagree."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    numbers = {name: getattr(arguments, name) for name in ("num_features", "seed", "dtype", "device")}
    model = Model.build(
        "llama",
        longest=arguments.lengths[-1] + arguments.tokens,
        layers=arguments.num_hidden_layers,
        **numbers,
    )
    limit = TOLERANCE if arguments.dtype == "float32" else 20 * TOLERANCE
    measure(model, 8, arguments)  # first calls cost more
    rows, results = [], {}
    for context in arguments.lengths:
        result = measure(model, context, arguments)
        if not result["error"] < limit:
            print(f"{context} tokens: the caches differ by {result['error']:.1e}: no times are given")
            return 1
        results[str(context)] = result
        own = [result["ways"][name] for name in WAYS]
        rows.append([str(context), *(f"{way['milliseconds']:.3g}" for way in own)])
        rows[-1] += [f"{way['bytes'] / 1e6:.3g}" for way in own]
        print("  ".join(rows[-1]), flush=True)
    header = ["context", *(f"{name}, ms" for name in WAYS), *(f"{name}, MB" for name in WAYS)]
    lines = [
        "# Generation: time of a token and size of the cache",
        "",
        f"LLaMA shape, {arguments.num_hidden_layers} layers, 768 wide, 12 heads, 4 key heads, random weights, "
        f"{arguments.dtype}, batch {arguments.per_device_eval_batch_size}; `{arguments.attn_implementation}` with "
        f"{arguments.num_features} features, window {arguments.window}. Medians of {arguments.tokens - 1} tokens "
        "after a context, the three in turns; hidden states of the two caches agree to "
        f"{max(r['error'] for r in results.values()):.1e}.",
        "",
        *report.table(header, rows),
    ]
    ends = (arguments.lengths[0], arguments.lengths[-1])
    first, last = (results[str(context)]["ways"][WAYS[2]] for context in ends)
    span = f"{ends[0]} to {ends[1]} tokens"
    checks = []
    for statement, name, most in (
        ("with a FavorCache the time of a token does not grow (at most 1.5 x)", "milliseconds", 1.5),
        ("nor does the cache, but for the last block of a window", "bytes", 2.0 if arguments.window else 1.0),
    ):
        growth = last[name] / first[name]
        checks.append(report.Check(statement, f"{growth:.2f} x from {span}", growth <= most))
    command = report.shown_command("favor.eval.generation", words, [], ["--output_dir"])
    content = {**report.context(command, ("transformers",)), "seed": arguments.seed, "contexts": results}
    report.write(arguments.output_dir, arguments.name, lines, content, checks)
    print("\n".join(["", *lines, "", *(check.line() for check in checks)]))
    return 0


cli = program("favor.eval.generation", main)


if __name__ == "__main__":
    cli()
