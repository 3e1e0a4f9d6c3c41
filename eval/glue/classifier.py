"""A classifier that was fine-tuned before, on the development sets of its task: exact attention and backends."""

from __future__ import annotations

import argparse
import bisect
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import DataCollatorWithPadding
from transformers.utils import logging

import favor
from favor import registry
from favor.config import FavorConfig, feature_family
from favor.eval.approximation.variants import parse
from favor.eval.common import report
from favor.eval.common.processes import in_turns, processes
from favor.eval.common.program import device_or_default
from favor.train.common.arguments import DataArguments, ModelArguments
from favor.train.common.pretrained import check_positions, load_exact, load_tokenizer
from favor.train.text.glue_data import GlueData, get_task, load_glue, with_distractors
from favor.train.text.glue_models import check_samples, is_classifier, label_rows, names_of, tokenized
from favor.train.text.glue_report import glue_metrics, named
from favor_command.saved import read_config

EXACT, DEFAULT = "sdpa", "landmark"
OUTPUT = ("--results_dir", "--name")


@dataclass
class Samples:
    """The development sets of a task as token numbers."""

    data: GlueData
    encoded: dict[str, Any]
    tokenizer: Any
    rows: list[int]
    remark: str
    batch_size: int

    @property
    def all_lengths(self) -> list[int]:
        """The numbers of tokens of all splits, in ascending order."""
        return sorted(length for part in self.encoded.values() for length in lengths_of(part))


@dataclass(frozen=True)
class Row:
    """One kind of attention, and what the model gives with it."""

    attention: str
    options: dict[str, Any] | None
    exact: float
    metrics: dict[str, float]
    logits: dict[str, torch.Tensor]
    seconds: float
    note: str = ""

    def compared(self, first: Row, is_regression: bool) -> dict[str, Any]:
        """Gives the row as data, with its differences from exact attention, whose row is `first`.

        "changed" is the part of the samples with another prediction, in a regression the mean change of a score.
        """
        own, exact = (torch.cat(list(row.logits.values())) for row in (self, first))
        changed = (own - exact).abs() if is_regression else (own.argmax(-1) != exact.argmax(-1)).float()
        return {
            "attention": self.attention,
            "options": self.options,
            "exact_samples": self.exact,
            "metrics": self.metrics,
            "difference": {name: value - first.metrics[name] for name, value in self.metrics.items()},
            "changed": changed.mean().item(),
            "largest_logit_change": (own - exact).abs().max().item(),
            "seconds": self.seconds,
            "note": self.note,
        }


def lengths_of(encoded: Any) -> list[int]:
    """Gives the number of tokens of each sample of a split."""
    return [sum(mask) for mask in encoded["attention_mask"]]


def load_samples(
    path: str,
    task_name: str,
    data_dir: str | None,
    *,
    label_names: Sequence[str] | None = None,
    max_length: int = 128,
    max_eval_samples: int | None = None,
    distractors: int = 0,
    batch_size: int = 64,
) -> Samples:
    """Reads the development sets of a task, and finds the labels of the model."""
    task, config = get_task(task_name), read_config(path)
    if not config.architectures or not is_classifier(config):
        raise ValueError(
            f"expected a classifier that was fine-tuned on {task.folder}, got {path}, which holds a "
            f"{(config.architectures or ['model that names no class'])[0]}: favor train glue fine-tunes one"
        )
    names = label_names or names_of(config)
    if len(names) != config.num_labels:
        raise ValueError(f"--label_names needs one name for each of the {config.num_labels} outputs, got {len(names)}")
    rows, remark = label_rows(names, task, path, "if they mean the same, name its outputs in order by --label_names")
    options = DataArguments(task_name=task.name, max_length=max_length, max_eval_samples=max_eval_samples)
    data = load_glue(task.name, data_dir, train=False)
    data.keep_first(None, max_eval_samples)
    texts = {split: with_distractors(part, task, distractors) for split, part in data.evaluation.items()}
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=path))
    encoded = {split: tokenized(part, task, tokenizer, options) for split, part in texts.items()}
    check_samples(encoded.values(), task, tokenizer)
    return Samples(data, encoded, tokenizer, rows, remark.replace(path, *report.local_names([path])), batch_size)


