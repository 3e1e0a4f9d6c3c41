r"""Errors of speech recognition against the number of random features: Fig. 4 of the FAVOR# paper.

    python -m favor.eval.papers.wer_by_features --model_name_or_path out/asr --data_dir LibriSpeech \
        --train_split train-clean-100 --eval_splits dev-clean test-clean --max_train_steps 1000 \
        --output_dir out/wer --name small --seeds 0 1

An arm is one attention: exact (sdpa), the mean of the values over time (uniform_mean), or a FAVOR backend with features
and their number M, always with `exact_below` 0. With `--model_name_or_path` every arm, also the exact one, starts from
that model, which was trained with exact attention: it is converted and evaluated, then fine-tuned and evaluated again.
Without this option every arm is trained from new weights. Arguments that are not listed here go to `favor.train.asr`,
equally for all arms. Each arm and seed has a process and a folder of its own below `--output_dir`. If the program is
started again, it skips finished runs. The report covers all finished arms of the folder, so that several processes may
share the arms.

Source: Likhosherstov et al. 2023, "FAVOR#: Sharp Attention Kernel Approximations via New Classes of Positive Random
Features", section 5.3.1: normalised WER for M = 8, 32 and 128.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
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
from favor.eval.papers import wer_report as report
from favor.eval.papers.wer_report import EXACT, UNIFORM
from favor.integrations.adapt.observe import Observation
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.train import asr
from favor.train.common import checkpoint
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import Parser, program
from favor.train.speech import arguments as asr_arguments
from favor.train.speech.arguments import Arguments
from favor.train.speech.data import long_enough
from favor.train.speech.model import make_model, make_processor
from favor.train.speech.sources import load_speech

DEFAULT_ARMS = (EXACT, UNIFORM, "favor++", "favor#:sderf", "favor#:wderf")
OWN = (
    *("attn_implementation", "num_features", "features", "factorization", "window", "statistics", "exact_below"),
    *("redraw_interval", "seed", "resume", "overwrite_output_dir"),
)
# A converted model is evaluated before training, so its architecture must be that of the saved model.
OF_THE_MODEL = ("architecture", "ctc_weight")


def parse_arms(text: str, counts: Sequence[int]) -> list[Backend]:
    """Reads the arms of a word: a FAVOR backend without a number gives one arm for each of `counts`.

    Raises:
        ValueError: for an unknown name, or a number that is not positive or belongs to no FAVOR backend.
    """
    arm = Backend(UNIFORM) if text == UNIFORM else Backend.parse(text)
    if arm.name in (UNIFORM, EXACT, "eager"):
        return [arm]
    if arm.features and arm.name not in ("favor#", "favor_sharp"):
        raise ValueError(f"features are those of favor#, got {text!r}; write {arm.name!r}")
    chosen = counts if arm.num_features is None else [arm.num_features]
    if min(chosen) < 1:
        raise ValueError(f"the number of features must be at least 1, got {min(chosen)} for {text!r}")
    return [replace(arm, num_features=count) for count in chosen]


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.asr`.

    Raises:
        ValueError: for a bad arm, or if the rest sets an option that the evaluation sets itself.
    """
    parser = Parser("favor.eval.papers.wer_by_features", __doc__)
    parser.add_argument("--model_name_or_path", help="model trained with exact attention; default: new weights")
    parser.add_argument(
        "--backends", nargs="+", default=list(DEFAULT_ARMS), metavar="NAME[:FEATURES][:M]", help="arms to compare"
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[8, 32, 128],
        metavar="M",
        help="numbers of features of FAVOR arms that name none",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the runs")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder that gets a folder per arm and seed")
    parser.add_argument("--results_dir", type=Path, default=Path("eval/results"), help="folder of the report")
    parser.add_argument("--name", required=True, help="the files of the report are called wer_by_features_NAME")
    parser.add_argument("--report_only", action="store_true", help="report on finished runs, and run nothing")
    arguments, rest = parser.parse_known_args(argv)
    rest = [word for word in rest if word != "--"]
    own = {*OWN, *(OF_THE_MODEL if arguments.model_name_or_path else ())}
    for word in rest:
        if word.startswith("--") and word[2:].split("=")[0] in own:
            raise ValueError(
                f"{word} is set by the program, or would not be the same for all arms; use --backends, --seeds"
            )
    parser.check_passed_on(rest, Arguments.parser())
    if arguments.report_only and rest:
        raise ValueError(f"with --report_only nothing is trained, so {shlex.join(rest)} has no effect: leave it out")
    found = [arm for text in arguments.backends for arm in parse_arms(text, arguments.num_features)]
    arguments.backends, arguments.seeds = list(dict.fromkeys(found)), list(dict.fromkeys(arguments.seeds))
    return arguments, rest


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
            max_bad=data.limit,
        )
        utterances = long_enough(utterances[: data.max_eval_samples], processor, skipped)
        texts, _ = evaluation.recognise(
            model,
            processor,
            utterances,
            batch_seconds=arguments.train.per_device_train_batch_seconds,
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


cli = program("favor.eval.papers.wer_by_features", main)


if __name__ == "__main__":
    cli()
