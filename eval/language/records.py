"""Results of long runs in lines of JSON, written one by one, so that a stopped run continues where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class Records:
    """Results by a description of their measurement, such as model, document and variant.

    Args:
        path: the file that grows; it need not exist.
        others: files of other runs, which are only read: parts of the same table that were measured separately.

    Raises:
        ValueError: if one of the others does not exist.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] = {}
        for other in others:
            if not other.is_file():
                raise ValueError(f"expected a file of records, got {other}, which is not there")
            self._read(other)
        if path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a run was stopped while it wrote this line: it is measured again
            self._known[_name(record["of"])] = record["result"]

    def find(self, of: Mapping[str, Any]) -> dict[str, Any] | None:
        """Gives the result for a description, or None if there is none yet."""
        return self._known.get(_name(of))

    def add(self, of: Mapping[str, Any], result: dict[str, Any]) -> None:
        """Adds a result, in memory and in the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as stream:
            stream.write(("\n" if torn else "") + json.dumps({"of": dict(of), "result": result}) + "\n")
        self._known[_name(of)] = result


def _name(of: Mapping[str, Any]) -> str:
    return json.dumps(of, sort_keys=True)
