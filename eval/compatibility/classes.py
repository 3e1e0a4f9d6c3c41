"""Finds the model classes of the installed transformers, and which modeling files hand attention to a backend."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import transformers
from transformers import PreTrainedModel

from favor.train.common.program import did_you_mean

# A model with a head has the attention of its body: if a file has bodies, models with heads are left out.
_HEAD = re.compile(r"For[A-Z]|With|Pretrain|LMHead|DoubleHeads|Wrapper$")


@dataclass(frozen=True)
class Candidate:
    """A model class that may run with a backend.

    Attributes:
        family: its folder in transformers.
        module: its modeling module.
        name: name of the class.
        dispatches: whether its modeling file uses transformers' AttentionInterface at all.
    """

    family: str
    module: str
    name: str
    dispatches: bool

    def load(self) -> type[PreTrainedModel]:
        """Gives the class."""
        found: type[PreTrainedModel] = getattr(importlib.import_module(self.module), self.name)
        return found


@lru_cache(maxsize=1)
def modeling_files() -> dict[str, tuple[Path, bool]]:
    """Gives, by module name, the path of every modeling file and whether it hands attention to a backend."""
    folder = Path(transformers.__file__).parent / "models"
    files = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text()
        if re.search("ALL_ATTENTION_FUNCTIONS|[Aa]ttention|softmax", text):
            files[f"transformers.models.{path.parent.name}.{path.stem}"] = (path, "ALL_ATTENTION_FUNCTIONS" in text)
    return files


def candidates(families: list[str] | None = None) -> tuple[list[Candidate], dict[str, str]]:
    """Lists the model classes to run: the bodies of each modeling file, or its first class if there is no body.

    Causal language models are always among them.

    Args:
        families: folders of transformers, such as "bert"; None for all.

    Returns:
        The classes, and for each module that cannot be imported here the reason.

    Raises:
        ValueError: for a family that transformers does not have.
    """
    files = modeling_files()
    known = {path.parent.name for path, _ in files.values()}
    if families and (unknown := sorted(set(families) - known)):
        near = did_you_mean(unknown[0], known)
        raise ValueError(f"transformers {transformers.__version__} has no models called {', '.join(unknown)}{near}")
    found, missing = [], {}
    for module, (path, dispatches) in files.items():
        if families and path.parent.name not in families:
            continue
        try:
            names = _model_classes(module)
        except ImportError as error:
            missing[module] = str(error).strip().splitlines()[0]
            continue
        bodies = [name for name in names if not _HEAD.search(name)]
        kept = bodies or names[:1]
        kept += [name for name in names if name.endswith("ForCausalLM") and name not in kept]
        found += [Candidate(path.parent.name, module, name, dispatches) for name in kept]
    return found, missing


def _model_classes(module: str) -> list[str]:
    found = importlib.import_module(module)
    return [
        name
        for name, value in vars(found).items()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module
        and value.config_class is not None
        and not name.endswith("PreTrainedModel")
    ]
