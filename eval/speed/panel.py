"""A panel of the benchmark: contenders at growing lengths, which are checked first and then timed in turns."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from favor.eval.speed import measure, report

# Greatest number of measurements of a method in a cell.
REPEATS = 20


@dataclass(frozen=True)
class Trial:
    """One contender prepared for one length.

    Attributes:
        check: says what is wrong with its result, None if nothing is, and gives the errors.
        call: the pass that is timed.
        peak: gives peak bytes of a pass; None if they are not measured.
        ready: runs before each sample and is not timed.
        flops, moved_bytes: for the roofline.
        tokens: number of tokens of a pass, for tokens per second.
    """

    check: Callable[[], tuple[str | None, dict[str, Any] | None]]
    call: Callable[[], object]
    peak: Callable[[], int] | None = None
    ready: Callable[[], object] = lambda: None
    flops: float | None = None
    moved_bytes: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Contender:
    """One row of a panel: `refuses` says why it cannot run at a length, `start` prepares it for a length."""

    name: str
    exponent: int
    refuses: Callable[[int], str | None]
    start: Callable[[int], Trial]


@dataclass
class Bench:
    """Holds the settings of all panels, and their results."""

    arguments: argparse.Namespace
    ceilings: measure.Ceilings
    memory_limit: float
    server: measure.MemoryServer | None = None
    results: list[report.Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        print(f"[{time.perf_counter() - self.began:4.0f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        """Prints a line once; the report repeats it."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    def run(self, panel: str, contenders: Sequence[Contender]) -> None:
        """Runs all lengths of a panel, the shortest first."""
        history: dict[str, dict[int, float]] = {c.name: {} for c in contenders}
        skipped: set[str] = set()
        for length in self.arguments.lengths:
            here = [report.Result(panel, contender.name, length) for contender in contenders]
            trials: dict[str, tuple[Trial, measure.Stopwatch]] = {}
            for contender, result in zip(contenders, here, strict=True):
                reason = contender.refuses(length) or self._too_slow(history[contender.name], length, contender)
                if reason is None:
                    self._open(contender, result, trials)
                else:
                    result.status, result.reason = "skipped", reason
                if result.status == "skipped" and contender.name not in skipped:
                    skipped.add(contender.name)
                    self.note(f"{panel}: {contender.name} skipped from L = {length} on: {result.reason}")
                elif result.status == "failed":
                    self.note(f"{panel}: {contender.name} FAILED at L = {length}: {result.reason}")
            self._time(here, trials)
            for result in here:
                if result.timing is not None:
                    history[result.method][length] = result.timing.median
            self.results += here
            times = (f"{r.method} {1e3 * r.timing.median:.3g} ms" for r in here if r.timing is not None)
            self.say(f"{panel}, L = {length}: " + ", ".join(times))

    def _too_slow(self, history: dict[int, float], length: int, contender: Contender) -> str | None:
        expected = measure.predict(history, length, contender.exponent)
        limit = self.arguments.max_seconds
        if expected is None or expected <= limit:
            return None
        return f"a pass would take about {expected:.3g} s, the limit is {limit:g} s (--max_seconds)"

    def _open(
        self, contender: Contender, result: report.Result, trials: dict[str, tuple[Trial, measure.Stopwatch]]
    ) -> None:
        """Prepares a contender, checks it, and runs it once to warm it up.

        Args:
            contender: the contender.
            result: gets the outcome of the check.
            trials: gets the prepared contender.
        """
        device = self.arguments.device
        try:
            trial = contender.start(result.length)
            start = time.perf_counter()
            problem, result.check = trial.check()
            expected = time.perf_counter() - start
            if problem is not None:
                result.status, result.reason = "failed", problem
                return
            # After a long check a CPU is warm; on a GPU the check may have been long because it compiled kernels.
            if device == "cuda" or expected < self.arguments.seconds_per_cell:
                trial.ready()
                expected = measure.seconds(trial.call, device)
            trials[contender.name] = (trial, measure.Stopwatch(trial.call, trial.ready, expected))
        except Exception as error:
            _explain(error, result)

    def _time(self, results: Sequence[report.Result], trials: dict[str, tuple[Trial, measure.Stopwatch]]) -> None:
        arguments = self.arguments
        watches = {name: watch for name, (_, watch) in trials.items()}
        timings = measure.interleaved(watches, arguments.device, REPEATS, arguments.seconds_per_cell)
        for result in results:
            if result.method not in trials:
                continue
            trial, timing = trials[result.method][0], timings[result.method]
            if isinstance(timing, Exception):
                _explain(timing, result)
                self.note(f"{result.panel}: {result.method} at L = {result.length}: {result.reason}")
                continue
            result.timing = timing
            if trial.tokens is not None:
                result.tokens_per_second = trial.tokens / timing.median
            if trial.flops is not None and trial.moved_bytes is not None:
                result.tflops = trial.flops / timing.median / 1e12
                least = self.ceilings.roofline_seconds(trial.flops, trial.moved_bytes)
                result.roofline = least / timing.median
            if trial.peak is not None and not arguments.skip_memory:
                try:
                    trial.ready()
                    result.peak_bytes = trial.peak()
                except RuntimeError as error:
                    self.note(f"{result.panel}: {result.method} at L = {result.length}: no peak memory: {error}")


def _explain(error: Exception, result: report.Result) -> None:
    """Records an error: a method that runs out of memory is skipped, any other error is a failure."""
    gc.collect()
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        result.status, result.reason = "skipped", "out of memory"
        return
    lines = str(error).strip().splitlines() or [""]
    result.status, result.reason = "failed", f"{type(error).__name__}: {lines[0][:160]}"
