"""Trainings that are stopped: as if by the user, right after a checkpoint was written."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from favor.train.common import checkpoint


@contextmanager
def stopped_after(step: int, folder: str | None = None) -> Iterator[None]:
    """Runs a training that is interrupted by its checkpoint of a step, in the folder of that name if one is given."""
    save = checkpoint.save_checkpoint

    def stop(states, place, number):
        save(states, place, number)
        if number == step and folder in (None, place.name):
            raise KeyboardInterrupt

    with patch.object(checkpoint, "save_checkpoint", stop), pytest.raises(KeyboardInterrupt):
        yield


def same_weights(one: Path, other: Path) -> bool:
    """Says whether the models in two folders are equal to the bit."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def whole_and_resumed(train: Callable, folder: Path, step: int, flags: tuple = (), **settings: object) -> tuple:
    """Results of a training and of one that was stopped after a step and resumed, whose weights must be equal."""
    whole = train(output="whole", flags=flags, **settings)
    with stopped_after(step):
        train(output="stopped", flags=flags, **settings)
    resumed = train(output="stopped", flags=(*flags, "resume"), **settings)
    assert same_weights(folder / "whole", folder / "stopped")
    return whole, resumed


def redrawing(folder: Path, copy: Path, interval: int) -> Path:
    """A copy of a saved model whose random features are drawn anew after this many forward passes."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"favor": {"redraw_interval": interval}}))
    return copy
