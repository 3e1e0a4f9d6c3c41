r"""Errors of speech recognition against the number of random features: Fig. 4 of the FAVOR# paper.

    python -m favor.eval.wer_by_features --model_name_or_path out/asr --data_dir LibriSpeech \
        --train_split train-clean-100 --eval_splits dev-clean test-clean --max_train_steps 1000 \
        --output_dir out/wer --name small --seeds 0 1

An arm is one attention: exact (sdpa), the mean of the values over time (uniform_mean), or a FAVOR backend with features
and their number M, always with `exact_below` 0. With `--model_name_or_path` every arm starts from that model, trained
with exact attention: it is evaluated as converted, then fine-tuned and evaluated again, the exact arm included. Without
it every arm is trained from new weights. Arguments that are not listed here go to `favor.train.asr`, the same for all
arms. Each arm and seed has a process and a folder of its own below `--output_dir`; started again, the program skips
what is finished there. The report covers all finished arms of the folder, so that several processes may share the arms.

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

EXACT, UNIFORM = "sdpa", "uniform_mean"
DEFAULT_ARMS = (EXACT, UNIFORM, "favor++", "favor#:sderf", "favor#:wderf")
OWN = (
    *("attn_implementation", "num_features", "features", "factorization", "window", "statistics", "exact_below"),
    *("redraw_interval", "seed", "resume", "overwrite_output_dir"),
)
# A model is evaluated as converted: it must be what it was saved as.
OF_THE_MODEL = ("architecture", "ctc_weight")


def parse_arms(text: str, counts: Sequence[int]) -> list[Backend]:
    """The arms that a word means: those of a FAVOR backend without a number have all of `counts`.

    Raises:
        ValueError: for an unknown name, or a number that is none or belongs to no FAVOR backend.
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
    """Arguments of the evaluation, and the rest, which goes to `favor.train.asr`.

    Raises:
        ValueError: for an arm that is none, or a rest that sets what the evaluation sets itself.
    """
    parser = Parser("favor.eval.wer_by_features", __doc__)
    parser.add_argument("--model_name_or_path", help="trained with exact attention; default: each arm from new weights")
    parser.add_argument(
        "--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="NAME[:FEATURES][:M]", help="what is compared"
    )
    parser.add_argument(
        "--num_features", nargs="+", type=int, default=[8, 32, 128], metavar="M", help="of FAVOR arms that name none"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="which seeds")
    parser.add_argument("--output_dir", type=Path, required=True, help="one folder an arm and seed, below it")
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="where the report goes")
    parser.add_argument("--name", required=True, help="the files of the report are called wer_by_features_NAME")
    parser.add_argument("--report_only", action="store_true", help="report on what is finished, run nothing")
    arguments, rest = parser.parse_known_args(argv)
    rest = [word for word in rest if word != "--"]
    own = {*OWN, *(OF_THE_MODEL if arguments.model_name_or_path else ())}
    for word in rest:
        if word.startswith("--") and word[2:].split("=")[0] in own:
            raise ValueError(
                f"{word} is set by the program, or would not be the same for all arms; use --arms, --seeds"
            )
    if arguments.report_only and rest:
        raise ValueError(f"with --report_only nothing is trained, so {shlex.join(rest)} has no use")
    found = [arm for text in arguments.arms for arm in parse_arms(text, arguments.num_features)]
    arguments.arms, arguments.seeds = list(dict.fromkeys(found)), list(dict.fromkeys(arguments.seeds))
    return arguments, rest
