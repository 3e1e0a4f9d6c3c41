"""A small generated task in the layout of GLUE's RTE, in which only the order of the words decides.

sentence1 judges two or three things, each in one long sentence: "The food was lovely and by no means horrible, great
and by no means bad, ...". sentence2 names one of them: "The food was good." The label is entailment if the verdict on
that thing is a good one. A third thing is judged in a third of the rows, and never asked for.

Whatever the label, the words are the same: turning a verdict round exchanges the adjectives of each pair and adds no
word. No bag of words, and no mean over embeddings that do not know their neighbours, can beat a guess. A model that
reads the verdicts but not sentence2 is right in about three rows of four, as both asked things agree in every other
row. For the rest, sentence2 has to be related to its place in sentence1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ASKED = ("food", "room")
OTHER = ("weather", "traffic", "beach", "music", "view", "garden", "pool", "street")
VERDICTS = (
    ("delicious", "disgusting"),
    ("wonderful", "terrible"),
    ("excellent", "awful"),
    ("lovely", "horrible"),
    ("superb", "dreadful"),
    ("great", "bad"),
)
CLAUSES = (4, 5, 6)
LABELS = ("not_entailment", "entailment")
TRAIN_SEED, DEV_SEED = 0, 1
DEV_ROWS = 256


@dataclass(frozen=True)
class Example:
    """One row; `label` is an index into LABELS."""

    sentence1: str
    sentence2: str
    label: int


def verdict(rng: random.Random, thing: str, good: bool) -> str:
    """A judgement whose words do not depend on which way it goes; only their order does."""
    pairs = rng.sample(VERDICTS, rng.choice(CLAUSES))
    turned = pairs if good else [pair[::-1] for pair in pairs]
    return f"The {thing} was {', '.join(f'{said} and by no means {denied}' for said, denied in turned)}."


def example(seed: int, good: bool) -> Example:
    """The row of a seed whose label is `good`; the verdicts on the other things are drawn by coin."""
    rng = random.Random(seed)
    asked = rng.choice(ASKED)
    things = [*ASKED, *rng.sample(OTHER, int(rng.random() < 1 / 3))]
    sentences = [verdict(rng, thing, good if thing == asked else rng.random() < 0.5) for thing in things]
    rng.shuffle(sentences)
    return Example(" ".join(sentences), f"The {asked} was good.", int(good))


def examples(seed: int, count: int, without: Sequence[Example] = ()) -> list[Example]:
    """`count` different rows, none of them in `without`, half of each label, in random order; the same each time."""
    rng = random.Random(seed)
    taken = set(without)
    rows: list[Example] = []
    while len(rows) < count:
        row = example(rng.getrandbits(64), good=len(rows) % 2 == 1)
        if row not in taken:
            taken.add(row)
            rows.append(row)
    rng.shuffle(rows)
    return rows


def write_tsv(path: Path, rows: list[Example]) -> None:
    """Write rows as GLUE's RTE files are: a header, then index, sentence1, sentence2 and label."""
    lines = ["index\tsentence1\tsentence2\tlabel"]
    lines += [f"{i}\t{row.sentence1}\t{row.sentence2}\t{LABELS[row.label]}" for i, row in enumerate(rows)]
    path.write_bytes(("\n".join(lines) + "\n").encode())


def dev_examples() -> list[Example]:
    """The rows of dev.tsv."""
    return examples(DEV_SEED, DEV_ROWS)


def generate(data_dir: Path, train_rows: int = 1024) -> Path:
    """Write `RTE/train.tsv` and `RTE/dev.tsv` below `data_dir`, the same bytes each time; returns `data_dir`."""
    folder = data_dir / "RTE"
    folder.mkdir(parents=True, exist_ok=True)
    dev = dev_examples()
    write_tsv(folder / "train.tsv", examples(TRAIN_SEED, train_rows, without=dev))
    write_tsv(folder / "dev.tsv", dev)
    return data_dir
