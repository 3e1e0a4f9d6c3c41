"""Decodes every utterance once and remembers which utterances are good and how long they are."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from favor.train.speech.data import Skipped, Utterance, read_audio

FILE = "checked.jsonl"
CHUNK = 64  # records that are decoded before they are written
TOLERANCE = 0.1  # seconds by which a length that the source gives may be wrong

Record = dict[str, Any]
T = TypeVar("T")


def prepare(
    utterances: Sequence[Utterance],
    folder: str | Path | None = None,
    *,
    skipped: Skipped | None = None,
    sampling_rate: int = 16000,
) -> list[Utterance]:
    """Decodes every utterance once: finds the bad ones and the length of the others.

    With a folder, results are appended to its file `checked.jsonl`, so that a killed run continues where it was, and a
    second run decodes nothing. A result is used again if id, place and size of the file are equal. Bad utterances are
    remembered too, so that a run with a greater limit continues. The folder is for one process at a time: let the
    others wait for the first.

    Args:
        utterances: with ids that differ.
        folder: where results are kept; it is made if needed. Default None: results are not kept.
        skipped: takes the bad ones. Default None: the first one raises.
        sampling_rate: wanted rate in Hz. Default 16000.

    Returns:
        The good utterances with their seconds, in order.

    Raises:
        ValueError: for more bad ones than `skipped` takes, an id that comes twice, or a folder that was filled with
            another rate or is damaged.
    """
    skipped = Skipped() if skipped is None else skipped
    seen: set[str] = set()
    for utterance in utterances:
        if utterance.id in seen:
            raise ValueError(f"utterance ids must differ, {utterance.id} comes twice: {utterance.place}.")
        seen.add(utterance.id)
    total, settings = len(utterances) + len(skipped), {"sampling_rate": sampling_rate}
    path = None if folder is None else Path(folder) / FILE
    known = {} if path is None else {record["id"]: record for record in read_records(path, settings, _known)}
    todo = [one for one in utterances if not _identity(one).items() <= known.get(one.id, {}).items()]
    new = {utterance.id for utterance in todo}
    found = {utterance.id: known[utterance.id] for utterance in utterances if utterance.id not in new}

    for record in found.values():
        _leave_out(record, skipped, total)
    for start in range(0, len(todo), CHUNK):
        chunk: list[Record] = []
        try:
            for utterance in todo[start : start + CHUNK]:
                found[utterance.id] = record = _check(utterance, sampling_rate)
                chunk.append(record)
                _leave_out(record, skipped, total)
        finally:
            if path is not None:
                append_records(path, settings, chunk)
    return [
        dataclasses.replace(utterance, seconds=found[utterance.id]["seconds"])
        for utterance in utterances
        if "reason" not in found[utterance.id]
    ]


def _leave_out(record: Record, skipped: Skipped, total: int) -> None:
    """Adds an utterance of `total` to those that are left out, if its record says why."""
    if "reason" in record:
        skipped.add(f"{record['id']} ({record['place']})", record["reason"])
        skipped.check(total)


def _known(id: str, **others: Any) -> Record:
    return {"id": id, **others}


def _identity(utterance: Utterance) -> Record:
    """Identifies an utterance and the state of its audio file; members of tar files know their size."""
    size = getattr(utterance.audio, "size", None)
    path = getattr(utterance.audio, "recording", utterance.audio)
    if isinstance(path, Path):
        try:
            size = path.stat().st_size
        except OSError:  # not there, or no possible name
            size = -1
    return {"id": utterance.id, "place": utterance.place, "size": size}


def _check(utterance: Utterance, sampling_rate: int) -> Record:
    """Makes the record of one utterance: seconds, or the reason why it is bad."""
    record = _identity(utterance)
    try:
        seconds = len(read_audio(utterance, sampling_rate)) / sampling_rate
    except ValueError as error:
        return {**record, "reason": str(error).removeprefix(f"{utterance.place}: ")}
    if utterance.seconds is not None and abs(seconds - utterance.seconds) > TOLERANCE:
        return {**record, "reason": f"lasts {seconds:.2f} s, but the source says {utterance.seconds:.2f} s"}
    return {**record, "seconds": seconds}


def append_records(path: Path, settings: Record, records: Iterable[Record]) -> None:
    """Appends lines of JSON to the disk; a new file begins with the settings that they were made with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        if stream.read(1) not in (b"", b"\n"):  # a part of a line that a killed run left
            stream.seek(0)
            size = stream.truncate(stream.read().rfind(b"\n") + 1)
        lines = records if size else [{"settings": settings}, *records]
        stream.writelines(f"{json.dumps(line, ensure_ascii=False)}\n".encode() for line in lines)
        stream.flush()
        os.fsync(stream.fileno())


def read_records(path: Path, settings: Record | None, make: Callable[..., T]) -> list[T]:
    """Reads the whole lines of a file of `append_records`, if there is one; `make` takes the values of each by name.

    Raises ValueError if they were made with other settings (None: any), or the file is damaged.
    """
    content = path.read_bytes() if path.exists() else b""
    try:
        lines = [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        there = {name: lines[0]["settings"][name] for name in settings or ()} if lines else settings
        found = [make(**line) for line in lines[1:]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; delete it to begin again.") from error
    if settings is not None and there != settings:
        raise ValueError(f"{path} was made with {there}, not with {settings}: delete it, or choose another folder.")
    return found