def settings_of(arguments: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Lists the backends to compare: name of the row, backend, and the options that are not those of the model.

    A backend that the model was saved with keeps its saved options, others begin with the defaults.
    """
    config = read_config(arguments.model_name_or_path)
    known = getattr(config, "favor", None) or {}
    saved = known.get("attn_implementation", config._attn_implementation)
    found = []
    texts = arguments.backends or [saved if saved in registry.BACKENDS else DEFAULT]
    for text in (each for each in texts if each != EXACT):  # that is the first row in any case
        backend, features, options = parse(re.sub(r":(\d+)$", r":num_features=\1", text))
        start = {} if backend == saved else FavorConfig().to_dict()
        named_ones = ({} if features is None else {"features": features}) | options
        given = start | named_ones
        feature_family(backend, FavorConfig.from_dict(given), list(named_ones))  # refuses what it does not read
        bounds = (() if "exact_below" in options else arguments.exact_below) or ()
        numbers = {n: n if n == "auto" else int(n) for n in bounds}
        found += [(f"{text}, exact_below {n}", backend, given | {"exact_below": own}) for n, own in numbers.items()]
        found += [] if bounds else [(text, backend, given)]
    return found


def compare(arguments: argparse.Namespace, samples: Samples) -> list[Row]:
    """Evaluates the model with exact attention, then with each backend; prints each row when it is there."""
    device = device_or_default(None)
    rows = []
    for name, backend, options in [(EXACT, EXACT, {}), *settings_of(arguments)]:
        model = load_exact(arguments.model_name_or_path).to(device).eval()
        check_positions(model, arguments.max_length)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = samples.tokenizer.pad_token_id
        if backend != EXACT:
            favor.configure(model, backend, **options)
        rows.append(evaluate(model, samples, name))
        scores = ", ".join(f"{metric} {100 * value:.2f}" for metric, value in rows[-1].metrics.items())
        processes().print(f"{name}: {scores}, {rows[-1].seconds:.1f} s", flush=True)
    return rows


def evaluate(model: Any, samples: Samples, name: str) -> Row:
    """Evaluates the model with its present attention.

    Samples of about the same length share a batch, and no batch has both samples that run exact attention because they
    are short and samples that do not.
    """
    is_exact = model.config._attn_implementation == EXACT
    bound, note = (0, "") if is_exact else shortness(model, samples.all_lengths, name)
    task = samples.data.task
    metrics: dict[str, float] = {}
    logits, seconds, exact = {}, 0.0, 0
    for split, encoded in samples.encoded.items():
        lengths = lengths_of(encoded)
        exact += sum(length < bound for length in lengths)
        logits[split], took = forward(model, samples, encoded, batches(lengths, bound, samples.batch_size))
        seconds += took
        guesses = logits[split].squeeze(-1) if task.is_regression else logits[split].argmax(-1)
        metrics |= named(glue_metrics(task, guesses.numpy(), encoded["label"][:]), split)
    options = None if is_exact else dict(model.config.favor)
    return Row(name, options, 1.0 if is_exact else exact / len(samples.all_lengths), metrics, logits, seconds, note)


def batches(lengths: Sequence[int], bound: int, size: int) -> list[list[int]]:
    """Divides samples into batches of similar lengths; those shorter than the bound are in batches of their own."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    first = sum(length < bound for length in lengths)
    parts = (order[:first], order[first:])
    return [part[start : start + size] for part in parts for start in range(0, len(part), size)]


@torch.no_grad()
def forward(model: Any, samples: Samples, encoded: Any, groups: list[list[int]]) -> tuple[torch.Tensor, float]:
    """Computes the logits `[samples, labels]` of a split, in its order, and gives the seconds that this takes.

    The samples of each group share a batch. Several processes share the groups; the seconds are the sum of theirs.
    """
    plain = encoded.remove_columns("label")
    collate: Any = DataCollatorWithPadding(samples.tokenizer)
    found = torch.empty(len(plain), len(samples.rows))
    model(**collate([plain[place] for place in groups[-1]]).to(model.device))  # warms up

    def timed(group: list[int]) -> tuple[torch.Tensor, float]:
        inputs = collate([plain[place] for place in group]).to(model.device)
        start = time.perf_counter()
        return model(**inputs).logits[:, samples.rows].float().cpu(), time.perf_counter() - start

    seconds = 0.0
    for group, (logits, took) in in_turns(groups, timed):
        found[group] = logits
        seconds += took
    if not found.isfinite().all():
        raise FloatingPointError(f"a logit of {type(model).__name__} is not finite")
    return found, seconds


def shortness(model: Any, lengths: Sequence[int], name: str) -> tuple[int, str]:
    """Finds how long a sample must be for the backend to run, and says what happens to shorter ones."""

    def runs(length: int) -> bool:
        return any(layer.runs not in ("exact", "local") for layer in favor.describe(model, length).layers)

    distinct = sorted(set(lengths))
    place = bisect.bisect_left(distinct, True, key=runs)
    if place == len(distinct):
        bound, longest = distinct[-1] + 1, distinct[-1]
        layers = favor.describe(model, longest).layers
        reason = next((layer.why for layer in layers if layer.runs == "exact"), "all layers are local")
        advice = "; --exact_below 0 shows the backend itself" if "exact_below" in reason else ""
        return bound, (
            f"`{name}` runs exact attention on ALL samples, of which the longest has {longest} tokens ({reason}), so "
            f"its row is that of exact attention{advice}"
        )
    bound = distinct[place]
    short = bisect.bisect_left(lengths, bound)
    notes = []
    if short:
        notes.append(f"runs exact attention on {short} of {len(lengths)} samples, those of fewer than {bound} tokens")
    running = [layer for layer in favor.describe(model, bound).layers if layer.runs in registry.FAMILIES]
    if running and all(registry.FAMILIES[layer.runs].selects_keys for layer in running):
        enough = min(max(layer.num_features or 0, layer.selected_keys or 0) for layer in running)
        equal = bisect.bisect_right(lengths, enough) - short
        if equal > 0:
            every = equal == len(lengths)
            fewer = f"; --backends {DEFAULT}:num_features=16,selected_keys=0 has fewer" if every else ""
            many = "ALL" if every else str(equal)
            notes.append(
                f"has no fewer means or selected keys than {many} of {len(lengths)} samples have tokens (up to "
                f"{enough}), and equals exact attention there{fewer}"
            )
    return bound, f"`{name}` {'; it '.join(notes)}" if notes else ""


def report_lines(arguments: argparse.Namespace, samples: Samples, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Writes the report: model, data and lengths, what short samples run, and one line per attention."""
    data, lengths, is_regression = samples.data, samples.all_lengths, samples.data.task.is_regression
    cut = sum(length >= arguments.max_length for length in lengths)
    numbers = ", ".join(f"{split} {len(part)}" for split, part in samples.encoded.items())
    missing = [split for split in data.task.eval_splits if split not in data.evaluation]
    sources = ", ".join(data.sources[split] for split in data.evaluation)
    cells = []
    for row in rows:
        own, first = [f"`{row['attention']}`", f"{100 * row['exact_samples']:.0f}"], row is rows[0]
        for name, value in row["metrics"].items():
            own += [f"{100 * value:.2f}", "" if first else f"{100 * row['difference'][name]:+.2f}"]
        changed = f"{row['changed']:.3f}" if is_regression else f"{100 * row['changed']:.1f} %"
        own += ["", ""] if first else [changed, f"{row['largest_logit_change']:.2g}"]
        cells.append([*own, f"{row['seconds']:.1f}"])
    head = ["Attention", "exact, %", *(cell for name in rows[0]["metrics"] for cell in (name, "difference"))]
    meaning = "mean change of a score" if is_regression else "samples with another prediction than with exact attention"
    return [
        f"# GLUE, {data.task.folder}: a classifier with exact and with linear attention, x 100",
        "",
        f"- Model: {report.local_names([arguments.model_name_or_path])[0]}, as it is: nothing was trained",
        *([f"- Labels: {samples.remark}"] if samples.remark else []),
        f"- Data: {sources}; samples: {numbers}{', the first ones' * (arguments.max_eval_samples is not None)}",
        *([f"- Not there, so not evaluated: {', '.join(missing)}"] if missing else []),
        *([f"- Documents: {arguments.distractors} texts of other samples in each"] if arguments.distractors else []),
        f"- Tokens of a sample: {lengths[0]} to {lengths[-1]}, median {statistics.median(lengths):g}; "
        + (f"{cut} reach max_length = {arguments.max_length}, and lose what is longer" if cut else "none is cut off"),
        *(f"- {row['note']}" for row in rows if row["note"]),
        "",
        *report.table([*head, "changed", "logit", "seconds"], cells),
        "",
        "Score, and its difference from exact attention (more is better). *Exact*: samples that run exact attention,",
        f"because they are short. *Changed*: {meaning}. *Logit*: largest",
        "change of an output. Seconds: all forward passes (less is better).",
    ]


def run(arguments: argparse.Namespace) -> int:
    """Evaluates the classifier and writes NAME.md and NAME.json; returns the exit code."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    path = arguments.model_name_or_path
    names = ("task_name", "data_dir", "label_names", "max_length", "max_eval_samples", "distractors")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    samples = load_samples(path, batch_size=arguments.per_device_eval_batch_size, **options)
    task, lengths, found = samples.data.task, samples.all_lengths, compare(arguments, samples)
    rows = [row.compared(found[0], task.is_regression) for row in found]
    lines = report_lines(arguments, samples, rows)
    content = {
        **report.context_of("favor.eval.glue", arguments.command, ("transformers",), ["--data_dir"], *OUTPUT),
        "task_name": task.name,
        "model": report.local_names([path])[0],
        "labels": dict(zip(task.labels or ("score",), samples.rows, strict=True)),
        "labels_remark": samples.remark,
        "sources": {split: samples.data.sources[split] for split in samples.encoded},
        "samples": {split: len(part) for split, part in samples.encoded.items()},
        "tokens": {"least": lengths[0], "median": statistics.median(lengths), "most": lengths[-1]},
        "max_length": arguments.max_length,
        "rows": rows,
    }
    folder = arguments.results_dir or arguments.output_dir
    report.write(folder, arguments.name, lines, content, [])
    processes().print("\n".join(["", *lines, "", f"written to {folder}"]))
    return 0
