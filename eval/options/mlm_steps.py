"""Loss of masked words against training steps, for each attention, from the same start: the idea of FAVOR#'s Table 2.

    python -m favor.eval.mlm_steps out/start --train_file book.txt --validation_file other.txt --backends sdpa favor+ \\
        --max_train_samples 800 --num_train_epochs 6 --max_length 256 --num_features 64 --exact_below 0

OUT/start is a masked language model that was trained with exact attention. Each backend continues it by
`favor.train.mlm`, in a process of its own and with the same samples, masks and seed. The loss on the evaluation text is
taken before the training and after every epoch, so `--max_train_samples` says how far apart these points are. Unknown
arguments are passed on to `favor.train.mlm`. If the program is started again, it skips finished runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common import launch
from favor.train.common.program import Parser
from favor.train.mlm import Arguments

OWN = ("--attn_implementation", "--features", "--output_dir", "--resume", "--overwrite_output_dir")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.mlm`.

    Raises:
        ValueError: if the rest sets an option that the evaluation sets itself, or for a backend that is none.
    """
    parser = Parser("favor.eval.mlm_steps", __doc__)
    add = parser.add_argument
    parser.add_place("model_name_or_path", "model", "folder of a masked language model")
    add(
        "--backends",
        nargs="+",
        metavar="NAME[:FEATURES][:M]",
        default=["sdpa", "favor+", "favor++", "favor#:sderf", "favor#:wderf", "landmark"],
        help="default: %(default)s",
    )
    add("--output_dir", type=Path, default=Path("out/mlm_steps"), help="folder that gets one folder per run")
    add("--results_dir", type=Path, help="folder of NAME.md, .json and .png; default: the output folder")
    add("--name", default="mlm_steps", help="file name of the results, without ending")
    arguments, rest = parser.parse_known_args(argv)
    arguments.command = list(sys.argv[1:] if argv is None else argv)
    arguments.backends = [launch.Backend.parse(text) for text in arguments.backends]
    for word in rest:
        if word.split("=")[0] in OWN:
            raise ValueError(f"{word} is set by favor.eval.mlm_steps itself; use --backends or --output_dir")
    parser.check_passed_on(rest, Arguments.parser())
    return arguments, rest
