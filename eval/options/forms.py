"""Compares forms of landmark attention on the heads of real models, and the backend that is built as one of them.

    python -m favor.eval.forms --text novels.txt.xz --lengths 4096 8192
    python -m favor.eval.forms --model_name_or_path gemma --text novels.txt.xz --lengths 4096 8192

A form says which keys a query reads exactly; means stand for the others. Forms are sketched here by dense products, so
that any can be tried in few lines; their work is counted, not timed. Encoders and causal layers have forms of their
own. The positions of MiniLM repeat in samples that are longer than it can read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

NAME = "favor.eval.forms"


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    model = 'folder of a model that reads text, or "gemma"; default: MiniLM of PyPI'
    add("--model_name_or_path", dest="model", metavar="MODEL", help=model)
    add("--text", required=True, help="text: UTF-8, plain, .gz or .xz")
    help_of_lengths = "tokens of the sample, powers of two of at least 1024; several are compared"
    add("--lengths", nargs="+", type=int, default=[4096], metavar="L", help=help_of_lengths)
    add("--blocks", type=int, default=16, help="blocks of 64 queries, drawn at random, that are measured in each layer")
    add("--samples", type=int, default=0, help="samples of each length for the perplexity of some forms; default: none")
    add("--seed", type=int, default=0, help="draws the sample")
    add_results(parser, "forms")
    arguments = parser.parse_args(words)
    if min(arguments.lengths) < 1024 or any(length & (length - 1) for length in arguments.lengths):
        parser.error(f"--lengths must be powers of two of at least 1024, got {arguments.lengths}")
    if arguments.blocks < 1 or arguments.samples < 0:
        parser.error("--blocks must be at least 1, and --samples at least 0")
    return arguments
