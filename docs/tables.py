"""What the site makes from other files when it is built: tables of results, and the list of error messages.

A page asks for one by a comment, `<!-- made: NAME arguments -->`. GitHub shows nothing there.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMENT = re.compile(r"<!-- made: (\w+)(.*?) -->")
LABELS = {
    "favor:pos": "favor+",
    "favor:wderf@128": "favor#, window 128",
    "favor:sderf": "sderf",
    "favor:landmark": "landmark",
}
SHOWN = 3  # digits


def made(text: str) -> str:
    """The text with what its comments ask for."""
    return COMMENT.sub(lambda found: MAKERS[found[1]](found[2].strip()), text)


def speed(words: str) -> str:
    """A table of times as fast as the fastest exact attention, by length.

    Args:
        words: "RESULT | PANEL", the name of a file in eval/results/speed and of one of its panels.
    """
    name, panel = (word.strip() for word in words.split("|"))
    content = json.loads((ROOT / f"eval/results/speed/{name}.json").read_text())
    cells = [cell for cell in content["cells"] if cell["panel"] == panel and cell["status"] == "ok"]
    if not cells:
        raise ValueError(f"eval/results/speed/{name}.json has no panel {panel!r}")
    methods = list(dict.fromkeys(cell["method"] for cell in cells if not cell["method"].startswith("sdpa")))
    rows = {cell["length"]: {} for cell in cells}
    for cell in cells:
        rows[cell["length"]][cell["method"]] = cell
    lines = ["| tokens | " + " | ".join(label(method) for method in methods) + " |"]
    lines.append("| ---: |" + " ---: |" * len(methods))
    timed = {length: row for length, row in rows.items() if any(number(row.get(method)) != "-" for method in methods)}
    for length, row in sorted(timed.items()):
        lines.append(f"| {length:,} | " + " | ".join(number(row.get(method)) for method in methods) + " |")
    settings, versions = content["settings"], content["versions"]
    older = {"batch_size": "per_device_eval_batch_size", "heads": "num_attention_heads"}  # names in older files
    batch, heads = (settings.get(now, settings.get(before)) for before, now in older.items())
    lines += [
        "",
        f"Batch {batch}, {heads} heads of width {settings['head_dim']}, "
        f"M = {settings['num_features']}; {content['machine']}; torch {versions['torch']}; seed {content['seed']}. "
        "[Times, memory, and the command](../eval/results/speed/README.md)",
    ]
    return "\n".join(lines)


def label(method: str) -> str:
    """A name for a method of the speed benchmark, such as `favor:landmark+256`."""
    found = re.fullmatch(r"favor:landmark\+(\d+)", method)
    if not found:
        return LABELS.get(method, method)
    return f"landmark, {found[1]} selected keys" if int(found[1]) else "landmark, means alone"


def number(cell: dict[str, Any] | None) -> str:
    """The speed of a cell, or a dash."""
    return f"{cell['speedup']:.{SHOWN}g}" if cell and cell["speedup"] else "-"


def messages(words: str) -> str:
    """All messages of the errors that a part of the package raises, by file.

    Args:
        words: folders of the repository.
    """
    lines = []
    for path in files(words.split()):
        found = messages_of(path)
        if found:
            lines += [f"\n### {path.relative_to(ROOT)}\n", "| error | message |", "| --- | --- |"]
            lines += [f"| {kind} | {cell_of(text)} |" for kind, text in found]
    return "\n".join(lines)


def files(places: list[str]) -> list[Path]:
    """The Python files that are named, or lie in folders that are."""
    paths = [ROOT / place for place in places]
    return [one for path in paths for one in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def cell_of(text: str) -> str:
    """A message as the cell of a table."""
    return "`` " + text.replace("|", "\\|").replace("`", "'") + " ``"


def messages_of(path: Path) -> list[tuple[str, str]]:
    """Kind and text of each error that a file raises; what is only known then is `...`."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: text_of(node.value, {})
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = text_of(node.exc.args[0], constants)
            if text.strip(" ."):
                found.append((ast.unparse(node.exc.func), text))
    return sorted(set(found))


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """The text of an expression, with `...` for its values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left, constants) + text_of(node.right, constants)
    if isinstance(node, ast.Name):
        return constants.get(node.id, "...")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return re.sub(r"\{\w*\}", "...", text_of(node.func.value, constants))
    return "..."


MAKERS = {"speed": speed, "messages": messages}
