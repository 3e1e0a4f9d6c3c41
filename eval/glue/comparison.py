"""The report of one classifier with several kinds of attention: scores side by side, and what short samples run."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from favor.eval.common import report
from favor.train.text.glue_data import GlueData

_CHANGED = {False: "samples with another prediction than with exact attention", True: "mean change of a score"}


@dataclass
class Samples:
    """The development sets of a task as token numbers.

    Attributes:
        data: the task and its texts.
        encoded: token numbers and masks of each split.
        tokenizer: that of the model.
        rows: the output of the model for each label.
        batch_size: samples of a forward pass.
    """

    data: GlueData
    encoded: dict[str, Any]
    tokenizer: Any
    rows: list[int]
    batch_size: int

    def lengths(self, split: str) -> list[int]:
        """Gives the number of tokens of each sample."""
        return [sum(mask) for mask in self.encoded[split]["attention_mask"]]

    @property
    def all_lengths(self) -> list[int]:
        """The numbers of tokens of all splits, in ascending order."""
        return sorted(length for split in self.encoded for length in self.lengths(split))


@dataclass(frozen=True)
class Row:
    """One kind of attention, and what the model gives with it.

    Attributes:
        attention: its name and options, as on the command line.
        options: all options of the backend; None for exact attention.
        exact: part of the samples for which the backend runs softmax attention, because they are short.
        metrics: of the task, by name.
        logits: of each split `[samples, labels]`, in the order of the task's labels.
        seconds: of all forward passes.
        note: why samples run softmax attention; empty if none does.
    """

    attention: str
    options: dict[str, Any] | None
    exact: float
    metrics: dict[str, float]
    logits: dict[str, torch.Tensor]
    seconds: float
    note: str = ""

    def changed(self, exact: Row, is_regression: bool) -> float:
        """Gives the part of the samples with another prediction than exact attention, or the mean change of a score."""
        pairs = [(own, exact.logits[split]) for split, own in self.logits.items()]
        if is_regression:
            return torch.cat([(own - other).abs() for own, other in pairs]).mean().item()
        return torch.cat([own.argmax(-1) != other.argmax(-1) for own, other in pairs]).float().mean().item()

    def largest_change(self, exact: Row) -> float:
        """Gives the largest difference of a logit from that of exact attention."""
        return max((own - exact.logits[split]).abs().max().item() for split, own in self.logits.items())


def report_lines(arguments: argparse.Namespace, samples: Samples, rows: list[Row], remark: str) -> list[str]:
    """Writes the report: model, data and lengths, what short samples run, and one line per attention.

    Args:
        arguments: of the program.
        samples: of the task.
        rows: exact attention first.
        remark: on the labels of the model.
    """
    data, lengths = samples.data, samples.all_lengths
    cut = sum(length >= arguments.max_length for length in lengths)
    numbers = ", ".join(f"{split} {len(part)}" for split, part in samples.encoded.items())
    missing = [split for split in data.task.eval_splits if split not in data.evaluation]
    sources = ", ".join(data.sources[split] for split in data.evaluation)
    return [
        f"# GLUE, {data.task.folder}: a classifier with exact and with linear attention, x 100",
        "",
        *([arguments.note, ""] if arguments.note else []),
        f"- Model: {report.local_names([arguments.model_name_or_path])[0]}, as it is: nothing was trained",
        *([f"- Labels: {remark}"] if remark else []),
        f"- Data: {sources}; samples: {numbers}{', the first ones' * (arguments.max_eval_samples is not None)}",
        *([f"- Not there, so not evaluated: {', '.join(missing)}"] if missing else []),
        *([f"- Documents: {arguments.distractors} texts of other samples in each"] if arguments.distractors else []),
        f"- Tokens of a sample: {lengths[0]} to {lengths[-1]}, median {statistics.median(lengths):g}; "
        + (f"{cut} reach max_length = {arguments.max_length}, and lose what is longer" if cut else "none is cut off"),
        *(f"- {row.note}" for row in rows if row.note),
        "",
        *table_lines(rows, data.task.is_regression),
        "",
        "Score, and its difference from exact attention (more is better). *Exact*: samples that run exact attention,",
        f"because they are short. *Changed*: {_CHANGED[data.task.is_regression]}. *Logit*: largest",
        "change of an output. Seconds: all forward passes (less is better).",
    ]


def table_lines(rows: list[Row], is_regression: bool) -> list[str]:
    """Writes the table of the report, exact attention first."""
    first = rows[0]
    head = ["Attention", "exact, %", *(cell for name in first.metrics for cell in (name, "difference"))]
    cells = []
    for row in rows:
        own = [f"`{row.attention}`", f"{100 * row.exact:.0f}"]
        for name, value in row.metrics.items():
            own += [f"{100 * value:.2f}", "" if row is first else f"{100 * (value - first.metrics[name]):+.2f}"]
        if row is first:
            own += ["", ""]
        else:
            changed = row.changed(first, is_regression)
            own += [f"{changed:.3f}" if is_regression else f"{100 * changed:.1f} %", f"{row.largest_change(first):.2g}"]
        cells.append([*own, f"{row.seconds:.1f}"])
    return report.table([*head, "changed", "logit", "seconds"], cells)


def content_of(arguments: argparse.Namespace, samples: Samples, rows: list[Row], remark: str) -> dict[str, Any]:
    """Gives the rows, labels and lengths of the report as data; arguments as for `report_lines`."""
    task, first, lengths = samples.data.task, rows[0], samples.all_lengths
    return {
        "task_name": task.name,
        "model": report.local_names([arguments.model_name_or_path])[0],
        "labels": dict(zip(task.labels or ("score",), samples.rows, strict=True)),
        "labels_remark": remark,
        "sources": {split: samples.data.sources[split] for split in samples.encoded},
        "samples": {split: len(part) for split, part in samples.encoded.items()},
        "tokens": {"least": lengths[0], "median": statistics.median(lengths), "most": lengths[-1]},
        "max_length": arguments.max_length,
        "rows": [
            {
                "attention": row.attention,
                "options": row.options,
                "exact_samples": row.exact,
                "metrics": row.metrics,
                "difference": {name: value - first.metrics[name] for name, value in row.metrics.items()},
                "changed": row.changed(first, task.is_regression),
                "largest_logit_change": row.largest_change(first),
                "seconds": row.seconds,
                "note": row.note,
            }
            for row in rows
        ],
    }
