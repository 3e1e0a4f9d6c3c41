"""How the models of a table were adapted to their attention: commands, minutes, errors and learning curves."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from favor.eval.common.report import local_names, table

STAGES = ("closed form", "attention", "exact heads", "model")
PARTS = 10


def read(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads what `favor.train.distill` wrote into its folders, without the losses of single steps.

    Args:
        folders: finished ones.

    Returns:
        by name of the folder: command, minutes, relative error of the hidden states after each stage, numbers of exact
        heads and of all heads, and the mean losses of the tenths of each stage that was run.
    """
    found = {}
    for folder in folders:
        results = json.loads((Path(folder) / "all_results.json").read_text())
        layers = (results["layers"] or {}).values()
        losses = {name: tenths(results[f"{name}_loss"]) for name in ("attention", "model")}
        found[Path(folder).absolute().name] = {
            "command": shlex.join(local_names(shlex.split(results["command"]))),
            "minutes": results["seconds"] / 60,
            "errors": results["errors"],
            "exact_heads": sum(len(layer.get("exact_heads", ())) for layer in layers),
            "heads": sum(layer.get("key_heads", 0) for layer in layers),
            "losses": {name: own for name, own in losses.items() if own},
        }
    return found


def tenths(losses: Sequence[float]) -> list[float]:
    """Gives the means of ten parts that are equally long, up to one step; without steps, nothing."""
    bounds = [place * len(losses) // PARTS for place in range(PARTS + 1)]
    parts = [losses[begin:end] for begin, end in pairwise(bounds)]
    return [statistics.fmean(part) for part in parts if part]


def lines(adapted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Writes commands, errors and learning curves as Markdown.

    Args:
        adapted: from `read`.
    """
    errors = [
        [
            f"`{name}`",
            f"{own['minutes']:.0f}",
            f"{own['exact_heads']} of {own['heads']}" if own["heads"] else "",
            *(f"{own['errors'][stage]:.4f}" if stage in own["errors"] else "" for stage in STAGES),
        ]
        for name, own in adapted.items()
    ]
    curves = [
        [f"`{name}`, {stage}", *(f"{loss:.4f}" for loss in losses)]
        for name, own in adapted.items()
        for stage, losses in own["losses"].items()
        if len(losses) == PARTS
    ]
    return [
        "",
        "## Adaptation",
        "",
        *(f"- `{name}`: `{own['command']}`" for name, own in adapted.items()),
        "",
        "Relative error of the hidden states on samples that were held out, after each stage:",
        "",
        *table(["model", "minutes", "exact heads", *STAGES], errors),
        "",
        "Learning curves, the mean loss of each tenth of the steps. Attention: relative error of the output of a head.",
        "Model: relative squared error of the hidden states, with the divergence of predictions if there are any.",
        "",
        *table(["model, stage", *(str(part + 1) for part in range(PARTS))], curves),
    ]
