"""Perplexity of a causal language model on long texts, by length and attention, also of the second half alone.

    python -m favor.eval.language.perplexity MODEL --texts novels.txt.xz --lengths 2048 4096

MODEL is a folder, or "gemma" (Gemma 3 270M from packages of PyPI: an optional experiment under its own terms of use).
Samples are evenly spaced over each text. Exact attention comes first. For each other variant the table says by how much
its perplexity is greater, with the standard error of the difference, paired by sample. The results of each sample are
kept in NAME.jsonl, so that the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.language import program as shared
from favor.train.common.program import Parser

NAME = "favor.eval.language.perplexity"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones, raises ValueError for bad variants."""
    parser = Parser(NAME, __doc__)
    shared.options(parser, "perplexity")
    add = parser.add_argument
    add("--texts", nargs="+", required=True, metavar="TEXT", help="texts: UTF-8, plain, .gz or .xz")
    add("--samples", type=int, default=8, help="samples of each text and length")
    arguments = shared.prepare(parser, words)
    if min(arguments.lengths) < 4 or arguments.samples < 1:
        parser.error("--lengths must be at least 4 and --samples at least 1")
    return arguments
