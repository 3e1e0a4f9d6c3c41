"""Which models of transformers run with a FAVOR backend, and whether their outputs are right.

    python -m favor.eval.compatibility                        # all classes, about ten minutes on two cores
    python -m favor.eval.compatibility --model_types bert llama    # some

A tiny model with random weights is built of every model class of the installed transformers. It runs with exact
attention, with landmarks that lose nothing, which are softmax attention too, and with few random features, whose output
must differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser, did_you_mean


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.compatibility", __doc__)
    add = parser.add_argument
    add("--model_types", nargs="+", metavar="FAMILY", help="folders of transformers, such as bert llama; default: all")
    add("--classes", nargs="+", metavar="CLASS", help="only these classes")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--time_limit", type=float, default=60, help="greatest processor time per class")
    add_results(parser, "compatibility")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1 or arguments.time_limit <= 0:
        parser.error("--jobs and --time_limit must be positive")
    from favor.eval.compatibility.classes import candidates

    try:
        arguments.found, arguments.missing = candidates(arguments.model_types)
    except ValueError as error:
        parser.error(str(error))
    if arguments.classes:
        known = [own.name for own in arguments.found]
        if unknown := sorted(set(arguments.classes) - set(known)):
            near = did_you_mean(unknown[0], known)
            parser.error(f"--classes must be classes of the families; unknown: {', '.join(unknown)}{near}")
        arguments.found = [own for own in arguments.found if own.name in arguments.classes]
    return arguments
