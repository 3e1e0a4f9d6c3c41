"""How all programs talk to their user: a parser for dataclasses, scores in one line, entries of the results."""

from __future__ import annotations

import argparse
import inspect
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from accelerate import PartialState

import favor
from favor_command.program import Formatter, Parser, check_new, did_you_mean, program, started_together

__all__ = ["DataclassParser", "Formatter", "Parser", "check_new", "did_you_mean", "program", "started_together"]

PACKAGES = ("favor", "torch", "transformers", "accelerate", "datasets")
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class DataclassParser(Parser):
    """A parser whose options are the fields of dataclasses, in one group per class that adds fields.

    A field is a `str`, `int`, `float` or `bool`, one of these or None, or a list of them. A field without a default is
    required. The metadata of a field are arguments of `add_argument`, such as `help`.
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
    settings: dict[str, Any] = {"help": field.metadata["help"]}
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


def _peak_memory(device: torch.device) -> int:
    """Gives peak bytes: allocated on this process's GPU in this training, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def load_line(model: Any, folder: Path | str, auto_class: type | None = None) -> str:
    """Says in one line how to load a saved model, with a class of transformers or its own."""
    return f'load it, after import favor, with {(auto_class or type(model)).__name__}.from_pretrained("{folder}")'


def describe(scores: dict[str, float], std: dict[str, float | None] | None = None) -> str:
    """Writes scores in one line: `accuracy 0.8410 ± 0.0100, f1 0.9001 ± 0.0080`."""
    deviations = {name: f" ± {deviation:.4f}" for name, deviation in (std or {}).items() if deviation is not None}
    return ", ".join(f"{name} {value:.4f}{deviations.get(name, '')}" for name, value in scores.items())


def of_training(run: Any, model: Any) -> dict[str, Any]:
    """Gives the entries of the results that all trainings, of `loop.Run`, have."""
    accelerator, progress, config = run.accelerator, run.progress, model.config
    backend = config._attn_implementation
    return {
        "train_loss": statistics.fmean(progress.losses),
        "steps": progress.step,
        "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
        "peak_memory_bytes": _peak_memory(accelerator.device),
        "history": progress.history,
        "attn_implementation": backend,
        "favor": getattr(config, "favor_parts", None) or (config.favor if backend in favor.BACKENDS else None),
        "mixed_precision": accelerator.mixed_precision,
    }


def of_program(module: str, words: Sequence[str] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives the entries of the results that say how they were made; without words the command is this process's."""
    return {
        "arguments": arguments,
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if words is None else words)]),
        "num_processes": PartialState().num_processes,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }
