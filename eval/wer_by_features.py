"""Errors of speech recognition against the number of random features: Fig. 4 of the FAVOR# paper."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from favor.eval import asr as evaluation
from favor.eval.approximation.heads import mean_of_values
from favor.eval.common import launch
from favor.eval.common.launch import Backend
from favor.eval.options.wer_by_features import (
    UNIFORM,
    parse_arguments,
)
from favor.eval.speech import wer_report as report
from favor.integrations.adapt.observe import Observation
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.train import asr
from favor.train.common import checkpoint
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import program
from favor.train.speech import arguments as asr_arguments
from favor.train.speech.data import long_enough
from favor.train.speech.model import make_model, make_processor
from favor.train.speech.sources import load_speech


def uniform_mean_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention "uniform_mean": every query gets the mean of the values that it may see.

    Args:
        module: the attention module.
        query, key: `[B, H, L, d]` and `[B, Hk, S, d]`; only their shapes matter.
        value: `[B, Hk, S, dv]`.
        attention_mask: from `favor_mask`; padded frames do not count.
        scaling: not used, since there are no logits.
        dropout: probability that a value is left out, as in the FAVOR backends.
        is_causal: if causal, the mean is over the frames up to that of the query. Default: the mask or the module
            decides.
        **kwargs: refused if they would change the result.

    Returns:
        `[B, L, H, dv]`, contiguous, and None.
    """
    refuse(kwargs, module)
    sees = visibility(module, attention_mask, is_causal, (query.shape[0], query.shape[2], key.shape[2]))
    if dropout > 0:
        value = value * nn.functional.dropout(value.new_ones(*value.shape[:-1], 1), dropout)
    seen = Observation(0, module, query, key, value, sees.padding, sees.causal, 1.0, output=value)
    return mean_of_values(seen).transpose(1, 2).contiguous(), None


def register_uniform_mean() -> None:
    """Registers "uniform_mean" with transformers, in this process."""
    AttentionInterface.register(UNIFORM, uniform_mean_forward)
    AttentionMaskInterface.register(UNIFORM, favor_mask)


def training_words(arm: Backend) -> list[str]:
    """Writes an arm as arguments of `favor.train.asr`; an estimator runs for short audio too, not exact attention."""
    return [*arm.arguments(), *([] if arm.num_features is None else ["--exact_below", "0"])]


def evaluate_converted(words: Sequence[str], seed: int) -> dict[str, float]:
    """Measures error rates in percent of a run's model before its training, `{split}_wer` and `{split}_cer`."""
    arguments = asr_arguments.Arguments.parse(list(words))
    data, folder = arguments.data, Path(arguments.train.output_dir)
    processor = make_processor(arguments, ())
    model = make_model(arguments, processor, seed).to(PartialState().device)
    scores = {}
    for split in data.eval_splits:
        utterances, skipped = load_speech(
            data.data_dir or asr_arguments.HUB,
            split,
            prepared=folder / "prepared" / split,
            config=data.dataset_config_name,
            max_bad=data.limit,
            resample=data.resample,
        )
        utterances = long_enough(utterances[: data.max_eval_samples], processor, skipped)
        texts, _ = evaluation.recognise(
            model,
            processor,
            utterances,
            batch_seconds=arguments.train.per_device_train_batch_seconds,
            resample=data.resample,
        )
        pairs = list(zip((utterance.text for utterance in utterances), texts, strict=True))
        scores.update({f"{split}_{name}": value for name, value in asr.errors(pairs).items()})
    return scores


def train(words: Sequence[str]) -> float:
    """Runs `favor.train.asr` once; returns its seconds."""
    register_uniform_mean()
    start = time.perf_counter()
    asr.main(list(words))
    return time.perf_counter() - start


def in_own_process(function: Callable[[Sequence[str]], float], words: Sequence[str]) -> float:
    """Calls a function in a new process, so that the peak of its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, words).result()


def run_arm(arm: Backend, seed: int, arguments: argparse.Namespace, common: Sequence[str]) -> bool:
    """Runs the unfinished parts of an arm; returns whether there were any.

    Args:
        arm: the attention.
        seed: of the training and of the random features.
        arguments: of the program.
        common: arguments of `favor.train.asr` that all arms share.
    """
    folder = arguments.output_dir / arm.slug / f"seed_{seed}"
    place, results = folder / report.RECORD, folder / checkpoint.RESULTS
    record: dict[str, Any] = {
        "arm": arm.label,
        "backend": replace(arm, num_features=None).label,
        "num_features": arm.num_features,
        "seed": seed,
        "arguments": list(common),
    }
    before = json.loads(place.read_text()) if place.exists() else {}
    record = {**record, "machine": f"{launch.machine()}, {torch.get_num_threads()} threads", **before}
    converts = arguments.model_name_or_path is not None and "converted" not in record
    if results.exists() and not converts:
        return False
    words = [*common, *training_words(arm), "--seed", str(seed), "--output_dir", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(place, record)
    if converts:
        record["converted"] = evaluate_converted(words, seed)
        checkpoint.write_json(place, record)
    if not results.exists():
        again = ["--resume"] if checkpoint.checkpoints(folder) else []
        seconds = in_own_process(train, [*words, *again])
        # The seconds of a training that was interrupted are not known.
        record["wall_seconds"] = None if again else seconds
        checkpoint.write_json(place, record)
    return True


def run_all(arguments: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Runs the unfinished arms, seed by seed, and reports after each run; returns the names of failed runs."""
    hold(arguments.output_dir)
    register_uniform_mean()
    common = list(rest)
    if arguments.model_name_or_path is not None:
        evaluation.speech_config(arguments.model_name_or_path)
        common = ["--model_name_or_path", arguments.model_name_or_path, *rest]
    report.records(arguments.output_dir, common)
    for arm in arguments.backends:
        asr_arguments.Arguments.parse([*common, *training_words(arm), "--output_dir", str(arguments.output_dir)])
    failures = []
    cells = [(seed, arm) for seed in arguments.seeds for arm in arguments.backends]
    for number, (seed, arm) in enumerate(cells, 1):
        name = f"[{number}/{len(cells)}] {arm.label} seed {seed}"
        try:
            ran = run_arm(arm, seed, arguments, common)
        except (FloatingPointError, BrokenProcessPool) as error:
            failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        print(f"{name}: {'finished' if ran else 'was finished before'}", flush=True)
        if ran and number < len(cells):
            report.write(arguments.output_dir, arguments.results_dir, arguments.name)
    return failures


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if an arm failed.

    Raises:
        ValueError: for arguments, a model or audio that cannot be used; the message says which and why.
    """
    arguments, rest = parse_arguments(sys.argv[1:] if argv is None else argv)
    failures = [] if arguments.report_only else run_all(arguments, rest)
    if arguments.report_only or report.read(arguments.output_dir):
        print("\n".join(report.write(arguments.output_dir, arguments.results_dir, arguments.name)))
    if failures:
        print("failed: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures else 0


cli = program("favor.eval.wer_by_features", main)


if __name__ == "__main__":
    cli()
