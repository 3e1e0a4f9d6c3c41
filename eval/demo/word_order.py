"""Are the words in order? A task in the layout of GLUE's SST-2, made from the demo's documents.

Label 1 is a passage of a novel, label 0 a passage with its words shuffled. Every passage comes in both forms, so a
model that ignores the order of words is right in 50 % of the cases. Passages of training and development are of
different documents.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from favor.eval.demo.documents import Document

TASK, FOLDER = "sst2", "SST-2"
# 180 words are 206 to 313 tokens, usually 240.
WORDS, MAX_LENGTH = 180, 256
DEV_PASSAGES = 50


def passages(documents: Sequence[Document], number: int, rng: random.Random) -> list[list[str]]:
    """Draws different passages as lists of words.

    Raises:
        ValueError: if the documents do not have `number` passages.
    """
    words = [document.text.split() for document in documents]
    found = [text[start : start + WORDS] for text in words for start in range(0, len(text) - WORDS, WORDS)]
    if number > len(found):
        raise ValueError(f"{len(documents)} documents have {len(found)} passages of {WORDS} words, {number} are needed")
    return rng.sample(found, number)


def rows(found: Sequence[Sequence[str]], rng: random.Random) -> list[tuple[str, int]]:
    """Makes sentences and labels: every passage unchanged and shuffled, in random order."""
    pairs = [(" ".join(words), 1) for words in found]
    pairs += [(" ".join(rng.sample(words, len(words))), 0) for words in found]
    rng.shuffle(pairs)
    return pairs


def generate(data_dir: Path, documents: Sequence[Document], train_rows: int, seed: int) -> Path:
    """Writes `SST-2/train.tsv` and `SST-2/dev.tsv`.

    Args:
        data_dir: the folder that gets the task's folder.
        documents: the first half of them is for training, the second half for development.
        train_rows: rows of train.tsv, an even number.
        seed: draws passages and orders.

    Returns:
        `data_dir`.

    Raises:
        ValueError: if the documents do not have that many passages.
    """
    rng, middle = random.Random(seed), len(documents) // 2
    folder = data_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    parts = (("train", documents[:middle], train_rows // 2), ("dev", documents[middle:], DEV_PASSAGES))
    for split, part, number in parts:
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows(passages(part, number, rng), rng))]
        (folder / f"{split}.tsv").write_bytes(("\n".join(lines) + "\n").encode())
    return data_dir
