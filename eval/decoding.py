"""Time of a token in generation with landmarks, compared with exact attention and its cache."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaModel

import favor
from favor.eval.common import report
from favor.eval.options.decoding import SHAPES, parse_arguments
from favor.train.common.program import program

TOLERANCE = 1e-3


def build(shape: str, layers: int, longest: int, seed: int) -> LlamaModel:
    """Makes a decoder with random weights."""
    heads, key_heads, head_dim = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
    )
    torch.manual_seed(seed)
    return LlamaModel(config).eval()


@torch.no_grad()
def generate(model: LlamaModel, ids: Tensor, context: int, cache: Any) -> tuple[float, Tensor]:
    """Reads a context, then the other tokens one by one; gives their median milliseconds and the last hidden state.

    Args:
        model: the decoder.
        ids: all tokens `[1, L]`.
        context: number of tokens to read at once.
        cache: an empty cache.
    """
    hidden = model(ids[:, :context], past_key_values=cache).last_hidden_state
    times = []
    for token in ids[:, context:].split(1, 1):
        clock = time.perf_counter()
        hidden = model(token, past_key_values=cache).last_hidden_state
        times.append(1e3 * (time.perf_counter() - clock))
    return statistics.median(times[2:]), hidden[:, -1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a result with the cache differs from a full pass."""
    words = sys.argv[1:] if argv is None else list(argv)
    given = parse_arguments(words)
    options = favor.FavorConfig(selected_keys=given.selected_keys, exact_below=0)
    rows, results = [], []
    for shape in given.shapes:
        for context in given.lengths:
            model = build(shape, given.num_hidden_layers, context + given.tokens, given.seed)
            ids = torch.randint(1000, (1, context + given.tokens), generator=torch.Generator().manual_seed(given.seed))
            model.set_attn_implementation("sdpa")
            exact, _ = generate(model, ids, context, DynamicCache(config=model.config))
            favor.configure(model, "landmark", **options.to_dict())
            own, found = generate(model, ids, context, favor.FavorCache(model.config))
            with torch.no_grad():
                expected = model(ids, use_cache=False).last_hidden_state[:, -1]
            error = float((found - expected).norm() / expected.norm())
            if not error < TOLERANCE:
                print(
                    f"{shape}, {context} tokens: the cache differs from a full pass by {error:.1e}: no times are given"
                )
                return 1
            results.append({"shape": shape, "context": context, "exact_ms": exact, "own_ms": own, "error": error})
            rows.append([shape, str(context), f"{exact:.3g}", f"{own:.3g}", f"{exact / own:.2f}", f"{error:.0e}"])
            print("  ".join(rows[-1]), flush=True)
    header = ["heads", "context", "exact, ms", "landmarks, ms", "times as fast", "error of the cache"]
    lines = [
        "# Generation through landmarks: time of a token",
        "",
        f"{given.num_hidden_layers} layers, 512 wide, random weights, float32; `landmark` with "
        f"{options.selected('landmark', True)} selected keys. Medians of {given.tokens - 2} tokens. Heads: "
        + "; ".join(f"{name} {h} of width {d}, {k} of keys" for name, (h, k, d) in SHAPES.items())
        + ". The error is that of the last hidden state against a full forward pass without a cache.",
        "",
        *report.table(header, rows),
    ]
    command = report.shown_command("favor.eval.decoding", words, [], ["--output_dir"])
    content = {**report.context(command, ("transformers",)), "seed": given.seed, "rows": results}
    report.write(given.output_dir, given.name, lines, content, [])
    return 0


cli = program("favor.eval.decoding", main)


if __name__ == "__main__":
    cli()
