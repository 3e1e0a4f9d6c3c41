"""Entries of the results of every training: memory, versions, and scores in one line."""

from __future__ import annotations

import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

PACKAGES = ("favor", "torch", "transformers", "accelerate", "datasets", "evaluate")


def peak_memory(device: torch.device) -> int:
    """Gives peak bytes: allocated on this process's GPU in this training, or resident in this process on a CPU.

    Resident memory has its peak since the start of the process, so a later seed cannot show less than an earlier one.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    """Gives the versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def load_line(model: PreTrainedModel, folder: Path | str, auto_class: type | None = None) -> str:
    """Says in one line how to load the saved model.

    Args:
        model: the model that was saved.
        folder: where it was saved.
        auto_class: class of transformers that loads it. Default None: the model's own class.
    """
    return f'load it, after import favor, with {(auto_class or type(model)).__name__}.from_pretrained("{folder}")'


def describe(scores: dict[str, float], std: dict[str, float | None] | None = None) -> str:
    """Writes scores in one line: `accuracy 0.8410 ± 0.0100, f1 0.9001 ± 0.0080`."""
    deviations = std or {}
    parts = []
    for name, value in scores.items():
        deviation = deviations.get(name)
        parts.append(f"{name} {value:.4f}" + (f" ± {deviation:.4f}" if deviation is not None else ""))
    return ", ".join(parts)
