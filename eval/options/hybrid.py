"""Time and memory of an encoder with the local and global layers of ModernBERT, by length.

    python -m favor.eval.hybrid

The model has 22 layers, is 768 wide and has 12 heads and random weights. Every third layer is global (8 layers), the
others have windows of 128 tokens. The batch size is 1. `sdpa` gives the local layers a mask of all pairs. The FAVOR
backends run the local layers block by block, exactly, and estimate the global layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser, did_you_mean


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.hybrid", __doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[4096, 8192], metavar="L", help="numbers of tokens")
    add(
        "--backends",
        nargs="+",
        default=["landmark", "favor#", "favor+"],
        metavar="BACKEND",
        help="backends to compare with sdpa",
    )
    add("--num_features", type=int, default=256, help="random features, or means of landmarks, per head")
    add("--num_hidden_layers", type=int, default=22, help="layers of the model; every third is global")
    add("--repeats", type=int, default=3, help="timed passes of each backend at each length, in turns")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="seed of weights and tokens")
    add_results(parser, "hybrid_cpu")
    arguments = parser.parse_args(argv)
    if (
        min(
            *arguments.lengths,
            arguments.num_hidden_layers,
            arguments.repeats,
            arguments.threads,
            arguments.num_features,
        )
        < 1
    ):
        parser.error("all sizes must be at least 1")
    import favor

    unknown = [name for name in arguments.backends if name not in favor.BACKENDS]
    if unknown:
        near = did_you_mean(unknown[0], favor.BACKENDS)
        parser.error(f"--backends must be among {', '.join(favor.BACKENDS)}; got {unknown[0]!r}{near}")
    arguments.lengths = sorted(set(arguments.lengths))
    return arguments
