"""Time and memory of an encoder with local and global layers, ModernBERT's geometry, by length.

    python -m favor.eval.hybrid

22 layers, 768 wide, 12 heads, every third layer global (8 of them), the others with windows of 128 tokens; random
weights, batch 1. `sdpa` gives the local layers a mask of all pairs; the FAVOR backends run them block by block,
exactly, and estimate the global ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does."""
    parser = Parser("favor.eval.hybrid", __doc__, abbreviations=True)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[4096, 8192], metavar="L", help="tokens")
    add("--backends", nargs="+", default=["landmark", "favor#", "favor+"], metavar="BACKEND", help="compared with sdpa")
    add("--num_features", type=int, default=256, help="random features, or landmarks, per head")
    add("--layers", type=int, default=22, help="of the model; every third is global")
    add("--repeats", type=int, default=3, help="timed passes of each backend at each length, in turns")
    add("--threads", type=int, default=2, help="of torch")
    add("--seed", type=int, default=0, help="of weights and tokens")
    add_results(parser, "hybrid_cpu")
    arguments = parser.parse_args(argv)
    if min(*arguments.lengths, arguments.layers, arguments.repeats, arguments.threads, arguments.num_features) < 1:
        parser.error("all sizes must be at least 1")
    import favor

    unknown = [name for name in arguments.backends if name not in favor.BACKENDS]
    if unknown:
        parser.error(f"--backends must be among {', '.join(favor.BACKENDS)}; got {unknown[0]!r}")
    arguments.lengths = sorted(set(arguments.lengths))
    return arguments
