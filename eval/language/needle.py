"""Facts that a causal language model finds in a long text: RULER's tasks in novels, by length and depth."""

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
from favor.eval.language.tasks import HIDDEN
from favor.eval.options.needle import NAME, parse_arguments
from favor.train.common.program import program
from favor.train.text.samples import read_text


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
