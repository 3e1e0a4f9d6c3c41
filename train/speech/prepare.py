"""Decodes every utterance once and remembers which utterances are good and how long they are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from favor.train.speech.data import Skipped, Utterance, read_audio

FINAL, PARTIAL = "checked.jsonl", "checked.partial.jsonl"
# Records between two fsyncs, for each worker.
CHUNK = 64
# Seconds by which a length that the source gives may be wrong.
TOLERANCE = 0.1


def prepare(
    utterances: Sequence[Utterance],
    folder: str | Path | None = None,
    *,
    skipped: Skipped | None = None,
    sampling_rate: int = 16000,
    resample: bool = False,
    workers: int = 1,
) -> list[Utterance]:
    """Decodes every utterance once: finds the bad ones and the length of the others.

    With a folder, each result is appended to `checked.partial.jsonl`, which becomes `checked.jsonl` when complete. So a
    killed run continues where it was, and a second run decodes nothing. A result is used again if id, place and
    size of the file are equal. Utterances that are new or have changed are decoded; records of utterances that are no
    longer given stay and do no harm. Bad utterances are remembered too, so that a run with a greater limit continues.
    Other settings are an error. The folder is for one process at a time: let the others wait for the first.

    Decoded audio is not stored: decoding takes a small part of the time that the features take.

    Args:
        utterances: with ids that differ.
        folder: where results are kept; it is made if needed. Default None: results are not kept.
        skipped: takes the bad ones. Default None: the first one raises.
        sampling_rate: wanted rate in Hz. Default 16000.
        resample: whether audio of another rate is resampled. Default False: it is an error.
        workers: threads that decode. Default 1.

    Returns:
        The good utterances with their seconds, in order.

    Raises:
        ValueError: for more bad ones than `skipped` takes, an id that comes twice, or a folder that was filled with
            other settings or is damaged.
    """
    skipped = Skipped() if skipped is None else skipped
    _check_ids(utterances)
    settings = {"sampling_rate": sampling_rate, "resample": resample}
    total = len(utterances) + len(skipped)
    store = None if folder is None else _Store(Path(folder), settings)
    known = {} if store is None else store.records
    todo = [utterance for utterance in utterances if not _holds(known.get(utterance.id, {}), utterance)]
    new = {utterance.id for utterance in todo}
    found = {utterance.id: known[utterance.id] for utterance in utterances if utterance.id not in new}
    try:
        for record in itertools.chain(list(found.values()), _decoded(todo, settings, workers, store)):
            found[record["id"]] = record
            if "reason" in record:
                skipped.add(f"{record['id']} ({record['place']})", record["reason"])
                skipped.check(total)
    finally:
        if store is not None:
            store.close()
    if store is not None:
        store.finish()
    return [
        dataclasses.replace(utterance, seconds=found[utterance.id]["seconds"])
        for utterance in utterances
        if "reason" not in found[utterance.id]
    ]


def _check_ids(utterances: Sequence[Utterance]) -> None:
    """Raises ValueError for an id that comes twice."""
    seen: set[str] = set()
    for utterance in utterances:
        if utterance.id in seen:
            raise ValueError(f"utterance ids must differ, {utterance.id} comes twice: {utterance.place}.")
        seen.add(utterance.id)


def _identity(utterance: Utterance) -> dict[str, Any]:
    """Identifies an utterance and the state of its audio file; members of tar files know their size."""
    size = getattr(utterance.audio, "size", None)
    path = getattr(utterance.audio, "recording", utterance.audio)
    if isinstance(path, Path):
        try:
            size = path.stat().st_size
        except OSError:  # not there, or no possible name
            size = -1
    return {"id": utterance.id, "place": utterance.place, "size": size}


def _holds(record: dict[str, Any], utterance: Utterance) -> bool:
    """Tells whether a record belongs to this utterance and the present state of its file."""
    return all(record.get(key) == value for key, value in _identity(utterance).items())


def _check(utterance: Utterance, settings: dict[str, Any]) -> dict[str, Any]:
    """Makes the record of one utterance: seconds, or the reason why it is bad."""
    record = _identity(utterance)
    try:
        seconds = len(read_audio(utterance, **settings)) / settings["sampling_rate"]
    except ValueError as error:
        return {**record, "reason": str(error).removeprefix(f"{utterance.place}: ")}
    if utterance.seconds is not None and abs(seconds - utterance.seconds) > TOLERANCE:
        return {**record, "reason": f"lasts {seconds:.2f} s, but the source says {utterance.seconds:.2f} s"}
    return {**record, "seconds": seconds}


def _decoded(
    utterances: Sequence[Utterance], settings: dict[str, Any], workers: int, store: _Store | None
) -> Iterator[dict[str, Any]]:
    """Yields records of utterances in order; each is stored before it is yielded.

    Args:
        utterances: to decode.
        settings: of `read_audio`.
        workers: threads that decode.
        store: takes the records, if any.
    """
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(utterances), CHUNK * workers):
            chunk = utterances[start : start + CHUNK * workers]
            for record in pool.map(lambda utterance: _check(utterance, settings), chunk):
                if store is not None:
                    store.append(record)
                yield record
            if store is not None:
                store.sync()


class _Store:
    """The file of results: a line with the settings, then one record per line; the last record of an id counts."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.final, self.partial = folder / FINAL, folder / PARTIAL
        self.settings = settings
        self.stream: TextIO | None = None
        self.records: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = self.final if self.final.exists() else self.partial
        if path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        """Reads the whole lines of a file, and removes a part of a line that a killed run left."""
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in content[:whole].splitlines()]
            if lines:
                settings = lines.pop(0)["settings"]
                self.records = {record["id"]: record for record in lines}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}; delete it to prepare from the start.") from error
        if whole and settings != self.settings:
            raise ValueError(
                f"{path} was made with {settings}, not with {self.settings}: choose another folder, or delete the file."
            )
        if whole < len(content):
            os.truncate(path, whole)

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record so that it is kept if the process is killed."""
        if self.stream is None:
            if self.final.exists():
                os.replace(self.final, self.partial)
            self.stream = open(self.partial, "a", encoding="utf-8")  # noqa: SIM115 - closed by finish
            if self.stream.tell() == 0:
                self.stream.write(json.dumps({"settings": self.settings}) + "\n")
        self.stream.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.stream.flush()

    def sync(self) -> None:
        """Writes the records to the disk, so that they are kept if the machine stops."""
        if self.stream is not None:
            os.fsync(self.stream.fileno())

    def close(self) -> None:
        """Closes the file, finished or not."""
        if self.stream is not None:
            self.stream.close()

    def finish(self) -> None:
        """Gives the complete file its final name."""
        if self.partial.exists() and (self.stream is not None or not self.final.exists()):
            os.replace(self.partial, self.final)
