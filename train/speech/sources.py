"""Where utterances come from: LibriSpeech's folders, manifests, datasets of the hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset, load_dataset

from favor.models.conformer.tokenization_conformer import normalize_transcript
from favor.train.speech.data import LISTED, Skipped, StoredAudio, Utterance
from favor.train.speech.prepare import prepare

AUDIO = (".flac", ".mp3", ".wav")
MANIFESTS = (".jsonl", ".json", ".csv")
Normalize = Callable[[str], str]


def load_speech(
    source: str | Path,
    split: str | None = None,
    *,
    prepared: str | Path | None = None,
    config: str | None = None,
    max_bad: int | float = 0,
    sampling_rate: int = 16000,
    resample: bool = False,
    workers: int = 1,
    normalize: Normalize = normalize_transcript,
    transcripts: bool = True,
) -> tuple[list[Utterance], Skipped]:
    """Loads the utterances of a source, decodes every one of them once, and reports which were left out.

    Args:
        source: a folder in LibriSpeech's layout; a manifest, or a folder that holds `<split>.jsonl`, `<split>.csv` or
            one manifest alone; or, if there is no such path, the name of a dataset of the hub.
        split: e.g. "dev-clean" of a folder, "validation" of the hub; several are joined by "+". Default None: the
            manifest that `source` is, or the only one in it.
        prepared: folder where `prepare` keeps its results, by split. Default None: all audio is decoded
            each time.
        config: configuration of a hub dataset. Default None.
        max_bad: utterances that may be left out, a number or a fraction of all. Default 0: the first one raises.
        sampling_rate: wanted rate in Hz. Default 16000.
        resample: whether audio of another rate is resampled as it is read. Default False.
        workers: threads that decode. Default 1.
        normalize: turns the source's texts into transcripts. Default `normalize_transcript`.
        transcripts: False also takes audio without a transcript, with the text "": a manifest without the column text,
            or a folder of audio files, as `read_audio_folder` reads it, but no dataset of the hub. Default True: each
            utterance needs a transcript.

    Returns:
        The utterances, with their lengths, and those that were skipped.

    Raises:
        ValueError: if the source cannot be read, or more than `max_bad` utterances are bad; the message names them.
    """
    if split is not None and Path(split).is_absolute():
        raise ValueError(f"split must be a name in {source}, got the path {split}: give that as the source.")
    skipped = Skipped(max_bad)
    utterances: list[Utterance] = []
    path = Path(source)
    for part in [split] if split is None or not path.exists() else split.split("+"):
        in_folders = part is not None and path.is_dir() and not _named_manifests(path, part)
        if part is not None and in_folders and ((_root(path) / part).is_dir() or not _manifests(path)):
            read: Any = partial(read_librispeech, skipped=skipped) if transcripts else read_audio_folder
            utterances += read(path, part, normalize=normalize)
        elif not transcripts and part is None and path.is_dir() and not _manifests(path):
            utterances += read_audio_folder(path, part, normalize)
        elif path.exists():
            utterances += read_manifest(path, skipped, normalize, part, transcripts)
        elif not transcripts:
            raise ValueError(f"source must be a folder or a manifest if transcripts may be missing, got {source}.")
        else:
            utterances += read_hub(str(source), config, split, skipped, normalize)
    skipped.check(len(utterances) + len(skipped))
    folder = None if prepared is None else Path(prepared) / (split or "all")
    good = prepare(utterances, folder, skipped=skipped, sampling_rate=sampling_rate, resample=resample, workers=workers)
    if not good:
        raise ValueError(f"{source} has no utterance that can be used: {skipped.describe(LISTED)}")
    return good, skipped


def read_librispeech(
    folder: str | Path, split: str, skipped: Skipped | None = None, normalize: Normalize = normalize_transcript
) -> list[Utterance]:
    """Reads the utterances of an unpacked LibriSpeech (Panayotov et al. 2015, "Librispeech: an ASR corpus ...").

    Files are `<folder>[/LibriSpeech]/<split>/<speaker>/<chapter>/<id>.flac` (or .mp3, .wav) and, next to them,
    `<speaker>-<chapter>.trans.txt` with an id and a transcript per line.

    Args:
        folder: the corpus, or the folder that holds `LibriSpeech`.
        split: e.g. "dev-clean".
        skipped: takes audio without a transcript, transcripts without audio and empty transcripts. Default None: the
            first one raises.
        normalize: turns texts into transcripts. Default `normalize_transcript`.

    Returns:
        Utterances sorted by speaker, chapter and id, without their lengths.

    Raises:
        ValueError: if there is no such split, or the split is empty.
    """
    skipped = Skipped() if skipped is None else skipped
    root = _root(Path(folder))
    if not (root / split).is_dir():
        there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise ValueError(f"split must be a folder of {root}, got {split!r}; there are: {', '.join(there) or 'none'}.")
    found: list[Utterance] = []
    before = len(skipped)
    for chapter in sorted(path for path in (root / split).glob("*/*") if path.is_dir()):
        audio = _audio_files(chapter, skipped)
        texts = _transcripts(chapter)
        for name in sorted(audio.keys() | texts.keys()):
            if name not in audio:
                skipped.add(f"{name} ({chapter})", f"has a transcript, but no {', '.join(AUDIO)} file")
            elif name not in texts:
                skipped.add(f"{name} ({audio[name]})", "has no transcript in a .trans.txt file of its folder")
            elif not (text := normalize(texts[name])):
                skipped.add(f"{name} ({audio[name]})", f"has an empty transcript, normalised from {texts[name]!r}")
            else:
                found.append(Utterance(name, text, audio[name], speaker=chapter.parent.name, chapter=chapter.name))
    if not found and len(skipped) == before:
        raise ValueError(f"found no <speaker>/<chapter>/*.flac, *.mp3 or *.wav in {root / split}.")
    return found


def read_audio_folder(
    folder: str | Path, split: str | None = None, normalize: Normalize = normalize_transcript
) -> list[Utterance]:
    """Reads the utterances of all audio files in a folder and below it, with or without transcripts.

    Args:
        folder: e.g. the corpus, or the folder that holds `LibriSpeech`.
        split: folder inside the corpus. Default None: all of it.
        normalize: turns texts of `.trans.txt` files next to the audio into transcripts. Default `normalize_transcript`.

    Returns:
        Utterances sorted by path, without their lengths. The id is the path below `folder`; the text is "" without a
        transcript.

    Raises:
        ValueError: if there is no audio file.
    """
    root = _root(Path(folder))
    place = root if split is None else root / split
    found: list[Utterance] = []
    texts: dict[Path, dict[str, str]] = {}
    for path in sorted(place.rglob("*")):
        if path.suffix.lower() in AUDIO and path.is_file():
            beside = texts.get(path.parent)
            if beside is None:
                beside = texts[path.parent] = _transcripts(path.parent)
            name = path.relative_to(root).as_posix()
            found.append(Utterance(name, normalize(beside.get(path.stem, "")), path))
    if not found:
        raise ValueError(f"found no *.flac, *.mp3 or *.wav in {place} or below it.")
    return found


def _root(folder: Path) -> Path:
    inner = folder / "LibriSpeech"
    return inner if inner.is_dir() else folder


def _audio_files(chapter: Path, skipped: Skipped) -> dict[str, Path]:
    """Finds audio files by utterance id."""
    audio: dict[str, Path] = {}
    for path in sorted(chapter.iterdir()):
        if path.suffix.lower() in AUDIO and audio.setdefault(path.stem, path) != path:
            skipped.add(f"{path.stem} ({path})", f"has the id of another file, {audio[path.stem].name}")
    return audio


def _transcripts(chapter: Path) -> dict[str, str]:
    """Reads texts by utterance id."""
    texts: dict[str, str] = {}
    for path in sorted(chapter.glob("*.trans.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, text = line.strip().partition(" ")
            if name:
                texts[name] = text
    return texts


def read_manifest(
    path: str | Path,
    skipped: Skipped | None = None,
    normalize: Normalize = normalize_transcript,
    split: str | None = None,
    transcripts: bool = True,
) -> list[Utterance]:
    """Reads the utterances of a table in JSON lines or CSV.

    Columns: `audio`, a path relative to the manifest's folder, and `text`; optional are `id` (default: `audio`),
    `seconds`, which `prepare` then compares with the audio, `speaker` and `chapter`.

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
        ValueError: if there is no manifest, or more than one, or it has no row that can be read.
    """
    skipped = Skipped() if skipped is None else skipped
    file = _find_manifest(Path(path), split)
    found: list[Utterance] = []
    before = len(skipped)
    for number, row in _csv_rows(file) if file.suffix == ".csv" else _json_rows(file):
        try:
            found.append(_from_row(row, file.parent, normalize, transcripts))
        except ValueError as error:
            skipped.add(f"{file}:{number}", str(error))
    if not found and len(skipped) == before:
        raise ValueError(f"{file}: expected rows with the columns audio and text, found none.")
    return found


def _manifests(folder: Path, stem: str = "*") -> list[Path]:
    return sorted(path for ending in MANIFESTS for path in folder.glob(stem + ending))


def _named_manifests(folder: Path, split: str) -> list[Path]:
    return _manifests(folder, split) or _manifests(folder / split)


def _find_manifest(path: Path, split: str | None) -> Path:
    """Finds the manifest of a path and a split."""
    if path.is_file():
        if split is not None:
            raise ValueError(f"split must be None for a manifest file, got {split!r} for {path}: give its folder.")
        return path
    if not path.is_dir():
        raise ValueError(f"path must be a manifest or a folder that holds one, got {path}, which does not exist.")
    found = _manifests(path) if split is None else _named_manifests(path, split)
    if len(found) != 1:
        wanted = "one .jsonl, .json or .csv file" if split is None else f"{split}.jsonl, {split}.json or {split}.csv"
        there = ", ".join(file.name for file in found or _manifests(path)) or "none"
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


def _from_row(row: Any, folder: Path, normalize: Normalize, transcripts: bool) -> Utterance:
    """Makes an utterance from a row; raises ValueError for a bad row.

    Args:
        row: an object of JSON or a row of CSV.
        folder: that of the manifest.
        normalize: turns texts into transcripts.
        transcripts: whether the row needs a text.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected one JSON object per line, got {str(row)[:60]!r}")
    needed = ("audio", "text") if transcripts else ("audio",)
    missing = [name for name in needed if not isinstance(row.get(name), str) or not row[name].strip()]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, got {row}")
    if not (text := normalize(str(row.get("text") or ""))) and transcripts:
        raise ValueError(f"text is empty after normalisation of {row['text']!r}")
    try:
        seconds = float(row["seconds"]) if row.get("seconds") not in (None, "") else None
    except (TypeError, ValueError):
        raise ValueError(f"seconds must be a number, got {row['seconds']!r}") from None
    named = {name: str(row[name]) if row.get(name) not in (None, "") else None for name in ("speaker", "chapter")}
    return Utterance(str(row.get("id") or row["audio"]), text, folder / row["audio"], seconds, **named)


