"""Clock and memory: samples of calls in turns, replays of CUDA graphs, peak and free memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

# A sample repeats the call until it is at least this long, so that the cost of the clock does not count.
SHORTEST_SAMPLE = 0.01
Name = TypeVar("Name", bound=Hashable)
MOST_CALLS = 100


def seconds(call: Callable[[], object], device: str, calls: int = 1) -> float:
    """Measures the mean seconds of a call over `calls` calls; waits for the device ("cpu" or "cuda") around them."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
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
    """A call, recorded as a CUDA graph the first time and then replayed, so that only the device's time counts."""

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
        quartiles = statistics.quantiles(samples * 2 if len(samples) == 1 else samples, n=4, method="inclusive")
        return cls(statistics.median(samples), quartiles[0], quartiles[2], len(samples), calls)


@dataclass(frozen=True)
class Stopwatch:
    """A call to time, with its expected seconds; `ready` runs before each sample and is not timed."""

    call: Callable[[], object]
    ready: Callable[[], object]
    expected: float


def interleaved(
    entries: Mapping[Name, Stopwatch], device: str, repeats: int, seconds_per_cell: float
) -> dict[Name, Timing | Exception]:
    """Times several calls in turns, one sample of each per round, so that a noisy machine delays all of them equally.

    The order rotates by one in each round. A slow call takes part in fewer rounds: it gets about `seconds_per_cell`
    seconds, but at least one sample. A call that raises an exception is left out from then on; the exception is its
    result.
    """
    plans = {}
    for name, entry in entries.items():
        expected = max(entry.expected, 1e-9)
        calls = max(1, min(MOST_CALLS, math.ceil(SHORTEST_SAMPLE / expected)))
        plans[name] = (calls, max(1, min(repeats, int(seconds_per_cell / (expected * calls)))))
    samples: dict[Name, list[float]] = {name: [] for name in entries}
    broken: dict[Name, Exception] = {}
    order = list(entries)
    gc.disable()
    try:
        for number in range(max((rounds for _, rounds in plans.values()), default=0)):
            order = order[1:] + order[:1]
            for name in (name for name in order if number < plans[name][1] and name not in broken):
                calls = plans[name][0]
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
    """
    known = sorted(done for done in history if done < length)
    if not known:
        return None
    last, power = known[-1], float(exponent)
    if len(known) > 1:
        power = math.log(history[last] / history[known[-2]]) / math.log(last / known[-2])
        power = min(max(power, 1.0), 2.5)
    return history[last] * (length / last) ** power


def profile(call: Callable[[], object], device: str, most: int = 12) -> list[dict[str, Any]]:
    """Profiles one call with `torch.profiler`: name, calls and milliseconds of what takes longest on the device."""
    with torch.profiler.profile() as found:
        seconds(call, device)
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [event for event in found.key_averages() if event.device_type.name == device.upper()]
    events = sorted(events, key=lambda event: -getattr(event, time_of))[:most]
    return [{"name": own.key, "calls": own.count, "ms": getattr(own, time_of) / 1e3} for own in events]


def free_bytes() -> int:
    """Gives the free memory of the machine, within the limit of its control group."""
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
    """Measures the bytes that a call has allocated on the GPU at its peak, without those allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
