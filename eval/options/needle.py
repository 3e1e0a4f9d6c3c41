"""Facts that a causal language model finds in a long text: RULER's tasks in novels, by length and depth.

    python -m favor.eval.language.needle MODEL --text novels.txt.xz --backends exact landmark:selected_keys=512

MODEL is a folder, or "gemma" (Gemma 3 270M from packages of PyPI: an optional experiment under its own terms of use).
Tasks: a single needle, several keys, several values, variables that pass a number on, and common words. Prompts end
where the answer begins, for base models. A document is read once; each question continues from a copy of the cache,
greedily and token by token. Accuracy is the fraction of the expected parts that the answer contains (more is better).
Nats are per token of the right answer, given earlier tokens (less is better).

Documents depend on seed, task, length and number alone. The results of each are kept in NAME.jsonl: the same command
continues where it was stopped, `--cases 0:25` and `--cases 25:50` divide the work, and `--merge` joins records.
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
    """Parses the arguments; ends the program for bad ones, raises ValueError for bad variants."""
    parser = Parser(NAME, __doc__)
    shared.options(parser, "needle")
    add = parser.add_argument
    add("--text", required=True, help="text in which facts are hidden: UTF-8, plain, .gz or .xz")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to run")
    add("--together", action="store_true", help="hide the facts of all tasks but common in one document")
    add("--cases", default="10", metavar="N or FIRST:END", help="documents of each task and length")
    add("--depths", type=int, default=10, help="number of evenly spaced places that the documents take in turns")
    arguments = shared.prepare(parser, words)
    first, sign, end = arguments.cases.rpartition(":")
    if not end.isdecimal() or (sign and not first.isdecimal()) or int(end) <= int(first or 0):
        parser.error(f"--cases must be N or FIRST:END with FIRST below END, got {arguments.cases!r}")
    if min(*arguments.lengths, arguments.depths) < 1:
        parser.error("--lengths and --depths must be at least 1")
    arguments.cases = range(int(first or 0), int(end))
    arguments.tasks = [task for task in TASKS if task in arguments.tasks]
    return arguments
