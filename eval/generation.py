"""Time of a token in generation after contexts of growing length, and size of the cache, compared with exact attention.

    python -m favor.eval.generation --shapes llama gemma --lengths 16384 32768

A decoder with random weights reads a context and then continues token by token: with exact attention and a
`DynamicCache`, and with a backend and its `FavorCache`, in turns. Times are given only if the last hidden state with
the `FavorCache` equals that of a full pass without a cache. Both backends need no calibration.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaModel

import favor
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.speed.measure import seconds
from favor.train.common.program import Parser, program


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads of width {self.head_dim}, {self.key_heads} of keys"
        return f"{self.layers} layers, {self.width} wide, {heads}"


# A decoder with the heads of the global layers of Gemma 3 270M is the last one.
SHAPES = {"grouped": Shape(2, 768, 12, 4, 64), "llama": Shape(4, 512, 8, 8, 64), "gemma": Shape(4, 512, 4, 1, 256)}
TOKENS = 24  # after each context, all but two of them timed
TOLERANCE = 1e-3
SEED = 0
VOCABULARY = 1000
# The options that each backend takes.
BACKENDS = {"favor+": ("num_features", "window"), "landmark": ("selected_keys",)}


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.generation", __doc__)
    add = parser.add_argument
    lengths = "tokens of the context, before those that are timed"
    add("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], metavar="L", help=lengths)
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="backends to compare with sdpa")
    add("--shapes", nargs="+", choices=SHAPES, default=["grouped"], help="sizes of the decoder")
    add("--num_features", type=int, default=256, help="random features per head")
    add("--window", type=int, default=0, help="tokens of exact blocks; 0: no blocks")
    add("--selected_keys", type=int, help="keys that a block chooses; default: that of the method")
    add("--device", default="cpu", help="device to run on")
    add_results(parser, "generation_cpu")
    given = parser.parse_args(words)
    if min(*given.lengths, given.num_features) < 1 or given.window < 0:
        parser.error("--window must not be negative, --lengths and --num_features at least 1")
    given.lengths = sorted(set(given.lengths))
    return given


def build(shape: Shape, longest: int, device: str) -> LlamaModel:
    """Makes a decoder with random weights, which are the same in each call."""
    sizes: dict[str, Any] = {"hidden_size": shape.width, "intermediate_size": 2 * shape.width}
    sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads, "head_dim": shape.head_dim}
    sizes |= {"num_hidden_layers": shape.layers, "max_position_embeddings": longest}
    torch.manual_seed(SEED)
    return LlamaModel(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval().to(device)


class Way:
    """One way to generate: a model with its attention, and a cache."""

    def __init__(self, model: LlamaModel, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.times: list[float] = []

    def read(self, tokens: Tensor) -> Tensor:
        """Reads the next tokens `[1, L]`; gives the last hidden state `[1, width]`."""
        found: list[Tensor] = []

        def call() -> None:
            found.append(self.model(tokens, past_key_values=self.cache).last_hidden_state[:, -1])

        self.times.append(1e3 * seconds(call, self.model.device.type))
        return found[0]

    @property
    def milliseconds(self) -> float:
        """Median time of a token, without the context and two tokens after it."""
        return statistics.median(self.times[3:])

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        if isinstance(self.cache, favor.FavorCache):
            return self.cache.nbytes
        return sum(tensor.nbytes for layer in self.cache.layers for tensor in (layer.keys, layer.values))


@torch.no_grad()
def measure(shape: Shape, backend: str, context: int, given: argparse.Namespace) -> dict[str, float]:
    """Measures milliseconds of a token and bytes of the cache after a context, with exact attention and with a backend.

    Also gives the error of the last hidden state with a `FavorCache`, relative to a full pass without a cache.
    """
    length = context + TOKENS
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(SEED)).to(given.device)
    model = build(shape, length, given.device)
    model.set_attn_implementation("sdpa")
    exact = Way(model, DynamicCache(config=model.config))
    options = {name: getattr(given, name) for name in BACKENDS[backend]}
    model = favor.configure(build(shape, length, given.device), backend, exact_below=0, **options)
    own = Way(model, favor.FavorCache(model.config))
    for tokens in (ids[:, :context], *ids[:, context:].split(1, 1)):
        exact.read(tokens)
        found = own.read(tokens)
    expected = model(ids, use_cache=False).last_hidden_state[:, -1]
    return {
        "exact_ms": exact.milliseconds,
        "own_ms": own.milliseconds,
        "exact_bytes": exact.nbytes,
        "own_bytes": own.nbytes,
        "error": float((found - expected).norm() / expected.norm()),
    }


def shown(cells: dict[str, Any]) -> list[str]:
    """Writes a row of the table."""
    times = [f"{cells['exact_ms']:.3g}", f"{cells['own_ms']:.3g}", f"{cells['exact_ms'] / cells['own_ms']:.2f}"]
    sizes = [f"{cells[name] / 1e6:.3g}" for name in ("exact_bytes", "own_bytes")]
    return [cells["shape"], cells["backend"], str(cells["context"]), *times, *sizes, f"{cells['error']:.0e}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a result with the cache differs from a full pass."""
    given = parse_arguments(argv)
    rows: list[dict[str, Any]] = []
    for name, backend, context in itertools.product(given.shapes, given.backends, given.lengths):
        cells = measure(SHAPES[name], backend, context, given)
        if not cells["error"] < TOLERANCE:
            said = f"the cache differs from a full pass by {cells['error']:.1e}: no times are given"
            print(f"{name}, {backend}, {context} tokens: {said}")
            return 1
        rows.append({"shape": name, "backend": backend, "context": context, **cells})
        print("  ".join(shown(rows[-1])), flush=True)
    shapes = "; ".join(f"{name}: {SHAPES[name]}" for name in given.shapes)
    header = ["shape", "backend", "context", "exact, ms", "backend, ms", "times as fast"]
    header += ["exact, MB", "backend, MB", "error of the cache"]
    selected = favor.FavorConfig(selected_keys=given.selected_keys).selected("landmark", True)
    lines = [
        "# Generation: time of a token and size of the cache",
        "",
        f"Random weights, float32, one sequence; {shapes}. `favor+` with {given.num_features} features and window "
        f"{given.window}, `landmark` with {selected} selected keys. Exact attention has a DynamicCache, a backend a "
        f"FavorCache. Medians of {TOKENS - 2} tokens after a context, the two in turns. The error is that of the "
        "last hidden state against a full pass without a cache.",
        "",
        *report.table(header, [shown(row) for row in rows]),
    ]
    content = {**report.context_of("favor.eval.generation", argv, ("transformers",)), "seed": SEED, "rows": rows}
    report.write(given.output_dir, given.name, lines, content, [])
    return 0


cli = program("favor.eval.generation", main)


if __name__ == "__main__":
    cli()
