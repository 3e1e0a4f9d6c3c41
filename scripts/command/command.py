"""The command `favor`: finds the program that its arguments name, and starts it. Only that program is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from favor_command.program import COMMAND, DEBUG, MENDABLE, did_you_mean, end, in_one_line_errors
from favor_command.programs import ROOT, Folder, Program

HELP = ("-h", "--help")
VERSION = "--version"
BEFORE = "stopped before the program began; the same command starts it again"


def cli() -> NoReturn:
    """Starts the program that the command line of this process names."""
    run(sys.argv[1:])


def run(words: Sequence[str]) -> NoReturn:
    """Starts the program that the first words name, with the remaining words as its arguments; ends this process."""
    debug, rest = DEBUG in words, [word for word in words if word != DEBUG]
    name = COMMAND
    found: Program | Folder = ROOT
    while isinstance(found, Folder):
        if not rest or rest[0] in HELP:
            explain(name, found)
        word = rest.pop(0)
        if word == VERSION and found is ROOT:
            from importlib.metadata import version  # imported here because it would double the time of --help

            print(f"{COMMAND} {version('favor')}")
            sys.exit(0)
        found = member(name, found, word)
        name = f"{name} {word}"
    sys.argv = [name, *([DEBUG] if debug else []), *rest]
    with in_one_line_errors(name, debug, BEFORE):
        program = import_module(found.module)
    program.cli()
    sys.exit(0)


def member(name: str, folder: Folder, word: str) -> Program | Folder:
    """Finds what a word names in a folder; if it names nothing, ends this process with the nearest name as a hint."""
    members = folder.members()
    known = word.replace("-", "_")
    if known in members:
        return members[known]
    if word.startswith("-"):
        hint = did_you_mean(word, [*HELP, DEBUG, *([VERSION] if folder is ROOT else [])])
        return end(f"{name}: error: unknown option {word}{hint or ': --help lists all'}", MENDABLE)
    # If a folder one level deeper has the name, hint at the first such folder.
    folders = {outer: own for outer, own in members.items() if isinstance(own, Folder)}
    deeper = next((f": did you mean {outer} {known}?" for outer, own in folders.items() if known in own.members()), "")
    hint = deeper or did_you_mean(known, members) or ": --help lists all"
    return end(f"{name}: error: unknown command {word}{hint}", MENDABLE)


def explain(name: str, folder: Folder) -> NoReturn:
    """Prints the names of a folder in groups, one line per name, and ends this process."""
    width = max(map(len, folder.members()))
    lines = [f"usage: {name} COMMAND [OPTION ...]", "", f"{name}: {folder.line}"]
    for title, group in folder.groups.items():
        lines += ["", f"{title}:", *(f"  {word:{width}}  {own.line}" for word, own in group.items())]
    lines += ["", f"{name} COMMAND --help explains one.", folder.note]
    print("\n".join(lines).rstrip())
    sys.exit(0)
