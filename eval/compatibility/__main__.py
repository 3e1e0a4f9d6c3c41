"""Which models of transformers run with a FAVOR backend, and whether their outputs are right.

    python -m favor.eval.compatibility                        # all classes, about ten minutes on two cores
    python -m favor.eval.compatibility --model_types bert llama    # some

A tiny model with random weights is built of every model class of the installed transformers. It runs with exact
attention, with landmarks that lose nothing, which are softmax attention too, and with few random features, whose output
must differ.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import transformers

from favor.eval.common.program import add_results
from favor.eval.common.report import context, shown_command, write
from favor.eval.compatibility.check import BAD, CATEGORIES, check
from favor.eval.compatibility.classes import Candidate, candidates
from favor.eval.compatibility.report import lines_of
from favor.train.common.program import Parser, did_you_mean, program


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


MEMORY = 12 * 2**30


def run_all(found: list[Candidate], jobs: int, seconds: int) -> Iterator[dict[str, Any]]:
    """Checks each class in a process of its own, forked from this one, and yields each result when it is ready.

    Args:
        found: the classes.
        jobs: processes at a time.
        seconds: greatest processor time of a process.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(found))
    running: dict[Any, tuple[Candidate, Any]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            candidate = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(candidate, there, seconds))
            process.start()
            there.close()
            running[here] = (candidate, process)
        ready = wait(list(running))
        for connection in [own for own in running if own in ready]:
            candidate, process = running.pop(connection)
            own = {"family": candidate.family, "class": candidate.name, "dispatches": candidate.dispatches}
            try:
                yield connection.recv()
            except EOFError:
                reason = f"more than {seconds} seconds of processor time, or more than {MEMORY / 2**30:g} GiB"
                yield {**own, "category": "not built", "reason": reason}
            process.join()
            connection.close()


def _child(candidate: Candidate, there: Connection, seconds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    start = time.process_time()
    end = int(start) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 5))
    result = check(candidate)
    there.send({**result, "seconds": round(time.process_time() - start, 1)})
    there.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a class is in a bad category."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = arguments.found
    content = context(shown_command("favor.eval.compatibility", words, [], ["--output_dir"]), ("transformers",))
    content |= {"cannot be imported": arguments.missing, "classes": []}
    results = content["classes"]
    for number, result in enumerate(run_all(found, arguments.jobs, math.ceil(arguments.time_limit)), 1):
        results.append(result)
        print(f"{result['family']}.{result['class']}: {result['category']} {result['reason'][:150]}", flush=True)
        if number % 50 == 0 or number == len(found):  # a long run that is stopped leaves its results so far
            results.sort(key=lambda result: (result["family"], result["class"]))
            write(arguments.output_dir, arguments.name, lines_of(results), content, [])
    counts = Counter(result["category"] for result in results)
    print(", ".join(f"{counts[name]} {name}" for name in CATEGORIES))
    return 1 if any(counts[name] for name in BAD) else 0


cli = program("favor.eval.compatibility", main)

if __name__ == "__main__":
    cli()
