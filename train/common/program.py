"""How all programs talk to their user: the parts of the command `favor`, and a parser for dataclasses."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from favor_command.program import Formatter, Parser, check_new, did_you_mean, program

__all__ = ["DataclassParser", "Formatter", "Parser", "check_new", "did_you_mean", "program"]

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class DataclassParser(Parser):
    """A parser whose options are the fields of dataclasses, in one group per class that adds fields.

    A field is a `str`, `int`, `float` or `bool`, one of these or None, or a list of them. A field without a default is
    required. The metadata of a field are arguments of `add_argument`, such as `help`.

    Args:
        program: the program's name in messages.
        text: the program's docstring, shown unchanged.
        kinds: the dataclasses.
    """

    def __init__(self, program: str, text: str | None, kinds: Sequence[Any]) -> None:
        super().__init__(program, text)
        self.kinds = kinds
        groups: dict[Any, Any] = {}
        for kind in kinds:
            hints = get_type_hints(kind)
            for field in fields(kind):
                owner = next(
                    own for own in reversed(kind.__mro__) if field.name in getattr(own, "__dataclass_fields__", ())
                )
                if owner not in groups:
                    groups[owner] = self.add_argument_group(str(inspect.getdoc(owner)).split(".")[0])
                groups[owner].add_argument(f"--{field.name}", **_settings(field, hints[field.name]))
        needed = [f"{action.option_strings[0]} {action.dest.upper()}" for action in self._actions if action.required]
        self.usage = " ".join([self.prog, *needed, "[OPTION ...]"])

    def parse(self, words: Sequence[str] | None) -> tuple[Any, ...]:
        """Makes the dataclasses from a command line; None reads that of this process. Raises ValueError as they do."""
        found, rest = self.parse_some(words)
        self.refuse(rest)
        return found

    def parse_some(self, words: Sequence[str] | None) -> tuple[tuple[Any, ...], list[str]]:
        """Makes the dataclasses from a command line; returns them and the words that belong to none of them."""
        given, rest = self.parse_known_args(words)
        found = [kind(**{field.name: getattr(given, field.name) for field in fields(kind)}) for kind in self.kinds]
        return tuple(found), rest


def _settings(field: Field[Any], hint: Any) -> dict[str, Any]:
    """Gives the arguments of `add_argument` for a field."""
    kind = next((own for own in get_args(hint) if own is not NoneType), hint) if NoneType in get_args(hint) else hint
    settings = dict(field.metadata)
    if get_origin(kind) is list:
        settings = {"type": get_args(kind)[0], "nargs": "+", **settings}
    elif kind is bool:
        settings |= {"type": _yes_or_no, "nargs": "?", "const": True}
    else:
        settings["type"] = kind
    if field.default is not MISSING:
        settings["default"] = field.default
    elif field.default_factory is not MISSING:
        settings["default"] = field.default_factory()
    else:
        settings["required"] = True
    return settings


def _yes_or_no(word: str) -> bool:
    if word.lower() not in WORDS:
        raise argparse.ArgumentTypeError(f"expected true or false, got {word!r}")
    return WORDS[word.lower()]
