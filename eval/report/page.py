"""Fills the template of the page: texts are escaped, data are JSON."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("page.html")
# Text inside JSON must not end the element that holds it, or begin a comment.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def render(data: Mapping[str, Any]) -> str:
    """Gives the page as text.

    Args:
        data: from `favor.eval.report.content.content`, with `model`, a text, and `facts`, texts by name.
    """
    verdicts = [html.escape(each["verdict"]) for each in reversed(data["lengths"])]
    filled = {
        "model": html.escape(data["model"]),
        "verdict": verdicts[0],
        "others": "\n".join(f"<li>{line}</li>" for line in verdicts[1:]),
        "max_error": f"{data['max_error']:g}",
        "facts": "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in data["facts"].items()),
        "data": json.dumps(_finite(data), allow_nan=False, separators=(",", ":")).translate(ESCAPES),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the page that `render` makes, and makes its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(data), encoding="utf-8")


def _finite(value: Any) -> Any:
    """Turns NaN and infinity, which JSON does not have, into null, which the page shows as a dash."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value
