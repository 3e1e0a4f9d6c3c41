r"""GLUE: a classifier with exact and linear attention, or trainings: tasks x backends x seeds.

    python -m favor.eval.glue --model_name_or_path DIR --task_name mrpc --data_dir DIR --exact_below auto 0

With `--task_name` the model is a classifier that was fine-tuned on this task, anywhere. Nothing is trained: its scores
with exact attention and with each backend stand side by side. Labels are ordered by their names.

    python -m favor.eval.glue --data_dir DIR --tasks mrpc rte --backends sdpa favor+ favor#:saderf \
        --seeds 0 1 2 --output_dir out/glue --results_dir eval/results --exact_below 0 --num_train_epochs 3

Without it a table in the layout of the FAVOR# paper's Table 1 is made. Each (task, backend, seed) is one training run
of `favor.train.glue` in a process of its own, in a folder of its own below `--output_dir`. If the program is started
again, it skips finished runs. With `--checkpoints DIR` nothing is trained: every saved run below DIR (of the given
tasks, backends and seeds) is loaded again, evaluated, and compared with the measurements of its training. `--adapted`
adds models of `favor.train.distill` as rows. Unknown arguments are passed on to `favor.train.glue`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common import launch
from favor.eval.common.pretrained import PACKAGE
from favor.eval.glue import table
from favor.train.common.program import Parser
from favor.train.options.glue import Arguments

DEFAULT_BACKENDS = ("sdpa", "favor+", "favor++", "favor#")
TRAINING = ("tasks", "adapted", "seeds", "checkpoints", "task_options", "num_processes", "tolerance")
OWN_ARGUMENTS = ("--task_name", "--attn_implementation", "--features", "--seed")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.glue`.

    Raises:
        ValueError: if the rest sets an option that the evaluation varies itself.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser("favor.eval.glue", __doc__)
    tasks = [column.task for column in table.COLUMNS]
    parser.add_argument("--model_name_or_path", help=f"default: the MiniLM BERT in the package {PACKAGE}")
    parser.add_argument(
        "--data_dir", help="folder of GLUE in its official TSV layout; default: that of favor.train.glue"
    )
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks, metavar="TASK", help="tasks to run")
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME[:FEATURES][:M]",
        help=f"default: {' '.join(DEFAULT_BACKENDS)}, or none with --adapted; with --checkpoints: all; with "
        "--task_name: the one that the model was saved with, else landmark, and NAME:OPTION=VALUE,... is possible",
    )
    parser.add_argument(
        "--adapted",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of favor.train.distill: models that were adapted to their attention, each a row of its own",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0; with --checkpoints: all")
    parser.add_argument("--output_dir", type=Path, default=Path("out/glue"), help="folder that gets one folder per run")
    parser.add_argument(
        "--results_dir", type=Path, help="folder of glue.md, .json and .png; default: the output folder"
    )
    parser.add_argument("--name", help="file name of the results, without ending; default: glue, or glue_TASK")
    parser.add_argument(
        "--checkpoints", type=Path, help="evaluate the saved runs below this folder instead of training"
    )
    parser.add_argument(
        "--task_options",
        nargs="+",
        default=[],
        metavar="TASK:NAME=VALUE",
        help="training options of one task, for example cola:num_train_epochs=5; they replace common ones",
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="allowed difference of a reloaded run's metric (a fraction)"
    )
    parser.add_argument("--num_processes", type=int, default=1, help="processes (GPUs) of accelerate launch")
    parser.add_argument("--note", default="", help="a sentence for the head of the report")
    spelled = {word.partition("=")[0].replace("-", "_") for word in words}
    if spelled & {"__task_name", "__help", "_h"}:
        _add_classifier(parser)
    arguments, rest = parser.parse_known_args(words)
    arguments.command = words
    if "__task_name" in spelled:
        return _checked(parser, arguments, rest), []
    arguments.name = arguments.name or "glue"
    numbered = any(launch.Backend.parse(text).num_features for text in arguments.backends or ())
    own = (*OWN_ARGUMENTS, "--num_features") if numbered else OWN_ARGUMENTS
    given = [
        word.split("=")[0] for word in (*rest, *(f"--{text.partition(':')[2]}" for text in arguments.task_options))
    ]
    for word in given:
        if word in own:
            raise ValueError(f"{word} is set by favor.eval.glue itself; use --tasks, --backends or --seeds")
    parser.check_passed_on(given, Arguments.parser())
    if arguments.checkpoints:
        unused = [*rest, *arguments.task_options]
        if unused or arguments.model_name_or_path or arguments.adapted or arguments.num_processes != 1:
            raise ValueError(
                "with --checkpoints nothing is trained: --model_name_or_path, --adapted, --task_options, "
                "--num_processes and arguments of favor.train.glue have no effect, so leave them out; got "
                f"{shlex.join(unused) or 'one of the first four'}"
            )
    return arguments, rest


def _add_classifier(parser: Parser) -> None:
    """Adds the options of a classifier; without `--task_name` those that remain belong to `favor.train.glue`."""
    group = parser.add_argument_group("a classifier that was fine-tuned before")
    add = group.add_argument
    add(
        "--task_name",
        help="evaluate --model_name_or_path on its task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli",
    )
    add(
        "--exact_below",
        nargs="+",
        metavar="N",
        help="one row for each: backends run exact attention on fewer tokens than this; 0: never; auto (default): by "
        "speed",
    )
    add(
        "--label_names", nargs="+", metavar="NAME", help="names of the model's outputs, in order, if its own do not say"
    )
    add("--max_length", type=int, default=128, help="greatest number of tokens of a sample; the rest is cut off")
    add("--max_eval_samples", type=int, help="evaluate on this number of samples only, the first ones")
    add("--per_device_eval_batch_size", type=int, default=64, help="samples of a forward pass")
    add("--distractors", type=int, default=0, help="texts of other samples around the one that holds the answer")
    add("--skip_bad_rows", action="store_true", help="leave out malformed rows of TSV files and count them")


def _checked(parser: Parser, arguments: argparse.Namespace, rest: list[str]) -> argparse.Namespace:
    """Checks the arguments for a classifier; raises ValueError."""
    used = [f"--{name}" for name in TRAINING if getattr(arguments, name) != parser.get_default(name)]
    if used:
        raise ValueError(
            f"with --task_name a classifier is evaluated and nothing is trained: {', '.join(used)} would have no "
            "effect, so leave it out"
        )
    parser.refuse(rest)
    if arguments.model_name_or_path is None:
        raise ValueError("--task_name evaluates a classifier: name it by --model_name_or_path")
    for value in arguments.exact_below or ():
        if value != "auto" and not value.isdecimal():
            raise ValueError(f"--exact_below must be a number of tokens or auto, got {value!r}")
    if min(arguments.max_length, arguments.per_device_eval_batch_size) < 1 or arguments.distractors < 0:
        raise ValueError("--max_length and --per_device_eval_batch_size must be at least 1, --distractors at least 0")
    arguments.name = arguments.name or f"glue_{arguments.task_name.lower()}"
    return arguments
