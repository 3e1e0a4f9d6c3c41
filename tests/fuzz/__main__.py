"""Fuzzes the library: draws calls at random, and prints the simplest one of each kind that fails."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections import Counter
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from tests.small_sections import set_small_sections

from . import attention, generation, invariants
from .simplify import simplify, written

# What draws, and what checks.
PARTS = {"attention": (attention, invariants), "generation": (generation, generation)}
REFUSED = "refused"
_SHOWN = 3  # failures of one kind


def outcome(checks: ModuleType, call: Any) -> str:
    """Says what is wrong with a call; empty if nothing is, and `REFUSED` if it is rightly refused."""
    try:
        return "" if checks.check(call) else REFUSED
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {os.path.basename(where.filename)}, {where.name}: {str(error)[:300]}"


def kind_of(message: str) -> str:
    """A failure without its numbers."""
    return "".join(letter for letter in message if not letter.isdigit())[:120]


def report(number: int, draws: ModuleType, checks: ModuleType, call: Any) -> None:
    """Prints a failure with the simplest call that fails in the same way."""
    kind = kind_of(outcome(checks, call))
    simplest = simplify(call, lambda simpler: kind_of(outcome(checks, simpler)) == kind)
    print(f"\nnumber {number}: {outcome(checks, simplest)}")
    print(f"  from {draws.__name__} import {type(call).__name__}")
    print(f"  from {checks.__name__} import check")
    print(f"  check({written(simplest)})\n", flush=True)


def main() -> int:
    """Runs the program; returns 1 if a call failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--what", choices=PARTS, default="attention")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call, to begin in the middle")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_small_sections(pytest.MonkeyPatch())
    draws, checks = PARTS[args.what]
    start, kinds, refused = time.perf_counter(), Counter(), 0
    for done in range(1, args.calls + 1):
        number = args.first + done - 1
        call = draws.draw(random.Random(f"{args.what} {args.seed} {number}").choice)
        found = outcome(checks, call)
        refused += found == REFUSED
        if found not in ("", REFUSED):
            kinds[kind_of(found)] += 1
            if kinds[kind_of(found)] <= _SHOWN:
                report(number, draws, checks, call)
        if done % max(args.calls // 20, 1) == 0 or done == args.calls:
            rate = done / (time.perf_counter() - start)
            print(f"{done} calls, {refused} refused, {kinds.total()} failed, {rate:.0f} a second", flush=True)
    for kind, count in kinds.most_common():
        print(f"{count} x {kind}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
