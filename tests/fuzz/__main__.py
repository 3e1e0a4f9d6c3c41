"""Fuzzes the library; see `tests.fuzz`."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from . import attention, generation, invariants
from .simplify import simplify

PARTS: dict[str, tuple[ModuleType, Any]] = {
    "attention": (attention, invariants.check),
    "generation": (generation, generation.check),
}


def failure(check: Any, call: Any) -> str:
    """Says what is wrong with a call; empty if nothing is."""
    try:
        check(call)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {os.path.basename(where.filename)}, {where.name}: {str(error)[:300]}"
    return ""


def kind_of(message: str) -> str:
    """A failure without its numbers, to count failures of one kind together."""
    return "".join(letter for letter in message if not letter.isdigit())[:120]


def report(what: str, check: Any, call: Any, message: str) -> None:
    """Prints a failure with the simplest call that fails in the same way."""
    simplest = simplify(call, lambda simpler: kind_of(failure(check, simpler)) == kind_of(message))
    module = "generation" if what == "generation" else "attention"
    checks = "generation" if what == "generation" else "invariants"
    print(f"\nFAILED: {failure(check, simplest)}")
    print(f"  from tests.fuzz.{module} import {type(call).__name__}")
    print(f"  from tests.fuzz.{checks} import check")
    print(f"  check({simplest})\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--what", choices=PARTS, default="attention")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call of this seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    module, check = PARTS[args.what]
    start, refused, kinds = time.perf_counter(), 0, {}
    for number in range(args.first, args.first + args.calls):
        call = module.draw(random.Random(f"{args.what} {args.seed} {number}").choice)
        message = failure(lambda call: refusals.append(check(call)), call) if (refusals := []) is not None else ""
        refused += refusals == [False]
        if message:
            kinds[kind_of(message)] = kinds.get(kind_of(message), 0) + 1
            if kinds[kind_of(message)] <= 3:
                print(f"number {number}: {message}")
                report(args.what, check, call, message)
        done = number - args.first + 1
        if done % max(args.calls // 20, 1) == 0:
            rate = done / (time.perf_counter() - start)
            print(f"{done} calls, {refused} refused, {sum(kinds.values())} failed, {rate:.0f} a second", flush=True)
    for kind, count in sorted(kinds.items(), key=lambda pair: -pair[1]):
        print(f"{count} x {kind}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
