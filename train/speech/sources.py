"""Where utterances come from: LibriSpeech's folders, manifests, tar shards, datasets of the hub."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset, load_dataset

from favor.models.speech import normalize_transcript
from favor.train.speech.data import AUDIO, COLUMNS, LISTED, Skipped, StoredAudio, Utterance
from favor.train.speech.manifests import TAR, find_shards, manifests, named_manifests, read_manifest, read_shards
from favor.train.speech.prepare import prepare
from favor.train.text.samples import is_text, open_lines


def load_speech(
    source: str | Path,
    split: str | None = None,
    *,
    prepared: str | Path | None = None,
    max_bad: int | float = 0,
    sampling_rate: int = 16000,
    transcripts: bool = True,
) -> tuple[list[Utterance], Skipped]:
    """Loads the utterances of a source, decodes every one of them once, and reports which were left out.

    Args:
        source: a folder in LibriSpeech's layout; a manifest, or a folder that holds `<split>.jsonl`, `<split>.tsv` and
            so on, or one manifest alone; a tar file, or a folder with tar files, as `read_shards` reads them (a
            manifest in the folder comes first); or, if there is no such path, a dataset of the hub, NAME or
            NAME:CONFIGURATION.
        split: e.g. "dev-clean" of a folder, "validation" of the hub; several are joined by "+". Default None: the
            manifest or tar file that `source` is, or all tar files or the only manifest in it.
        prepared: folder where `prepare` keeps its results, by split. Default None: all audio is decoded
            each time.
        max_bad: utterances that may be left out, a number or a fraction of all. Default 0: the first one raises.
        sampling_rate: in Hz, to which audio is converted. Default 16000.
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
        tables = manifests(path) if part is None else named_manifests(path, part)
        in_folders = part is not None and path.is_dir() and not tables
        if not tables and (shards := find_shards(path, part)):
            root = path if path.is_dir() else path.parent
            utterances += read_shards(shards, root, skipped, transcripts)
        elif part is not None and in_folders and ((_root(path) / part).is_dir() or not manifests(path)):
            read: Any = partial(read_librispeech, skipped=skipped) if transcripts else read_audio_folder
            utterances += read(path, part)
        elif not transcripts and part is None and path.is_dir() and not tables:
            utterances += read_audio_folder(path, part)
        elif path.exists():
            utterances += read_manifest(path, skipped, part, transcripts)
        elif not transcripts:
            raise ValueError(f"source must be a folder or a manifest if transcripts may be missing, got {source}.")
        else:
            utterances += read_hub(str(source), split, skipped)
    skipped.check(len(utterances) + len(skipped))
    folder = None if prepared is None else Path(prepared) / (split or "all")
    good = prepare(utterances, folder, skipped=skipped, sampling_rate=sampling_rate)
    if not good:
        raise ValueError(f"{source} has no utterance that can be used: {skipped.describe(LISTED)}")
    return good, skipped


def read_librispeech(folder: str | Path, split: str, skipped: Skipped | None = None) -> list[Utterance]:
    """Reads the utterances of an unpacked LibriSpeech (Panayotov et al. 2015), sorted, without their lengths.

    Files are `<folder>[/LibriSpeech]/<split>/<speaker>/<chapter>/<id>.flac` (or .mp3, .wav) and, next to them,
    `<speaker>-<chapter>.trans.txt` with an id and a transcript per line. `skipped` takes audio without a transcript,
    transcripts without audio and empty transcripts; without it the first one raises.

    Raises:
        ValueError: if there is no such split, or the split is empty.
    """
    skipped = Skipped() if skipped is None else skipped
    root = _root(Path(folder))
    if not (root / split).is_dir():
        inside = root.iterdir() if root.is_dir() else ()
        there = ", ".join(sorted(path.name for path in inside if path.is_dir() or path.suffix == TAR)[:LISTED])
        raise ValueError(
            f"split must be a folder of {root}, or tar shards, got {split!r}; there are: {there or 'none'}."
        )
    found: list[Utterance] = []
    before = len(skipped)
    for chapter in sorted(path for path in (root / split).glob("*/*") if path.is_dir()):
        audio: dict[str, Path] = {}
        for path in sorted(chapter.iterdir()):
            if path.suffix.lower() in AUDIO and audio.setdefault(path.stem, path) != path:
                skipped.add(f"{path.stem} ({path})", f"has the id of another file, {audio[path.stem].name}")
        texts = _transcripts(chapter)
        for name in sorted(audio.keys() | texts.keys()):
            if name not in audio:
                skipped.add(f"{name} ({chapter})", f"has a transcript, but no {', '.join(AUDIO)} file")
            elif name not in texts:
                skipped.add(f"{name} ({audio[name]})", "has no transcript in a .trans.txt file of its folder")
            elif not is_text(name + texts[name]):
                skipped.add(f"{name!r} ({chapter})", "has a name or a transcript that is not UTF-8")
            elif not (text := normalize_transcript(texts[name])):
                skipped.add(f"{name} ({audio[name]})", f"has an empty transcript, normalised from {texts[name]!r}")
            else:
                found.append(Utterance(name, text, audio[name], speaker=chapter.parent.name, chapter=chapter.name))
    if not found and len(skipped) == before:
        raise ValueError(f"found no <speaker>/<chapter>/*.flac, *.mp3 or *.wav, and no *.tar, in {root / split}.")
    return found


