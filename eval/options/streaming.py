"""What a causal Conformer computes and keeps for each piece of a stream, with linear and with exact attention.

    python -m favor.eval.streaming

One recording, noise, comes in pieces of a few lengths; after some minutes of it the computing time of pieces one after
another is taken, the backends in turns. Nothing is timed unless the logits of all streams are those of the recording
as a whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser
from favor.train.speech.arguments import SIZES

EXACT = "sdpa"
BACKENDS = ("favor+", "favor++", "favor#", EXACT)
# Before the first piece that is timed, so that every piece of an encoder frame gives one.
START_SECONDS = 1.28


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does."""
    parser = Parser("favor.eval.streaming", __doc__)
    add = parser.add_argument
    add("--pieces_ms", type=int, nargs="+", default=[40, 80, 160, 320, 640], metavar="MS", help="lengths of pieces")
    add("--minutes", type=float, nargs="+", default=[0, 0.5, 2, 5], metavar="M", help="after which pieces are timed")
    add("--backends", nargs="+", choices=BACKENDS, default=["favor+", "favor#", EXACT], help="what is compared")
    add(
        "--preset",
        choices=SIZES,
        default="small",
        help="size of a causal model with random weights",
    )
    add("--model_name_or_path", help="a trained causal ConformerForCTC in its place")
    add("--num_features", type=int, default=128, help="of the FAVOR backends")
    add("--repeats", type=int, default=40, help="pieces timed each time")
    add("--check_seconds", type=float, default=5.0, help="of audio for the comparison with the whole")
    add("--threads", type=int, help="CPU threads; default: those torch takes")
    add("--seed", type=int, default=0, help="of everything that is drawn")
    add_results(parser, "streaming_cpu")
    arguments = parser.parse_args(argv)
    import torch

    arguments.threads = torch.get_num_threads() if arguments.threads is None else arguments.threads
    for name in ("pieces_ms", "minutes", "backends"):
        setattr(arguments, name, sorted(set(getattr(arguments, name)), key=getattr(arguments, name).index))
    arguments.minutes.sort()
    if min(*arguments.pieces_ms, arguments.repeats, arguments.threads, arguments.num_features) < 1:
        parser.error("--pieces_ms, --repeats, --threads and --num_features must be at least 1")
    if arguments.minutes[0] < 0 or arguments.check_seconds < START_SECONDS:
        parser.error(f"--minutes must not be negative, --check_seconds at least {START_SECONDS:g}")
    return arguments
