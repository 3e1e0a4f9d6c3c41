"""What a causal language model finds in a long text: RULER's tasks in public-domain novels, by length and depth.

    python -m favor.eval.language.needle MODEL --text novels.txt.xz --variants exact landmark:num_features=256

MODEL is a folder, or "gemma" (Gemma 3 270M from packages of PyPI: an optional experiment under its own terms of use).
Tasks: a single needle, several keys, several values, variables that pass a number on, and common words. Prompts end
where the answer begins, for base models. A document is read once; each question goes on from a copy of the cache,
greedily and token by token. Accuracy is the share of what should be in the answer; nats are those of a token of the
right answer, given the ones before.

Documents depend on seed, task, length and number alone. Each is kept in NAME.jsonl when it is done: the same command
goes on where it was stopped, `--cases 0:25` and `--cases 25:50` divide the work, and `--merge` puts records together.
`--together` hides the facts of all tasks in one document, which takes a quarter of the time and is a little harder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.language import program as shared
from favor.eval.language.tasks import TASKS
from favor.train.common.program import Parser

NAME = "favor.eval.language.needle"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does, and ValueError for bad variants."""
    parser = Parser(NAME, __doc__, abbreviations=True)
    shared.options(parser, "needle")
    add = parser.add_argument
    add("--text", required=True, help="UTF-8 text, plain, .gz or .xz, that the facts are hidden in")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what is asked")
    add("--together", action="store_true", help="hide the facts of all tasks but common in one document")
    add("--lengths", nargs="+", type=int, default=[2048, 4096], metavar="L", help="tokens of a prompt")
    add("--cases", default="10", metavar="N or FIRST:END", help="documents of each task and length")
    add("--depths", type=int, default=10, help="places, evenly spaced, that the documents take in turns")
    arguments = shared.prepare(parser, words)
    first, sign, end = arguments.cases.rpartition(":")
    if not end.isdecimal() or (sign and not first.isdecimal()) or int(end) <= int(first or 0):
        parser.error(f"--cases must be N or FIRST:END with FIRST below END, got {arguments.cases!r}")
    if min(*arguments.lengths, arguments.depths) < 1:
        parser.error("--lengths and --depths must be at least 1")
    arguments.cases = range(int(first or 0), int(end))
    arguments.lengths = sorted(set(arguments.lengths))
    arguments.tasks = [task for task in TASKS if task in arguments.tasks]
    return arguments
