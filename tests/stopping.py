"""Trainings that are stopped: as if by the user, right after a checkpoint was written."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

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
