"""Checkpoints that a kill at any instant leaves usable, and what a resumed run needs to know."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

KEEP = 2
RESULTS = "all_results.json"
SETTINGS = "settings.json"


@dataclass
class Progress:
    """Counts how far a run is: optimizer steps done, sum of their losses, and one entry for each evaluated epoch."""

    step: int = 0
    loss_sum: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For `accelerator.register_for_checkpointing`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a saved state."""
        self.step, self.loss_sum, self.history = state["step"], state["loss_sum"], state["history"]


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Writes `folder/checkpoint-STEP` and removes all but the last two.

    The files go to another name first and the folder is renamed when they are complete: a `checkpoint-STEP` that exists
    is whole, whenever the process is killed. All processes call this.
    """
    partial = folder / "checkpoint.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(partial, folder / f"checkpoint-{step}")
        for old in checkpoints(folder)[:-KEEP]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    return [path for match, path in sorted(((m, p) for m, p in numbered if m), key=lambda pair: int(pair[0][1]))]


def open_run(folder: Path, settings: dict[str, Any], resume: bool, overwrite: bool, there: bool | None = None) -> None:
    """Makes sure that a run may write to its folder; writes nothing itself.

    Args:
        folder: the run's folder, existing or not.
        settings: everything the result depends on.
        resume: continue what is there.
        overwrite: start again where something is.
        there: whether the folder holds a run. Default None: it does with a checkpoint or results.

    Raises:
        ValueError: if the folder holds a run and neither `resume` nor `overwrite` is set, both are, or the run to
            resume had other settings.
    """
    if resume and overwrite:
        raise ValueError("resume continues a run and overwrite_output_dir starts it again: set one of them")
    if there is None:
        there = bool(checkpoints(folder)) or (folder / RESULTS).exists()
    if there and not (resume or overwrite):
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume, start it again with --overwrite_output_dir, or "
            "choose another --output_dir"
        )
    if there and resume and (folder / SETTINGS).exists():
        before = json.loads((folder / SETTINGS).read_text())
        changed = [
            f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in sorted({*before, *settings})
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise ValueError(f"cannot resume {folder} with other settings: {'; '.join(changed)}")


def start_run(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Creates a run's folder and records its settings; with `overwrite`, removes what an earlier run left."""
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        for path in checkpoints(folder):
            shutil.rmtree(path)
        (folder / RESULTS).unlink(missing_ok=True)
    write_json(folder / SETTINGS, settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is either complete or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)
