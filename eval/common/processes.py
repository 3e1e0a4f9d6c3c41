"""Evaluation in the processes of `accelerate launch`: each measures some of the pieces, the first one reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from favor.train.common.program import program, started_together

P = TypeVar("P")
R = TypeVar("R")


def processes() -> PartialState:
    """Gives the processes of `accelerate launch`; they wait a day for each other, since pieces differ in time.

    Raises ValueError if several were started without a GPU or ACCELERATE_USE_CPU: they would not know each other.
    """
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=timedelta(days=1))
    if (started := started_together()) > state.num_processes:
        raise ValueError(f"{started} processes were started and found no GPUs: set ACCELERATE_USE_CPU=true")
    return state


def in_turns(pieces: Iterable[P], measure: Callable[[P], R]) -> Iterator[tuple[P, R]]:
    """Measures pieces one by one, in as many processes as there are; gives every process all of them in order.

    A sum over the results is thus that of one process, to the last digit. What is measured must not depend on earlier
    pieces.

    Args:
        pieces: the same in every process.
        measure: gives the result of a piece, which can be pickled.

    Yields:
        Each piece and its result. With n processes, n pieces are measured before the first of them is yielded.
    """
    state, rest = processes(), iter(pieces)
    while some := list(itertools.islice(rest, state.num_processes)):
        own = some[state.process_index : state.process_index + 1]
        yield from zip(some, gather_object([measure(piece) for piece in own]), strict=True)


def shared_program(name: str, main: Callable[[], Any]) -> Callable[[], None]:
    """Makes the function that a command line starts, of a program that `accelerate launch` may start several times."""

    def start() -> Any:
        state = processes()
        result = main()
        state.destroy_process_group()
        return result

    return program(name, start, several=True)
