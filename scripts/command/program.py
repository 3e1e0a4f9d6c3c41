"""How all programs talk to their user: one parser, errors in one line, Ctrl-C that says how to go on.

Nothing heavy is imported here, so that a command is explained at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from safetensors import SafetensorError

DEBUG = "--debug"
# Exit codes: of argparse for what a user can mend, and of a shell for Ctrl-C.
MENDABLE, STOPPED = 2, 130
COMMAND = "favor"
ERRORS = (ValueError, OSError, ImportError, FloatingPointError, SafetensorError)
# What accelerate tells the processes it starts; it ends with a traceback of its own if one of them fails.
LAUNCHED = "ACCELERATE_MIXED_PRECISION"
# Seconds in which a launcher has ended the other processes once the first one has said what is wrong.
PATIENCE = 2.0


def program(name: str, main: Callable[[], Any]) -> Callable[[], None]:
    """Makes the function that a command line starts.

    It exits with what `main` returns if that is a number, else with 0. An error that a user can mend is one line and
    exit code 2, Ctrl-C is one line and exit code 130; with `--debug` both show their traceback.

    Args:
        name: of the program, for its messages.
        main: the program, with the arguments of this process.
    """

    def cli() -> None:
        debug = DEBUG in sys.argv[1:]
        # The program does not know it, nor does the command that its results name.
        sys.argv[1:] = [word for word in sys.argv[1:] if word != DEBUG]
        with in_one_line_errors(called(name), debug):
            result = main()
        sys.exit(result if isinstance(result, int) else 0)

    return cli


@contextmanager
def in_one_line_errors(name: str, debug: bool, stopped: str = "stopped") -> Iterator[None]:
    """Ends this process with one line for an error that a user can mend, and for Ctrl-C.

    Args:
        name: of the program, for its messages.
        debug: show tracebacks instead.
        stopped: what to say of a Ctrl-C that says nothing itself.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if debug:
            raise
        # A line of its own: ^C and a bar of progress end none.
        end(f"\n{name}: {str(error) or stopped}", STOPPED)
    except ERRORS as error:
        if debug:
            raise
        end(f"{name}: error: {in_one_line(error)} ({DEBUG} shows where)", MENDABLE)


def called(name: str) -> str:
    """The name by which the user called a program: that of the command `favor` if it started the program."""
    return sys.argv[0] if sys.argv[0].startswith(f"{COMMAND} ") else name


def end(message: str, code: int) -> NoReturn:
    """Says a last line and ends this process; of several that say the same, only the first is heard."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    launched = "; what follows is of accelerate launch" if LAUNCHED in os.environ else ""
    print(message + launched, file=sys.stderr, flush=True)
    sys.exit(code)


def in_one_line(error: Exception) -> str:
    """The message of an error, without line breaks and numbers of the operating system."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question for the nearest known word, to stand behind an error; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows a description as it is written, and the default of an option whose help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.required:
            return f"{text} (required)"
        hidden = default is None or default is False or default == argparse.SUPPRESS or default == []
        if hidden or "efault" in text:
            return text
        values = default if isinstance(default, list | tuple) else [default]
        shown = " ".join(_shown(value) for value in values).replace("%", "%%")
        return f"{text} (default: {shown})"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest option for one that it does not know.

    An option may be written with hyphens or underscores, and is listed with underscores.

    Args:
        program: its name in messages.
        text: the program's docstring, shown as it is written.
        abbreviations: whether the first letters of an option are enough.
    """

    def __init__(self, program: str, text: str | None, *, abbreviations: bool = False) -> None:
        super().__init__(prog=called(program), description=text, formatter_class=Formatter, allow_abbrev=abbreviations)
        self.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Takes options with hyphens as those with underscores."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses a command line, and ends the program for words that it does not know."""
        found, rest = self.parse_known_args(args, namespace)
        self.refuse(rest)
        return found

    def refuse(self, rest: Sequence[str], others: Iterable[str] = ()) -> None:
        """Ends the program if there are words left.

        Args:
            rest: the words.
            others: options of another program that were possible too.
        """
        if not rest:
            return
        options = [word.split("=")[0] for word in rest if word.startswith("-")]
        if not options:
            self.error(f"did not expect {' '.join(rest)!r}")
        known = [*self.options(), *others]
        self.error(f"unknown option {options[0]}{did_you_mean(options[0], known) or ': --help lists all'}")

    def options(self) -> list[str]:
        """The names of all options."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line."""
        end(f"{self.prog}: error: {message}", MENDABLE)

    def _spelled(self, word: str) -> str:
        name, sign, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        plain = f"--{name[2:].replace('-', '_')}"
        return plain + sign + value if plain in self._option_string_actions else word
