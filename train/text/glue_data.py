"""The nine GLUE tasks: their columns, labels and metrics, read from the hub or from the official TSV files.

Columns and label numbers are those of the hub's `nyu-mll/glue`. In the TSV files a field ends at a tab and a row at a
newline; quotation marks have no special meaning.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset

from favor.train.common.program import did_you_mean
from favor.train.text.samples import is_text, open_lines

HUB_ID = "nyu-mll/glue"
MAX_SCORE = 5.0


@dataclass(frozen=True)
class Task:
    """Describes one GLUE task.

    Args:
        name: name on the hub and on the command line.
        folder: folder of the official TSV files.
        sentences: the one or two text columns, as on the hub.
        labels: label strings; a label's number is its place. None: a score from 0 to 5 (STS-B).
        metrics: names of the metrics; GLUE's leaderboard averages them. The first is the main one.
        tsv_sentences: header names of the text columns in the TSV files. Default: `sentences`.
        tsv_label: header name of the label column.
        coded: whether the TSV files hold label numbers, not strings.
        headerless: columns of a TSV file without a header row (CoLA), in order.
        document: the text column that may say more without changing a label. None: there is no such column.
    """

    name: str
    folder: str
    sentences: tuple[str, ...]
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...] = ("accuracy",)
    tsv_sentences: tuple[str, ...] | None = None
    tsv_label: str = "label"
    coded: bool = False
    headerless: tuple[str, ...] | None = None
    document: str | None = None

    @property
    def num_labels(self) -> int:
        """Outputs of the classification head: 1 for a regression."""
        return len(self.labels) if self.labels else 1

    @property
    def is_regression(self) -> bool:
        """Tells whether the label is a score."""
        return self.labels is None

    @property
    def eval_splits(self) -> tuple[str, ...]:
        """Development sets on the hub; the first is the main one."""
        return ("validation_matched", "validation_mismatched") if self.name == "mnli" else ("validation",)

    def parse_label(self, text: str) -> int | float:
        """Reads the label of a TSV field; raises ValueError for a label that the task does not have."""
        if self.labels is None:
            try:
                score = float(text)
            except ValueError:
                score = math.nan
            if not 0.0 <= score <= MAX_SCORE:
                raise ValueError(f"expected a score between 0 and {MAX_SCORE:g}, got {text!r}")
            return score
        known = [str(number) for number in range(len(self.labels))] if self.coded else list(self.labels)
        if text not in known:
            raise ValueError(f"expected a label of {', '.join(known)}, got {text!r}")
        return known.index(text)


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            metrics=("matthews_correlation",),
            coded=True,
            headerless=("source", "label", "mark", "sentence"),
        ),
        Task("sst2", "SST-2", ("sentence",), ("negative", "positive"), coded=True),
        Task(
            "mrpc",
            "MRPC",
            PAIR,
            ("not_equivalent", "equivalent"),
            metrics=("f1", "accuracy"),
            tsv_sentences=("#1 String", "#2 String"),
            tsv_label="Quality",
            coded=True,
        ),
        Task("stsb", "STS-B", PAIR, None, metrics=("spearmanr", "pearson"), tsv_label="score"),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            metrics=("accuracy", "f1"),
            tsv_label="is_duplicate",
            coded=True,
        ),
        Task(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            tsv_sentences=PAIR,
            tsv_label="gold_label",
            document="premise",
        ),
        Task("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, document="sentence"),
        Task("rte", "RTE", PAIR, ENTAILMENT, document="sentence1"),
        Task("wnli", "WNLI", PAIR, ("not_entailment", "entailment"), coded=True),
    )
}


def get_task(name: str) -> Task:
    """Gives the task of a name, in upper or lower case; raises ValueError, which lists all, for an unknown name."""
    if name.lower() not in TASKS:
        near = did_you_mean(name, TASKS) or ";"
        raise ValueError(f"unknown GLUE task {name!r}{near} task_name must be one of {', '.join(TASKS)}")
    return TASKS[name.lower()]


@dataclass
class GlueData:
    """The splits of one task. `evaluation` holds one split, for MNLI one or two. Label columns are named `label`.

    `train` may be empty if it was not asked for. `sources` says the origin of each split: the hub's name of the task,
    or a file of the task's folder.
    """

    task: Task
    train: Dataset
    evaluation: dict[str, Dataset]
    sources: dict[str, str]

    def keep_first(self, train: int | None, evaluation: int | None) -> None:
        """Keeps the first samples of each split, `train` and `evaluation` of them; None keeps all."""
        if train is not None:
            self.train = self.train.take(min(train, len(self.train)))
        if evaluation is not None:
            self.evaluation = {split: part.take(min(evaluation, len(part))) for split, part in self.evaluation.items()}

    def add_distractors(self, number: int) -> None:
        """Makes documents: puts `number` texts of other samples of the split around the text that holds the answer.

        What follows from one text follows from a document with it; what does not follow from it seldom follows from
        texts that are drawn by chance. So labels stay. The choice of the texts depends on the split alone. Raises
        ValueError if the task has no column for it, or a split has one sample.
        """
        self.train = with_distractors(self.train, self.task, number)
        self.evaluation = {name: with_distractors(part, self.task, number) for name, part in self.evaluation.items()}


def with_distractors(dataset: Dataset, task: Task, number: int) -> Dataset:
    """Gives one split of a task as `GlueData.add_distractors` makes it, with the same errors.

    The other rows and the place of the own text are drawn with a seed of their own.
    """
    if not number:
        return dataset
    column = task.document
    if column is None:
        known = ", ".join(other.name for other in TASKS.values() if other.document)
        raise ValueError(f"distractors would change the labels of {task.name}; tasks that have them: {known}")
    texts = dataset[column][:]
    if len(texts) < 2:
        raise ValueError(f"distractors are texts of other samples, but the split has {len(texts)}")
    generator = np.random.default_rng(0)

    def document(row: dict[str, Any], index: int) -> dict[str, str]:
        others = generator.integers(len(texts) - 1, size=number)
        parts = [texts[other + (other >= index)] for other in others]
        parts.insert(int(generator.integers(number + 1)), row[column])
        return {column: " ".join(parts)}

    return dataset.map(document, with_indices=True, load_from_cache_file=False)


def load_glue(name: str, data_dir: str | Path | None = None, *, train: bool = True) -> GlueData:
    """Loads the training and development sets of a task.

    Args:
        name: one of the nine task names.
        data_dir: GLUE's folder, or the task's own, in the official TSV layout; each file is plain or ends in .gz. If
            `train.tsv` is missing, a file that is marked as a sample of it is read, such as `train.sub9999.tsv`.
            Default None: `nyu-mll/glue` from the hub.
        train: read the training set too. Default True.

    Raises:
        ValueError: for an unknown task, a missing or empty file, or a malformed row; the message names
            the expected files, or the file and the line.
    """
    task = get_task(name)
    if data_dir is None:
        return _load_from_hub(task)
    folder = _find_folder(task, Path(data_dir))
    first = ("train",) if train else ()
    files = {split: _find_file(folder, split.replace("validation", "dev")) for split in (*first, *task.eval_splits)}
    for split in (*first, task.eval_splits[0]):
        if files[split] is None:
            stem = split.replace("validation", "dev")
            names = ", ".join(f"{stem}{ending}" for ending in (".tsv", ".tsv.gz", ".sub*.tsv", ".sub*.tsv.gz"))
            found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise ValueError(f"expected one of {names} in {folder}, which holds {found}")
    splits = {split: _read_tsv(task, path) for split, path in files.items() if path is not None}
    sources = {split: f"{task.folder}/{path.name}" for split, path in files.items() if path is not None}
    return GlueData(task, splits.pop("train", Dataset.from_dict({})), splits, sources)


def _load_from_hub(task: Task) -> GlueData:
    try:
        hub = load_dataset(HUB_ID, task.name)
    except OSError as error:
        raise ValueError(
            f"cannot read {HUB_ID} from the hub ({error}); for local files set data_dir to the folder of GLUE's TSVs"
        ) from error
    evaluation = {split: hub[split] for split in task.eval_splits}
    sources = dict.fromkeys(("train", *evaluation), f"{HUB_ID} {task.name}")
    return GlueData(task, hub["train"], evaluation, sources)


def _find_folder(task: Task, data_dir: Path) -> Path:
    """Finds the task's folder: `data_dir/FOLDER` if it holds TSV files, else `data_dir` itself."""
    if not data_dir.is_dir():
        raise ValueError(f"data_dir must be an existing folder, got {data_dir}")
    for folder in (data_dir / task.folder, data_dir):
        if any(folder.glob("*.tsv")) or any(folder.glob("*.tsv.gz")):
            return folder
    raise ValueError(
        f"found no .tsv or .tsv.gz file for {task.name} in {data_dir / task.folder}, nor in {data_dir}; data_dir must "
        f"be GLUE's folder, with {task.folder} in it, or {task.folder} itself"
    )


