"""Time and state of a causal Conformer for each piece of a stream, with linear and with exact attention.

    python -m favor.eval.streaming

One recording of noise comes in pieces of several lengths. After some minutes of audio the program measures the
computing time of pieces one after another, the backends in turns. Nothing is timed unless the logits of all streams
equal those of one pass over the whole recording.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser
from favor.train.speech.arguments import SIZES

EXACT = "sdpa"
BACKENDS = ("favor+", "favor++", "favor#", EXACT)
# Audio before the first piece that is timed, so that every piece of the length of an encoder frame gives a frame.
START_SECONDS = 1.28


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.streaming", __doc__)
    add = parser.add_argument
    add("--pieces_ms", type=int, nargs="+", default=[40, 80, 160, 320, 640], metavar="MS", help="lengths of pieces")
    add(
        "--minutes",
        type=float,
        nargs="+",
        default=[0, 0.5, 2, 5],
        metavar="M",
        help="minutes of audio after which pieces are timed",
    )
    add("--backends", nargs="+", choices=BACKENDS, default=["favor+", "favor#", EXACT], help="backends to compare")
    add(
        "--preset",
        choices=SIZES,
        default="small",
        help="size of a causal model with random weights",
    )
    add("--model_name_or_path", help="a trained causal ConformerForCTC in place of the preset")
    add("--num_features", type=int, default=128, help="random features per head of the FAVOR backends")
    add("--repeats", type=int, default=40, help="pieces that are timed in each measurement")
    add("--check_seconds", type=float, default=5.0, help="seconds of audio for the comparison with a whole pass")
    add("--threads", type=int, help="CPU threads; default: those of torch")
    add("--seed", type=int, default=0, help="seed of all random choices")
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
