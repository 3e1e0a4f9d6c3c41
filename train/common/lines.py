"""Text files that other people made, line by line: a bad byte spoils its own line, not the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TextIO

# How such a file is opened: without a byte order mark, and with each byte that is not UTF-8 as a lone surrogate.
OPEN = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def open_lines(path: Path, newline: str | None = None) -> TextIO:
    """Opens a text file; bytes that are not UTF-8 become characters that `is_text` refuses.

    Args:
        path: the file.
        newline: as in `open`.
    """
    return path.open(newline=newline, **OPEN)


def is_text(text: str) -> bool:
    """Tells whether a text is one: it has no NUL, and no byte that is not UTF-8."""
    return _NO_TEXT.search(text) is None
