"""Checkpoints that stay usable if the process is killed at any time, and all that a resumed run needs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, gather_object
from safetensors import SafetensorError

from favor.train.common import lock
from favor.train.common import state as files

KEEP = 2
RESULTS = "all_results.json"
SETTINGS = "settings.json"
# Names of checkpoints, which the trainer of transformers has too, and files that only those of our runs have.
CHECKPOINT = re.compile(r"checkpoint(-\d+(\.damaged)?|\.partial)")
MARKS = (SETTINGS, "progress.json", "process_*.json", "process_*.safetensors")
MODELS = ("*.safetensors", "pytorch_model*.bin")
# With these no process holds the whole model, so no process can write it.
SPREAD = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@dataclass
class Progress:
    """Keeps steps and their losses, an entry for each finished epoch, and metrics before the training, if measured."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Gives the progress as a dictionary, for `States`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a saved state."""
        self.step, self.history, self.before = state["step"], state["history"], state["before"]
        # Earlier versions kept their sum.
        self.losses = state["losses"] if "losses" in state else [state["loss_sum"] / self.step] * self.step


@dataclass
class States:
    """Holds the objects of a checkpoint by name, whose states are equal in all processes, and adds what differs.

    Groups of `size` processes, which cut sequences, share one state, so that others can resume.
    """

    accelerator: Accelerator
    parts: dict[str, Any]
    size: int = 1

    def __post_init__(self) -> None:
        """Adds the scale of fp16 losses."""
        if self.accelerator.scaler is not None:
            self.parts = {**self.parts, "scaler": self.accelerator.scaler}

    def check(self) -> None:
        """Raises ValueError if a process does not hold the whole model."""
        if self.accelerator.distributed_type in SPREAD:
            name = self.accelerator.distributed_type.value
            raise ValueError(
                f"checkpoints are written of models that every process holds as a whole, got {name}: leave out "
                "--checkpointing_steps and --resume, or train with plain data parallelism"
            )

    @property
    def own(self) -> str:
        """Name of the file with the state that differs between processes."""
        return f"process_{self.accelerator.process_index // self.size}"

    def write(self, folder: Path) -> None:
        """Writes the file of this process or group; the first process also writes those that all processes share."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.accelerator.is_main_process:
            for name, part in self.parts.items():
                files.write(folder, name, part.state_dict())
        if self.accelerator.process_index % self.size == 0:
            files.write(folder, self.own, self.state_dict())

    def load(self, folder: Path) -> None:
        """Reads all files, then takes over what they hold; raises ValueError for a file that cannot be used."""
        content = {name: files.read(folder, name) for name in (*self.parts, self.own)}
        for name, part in {**self.parts, self.own: self}.items():
            try:
                part.load_state_dict(content[name])
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                raise files.DamagedError(f"{name} does not fit this run ({type(error).__name__}: {error})") from error

    def state_dict(self) -> dict[str, Any]:
        """Gives what differs between processes."""
        return {"step": self.accelerator.step, "random": files.random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it over."""
        self.accelerator.step = state["step"]
        files.restore_random_state(state["random"])


def save_checkpoint(states: States, folder: Path, step: int) -> None:
    """Writes `folder/checkpoint-STEP` and removes all checkpoints except the last two; all processes call it.

    The files go to a folder of another name, which is renamed when they are complete. So a `checkpoint-STEP` that
    exists is whole, even if the process is killed.

    Raises:
        OSError: in all processes if one of them cannot write. The unfinished checkpoint is removed, earlier ones stay.
    """
    accelerator, partial, final = states.accelerator, folder / "checkpoint.partial", folder / f"checkpoint-{step}"
    if accelerator.is_main_process:
        remove(partial)
    accelerator.wait_for_everyone()
    problem = None
    try:
        with _writing(final):
            partial.mkdir(parents=True, exist_ok=True)
            # First, so that a part of a checkpoint is known as ours.
            if accelerator.is_main_process and (folder / SETTINGS).exists():
                shutil.copy(folder / SETTINGS, partial)
            states.write(partial)
    except OSError as error:
        problem = str(error)
    except KeyboardInterrupt:
        remove(partial)
        raise
    problems = [said for said in gather_object([problem]) if said]
    if problems:
        if accelerator.is_main_process:
            remove(partial)
        after = "there is no earlier checkpoint"
        if whole := checkpoints(folder):
            after = f"{whole[-1].name} is whole: continue from it with --resume"
        raise OSError(f"{problems[0]}; {after}")
    if accelerator.is_main_process:
        os.replace(partial, final)
        for old in checkpoints(folder)[:-KEEP]:
            remove(old)
    accelerator.wait_for_everyone()


