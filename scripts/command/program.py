"""How all programs talk to their user: one parser, errors in one line, after Ctrl-C a line that says how to continue.

Nothing heavy is imported here, so that --help is fast. Options that were renamed are errors that say the new name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
# Old names of options, each with its new ones; the one that the program has is meant.
RENAMED: dict[str, tuple[str, ...]] = {
    "allow_pickle_weights": ("trust_remote_code",),
    "arms": ("backends",),
    "backend": ("attn_implementation",),
    "batch_seconds": ("per_device_eval_batch_seconds", "per_device_train_batch_seconds"),
    "batch_size": ("per_device_train_batch_size", "per_device_eval_batch_size"),
    "cache": ("runs_file",),
    "contexts": ("lengths",),
    "converted": ("adapted",),
    "data_dir": ("glue_dir",),
    "epochs": ("num_train_epochs",),
    "eval_file": ("validation_file",),
    "features": ("families",),
    "length": ("lengths", "max_length"),
    "max_batch_seconds": ("per_device_train_batch_seconds",),
    "max_quadratic_minutes": ("max_exact_minutes",),
    "max_samples": ("max_eval_samples",),
    "memory_limit": ("max_gigabytes",),
    "model": ("model_types", "model_name_or_path"),
    "models": ("model_types", "model_name_or_path"),
    "num_workers": ("dataloader_num_workers",),
    "out": ("output_dir",),
    "output": ("output_file",),
    "results": ("results_dir", "output_dir"),
    "seconds": ("seconds_per_cell",),
    "seeds": ("seed",),
    "splits": ("eval_splits", "shuffles"),
    "text_file": ("text",),
    "text": ("texts",),
    "texts": ("rescored_texts",),
    "train_samples": ("max_train_samples",),
    "tune": ("choose_on",),
    "tune_beam_size": ("choose_beam_size",),
    "tune_utterances": ("choose_samples",),
    "variants": ("backends",),
}


def program(name: str, main: Callable[[], Any], several: bool = False) -> Callable[[], None]:
    """Makes the function that a command line starts: `main`, which reads the arguments of this process itself.

    Without `several` it ends with an error in several processes, since each would do all the work and write all files.
    """

    def cli() -> None:
        debug = DEBUG in sys.argv[1:]
        # The program does not know --debug, and the command recorded in its results does not have it.
        sys.argv[1:] = [word for word in sys.argv[1:] if word != DEBUG]
        with in_one_line_errors(called(name), debug):
            if (number := started_together()) > 1 and not several:
                raise ValueError(f"runs in one process, got {number}: leave out accelerate launch or torchrun")
            result = main()
        sys.exit(result if isinstance(result, int) else 0)

    return cli


def started_together() -> int:
    """Counts the processes that accelerate launch, or torchrun, started with this one; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


@contextmanager
def in_one_line_errors(name: str, debug: bool, stopped: str = "stopped") -> Iterator[None]:
    """Ends this process with one line for an error that a user can mend, and for Ctrl-C; with `debug` it does not."""
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
    names, bare = {_bare(str(name)): str(name) for name in known}, _bare(word)
    near = difflib.get_close_matches(bare, names, n=1, cutoff=0.6)
    longer = [name for name in names if _is_part(bare, name) or _is_part(name, bare)]
    found = near or sorted(longer, key=lambda name: abs(len(name) - len(bare)))
    return f": did you mean {names[found[0]]}?" if found else ""


def renamed(name: str, known: Collection[str]) -> str | None:
    """Gives the new name of an option, without hyphens; None for one that is still known, or was never one."""
    return None if name in known else next((new for new in RENAMED.get(name, ()) if new in known), None)


def in_new_words(saved: Sequence[str], words: Sequence[str]) -> list[str]:
    """Gives a saved command line with the names of the options in another one, if they were renamed since."""
    known = [word[2:] for word in words if word.startswith("--")]
    return [f"--{renamed(word[2:], known) or word[2:]}" if word.startswith("--") else word for word in saved]


