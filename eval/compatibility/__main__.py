"""Which models of transformers run with a FAVOR backend, and whether they compute what they should.

    python -m favor.eval.compatibility                        # all classes, some ten minutes on two cores
    python -m favor.eval.compatibility --models bert llama    # some

Every model class of the installed transformers is built tiny, with random weights, and run with exact attention, with
landmarks of one key each, which are softmax attention too, and with few landmarks, which must differ.
"""

from __future__ import annotations

import argparse
import json
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

from favor.eval.common.program import add_results, make_parser
from favor.eval.compatibility.check import BAD, CATEGORIES, check
from favor.eval.compatibility.classes import Candidate, candidates

MEMORY = 12 * 2**30


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does."""
    parser = make_parser("favor.eval.compatibility", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", metavar="FAMILY", help="folders of transformers, such as bert llama; default all")
    add("--classes", nargs="+", metavar="CLASS", help="only these classes")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--seconds", type=float, default=90.0, help="longest time of one class")
    add_results(parser, "compatibility")
    return parser.parse_args(argv)


def run_all(found: list[Candidate], jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Checks each class in a process of its own, forked from this one, and gives results as they come."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(found)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            candidate = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(candidate, there))
            process.start()
            there.close()
            running[here] = (candidate, process, time.monotonic() + seconds)
        ready = wait(list(running), timeout=0.5)
        for connection, (candidate, process, end) in list(running.items()):
            late = time.monotonic() > end
            if connection not in ready and not late:
                continue
            own = {"family": candidate.family, "class": candidate.name, "dispatches": candidate.dispatches}
            if connection in ready:
                try:
                    yield connection.recv()
                except EOFError:
                    yield {**own, "category": "not built", "reason": "the process ended"}
            else:
                yield {**own, "category": "not built", "reason": f"more than {seconds:g} seconds"}
                process.terminate()
            process.join()
            connection.close()
            del running[connection]


def _child(candidate: Candidate, there: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    start = time.monotonic()
    result = check(candidate)
    there.send({**result, "seconds": round(time.monotonic() - start, 1)})
    there.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code, 1 if a class is in a bad category."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found, missing = candidates(arguments.models)
    if arguments.classes:
        found = [candidate for candidate in found if candidate.name in arguments.classes]
    results = []
    for result in run_all(found, arguments.jobs, arguments.seconds):
        results.append(result)
        print(f"{result['family']}.{result['class']}: {result['category']} {result['reason'][:150]}", flush=True)
    results.sort(key=lambda result: (result["family"], result["class"]))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.output_dir / f"{arguments.name}.json"
    path.write_text(json.dumps({"missing": missing, "classes": results}, indent=1) + "\n")
    counts = Counter(result["category"] for result in results)
    print({name: counts[name] for name in CATEGORIES})
    return 1 if any(counts[name] for name in BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
