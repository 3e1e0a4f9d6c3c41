"""Starts `favor.train.glue` in a process of its own, so that its peak memory and its seeds are its own."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import favor
from favor.train.common.program import did_you_mean
from favor_command.program import in_new_words


@dataclass(frozen=True)
class Backend:
    """One row of a table: an attention implementation, the features of `favor#`, and their number.

    It is written `name`, optionally with `:features` and `:number`: `sdpa`, `favor#:saderf`, `favor+:64`,
    `favor#:landmark:64`. A model that was adapted to its attention is a folder of `favor.train.distill`.
    """

    name: str
    features: str | None = None
    num_features: int | None = None
    window: int = 0
    exact_heads: int = 0
    folder: str | None = None

    @classmethod
    def parse(cls, text: str) -> Backend:
        """Reads `name[:features][:number]`; raises ValueError if the name is neither exact attention nor a backend."""
        name, *options = text.split(":")
        exact = ("sdpa", "eager")
        if name not in exact and name not in favor.BACKENDS:
            known = ", ".join((*exact, *favor.BACKENDS))
            near = did_you_mean(name, (*exact, *favor.BACKENDS))
            raise ValueError(f"backend must be one of {known}, with optional :features and :number, got {text!r}{near}")
        if name in exact and options:
            raise ValueError(f"exact attention takes no features; write {name!r} instead of {text!r}")
        number = int(options.pop()) if options and options[-1].isdecimal() else None
        if number == 0:
            raise ValueError(f"the number of features must be at least 1, got {text!r}")
        if len(options) > 1:
            raise ValueError(f"backend must be written NAME[:FEATURES][:NUMBER], got {text!r}")
        return cls(name, options[0] if options and options[0] else None, number)

    @classmethod
    def adapted(cls, folder: str) -> Backend:
        """Reads what attention a folder of `favor.train.distill` has; raises ValueError for other folders."""
        results = Path(folder) / "all_results.json"
        arguments = json.loads(results.read_text()).get("arguments", {}) if results.exists() else {}
        names = ("attn_implementation", "features", "num_features", "window")
        if not arguments.keys() >= set(names):
            raise ValueError(f"expected a finished folder of favor.train.distill, got {folder}")
        name, features, num_features, window = (arguments[own] for own in names)
        return cls(name, features, num_features, window, arguments.get("exact_heads", 0), folder)

    @property
    def label(self) -> str:
        """The backend as it is written on the command line and in tables; an adapted model has its folder's name."""
        label = ":".join(str(part) for part in (self.name, self.features, self.num_features) if part)
        window = f", window {self.window}" if self.window else ""
        heads = f", {self.exact_heads} exact heads" if self.exact_heads else ""
        return label if self.folder is None else f"{label}{window}{heads}, adapted: {Path(self.folder).absolute().name}"

    @property
    def slug(self) -> str:
        """The label as a folder name."""
        text = self.label
        for old, new in {"+": "_plus", "#": "_sharp", ", ": "-", ": ": "_", ":": "-", " ": "_"}.items():
            text = text.replace(old, new)
        return text

    def arguments(self) -> list[str]:
        """Writes the backend as arguments of a training program; an adapted model brings its own."""
        if self.folder is not None:
            return []
        options = {"--features": self.features, "--num_features": self.num_features}
        given = [word for name, value in options.items() if value for word in (name, str(value))]
        return ["--attn_implementation", self.name, *given]


def launch_command(arguments: Sequence[str], num_processes: int = 1) -> list[str]:
    """Makes the command `accelerate launch -m favor.train.glue`, with every value that accelerate would warn about.

    Without `--num_cpu_threads_per_process`, accelerate trains on a single CPU thread.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // num_processes))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--num_cpu_threads_per_process", threads]
    if num_processes > 1:
        launcher.append("--multi_gpu")
    return [*launcher, "-m", "favor.train.glue", *arguments]


def train(arguments: Sequence[str], output_dir: Path, num_processes: int = 1) -> dict[str, Any]:
    """Runs one training of `favor.train.glue` to its end and returns its `all_results.json`.

    The output of the program goes to `log.txt` in the output folder.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    log = output_dir / "log.txt"
    command = launch_command([*arguments, "--output_dir", str(output_dir)], num_processes)
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"training ended with code {done.returncode}; the end of {log}:\n{tail}")
    return json.loads((output_dir / "all_results.json").read_text())


def train_once(
    arguments: Sequence[str], backend: Backend, folder: Path, num_processes: int = 1
) -> tuple[dict[str, Any], str, bool]:
    """Runs one training of a table, or takes its results if it was finished before.

    `cell.json` in the folder records the backend, the arguments and the machine. A stopped training goes on from its
    last checkpoint.
    """
    record, finished = folder / "cell.json", folder / "all_results.json"
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        written = {"backend": backend.label, "arguments": list(arguments), "machine": machine()}
        record.write_text(json.dumps(written, indent=2))
        again = "--resume" if any(folder.glob("checkpoint-*")) else "--overwrite_output_dir"
        return train([*arguments, again], folder, num_processes), machine(), True
    before = json.loads(record.read_text()) if record.exists() else {}
    if in_new_words(before.get("arguments", []), arguments) != list(arguments):
        raise ValueError(
            f"{folder} holds a finished run with other arguments:\n  then {shlex.join(before.get('arguments', []))}\n"
            f"  now  {shlex.join(arguments)}\nchoose another --output_dir, or remove that folder to train again"
        )
    return json.loads(finished.read_text()), before["machine"], False


def available_cores() -> int:
    """Counts the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Says in words the CPU's model and cores, and the GPUs."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{gpus}; " * bool(gpus) + f"{model}, {available_cores()} cores"


def versions(*more: str) -> dict[str, str]:
    """Gives the versions of Python and of the packages that a result depends on, and more, if they are installed."""
    found = {"python": platform.python_version()}
    for name in ("favor", "torch", "transformers", "accelerate", "datasets", *more):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
