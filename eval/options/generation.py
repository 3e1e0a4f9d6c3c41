"""Time of a token in generation after contexts of growing length, and size of the cache, compared with exact attention.

    python -m favor.eval.generation --shapes llama gemma --lengths 16384 32768

A decoder with random weights reads a context and then continues token by token: with exact attention and a
`DynamicCache`, and with a backend and its `FavorCache`, in turns. Times are given only if the last hidden state with
the `FavorCache` equals that of a full pass without a cache. Both backends need no calibration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int

    @property
    def label(self) -> str:
        """Gives the sizes in words."""
        heads = f"{self.heads} heads of width {self.head_dim}, {self.key_heads} of keys"
        return f"{self.layers} layers, {self.width} wide, {heads}"


# A decoder with the heads of the global layers of Gemma 3 270M is the last one.
SHAPES = {"grouped": Shape(2, 768, 12, 4, 64), "llama": Shape(4, 512, 8, 8, 64), "gemma": Shape(4, 512, 4, 1, 256)}
# The options that each backend takes.
BACKENDS = {"favor+": ("num_features", "window"), "landmark": ("selected_keys",)}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
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
    add("--tokens", type=int, default=24, help="tokens after each context, most of them timed; at least 3")
    add("--device", default="cpu", help="device to run on")
    add_results(parser, "generation_cpu")
    given = parser.parse_args(words)
    if min(*given.lengths, given.num_features) < 1 or given.tokens < 3 or given.window < 0:
        parser.error("--tokens must be at least 3, --window not negative, all other sizes at least 1")
    given.lengths = sorted(set(given.lengths))
    return given
