"""Metrics as modules of the `evaluate` library, kept here so that no network is needed."""

from __future__ import annotations

from pathlib import Path

import evaluate

GLUE = Path(__file__).parent / "glue"


def load_glue_metric(task_name: str) -> evaluate.EvaluationModule:
    """Loads GLUE's metrics for one task: `load_glue_metric("mrpc").compute(predictions=..., references=...)`.

    Raises:
        ValueError: for an unknown task.
    """
    # In memory: evaluations that run at the same time would otherwise share one cache file.
    return evaluate.load(str(GLUE), task_name, keep_in_memory=True)
