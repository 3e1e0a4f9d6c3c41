"""Manifests: tables of utterances in JSON lines or CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from favor.models.speech import normalize_transcript
from favor.train.common.lines import is_text, open_lines
from favor.train.speech.data import Skipped, Utterance
from favor.train.speech.rows import Normalize, from_row
from favor.train.speech.shards import TAR, read_shards

# How a table is written, by its ending; Common Voice writes its sentences between tabs as they are.
TABLES: dict[str, dict[str, Any]] = {
    ".csv": {"strict": True},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
MANIFESTS = (".jsonl", ".json", *TABLES)


def read_manifest(
    path: str | Path,
    skipped: Skipped | None = None,
    normalize: Normalize = normalize_transcript,
    split: str | None = None,
    transcripts: bool = True,
) -> list[Utterance]:
    """Reads the utterances of a table: JSON lines, CSV or TSV.

    Columns: `audio`, a path relative to the manifest's folder, and `text`; optional are `id` (default: `audio`),
    `seconds`, which `prepare` then compares with the audio, `speaker`, `chapter`, and `offset`: the utterance is the
    `seconds` of the audio after these seconds. The names of NeMo (`audio_filepath`, `duration`) and of Mozilla Common
    Voice (`path` of a file in `clips`, `sentence`, `client_id`) do as well. A row whose `audio` is a tar file has no
    other column: it stands for all utterances of the tar file, which `read_shards` reads.

    Args:
        path: the manifest (.jsonl, .json with one row per line, or .csv or .tsv with a header), or a folder.
        skipped: takes rows that cannot be used. Default None: the first one raises.
        normalize: turns texts into transcripts. Default `normalize_transcript`.
        split: in a folder, `<split>.jsonl` and so on, or the only manifest of `<split>/`. Default None: the folder's
            only manifest.
        transcripts: False also takes rows without a text; their text is "". Default True.

    Returns:
        Utterances in the order of the rows.

    Raises:
        ValueError: if there is no manifest, or more than one, or it has no row that can be read, or a tar file that it
            names cannot be read.
    """
    skipped = Skipped() if skipped is None else skipped
    file = _find_manifest(Path(path), split)
    found: list[Utterance] = []
    before = len(skipped)
    for number, row in _table_rows(file) if file.suffix in TABLES else _json_rows(file):
        if (shard := _named_shard(row, file.parent)) is not None:
            found += read_shards([shard], file.parent, skipped, normalize, transcripts)
            continue
        try:
            if isinstance(row, csv.Error):
                raise ValueError(f"expected a row of a table: {row}")
            found.append(from_row(row, file.parent, normalize, transcripts))
        except ValueError as error:
            skipped.add(f"{file}:{number}", str(error))
    if not found and len(skipped) == before:
        raise ValueError(f"{file}: expected rows with the columns audio and text, found none.")
    return found


def _named_shard(row: Any, folder: Path) -> Path | None:
    """Gives the tar file that a row with the column audio alone names; None if the row is another one."""
    if not isinstance(row, dict) or [name for name, value in row.items() if value not in (None, "")] != ["audio"]:
        return None
    name = row["audio"]
    return folder / name if isinstance(name, str) and name.endswith(TAR) and is_text(name) else None


def manifests(folder: Path, stem: str = "*") -> list[Path]:
    """Finds the manifests of a folder, those with a given name or all."""
    return sorted(path for ending in MANIFESTS for path in folder.glob(stem + ending))


def named_manifests(folder: Path, split: str) -> list[Path]:
    """Finds the manifests of a split: `<split>.jsonl` and so on, or those in `<split>/`."""
    return manifests(folder, split) or manifests(folder / split)


def _find_manifest(path: Path, split: str | None) -> Path:
    """Finds the manifest of a path and a split."""
    if path.is_file():
        if split is not None:
            raise ValueError(f"split must be None for a manifest file, got {split!r} for {path}: give its folder.")
        if path.suffix == ".gz":
            raise ValueError(f"{path}: is compressed: decompress it.")
        return path
    if not path.is_dir():
        raise ValueError(f"path must be a manifest or a folder that holds one, got {path}, which does not exist.")
    found = manifests(path) if split is None else named_manifests(path, split)
    if len(found) != 1:
        wanted = f"one {', '.join(MANIFESTS)} file" if split is None else ", ".join(split + end for end in MANIFESTS)
        there = ", ".join(file.name for file in found or manifests(path)) or "none"
        raise ValueError(f"expected {wanted} in {path}, found {there}: name the file or the split.")
    return found[0]


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields line numbers and rows; a row that is not JSON is yielded as text."""
    with open_lines(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError):
                    yield number, line.strip()


def _table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields line numbers and rows; a row that cannot be read is yielded as an error."""
    with open_lines(path, newline="") as stream:
        reader = csv.DictReader(stream, **TABLES[path.suffix])
        while True:
            try:
                row: Any = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                row = error
            yield reader.reader.line_num, row
