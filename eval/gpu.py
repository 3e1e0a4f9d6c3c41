"""All that needs a GPU, for visits of some minutes: kernels against float64, times of methods and models, profiles.

    python -m favor.eval.gpu --seconds 540 --output_dir results    one visit; the next one goes on where it ended
    python -m favor.eval.gpu --dry_run                             the same steps with tiny sizes on a CPU

The steps are pytest files of this checkout and other programs. They run in order of importance, each in a process of
its own. A step begins if the time that is left suffices, and is stopped after twice the seconds that it should need.
A step that failed or was stopped is written down, and the others go on. Before the first times are measured, kernels
choose their blocks (tuning). NAME.jsonl holds the outcome of each step. Steps with an outcome for this commit and
device are not run again, but for those that the end of a visit stopped: delete a line to repeat its step. NAME.md has
the tables so far, STEP.log what a step printed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import favor
from favor.eval.common import launch, report
from favor.eval.common.program import add_results
from favor.train.common.program import Parser, program

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
PATIENCE = 2  # a step is stopped after this many times the seconds that it should need
SHOWN = 12  # last lines that are shown of a step that failed
TEST_PROCESSES = 12
OUT_OF_TIME = "out of time"  # the outcome of a step that the end of a visit stopped: the next visit repeats it
Words = list[str]


@dataclass(frozen=True)
class Step:
    """One part of a visit: what python runs, and the seconds that it should need on a GPU.

    The words of a dry run come behind the others, so that their values count. A step that reads results of others has
    a function that makes its words from their folder, or says why there are none. `needs` are modules that must be
    installed.
    """

    name: str
    words: Words | Callable[[Path], Words | str]
    seconds: float
    dry: Words
    needs: tuple[str, ...] = ()
    is_test: bool = False

    def command(self, folder: Path, dry_run: bool) -> Words | str:
        """Gives the words behind `python`, or says why it cannot run here."""
        missing = [name for name in self.needs if find_spec(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if self.is_test and not (ROOT / "tests").is_dir():
            return "there are no tests: expected a checkout, got an installed package"
        words = self.words(folder) if callable(self.words) else self.words
        if isinstance(words, str):
            return words
        own = self.dry if dry_run else []
        if self.is_test:
            jobs = str(0 if dry_run else min(TEST_PROCESSES, launch.available_cores()))
            parallel = ["-n", jobs] if find_spec("xdist") else []
            return ["-m", "pytest", "-W", "default", "-p", "no:cacheprovider", *parallel, *words, *own]
        return ["-m", *words, *own, "--output_dir", str(folder), "--name", self.name]


def _tests(path: str, seconds: float, few: str, *words: str) -> Step:
    name = path.rpartition("/test_")[2].removesuffix(".py")
    return Step(f"tests_{name}", [f"tests/{path}", *words], seconds, ["-k", few], ("pytest",), is_test=True)


TINY = ["--lengths", "64", "--device", "cpu", "--dtype", "float32", "--seconds_per_cell", "0.01", "--skip_memory"]
LONG = ["--lengths", "1024", "4096", "16384", "65536", "131072", "--dtype", "bfloat16"]
METHODS = ["favor.eval.speed", *LONG, "--seconds_per_cell", "0.1", "--max_seconds", "1", "--methods", "favor"]
MODELS = ["favor.eval.speed", "--lengths", "4096", "16384", "65536", "--dtype", "bfloat16", "--seconds_per_cell", "0.3"]
MODELS += ["--max_seconds", "3", "--model_types"]


def _methods(direction: str, pass_name: str, families: Sequence[str], seconds: float) -> Step:
    words = [*METHODS, "sdpa", "flex", "--families", *families, "--directions", direction, "--passes", pass_name]
    name = f"methods_{direction}_{pass_name}".replace("+", "_")
    return Step(name, words, seconds, TINY)


def _models(name: str, seconds: float) -> Step:
    return Step(f"models_{name}", [*MODELS, name], seconds, TINY)


def slowest(folder: Path, place: int) -> Words | str:
    """Gives the command that profiles a method of favor: that of this place among the slowest of `methods_...`.

    Each method of a direction and pass is in the list once, with the longest length at which it was timed.
    """
    times: dict[tuple[str, str], tuple[float, int]] = {}
    for path in folder.glob("methods_*.json"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["timing"] is not None and cell["method"].startswith("favor:"):
                times[cell["panel"], cell["method"]] = (cell["timing"]["median"], cell["length"])
    ranked = sorted(times, key=lambda key: -times[key][0])
    if place >= len(ranked):
        return "no method to profile: the steps methods_... have given too few times"
    direction, pass_name = ranked[place][0].split(", ")
    words = [*METHODS, "--families", ranked[place][1].removeprefix("favor:"), "--directions", direction]
    return [*words, "--passes", pass_name, "--lengths", str(times[ranked[place]][1]), "--profile"]


PASSES = ("forward", "forward+backward", "decode")
BIDIRECTIONAL, CAUSAL = ("pos", "wderf", "landmark"), ("pos", "pos@128", "landmark")
GENERATION = ["favor.eval.generation", "--shapes", "gemma", "--lengths", "4096", "16384", "65536", "--device", "cuda"]
FLA = [*METHODS, "fla", "--families", "pos", "--directions", "causal"]
# Kernels choose their blocks when they first run. Here that is at a length where the choice matters, in each visit
# anew, since the next one may be on another machine.
TUNING = Step(
    "tuning",
    [*METHODS, "--lengths", "16384", "--skip_memory", "--families", "wderf", *CAUSAL, "--passes", *PASSES],
    40,
    TINY,
)
STEPS = [
    _tests("kernels/gpu/test_triton_attention.py", 60, "nothing_to_attend"),
    _tests("kernels/gpu/test_triton_tokens.py", 45, "roots and 5"),
    _tests("kernels/gpu/test_triton_landmarks.py", 45, "a_short_sequence"),
    _tests("kernels/gpu/test_triton_fits.py", 45, "nothing_that_counts"),
    _tests("kernels/test_chosen.py", 45, "work_in_many_parts", "-k", "triton"),
    _methods("causal", "forward", CAUSAL, 60),
    _methods("bidirectional", "forward", BIDIRECTIONAL, 60),
    _methods("causal", "forward+backward", CAUSAL, 80),
    _methods("bidirectional", "forward+backward", BIDIRECTIONAL, 80),
    _methods("causal", "decode", CAUSAL, 45),
    _models("gemma", 60),
    Step("generation_gemma", GENERATION, 45, ["--lengths", "16", "--device", "cpu", "--num_features", "8"]),
    _models("bert", 60),
    _models("modernbert", 60),
    _models("conformer", 60),
    _models("vit", 45),
    Step("fla", FLA, 60, TINY, ("fla",)),
    *(Step(f"profile_{n + 1}", partial(slowest, place=n), 20, TINY) for n in range(3)),
    _tests("kernels/gpu/test_triton_graphs.py", 45, "looked_at"),
    _tests("decomposition/test_decomposition_inputs.py", 60, "rank_is_lower"),
]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.gpu", __doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=540.0, help="length of the visit; no step runs longer")
    add("--only", nargs="+", choices=[step.name for step in STEPS], help="steps to run; default: all, %(choices)s")
    add("--dry_run", action="store_true", help="run the steps on a CPU, each with tiny sizes and few tests")
    add_results(parser, "gpu")
    given = parser.parse_args(words)
    if given.seconds <= 0:
        parser.error(f"expected --seconds above 0, got {given.seconds:g}")
    if not given.dry_run and not torch.cuda.is_available():
        parser.error("expected a GPU, got none; use --dry_run to try the steps on a CPU")
    return given


def state_of_code() -> str:
    """Gives the commit of this checkout; without git, or after changes, the version and a digest of Python files."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    with contextlib.suppress(OSError):
        if (ROOT / ".git").exists():
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0 and not done.stdout.strip().endswith("-dirty"):
                return done.stdout.strip()
    folders = (Path(favor.__file__).parent, Path(__file__).parent, ROOT / "tests")
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return f"{favor.__version__}-{digest.hexdigest()[:12]}"