def _bare(word: str) -> str:
    return word.lower().lstrip("-").replace("-", "_")


def _is_part(part: str, name: str) -> bool:
    return len(part) > 3 and f"_{part}_" in f"_{name}_"


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
    """A parser whose errors are one line, with the nearest known name after an unknown one.

    An option may be written with hyphens or underscores; help lists it with underscores. The old name of an option is
    an error that says the new one. The help shows the program's docstring unchanged.
    """

    def __init__(self, program: str, text: str | None) -> None:
        super().__init__(prog=called(program), description=text, formatter_class=Formatter, allow_abbrev=False)
        self.places: list[tuple[argparse.Action, bool]] = []
        self.add_argument(DEBUG, action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")

    def add_place(self, name: str, dest: str, text: str, needed: bool = True, nargs: str | None = None) -> None:
        """Adds an option whose name may be left out: a word that belongs to no other option is its value."""
        text += f"; --{name} may be left out" + " (required)" * needed
        action = self.add_argument(f"--{name}", dest=dest, metavar=dest.upper(), nargs=nargs, help=text)
        self.places.append((action, needed))
        shown = dest.upper() + " ..." * (nargs is not None)
        before = (self.usage or self.prog).removesuffix(" [OPTION ...]")
        self.usage = f"{before} {shown if needed else f'[{shown}]'} [OPTION ...]"

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses words in which an option may have hyphens in place of underscores; fills the places."""
        words = sys.argv[1:] if args is None else args
        self._refuse_old_names(words, self.options())  # first, since the new name may be required
        found, rest = super().parse_known_args([self._spelled(word) for word in words], namespace)
        for action, needed in self.places:
            count = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
            if count and getattr(found, action.dest) is None:
                taken = count if action.nargs else 1
                setattr(found, action.dest, rest[:taken] if action.nargs else rest[0])
                rest = rest[taken:]
            if needed and getattr(found, action.dest) is None:
                self.error(f"the following arguments are required: {action.option_strings[0]}")
        return found, rest

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses a command line; ends the program if a word is unknown."""
        found, rest = self.parse_known_args(args, namespace)
        self.refuse(rest)
        return found

    def refuse(self, rest: Sequence[str], others: Iterable[str] = ()) -> None:
        """Ends the program if some words are unknown; options of another program may have been possible too."""
        if not rest:
            return
        options = [word.split("=")[0] for word in rest if word.startswith("-")]
        if not options:
            self.error(f"did not expect {' '.join(rest)!r}")
        known = [*self.options(), *others]
        self._refuse_old_names(options, known)
        self.error(f"unknown option {options[0]}{did_you_mean(options[0], known) or ': --help lists all'}")

    def check_passed_on(self, rest: Sequence[str], other: Parser) -> None:
        """Ends the program if words that it passes on to another program are none of its options."""
        names = [word for word in rest[:1] if not word.startswith("-")]
        names += [word for word in map(other._spelled, rest) if word.startswith("--") and word != "--"]
        known = other.options()
        self.refuse([word for word in names if word.split("=")[0] not in known], known)

    def _refuse_old_names(self, words: Iterable[str], known: Sequence[str]) -> None:
        for word in (word.split("=")[0] for word in words if word.startswith("--")):
            new = renamed(_bare(word), [name[2:] for name in known])
            if new is not None:
                self.error(f"{word} is now --{new}")

    def options(self) -> list[str]:
        """Gives the names of all options."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line."""
        end(f"{self.prog}: error: {message}", MENDABLE)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Adds the nearest choice to the error about a value that is none."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), action.choices or ())
            raise

    def _spelled(self, word: str) -> str:
        name, sign, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        plain = f"--{name[2:].replace('-', '_')}"
        return plain + sign + value if plain in self._option_string_actions else word
