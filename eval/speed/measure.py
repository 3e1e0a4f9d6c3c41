"""Clock, peak memory and the ceilings of the machine.

Peak memory of a pass is all memory that the pass has allocated at its peak, with its output and gradients, but without
its inputs, which exist before.

On CUDA it is `torch.cuda.max_memory_allocated` less the memory that was allocated before. On a CPU each pass runs once
in a fresh process. The process makes the inputs, runs the method at a short length so that its code is loaded and
libraries have their buffers, gives free memory back to the system, resets the high-water mark of its resident memory
(it writes a 5 to `/proc/self/clear_refs`), runs the pass, and reports `VmHWM` less the earlier `VmRSS`. So this needs
Linux. Repetitions agree to 0.2 MB; results are up to 2 MB above the size of the tensors, because of buffers of
libraries. These processes take every block above 64 KiB from the system by mmap, which gives it back when freed. They
are forked from one server, a process that has imported everything and computed nothing, since importing alone takes
seconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

# A sample repeats the call until it is at least this long, so that the cost of the clock does not count.
SHORTEST_SAMPLE = 0.01
MOST_CALLS = 100
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
MATMUL_WIDTH = {"cpu": 2048, "cuda": 8192}
_CLEAR_REFS = Path("/proc/self/clear_refs")
# In a process that starts with these, freed memory goes back to the system at once.
_RELEASE_EARLY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 16), "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}


def synchronise(device: str) -> None:
    """Waits until the device has finished all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str, calls: int = 1) -> float:
    """Measures the mean seconds of a call over `calls` calls; waits for the device before and after.

    Args:
        call: the function.
        device: "cpu" or "cuda".
        calls: number of calls.
    """
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def record(call: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Records a CUDA graph of a call that has run before; also gives the tensors that its replays fill."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


class Recorded:
    """A call that is recorded as a CUDA graph the first time and then replayed, so that only the device's time counts.

    Raises:
        RuntimeError: if a replay differs from the call by more than 1 % of the norm of a result.
    """

    def __init__(self, call: Callable[[], tuple[Tensor, ...]]) -> None:
        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Replays the graph, or records and compares it."""
        if self._graph is not None:
            self._graph.replay()
            return
        # With its history a result keeps nodes of the backward pass that belong to another stream than the graph.
        expected = [one.detach() for one in self._call()]
        graph, found = record(self._call)
        graph.replay()
        for one, other in zip(found, expected, strict=True):
            if not float((one.double() - other.double()).norm()) <= 0.01 * float(other.double().norm()):
                raise RuntimeError("expected a CUDA graph to give the result of the call, got another result")
        self._graph = graph


@dataclass(frozen=True)
class Timing:
    """Seconds of a pass: median and quartiles over `repeats` samples, each the mean of `calls` calls."""

    median: float
    lower: float
    upper: float
    repeats: int
    calls: int

    @classmethod
    def of(cls, samples: list[float], calls: int) -> Timing:
        """Makes it from the seconds of each sample."""
        median = statistics.median(samples)
        if len(samples) < 2:
            return cls(median, median, median, 1, calls)
        lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, len(samples), calls)


@dataclass(frozen=True)
class Stopwatch:
    """A call to time, with its expected seconds; `ready` runs before each sample and is not timed."""

    call: Callable[[], object]
    ready: Callable[[], object]
    expected: float


def interleaved(
    entries: Mapping[str, Stopwatch], device: str, repeats: int, seconds_per_cell: float
) -> dict[str, Timing | Exception]:
    """Times several calls in turns, one sample of each per round, so that a noisy machine delays all of them equally.

    The order rotates by one in each round. A slow call takes part in fewer rounds: it gets about `seconds_per_cell`
    seconds, but at least one sample. A call that raises an exception is left out from then on; the exception is its
    result.

    Args:
        entries: the calls by name.
        device: "cpu" or "cuda".
        repeats: greatest number of samples.
        seconds_per_cell: time of each call.
    """
    plans = {}
    for name, entry in entries.items():
        calls = max(1, min(MOST_CALLS, math.ceil(SHORTEST_SAMPLE / max(entry.expected, 1e-9))))
        rounds = max(1, min(repeats, int(seconds_per_cell / max(entry.expected * calls, 1e-9))))
        plans[name] = (calls, rounds)
    samples: dict[str, list[float]] = {name: [] for name in entries}
    broken: dict[str, Exception] = {}
    order = list(entries)
    gc.disable()
    try:
        for number in range(max((rounds for _, rounds in plans.values()), default=0)):
            order = order[1:] + order[:1]
            for name in order:
                calls, rounds = plans[name]
                if number >= rounds or name in broken:
                    continue
                try:
                    entries[name].ready()
                    samples[name].append(seconds(entries[name].call, device, calls))
                except Exception as error:
                    broken[name] = error.with_traceback(None)  # a traceback would keep the tensors of the call
    finally:
        gc.enable()
    return {name: broken.get(name) or Timing.of(samples[name], plans[name][0]) for name in entries}


def predict(history: Mapping[int, float], length: int, exponent: int) -> float | None:
    """Predicts the seconds at a length from those at shorter lengths; None if there are none.

    The time grows as it did between the last two lengths, at least linearly and at most with power 2.5. If there is
    only one shorter length, it grows with power `exponent`.

    Args:
        history: seconds by length.
        length: the length.
        exponent: power of the length.
    """
    known = sorted(done for done in history if done < length)
    if not known:
        return None
    last = known[-1]
    power = float(exponent)
    if len(known) > 1:
        before = known[-2]
        power = math.log(history[last] / history[before]) / math.log(last / before)
        power = min(max(power, 1.0), 2.5)
    return history[last] * (length / last) ** power


@dataclass(frozen=True)
class Ceilings:
    """Holds the best rates of a machine: bytes per second of a copy (read plus written), operations per second."""

    copy_bytes: float
    matmul_flops: float

    def roofline_seconds(self, flops: float, moved_bytes: float) -> float:
        """Gives the least time for a number of operations and of bytes."""
        return max(flops / self.matmul_flops, moved_bytes / self.copy_bytes)


def ceilings(dtype: str, device: str) -> Ceilings:
    """Measures a copy of 256 MiB (1 GiB on CUDA) and a square matmul of width 2048 (8192) in the type of the cells."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    width = MATMUL_WIDTH[device]
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (
        torch.randn(width, width, generator=generator, device=device, dtype=getattr(torch, dtype)) for _ in range(2)
    )
    product = torch.empty_like(left)
    copy = _fastest(lambda: target.copy_(source), device)
    matmul = _fastest(lambda: torch.mm(left, right, out=product), device)
    return Ceilings(2 * source.numel() / copy, 2 * width**3 / matmul)


def _fastest(call: Callable[[], object], device: str) -> float:
    seconds(call, device)
    return min(seconds(call, device) for _ in range(7))


def free_bytes(device: str) -> int:
    """Gives the free memory: of the GPU, or of the machine (within the limit of its control group)."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    found = []
    if (meminfo := Path("/proc/meminfo")).exists():
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        found += [1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = Path("/sys/fs/cgroup") / name
        if limit.exists() and limit.read_text().strip().isdigit():
            found.append(int(limit.read_text()))
    return min(found, default=4 << 30)


def cuda_peak(call: Callable[[], object]) -> int:
    """Measures the bytes that a call has allocated on the GPU at its peak."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def resident_peak(call: Callable[[], object]) -> int:
    """Measures the bytes by which a call raises the resident memory of this process at its peak (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text("5")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"expected {field} in /proc/self/status, as on Linux: measure memory on Linux")


def warm_libraries() -> None:
    """Starts the thread pool and the matrix library, whose buffers would otherwise count."""
    large = torch.ones(1 << 20)
    large.exp().sum()
    torch.ones(512, 512) @ torch.ones(512, 512)


class MemoryServer:
    """The process that forks one process per measurement; a context manager.

    Requests and answers are one line of JSON each. Before them, the server writes a line when all is imported.

    Args:
        threads: CPU threads of a measurement.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._process: subprocess.Popen[str] | None = None

    @staticmethod
    def problem() -> str | None:
        """Says why memory cannot be measured on this machine; None if it can."""
        if os.access(_CLEAR_REFS, os.W_OK) and hasattr(os, "fork"):
            return None
        return "peak memory on a CPU needs Linux and /proc/self/clear_refs"

    def __enter__(self) -> MemoryServer:
        environment = {**os.environ, **_RELEASE_EARLY, "OMP_NUM_THREADS": str(self.threads)}
        command = [sys.executable, "-m", "favor.eval.speed", "--isolate", "--device", "cpu"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        if self._process.stdout is not None:
            self._process.stdout.readline()  # its imports would slow down passes that are timed
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)  # the server ends when its input ends
            self._process = None

    def peak(self, request: dict[str, Any]) -> int:
        """Measures peak bytes in a fresh process.

        Raises:
            RuntimeError: if the process fails; the message says why.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("expected a running memory server; use it as a context manager")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the memory server has ended; run the program with --isolate to see why") from None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the memory server ended without an answer; maybe the system had no memory left")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["bytes"]


def serve(requests: IO[str], answers: IO[str], measure: Callable[[dict[str, Any]], int]) -> None:
    """Writes a line when ready, then answers each line of requests by `measure` in a forked process, until they end.

    Args:
        requests: lines of JSON.
        answers: gets lines of JSON.
        measure: gives the bytes for a request.
    """
    gc.collect()
    gc.freeze()  # a child's collector would otherwise touch, and so copy, every object
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(line, send, measure)
        os.close(send)
        with os.fdopen(receive) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if not text:
            code = os.waitstatus_to_exitcode(status)
            text = json.dumps({"error": f"the measuring process ended with code {code} and no answer"})
        answers.write(text + "\n")
        answers.flush()


def _answer(line: str, send: int, measure: Callable[[dict[str, Any]], int]) -> NoReturn:
    """Answers in the forked process; never returns, since the loop and the buffers belong to the parent.

    Args:
        line: the request.
        send: file descriptor that takes the answer.
        measure: gives the bytes for a request.
    """
    os.dup2(2, 1)  # lines that a method prints must not mix with the answers
    answer: dict[str, Any]
    try:
        answer = {"bytes": measure(json.loads(line))}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(send, json.dumps(answer).encode())
    os._exit(0)
