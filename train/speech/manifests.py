"""Manifests: tables of utterances in JSON lines or CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from favor.models.conformer.tokenization_conformer import normalize_transcript
from favor.train.speech.data import Skipped, Utterance
from favor.train.speech.rows import Normalize, from_row
from favor.train.speech.shards import TAR, read_shards

MANIFESTS = (".jsonl", ".json", ".csv")


def read_manifest(
    path: str | Path,
    skipped: Skipped | None = None,
    normalize: Normalize = normalize_transcript,
    split: str | None = None,
    transcripts: bool = True,
) -> list[Utterance]:
    """Reads the utterances of a table in JSON lines or CSV.

    Columns: `audio`, a path relative to the manifest's folder, and `text`; optional are `id` (default: `audio`),
    `seconds`, which `prepare` then compares with the audio, `speaker` and `chapter`. A row whose `audio` is a tar file
    has no other column: it stands for all utterances of the tar file, which `read_shards` reads.

    Args:
        path: the manifest (.jsonl, .json with one row per line, or .csv with a header), or a folder.
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
    for number, row in _csv_rows(file) if file.suffix == ".csv" else _json_rows(file):
        if (shard := _named_shard(row, file.parent)) is not None:
            found += read_shards([shard], file.parent, skipped, normalize, transcripts)
            continue
        try:
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
    return folder / row["audio"] if str(row["audio"]).endswith(TAR) else None


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
        return path
    if not path.is_dir():
        raise ValueError(f"path must be a manifest or a folder that holds one, got {path}, which does not exist.")
    found = manifests(path) if split is None else named_manifests(path, split)
    if len(found) != 1:
        wanted = "one .jsonl, .json or .csv file" if split is None else f"{split}.jsonl, {split}.json or {split}.csv"
        there = ", ".join(file.name for file in found or manifests(path)) or "none"
        raise ValueError(f"expected {wanted} in {path}, found {there}: name the file or the split.")
    return found[0]


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields line numbers and rows; a row that is not JSON is yielded as text."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, line


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield reader.line_num, row
