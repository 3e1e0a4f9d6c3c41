"""How the models of a table were adapted to their attention: commands, minutes, errors and learning curves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from favor.eval.common.launch import Backend
from favor.eval.common.report import local_names, table

STAGES = ("closed form", "attention", "exact heads", "model")
PARTS = 10


def read(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads what `favor.train.distill` wrote into its folders.

    Args:
        folders: finished ones.

    Returns:
        by label of the row: command, minutes since the run began or was resumed, relative error of the hidden states
        after each stage, number of key heads that are exact, and the losses of each stage of ten steps or more, as
        means of ten parts.

    Raises:
        ValueError: for the folder of an older version, which lacks some of it.
    """
    found = {}
    for folder in folders:
        results = json.loads((Path(folder) / "all_results.json").read_text())
        missing = {"command", "seconds", "errors", "layers", "attention_loss", "model_loss"} - results.keys()
        if missing:
            raise ValueError(
                f"{folder}/all_results.json has no {', '.join(sorted(missing))}: run favor.train.distill again"
            )
        layers = (results["layers"] or {}).values()
        losses = {stage: results[f"{stage}_loss"] for stage in ("attention", "model")}
        found[Backend.adapted(folder).label] = {
            "command": shlex.join(local_names(shlex.split(results["command"]))),
            "minutes": results["seconds"] / 60,
            "errors": results["errors"],
            "exact_heads": sum(len(layer.get("exact_heads", ())) for layer in layers),
            "losses": {stage: parts(own) for stage, own in losses.items() if len(own) >= PARTS},
        }
    return found


def parts(losses: Sequence[float]) -> list[float]:
    """Cuts losses into ten parts, whose lengths differ by at most one step, and gives their means."""
    return [float(part.mean()) for part in np.array_split(losses, PARTS)]


def lines(adapted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Writes the section of the report.

    Args:
        adapted: from `read`.
    """
    errors = [
        [
            f"`{name}`",
            f"{own['minutes']:.0f}",
            str(own["exact_heads"]),
            *(f"{own['errors'][stage]:.4f}" if stage in own["errors"] else "" for stage in STAGES),
        ]
        for name, own in adapted.items()
    ]
    curves = [
        [f"`{name}`, {stage}", *(f"{loss:.4f}" for loss in losses)]
        for name, own in adapted.items()
        for stage, losses in own["losses"].items()
    ]
    about = (
        "Learning curves: the mean loss of each tenth of the steps. Attention: relative error of the output of a head. "
        "Model: relative squared error of the hidden states and divergence of the predictions, as the weights in the "
        "command say."
    )
    return [
        "",
        "## Adaptation",
        "",
        *(f"- `{name}`: `{own['command']}`" for name, own in adapted.items()),
        "",
        "Relative error of the hidden states on samples that were held out, after each stage:",
        "",
        *table(["model", "minutes", "number of exact heads", *(f"after {stage}" for stage in STAGES)], errors),
        *(["", about, "", *table(["model, stage", *map(str, range(1, PARTS + 1))], curves)] if curves else []),
    ]
