"""The demo's documents: passages of novels in the public domain, in the folder text (see text/ORIGIN.md)."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "text" / "novels.txt.xz"
# Stands between documents. The first line of a document is "title | author | year".
SEPARATOR = "\f"


@dataclass(frozen=True)
class Document:
    """One passage of a novel, 8,200 word pieces of BERT long."""

    title: str
    author: str
    year: int
    text: str


def documents(number: int | None = None) -> list[Document]:
    """Reads the documents: first one of each novel, then a second one of each, and so on.

    Args:
        number: number of documents; None is all.

    Raises:
        ValueError: if `number` is below 2 or above the number of documents that exist.
    """
    parts = lzma.decompress(FILE.read_bytes()).decode().split(SEPARATOR)
    if number is not None and not 2 <= number <= len(parts):
        raise ValueError(f"the number of documents must be from 2 to {len(parts)}, got {number}")
    found = []
    for part in parts[:number]:
        head, text = part.split("\n", 1)
        title, author, year = head.split(" | ")
        found.append(Document(title, author, int(year), text))
    return found