@dataclass(frozen=True)
class StoredRow(StoredAudio):
    """Audio of one row of a dataset, read when it is needed.

    Args:
        dataset: with a column "audio" that is not decoded.
        row: number of the row.
    """

    dataset: Dataset
    row: int

    def read(self) -> bytes:
        """Gives the bytes of the audio file, from the dataset or from the path that the dataset gives."""
        audio = self.dataset[self.row]["audio"]
        return audio["bytes"] if audio["bytes"] is not None else Path(audio["path"]).read_bytes()

    def __str__(self) -> str:
        return f"row {self.row} of {self.dataset.info.dataset_name or 'the dataset'}"


def read_hub(
    name: str = "openslr/librispeech_asr",
    config: str | None = None,
    split: str | None = None,
    skipped: Skipped | None = None,
    normalize: Normalize = normalize_transcript,
) -> list[Utterance]:
    """Loads the utterances of a dataset of the hub, or of a local folder of Parquet files, without reading their audio.

    Args:
        name: for `datasets.load_dataset`. Default "openslr/librispeech_asr".
        config: e.g. "clean". Default None.
        split: e.g. "validation" or "train.100+train.360".
        skipped: takes rows without a transcript. Default None: the first one raises.
        normalize: of the texts. Default `normalize_transcript`.

    Returns:
        Utterances in the order of the rows.

    Raises:
        ValueError: if there is no split, or the dataset has no columns audio and text.
    """
    if not split:
        raise ValueError(f"split must be given for the hub's {name}, e.g. 'validation'.")
    return from_dataset(load_dataset(name, config, split=split), skipped, normalize)


