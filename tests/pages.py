"""Runs the Python blocks of a page of documentation, and compares what they print with the text blocks below them."""

import contextlib
import io
import re
from pathlib import Path

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> int:
    """Runs the blocks in order, in one namespace, and returns how many outputs were compared."""
    names: dict[str, object] = {}
    compared = 0
    blocks = FENCED.findall(page.read_text())
    for (language, code), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if following == "text":
            assert [line.rstrip() for line in printed.getvalue().splitlines()] == shown.splitlines(), code
            compared += 1
    return compared