def resume(states: States, folder: Path) -> Path | None:
    """Loads the last checkpoint that can be used; returns its folder, or None if there are no checkpoints.

    All processes call this function. A checkpoint that cannot be used is named in a warning and renamed, so that a new
    checkpoint of its number can take its place. Raises ValueError if there are checkpoints and none can be used.
    """
    accelerator, found = states.accelerator, checkpoints(folder)
    problems: list[str] = []
    for path in reversed(found):
        problem = None
        try:
            states.load(path)
        except ValueError as error:
            problem = " ".join(str(error).split())
        said = [one for one in gather_object([problem]) if one]
        if not said:
            for damaged in found[len(found) - len(problems) :] if accelerator.is_main_process else ():
                remove(aside := damaged.with_name(f"{damaged.name}.damaged"))
                damaged.rename(aside)
            accelerator.wait_for_everyone()
            return path
        problems.append(f"{path.name}: {said[0]}")
        accelerator.print(f"WARNING: {path} cannot be used: {said[0]}")
    if problems:
        raise ValueError(
            f"no checkpoint in {folder} can be used: {'; '.join(problems)}. Start again with --overwrite_output_dir"
        )
    return None


def _is_ours(path: Path) -> bool:
    """Tells whether a path has the name and the files of a checkpoint, whole or not, that `save_checkpoint` wrote."""
    if not CHECKPOINT.fullmatch(path.name):
        return False
    if path.is_symlink() and not path.exists():
        return True
    return path.is_dir() and (not any(path.iterdir()) or any(next(path.glob(mark), None) for mark in MARKS))


def remove(path: Path) -> None:
    """Removes a checkpoint, or a link to one, if it exists; a folder that is not ours stays."""
    if not _is_ours(path):
        return
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def save_pretrained(folder: Path, model: Any, *others: Any) -> None:
    """Saves a model and its tokenizer or processor, as transformers does; raises OSError as `writing` does."""
    with _writing(folder):
        for part in (model, *others):
            part.save_pretrained(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises OSError with the path and the free space if the code inside the context cannot write."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        free = f"; {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free" if path.parent.exists() else ""
        raise OSError(f"cannot write {path}: {error}{free}") from error


def checkpoints(folder: Path) -> list[Path]:
    """Lists the complete checkpoints of a run, oldest first."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.suffix != ".damaged" and _is_ours(path)]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def clear(folder: Path) -> None:
    """Removes the checkpoints of a run from its folder."""
    for path in folder.glob("checkpoint*"):
        remove(path)


def check_foreign(folder: Path, overwrite: bool) -> None:
    """Raises ValueError for files that a run would take from others: a checkpoint or settings of another program.

    A model in a folder without a run is refused too, unless `overwrite` says that it may be replaced.
    """
    foreign = [path for path in sorted(folder.glob("checkpoint*")) if CHECKPOINT.fullmatch(path.name)]
    foreign = [path for path in foreign if not _is_ours(path)]
    if not foreign and (folder / SETTINGS).exists():
        foreign = [] if "num_processes" in read_json(folder / SETTINGS) else [folder / SETTINGS]
    if foreign:
        raise ValueError(
            f"{foreign[0]} was written by another program, or by an earlier favor, and would be lost: choose another "
            "--output_dir, or move it away"
        )
    models = [path for kind in MODELS for path in folder.glob(kind)]
    if models and not overwrite and not (folder / SETTINGS).exists():
        raise ValueError(
            f"{models[0]} is the model of another program and would be replaced: choose another --output_dir, or "
            "replace it with --overwrite_output_dir"
        )


def open_run(folder: Path, settings: dict[str, Any], resume: bool, overwrite: bool, there: bool | None = None) -> None:
    """Locks a run's folder until the program ends, and makes sure that the run may write to it.

    All processes call this function, inside a function that `lock.releases_locks` decorates. The settings are
    everything the result depends on. The folder holds a run if `there` says so; without it, if it has a checkpoint or
    results.

    Raises:
        ValueError: if the folder holds a run and neither `resume` nor `overwrite` is set, if both are set, if the run
            to resume had other settings, if another run writes to the folder, or for files that are damaged or would
            be lost.
        OSError: if the folder cannot be written to.
    """
    if resume and overwrite:
        raise ValueError("resume continues a run and overwrite_output_dir starts it again: set one of them")
    lock.hold_together(folder)
    check_foreign(folder, overwrite)
    if there is None:
        there = bool(checkpoints(folder)) or (folder / RESULTS).exists()
    if there and not (resume or overwrite):
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume, start it again with --overwrite_output_dir, or "
            "choose another --output_dir"
        )
    if there and resume and (folder / SETTINGS).exists():
        before = read_json(folder / SETTINGS)
        labels = {"num_processes": "num_processes, divided by --sequence_parallel where a program has it,"}
        changed = [
            f"{labels.get(name, name)} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted({*before, *settings})
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise ValueError(f"cannot resume {folder} with other settings: {'; '.join(changed)}")


def start_run(folder: Path, settings: dict[str, Any], overwrite: bool, stages: Sequence[str] = ()) -> None:
    """Creates a run's folder and records its settings, when all processes have looked at it; all call this function.

    With `overwrite` results and checkpoints of an earlier run are removed, also those in the folders of the stages.
    """
    process = PartialState()
    process.wait_for_everyone()
    if process.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for place in (folder, *(folder / stage for stage in stages)):
                clear(place)
            (folder / RESULTS).unlink(missing_ok=True)
        write_json(folder / SETTINGS, settings)
    process.wait_for_everyone()


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object of JSON; raises ValueError, which names the file, if it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (expected an object, got {type(content).__name__})")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file, so that it is either complete or missing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)