def read_audio_folder(folder: str | Path, split: str | None = None) -> list[Utterance]:
    """Reads the utterances of all audio files in a folder and below it, sorted by path, without their lengths.

    The id is the path below `folder`. The text is that of a `.trans.txt` file next to the audio, or "". The split is a
    folder inside the corpus. Raises ValueError if there is no audio file.
    """
    root = _root(Path(folder))
    place = root if split is None else root / split
    transcripts = functools.cache(_transcripts)
    found: list[Utterance] = []
    for path in sorted(place.rglob("*")):
        if path.suffix.lower() in AUDIO and path.is_file():
            if not is_text(name := path.relative_to(root).as_posix()):
                raise ValueError(f"names of files must be UTF-8, got {name!r} in {root}: rename it.")
            found.append(Utterance(name, normalize_transcript(transcripts(path.parent).get(path.stem, "")), path))
    if not found:
        raise ValueError(f"found no *.flac, *.mp3 or *.wav in {place} or below it.")
    return found


def _root(folder: Path) -> Path:
    inner = folder / "LibriSpeech"
    return inner if inner.is_dir() else folder


def _transcripts(chapter: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted(chapter.glob("*.trans.txt")):
        with open_lines(path) as lines:
            parts = (line.strip().partition(" ") for line in lines)
            texts |= {name: text for name, _, text in parts if name}
    return texts


@dataclass(frozen=True)
class StoredRow(StoredAudio):
    """Audio of one row of a dataset, whose column "audio" is not decoded, read when it is needed."""

    dataset: Dataset
    row: int

    def read(self) -> bytes:
        """Gives the bytes of the audio file, from the dataset or from the path that the dataset gives."""
        audio = self.dataset[self.row]["audio"]
        return audio["bytes"] if audio["bytes"] is not None else Path(audio["path"]).read_bytes()

    def __str__(self) -> str:
        return f"row {self.row} of {self.dataset.info.dataset_name or 'the dataset'}"


def read_hub(name: str, split: str | None = None, skipped: Skipped | None = None) -> list[Utterance]:
    """Loads the utterances of a dataset of the hub, or of a local folder of Parquet files, without reading their audio.

    After the name a configuration such as "clean" may follow, after a colon. `skipped` takes rows without a transcript;
    without it the first one raises. Raises ValueError if there is no split, or no column audio or text.
    """
    if not split:
        raise ValueError(f"split must be given for the hub's {name}, e.g. 'validation'.")
    path, _, config = name.partition(":")
    return from_dataset(load_dataset(path, config or None, split=split), skipped)


def from_dataset(dataset: Dataset, skipped: Skipped | None = None) -> list[Utterance]:
    """Makes utterances of a `datasets.Dataset` with the columns of a manifest, apart from seconds and offset.

    Its column audio is read undecoded, so that no decoder of datasets is needed. A row without an id has its number as
    the id. Raises ValueError if the columns audio and text are missing; `skipped` takes rows without a transcript.
    """
    skipped = Skipped() if skipped is None else skipped
    names = dataset.column_names
    wanted = ("text", "id", "speaker", "chapter")
    columns = {key: own for key in wanted for own in reversed(COLUMNS[key]) if own in names}
    if "audio" not in names or "text" not in columns:
        raise ValueError(f"dataset must have the columns audio and text, got {', '.join(names)}.")
    undecoded = dataset.cast_column("audio", Audio(decode=False))
    found = []
    for row, values in enumerate(dataset.select_columns([*columns.values()])):
        told = {key: str(values[name]) for key, name in columns.items() if values[name] is not None}
        audio, said = StoredRow(undecoded, row), told.pop("text", "")
        if text := normalize_transcript(said):
            found.append(Utterance(told.pop("id", str(row)), text, audio, **told))
        else:
            skipped.add(str(audio), f"has an empty transcript, normalised from {said!r}")
    return found
