"""A lock for each folder that a program fills, so that two programs never mix their files."""

from __future__ import annotations

import errno
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock, Timeout

NAME = ".favor.lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # what file systems without locks answer
_held: ContextVar[ExitStack] = ContextVar("held")
P = ParamSpec("P")
R = TypeVar("R")


def releases_locks(main: Callable[P, R]) -> Callable[P, R]:
    """Makes a program give back, however it ends, the locks that `hold` took for it."""

    @functools.wraps(main)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as held:
            token = _held.set(held)
            try:
                return main(*args, **kwargs)
            finally:
                _held.reset(token)

    return call


def hold(folder: Path) -> None:
    """Locks a folder until the program ends, which `releases_locks` must decorate; raises as `locked` does."""
    _held.get().enter_context(locked(folder))


def hold_together(folder: Path) -> None:
    """Locks a folder for all processes of a run: the main one does as `hold`, and all raise what it raises."""
    from accelerate import PartialState
    from accelerate.utils import gather_object

    problem = None
    if PartialState().is_main_process:
        try:
            hold(folder)
        except (ValueError, OSError) as error:
            problem = error
    for said in gather_object([problem]):
        if said is not None:
            raise said


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other programs out of a folder. It is made if needed, and removed if it is still empty at the end.

    The operating system holds the lock: it ends with the process, even a killed one, and a file left behind means
    nothing. The processes that this one forks do not have it.

    Raises:
        ValueError: if another program holds the lock.
        OSError: if the folder cannot be written to.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    lock = FileLock(folder / NAME, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"another run writes to {folder}: wait until it ends, stop it, or choose another --output_dir"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise OSError(f"cannot write to {folder} ({error.strerror}): choose another --output_dir") from error
        warnings.warn(
            f"{folder} is on a file system without locks: make sure yourself that no other run writes to it",
            stacklevel=2,
        )
    try:
        yield
    finally:
        # Before the release: then nobody can hold the lock of a file that is gone.
        with suppress(OSError):
            (folder / NAME).unlink()
        lock.release()
        for place in made:
            with suppress(OSError):
                place.rmdir()
