"""How all programs talk to their user: what the command `favor` has, and a parser for dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import HfArgumentParser

from favor_command.program import Formatter, Parser, did_you_mean, program

__all__ = ["DataclassParser", "Formatter", "Parser", "did_you_mean", "program"]


class DataclassParser(Parser, HfArgumentParser):
    """A parser whose options are the fields of dataclasses, as those of `HfArgumentParser`."""

    def __init__(self, program: str, text: str | None, kinds: Sequence[Any]) -> None:
        super().__init__(program, text, kinds)
        needed = [f"{action.option_strings[0]} {action.dest.upper()}" for action in self._actions if action.required]
        self.usage = " ".join([self.prog, *needed, "[OPTION ...]"])

    def parse(self, words: Sequence[str] | None) -> tuple[Any, ...]:
        """The dataclasses of a command line; None is that of this process. Raises ValueError as they do."""
        found, rest = self.parse_some(words)
        self.refuse(rest)
        return found

    def parse_some(self, words: Sequence[str] | None) -> tuple[tuple[Any, ...], list[str]]:
        """The dataclasses of a command line, and the words that are for none of them."""
        *found, rest = self.parse_args_into_dataclasses(words, return_remaining_strings=True)  # type: ignore[arg-type]
        return tuple(found[: len(list(self.dataclass_types))]), rest