def _find_file(folder: Path, stem: str) -> Path | None:
    """Finds `stem.tsv`, `stem.tsv.gz` or a file that is marked as a sample of it; None if there is no such file."""
    for path in (folder / f"{stem}.tsv", folder / f"{stem}.tsv.gz"):
        if path.is_file():
            return path
    samples = sorted([*folder.glob(f"{stem}.sub*.tsv"), *folder.glob(f"{stem}.sub*.tsv.gz")])
    return samples[0] if samples else None


def _read_tsv(task: Task, path: Path) -> Dataset:
    rows = _numbered_rows(path)
    header = task.headerless or next(rows, (1, ("nothing",)))[1]
    wanted = [*(task.tsv_sentences or task.sentences), task.tsv_label]
    if not set(wanted) <= set(header):
        raise ValueError(f"{path}:1: expected columns {', '.join(wanted)} in the header, got {', '.join(header)}")
    places = [header.index(name) for name in wanted]
    columns: dict[str, list[Any]] = {name: [] for name in (*task.sentences, "label")}
    for line, fields in rows:
        try:
            if len(fields) != len(header):
                raise ValueError(f"expected {len(header)} fields, got {len(fields)}")
            if not is_text("".join(fields)):
                raise ValueError("expected UTF-8 text without NUL")
            label = task.parse_label(fields[places[-1]])
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from None
        for name, place in zip(task.sentences, places, strict=False):
            columns[name].append(fields[place])
        columns["label"].append(label)
    if not columns["label"]:
        raise ValueError(f"{path}:1: expected rows, found none")
    return Dataset.from_dict(columns)


def _numbered_rows(path: Path) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields line numbers, from 1, and fields; no byte-order mark, no Windows line ends, no blank lines at the end."""
    blank: list[int] = []
    try:
        # newline="\n": sentences contain other characters that Python would take for line ends.
        with open_lines(path, newline="\n") as stream:
            for number, line in enumerate(stream, 1):
                line = line.rstrip("\r\n")
                if not line:
                    blank.append(number)
                    continue
                yield from ((empty, ("",)) for empty in blank)
                blank.clear()
                yield number, line.split("\t")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
