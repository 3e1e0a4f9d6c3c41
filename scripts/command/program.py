"""How all programs talk to their user: one parser, errors in one line, after Ctrl-C a line that says how to continue.

Nothing heavy is imported here, so that --help is fast.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError

DEBUG = "--debug"
# Exit codes: that of argparse for an error that a user can mend, and that of a shell for Ctrl-C.
MENDABLE, STOPPED = 2, 130
COMMAND = "favor"
ERRORS = (ValueError, OSError, ImportError, FloatingPointError, SafetensorError)
# Set by accelerate in the processes that it starts. If one of them fails, accelerate prints a traceback of its own.
LAUNCHED = "ACCELERATE_MIXED_PRECISION"
# Seconds that the other processes wait: by then the first one has said what is wrong and the launcher has ended them.
PATIENCE = 2.0


def program(name: str, main: Callable[[], Any]) -> Callable[[], None]:
    """Makes the function that a command line starts.

    The function exits with the number that `main` returns, or with 0 if `main` returns no number. An error that a user
    can mend gives one line and exit code 2. Ctrl-C gives one line and exit code 130. With `--debug` both show their
    traceback.

    Args:
        name: the program's name, for its messages.
        main: the program; it reads the arguments of this process itself.
    """

    def cli() -> None:
        debug = DEBUG in sys.argv[1:]
        # The program does not know --debug, and the command recorded in its results does not have it.
        sys.argv[1:] = [word for word in sys.argv[1:] if word != DEBUG]
        with in_one_line_errors(called(name), debug):
            result = main()
        sys.exit(result if isinstance(result, int) else 0)

    return cli


@contextmanager
def in_one_line_errors(name: str, debug: bool, stopped: str = "stopped") -> Iterator[None]:
    """Ends this process with one line for an error that a user can mend, and for Ctrl-C.

    Args:
        name: the program's name, for its messages.
        debug: show tracebacks instead.
        stopped: the message for a Ctrl-C that has no message of its own.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if debug:
            raise
        # Start a new line: neither ^C nor a progress bar ends its line.
        end(f"\n{name}: {str(error) or stopped}", STOPPED)
    except ERRORS as error:
        if debug:
            raise
        end(f"{name}: error: {in_one_line(error)} ({DEBUG} shows where)", MENDABLE)


def called(name: str) -> str:
    """Gives the name by which the user called a program: `favor ...` if the command `favor` started it."""
    return sys.argv[0] if sys.argv[0].startswith(f"{COMMAND} ") else name


def end(message: str, code: int) -> NoReturn:
    """Prints a last line and ends this process; of several processes with this line, only the first one prints it."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(PATIENCE)
    launched = "; the lines below are from accelerate launch" if LAUNCHED in os.environ else ""
    print(message + launched, file=sys.stderr, flush=True)
    sys.exit(code)


def in_one_line(error: Exception) -> str:
    """Gives the message of an error, without line breaks and without the error number of the operating system."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def check_new(folder: Path) -> None:
    """Raises ValueError if a path is not a new or empty folder, so that nothing in it is replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"expected a new folder or an empty one, got {folder}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Makes a question with the nearest known word, to append to an error; empty if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows a description unchanged, and adds the default of an option whose help does not say it."""

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
    """A parser whose errors are one line, with the nearest known option after an unknown one.

    An option may be written with hyphens or underscores; help lists it with underscores.

    Args:
        program: the program's name in messages.
        text: the program's docstring, shown unchanged.
        abbreviations: whether the first letters of an option are enough.
    """

    def __init__(self, program: str, text: str | None, *, abbreviations: bool = False) -> None:
        super().__init__(prog=called(program), description=text, formatter_class=Formatter, allow_abbrev=abbreviations)
        self.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses words in which an option may have hyphens in place of underscores."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses a command line; ends the program if a word is unknown."""
        found, rest = self.parse_known_args(args, namespace)
        self.refuse(rest)
        return found

    def refuse(self, rest: Sequence[str], others: Iterable[str] = ()) -> None:
        """Ends the program if some words are unknown.

        Args:
            rest: the unknown words.
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
        """Gives the names of all options."""
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
