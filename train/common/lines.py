"""Text files that other people made, line by line: a bad byte spoils its own line, not the file."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def open_lines(path: Path, newline: str | None = None) -> Any:
    """Opens a text file, plain or gzip, without its byte order mark.

    Args:
        path: the file.
        newline: as in `open`.

    Returns:
        The lines, in which a byte that is not UTF-8 is a lone surrogate; `is_text` finds it.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def is_text(text: str) -> bool:
    """Tells whether a text is one: it has no NUL, and no byte that is not UTF-8."""
    return _NO_TEXT.search(text) is None
