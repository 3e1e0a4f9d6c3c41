"""Tasks in processes of their own, with a limit of memory, and the peak of their resident memory (Linux).

The processes are forked from one that has imported everything and computed nothing, since importing takes seconds.
Peak memory of a call is all that it has allocated at its peak, with its results, but without its inputs, which exist
before: the high-water mark of resident memory less the memory before. Repetitions agree to 0.2 MB. Results are up to
2 MB above the size of the tensors, because of buffers of libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")
# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt: freed blocks above 64 KiB go back to the system at once.
_RELEASE_EARLY = ((-1, 1 << 16), (-3, 1 << 16))


@dataclass(frozen=True)
class Failure:
    """The reason why a process has no result."""

    reason: str


def unavailable() -> str | None:
    """Says why memory cannot be measured or limited on this machine; None if it can."""
    if os.access(_PROC / "clear_refs", os.W_OK) and hasattr(os, "fork"):
        return None
    return "peak memory on a CPU, and limits of memory, need Linux and /proc/self/clear_refs"


def isolated(limit: float | None, threads: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `task(*arguments)` in a fresh process, with so many threads of torch; gives its result or a `Failure`.

    The limit is bytes by which its address space may grow beyond that of the imported libraries; None: no limit. All
    must be picklable, and the result without tensors.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, task.__module__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, limit, threads, task, arguments))
    process.start()
    send.close()
    with receive, contextlib.suppress(EOFError):
        answer = receive.recv()
        process.join()
        return answer
    process.join()
    killed = " (killed, as the system does when it has no memory left)" if process.exitcode == -9 else ""
    return Failure(f"the process ended with code {process.exitcode}{killed} and no answer")


def _answer(send: Connection, limit: float | None, threads: int, task: Callable[..., Any], arguments: tuple) -> None:
    gc.freeze()  # a collection would otherwise touch, and so copy, all objects of the imported libraries
    torch.set_num_threads(threads)
    with limited(limit):
        try:
            answer = task(*arguments)
        except Exception as error:
            answer = Failure(reason_of(error))
    send.send(answer)
    send.close()


@contextlib.contextmanager
def limited(limit: float | None) -> Iterator[None]:
    """Lets the address space of this process grow by at most so many bytes; None: by any number."""
    former = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        mapped = int((_PROC / "statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(limit), former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def out_of_memory(error: Exception) -> bool:
    """Tells whether an error of torch says that there is no memory left."""
    # "could not create a primitive" is the message of oneDNN if it gets no memory.
    said = re.search("DefaultCPUAllocator|could not create a primitive", str(error))
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or said is not None


def reason_of(error: Exception) -> str:
    """Gives the kind and the first line of an error, or says that there was no memory."""
    if out_of_memory(error):
        wanted = re.search(r"allocate (\d+) bytes", str(error))
        return "out of memory" + (f": no {int(wanted[1]) / 1e6:.4g} MB were left" if wanted else "")
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def release_early() -> None:
    """Lets this process give freed memory back at once. This slows passes, which are then not timed."""
    for setting in _RELEASE_EARLY:
        ctypes.CDLL(None).mallopt(*setting)


def warm_libraries() -> None:
    """Starts the thread pool and the matrix library, whose buffers would otherwise count."""
    torch.ones(1 << 20).exp().sum()
    torch.ones(512, 512) @ torch.ones(512, 512)


def resident() -> int:
    """Gives the bytes of resident memory, after freed memory went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def resident_peak(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Calls a function; gives its result, the bytes by which resident memory rises, and the peak of resident memory."""
    before = resident()
    (_PROC / "clear_refs").write_text("5")
    result = call()
    peak = max(before, _status("VmHWM"))
    return result, peak - before, peak


def _status(field: str) -> int:
    lines = (_PROC / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