def run(words: Words, limit: float, log: Path, environment: Mapping[str, str]) -> int | None:
    """Runs python with some words for at most `limit` seconds; gives the exit code, or None if it was stopped.

    Its processes are stopped too, and what it prints goes to a file, so that nothing waits for a process that hangs.
    """
    in_checkout = ROOT if words[:2] == ["-m", "pytest"] else None
    with log.open("w") as stream:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [sys.executable, *words], **options, cwd=in_checkout, env=environment, start_new_session=True
        )
        former = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also if this program is stopped
            signal.signal(signal.SIGTERM, former)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver may not end
                process.wait(5)


class Visit:
    """Runs steps, writes the outcome of each, and makes the page."""

    def __init__(self, given: argparse.Namespace, words: Sequence[str] | None) -> None:
        self.given, self.began = given, time.monotonic()
        self.folder: Path = given.output_dir.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        device = "cpu" if given.dry_run else torch.cuda.get_device_name()
        self.state = {"commit": state_of_code(), "device": device, "dry_run": given.dry_run}
        self.records = report.Records(self.folder / f"{given.name}.jsonl", ("of", "outcome"))
        self.about = report.context_of("favor.eval.gpu", words, ("transformers", "triton"))

    def outcome(self, step: Step) -> dict[str, Any] | None:
        """Gives the outcome of a step in this state of the code, if it has one."""
        return self.records.find({"step": step.name, **self.state})

    def is_over(self, step: Step) -> bool:
        """Tells whether a step need not run again."""
        found = self.outcome(step)
        return found is not None and found["status"] != OUT_OF_TIME

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.given.seconds - (time.monotonic() - self.began)

    def run(self, step: Step, environment: Mapping[str, str]) -> None:
        """Runs a step, unless the time that is left is too short, and writes its outcome."""
        words = step.command(self.folder, self.given.dry_run)
        if isinstance(words, str):
            if callable(step.words):  # the results that it reads may come in the next visit
                print(f"{step.name}: {words}", flush=True)
            else:
                self.end(step, "skipped", 0.0, words)
            return
        if self.left < step.seconds:
            return
        limit, log, start = min(PATIENCE * step.seconds, self.left), self.folder / f"{step.name}.log", time.monotonic()
        for ending in ("md", "json"):  # of an earlier state of the code
            (self.folder / f"{step.name}.{ending}").unlink(missing_ok=True)
        code = run(words, limit, log, environment)
        seconds = time.monotonic() - start
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if code is None:
            status = "stopped" if limit == PATIENCE * step.seconds else OUT_OF_TIME
            self.end(step, status, seconds, f"it was not done after {limit:.0f} s", lines[-SHOWN:])
        elif code == 0:
            self.end(step, "done", seconds, lines[-1] if step.is_test and lines else "")
        else:
            self.end(step, "failed", seconds, f"exit code {code}", lines[-SHOWN:])

    def end(self, step: Step, status: str, seconds: float, reason: str, last: Sequence[str] = ()) -> None:
        """Writes the outcome of a step, and the page."""
        outcome = {"status": status, "seconds": round(seconds, 1), "reason": reason, "last_lines": list(last)}
        self.records.add({"step": step.name, **self.state}, outcome)
        print(f"[{time.monotonic() - self.began:4.0f} s] {step.name}: {status} {reason}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        """Writes NAME.md, with the tables of all steps, and NAME.json."""
        rows, parts, outcomes = [], [], {}
        for step in (TUNING, *STEPS):
            outcome = self.outcome(step) or {"status": "not run", "seconds": 0.0, "reason": "", "last_lines": []}
            outcomes[step.name] = outcome
            rows.append([step.name, outcome["status"], f"{outcome['seconds']:.0f}", outcome["reason"].strip("= ")])
            page = self.folder / f"{step.name}.md"
            has_page = outcome["status"] not in ("not run", "skipped") and page.exists()
            text = re.sub("^#", "###", page.read_text(), flags=re.MULTILINE) if has_page else ""
            last = ["```text", *outcome["last_lines"], "```", ""] if outcome["last_lines"] else []
            if text or last:
                parts += ["", f"## {step.name}: {outcome['status']}", "", *last, *text.splitlines()]
        state = f"Commit {self.state['commit']}, {self.state['device']}" + ", tiny sizes" * self.given.dry_run
        lines = ["# What needs a GPU", "", f"{state}.", "", *report.table(["step", "outcome", "seconds", "said"], rows)]
        report.write(self.folder, self.given.name, [*lines, *parts], {**self.about, "steps": outcomes}, [])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a step failed or was stopped at this commit."""
    given = parse_arguments(argv)
    visit = Visit(given, argv)
    is_tuned = False
    chosen = [step for step in STEPS if given.only is None or step.name in given.only]
    common = {"OMP_NUM_THREADS": "1"} if given.dry_run else {}  # tiny sizes are fastest with one thread
    with tempfile.TemporaryDirectory() as cache:
        for step in (step for step in chosen if not visit.is_over(step)):
            if callable(step.words) and not all(
                visit.is_over(own) for own in chosen if own.name.startswith("methods_")
            ):
                continue  # it looks for the slowest of all
            can_run = not isinstance(step.command(visit.folder, given.dry_run), str)
            if can_run and not step.is_test and not is_tuned:
                if visit.left < TUNING.seconds + step.seconds:
                    continue
                visit.run(TUNING, {**os.environ, **common})
                is_tuned = True
            own = {"TRITON_CACHE_DIR": cache} if step.is_test else {}  # no later program uses what tests have tuned
            visit.run(step, {**os.environ, **common, **own})
    visit.write()
    waiting = [step.name for step in chosen if not visit.is_over(step)]
    if waiting:
        print(f"for the next visit: {shlex.join(waiting)}")
    print(f"written: {given.name}.md, .json and .jsonl in {given.output_dir}")
    outcomes = [visit.outcome(step) or {"status": ""} for step in chosen]
    return int(any(outcome["status"] in ("failed", "stopped") for outcome in outcomes))


cli = program("favor.eval.gpu", main)


if __name__ == "__main__":
    cli()
