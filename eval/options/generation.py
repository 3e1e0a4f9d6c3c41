"""Time of a token in generation after contexts of growing length, and size of the cache.

    python -m favor.eval.generation

A LLaMA-shaped decoder with random weights reads a context and then continues token by token: with exact attention and a
`DynamicCache`, with a FAVOR backend and a `DynamicCache`, and with the backend and a `FavorCache`, in turns. Times of a
context are only given if the last two have equal hidden states.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.generation", __doc__)
    add = parser.add_argument
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[256, 1024, 4096, 16384],
        metavar="L",
        help="tokens of the context, before those that are timed",
    )
    backends = ("favor+", "favor_plus", "favor++", "favor_plus_plus")
    add(
        "--attn_implementation",
        choices=backends,
        default="favor+",
        help="a backend whose causal form needs no calibration",
    )
    add("--num_features", type=int, default=256, help="random features per head")
    add("--window", type=int, default=0, help="tokens of exact blocks; 0: no blocks")
    add("--num_hidden_layers", type=int, default=2, help="layers of the decoder, 768 wide, 12 heads, 4 key heads")
    add("--per_device_eval_batch_size", type=int, default=1, help="sequences of a batch")
    add("--tokens", type=int, default=20, help="tokens after each context, most of them timed; at least 2")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="type of the numbers")
    add("--device", default="cpu", help="device to run on")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "generation_cpu")
    arguments = parser.parse_args(argv)
    sizes = (
        *arguments.lengths,
        arguments.num_features,
        arguments.num_hidden_layers,
        arguments.per_device_eval_batch_size,
    )
    if min(sizes) < 1 or arguments.tokens < 2 or arguments.window < 0:
        parser.error("--tokens must be at least 2, --window not negative, all other sizes at least 1")
    arguments.lengths = sorted(set(arguments.lengths))
    return arguments
