r"""Errors of speech recognition against the number of random features: Fig. 4 of the FAVOR# paper.

    python -m favor.eval.wer_by_features --model_name_or_path out/asr --data_dir LibriSpeech \
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
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from favor.eval.common.launch import Backend
from favor.train.common.program import Parser
from favor.train.speech.arguments import Arguments

EXACT, UNIFORM = "sdpa", "uniform_mean"
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
    parser = Parser("favor.eval.wer_by_features", __doc__)
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