def from_dataset(
    dataset: Dataset, skipped: Skipped | None = None, normalize: Normalize = normalize_transcript
) -> list[Utterance]:
    """Makes utterances of a `datasets.Dataset` with the columns audio and text, and optionally id, speaker and chapter.

    Args:
        dataset: its column audio is read undecoded, so that no decoder of datasets is needed.
        skipped: takes rows without a transcript. Default None: the first one raises.
        normalize: of the texts. Default `normalize_transcript`.

    Returns:
        Utterances in the order of the rows; a row without an id has its number as the id.

    Raises:
        ValueError: if the columns audio and text are missing.
    """
    skipped = Skipped() if skipped is None else skipped
    names = dataset.column_names
    if not {"audio", "text"} <= set(names):
        raise ValueError(f"dataset must have the columns audio and text, got {', '.join(names)}.")
    columns = {"id": "id", "speaker": "speaker_id", "chapter": "chapter_id"}
    columns = {key: name if name in names else key for key, name in columns.items()}
    columns = {key: name for key, name in columns.items() if name in names}
    undecoded = dataset.cast_column("audio", Audio(decode=False))
    found = []
    for row, values in enumerate(dataset.select_columns(["text", *columns.values()])):
        told = {key: str(values[name]) for key, name in columns.items() if values[name] is not None}
        audio = StoredRow(undecoded, row)
        if text := normalize(values["text"] or ""):
            found.append(Utterance(told.pop("id", str(row)), text, audio, **told))
        else:
            skipped.add(str(audio), f"has an empty transcript, normalised from {values['text']!r}")
    return found
