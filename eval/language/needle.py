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
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from favor.eval.common import report
from favor.eval.language import program as shared
from favor.eval.language.answers import answer
from favor.eval.language.documents import Document, Haystack
from favor.eval.language.models import load
from favor.eval.language.needle_report import Cells, checks, lines, plot
from favor.eval.language.tasks import HIDDEN, TASKS
from favor.train.common.program import Parser, program
from favor.train.text.samples import read_text

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


def documents(haystack: Haystack, arguments: argparse.Namespace) -> Iterator[tuple[int, int, Document]]:
    """Yields length, number and document of all documents, short ones first."""
    hidden = [task for task in arguments.tasks if task in HIDDEN]
    groups = [[task] for task in arguments.tasks]
    if arguments.together and hidden:
        groups = [hidden, *(group for group in groups if group[0] not in hidden)]
    for length in arguments.lengths:
        for case in arguments.cases:
            for tasks in groups:
                yield length, case, haystack.document(tasks, length, case, arguments.depths, arguments.seed)


def measure(model: Any, haystack: Haystack, arguments: argparse.Namespace, called: str) -> Cells:
    """Collects the answers of all variants; answers in the records are not computed again.

    Args:
        model: the language model.
        haystack: makes the documents.
        arguments: of the program.
        called: name of the model.
    """
    cells = Cells([variant.label for variant in arguments.variants], arguments.lengths, arguments.tasks)
    for length, case, document in documents(haystack, arguments):
        for variant in arguments.variants:
            of = {"model": called, "document": document.digest, "variant": variant.label, "cache": variant.cache}
            result = arguments.records.find(of)
            if result is None:
                result = answer(model, haystack.tokenizer, variant, document)
                arguments.records.add(of, result)
                said = ", ".join(f"{a['task']} {a['score']:.2g} ({a['nats']:.2f})" for a in result["answers"])
                seconds = " + ".join(f"{part:.1f}" for part in result["seconds"])
                print(f"{length} tokens, case {case}, {variant.label}: {said}; {seconds} s", flush=True)
            cells.add(variant.label, length, case, result)
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    text = read_text(arguments.text)
    model, tokenizer = load(arguments.model, arguments.device)
    context = shared.context(NAME, words, arguments)
    cells = measure(model, Haystack(text, tokenizer), arguments, context["model"])
    found, checked = lines(cells, context, arguments), checks(cells)
    content = {**context, "cells": cells.table(), "seconds": cells.seconds()}
    report.write(arguments.output_dir, arguments.name, found, content, checked)
    plot(cells, arguments.output_dir / f"{arguments.name}.png")
    print("\n".join(["", *found, "", *(check.line() for check in checked)]))
    return 0


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
