"""The table of `python -m favor.eval.compatibility` in Markdown: one line per family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from favor.eval.common.report import table_row
from favor.eval.compatibility.check import BAD, CATEGORIES

_MEANING = {
    "equal": "with landmarks that lose nothing the output is that of exact attention, to 1e-4 relative",
    "local": "all layers see a window or a chunk only; they stay exact, in linear time",
    "refused": "a ValueError says why, at loading or at the first pass",
    "no attention": "nothing in the class attends",
    "not built": "no tiny model could be made here; says nothing about the backends",
    "silently exact": "the name is accepted, and attention stays exact",
    "wrong": "the output is another",
    "crash": "an exception that is no refusal",
}


def lines_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes the report in Markdown.

    Args:
        results: of the classes, from `favor.eval.compatibility.check.check`.
    """
    counts = Counter(result["category"] for result in results)
    families = {result["family"] for result in results}
    return [
        "# Models of transformers with a FAVOR backend",
        "",
        f"{len(results)} model classes of {len(families)} families, tiny, with random weights, float32 on a CPU: exact "
        "attention, landmarks with a mean for every key, landmarks that select all keys (both are softmax attention), "
        "and 4 random features, which must differ. Token models with padding at the right and at the left too.",
        "",
        table_row(["category", "classes", "meaning"]),
        table_row(["---", "---:", "---"]),
        *(table_row([name, str(counts[name]), _MEANING[name]]) for name in CATEGORIES),
        "",
        f"Bad categories: {', '.join(BAD)}.",
        "",
        "## By family",
        "",
        *family_lines(results),
        *differing_lines(results),
    ]


def differing_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes a Markdown table of the classes for which transformers' own "sdpa" and "eager" differ; empty if none.

    Args:
        results: of the classes, from `favor.eval.compatibility.check.check`.
    """
    rows = [result for result in results if result.get("sdpa_and_eager_differ")]
    if not rows:
        return []
    lines = [
        "",
        "## Where sdpa and eager differ",
        "",
        "Relative errors between the two, without a backend of favor.",
        "",
    ]
    lines += [table_row(["class", "batches", "favor"]), table_row(["---"] * 3)]
    for result in rows:
        apart = ", ".join(f"{name} {error:.0e}" for name, error in result["sdpa_and_eager_differ"].items())
        reason = f": {_short(result['reason'])}" if result["reason"] else ""
        lines.append(table_row([result["class"], apart, f"{result['category']}{reason}"]))
    return lines


def family_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes a Markdown table with one line per family: its classes by category, its caches, and reasons.

    Args:
        results: of the classes, from `favor.eval.compatibility.check.check`.
    """
    lines = [table_row(["family", "classes", "FavorCache", "reason"]), table_row(["---"] * 4)]
    for family in sorted({result["family"] for result in results}):
        own = [result for result in results if result["family"] == family]
        counts = Counter(result["category"] for result in own)
        cells = ", ".join(f"{counts[name]} {name}" for name in CATEGORIES if counts[name])
        caches = sorted(
            {_short(result["cache"]) for result in own if not result.get("cache", "not run").startswith("not")}
        )
        reasons = [
            _short(result["reason"]) for result in own if result["category"] != "no attention" and result["reason"]
        ]
        lines.append(table_row([family, cells, "; ".join(caches), "; ".join(dict.fromkeys(reasons[:3]))]))
    return lines


def _short(text: str) -> str:
    """Gives the first sentence, at most 110 characters, safe in a table."""
    text = text.split(". ")[0].replace("|", "/")
    return text if len(text) <= 110 else f"{text[:107]}..."
