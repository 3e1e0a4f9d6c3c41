"""Tables of utterances in JSON lines, CSV or TSV, and tar shards in WebDataset's layout.

Members of tar files are read at random by their offsets, without unpacking.
"""

from __future__ import annotations

import csv
import json
import re
import reprlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from favor.train.speech.data import AUDIO, COLUMNS, Skipped, StoredAudio, Utterance, from_row
from favor.train.text.samples import is_text, open_lines

# How a table is written, by its ending; Common Voice writes its sentences between tabs as they are.
TABLES: dict[str, dict[str, Any]] = {
    ".csv": {"strict": True},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
MANIFESTS = (".jsonl", ".json", *TABLES)
TAR = ".tar"
_COMPRESSED = re.compile(r"\.(tgz|tar\.\w+)$")
_TEXTS = (".txt", ".json")
# Blocks of zeros after the last member; more than any program writes.
_END = 1 << 20


def read_manifest(
    path: str | Path, skipped: Skipped | None = None, split: str | None = None, transcripts: bool = True
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
            found += read_shards([shard], file.parent, skipped, transcripts)
            continue
        try:
            if isinstance(row, csv.Error):
                raise ValueError(f"expected a row of a table: {row}")
            found.append(from_row(row, file.parent, transcripts))
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


@dataclass(frozen=True)
class StoredMember(StoredAudio):
    """Audio inside a tar file that is not compressed, `size` bytes from `offset` on, read when it is needed."""

    shard: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Gives the bytes of the audio file; raises OSError if the tar file no longer has them all."""
        with self.shard.open("rb") as stream:
            stream.seek(self.offset)
            content = stream.read(self.size)
        if len(content) < self.size:
            raise OSError(f"{len(content)} of {self.size} bytes are there")
        return content

    def __str__(self) -> str:
        return f"{self.shard}/{self.name}"


@dataclass
class _Sample:
    """The members of one key: audio, texts by their ending, and why they cannot be used, if so."""

    audio: StoredMember | None = None
    texts: dict[str, bytes] = field(default_factory=dict)
    reason: str | None = None


def find_shards(path: Path, split: str | None) -> list[Path]:
    """Finds tar shards: a tar file itself; those of a folder; `<split>/*.tar`, or `<split>.tar` and `<split>-N.tar`.

    They are sorted by name. Without a split they are those of the folder itself.
    """
    if split is None and path.is_file():
        return [path] if path.suffix == TAR or _COMPRESSED.search(path.name) else []
    if split is None or (path / split).is_dir():
        return sorted((path / (split or "")).glob(f"*{TAR}"))
    return [shard for shard in sorted(path.glob(f"*{TAR}")) if re.fullmatch(rf"{re.escape(split)}(-\d+)?", shard.stem)]


def read_shards(
    shards: Sequence[Path], root: Path, skipped: Skipped | None = None, transcripts: bool = True
) -> list[Utterance]:
    """Reads the utterances of tar files, with the places of their audio, which stays where it is.

    Members with one name up to the first dot belong together: audio (.flac, .mp3 or .wav) and its transcript, which is
    the text of the `.txt` or, without one, the column `text` of the `.json`. Other columns of the `.json` are those of
    a manifest, apart from `offset`: `id`, `seconds`, `speaker` and `chapter`. Members with other endings, and hidden
    ones, are left alone.

    Args:
        shards: tar files that are not compressed.
        root: ids without an `id` of their own are the place of the shard below `root`, without `.tar`, and the name.
        skipped: takes samples that cannot be used. Default None: the first one raises.
        transcripts: False also takes audio without a transcript, with the text "". Default True.

    Returns:
        Utterances in the order of the shards and of their members, without their lengths.

    Raises:
        ValueError: for a file that is not a tar file, is compressed, or is damaged, so that the number of lost
            utterances is not known; or if no shard has audio.
    """
    skipped = Skipped() if skipped is None else skipped
    found: list[Utterance] = []
    before = len(skipped)
    for shard in shards:
        place = (shard.relative_to(root) if shard.is_relative_to(root) else shard).with_suffix("").as_posix()
        for key, sample in _samples(shard).items():
            try:
                found.append(_utterance(sample, f"{place}/{key}", transcripts))
            except ValueError as error:
                skipped.add(f"{shard}/{key}", str(error))
    if not found and len(skipped) == before:
        raise ValueError(f"found no *.flac, *.mp3 or *.wav in {', '.join(map(str, shards))}.")
    return found


def _utterance(sample: _Sample, name: str, transcripts: bool) -> Utterance:
    """Makes the utterance of a sample; raises ValueError for one that cannot be used."""
    if sample.reason is not None:
        raise ValueError(sample.reason)
    if sample.audio is None:
        raise ValueError(f"has a transcript, but no {', '.join(AUDIO)} member")
    try:
        row: Any = json.loads(sample.texts[".json"]) if ".json" in sample.texts else {}
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {reprlib.repr(row)}")
    row["audio"] = name
    if ".txt" in sample.texts:
        row["text"] = sample.texts[".txt"].decode("utf-8-sig")
    if transcripts and not row.keys() & set(COLUMNS["text"]):
        raise ValueError("has no transcript: no .txt member, and no .json member with a text")
    if row.get("offset"):
        raise ValueError(f"offset is for manifests: the audio of a sample is a whole member, got {row['offset']!r:.60}")
    return replace(from_row(row, sample.audio.shard, transcripts), audio=sample.audio)


def _samples(shard: Path) -> dict[str, _Sample]:
    """Reads the list of members of a tar file, and its texts; raises ValueError for a damaged file."""
    if _COMPRESSED.search(shard.name):
        raise ValueError(f"{shard}: is compressed, so its members cannot be read at random: decompress it to {TAR}")
    samples: dict[str, _Sample] = {}
    try:
        # Of a map of the file nobody can read more bytes than it has, whatever size a header states.
        with shard.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
            with tarfile.open(fileobj=content, mode="r:") as archive:
                for member in archive:
                    if member.size < 0:
                        raise tarfile.ReadError(f"{member.name} has a size below 0")
                    _add(samples, member, shard, archive)
            # tarfile takes a damaged header, and the end of a file that is cut, for the end of the archive.
            rest = content[archive.offset : archive.offset + _END]
            if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
                raise tarfile.ReadError(f"no member and no end at byte {archive.offset}")
    except (OSError, ValueError, OverflowError, RecursionError, tarfile.TarError) as error:
        raise ValueError(f"{shard}: is no tar file, or is damaged or cut short: {error}") from error
    return samples


def _add(samples: dict[str, _Sample], member: tarfile.TarInfo, shard: Path, archive: tarfile.TarFile) -> None:
    folder, slash, base = member.name.removeprefix("./").rpartition("/")
    stem, _, ending = base.partition(".")
    ending = f".{ending.lower()}"
    is_audio = ending.endswith(AUDIO)
    if not stem or member.isdir() or not (is_audio or ending in _TEXTS):
        return
    sample = samples.setdefault(f"{folder}{slash}{stem}", _Sample())
    if not member.isreg() or member.issparse():
        sample.reason = f"{member.name} is a link or another special member, not a file"
    elif ending in sample.texts or (is_audio and sample.audio is not None):
        sample.reason = f"{member.name} is a second member of this name"
    elif ending not in (*AUDIO, *_TEXTS):
        sample.reason = f"{member.name} has a second dot in its name: the name of a sample ends at the first dot"
    elif is_audio:
        sample.audio = StoredMember(shard, member.name, member.offset_data, member.size)
    else:
        content = archive.extractfile(member)
        sample.texts[ending] = b"" if content is None else content.read()
