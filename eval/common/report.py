"""Parts of reports that programs share: Markdown tables, acceptance checks, and the files of a result."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from favor.eval.common import launch
from favor.eval.common.processes import processes

DATA = "DATA"


@dataclass(frozen=True)
class Check:
    """One statement about a result, the numbers behind it, and whether it holds."""

    statement: str
    numbers: str
    holds: bool

    def line(self) -> str:
        """Writes the check as one line of text."""
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.statement} ({self.numbers})"


def table_row(cells: Sequence[str]) -> str:
    """Writes one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Writes a Markdown table; its first column is aligned to the left, the others to the right."""
    lines = [list(header), ["---", *("---:" for _ in header[1:])], *(list(row) for row in rows)]
    return [table_row(cells) for cells in lines]


def shown_command(program: str, argv: Sequence[str], folders: Sequence[str], dropped: Sequence[str] = ()) -> str:
    """Writes a command line for a result, quoted for a shell; use `local_names` first to shorten paths of this machine.

    Options whose value is a data folder are in `folders`: `DATA` takes its place. Those `dropped`, with one value, are
    left out.
    """
    kept: list[str] = []
    words = iter([part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])])
    for word in words:
        if word in dropped:
            next(words, None)
            continue
        kept.append(word)
        if word in folders and next(words, None) is not None:
            kept.append(DATA)
    return " ".join(["python -m", program, *([shlex.join(kept)] if kept else [])])


def local_names(argv: Sequence[str]) -> list[str]:
    """Replaces paths that exist on this machine, such as those of local models, by their last names."""
    return [Path(word).resolve().name if "/" in word and Path(word).exists() else word for word in argv]


def load_line(load: Sequence[float], what: str, time: str) -> str:
    """Says how busy the machine was before and after, and which `time` of `what` can be compared then."""
    return (
        f"The load average of the machine was {load[0]:.1f} before and {load[1]:.1f} after: where it is above the "
        f"number of cores, {what} waits, and only the {time} of the CPU are its own."
    )


def context(command: str, packages: Sequence[str] = ("scikit-learn", "numpy")) -> dict[str, Any]:
    """Gives command, machine and versions."""
    known = launch.versions()
    versions = {name: known[name] for name in ("python", "favor", "torch")}
    several = f", {number} processes" if (number := processes().num_processes) > 1 else ""
    return {
        "command": command,
        "machine": f"{launch.machine()}, {torch.get_num_threads()} threads{several}",
        "versions": versions | {name: metadata.version(name) for name in packages},
    }


def context_of(
    program: str, argv: Sequence[str] | None, packages: Sequence[str], folders: Sequence[str] = (), *dropped: str
) -> dict[str, Any]:
    """Gives command, machine and versions of a program: data `folders` as `DATA`, paths of this machine by name."""
    words = local_names(sys.argv[1:] if argv is None else argv)
    return context(shown_command(program, words, folders, ["--output_dir", *dropped]), packages)


class Records:
    """Results in lines of JSON, written one by one, so that a stopped run continues where it was.

    Args:
        path: the file; None: results are kept in memory alone.
        names: under which a line holds the description of a result, and the result.
    """

    def __init__(self, path: Path | None, names: tuple[str, str] = ("of", "result")) -> None:
        self.path, self.names = path, names
        self._known: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path is not None and path.is_file() else ():
            with contextlib.suppress(ValueError):  # a run was stopped while it wrote this line: it is measured again
                of, result = map(json.loads(line).__getitem__, names)
                self._known[json.dumps(of, sort_keys=True)] = result

    def find(self, of: Any) -> dict[str, Any] | None:
        """Gives the result for a description, such as model, document and variant, or None if there is none yet."""
        return self._known.get(json.dumps(of, sort_keys=True))

    def add(self, of: Any, result: dict[str, Any]) -> None:
        """Adds a result, in memory and, in the first of several processes, in the file."""
        self._known[json.dumps(of, sort_keys=True)] = result
        if self.path is not None and processes().is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as stream:  # the line break comes first: the line before may have been torn
                stream.write("\n" + json.dumps(dict(zip(self.names, (of, result), strict=True))))


def finish(
    arguments: argparse.Namespace,
    lines: Sequence[str],
    content: Mapping[str, Any],
    checks: Sequence[Check] = (),
    shown: Sequence[str] | None = None,
) -> int:
    """Writes a report, prints its lines, or those `shown`, and its checks; gives the exit code, 1 if one fails.

    Of several processes the first one writes and prints.
    """
    write(arguments.output_dir, arguments.name, lines, content, checks)
    printed = lines if shown is None else shown
    text = "\n".join(["", *printed, *([""] if checks else []), *(check.line() for check in checks)])
    processes().print(text, flush=True)
    return int(not all(check.holds for check in checks))


def write(folder: Path, name: str, lines: Sequence[str], content: Mapping[str, Any], checks: Sequence[Check]) -> None:
    """Writes name.md and name.json with checks; name.md ends with machine, versions and command."""
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    tail = ["", "## Checks", "", *(f"- {check.line()}" for check in checks)] if checks else []
    tail += ["", f"{content['machine']}; {versions}.", "", "```bash", content["command"], "```"]
    write_files(folder, name, [*lines, *tail], {**content, "checks": [vars(check) for check in checks]})


def write_files(folder: Path, name: str, lines: Sequence[str], content: Mapping[str, Any], indent: int = 1) -> None:
    """Writes name.md and name.json, in the first of several processes; numbers that are not finite become words."""
    if not processes().is_main_process:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    finite = with_floats(content, lambda number: number if math.isfinite(number) else str(number))
    (folder / f"{name}.json").write_text(json.dumps(finite, indent=indent, allow_nan=False) + "\n")


def with_floats(value: Any, show: Callable[[float], Any]) -> Any:
    """Copies data for JSON, with each float as `show` gives it: JSON has neither NaN nor infinity."""
    if isinstance(value, float):
        return show(value)
    if isinstance(value, Mapping):
        return {key: with_floats(part, show) for key, part in value.items()}
    return [with_floats(part, show) for part in value] if isinstance(value, list | tuple) else value
