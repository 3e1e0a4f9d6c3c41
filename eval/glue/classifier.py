"""A classifier that was fine-tuned before, on the development sets of its task: exact attention and backends."""

from __future__ import annotations

import argparse
import bisect
import re
import time
from collections.abc import Sequence
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
from favor.eval.common.program import device_or_default
from favor.eval.glue.comparison import Row, Samples, content_of, report_lines
from favor.train.common.arguments import DataArguments, ModelArguments
from favor.train.common.pretrained import check_positions, load_exact, load_tokenizer
from favor.train.text.glue_data import get_task, load_glue, with_distractors
from favor.train.text.glue_models import check_samples, is_classifier, label_rows, names_of, tokenized
from favor.train.text.glue_report import glue_metrics, named
from favor_command.saved import read_config

EXACT, DEFAULT = "sdpa", "landmark"
OUTPUT = ("--output_dir", "--results_dir", "--name")


def load_samples(arguments: argparse.Namespace) -> tuple[Samples, str]:
    """Reads the development sets, and finds the labels of the model; also returns a remark on their order.

    Raises:
        ValueError: if the model is no classifier, has other labels than the task, or the data cannot be read.
    """
    path, task = arguments.model_name_or_path, get_task(arguments.task_name)
    config = read_config(path)
    if not config.architectures or not is_classifier(config):
        raise ValueError(
            f"expected a classifier that was fine-tuned on {task.folder}, got {path}, which holds a "
            f"{(config.architectures or ['model that names no class'])[0]}: favor train glue fine-tunes one"
        )
    names = arguments.label_names or names_of(config)
    if len(names) != config.num_labels:
        raise ValueError(f"--label_names needs one name for each of the {config.num_labels} outputs, got {len(names)}")
    rows, remark = label_rows(names, task, path, "if they mean the same, name its outputs in order by --label_names")
    options = DataArguments(
        task_name=task.name, max_length=arguments.max_length, max_eval_samples=arguments.max_eval_samples
    )
    data = load_glue(task.name, arguments.data_dir, train=False)
    data.keep_first(None, options.max_eval_samples)
    texts = {split: with_distractors(part, task, arguments.distractors) for split, part in data.evaluation.items()}
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=path))
    encoded = {split: tokenized(part, task, tokenizer, options) for split, part in texts.items()}
    check_samples(encoded.values(), task, tokenizer)
    return Samples(data, encoded, tokenizer, rows, arguments.per_device_eval_batch_size), remark


def settings_of(arguments: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Lists the backends to compare: name of the row, backend, and the options that are not those of the model.

    A backend that the model was saved with keeps its saved options, others begin with the defaults.

    Raises:
        ValueError: for a backend or an option that does not exist.
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
        feature_family(
            backend, FavorConfig.from_dict(given), list(named_ones)
        )  # refuses what the backend does not read
        for bound in [None] if "exact_below" in options else arguments.exact_below or [None]:
            if bound is None:
                found.append((text, backend, given))
            else:
                value = bound if bound == "auto" else int(bound)
                found.append((f"{text}, exact_below {bound}", backend, given | {"exact_below": value}))
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
        print(f"{name}: {scores}, {rows[-1].seconds:.1f} s", flush=True)
    return rows


def evaluate(model: Any, samples: Samples, name: str) -> Row:
    """Evaluates the model with its present attention.

    Samples of about the same length share a batch, and no batch has both samples that run exact attention because they
    are short and samples that do not.

    Args:
        model: the classifier.
        samples: of the task.
        name: of the row.
    """
    is_exact = model.config._attn_implementation == EXACT
    bound, note = (0, "") if is_exact else shortness(model, samples.all_lengths, name)
    task = samples.data.task
    metrics: dict[str, float] = {}
    logits, seconds, exact = {}, 0.0, 0
    for split, encoded in samples.encoded.items():
        lengths = samples.lengths(split)
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

    Args:
        model: the classifier.
        samples: gives tokenizer and labels.
        encoded: token numbers of the split.
        groups: the samples of each batch.

    Raises:
        FloatingPointError: if a logit is not finite.
    """
    plain = encoded.remove_columns("label")
    collate: Any = DataCollatorWithPadding(samples.tokenizer)
    found = torch.empty(len(plain), len(samples.rows))
    model(**collate([plain[place] for place in groups[-1]]).to(model.device))  # warms up
    seconds = 0.0
    for group in groups:
        inputs = collate([plain[place] for place in group]).to(model.device)
        start = time.perf_counter()
        found[group] = model(**inputs).logits[:, samples.rows].float().cpu()
        seconds += time.perf_counter() - start
    if not found.isfinite().all():
        raise FloatingPointError(f"a logit of {type(model).__name__} is not finite")
    return found, seconds


def shortness(model: Any, lengths: Sequence[int], name: str) -> tuple[int, str]:
    """Finds how long a sample must be for the backend to run, and says what happens to shorter ones.

    Args:
        model: with the backend.
        lengths: tokens of the samples, in ascending order.
        name: of the row.

    Returns:
        The number of tokens below which every layer runs softmax attention, and a note that is empty if no sample does.
    """

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


def run(arguments: argparse.Namespace) -> int:
    """Evaluates the classifier and writes NAME.md and NAME.json; returns the exit code."""
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    samples, remark = load_samples(arguments)
    rows = compare(arguments, samples)
    lines = report_lines(arguments, samples, rows, remark)
    command = report.shown_command("favor.eval.glue", report.local_names(arguments.command), ["--data_dir"], OUTPUT)
    content = report.context(command, ("transformers",)) | content_of(arguments, samples, rows, remark)
    folder = arguments.results_dir or arguments.output_dir
    report.write(folder, arguments.name, lines, content, [])
    print("\n".join(["", *lines, "", f"written to {folder}"]))
    return 0
