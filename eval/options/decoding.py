"""Time of a token in generation with landmarks, compared with exact attention and its cache.

    python -m favor.eval.decoding --lengths 16384 32768 --shapes llama gemma

A decoder with random weights reads a context and continues token by token: with exact attention and a `DynamicCache`,
and with the backend `landmark` and `FavorCache(config)`, in turns. Times are printed only if the last hidden state with
the cache equals that of a full forward pass without a cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

# Query heads, key heads and width of a head: of a small LLaMA, and of the global layers of Gemma 3 270M.
SHAPES = {"llama": (8, 8, 64), "gemma": (4, 1, 256)}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.decoding", __doc__)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[16384, 32768],
        metavar="L",
        help="tokens of the context, before those that are timed",
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes of the heads")
    parser.add_argument("--selected_keys", type=int, help="keys that a block chooses; default: that of the method")
    parser.add_argument("--num_hidden_layers", type=int, default=4, help="layers of the decoder, 512 wide")
    parser.add_argument(
        "--tokens", type=int, default=24, help="tokens after each context, most of them timed; at least 3"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "decoding_cpu")
    given = parser.parse_args(words)
    if given.tokens < 3:
        parser.error("--tokens must be at least 3")
    return given
